/* Embedding: rows of up to three tables are added. */
#include "kernels/cpu/cpu.h"

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
    const int64_t end = cpu_end_row(job->y, first, n);
    for (int64_t r = (int64_t)first * CPU_ITEM_ROWS; r < end; r++) {
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
    cpu_for_rows(cpu, y, embed_rows, &job);
}
