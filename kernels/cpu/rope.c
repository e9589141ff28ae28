/* Rotary position embedding. */
#include "kernels/cpu/cpu.h"

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
    const int64_t end = cpu_end_row(job->x, first, n);
    for (int64_t r = (int64_t)first * CPU_ITEM_ROWS; r < end; r++) {
        job->simd->row_rope(row_f32(job->x, r), row_f32(job->table, job->step->pos[r]), job->n_head,
                            job->x.cols / job->n_head);
    }
}

void cpu_rope(struct backend *be, struct tensor x, struct tensor table, const struct step *step,
              int n_head)
{
    struct cpu_backend *const cpu = cpu_of(be);
    struct rope_job job = {cpu->simd, x, table, step, n_head};
    cpu_for_rows(cpu, x, rope_rows, &job);
}
