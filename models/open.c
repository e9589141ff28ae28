/* Opens a model directory: reads its configuration, opens its tensors, and chooses the types it is
 * computed and kept in. model.c does the rest. */
#include "models/config.h"
#include "models/generation_config.h"
#include "models/identity.h"
#include "models/network.h"
#include "models/tensors.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void fill_info(struct model_info *info, const struct config *config)
{
    (void)snprintf(info->family, sizeof info->family, "%s", config->family->name);
    info->n_vocab = config->n_vocab;
    info->d_model = config->d_model;
    info->n_layer = config->n_layer;
    info->n_head = config->n_head;
    info->d_ff = config->d_ff;
    info->d_attention = config->n_head * config->d_head;
    info->n_kv_head = config->n_kv_head;
    info->gated = config->gated;
    info->context = config->context;
    info->n_persistent = config->n_persistent;
    info->act = config->act;
    info->tie_output = config->tie_output;
    info->n_cutoff = config->n_cutoff;
    info->bos_id = config->bos_id;
    info->eos_id = config->eos_id;
    info->ends = config->ends;
    info->pad_id = config->pad_id;
    info->unk_id = config->unk_id;
    info->add_bos = config->add_bos;
    memcpy(info->tokenizer, config->tokenizer, sizeof info->tokenizer);
    info->n_lang = config->n_lang;
    memcpy(info->lang, config->lang, sizeof info->lang);
    info->n_memory = config->n_memory;
    for (int m = 0; m < config->n_memory; m++) {
        info->memory[m] = config->memory[m].info;
    }
}

enum err_code model_info_read(struct model_info *info, const char *dir, struct err *err)
{
    struct config *const config = calloc(1, sizeof *config);
    if (config == NULL) {
        return err_set(err, ERR_MEMORY, "%s: no memory to open it", dir);
    }
    const enum err_code code = config_read(config, dir, err);
    *info = (struct model_info){0};
    if (code == ERR_OK) {
        fill_info(info, config);
    }
    free(config);
    return code;
}

/* The dtype to compute with. F16 files are computed in F32 where that is not much slower or the
 * backend has no F16 products: BF16 loses three of their bits. */
static enum err_code choose_dtype(struct model_info *info, const struct backend *be,
                                  const char *wanted, struct err *err)
{
    if (strcmp(wanted, "auto") == 0) {
        info->dtype = info->file_dtype == DTYPE_I8     ? be->has_int8 ? DTYPE_I8 : DTYPE_BF16
                      : info->file_dtype == DTYPE_BF16 ? DTYPE_BF16
                      : !be->prefers_bf16              ? DTYPE_F32
                      : info->file_dtype == DTYPE_F16 && be->has_f16 ? DTYPE_F16
                                                                     : DTYPE_BF16;
    } else if (strcmp(wanted, "f32") == 0) {
        info->dtype = DTYPE_F32;
    } else if (strcmp(wanted, "bf16") == 0) {
        info->dtype = DTYPE_BF16;
    } else if (strcmp(wanted, "f16") == 0 && be->has_f16) {
        info->dtype = DTYPE_F16;
    } else if (strcmp(wanted, "f16") == 0) {
        return err_set(err, ERR_UNSUPPORTED,
                       "dtype: %s does not compute in f16, only a GPU does; use auto or f32, which "
                       "take models stored in F16 too",
                       be->name);
    } else if (strcmp(wanted, "int8") == 0 && be->has_int8) {
        info->dtype = DTYPE_I8;
    } else if (strcmp(wanted, "int8") == 0) {
        return err_set(err, ERR_UNSUPPORTED,
                       "dtype: %s does not compute in int8; use auto or bf16, which take models "
                       "stored in int8 too",
                       be->name);
    } else {
        return err_set(err, ERR_ARGUMENT,
                       "dtype: %.40s is unknown; use auto, f32, bf16, int8 or f16", wanted);
    }
    return ERR_OK;
}

