/* What is computed from rows of logits: a drawn token, log-probabilities, ranks, best tokens,
 * entropy; and log softmax.
 *
 * Each row is cut into blocks, always the same ones for a vocabulary, and the parts computed from
 * them are merged in block order: so one thread or many compute a row with the same bits. The parts
 * come from a first pass over the logits; or, where many rows share a product, from the threads
 * that compute the product (linear.c). Those logits need not be stored then, except in rows that
 * draw a token or want the best ones. */
#include "kernels/cpu/sample.h"

#include <math.h>

struct outputs_job {
    const struct cpu_backend *cpu;
    struct tensor logits;
    struct step *step;
    int first;
};

enum { OUT_OF_LOGITS = OUT_LOGPROB | OUT_TOP | OUT_ENTROPY };

void cpu_set_goals(struct cpu_backend *cpu, struct tensor logits, const struct step *step,
                   int first)
{
    CHECK(step->n_out <= INT32_MAX / LOGIT_BLOCKS);
    for (int row = 0; row < logits.rows; row++) {
        const int want = step->out_want[first + row];
        const int32_t target = step->target[first + row];
        const bool is_known = (want & OUT_LOGPROB) != 0 && target != TARGET_SAMPLED;
        cpu_goals(cpu)[row] = (struct logit_goal){
            .target_z = INFINITY,
            .target = is_known ? target : -1,
            .is_summed = (want & OUT_OF_LOGITS) != 0 || draw_takes_sums(&step->sample[first + row]),
            .is_entropy = (want & OUT_ENTROPY) != 0,
            .is_kept = (want & (OUT_SAMPLE | OUT_TOP)) != 0,
        };
    }
}

/* Computes the parts of blocks, each an item. */
static void block_items(void *arg, int thread, int first, int n)
{
    (void)thread;
    const struct outputs_job *const job = arg;
    const struct simd_kernels *const simd = job->cpu->simd;
    const int n_vocab = (int)job->logits.cols;
    const int n_block = cpu_n_block(n_vocab);
    for (int item = first; item < first + n; item++) {
        const int row = item / n_block;
        const struct logit_goal *const goal = &cpu_goals(job->cpu)[row];
        if (!goal->is_summed) {
            continue;
        }
        const int from = cpu_block_first(n_vocab, item % n_block);
        const int end = cpu_block_first(n_vocab, item % n_block + 1);
        struct logit_block block;
        struct logit_more more;
        logit_begin(&block, &more, goal);
        simd->logit_add(&block, row_f32(job->logits, row) + from, end - from, from);
        simd->logit_end(cpu_parts(job->cpu, row) + item % n_block, &block);
    }
}

static int32_t draw(const struct outputs_job *job, int thread, int row)
{
    const int after = row + pool_n_thread(job->cpu->pool);
    const struct logit_row r = {
        .z = row_f32(job->logits, row),
        .n_vocab = (int)job->logits.cols,
        .part = cpu_goals(job->cpu)[row].is_summed ? cpu_parts(job->cpu, row) : NULL,
        .next = after < job->logits.rows ? row_f32(job->logits, after) : NULL,
    };
    return cpu_draw(job->cpu, thread, job->step, job->first + row, &r);
}

/* Makes the token just drawn the target and counts the tokens that rank before it: with a smaller
 * id those whose logit is as large, with a larger id those whose logit is larger. A block whose
 * largest logit is smaller has none. */
static void aim_at_drawn(const struct outputs_job *job, int row)
{
    const struct simd_kernels *const simd = job->cpu->simd;
    const float *const z = row_f32(job->logits, row);
    const int n_vocab = (int)job->logits.cols;
    struct logit_part *const part = cpu_parts(job->cpu, row);
    struct logit_goal *const goal = &cpu_goals(job->cpu)[row];
    const int id = job->step->out_token[job->first + row];
    goal->target = id;
    goal->target_z = z[id];
    for (int b = 0; b < cpu_n_block(n_vocab); b++) {
        const int from = cpu_block_first(n_vocab, b);
        const int n = cpu_block_first(n_vocab, b + 1) - from;
        const int n_smaller = id < from ? 0 : id - from < n ? id - from : n;
        part[b].n_before = 0;
        if (part[b].max >= z[id]) {
            part[b].n_before =
                simd->logit_count(z + from, n_smaller, z[id]) +
                simd->logit_count(z + from + n_smaller, n - n_smaller, nextafterf(z[id], INFINITY));
        }
    }
}

/* A row's distribution: log p(i) = z[i] - base - log_total. */
struct distribution {
    double base;
    double log_total; /* NaN if the logits have no distribution */
    double entropy;
    int32_t n_before;
};

static struct distribution merge_parts(const struct logit_part *part, int n_block)
{
    float base = -INFINITY;
    bool is_good = true;
    for (int b = 0; b < n_block; b++) {
        is_good = is_good && part[b].is_good;
        base = part[b].base > base ? part[b].base : base;
    }
    if (!is_good || base == -INFINITY) {
        return (struct distribution){(double)NAN, (double)NAN, (double)NAN, -1};
    }
    struct distribution d = {.base = (double)base};
    double total = 0;
    double moment = 0;
    for (int b = 0; b < n_block; b++) {
        d.n_before += part[b].n_before;
        if (part[b].base > -INFINITY) { /* from the block's own base to the row's */
            const double down = (double)part[b].base - d.base;
            const double scale = exp(down);
            total += scale * part[b].sum;
            moment += scale * (part[b].moment + down * part[b].sum);
        }
    }
    CHECK(total > 0); /* the block with this base is in it */
    d.log_total = log(total);
    d.entropy = d.log_total - moment / total;
    return d;
}

