/* Gates: SiLU by vectors; those with one number for each row are ref's own code. */
#include "kernels/cpu/cpu.h"

struct gate_job {
    struct backend *be;
    struct tensor y, x, g;
    enum gate_kind kind;
};

static void gate_rows(void *arg, int thread, int first, int n)
{
    (void)thread;
    const struct gate_job *const job = arg;
    if (job->kind != GATE_SILU) {
        ref_gate(job->be, cpu_item_rows(job->y, first, n), cpu_item_rows(job->x, first, n),
                 cpu_item_rows(job->g, first, n), job->kind);
        return;
    }
    const int64_t end = cpu_end_row(job->y, first, n);
    for (int64_t r = (int64_t)first * CPU_ITEM_ROWS; r < end; r++) {
        cpu_of(job->be)->simd->row_silu(row_f32(job->y, r), row_f32(job->x, r), row_f32(job->g, r),
                                        job->y.cols);
    }
}

void cpu_gate(struct backend *be, struct tensor y, struct tensor x, struct tensor g,
              enum gate_kind kind)
{
    struct gate_job job = {be, y, x, g, kind};
    cpu_for_rows(cpu_of(be), y, gate_rows, &job);
}
