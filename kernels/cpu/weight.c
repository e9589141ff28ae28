/* Weights of the CPU backend: packing at load.
 *
 * A matrix becomes panels (simd/kernels.h), packed by the threads that will stream them, in the
 * same split, so that on a machine with several memory nodes each finds its pages near. Large
 * weights ask for huge pages. A table keeps its rows; with PLACEMENT_MMAP it stays in the file, at
 * whatever alignment the file has, so elements are read through memcpy. */
#include "kernels/cpu/cpu.h"
#include "kernels/int8.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum {
    PACK_K = 64, /* inputs packed at a time: 32 rows of 64 floats stay in L1 */
};

/* Squares of what rounding to INT8 changed, and of all. */
struct loss {
    double lost, whole;
};

struct pack {
    const struct tensor *host;
    const struct weight_desc *desc;
    enum dtype dtype; /* of the packed words or rows */
    char *to;
    float *scale;      /* TABLE of I8: [rows] */
    struct loss *loss; /* [n_thread] for I8 made from other numbers */
    int n_out;         /* outputs of one group */
    int n_panel;       /* panels of one group */
    bool is_split;     /* each F32 word becomes two BF16 halves */
};

static const char *host_row(const struct tensor *host, int64_t row)
{
    return (const char *)host->data + (size_t)(row * host->stride) * dtype_bytes(host->dtype);
}

/* Elements first .. first+n-1 of a row of any type, as F32. */
static void widen(float *to, const struct pack *p, int64_t row, int64_t first, int n)
{
    const enum dtype dtype = p->host->dtype;
    const char *const from = host_row(p->host, row) + (size_t)first * dtype_bytes(dtype);
    if (dtype == DTYPE_F32) {
        memcpy(to, from, sizeof *to * (size_t)n);
        return;
    }
    if (dtype == DTYPE_I8) {
        for (int i = 0; i < n; i++) {
            to[i] = (float)((const int8_t *)from)[i] * p->desc->row_scale[row];
        }
        return;
    }
    for (int i = 0; i < n; i++) {
        uint16_t bits;
        memcpy(&bits, from + 2 * (size_t)i, sizeof bits);
        to[i] = dtype == DTYPE_BF16 ? bf16_to_f32(bits) : f16_to_f32(bits);
    }
}

/* ---- INT8 ---- */

/* The compiler's own vectors, which every machine has. */
typedef float f32x8 __attribute__((vector_size(32)));
typedef int32_t i32x8 __attribute__((vector_size(32)));
typedef int8_t i8x8 __attribute__((vector_size(8)));
enum { VEC = 8 };

static struct int8_scale scale_of(const struct pack *p, int64_t row)
{
    i32x8 max = {0};
    for (int64_t k = 0; k < p->host->cols; k += PACK_K) {
        float value[PACK_K] = {0};
        widen(value, p, row, k, p->host->cols - k < PACK_K ? (int)(p->host->cols - k) : PACK_K);
        for (int i = 0; i < PACK_K; i += VEC) {
            i32x8 bits; /* see int8_magnitude */
            memcpy(&bits, value + i, sizeof bits);
            bits &= 0x7fffffff;
            const i32x8 is_more = bits > max;
            max = (bits & is_more) | (max & ~is_more);
        }
    }
    uint32_t most = 0;
    for (int i = 0; i < VEC; i++) {
        most = (uint32_t)max[i] > most ? (uint32_t)max[i] : most;
    }
    return int8_scale_of(int8_from_magnitude(most));
}

/* Elements first .. first+n-1 of a row as INT8: int8_round, several at a time. */
static void round_bytes(int8_t *to, const struct pack *p, int64_t row, int64_t first, int n,
                        struct int8_scale scale, struct loss *loss)
{
    float value[PACK_K] = {0};
    int8_t q[PACK_K];
    f32x8 lost = {0};
    f32x8 whole = {0};
    widen(value, p, row, first, n);
    for (int i = 0; i < PACK_K; i += VEC) {
        f32x8 v;
        memcpy(&v, value + i, sizeof v);
        const f32x8 scaled = v * scale.inverse;
        const f32x8 shifted = scaled + INT8_MAGIC;
        const i8x8 bytes = __builtin_convertvector((i32x8)shifted, i8x8);
        memcpy(q + i, &bytes, sizeof bytes);
        const f32x8 missing = v - (shifted - INT8_MAGIC) * scale.scale;
        lost += missing * missing;
        whole += v * v;
    }
    memcpy(to, q, (size_t)n);
    for (int i = 0; i < VEC; i++) {
        loss->lost += (double)lost[i];
        loss->whole += (double)whole[i];
    }
}

