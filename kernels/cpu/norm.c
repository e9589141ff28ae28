/* Layer norms, RMS norms and L2 norms. L2 norms, which few models use and which cost little beside
 * their neighbours, are ref's own code, a few rows a thread. */
#include "kernels/cpu/cpu.h"

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
    const int64_t end = cpu_end_row(job->y, first, n);
    for (int64_t r = (int64_t)first * CPU_ITEM_ROWS; r < end; r++) {
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
    cpu_for_rows(cpu, y, norm_rows, &job);
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

/* ---- RMS norm ---------------------------------------------------------------------------------*/

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
    const int64_t end = cpu_end_row(job->y, first, n);
    for (int64_t r = (int64_t)first * CPU_ITEM_ROWS; r < end; r++) {
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
    cpu_for_rows(cpu, y, rms_rows, &job);
}

struct head_job {
    const struct simd_kernels *simd;
    struct tensor x, gamma;
    float eps;
};

static void head_rows(void *arg, int thread, int first, int n)
{
    (void)thread;
    const struct head_job *const job = arg;
    const int64_t end = cpu_end_row(job->x, first, n);
    const int64_t d = job->gamma.cols;
    for (int64_t r = (int64_t)first * CPU_ITEM_ROWS; r < end; r++) {
        for (int64_t c = 0; c < job->x.cols; c += d) {
            float *const head = row_f32(job->x, r) + c;
            job->simd->row_rms_norm(head, NULL, head, NULL, job->gamma.data, d, job->eps);
        }
    }
}

void cpu_head_norm(struct backend *be, struct tensor x, struct tensor gamma, int n_head, float eps)
{
    struct cpu_backend *const cpu = cpu_of(be);
    struct head_job job = {cpu->simd, x, gamma, eps};
    (void)n_head;
    cpu_for_rows(cpu, x, head_rows, &job);
}

/* ---- L2 norm ----------------------------------------------------------------------------------*/

struct l2_job {
    struct backend *be;
    struct tensor y, x;
    int n_run;
};

static void l2_rows(void *arg, int thread, int first, int n)
{
    (void)thread;
    const struct l2_job *const job = arg;
    ref_l2_norm(job->be, cpu_item_rows(job->y, first, n), cpu_item_rows(job->x, first, n),
                job->n_run);
}

void cpu_l2_norm(struct backend *be, struct tensor y, struct tensor x, int n_run)
{
    struct l2_job job = {be, y, x, n_run};
    cpu_for_rows(cpu_of(be), y, l2_rows, &job);
}
