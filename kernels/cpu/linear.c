/* The linear layer: packs the rows of x, then lets the threads stream the panels of W; and two of
 * them, where the first one's outputs become the second one's packed rows at once.
 *
 * Up to STREAM_ROWS rows the op is bound by the bytes of W, and each thread streams its own part of
 * it. With more rows it is bound by multiply-adds; panels (and tiles, where panels are fewer than
 * threads could use) are given out one by one. */
#include "kernels/cpu/cpu.h"

enum {
    STREAM_ROWS = 16,
    /* A hand-over to the threads takes about as long as copying this many floats. */
    PACK_ALONE = 1 << 14,
    /* More outputs than the caches next to the cores hold beside all else: written past them, a
     * line need not be read first. That is an eighth of the vocabulary's product, at 8 rows too. */
    STREAM_BYTES = 1 << 20,
    LINE_BYTES = 64,
    ITEMS_PER_THREAD = 4, /* enough that the last ones end together */
};

struct linear_job {
    const struct cpu_backend *cpu;
    struct gemm gemm;
    int n_panel;
    int n_part; /* parts the tiles are divided into */
};

static void pack_tiles(void *arg, int thread, int first, int n)
{
    (void)thread;
    const struct linear_job *const job = arg;
    for (int tile = first; tile < first + n; tile++) {
        job->cpu->simd->gemm_pack(&job->gemm, tile);
    }
}

/* Items are panels, once for each part of the tiles. */
static void multiply(void *arg, int thread, int first, int n)
{
    const struct linear_job *const job = arg;
    const int n_tile = job->gemm.n_tile;
    for (int item = first; item < first + n;) {
        const int part = item / job->n_panel;
        const int panel = item % job->n_panel;
        const int left = job->n_panel - panel;
        const int n_panel = first + n - item < left ? first + n - item : left;
        const int tile = (int)((int64_t)n_tile * part / job->n_part);
        const int end = (int)((int64_t)n_tile * (part + 1) / job->n_part);
        job->cpu->simd->gemm_panels(&job->gemm, panel, n_panel, tile, end - tile,
                                    cpu_slice(job->cpu, thread));
        item += n_panel;
    }
}

/* Packs the rows of all tiles. */
static void pack(struct cpu_backend *cpu, struct linear_job *job)
{
    struct gemm *const g = &job->gemm;
    if ((int64_t)g->n_row * g->n_in <= PACK_ALONE) {
        pack_tiles(job, 0, 0, g->n_tile);
    } else {
        pool_for(cpu->pool, g->n_tile, POOL_DYNAMIC, pack_tiles, job);
    }
}

static void multiply_packed(struct cpu_backend *cpu, struct linear_job *job)
{
    const struct gemm *const g = &job->gemm;
    job->n_part = 1;
    if (g->n_row <= STREAM_ROWS) {
        pool_for(cpu->pool, job->n_panel, POOL_STREAM, multiply, job);
        return;
    }
    const int wanted = cpu->base.n_thread * ITEMS_PER_THREAD;
    if (job->n_panel < wanted) {
        const int n_part = (wanted + job->n_panel - 1) / job->n_panel;
        job->n_part = n_part < g->n_tile ? n_part : g->n_tile;
    }
    pool_for(cpu->pool, job->n_panel * job->n_part, POOL_STREAM, multiply, job);
}

static struct linear_job job_of(struct cpu_backend *cpu, struct tensor y, struct tensor x,
                                const struct weight *weight, struct tensor bias, enum act act)
{
    const struct cpu_weight *const w = cpu_weight_of(weight);
    CHECK(w->desc.kind == WEIGHT_MATRIX);
    CHECK_VIEW(x, DTYPE_F32, y.rows, w->cols);
    CHECK_VIEW(y, DTYPE_F32, x.rows, w->rows);
    CHECK(bias.data == NULL || (bias.dtype == DTYPE_F32 && bias.rows == 1 && bias.cols == w->rows));
    CHECK(act == ACT_NONE || act == ACT_RELU || act == ACT_GELU);
    return (struct linear_job){
        .cpu = cpu,
        .gemm = {.y_stride = y.stride,
                 .x_stride = x.stride,
                 .words = cpu->words.data,
                 .x_scale = cpu->x_scale,
                 .w = w->data,
                 .bias = bias.data,
                 .n_in = (int)w->cols,
                 .n_out = (int)w->rows,
                 .dtype = w->desc.dtype,
                 .is_split = w->is_split,
                 .bf16 = cpu->bf16,
                 .act = act},
        .n_panel = gemm_n_panel((int)w->rows),
    };
}

/* Takes up to GEMM_ROWS rows from row on, divided among tiles. */
static void set_rows(struct linear_job *job, struct tensor y, struct tensor x, int64_t row)
{
    struct gemm *const g = &job->gemm;
    g->n_row = y.rows - row < GEMM_ROWS ? (int)(y.rows - row) : GEMM_ROWS;
    g->y = row_f32(y, row);
    g->x = row_f32(x, row);
    const size_t y_bytes = (size_t)g->n_row * (size_t)g->n_out * sizeof *g->y;
    g->is_streamed = y_bytes > STREAM_BYTES && (uintptr_t)g->y % LINE_BYTES == 0 &&
                     g->y_stride * (int64_t)sizeof *g->y % LINE_BYTES == 0;
    const int tile_rows = gemm_is_amx(g) ? AMX_ROWS : job->cpu->simd->tile_rows;
    g->n_tile = (g->n_row + tile_rows - 1) / tile_rows;
}

void cpu_linear(struct backend *be, struct tensor y, struct tensor x, const struct weight *weight,
                struct tensor bias, enum act act)
{
    struct cpu_backend *const cpu = cpu_of(be);
    struct linear_job job = job_of(cpu, y, x, weight, bias, act);
    for (int64_t row = 0; row < y.rows; row += GEMM_ROWS) {
        set_rows(&job, y, x, row);
        pack(cpu, &job);
        multiply_packed(cpu, &job);
    }
}

void cpu_ffn(struct backend *be, struct tensor y, struct tensor hidden, struct tensor x,
             const struct ffn *ffn)
{
    struct cpu_backend *const cpu = cpu_of(be);
    struct linear_job up = job_of(cpu, hidden, x, ffn->up, ffn->up_bias, ffn->act);
    struct linear_job down = job_of(cpu, y, hidden, ffn->down, ffn->down_bias, ACT_NONE);
    if (up.gemm.dtype == DTYPE_I8 || up.gemm.dtype != down.gemm.dtype || up.gemm.is_split ||
        down.gemm.is_split ||
        up.gemm.n_out % PANEL != 0) { /* the scale of bytes is known when a row is whole */
        cpu_linear(be, hidden, x, ffn->up, ffn->up_bias, ffn->act);
        cpu_linear(be, y, hidden, ffn->down, ffn->down_bias, ACT_NONE);
        return;
    }
    up.gemm.next_words = cpu->hidden_words.data;
    down.gemm.words = cpu->hidden_words.data;
    for (int64_t row = 0; row < y.rows; row += GEMM_ROWS) {
        set_rows(&up, hidden, x, row);
        pack(cpu, &up);
        multiply_packed(cpu, &up);
        set_rows(&down, y, hidden, row);
        multiply_packed(cpu, &down);
    }
}
