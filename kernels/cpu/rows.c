/* Embedding, norms, rotary positions, gates and the rescoring of memories: rows are independent, a
 * few of them are one item.
 * What few models use and costs little beside its neighbours is ref's own code, a few rows a
 * thread. */
#include "kernels/cpu/cpu.h"

enum {
    ITEM_ROWS = 4,
    ALONE = 1 << 12, /* elements: up to as many a hand-over to the threads costs more than it saves,
                      * though rows that were stored past the caches come from memory */
};

static void for_rows(struct cpu_backend *cpu, struct tensor y, pool_fn *fn, void *arg)
{
    const int n_item = (int)((y.rows + ITEM_ROWS - 1) / ITEM_ROWS);
    if (y.rows * y.cols <= ALONE) {
        fn(arg, 0, 0, n_item);
    } else {
        pool_for(cpu->pool, n_item, POOL_DYNAMIC, fn, arg);
    }
}

static int64_t end_row(struct tensor y, int first, int n)
{
    const int64_t end = ((int64_t)first + n) * ITEM_ROWS;
    return end < y.rows ? end : y.rows;
}

/* The rows of t that items first .. first+n-1 stand for. */
static struct tensor item_rows(struct tensor t, int first, int n)
{
    const int64_t row = (int64_t)first * ITEM_ROWS;
    return tensor_rows(t, row, end_row(t, first, n) - row);
}

/* ---- embedding --------------------------------------------------------------------------------*/

struct embed_job {
    const struct simd_kernels *simd;
    struct tensor y;
    const struct step *step;
    const struct cpu_weight *tok, *pos, *lang; /* the last two may be NULL */
};

static struct row_source source_of(const struct cpu_weight *w, int32_t row)
{
    return (struct row_source){(const char *)w->data + row * w->row_bytes, w->stored,
                               w->row_scale != NULL ? w->row_scale[row] : 1.0f};
}

static void embed_rows(void *arg, int thread, int first, int n)
{
    (void)thread;
    const struct embed_job *const job = arg;
    const int64_t end = end_row(job->y, first, n);
    for (int64_t r = (int64_t)first * ITEM_ROWS; r < end; r++) {
        struct row_source source[3] = {source_of(job->tok, job->step->token[r])};
        int n_source = 1;
        if (job->pos != NULL) {
            source[n_source++] = source_of(job->pos, job->step->pos[r]);
        }
        if (job->lang != NULL) {
            source[n_source++] = source_of(job->lang, job->step->lang[r]);
        }
        job->simd->row_sum(row_f32(job->y, r), source, n_source, job->y.cols);
    }
}

void cpu_embed(struct backend *be, struct tensor y, const struct step *step,
               const struct weight *tok, const struct weight *pos, const struct weight *lang)
{
    struct cpu_backend *const cpu = cpu_of(be);
    struct embed_job job = {cpu->simd,          y, step, cpu_weight_of(tok), cpu_weight_of(pos),
                            cpu_weight_of(lang)};
    for_rows(cpu, y, embed_rows, &job);
}

/* ---- layer norm -------------------------------------------------------------------------------*/

struct norm_job {
    const struct simd_kernels *simd;
    struct tensor y, x, r; /* r.data may be NULL */
    const float *gamma, *beta;
    float eps;
};

static void norm_rows(void *arg, int thread, int first, int n)
{
    (void)thread;
    const struct norm_job *const job = arg;
    const int64_t end = end_row(job->y, first, n);
    for (int64_t r = (int64_t)first * ITEM_ROWS; r < end; r++) {
        job->simd->row_norm(row_f32(job->y, r), row_f32(job->x, r),
                            job->r.data == NULL ? NULL : row_f32(job->r, r), job->gamma, job->beta,
                            job->y.cols, job->eps);
    }
}

static void norm(struct backend *be, struct tensor y, struct tensor x, struct tensor r,
                 struct tensor gamma, struct tensor beta, float eps)
{
    struct cpu_backend *const cpu = cpu_of(be);
    struct norm_job job = {cpu->simd, y, x, r, gamma.data, beta.data, eps};
    for_rows(cpu, y, norm_rows, &job);
}

void cpu_norm(struct backend *be, struct tensor y, struct tensor x, struct tensor gamma,
              struct tensor beta, float eps)
{
    norm(be, y, x, (struct tensor){0}, gamma, beta, eps);
}

void cpu_add_norm(struct backend *be, struct tensor y, struct tensor x, struct tensor r,
                  struct tensor gamma, struct tensor beta, float eps)
{
    norm(be, y, x, r, gamma, beta, eps);
}