/* The dtype of keys and values. Two columns of BF16 share a word. */
static enum err_code choose_cache_dtype(struct model_info *info, const char *wanted,
                                        struct err *err)
{
    const int d_head = info->d_attention / info->n_head;
    if (wanted == NULL || strcmp(wanted, "auto") == 0) {
        info->cache_dtype = info->dtype == DTYPE_F32 || d_head % 2 != 0 ? DTYPE_F32 : DTYPE_BF16;
    } else if (strcmp(wanted, "f32") == 0) {
        info->cache_dtype = DTYPE_F32;
    } else if (strcmp(wanted, "bf16") == 0 && d_head % 2 == 0) {
        info->cache_dtype = DTYPE_BF16;
    } else if (strcmp(wanted, "bf16") == 0) {
        return err_set(
            err, ERR_UNSUPPORTED,
            "kv_cache_dtype: bf16 holds columns in pairs, and a head of this model has %d "
            "(%d in %d heads); use auto or f32",
            d_head, info->d_attention, info->n_head);
    } else {
        return err_set(err, ERR_ARGUMENT, "kv_cache_dtype: %.40s is unknown; use auto, f32 or bf16",
                       wanted);
    }
    return ERR_OK;
}

/* Decides where the value tables go. */
static enum err_code choose_placement(struct model_options *options, const struct backend *be,
                                      struct err *err)
{
    if (options->value_auto) {
        options->value_placement = be->is_host ? PLACEMENT_MMAP : PLACEMENT_DEVICE;
    }
    if (options->value_placement == PLACEMENT_MMAP && !be->is_host) {
        return err_set(err, ERR_UNSUPPORTED,
                       "memory placement: %s does not read value tables in place from the file "
                       "(mmap); use device, or host where its memory is too small for them",
                       be->name);
    }
    return ERR_OK;
}

static enum err_code choose(struct model_info *info, const struct backend *be,
                            const struct tensors *tensors, const struct model_options *options,
                            struct err *err)
{
    info->file_dtype = tensors_main_dtype(tensors);
    for (int i = 0; i < tensors_n(tensors); i++) {
        info->file_bytes += (int64_t)tensors_at(tensors, i)->bytes;
    }
    enum err_code code = choose_dtype(info, be, options->dtype, err);
    if (code == ERR_OK) {
        code = choose_cache_dtype(info, options->cache_dtype, err);
    }
    if (code == ERR_OK && options->check) {
        code = tensors_check(tensors, options, err);
    }
    return code;
}

static enum err_code check_files(const char *dir, const struct model_options *options,
                                 struct err *err)
{
    struct identity *identity = NULL;
    enum err_code code = identity_read(&identity, dir, err);
    if (code == ERR_OK && identity != NULL) {
        code = identity_check_files(identity, dir, options, err);
    }
    identity_free(identity);
    return code;
}

enum err_code model_open(struct model **model, struct backend *be, const char *dir,
                         const struct model_options *options, struct err *err)
{
    *model = NULL;
    struct model_options chosen = *options;
    enum err_code code = choose_placement(&chosen, be, err);
    if (code == ERR_OK && options->check_files) {
        code = check_files(dir, options, err);
    }
    if (code != ERR_OK) {
        return code;
    }
    struct tensors *tensors = NULL;
    struct model_info *const info = calloc(1, sizeof *info);
    struct config *const config = calloc(1, sizeof *config);
    if (info == NULL || config == NULL) {
        code = err_set(err, ERR_MEMORY, "%s: no memory to open it", dir);
        goto done;
    }
    code = config_read(config, dir, err);
    if (code == ERR_OK) {
        code = generation_config_read(&info->sampling, dir, err);
    }
    if (code == ERR_OK) {
        code = tensors_open(&tensors, dir, err);
    }
    if (code != ERR_OK) {
        goto done;
    }
    if (options->progress != NULL) {
        options->progress(options->progress_ctx, "map", 1.0);
    }
    fill_info(info, config);
    info->value_placement = chosen.value_placement;
    code = choose(info, be, tensors, &chosen, err);
    if (code == ERR_OK) {
        code = model_new(model, be, config, tensors, &chosen, info, err);
    } else {
        tensors_close(tensors);
    }
done:
    free(info);
    free(config);
    return code;
}
