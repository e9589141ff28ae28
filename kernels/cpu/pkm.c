/* Memory layers: search among the keys, experts and the gather of value rows.
 *
 * Search: an item is one head of a tile of rows. Its scores are a small matrix product over the
 * packed keys (product keys: two, one for each half), which stay in the thread's scratch, in L2;
 * then each row selects. Bound at one row: bytes of the keys; at many rows: multiply-adds, then the
 * selection (about 1 us per row and head).
 * Read: the bytes of n_head·k_top value rows per row of y, at random addresses. With few rows the
 * columns are divided among the threads; the sum of a column is one chain in any case. */
#include "kernels/cpu/cpu.h"

#include <math.h>
#include <string.h>

enum {
    READ_COLS = 64, /* columns of an item at least: four cache lines of F32 */
};

static int64_t score_stride(int n_key)
{
    return (int64_t)gemm_n_panel(n_key) * PANEL;
}

static int tile_rows_of(const struct cpu_backend *cpu, const struct cpu_weight *keys)
{
    return keys->is_split ? AMX_ROWS : cpu->simd->tile_rows;
}

/* Scores of a tile for two halves, then the packed queries of one. */
size_t cpu_keys_slice_bytes(const struct cpu_backend *cpu, const struct cpu_weight *keys)
{
    const int n_key = (int)(keys->head.rows / keys->head.n_group);
    const size_t n_score = 2 * (size_t)score_stride(n_key);
    return (size_t)tile_rows_of(cpu, keys) * (n_score + gemm_row_words((int)keys->head.cols)) *
           sizeof(float);
}

struct search_job {
    const struct cpu_backend *cpu;
    struct tensor slots, weights, query;
    const struct cpu_weight *keys;
    const struct pkm_shape *shape;
    int n_half; /* 2 for product keys */
    int n_tile;
};

static void search_tile(const struct search_job *job, int thread, int tile, int head)
{
    const struct simd_kernels *const simd = job->cpu->simd;
    const struct pkm_shape *const shape = job->shape;
    const int64_t row = job->query.rows * tile / job->n_tile;
    const int n_row = (int)(job->query.rows * (tile + 1) / job->n_tile - row);
    const int d_half = shape->d_key / job->n_half;
    const int64_t half_stride = score_stride(shape->n_key);
    const int64_t stride = half_stride * job->n_half;
    const size_t group_words =
        (size_t)gemm_n_panel(shape->n_key) * gemm_panel_words(d_half, job->keys->stored);
    float *const score = cpu_slice(job->cpu, thread);
    uint32_t *const words =
        (uint32_t *)(void *)(score + tile_rows_of(job->cpu, job->keys) * stride);
    for (int half = 0; half < job->n_half; half++) {
        const size_t group = job->keys->head.n_group == 1 /* a single one serves all */
                                 ? 0
                                 : (size_t)head * (size_t)job->n_half + (size_t)half;
        const float *const q =
            row_f32(job->query, row) + (int64_t)head * shape->d_key + half * d_half;
        const uint32_t *const w = (const uint32_t *)job->keys->data + group * group_words;
        if (job->keys->is_split) {
            simd->amx_scores(score + half * half_stride, stride, q, job->query.stride, n_row, w,
                             job->keys->stored, d_half, shape->n_key, words);
        } else {
            simd->gemm_scores(score + half * half_stride, stride, q, job->query.stride, n_row, w,
                              d_half, shape->n_key, words);
        }
    }
    const int64_t col = (int64_t)head * shape->k_top;
    for (int r = 0; r < n_row; r++) {
        simd->pkm_select(row_i32(job->slots, row + r) + col, row_f32(job->weights, row + r) + col,
                         score + r * stride, half_stride, shape);
    }
}

static void search_items(void *arg, int thread, int first, int n)
{
    const struct search_job *const job = arg;
    for (int item = first; item < first + n; item++) {
        search_tile(job, thread, item / job->shape->n_head, item % job->shape->n_head);
    }
}

