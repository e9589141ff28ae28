/* The linear layer: packs the rows of x, then lets the threads stream the panels of W; two of them,
 * where the first one's outputs become the second one's packed rows at once; and the last one,
 * where the sums that log-probabilities are made of are taken while logits are still in registers.
 *
 * Up to STREAM_ROWS rows the op is bound by the bytes of W, and each thread streams its own part of
 * it. With more rows it is bound by multiply-adds; panels (and tiles, where panels are fewer than
 * threads could use) are given out one by one. */
#include "kernels/cpu/cpu.h"

enum {
    STREAM_ROWS = 16,
    /* A hand-over to the threads takes about as long as copying this many floats. */
    PACK_ALONE = 1 << 14,
    /* Large outputs use non-temporal stores, which avoids reading each line for ownership and saves
     * an eighth of the vocabulary's product. So do outputs of few rows: W has driven their lines
     * out of the caches, and fetching them would evict lines of W. */
    STREAM_BYTES = 1 << 20,
    STREAM_FEW_ROWS = 32,
    LINE_BYTES = 64,
    ITEMS_PER_THREAD = 4, /* enough items that all threads end at about the same time */
};

struct linear_job {
    const struct cpu_backend *cpu;
    struct gemm gemm;
    int n_panel;
    int n_part;     /* parts that the tiles are divided into */
    int n_row_part; /* parts that each tile's rows are packed by */
};

/* Items are parts of a tile's rows. */
static void pack_tiles(void *arg, int thread, int first, int n)
{
    (void)thread;
    const struct linear_job *const job = arg;
    for (int item = first; item < first + n; item++) {
        const int tile = item / job->n_row_part;
        const int part = item % job->n_row_part;
        const int n_row = gemm_tile_row(&job->gemm, tile + 1) - gemm_tile_row(&job->gemm, tile);
        const int row = n_row * part / job->n_row_part;
        const int end = n_row * (part + 1) / job->n_row_part;
        job->cpu->simd->gemm_pack(&job->gemm, tile, row, end - row);
    }
}

/* First tile of a part; part n_part starts where the tiles end. */
static int part_tile(const struct linear_job *job, int part)
{
    return (int)((int64_t)job->gemm.n_tile * part / job->n_part);
}

/* Items are panels, once for each part of the tiles. */
static void multiply(void *arg, int thread, int first, int n)
{
    const struct linear_job *const job = arg;
    for (int item = first; item < first + n;) {
        const int part = item / job->n_panel;
        const int panel = item % job->n_panel;
        const int left = job->n_panel - panel;
        const int n_panel = first + n - item < left ? first + n - item : left;
        const int tile = part_tile(job, part);
        const int end = part_tile(job, part + 1);
        job->cpu->simd->gemm_panels(&job->gemm, panel, n_panel, tile, end - tile,
                                    cpu_slice(job->cpu, thread));
        item += n_panel;
    }
}

/* Packs the rows of all tiles. */
static void pack(struct cpu_backend *cpu, struct linear_job *job)
{
    const struct gemm *const g = &job->gemm;
    job->n_row_part = 1;
    if ((int64_t)g->n_row * g->n_in <= PACK_ALONE) {
        pack_tiles(job, 0, 0, g->n_tile);
        return;
    }
    if (g->n_tile < cpu->base.n_thread) {
        job->n_row_part = (cpu->base.n_thread + g->n_tile - 1) / g->n_tile;
    }
    pool_for(cpu->pool, g->n_tile * job->n_row_part, POOL_DYNAMIC, pack_tiles, job);
}

/* Parts that the tiles are divided into, so that n panels or blocks give every thread work. */
static int part_of_tiles(const struct linear_job *job, int n)
{
    const int wanted = job->cpu->base.n_thread * ITEMS_PER_THREAD;
    const int n_part = (wanted + n - 1) / n;
    return n_part < job->gemm.n_tile ? n_part : job->gemm.n_tile;
}

static void multiply_packed(struct cpu_backend *cpu, struct linear_job *job)
{
    job->n_part = job->gemm.n_row <= STREAM_ROWS ? 1 : part_of_tiles(job, job->n_panel);
    pool_for(cpu->pool, job->n_panel * job->n_part, POOL_STREAM, multiply, job);
}

static struct linear_job job_of(struct cpu_backend *cpu, struct tensor y, struct tensor x,
                                const struct weight *weight, struct tensor bias, enum act act)
{
    const struct cpu_weight *const w = cpu_weight_of(weight);
    return (struct linear_job){
        .cpu = cpu,
        .gemm = {.y_stride = y.stride,
                 .x_stride = x.stride,
                 .words = cpu->words.data,
                 .x_scale = cpu->x_scale,
                 .w = w->data,
                 .bias = bias.data,
                 .n_in = (int)weight->cols,
                 .n_out = (int)weight->rows,
                 .dtype = w->stored,
                 .is_split = w->is_split,
                 .bf16 = cpu->bf16,
                 .act = act},
        .n_panel = gemm_n_panel((int)weight->rows),
    };
}