/* ---- RMS norm, rotary positions, gates --------------------------------------------------------*/

struct rms_job {
    const struct simd_kernels *simd;
    struct tensor y, sum, x, r; /* sum.data and r.data may be NULL */
    const float *gamma;
    float eps;
};

static void rms_rows(void *arg, int thread, int first, int n)
{
    (void)thread;
    const struct rms_job *const job = arg;
    const bool adds = job->r.data != NULL;
    const int64_t end = end_row(job->y, first, n);
    for (int64_t r = (int64_t)first * ITEM_ROWS; r < end; r++) {
        job->simd->row_rms_norm(row_f32(job->y, r), adds ? row_f32(job->sum, r) : NULL,
                                row_f32(job->x, r), adds ? row_f32(job->r, r) : NULL, job->gamma,
                                job->y.cols, job->eps);
    }
}

void cpu_rms_norm(struct backend *be, struct tensor y, struct tensor sum, struct tensor x,
                  struct tensor r, struct tensor gamma, float eps)
{
    struct cpu_backend *const cpu = cpu_of(be);
    struct rms_job job = {cpu->simd, y, sum, x, r, gamma.data, eps};
    for_rows(cpu, y, rms_rows, &job);
}

struct rope_job {
    const struct simd_kernels *simd;
    struct tensor x, table;
    const struct step *step;
    int n_head;
};

static void rope_rows(void *arg, int thread, int first, int n)
{
    (void)thread;
    const struct rope_job *const job = arg;
    const int64_t end = end_row(job->x, first, n);
    for (int64_t r = (int64_t)first * ITEM_ROWS; r < end; r++) {
        job->simd->row_rope(row_f32(job->x, r), row_f32(job->table, job->step->pos[r]), job->n_head,
                            job->x.cols / job->n_head);
    }
}

void cpu_rope(struct backend *be, struct tensor x, struct tensor table, const struct step *step,
              int n_head)
{
    struct cpu_backend *const cpu = cpu_of(be);
    struct rope_job job = {cpu->simd, x, table, step, n_head};
    for_rows(cpu, x, rope_rows, &job);
}

struct gate_job {
    struct backend *be;
    struct tensor y, x, g;
    enum gate_kind kind;
};

static void gate_rows(void *arg, int thread, int first, int n)
{
    (void)thread;
    const struct gate_job *const job = arg;
    if (job->kind == GATE_SIGMOID) {
        ref_gate(job->be, item_rows(job->y, first, n), item_rows(job->x, first, n),
                 item_rows(job->g, first, n), job->kind);
        return;
    }
    const int64_t end = end_row(job->y, first, n);
    for (int64_t r = (int64_t)first * ITEM_ROWS; r < end; r++) {
        cpu_of(job->be)->simd->row_silu(row_f32(job->y, r), row_f32(job->x, r), row_f32(job->g, r),
                                        job->y.cols);
    }
}

void cpu_gate(struct backend *be, struct tensor y, struct tensor x, struct tensor g,
              enum gate_kind kind)
{
    struct gate_job job = {be, y, x, g, kind};
    for_rows(cpu_of(be), y, gate_rows, &job);
}

/* ---- L2 norm, rescoring ---------------------------------------------------------------------*/

struct l2_job {
    struct backend *be;
    struct tensor y, x;
    int n_run;
};

static void l2_rows(void *arg, int thread, int first, int n)
{
    (void)thread;
    const struct l2_job *const job = arg;
    ref_l2_norm(job->be, item_rows(job->y, first, n), item_rows(job->x, first, n), job->n_run);
}

void cpu_l2_norm(struct backend *be, struct tensor y, struct tensor x, int n_run)
{
    struct l2_job job = {be, y, x, n_run};
    for_rows(cpu_of(be), y, l2_rows, &job);
}

struct rescore_job {
    struct backend *be;
    struct tensor slots, shares, slot_map;
    const struct pkm_rescore *rescore;
};

static void rescore_rows(void *arg, int thread, int first, int n)
{
    (void)thread;
    const struct rescore_job *const job = arg;
    ref_pkm_rescore(job->be, item_rows(job->slots, first, n), item_rows(job->shares, first, n),
                    job->slot_map, job->rescore);
}

void cpu_pkm_rescore(struct backend *be, struct tensor slots, struct tensor shares,
                     struct tensor slot_map, const struct pkm_rescore *rescore)
{
    struct rescore_job job = {be, slots, shares, slot_map, rescore};
    for_rows(cpu_of(be), slots, rescore_rows, &job);
}