/* Full tiles, or smaller ones that leave each thread two items. */
static int64_t search_tiles(const struct cpu_backend *cpu, const struct cpu_weight *keys,
                            int64_t n_row, int n_head)
{
    enum { ITEMS = 2, ROWS_MIN = 8 };
    const int64_t tile_rows = tile_rows_of(cpu, keys);
    const int64_t least = (n_row + tile_rows - 1) / tile_rows;
    const int64_t most = (n_row + ROWS_MIN - 1) / ROWS_MIN;
    const int64_t wanted = (ITEMS * cpu->base.n_thread + n_head - 1) / n_head;
    const int64_t n_tile = wanted < most ? wanted : most;
    return n_tile > least ? n_tile : least;
}

void cpu_pkm_search(struct backend *be, struct tensor slots, struct tensor weights,
                    struct tensor query, const struct weight *weight, const struct pkm_shape *shape)
{
    const struct cpu_backend *const cpu = cpu_of(be);
    const struct cpu_weight *const keys = cpu_weight_of(weight);
    const int n_half = shape->kind == PKM_PRODUCT ? 2 : 1;
    const int64_t n_tile = search_tiles(cpu, keys, query.rows, shape->n_head);
    CHECK(n_tile * shape->n_head <= INT32_MAX);
    struct search_job job = {cpu, slots, weights, query, keys, shape, n_half, (int)n_tile};
    pool_for(cpu->pool, (int)n_tile * shape->n_head, POOL_DYNAMIC, search_items, &job);
}

/* ---- rescoring: ref's own code, a few rows a thread ------------------------------------------*/

struct rescore_job {
    struct backend *be;
    struct tensor slots, weights, slot_map;
    const struct pkm_rescore *rescore;
};

static void rescore_rows(void *arg, int thread, int first, int n)
{
    (void)thread;
    const struct rescore_job *const job = arg;
    ref_pkm_rescore(job->be, cpu_item_rows(job->slots, first, n),
                    cpu_item_rows(job->weights, first, n), job->slot_map, job->rescore);
}

void cpu_pkm_rescore(struct backend *be, struct tensor slots, struct tensor weights,
                     struct tensor slot_map, const struct pkm_rescore *rescore)
{
    struct rescore_job job = {be, slots, weights, slot_map, rescore};
    cpu_for_rows(cpu_of(be), slots, rescore_rows, &job);
}

static struct value_table value_table_of(const struct cpu_weight *w)
{
    return (struct value_table){.data = w->data,
                                .scale = w->row_scale,
                                .scale_f16 = w->row_scale_f16,
                                .row_bytes = w->row_bytes,
                                .half = w->head.cols / 2,
                                .dtype = w->stored};
}

/* ---- redirection ------------------------------------------------------------------------------*/

/* The look-ups of a row whose sequence has redirections, REDIRECT_N at a time: where each is read
 * from. */
enum { REDIRECT_N = 128 };
struct redirected {
    struct value_row row[REDIRECT_N];
    enum dtype dtype[REDIRECT_N];
    int64_t half; /* struct value_table's half, of the memory's own table */
    bool any;     /* at least one look-up is redirected */
};

/* Sets list to the redirections of the row; true if it has any. */
static bool is_redirected(struct redirect_list *list, const struct pkm_redirect *redirect,
                          int64_t row)
{
    *list = (struct redirect_list){0};
    if (redirect != NULL) {
        *list = step_redirects(redirect->step, row, redirect->memory);
    }
    return list->n > 0;
}

static float scale_of(const struct value_table *table, int32_t slot)
{
    if (table->scale_f16 != NULL) {
        uint16_t bits; /* in a file it may stand at any byte */
        memcpy(&bits, table->scale_f16 + slot, sizeof bits);
        return f16_to_f32(bits);
    }
    return table->scale != NULL ? table->scale[slot] : 1;
}