/* Takes as many rows from row on as are packed at a time, divided among tiles. */
static void set_rows(struct linear_job *job, struct tensor y, struct tensor x, int64_t row)
{
    struct gemm *const g = &job->gemm;
    const int64_t left = y.rows - row;
    g->n_row = left < GEMM_ROWS ? (int)left : GEMM_ROWS;
    if (!gemm_is_amx(g) && left > GEMM_VECTOR_ROWS) {
        g->n_row = GEMM_VECTOR_ROWS;
    }
    g->y = row_f32(y, row);
    g->x = row_f32(x, row);
    const size_t y_bytes = (size_t)g->n_row * (size_t)g->n_out * sizeof *g->y;
    const bool is_few = g->n_row <= STREAM_FEW_ROWS && g->dtype != DTYPE_F32;
    g->is_streamed = (is_few || y_bytes > STREAM_BYTES) && (uintptr_t)g->y % LINE_BYTES == 0 &&
                     g->y_stride * (int64_t)sizeof *g->y % LINE_BYTES == 0;
    const int tile_rows = gemm_is_amx(g) ? AMX_ROWS : job->cpu->simd->tile_rows;
    g->n_tile = (g->n_row + tile_rows - 1) / tile_rows;
}

void cpu_linear(struct backend *be, struct tensor y, struct tensor x, const struct weight *weight,
                struct tensor bias, enum act act)
{
    struct cpu_backend *const cpu = cpu_of(be);
    struct linear_job job = job_of(cpu, y, x, weight, bias, act);
    for (int64_t row = 0; row < y.rows; row += job.gemm.n_row) {
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
    for (int64_t row = 0; row < y.rows; row += up.gemm.n_row) {
        set_rows(&up, hidden, x, row);
        pack(cpu, &up);
        multiply_packed(cpu, &up);
        set_rows(&down, y, hidden, row);
        multiply_packed(cpu, &down);
    }
}

/* ---- logits ---------------------------------------------------------------------------------- */

/* The target's logit in rows whose target is known: the product of the row and one panel, with the
 * same bits as in the whole product. */
static void target_items(void *arg, int thread, int first, int n)
{
    const struct linear_job *const job = arg;
    const size_t panel_words = gemm_panel_words(job->gemm.n_in, job->gemm.dtype);
    for (int row = first; row < first + n; row++) {
        struct logit_goal *const goal = &cpu_goals(job->cpu)[row];
        if (goal->target < 0) {
            continue;
        }
        const int panel = goal->target / PANEL;
        float y[PANEL];
        float x_scale;
        struct gemm one = job->gemm;
        one.x += row * one.x_stride;
        one.words = cpu_slice(job->cpu, thread);
        one.x_scale = &x_scale;
        one.y = y;
        one.is_streamed = false;
        one.w += (size_t)panel * panel_words;
        one.bias = one.bias != NULL ? one.bias + panel * PANEL : NULL;
        one.n_out = one.n_out - panel * PANEL < PANEL ? one.n_out - panel * PANEL : PANEL;
        one.n_row = one.n_tile = 1;
        job->cpu->simd->gemm_pack(&one, 0, 0, 1);
        job->cpu->simd->gemm_panels(&one, 0, 1, 0, 1, NULL);
        goal->target_z = y[goal->target % PANEL];
    }
}

/* Items are blocks of logits, once for each part of the tiles. */
static void multiply_blocks(void *arg, int thread, int first, int n)
{
    const struct linear_job *const job = arg;
    const struct cpu_backend *const cpu = job->cpu;
    const int n_vocab = job->gemm.n_out;
    const int n_block = cpu_n_block(n_vocab);
    char *const slice = cpu_slice(cpu, thread);
    struct gemm g = job->gemm;
    struct logit_rows *const room = (void *)(slice + cpu_linear_slice_bytes(g.n_in));
    g.logits = room->block;
    for (int item = first; item < first + n; item++) {
        const int block = item % n_block;
        const int part = item / n_block;
        const int panel = cpu_block_panel(n_vocab, block);
        const int tile = part_tile(job, part);
        const int end = part_tile(job, part + 1);
        for (int row = gemm_tile_row(&g, tile); row < gemm_tile_row(&g, end); row++) {
            logit_begin(&room->block[row], &room->more[row], &cpu_goals(cpu)[row]);
        }
        cpu->simd->gemm_panels(&g, panel, cpu_block_panel(n_vocab, block + 1) - panel, tile,
                               end - tile, (float *)(void *)slice);
        for (int row = gemm_tile_row(&g, tile); row < gemm_tile_row(&g, end); row++) {
            cpu->simd->logit_end(cpu_parts(cpu, row) + block, &room->block[row]);
        }
    }
}

void cpu_linear_outputs(struct backend *be, struct tensor logits, struct tensor x,
                        const struct weight *weight, struct tensor bias, struct step *step,
                        int first)
{
    struct cpu_backend *const cpu = cpu_of(be);
    if (logits.rows <= STREAM_ROWS) { /* the bytes of W take the time, and logits stay near */
        cpu_linear(be, logits, x, weight, bias, ACT_NONE);
        cpu_outputs(be, logits, step, first);
        return;
    }
    struct linear_job job = job_of(cpu, logits, x, weight, bias, ACT_NONE);
    const int n_block = cpu_n_block(job.gemm.n_out);
    for (int64_t row = 0; row < logits.rows; row += job.gemm.n_row) {
        set_rows(&job, logits, x, row);
        const struct tensor part = tensor_rows(logits, row, job.gemm.n_row);
        cpu_set_goals(cpu, part, step, first + (int)row);
        pack(cpu, &job);
        pool_for(cpu->pool, job.gemm.n_row, POOL_DYNAMIC, target_items, &job);
        job.n_part = part_of_tiles(&job, n_block);
        pool_for(cpu->pool, n_block * job.n_part, POOL_STREAM, multiply_blocks, &job);
        cpu_write_outputs(cpu, part, step, first + (int)row);
    }
}
