/* The key/value cache and attention: an item is some heads of up to ATTEND_ROWS rows of a sequence,
 * or all heads of them where they are stored. */
#include "kernels/cpu/cpu.h"

/* Whole tiles of every instruction set, whole pages, and whole groups of the four rows that keys
 * are stored by. */
enum { ATTEND_ROWS = 48 };

/* Which sequence each row belongs to, and which rows attention takes together: set at step_begin.
 */
void cpu_step_rows(struct cpu_backend *cpu, const struct step *step)
{
    struct row_block *const blocks = cpu->blocks.data;
    int32_t *const row_seq = cpu->row_seq.data;
    cpu->n_block = 0;
    for (int s = 0; s < step->n_seq; s++) {
        const int end = step->seq_first[s + 1];
        for (int r = step->seq_first[s]; r < end;) {
            const int most = ATTEND_ROWS - step->pos[r] % KV_PAGE; /* up to a page's end */
            const int n_row = end - r < most ? end - r : most;
            blocks[cpu->n_block++] = (struct row_block){s, r, n_row};
            for (int i = 0; i < n_row; i++) {
                row_seq[r++] = s;
            }
        }
    }
}

struct cache_job {
    const struct cpu_backend *cpu;
    struct tensor y, q, k_pages, v_pages; /* kv_store: y, q are the rows of k and v */
    const struct step *step;
    int n_head, d_head;
    int n_item_head; /* attention: heads of an item, the last ones may be fewer */
    int n_share;     /* query heads that share one head of keys and values: if several, an item is
                      * one query head */
    float scale;
};

static const int32_t *pages_of(const struct step *step, int s)
{
    return step->page + (int64_t)s * step->limits.n_page_max;
}

/* Whether the matrix unit computes attention. kv_store asks too, because it decides the layout of
 * keys. */
static bool is_amx(const struct cache_job *job)
{
    return job->k_pages.dtype == DTYPE_BF16 && job->cpu->bf16 == GEMM_AMX &&
           job->d_head >= ATTEND_AMX_COLUMNS && job->step->limits.n_span_max == 0;
}

static void store_blocks(void *arg, int thread, int first, int n)
{
    const struct cache_job *const job = arg;
    float *const closing = is_amx(job) ? cpu_slice(job->cpu, thread) : NULL;
    const struct row_block *const blocks = job->cpu->blocks.data;
    for (const struct row_block *b = blocks + first; b < blocks + first + n; b++) {
        for (int r = b->row; r < b->row + b->n_row;) {
            const int pos = job->step->pos[r];
            const int left = b->row + b->n_row - r;
            const int room = KV_PAGE - pos % KV_PAGE;
            const int32_t page = step_page(job->step, b->seq, pos);
            const struct kv_rows rows = {.k_page = cpu_page(job->k_pages, page),
                                         .v_page = cpu_page(job->v_pages, page),
                                         .k = row_f32(job->y, r),
                                         .v = row_f32(job->q, r),
                                         .k_stride = job->y.stride,
                                         .v_stride = job->q.stride,
                                         .n_row = left < room ? left : room,
                                         .offset = pos % KV_PAGE,
                                         .n_head = job->n_head,
                                         .d_head = job->d_head,
                                         .is_pairs = job->k_pages.dtype == DTYPE_BF16,
                                         .closing = closing};
            job->cpu->simd->kv_rows(&rows);
            r += rows.n_row;
        }
    }
}

void cpu_kv_store(struct backend *be, struct tensor k_pages, struct tensor v_pages, struct tensor k,
                  struct tensor v, const struct step *step, int n_head)
{
    const struct cpu_backend *const cpu = cpu_of(be);
    struct cache_job job = {.cpu = cpu,
                            .y = k,
                            .q = v,
                            .k_pages = k_pages,
                            .v_pages = v_pages,
                            .step = step,
                            .n_head = n_head,
                            .d_head = (int)k.cols / n_head};
    pool_for(cpu->pool, cpu->n_block, POOL_STREAM, store_blocks, &job);
}

/* Rows of a tile, or heads of a single row. */
static int scratch_rows(const struct cpu_backend *cpu)
{
    return cpu->simd->tile_rows > ATTEND_HEADS ? cpu->simd->tile_rows : ATTEND_HEADS;
}