/* Finds the rows of n look-ups, at most REDIRECT_N. */
static void find_rows(struct redirected *found, const struct redirect_list *list,
                      const int32_t *slots, int n, const struct value_table *table, int64_t cols,
                      bool experts)
{
    found->any = false;
    found->half = table->half;
    for (int i = 0; i < list->n; i++) { /* prefetch all places before the search needs any */
        const struct step_redirect *const entry = &list->entry[i];
        for (int j = 0; j < n; j++) {
            __builtin_prefetch(entry->place + redirect_place_of(slots[j], entry->n_bit));
        }
    }
    for (int j = 0; j < n; j++) {
        const struct step_redirect *entry = NULL;
        const int32_t row = step_redirect_row(list, slots[j], &entry);
        if (row < 0) {
            found->dtype[j] = table->dtype;
            found->row[j] = (struct value_row){
                (const char *)table->data + slots[j] * table->row_bytes, scale_of(table, slots[j])};
            continue;
        }
        const struct redirect_rows *const rows = experts ? &entry->experts : &entry->values;
        const int64_t row_bytes = cols * (int64_t)dtype_bytes(rows->dtype);
        found->dtype[j] = rows->dtype;
        found->row[j] = (struct value_row){(const char *)rows->data + row * row_bytes,
                                           rows->scale == NULL ? 1 : rows->scale[row]};
        found->any = true;
    }
}

/* A table of the rows of look-ups first .. first + *n_run - 1, as many as have the same type. If
 * mixes, a run may mix all types but Q4, whose columns are stored in another order. */
static struct value_table run_of(const struct redirected *found, int first, int n, bool mixes,
                                 int *n_run)
{
    const bool any = mixes && found->dtype[first] != DTYPE_Q4;
    bool differs = false;
    int end = first + 1;
    for (; end < n; end++) {
        const bool same = found->dtype[end] == found->dtype[first];
        if (!same && (!any || found->dtype[end] == DTYPE_Q4)) {
            break;
        }
        differs = differs || !same;
    }
    *n_run = end - first;
    return (struct value_table){.row = found->row + first,
                                .row_dtype = differs ? found->dtype + first : NULL,
                                .half = found->half,
                                .dtype = found->dtype[first]};
}

/* 0, 1, 2 ...: the slots of a run, whose rows are in order. */
static void count_up(int32_t at[REDIRECT_N])
{
    for (int j = 0; j < REDIRECT_N; j++) {
        at[j] = j;
    }
}

/* ---- experts ----------------------------------------------------------------------------------*/

struct experts_job {
    const struct simd_kernels *simd;
    struct tensor y, weights, slots, x;
    const struct cpu_weight *experts;
    const struct pkm_redirect *redirect; /* Borrowed: or NULL */
};

/* dot[j] = x · the row that look-up j is read from, n <= REDIRECT_N. */
static void redirected_dots(float *dot, const struct experts_job *job,
                            const struct redirect_list *list, const int32_t *slots, int n,
                            const float *x, const struct value_table *table)
{
    struct redirected found;
    int32_t at[REDIRECT_N];
    count_up(at);
    find_rows(&found, list, slots, n, table, job->x.cols, true);
    int n_run = 0;
    for (int j = 0; j < n; j += n_run) {
        const struct value_table run = run_of(&found, j, n, false, &n_run);
        job->simd->row_dots(dot + j, at, n_run, x, &run, job->x.cols);
    }
}

static void experts_rows(void *arg, int thread, int first, int n)
{
    enum { N = 64 };
    (void)thread;
    const struct experts_job *const job = arg;
    const struct cpu_weight *const w = job->experts;
    CHECK(w->stored != DTYPE_Q4); /* only tables of values are: see weight.h */
    const struct value_table table = value_table_of(w);
    for (int r = first; r < first + n; r++) {
        const int32_t *const slots = row_i32(job->slots, r);
        const float *const weights = row_f32(job->weights, r);
        float *const y = row_f32(job->y, r);
        struct redirect_list list;
        const bool redirected = is_redirected(&list, job->redirect, r);
        for (int64_t j = 0; j < job->slots.cols; j++) {
            CHECK(slots[j] >= 0 && slots[j] < w->head.rows);
        }
        for (int64_t from = 0; from < job->slots.cols; from += N) {
            float dot[N];
            const int n_slot = (int)(job->slots.cols - from < N ? job->slots.cols - from : N);
            const float *const x = row_f32(job->x, r);
            if (redirected) {
                redirected_dots(dot, job, &list, slots + from, n_slot, x, &table);
            } else {
                job->simd->row_dots(dot, slots + from, n_slot, x, &table, job->x.cols);
            }
            for (int j = 0; j < n_slot; j++) {
                const double z = (double)dot[j];
                y[from + j] =
                    weights[from + j] * (float)(0.5 * z * erfc(-z * 0.70710678118654752440));
            }
        }
    }
}

