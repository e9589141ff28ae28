/* Weights of the CPU backend: packing at load.
 *
 * A matrix becomes panels (simd/kernels.h), packed by the threads that will stream them, in the
 * same split, so that on a machine with several memory nodes each finds its pages near. Large
 * weights ask for huge pages. A table keeps its rows; with PLACEMENT_MMAP it stays in the file, at
 * whatever alignment the file has, so elements are read through memcpy. */
#include "kernels/cpu/cpu.h"

#include <stdlib.h>
#include <string.h>

enum {
    PACK_K = 64, /* inputs packed at a time: 32 rows of 64 floats stay in L1 */
};

struct pack {
    const struct tensor *host;
    const struct weight_desc *desc;
    char *to;
    int n_out;   /* outputs of one group */
    int n_panel; /* panels of one group */
};

static bool is_float(enum dtype dtype)
{
    return dtype == DTYPE_F32 || dtype == DTYPE_F16 || dtype == DTYPE_BF16;
}

/* Elements first .. first+n-1 of a row of any floating-point type, as F32. */
static void widen(float *to, const char *row, enum dtype dtype, int64_t first, int n)
{
    const char *const from = row + (size_t)first * dtype_bytes(dtype);
    if (dtype == DTYPE_F32) {
        memcpy(to, from, sizeof *to * (size_t)n);
        return;
    }
    for (int i = 0; i < n; i++) {
        uint16_t bits;
        memcpy(&bits, from + 2 * (size_t)i, sizeof bits);
        to[i] = dtype == DTYPE_BF16 ? bf16_to_f32(bits) : f16_to_f32(bits);
    }
}

static const char *host_row(const struct tensor *host, int64_t row)
{
    return (const char *)host->data + (size_t)(row * host->stride) * dtype_bytes(host->dtype);
}

/* Words of one output for PACK_K inputs, PANEL words apart. */
static void put_words(uint32_t *to, const float *from, int n, bool is_bf16)
{
    if (!is_bf16) {
        for (int i = 0; i < n; i++) {
            memcpy(to + (size_t)i * PANEL, from + i, sizeof *to);
        }
        return;
    }
    for (int i = 0; i < n; i += 2) {
        const uint32_t low = bf16_from_f32(from[i]);
        const uint32_t high = i + 1 < n ? bf16_from_f32(from[i + 1]) : 0;
        to[(size_t)(i / 2) * PANEL] = low | high << 16;
    }
}

/* Packs panels first .. first+n-1 of all groups. Outputs past the last one are zeros. */
static void pack_panels(void *arg, int thread, int first, int n)
{
    (void)thread;
    const struct pack *const p = arg;
    const int n_in = (int)p->host->cols;
    const bool is_bf16 = p->desc->dtype == DTYPE_BF16 && p->desc->kind == WEIGHT_MATRIX;
    const enum dtype dtype = is_bf16 ? DTYPE_BF16 : DTYPE_F32;
    const size_t panel_words = gemm_panel_words(n_in, dtype);
    for (int i = first; i < first + n; i++) {
        uint32_t *const panel = (uint32_t *)p->to + (size_t)i * panel_words;
        const int out = i % p->n_panel * PANEL;
        const int64_t row = (int64_t)(i / p->n_panel) * p->n_out + out;
        const int n_row = p->n_out - out < PANEL ? p->n_out - out : PANEL;
        if (n_row < PANEL) {
            memset(panel, 0, panel_words * sizeof *panel);
        }
        for (int k = 0; k < n_in; k += PACK_K) {
            float value[PACK_K];
            const int n_k = n_in - k < PACK_K ? n_in - k : PACK_K;
            uint32_t *const to = panel + (size_t)gemm_k_words(k, dtype) * PANEL;
            for (int o = 0; o < n_row; o++) {
                widen(value, host_row(p->host, row + o), p->host->dtype, k, n_k);
                put_words(to + o, value, n_k, is_bf16);
            }
        }
    }
}

/* Copies rows first .. first+n-1 of a table. */
static void copy_rows(void *arg, int thread, int first, int n)
{
    (void)thread;
    const struct pack *const p = arg;
    const int64_t cols = p->host->cols;
    const size_t row_bytes = (size_t)cols * dtype_bytes(p->desc->dtype);
    for (int i = first; i < first + n; i++) {
        char *const to = p->to + (size_t)i * row_bytes;
        const char *const from = host_row(p->host, i);
        if (p->host->dtype == p->desc->dtype) {
            memcpy(to, from, row_bytes);
            continue;
        }
        for (int64_t c = 0; c < cols; c += PACK_K) {
            float value[PACK_K];
            const int n_col = cols - c < PACK_K ? (int)(cols - c) : PACK_K;
            widen(value, from, p->host->dtype, c, n_col);
            if (p->desc->dtype == DTYPE_F32) {
                memcpy(to + (size_t)c * sizeof *value, value, sizeof *value * (size_t)n_col);
                continue;
            }
            for (int j = 0; j < n_col; j++) {
                const uint16_t bits = bf16_from_f32(value[j]);
                memcpy(to + (size_t)(c + j) * sizeof bits, &bits, sizeof bits);
            }
        }
    }
}

