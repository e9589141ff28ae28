/* What is wanted of rows of logits: a drawn token, log-probabilities, ranks, best tokens, entropy;
 * log softmax.
 *
 * Each row is cut into LOGIT_BLOCKS blocks, always the same ones for a vocabulary, and their sums
 * are merged in block order: so a row may be done by one thread or by many with the same bits. Of
 * rows that are only scored the blocks are the items of a first pass, the rows those of a second. A
 * row that draws is read from memory once: a thread sums its blocks, which say where its largest
 * logit is, and draws while the row is near. */
#include "kernels/cpu/sample.h"

#include <math.h>

struct outputs_job {
    const struct cpu_backend *cpu;
    struct tensor logits;
    struct step *step;
    int first;
};

enum { OUT_OF_LOGITS = OUT_LOGPROB | OUT_TOP | OUT_ENTROPY };

static int32_t target_of(const struct step *step, int out, int64_t n_vocab)
{
    CHECK(step->target[out] != TARGET_SAMPLED || (step->out_want[out] & OUT_SAMPLE) != 0);
    const int32_t id =
        step->target[out] == TARGET_SAMPLED ? step->out_token[out] : step->target[out];
    CHECK(id >= 0 && id < n_vocab);
    return id;
}

/* A block of a row; its largest logit is not known yet. */
static struct logit_max block_of(const struct outputs_job *job, int row, int block)
{
    const int n_vocab = (int)job->logits.cols;
    const int first = cpu_block_first(n_vocab, block);
    return (struct logit_max){.z = row_f32(job->logits, row) + first,
                              .n = cpu_block_first(n_vocab, block + 1) - first};
}

static struct logit_part *part_of(const struct outputs_job *job, int row, int block)
{
    return (struct logit_part *)job->cpu->parts.data + (size_t)row * LOGIT_BLOCKS + block;
}

/* Sums n blocks of a row. after: what the same thread sums next, or NULL. */
static void sum_blocks(const struct outputs_job *job, int row, int first, int n, const float *after)
{
    const struct simd_kernels *const simd = job->cpu->simd;
    const bool wants_entropy = (job->step->out_want[job->first + row] & OUT_ENTROPY) != 0;
    struct logit_max block = block_of(job, row, first);
    block.is_good = simd->logit_max(&block.max, block.z, block.n);
    for (int b = first; b < first + n; b++) {
        struct logit_part part = {.max = block.max, .is_good = block.is_good};
        const bool has_share = block.is_good && block.max > -INFINITY;
        const bool has_next = b + 1 < first + n;
        struct logit_max next = has_next ? block_of(job, row, b + 1) : (struct logit_max){0};
        if (has_share && has_next) {
            part.sum = simd->logit_sum_max(block.z, block.n, block.max, &next);
        } else if (has_share) {
            part.sum = simd->logit_sum(block.z, after, block.n, block.max, 1.0f);
        } else if (has_next) {
            next.is_good = simd->logit_max(&next.max, next.z, next.n);
        }
        if (has_share && wants_entropy) {
            part.moment = simd->logit_moment(block.z, block.n, block.max);
        }
        *part_of(job, row, b) = part;
        block = next;
    }
}

/* Finds how many tokens of these blocks rank before the target: those of smaller ids with the same
 * logit do, those of larger ids need a larger one. A block whose largest logit is smaller has none.
 */
static void rank_blocks(const struct outputs_job *job, int row, int first, int n)
{
    const struct simd_kernels *const simd = job->cpu->simd;
    const int32_t id = target_of(job->step, job->first + row, job->logits.cols);
    const float least = row_f32(job->logits, row)[id];
    for (int b = first; b < first + n; b++) {
        const struct logit_max block = block_of(job, row, b);
        struct logit_part *const part = part_of(job, row, b);
        if (part->max < least) {
            continue;
        }
        const int64_t from = block.z - row_f32(job->logits, row);
        const int n_smaller = id < from ? 0 : id - from < block.n ? (int)(id - from) : block.n;
        part->n_before = simd->logit_count(block.z, n_smaller, least) +
                         simd->logit_count(block.z + n_smaller, block.n - n_smaller,
                                           nextafterf(least, INFINITY));
    }
}

static bool is_only_scored(int want)
{
    return (want & OUT_SAMPLE) == 0 && (want & OUT_OF_LOGITS) != 0;
}

static void block_items(void *arg, int thread, int first, int n)
{
    (void)thread;
    const struct outputs_job *const job = arg;
    for (int item = first; item < first + n;) {
        const int row = item / LOGIT_BLOCKS;
        const int block = item % LOGIT_BLOCKS;
        const int in_row = LOGIT_BLOCKS - block;
        const int n_block = first + n - item < in_row ? first + n - item : in_row;
        const int want = job->step->out_want[job->first + row];
        item += n_block;
        if (!is_only_scored(want)) {
            continue;
        }
        sum_blocks(job, row, block, n_block,
                   item < first + n ? row_f32(job->logits, item / LOGIT_BLOCKS) : NULL);
        if ((want & OUT_LOGPROB) != 0) {
            rank_blocks(job, row, block, n_block);
        }
    }
}