void cpu_pkm_experts(struct backend *be, struct tensor y, struct tensor weights,
                     struct tensor slots, struct tensor x, const struct weight *experts,
                     const struct pkm_redirect *redirect)
{
    const struct cpu_backend *const cpu = cpu_of(be);
    struct experts_job job = {cpu->simd, y, weights, slots, x, cpu_weight_of(experts), redirect};
    CHECK(x.rows <= INT32_MAX);
    pool_for(cpu->pool, (int)x.rows, POOL_DYNAMIC, experts_rows, &job);
}

/* ---- knock-out --------------------------------------------------------------------------------*/

struct ablate_job {
    struct tensor weights, slots;
    const struct step_ablate *list; /* [n] of the sequence */
    int n;
    const struct pkm_place *place;
    int row; /* the sequence's first */
};

/* The scale of the entry for this memory, head and slot, by binary search; 1 if there is none. */
static float ablate_scale(const struct ablate_job *job, int32_t head, int32_t slot)
{
    const struct step_ablate wanted = {job->place->memory, head, slot, 0};
    int first = 0;
    int n = job->n;
    while (n > 0) { /* entries before first precede it, those from first + n on do not */
        const int half = n / 2;
        const bool precedes = step_ablate_precedes(&job->list[first + half], &wanted);
        first += precedes ? half + 1 : 0;
        n = precedes ? n - half - 1 : half;
    }
    const bool found = first < job->n && !step_ablate_precedes(&wanted, &job->list[first]);
    return found ? job->list[first].scale : 1;
}

static void ablate_rows(void *arg, int thread, int first, int n)
{
    (void)thread;
    const struct ablate_job *const job = arg;
    for (int r = job->row + first; r < job->row + first + n; r++) {
        float *const weights = row_f32(job->weights, r);
        const int32_t *const slots = row_i32(job->slots, r);
        const float memory = ablate_scale(job, -1, -1);
        for (int h = 0; h < job->place->n_head; h++) {
            const float head = ablate_scale(job, h, -1);
            for (int j = h * job->place->k_top; j < (h + 1) * job->place->k_top; j++) {
                /* In the order of the list: entries for all heads come first. */
                const float factor = memory * ablate_scale(job, -1, slots[j]) * head;
                weights[j] *= factor * ablate_scale(job, h, slots[j]);
            }
        }
    }
}

void cpu_pkm_ablate(struct backend *be, struct tensor weights, struct tensor slots,
                    const struct step *step, const struct pkm_place *place)
{
    for (int seq = 0; seq < step->n_seq; seq++) {
        const int first = step->ablate_first[seq];
        struct ablate_job job = {.weights = weights,
                                 .slots = slots,
                                 .list = step->ablate + first,
                                 .n = step->ablate_first[seq + 1] - first,
                                 .place = place,
                                 .row = step->seq_first[seq]};
        if (job.n > 0) {
            pool_for(cpu_of(be)->pool, step->seq_first[seq + 1] - job.row, POOL_DYNAMIC,
                     ablate_rows, &job);
        }
    }
}

/* ---- values -----------------------------------------------------------------------------------*/

struct read_job {
    const struct cpu_backend *cpu;
    struct tensor y, residual, slots, weights;
    const struct cpu_weight *values;
    int n_part;                          /* parts the columns of a row are divided into */
    const struct pkm_redirect *redirect; /* Borrowed: or NULL */
};

