/* What follows from the options: the model, its name, the engine's part of them. See options.h. */
#include "server/options/options.h"

#include "kernels/utf8.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static bool is_model(const char *path)
{
    char config[OPTIONS_PATH_MAX + 16];
    snprintf(config, sizeof config, "%s/config.json", path);
    return access(config, F_OK) == 0;
}

/* Cuts the last part off path. */
static void path_up(char *path)
{
    char *const slash = strrchr(path, '/');
    if (slash) {
        *slash = '\0';
    }
}

static enum err_code find_shipped_model(char path[OPTIONS_PATH_MAX], struct err *err)
{
    char folder[OPTIONS_PATH_MAX - 64];
    const ssize_t n = readlink("/proc/self/exe", folder, sizeof folder - 1);
    if (n <= 0) {
        return err_set(err, ERR_IO, "cannot tell where the program is: give --model");
    }
    folder[n] = '\0';
    path_up(folder);
    path_up(folder);
    snprintf(path, OPTIONS_PATH_MAX, "%s/share/pkmserve/models/demo", folder);
    /* build/pkmserve and variants like build/asan/pkmserve: the source tree is one or two up. */
    for (int level = 0; level < 2 && !is_model(path); level++) {
        snprintf(path, OPTIONS_PATH_MAX, "%s/models/demo", folder);
        path_up(folder);
    }
    if (!is_model(path)) {
        return err_set(err, ERR_IO, "the shipped model is not beside the program: give --model");
    }
    return ERR_OK;
}

/* The last part of the model's path, as far as it fits. A path may hold any bytes, but the name is
 * in JSON and in metrics, and clients send it back: what is no character becomes a '?'. */
static void name_model(struct options *options)
{
    const char *const path = options->model;
    size_t end = strlen(path);
    while (end > 1 && path[end - 1] == '/') {
        end--;
    }
    size_t at = end;
    while (at > 0 && path[at - 1] != '/') {
        at--;
    }
    char *const name = options->served_name_text;
    size_t n = 0;
    while (at < end) {
        const struct utf8_char c = utf8_next(path + at, end - at);
        const bool valid = c.status == UTF8_CHAR;
        const size_t bytes = valid ? (size_t)c.bytes : 1;
        if (n + bytes > OPTIONS_MODEL_NAME_MAX) {
            break;
        }
        memcpy(name + n, valid ? path + at : "?", bytes);
        n += bytes;
        at += bytes;
    }
    name[n] = '\0';
    options->served_model_name = name;
}

/* Refuses what is no directory. Other faults of a model are found by its reader. */
static enum err_code check_model(const char *model, struct err *err)
{
    struct stat status;
    if (stat(model, &status) != 0) {
        return errno != ENOENT ? ERR_OK
                               : err_set(err, ERR_IO,
                                         "%s: there is no such directory; a model is a directory "
                                         "with config.json and model.safetensors",
                                         model);
    }
    if (!S_ISREG(status.st_mode)) {
        return ERR_OK;
    }
    const char *const slash = strrchr(model, '/');
    return err_set(err, ERR_IO, "%s: a file; a model is the directory that it is in: give %.*s",
                   model, slash != NULL ? (int)(slash - model) : 1, slash != NULL ? model : ".");
}

enum err_code options_resolve(struct options *options, struct err *err)
{
    if (options->model[0] == '\0') {
        if (find_shipped_model(options->model_path, err) != ERR_OK) {
            return err->code;
        }
        options->model = options->model_path;
    }
    if (check_model(options->model, err) != ERR_OK) {
        return err->code;
    }
    if (options->served_model_name[0] == '\0') {
        name_model(options);
    }
    return ERR_OK;
}

/* With auto this value does not matter: value_auto overrules it. */
static enum placement placement_of(const char *name)
{
    if (strcmp(name, "device") == 0) {
        return PLACEMENT_DEVICE;
    }
    return strcmp(name, "host") == 0 ? PLACEMENT_HOST : PLACEMENT_MMAP;
}

struct engine_options options_engine(const struct options *options)
{
    return (struct engine_options){
        .model_dir = options->model,
        .tokenizer_path = options->tokenizer[0] ? options->tokenizer : NULL,
        .backend = {.device = options->device,
                    .n_thread = options->threads,
                    .fast_math = !options->deterministic,
                    .gpu = options->gpu},
        .model = {.dtype = options->dtype,
                  .cache_dtype = options->kv_cache_dtype,
                  .int8_max_loss = options->force_int8 ? 0 : MODEL_INT8_LOSS,
                  .value_placement = placement_of(options->memory_placement),
                  .value_auto = strcmp(options->memory_placement, "auto") == 0,
                  .check = strcmp(options->check, "off") != 0,
                  .check_files = strcmp(options->check, "full") == 0},
        .max_model_len = options->max_model_len,
        .max_seqs = options->max_seqs,
        .max_batch_tokens = options->max_batch_tokens,
        .bulk_step_ms = options->bulk_step_ms,
        .max_queue = options->max_queue,
        .max_queue_tokens = options->max_queue_tokens,
        .kv_tokens = options->kv_tokens,
        .max_logprobs = options->max_logprobs,
        .max_request_bytes = options->max_request_bytes,
        .memory_trace_bytes = options->memory_trace_bytes,
        .overlay_bytes = options->admin_port > 0 || options->overlay_dir[0] || options->overlay[0]
                             ? options->overlay_bytes
                             : 0,
        .overlay_dir = options->overlay_dir[0] ? options->overlay_dir : NULL,
        .memory_counts = options->memory_counts,
        .memory_trace = strcmp(options->memory_trace, "off") != 0,
        .prefix_cache = strcmp(options->prefix_cache, "off") != 0,
    };
}

int64_t options_score_positions(const struct options *options)
{
    return options->max_score_positions > 0
               ? options->max_score_positions
               : OPTIONS_POSITIONS_PER_TOKEN * options->max_score_tokens;
}
