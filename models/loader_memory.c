/* Memories for families: query layers with their batch norms folded in, keys and slot maps. See
 * loader.h. */
#include "models/loader_inside.h"

#include <math.h>
#include <stdlib.h>

#define BATCH_NORM_EPS 1e-5

/* Scales the rows of matrix and fills bias, which holds the projection's own, by the batch norm
 * name. */
static void fold_batch_norm(struct loader *loader, float *matrix, float *bias, int64_t n_out,
                            int64_t n_in, const struct name *name)
{
    static const char *const part[4] = {"weight", "bias", "running_mean", "running_var"};
    float *const norm = host_floats(loader, 4 * n_out, name);
    for (int p = 0; p < 4; p++) {
        const struct name part_name = name_join(name, part[p]);
        (void)read_vector(loader, norm == NULL ? NULL : norm + p * n_out, n_out, &part_name);
    }
    for (int64_t r = 0; r < n_out && loader->code == ERR_OK; r++) {
        const double gamma = (double)norm[r];
        const double beta = (double)norm[n_out + r];
        const double mean = (double)norm[2 * n_out + r];
        const double var = (double)norm[3 * n_out + r];
        if (!(var >= 0)) { /* also NaN */
            loader->code = err_set(loader->err, ERR_NUMERICAL,
                                   "tensor %s.running_var: element %lld is %g, but a variance is "
                                   "never negative",
                                   name->text, (long long)r, var);
            break;
        }
        const double scale = gamma / sqrt(var + BATCH_NORM_EPS);
        for (int64_t c = 0; c < n_in; c++) {
            matrix[r * n_in + c] = (float)(scale * (double)matrix[r * n_in + c]);
        }
        bias[r] = (float)(scale * ((double)bias[r] - mean) + beta);
    }
    if (loader->code == ERR_OK) {
        loader->info->n_param -= 2 * n_out; /* running statistics are no parameters */
    }
    free(norm);
}

static struct name name_number(const struct name *prefix, int number)
{
    char text[16];
    (void)snprintf(text, sizeof text, "%d", number);
    return name_join(prefix, text);
}

/* Makes a weight of each n_out rows of the host matrix [n·n_out, n_in]. */
static void make_nets(struct loader *loader, struct nets *nets, float *matrix, const char *name)
{
    nets->first = loader->store->n_weight;
    for (int i = 0; i < nets->n && loader->code == ERR_OK; i++) {
        const struct tensor host =
            tensor_make(matrix + i * nets->n_out * nets->n_in, nets->n_out, nets->n_in, DTYPE_F32);
        (void)loader_f32_weight(loader, &host, WEIGHT_MATRIX, 1, name);
    }
}

void loader_query(struct loader *loader, struct nets *nets, int at, bool has_bias, bool batch_norm,
                  const char *format, ...)
{
    struct name prefix;
    FORMAT_NAME(&prefix, format);
    const struct name name = name_number(&prefix, at);
    const struct name norm_name = name_number(&prefix, at + 1);
    const struct name weight_name = name_join(&name, "weight");
    const struct name bias_name = name_join(&name, "bias");
    const int64_t dim[2] = {nets->n * nets->n_out, nets->n_in};
    const struct safetensors_entry *const entry = loader_take(loader, &weight_name, dim, 2, FLOATS);
    float *const matrix = host_floats(loader, dim[0] * dim[1], &name);
    float *const bias = host_floats(loader, dim[0], &name); /* zero where there is none */
    if (loader->code == ERR_OK) {
        tensors_widen(matrix, entry);
        tensors_release(entry);
    }
    if (has_bias) {
        (void)read_vector(loader, bias, dim[0], &bias_name);
    }
    if (batch_norm) {
        fold_batch_norm(loader, matrix, bias, dim[0], dim[1], &norm_name);
    }
    if (loader->code == ERR_OK) {
        make_nets(loader, nets, matrix, weight_name.text);
    }
    if (loader->code == ERR_OK && (has_bias || batch_norm)) {
        nets->bias = store_words(loader->store, bias, 1, dim[0], DTYPE_F32);
    }
    free(matrix);
    free(bias);
}

void loader_columns(struct loader *loader, struct nets *nets, const int32_t *column,
                    const char *purpose)
{
    struct name name;
    (void)snprintf(name.text, sizeof name.text, "%s", purpose);
    CHECK(nets->n == 1);
    float *const matrix = host_floats(loader, nets->n_out * nets->n_in, &name);
    if (matrix != NULL) {
        for (int64_t r = 0; r < nets->n_out; r++) {
            CHECK(column[r] >= 0 && column[r] < nets->n_in);
            matrix[r * nets->n_in + column[r]] = 1;
        }
        make_nets(loader, nets, matrix, name.text);
    }
    free(matrix);
}

void loader_keys(struct loader *loader, const struct weight **weight, const struct pkm_shape *shape,
                 bool is_shared, const char *format, ...)
{
    struct name name;
    FORMAT_NAME(&name, format);
    const bool product = shape->kind == PKM_PRODUCT;
    const int64_t n_half = product ? 2 : 1;
    const int64_t cols = shape->d_key / n_half;
    const int64_t product_dim[4] = {shape->n_head, 2, shape->n_key, cols};
    const int64_t flat_dim[3] = {shape->n_head, shape->n_key, cols};
    const int64_t shared_dim[2] = {shape->n_key, cols};
    const struct safetensors_entry *const entry =
        is_shared ? loader_take(loader, &name, shared_dim, 2, FLOATS)
        : product ? loader_take(loader, &name, product_dim, 4, FLOATS)
                  : loader_take(loader, &name, flat_dim, 3, FLOATS);
    if (entry == NULL) {
        return;
    }
    const int n_group = is_shared ? 1 : shape->n_head * (int)n_half;
    const struct tensor host = tensors_view(entry, (int64_t)n_group * shape->n_key, cols);
    *weight = loader_f32_weight(loader, &host, WEIGHT_KEYS, n_group, name.text);
    tensors_release(entry);
}

void loader_slot_map(struct loader *loader, struct tensor *map, int64_t n_head, int64_t n_pair,
                     const char *format, ...)
{
    struct name name;
    FORMAT_NAME(&name, format);
    const int64_t dim[2] = {n_head, n_pair};
    const struct safetensors_entry *const entry = loader_take(loader, &name, dim, 2, SLOTS);
    if (entry == NULL) {
        return;
    }
    const int32_t *const slot = (const int32_t *)(const void *)entry->data;
    for (int64_t i = 0; i < entry->n_elem; i++) {
        if (slot[i] < 0 || slot[i] >= n_pair) {
            loader->code = err_set(
                loader->err, ERR_FORMAT, "%s: tensor %s: element %lld is %d, not a slot 0 .. %lld",
                entry->path, entry->name, (long long)i, slot[i], (long long)n_pair - 1);
            return;
        }
    }
    *map = store_words(loader->store, slot, n_head, n_pair, DTYPE_I32);
    tensors_release(entry);
}