/* First column of a part: whole groups of READ_COLS, the last part takes what is left. */
static int64_t part_col(const struct read_job *job, int part)
{
    return part == job->n_part ? job->y.cols
                               : job->y.cols / READ_COLS * part / job->n_part * READ_COLS;
}

/* y[n_col] += the weighted sum of columns first .. of a row's look-ups, redirected as list says.
 * Groups of look-ups without a redirected row take the same path as in other rows. */
static void read_redirected(float *y, const struct read_job *job, const struct redirect_list *list,
                            int row, int64_t first, int64_t n_col)
{
    const struct value_table table = value_table_of(job->values);
    const int32_t *const slots = row_i32(job->slots, row);
    const float *const weights = row_f32(job->weights, row);
    const int n = (int)job->slots.cols;
    struct redirected found;
    int32_t at[REDIRECT_N];
    count_up(at);
    for (int from = 0; from < n; from += REDIRECT_N) {
        const int n_slot = n - from < REDIRECT_N ? n - from : REDIRECT_N;
        find_rows(&found, list, slots + from, n_slot, &table, job->y.cols, false);
        if (!found.any) {
            job->cpu->simd->pkm_read(y, slots + from, weights + from, n_slot, &table, first, n_col,
                                     NULL);
            continue;
        }
        int n_run = 0;
        for (int j = 0; j < n_slot; j += n_run) {
            const struct value_table run = run_of(&found, j, n_slot, true, &n_run);
            job->cpu->simd->pkm_read(y, at, weights + from + j, n_run, &run, first, n_col, NULL);
        }
    }
}

static void read_items(void *arg, int thread, int first, int n)
{
    (void)thread;
    const struct read_job *const job = arg;
    const struct cpu_weight *const values = job->values;
    const struct value_table table = value_table_of(values);
    for (int row = first / job->n_part; row <= (first + n - 1) / job->n_part; row++) {
        const int32_t *const slots = row_i32(job->slots, row);
        for (int64_t j = 0; j < job->slots.cols; j++) {
            CHECK(slots[j] >= 0 && slots[j] < values->head.rows);
        }
    }
    for (int item = first; item < first + n; item++) {
        const int row = item / job->n_part;
        const bool is_last = job->n_part > 1 || item + 1 == first + n;
        const int64_t col = part_col(job, item % job->n_part);
        const int64_t n_col = part_col(job, item % job->n_part + 1) - col;
        float *const y = row_f32(job->y, row) + col;
        if (job->residual.data == NULL) {
            memset(y, 0, (size_t)n_col * sizeof *y);
        } else {
            memmove(y, row_f32(job->residual, row) + col, (size_t)n_col * sizeof *y);
        }
        struct redirect_list list;
        if (is_redirected(&list, job->redirect, row)) {
            read_redirected(y, job, &list, row, col, n_col);
            continue;
        }
        job->cpu->simd->pkm_read(y, row_i32(job->slots, row), row_f32(job->weights, row),
                                 (int)job->slots.cols, &table, col, n_col,
                                 is_last ? NULL : row_i32(job->slots, row + 1));
    }
}

void cpu_pkm_read(struct backend *be, struct tensor y, struct tensor residual, struct tensor slots,
                  struct tensor weights, const struct weight *weight,
                  const struct pkm_redirect *redirect)
{
    const struct cpu_backend *const cpu = cpu_of(be);
    const struct cpu_weight *const values = cpu_weight_of(weight);
    const int64_t most = y.cols / READ_COLS > 0 ? y.cols / READ_COLS : 1;
    int64_t n_part = 1;
    if (y.rows < 2 * (int64_t)cpu->base.n_thread && cpu->base.n_thread > 1) {
        const int64_t wanted = y.rows > 0 ? (cpu->base.n_thread + y.rows - 1) / y.rows : 1;
        n_part = wanted < most ? wanted : most;
    }
    CHECK(y.rows * n_part <= INT32_MAX);
    struct read_job job = {cpu, y, residual, slots, weights, values, (int)n_part, redirect};
    pool_for(cpu->pool, (int)(y.rows * n_part), POOL_STREAM, read_items, &job);
}