static float logprob(const struct distribution *d, float z)
{
    return (float)((double)z - d->base - d->log_total);
}

/* The n_top best tokens; entries past the vocabulary, and all of a broken row, name no token. */
static void write_top(const struct outputs_job *job, int thread, const struct distribution *d,
                      const float *z, int out)
{
    struct step *const step = job->step;
    const bool is_valid = !isnan(d->log_total);
    const int n_vocab = (int)job->logits.cols;
    const int n = !is_valid ? 0 : step->n_top < n_vocab ? step->n_top : n_vocab;
    int32_t *const id = step->top_id + (int64_t)out * step->limits.n_top_max;
    float *const value = step->top_logprob + (int64_t)out * step->limits.n_top_max;
    if (n > 0) {
        const struct vocab_scratch scratch = cpu_vocab_scratch(job->cpu, thread, &step->limits);
        job->cpu->simd->select(id, value, z, n_vocab, n, &scratch.select);
    }
    for (int j = 0; j < step->n_top; j++) {
        id[j] = j < n ? id[j] : -1;
        value[j] = j < n ? logprob(d, value[j]) : is_valid ? -INFINITY : NAN;
    }
}

static void row_items(void *arg, int thread, int first, int n)
{
    const struct outputs_job *const job = arg;
    struct step *const step = job->step;
    for (int row = first; row < first + n; row++) {
        const int out = job->first + row;
        const int want = step->out_want[out];
        const struct logit_goal *const goal = &cpu_goals(job->cpu)[row];
        if ((want & OUT_SAMPLE) != 0) {
            step->out_token[out] = draw(job, thread, row);
        }
        if ((want & OUT_OF_LOGITS) == 0) {
            continue;
        }
        if ((want & OUT_LOGPROB) != 0 && goal->target < 0) {
            aim_at_drawn(job, row);
        }
        const struct distribution d =
            merge_parts(cpu_parts(job->cpu, row), cpu_n_block((int)job->logits.cols));
        if ((want & OUT_LOGPROB) != 0) {
            step->out_logprob[out] = logprob(&d, goal->target_z);
            step->out_rank[out] = d.n_before + 1; /* 0 of a broken row */
        }
        if ((want & OUT_TOP) != 0) {
            write_top(job, thread, &d, row_f32(job->logits, row), out);
        }
        if ((want & OUT_ENTROPY) != 0) {
            step->out_entropy[out] = (float)d.entropy;
        }
    }
}

void cpu_write_outputs(struct cpu_backend *cpu, struct tensor logits, struct step *step, int first)
{
    struct outputs_job job = {cpu, logits, step, first};
    pool_for(cpu->pool, (int)logits.rows, POOL_DYNAMIC, row_items, &job);
}

void cpu_outputs(struct backend *be, struct tensor logits, struct step *step, int first)
{
    struct cpu_backend *const cpu = cpu_of(be);
    const int n_row = (int)logits.rows;
    cpu_set_goals(cpu, logits, step, first);
    for (int row = 0; row < n_row; row++) {
        struct logit_goal *const goal = &cpu_goals(cpu)[row];
        if (goal->target >= 0) {
            goal->target_z = row_f32(logits, row)[goal->target];
        }
    }
    struct outputs_job job = {cpu, logits, step, first};
    pool_for(cpu->pool, n_row * cpu_n_block((int)logits.cols), POOL_STREAM, block_items, &job);
    cpu_write_outputs(cpu, logits, step, first);
}

/* ---- log softmax ------------------------------------------------------------------------------*/

struct softmax_job {
    const struct simd_kernels *simd;
    struct tensor y, base; /* base.data may be NULL */
};

/* An item is a row: its passes are short compared with the matrix product that made it. */
static void softmax_rows(void *arg, int thread, int first, int n)
{
    (void)thread;
    const struct softmax_job *const job = arg;
    const int n_col = (int)job->y.cols;
    for (int row = first; row < first + n; row++) {
        float *const z = row_f32(job->y, row);
        float max = 0;
        float shift = NAN;
        if (job->simd->logit_max(&max, z, n_col) && max > -INFINITY) {
            const double total = job->simd->logit_sum(z, NULL, n_col, max, 1.0f);
            const double base = job->base.data != NULL ? (double)row_f32(job->base, row)[0] : 0;
            shift = (float)(base - log(total));
        }
        for (int c = 0; c < n_col; c++) {
            z[c] = z[c] - max + shift;
        }
    }
}

void cpu_log_softmax(struct backend *be, struct tensor y, struct tensor base)
{
    const struct cpu_backend *const cpu = cpu_of(be);
    struct softmax_job job = {cpu->simd, y, base};
    pool_for(cpu->pool, (int)y.rows, POOL_DYNAMIC, softmax_rows, &job);
}

/* ---- gather -----------------------------------------------------------------------------------*/

/* Copies a few rows, which threads would not make faster. */
void cpu_gather(struct backend *be, struct tensor y, struct tensor x, const struct step *step,
                int first)
{
    ref_gather(be, y, x, step, first);
}