/* Of a row that draws: sums its blocks if they are wanted or serve the draw, which must not depend
 * on what else is wanted; draws, and ranks the target. */
static void draw_item(const struct outputs_job *job, int thread, int row)
{
    const int n_vocab = (int)job->logits.cols;
    const int out = job->first + row;
    const int want = job->step->out_want[out];
    const float *const z = row_f32(job->logits, row);
    const int after = row + pool_n_thread(job->cpu->pool);
    struct logit_row r = {
        .z = z,
        .n_vocab = n_vocab,
        .next = after < job->logits.rows ? row_f32(job->logits, after) : NULL,
    };
    if ((want & OUT_OF_LOGITS) != 0 || draw_takes_sums(&job->step->sample[out])) {
        sum_blocks(job, row, 0, LOGIT_BLOCKS, r.next);
        r.part = part_of(job, row, 0);
        r.next = NULL;
    }
    job->step->out_token[out] = cpu_draw(job->cpu, thread, job->step, out, &r);
    if ((want & OUT_LOGPROB) != 0) {
        rank_blocks(job, row, 0, LOGIT_BLOCKS);
    }
}

/* A row's distribution: log p(i) = z[i] - max - log_total. */
struct distribution {
    double max;
    double log_total; /* NaN if the logits have no distribution */
    double entropy;
    int32_t n_before;
};

static struct distribution merge_parts(const struct logit_part *part)
{
    const int best = cpu_best_block(part);
    if (best < 0) {
        return (struct distribution){(double)NAN, (double)NAN, (double)NAN, -1};
    }
    struct distribution d = {.max = (double)part[best].max};
    double total = 0;
    double moment = 0;
    for (int b = 0; b < LOGIT_BLOCKS; b++) {
        d.n_before += part[b].n_before;
        if (part[b].max > -INFINITY) { /* from the block's own maximum to the row's */
            const double down = (double)part[b].max - d.max;
            total += exp(down) * part[b].sum;
            moment += exp(down) * (part[b].moment + down * part[b].sum);
        }
    }
    d.log_total = log(total);
    d.entropy = d.log_total - moment / total;
    return d;
}

static float logprob(const struct distribution *d, float z)
{
    return (float)((double)z - d->max - d->log_total);
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
    for (int row = first; row < first + n; row++) {
        const int out = job->first + row;
        const int want = job->step->out_want[out];
        if ((want & OUT_SAMPLE) != 0) {
            draw_item(job, thread, row);
        }
        if ((want & OUT_OF_LOGITS) == 0) {
            continue;
        }
        const float *const z = row_f32(job->logits, row);
        const struct distribution d = merge_parts(part_of(job, row, 0));
        if ((want & OUT_LOGPROB) != 0) {
            const int32_t id = target_of(job->step, out, job->logits.cols);
            job->step->out_logprob[out] = logprob(&d, z[id]);
            job->step->out_rank[out] = d.n_before + 1; /* 0 of a broken row */
        }
        if ((want & OUT_TOP) != 0) {
            write_top(job, thread, &d, z, out);
        }
        if ((want & OUT_ENTROPY) != 0) {
            job->step->out_entropy[out] = (float)d.entropy;
        }
    }
}

void cpu_outputs(struct backend *be, struct tensor logits, struct step *step, int first)
{
    const struct cpu_backend *const cpu = cpu_of(be);
    CHECK(first >= 0 && first + logits.rows <= step->n_out);
    CHECK(logits.cols > 0 && logits.cols <= step->limits.n_vocab);
    CHECK(step->n_out <= INT32_MAX / LOGIT_BLOCKS);
    CHECK_VIEW(logits, DTYPE_F32, logits.rows, logits.cols);
    struct outputs_job job = {cpu, logits, step, first};
    const int n_row = (int)logits.rows;
    bool is_scored = false;
    for (int row = 0; row < n_row; row++) {
        is_scored = is_scored || is_only_scored(step->out_want[first + row]);
    }
    if (is_scored) {
        pool_for(cpu->pool, n_row * LOGIT_BLOCKS, POOL_STREAM, block_items, &job);
    }
    pool_for(cpu->pool, n_row, POOL_DYNAMIC, row_items, &job);
}

/* ---- log softmax ------------------------------------------------------------------------------*/

struct softmax_job {
    const struct simd_kernels *simd;
    struct tensor y, base; /* base.data may be NULL */
};

/* Rows are the items: a row's passes are short beside the matrix product that made it. */
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
    CHECK_VIEW(y, DTYPE_F32, y.rows, y.cols);
    CHECK(y.rows <= INT32_MAX && y.cols > 0 && y.cols <= INT32_MAX);
    CHECK(base.data == NULL || (base.dtype == DTYPE_F32 && base.rows == y.rows && base.cols == 1));
    struct softmax_job job = {cpu->simd, y, base};
    pool_for(cpu->pool, (int)y.rows, POOL_DYNAMIC, softmax_rows, &job);
}