/* A row of host as INT8, PACK_K elements at a time: the file's own, or rounded. */
struct byte_row {
    struct int8_scale scale;
    const int8_t *stored; /* NULL: to be rounded */
};

static struct byte_row byte_row_of(const struct pack *p, int64_t row)
{
    if (p->host->dtype == DTYPE_I8) {
        const struct int8_scale scale = {p->desc->row_scale[row], 0};
        return (struct byte_row){scale, (const int8_t *)host_row(p->host, row)};
    }
    return (struct byte_row){scale_of(p, row), NULL};
}

static void read_bytes(int8_t *to, const struct pack *p, int64_t row, int64_t first, int n,
                       const struct byte_row *from, struct loss *loss)
{
    if (from->stored != NULL) {
        memcpy(to, from->stored + first, (size_t)n);
    } else {
        round_bytes(to, p, row, first, n, from->scale, loss);
    }
}

/* Output o of a panel: its words, its scale and its sum. */
static void pack_bytes(uint32_t *panel, const struct pack *p, int64_t row, int o, struct loss *loss)
{
    const int n_in = (int)p->host->cols;
    const struct byte_row from = byte_row_of(p, row);
    int32_t sum = 0;
    for (int k = 0; k < n_in; k += PACK_K) {
        int8_t q[PACK_K] = {0};
        const int n_k = n_in - k < PACK_K ? n_in - k : PACK_K;
        read_bytes(q, p, row, k, n_k, &from, loss);
        for (int i = 0; i < PACK_K; i++) {
            sum += q[i];
        }
        uint32_t *const to = panel + (size_t)(k / 4) * PANEL + o;
        for (int i = 0; i < n_k; i += 4) {
            memcpy(to + (size_t)(i / 4) * PANEL, q + i, sizeof *to);
        }
    }
    uint32_t *const end = panel + (size_t)gemm_k_words(n_in, DTYPE_I8) * PANEL + o;
    const int32_t offset = -128 * sum;
    memcpy(end, &from.scale.scale, sizeof *end);
    memcpy(end + PANEL, &offset, sizeof offset);
}

static void copy_bytes(int8_t *to, const struct pack *p, int64_t row, struct loss *loss)
{
    const int64_t cols = p->host->cols;
    const struct byte_row from = byte_row_of(p, row);
    p->scale[row] = from.scale.scale;
    for (int64_t c = 0; c < cols; c += PACK_K) {
        read_bytes(to + c, p, row, c, cols - c < PACK_K ? (int)(cols - c) : PACK_K, &from, loss);
    }
}

/* ---- panels and tables ---- */

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

/* The same for numbers as sums of two BF16: see kernels.h. */
static void put_split(uint32_t *to, const float *from, int n)
{
    for (int k = 0; k < n; k += 2 * CHUNK, to += (size_t)2 * CHUNK * PANEL) {
        float low[2 * CHUNK];
        for (int i = 0; i < 2 * CHUNK; i++) {
            low[i] = from[k + i] - bf16_to_f32(bf16_from_f32(from[k + i]));
        }
        put_words(to, from + k, 2 * CHUNK, true);
        put_words(to + (size_t)CHUNK * PANEL, low, 2 * CHUNK, true);
    }
}