/* Memory for n items of the packed weight; false if there is none. */
static bool weight_alloc(struct cpu_weight *w, size_t n, size_t item_bytes)
{
    size_t bytes = 0;
    if (__builtin_mul_overflow(n, item_bytes, &bytes)) {
        return false;
    }
    w->owned = cpu_alloc(bytes);
    w->owned_bytes = bytes;
    w->data = w->owned;
    return w->owned != NULL;
}

static bool make_panels(struct cpu_backend *cpu, struct cpu_weight *w, const struct tensor *host)
{
    const bool is_bf16 = w->desc.dtype == DTYPE_BF16 && w->desc.kind == WEIGHT_MATRIX;
    const enum dtype dtype = is_bf16 ? DTYPE_BF16 : DTYPE_F32;
    const int n_out = (int)(host->rows / w->desc.n_group);
    const int n_panel = gemm_n_panel(n_out);
    const int64_t n_item = (int64_t)n_panel * w->desc.n_group;
    if (n_item > INT32_MAX ||
        !weight_alloc(w, (size_t)n_item,
                      gemm_panel_words((int)host->cols, dtype) * sizeof(uint32_t))) {
        return false;
    }
    struct pack p = {host, &w->desc, w->owned, n_out, n_panel};
    pool_for(cpu->pool, (int)n_item, POOL_STREAM, pack_panels, &p);
    return true;
}

static bool make_table(struct cpu_backend *cpu, struct cpu_weight *w, const struct tensor *host)
{
    if (w->desc.placement == PLACEMENT_MMAP) {
        w->data = host->data;
        w->row_dtype = host->dtype;
        w->row_bytes = host->stride * (int64_t)dtype_bytes(host->dtype);
        return true;
    }
    w->row_dtype = w->desc.dtype;
    w->row_bytes = host->cols * (int64_t)dtype_bytes(w->row_dtype);
    if (!weight_alloc(w, (size_t)host->rows, (size_t)w->row_bytes)) {
        return false;
    }
    struct pack p = {.host = host, .desc = &w->desc, .to = w->owned};
    pool_for(cpu->pool, (int)host->rows, POOL_STREAM, copy_rows, &p);
    return true;
}

/* Scratch of the op that will use the weight. */
static enum err_code reserve_for(struct cpu_backend *cpu, const struct cpu_weight *w,
                                 const char *name, struct err *err)
{
    if (w->desc.kind == WEIGHT_MATRIX) {
        const size_t row_words = gemm_row_words((int)w->cols);
        return cpu_reserve(&cpu->words, GEMM_ROWS * row_words * sizeof(uint32_t), name, err);
    }
    if (w->desc.kind == WEIGHT_KEYS) {
        const int n_key = (int)(w->rows / w->desc.n_group);
        return cpu_reserve_slices(cpu, cpu_keys_slice_bytes(cpu->simd, n_key, (int)w->cols, 2),
                                  name, err);
    }
    return ERR_OK;
}

enum err_code cpu_weight_new(struct backend *be, struct weight **weight, const struct tensor *host,
                             const struct weight_desc *desc, const char *name, struct err *err)
{
    CHECK(host->data != NULL && host->rows > 0 && host->cols > 0 && host->stride >= host->cols);
    CHECK(is_float(host->dtype) && (desc->dtype == DTYPE_F32 || desc->dtype == DTYPE_BF16));
    CHECK(desc->placement != PLACEMENT_MMAP || desc->kind == WEIGHT_TABLE);
    CHECK(desc->n_group >= 1 && host->rows % desc->n_group == 0);
    CHECK(desc->kind == WEIGHT_KEYS || desc->n_group == 1);

    *weight = NULL;
    /* Columns and outputs are counted in int further down; so are the words of a packed row. */
    const int64_t dim_max = INT32_MAX / 2;
    if (host->rows > dim_max || host->cols > dim_max) {
        return err_set(err, ERR_UNSUPPORTED, "%s: [%lld, %lld] has a dimension above %lld", name,
                       (long long)host->rows, (long long)host->cols, (long long)dim_max);
    }
    struct cpu_backend *const cpu = cpu_of(be);
    struct cpu_weight *const w = calloc(1, sizeof *w);
    if (w == NULL) {
        return err_set(err, ERR_MEMORY, "%s: no memory left for this weight", name);
    }
    w->desc = *desc;
    w->rows = host->rows;
    w->cols = host->cols;
    const bool is_made =
        desc->kind == WEIGHT_TABLE ? make_table(cpu, w, host) : make_panels(cpu, w, host);
    const enum err_code code =
        is_made ? reserve_for(cpu, w, name, err)
                : err_set(err, ERR_MEMORY, "%s: no memory left for %lld x %lld weights", name,
                          (long long)host->rows, (long long)host->cols);
    if (code != ERR_OK) {
        cpu_weight_free(be, (struct weight *)w);
        return code;
    }
    *weight = (struct weight *)w;
    return ERR_OK;
}

void cpu_weight_free(struct backend *be, struct weight *weight)
{
    (void)be;
    if (weight != NULL) {
        struct cpu_weight *const w = (struct cpu_weight *)weight;
        free(w->owned);
        free(w);
    }
}

size_t cpu_weight_bytes(const struct weight *weight)
{
    const struct cpu_weight *const w = cpu_weight_of(weight);
    return w->owned != NULL ? w->owned_bytes : (size_t)(w->rows * w->row_bytes);
}