/* Scores of a tile, then its packed queries; for the matrix unit a piece of keys first. */
size_t cpu_attention_slice_bytes(const struct cpu_backend *cpu, const struct step_limits *limits)
{
    if (limits->n_head == 0) {
        return 0;
    }
    const int d_head = limits->d_model / limits->n_head;
    const size_t n_tile =
        (size_t)scratch_rows(cpu) * ((size_t)limits->n_page_max * KV_PAGE + attend_columns(d_head));
    const size_t n_amx = attend_amx_key_words(d_head) +
                         ATTEND_AMX_GROUPS * (attend_amx_score_words(limits->n_page_max) +
                                              attend_amx_query_words(d_head));
    return (cpu->bf16 == GEMM_AMX && n_amx > n_tile ? n_amx : n_tile) * sizeof(float);
}

static void attend_items(void *arg, int thread, int first, int n)
{
    const struct cache_job *const job = arg;
    const struct cpu_backend *const cpu = job->cpu;
    const struct row_block *const blocks = cpu->blocks.data;
    for (int item = first; item < first + n; item++) {
        const struct row_block block = blocks[item % cpu->n_block];
        const int head = item / cpu->n_block * job->n_item_head;
        const int left = job->n_head - head;
        const int64_t col = (int64_t)head * job->d_head;
        const int64_t kv_col = (int64_t)(head / job->n_share) * job->d_head;
        float *const scratch = cpu_slice(cpu, thread);
        const int n_page = job->step->limits.n_page_max;
        const bool is_pairs = job->k_pages.dtype == DTYPE_BF16;
        const bool by_amx = is_amx(job);
        float *const score = scratch + (by_amx ? attend_amx_key_words(job->d_head) : 0);
        const struct attend a = {
            .y = row_f32(job->y, block.row) + col,
            .q = row_f32(job->q, block.row) + col,
            .k_pages = cpu_page(job->k_pages, 0) + cpu_page_words(job->k_pages, kv_col * KV_PAGE),
            .v_pages = cpu_page(job->v_pages, 0) + cpu_page_words(job->v_pages, kv_col * KV_PAGE),
            .page = pages_of(job->step, block.seq),
            .closed = scratch,
            .score = score,
            .query = score + (by_amx ? ATTEND_AMX_GROUPS * attend_amx_score_words(n_page)
                                     : (size_t)n_page * KV_PAGE * (size_t)scratch_rows(cpu)),
            .y_stride = job->y.stride,
            .q_stride = job->q.stride,
            .k_stride = cpu_page_words(job->k_pages, job->k_pages.stride),
            .v_stride = cpu_page_words(job->v_pages, job->v_pages.stride),
            .n_row = block.n_row,
            .pos = job->step->pos[block.row],
            .n_head = left < job->n_item_head ? left : job->n_item_head,
            .d_head = job->d_head,
            .is_pairs = is_pairs,
            .by_pairs = cpu->bf16 == GEMM_PAIRS,
            .scale = job->scale,
        };
        (by_amx ? cpu->simd->amx_attend : cpu->simd->attend)(&a);
    }
}

/* Heads in an item: as many as leave each thread ITEMS items, because neighbouring heads are read
 * as one stream of memory. */
static int item_heads(const struct cpu_backend *cpu, int n_head)
{
    enum { ITEMS = 4 };
    const int wanted = cpu->n_block > 0 ? ITEMS * cpu->base.n_thread / cpu->n_block + 1 : 1;
    const int n_part = wanted < n_head ? wanted : n_head;
    const int n = (n_head + n_part - 1) / n_part;
    return n < ATTEND_HEADS ? n : ATTEND_HEADS;
}

void cpu_attention(struct backend *be, struct tensor y, struct tensor q, struct tensor k_pages,
                   struct tensor v_pages, struct tensor k, struct tensor v, const struct step *step,
                   int n_head, float scale)
{
    const struct cpu_backend *const cpu = cpu_of(be);
    const int n_share = (int)(y.cols * KV_PAGE / k_pages.cols);
    if (k.data != NULL) {
        cpu_kv_store(be, k_pages, v_pages, k, v, step, n_head / n_share);
    }
    const int n_item_head = n_share > 1 ? 1 : item_heads(cpu, n_head);
    struct cache_job job = {.cpu = cpu,
                            .y = y,
                            .q = q,
                            .k_pages = k_pages,
                            .v_pages = v_pages,
                            .step = step,
                            .n_head = n_head,
                            .d_head = (int)y.cols / n_head,
                            .n_item_head = n_item_head,
                            .n_share = n_share,
                            .scale = scale};
    const int64_t n_item = (int64_t)cpu->n_block * ((n_head + n_item_head - 1) / n_item_head);
    CHECK(n_item <= INT32_MAX);
    pool_for(cpu->pool, (int)n_item, POOL_DYNAMIC, attend_items, &job);
}