/* Packs panels first .. first+n-1 of all groups. Outputs past the last one are zeros. */
static void pack_panels(void *arg, int thread, int first, int n)
{
    const struct pack *const p = arg;
    const int n_in = (int)p->host->cols;
    const size_t panel_words = gemm_panel_words(n_in, p->dtype);
    for (int i = first; i < first + n; i++) {
        uint32_t *const panel = (uint32_t *)p->to + (size_t)i * panel_words;
        const int out = i % p->n_panel * PANEL;
        const int64_t row = (int64_t)(i / p->n_panel) * p->n_out + out;
        const int n_row = p->n_out - out < PANEL ? p->n_out - out : PANEL;
        if (n_row < PANEL) {
            memset(panel, 0, panel_words * sizeof *panel);
        }
        for (int o = 0; p->dtype == DTYPE_I8 && o < n_row; o++) {
            pack_bytes(panel, p, row + o, o, &p->loss[thread]);
        }
        for (int k = 0; p->dtype != DTYPE_I8 && k < n_in; k += PACK_K) {
            float value[PACK_K];
            const int n_k = n_in - k < PACK_K ? n_in - k : PACK_K;
            uint32_t *const to = panel + (size_t)gemm_k_words(k, p->dtype) * PANEL;
            for (int o = 0; o < n_row; o++) {
                widen(value, p, row + o, k, n_k);
                if (p->is_split) {
                    put_split(to + o, value, n_k);
                } else {
                    put_words(to + o, value, n_k, p->dtype == DTYPE_BF16);
                }
            }
        }
    }
}

