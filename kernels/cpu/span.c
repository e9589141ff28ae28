/* Attention with spans: an item is one head of up to ATTEND_ROWS rows of a sequence. */
#include "kernels/cpu/cpu.h"

struct span_job {
    const struct cpu_backend *cpu;
    struct tensor y, q, k_pages, v_pages;
    const struct step *step;
    const struct span_shape *shape;
    int64_t d_head;
};

size_t cpu_span_slice_bytes(const struct simd_kernels *simd, const struct step_limits *limits)
{
    const int d_head = limits->n_head > 0 ? limits->d_model / limits->n_head : 0;
    return limits->n_span_max == 0
               ? 0
               : span_scratch_floats(limits->n_span_max, d_head, simd->tile_rows) * sizeof(float);
}

static void attend_items(void *arg, int thread, int first, int n)
{
    const struct span_job *const job = arg;
    const struct span_shape *const shape = job->shape;
    const struct step *const step = job->step;
    const struct row_block *const blocks = job->cpu->blocks.data;
    for (int item = first; item < first + n; item++) {
        const struct row_block block = blocks[item % job->cpu->n_block];
        const int h = item / job->cpu->n_block;
        const int64_t col = h * job->d_head;
        const int64_t persistent = (int64_t)h * shape->n_persistent;
        const struct attend_span a = {
            .y = row_f32(job->y, block.row) + col,
            .q = row_f32(job->q, block.row) + col,
            .k_pages = cpu_page(job->k_pages, 0) + cpu_page_words(job->k_pages, col * KV_PAGE),
            .v_pages = cpu_page(job->v_pages, 0) + cpu_page_words(job->v_pages, col * KV_PAGE),
            .page = step->page + (int64_t)block.seq * step->limits.n_page_max,
            .scratch = cpu_slice(job->cpu, thread),
            .position = shape->position.data,
            .mask = shape->mask.data != NULL ? row_f32(shape->mask, h) : NULL,
            .key = shape->n_persistent > 0 ? row_f32(shape->key, col) : NULL,
            .value = shape->n_persistent > 0 ? row_f32(shape->value, persistent) : NULL,
            .y_stride = job->y.stride,
            .q_stride = job->q.stride,
            .k_stride = cpu_page_words(job->k_pages, job->k_pages.stride),
            .v_stride = cpu_page_words(job->v_pages, job->v_pages.stride),
            .position_stride = shape->position.stride,
            .key_stride = shape->key.stride,
            .value_stride = shape->value.stride,
            .n_row = block.n_row,
            .pos = step->pos[block.row],
            .n_page = step->limits.n_page_max,
            .d_head = (int)job->d_head,
            .window = shape->window,
            .n_persistent = shape->n_persistent,
            .is_pairs = job->k_pages.dtype == DTYPE_BF16,
            .scale = shape->scale,
        };
        job->cpu->simd->attend_span(&a);
    }
}

void cpu_span_attention(struct backend *be, struct tensor y, struct tensor q, struct tensor k_pages,
                        struct tensor v_pages, const struct step *step,
                        const struct span_shape *shape)
{
    const struct cpu_backend *const cpu = cpu_of(be);
    struct span_job job = {.cpu = cpu,
                           .y = y,
                           .q = q,
                           .k_pages = k_pages,
                           .v_pages = v_pages,
                           .step = step,
                           .shape = shape,
                           .d_head = y.cols / shape->n_head};
    const int64_t n_item = (int64_t)cpu->n_block * shape->n_head;
    CHECK(n_item <= INT32_MAX);
    CHECK(span_scratch_floats(shape->window + shape->n_persistent, (int)job.d_head,
                              cpu->simd->tile_rows) *
              sizeof(float) <=
          cpu->slice_bytes);
    pool_for(cpu->pool, (int)n_item, POOL_DYNAMIC, attend_items, &job);
}