/* Copies rows first .. first+n-1 of a table. */
static void copy_rows(void *arg, int thread, int first, int n)
{
    const struct pack *const p = arg;
    const int64_t cols = p->host->cols;
    const size_t row_bytes = (size_t)cols * dtype_bytes(p->dtype);
    for (int i = first; i < first + n; i++) {
        char *const to = p->to + (size_t)i * row_bytes;
        if (p->dtype == DTYPE_I8) {
            copy_bytes((int8_t *)to, p, i, &p->loss[thread]);
            continue;
        }
        if (p->host->dtype == p->dtype) {
            memcpy(to, host_row(p->host, i), row_bytes);
            continue;
        }
        for (int64_t c = 0; c < cols; c += PACK_K) {
            float value[PACK_K];
            const int n_col = cols - c < PACK_K ? (int)(cols - c) : PACK_K;
            widen(value, p, i, c, n_col);
            if (p->dtype == DTYPE_F32) {
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
    w->owned = host_alloc(bytes);
    w->owned_bytes = bytes;
    w->data = w->owned;
    return w->owned != NULL;
}

static bool make_panels(struct cpu_backend *cpu, struct cpu_weight *w, const struct tensor *host,
                        const struct weight_desc *desc, struct loss *loss)
{
    const int n_out = (int)(host->rows / w->head.n_group);
    const int n_panel = gemm_n_panel(n_out);
    w->is_split = desc->is_split && cpu->bf16 == GEMM_AMX && host->cols % (2 * CHUNK) == 0;
    w->stored = w->head.dtype;
    if (w->is_split && host->dtype == DTYPE_BF16) { /* the lower halves are 0 */
        w->stored = DTYPE_BF16;
    }
    const int64_t n_item = (int64_t)n_panel * w->head.n_group;
    if (n_item > INT32_MAX ||
        !weight_alloc(w, (size_t)n_item,
                      gemm_panel_words((int)host->cols, w->stored) * sizeof(uint32_t))) {
        return false;
    }
    struct pack p = {.host = host,
                     .desc = desc,
                     .dtype = w->stored,
                     .to = w->owned,
                     .loss = loss,
                     .n_out = n_out,
                     .n_panel = n_panel,
                     .is_split = w->is_split && w->stored == DTYPE_F32};
    pool_for(cpu->pool, (int)n_item, POOL_STREAM, pack_panels, &p);
    return true;
}

static bool make_table(struct cpu_backend *cpu, struct cpu_weight *w, const struct tensor *host,
                       const struct weight_desc *desc, struct loss *loss)
{
    if (w->head.placement == PLACEMENT_MMAP) {
        w->data = host->data;
        w->stored = host->dtype;
        w->row_scale = host->dtype == DTYPE_I8 ? desc->row_scale : NULL;
        w->row_scale_f16 = desc->row_scale_f16;
        w->row_bytes = host->stride * (int64_t)dtype_bytes(host->dtype);
        return true;
    }
    w->stored = w->head.dtype;
    w->row_bytes = host->cols * (int64_t)dtype_bytes(w->stored);
    const bool is_int8 = w->stored == DTYPE_I8;
    const bool is_q4 = w->stored == DTYPE_Q4;
    const size_t scale_bytes = is_int8 ? sizeof(float) : is_q4 ? sizeof(uint16_t) : 0;
    if (!weight_alloc(w, (size_t)host->rows, (size_t)w->row_bytes + scale_bytes)) {
        return false;
    }
    /* the scales first: they are aligned, and the rows need not be */
    float *const scale = w->owned;
    if (is_q4) {
        memcpy(w->owned, desc->row_scale_f16, (size_t)host->rows * scale_bytes);
        w->row_scale_f16 = w->owned;
    }
    char *const rows = (char *)w->owned + (size_t)host->rows * scale_bytes;
    w->data = rows;
    w->row_scale = is_int8 ? scale : NULL;
    struct pack p = {
        .host = host, .desc = desc, .dtype = w->stored, .to = rows, .scale = scale, .loss = loss};
    pool_for(cpu->pool, (int)host->rows, POOL_STREAM, copy_rows, &p);
    return true;
}

/* Scratch that the ops on this weight will need. */
static enum err_code reserve_for(struct cpu_backend *cpu, const struct cpu_weight *w,
                                 const char *name, struct err *err)
{
    if (w->head.kind == WEIGHT_MATRIX) {
        const size_t row_words = gemm_row_words((int)w->head.cols);
        const size_t bytes = GEMM_ROWS * row_words * sizeof(uint32_t);
        const size_t slice_bytes =
            cpu_linear_slice_bytes((int)w->head.cols) + sizeof(struct logit_rows);
        enum err_code code = cpu_reserve(&cpu->words, bytes, name, err);
        code = code == ERR_OK ? cpu_reserve(&cpu->hidden_words, bytes, name, err) : code;
        return code == ERR_OK ? cpu_reserve_slices(cpu, slice_bytes, name, err) : code;
    }
    if (w->head.kind == WEIGHT_KEYS) {
        return cpu_reserve_slices(cpu, cpu_keys_slice_bytes(cpu, w), name, err);
    }
    return ERR_OK;
}

/* What all threads lost by rounding, relative to the whole; 0 where nothing was rounded. */
static double loss_of(const struct loss loss[POOL_THREADS_MAX])
{
    struct loss sum = {0};
    for (int i = 0; i < POOL_THREADS_MAX; i++) {
        sum.lost += loss[i].lost;
        sum.whole += loss[i].whole;
    }
    return sum.whole > 0 ? sqrt(sum.lost / sum.whole) : 0;
}

enum err_code cpu_weight_new(struct backend *be, struct weight **weight, const struct tensor *host,
                             const struct weight_desc *desc, const char *name, struct err *err)
{
    *weight = NULL;
    const struct weight head = weight_head(host, desc);
    CHECK(desc->dtype != DTYPE_F16); /* not has_f16 */
    enum err_code code = weight_int8_check(host, desc, name, err);
    if (code != ERR_OK) {
        return code;
    }
    /* Columns and outputs are counted in int from here on; so are the words of a packed row. */
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
    w->head = head;
    struct loss loss[POOL_THREADS_MAX] = {{0}};
    const bool is_made = desc->kind == WEIGHT_TABLE ? make_table(cpu, w, host, desc, loss)
                                                    : make_panels(cpu, w, host, desc, loss);
    code = is_made ? reserve_for(cpu, w, name, err)
                   : err_set(err, ERR_MEMORY, "%s: no memory left for %lld x %lld weights", name,
                             (long long)host->rows, (long long)host->cols);
    if (code == ERR_OK) {
        code = weight_loss_check(loss_of(loss), desc, name, err);
    }
    if (code != ERR_OK) {
        cpu_weight_free(be, &w->head);
        return code;
    }
    *weight = &w->head;
    return ERR_OK;
}

void cpu_weight_free(struct backend *be, struct weight *weight)
{
    (void)be;
    if (weight != NULL) {
        struct cpu_weight *const w = (struct cpu_weight *)weight;
        host_free(w->owned);
        free(w);
    }
}

size_t cpu_weight_bytes(const struct weight *weight)
{
    const struct cpu_weight *const w = cpu_weight_of(weight);
    return w->owned != NULL ? w->owned_bytes : (size_t)(w->head.rows * w->row_bytes);
}
