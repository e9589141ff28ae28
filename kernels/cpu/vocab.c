/* The vocabulary: log-probabilities of the rows of logits, and drawing from them.
 *
 * Each row is cut into LOGIT_BLOCKS blocks, always the same ones for a vocabulary, and their sums
 * are merged in block order: so a row may be done by one thread or by many with the same bits.
 * Log-probabilities: blocks are the items of a first pass, rows those of a second. Drawing: a row
 * is an item. Common cases are done here without sorting; the rest is left to ref_sample_row, which
 * is exact for everything, and slow only for a vocabulary's worth of candidates. */
#include "kernels/cpu/cpu.h"

#include <math.h>
#include <string.h>

enum {
    DRAW_FEW = 64, /* best tokens looked at first: most filters end within them */
    DRAW_MANY = 1024,
    WALK = 64, /* tokens added up at a time while looking for the drawn one */
};

/* Scratch of one thread, carved from its slice. */
struct vocab_scratch {
    float *z;           /* [n_vocab] */
    int32_t *candidate; /* [n_vocab] */
    float *best_score;  /* [n_best] */
    int32_t *best;      /* [n_best] */
    struct select_scratch select;
};

static size_t n_best_of(const struct step_limits *limits)
{
    const size_t n_top = (size_t)limits->n_top_max;
    return n_top > DRAW_MANY ? n_top : DRAW_MANY;
}

size_t cpu_vocab_slice_bytes(const struct step_limits *limits)
{
    const size_t n_best = n_best_of(limits);
    return (2 * (size_t)limits->n_vocab + 4 * n_best + 2 * (SELECT_SLACK + SELECT_PAD)) *
           sizeof(float);
}

static struct vocab_scratch scratch_of(const struct cpu_backend *cpu, int thread,
                                       const struct step_limits *limits)
{
    const size_t n_vocab = (size_t)limits->n_vocab;
    const size_t n_best = n_best_of(limits);
    const size_t n_select = n_best + SELECT_SLACK + SELECT_PAD;
    float *const floats = cpu_slice(cpu, thread);
    int32_t *const ids = (int32_t *)(void *)(floats + n_vocab + n_best + n_select);
    return (struct vocab_scratch){
        .z = floats,
        .best_score = floats + n_vocab,
        .select = {.score = floats + n_vocab + n_best, .id = ids + n_vocab + n_best},
        .candidate = ids,
        .best = ids + n_vocab,
    };
}

/* First token of a block; block LOGIT_BLOCKS starts where the vocabulary ends. */
static int block_first(int n_vocab, int block)
{
    return (int)((int64_t)n_vocab * block / LOGIT_BLOCKS);
}

struct vocab_job {
    const struct cpu_backend *cpu;
    struct tensor logits;
    struct step *step;
    int first;
};

/* ---- log-probabilities ------------------------------------------------------------------------*/

enum { OUT_OF_LOGITS = OUT_LOGPROB | OUT_TOP | OUT_ENTROPY };

static int32_t target_of(const struct step *step, int out, int64_t n_vocab)
{
    CHECK(step->target[out] != TARGET_SAMPLED || (step->out_want[out] & OUT_SAMPLE) != 0);
    const int32_t id =
        step->target[out] == TARGET_SAMPLED ? step->out_token[out] : step->target[out];
    CHECK(id >= 0 && id < n_vocab);
    return id;
}

static void part_items(void *arg, int thread, int first, int n)
{
    (void)thread;
    const struct vocab_job *const job = arg;
    const struct simd_kernels *const simd = job->cpu->simd;
    const int n_vocab = (int)job->logits.cols;
    for (int item = first; item < first + n; item++) {
        const int row = item / LOGIT_BLOCKS;
        const int out = job->first + row;
        const int want = job->step->out_want[out];
        if ((want & OUT_OF_LOGITS) == 0) {
            continue;
        }
        const float *const z = row_f32(job->logits, row);
        const int from = block_first(n_vocab, item % LOGIT_BLOCKS);
        const int n_id = block_first(n_vocab, item % LOGIT_BLOCKS + 1) - from;
        struct logit_part part = {0};
        part.is_good = simd->logit_max(&part.max, z + from, n_id);
        if (part.is_good && part.max > -INFINITY) {
            part.sum = simd->logit_sum(z + from, n_id, part.max, 1.0f);
            if ((want & OUT_ENTROPY) != 0) {
                part.moment = simd->logit_moment(z + from, n_id, part.max);
            }
        }
        if ((want & OUT_LOGPROB) != 0) {
            const int32_t id = target_of(job->step, out, n_vocab);
            part.n_before = simd->logit_before(z, from, n_id, z[id], id);
        }
        ((struct logit_part *)job->cpu->parts.data)[item] = part;
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
    float max = -INFINITY;
    bool is_good = true;
    for (int b = 0; b < LOGIT_BLOCKS; b++) {
        max = part[b].max > max ? part[b].max : max;
        is_good = is_good && part[b].is_good;
    }
    if (!is_good || max == -INFINITY) {
        return (struct distribution){(double)max, (double)NAN, (double)NAN, -1};
    }
    struct distribution d = {.max = (double)max};
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
static void write_top(const struct vocab_job *job, int thread, const struct distribution *d,
                      const float *z, int out)
{
    struct step *const step = job->step;
    const bool is_valid = !isnan(d->log_total);
    const int n_vocab = (int)job->logits.cols;
    const int n = !is_valid ? 0 : step->n_top < n_vocab ? step->n_top : n_vocab;
    int32_t *const id = step->top_id + (int64_t)out * step->limits.n_top_max;
    float *const value = step->top_logprob + (int64_t)out * step->limits.n_top_max;
    if (n > 0) {
        const struct vocab_scratch scratch = scratch_of(job->cpu, thread, &step->limits);
        job->cpu->simd->select(id, value, z, n_vocab, n, &scratch.select);
    }
    for (int j = 0; j < step->n_top; j++) {
        id[j] = j < n ? id[j] : -1;
        value[j] = j < n ? logprob(d, value[j]) : is_valid ? -INFINITY : NAN;
    }
}

static void logprob_rows(void *arg, int thread, int first, int n)
{
    const struct vocab_job *const job = arg;
    const struct logit_part *const parts = job->cpu->parts.data;
    for (int row = first; row < first + n; row++) {
        const int out = job->first + row;
        const int want = job->step->out_want[out];
        if ((want & OUT_OF_LOGITS) == 0) {
            continue;
        }
        const float *const z = row_f32(job->logits, row);
        const struct distribution d = merge_parts(parts + (size_t)row * LOGIT_BLOCKS);
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

void cpu_logprobs(struct backend *be, struct tensor logits, struct step *step, int first)
{
    const struct cpu_backend *const cpu = cpu_of(be);
    CHECK(first >= 0 && first + logits.rows <= step->n_out && logits.cols <= INT32_MAX);
    CHECK(step->n_out <= INT32_MAX / LOGIT_BLOCKS);
    CHECK_VIEW(logits, DTYPE_F32, logits.rows, logits.cols);
    struct vocab_job job = {cpu, logits, step, first};
    const int n_row = (int)logits.rows;
    pool_for(cpu->pool, n_row * LOGIT_BLOCKS, POOL_STREAM, part_items, &job);
    pool_for(cpu->pool, n_row, POOL_DYNAMIC, logprob_rows, &job);
}

/* ---- drawing ----------------------------------------------------------------------------------*/

/* One row that is being drawn from. */
struct draw {
    const struct simd_kernels *simd;
    const struct sample_params *params;
    const float *z; /* adjusted logits [n_vocab] */
    int n_vocab;
    float max;
    struct vocab_scratch scratch;
};

enum { NOT_DRAWN = -1 };

/* Copies the row and applies its adjustments, if there are any. */
static const float *adjust(const struct step *step, const struct sample_params *p,
                           const float *logits, int n_vocab, float *z)
{
    const struct sample_adjust *const list = step->adjust + p->adjust_first;
    CHECK(p->adjust_first >= 0 && p->n_adjust >= 0 &&
          p->n_adjust <= step->n_adjust - p->adjust_first);
    if (p->n_adjust == 0) {
        return logits;
    }
    memcpy(z, logits, (size_t)n_vocab * sizeof *z);
    for (int i = 0; i < p->n_adjust; i++) {
        CHECK(list[i].token >= 0 && list[i].token < n_vocab);
        z[list[i].token] = ref_adjusted(z[list[i].token], &list[i], p);
    }
    return z;
}

/* False if a logit is no number to draw by. */
static bool find_max(struct draw *d)
{
    d->max = -INFINITY;
    return d->simd->logit_max(&d->max, d->z, d->n_vocab);
}

static double sum_shares(const struct draw *d, int from, int n)
{
    return d->simd->logit_sum(d->z + from, n, d->max, 1.0f / d->params->temperature);
}

/* Draws among all tokens in id order: the first whose cumulative share exceeds u. Blocks, then runs
 * of WALK tokens, are stepped over by their sums. */
static int32_t draw_by_id(const struct draw *d)
{
    double block_sum[LOGIT_BLOCKS];
    double total = 0;
    for (int b = 0; b < LOGIT_BLOCKS; b++) {
        const int from = block_first(d->n_vocab, b);
        block_sum[b] = sum_shares(d, from, block_first(d->n_vocab, b + 1) - from);
        total += block_sum[b];
    }
    const double goal = d->params->u * total;
    double sum = 0;
    int32_t last = NOT_DRAWN;
    for (int b = 0; b < LOGIT_BLOCKS; b++) {
        const int end = block_first(d->n_vocab, b + 1);
        if (sum + block_sum[b] <= goal && b < LOGIT_BLOCKS - 1) {
            sum += block_sum[b];
            continue;
        }
        for (int from = block_first(d->n_vocab, b); from < end; from += WALK) {
            const int n = end - from < WALK ? end - from : WALK;
            const double run = sum_shares(d, from, n);
            if (sum + run <= goal && from + n < end) {
                sum += run;
                continue;
            }
            for (int id = from; id < from + n; id++) {
                const double share = sum_shares(d, id, 1);
                last = share > 0 ? id : last;
                sum += share;
                if (share > 0 && sum > goal) {
                    return id;
                }
            }
        }
    }
    return last;
}

static double share_of(const struct draw *d, float z)
{
    return exp(((double)z - (double)d->max) / (double)d->params->temperature);
}

/* Draws among the n best tokens, best first, or NOT_DRAWN if the filters keep more than those.
 * total: of what top_k keeps, top_p's denominator. */
static int32_t draw_among(const struct draw *d, int n, double total, bool n_is_all)
{
    const struct sample_params *const p = d->params;
    const float *const score = d->scratch.best_score;
    double kept = 0;
    int n_kept = 0;
    bool is_whole = false; /* the kept tokens end here */
    while (!is_whole) {
        if (p->top_p < 1 && kept >= (double)p->top_p * total) {
            is_whole = true;
        } else if (n_kept == n) {
            if (!n_is_all) {
                return NOT_DRAWN;
            }
            is_whole = true;
        } else {
            const double share = share_of(d, score[n_kept]);
            is_whole = share < (double)p->min_p || share == 0;
            kept += is_whole ? 0 : share;
            n_kept += !is_whole;
        }
    }
    double sum = 0;
    for (int i = 0; i < n_kept; i++) {
        sum += share_of(d, score[i]);
        if (sum > p->u * kept) {
            return d->scratch.best[i];
        }
    }
    return d->scratch.best[n_kept - 1]; /* the best token's share is 1: one is kept */
}

static int32_t draw_by_rank(const struct draw *d)
{
    const struct sample_params *const p = d->params;
    const bool has_top_k = p->top_k > 0 && p->top_k < d->n_vocab;
    if (has_top_k && p->top_k > DRAW_MANY) {
        return NOT_DRAWN;
    }
    double total = 0;
    for (int b = 0; b < LOGIT_BLOCKS && !has_top_k && p->top_p < 1; b++) {
        const int from = block_first(d->n_vocab, b);
        total += sum_shares(d, from, block_first(d->n_vocab, b + 1) - from);
    }
    const int most = has_top_k ? p->top_k : d->n_vocab;
    const int tries[] = {has_top_k ? p->top_k : DRAW_FEW, DRAW_MANY};
    for (int t = 0; t < 2; t++) {
        const int n = tries[t] < most ? tries[t] : most;
        d->simd->select(d->scratch.best, d->scratch.best_score, d->z, d->n_vocab, n,
                        &d->scratch.select);
        for (int i = 0; i < n && has_top_k; i++) {
            total += share_of(d, d->scratch.best_score[i]);
        }
        const int32_t id = draw_among(d, n, total, n == most);
        if (id != NOT_DRAWN) {
            return id;
        }
    }
    return NOT_DRAWN;
}

static int32_t draw_row(struct draw *d)
{
    const struct sample_params *const p = d->params;
    if (!find_max(d) || d->max == -INFINITY) {
        return NOT_DRAWN;
    }
    if (p->temperature == 0) {
        return d->simd->logit_find(d->z, d->n_vocab, d->max);
    }
    if (!isfinite(1.0f / p->temperature)) {
        return NOT_DRAWN;
    }
    const bool is_filtered = p->top_k != 0 || p->top_p < 1 || p->min_p > 0;
    return is_filtered ? draw_by_rank(d) : draw_by_id(d);
}

static void sample_rows(void *arg, int thread, int first, int n)
{
    const struct vocab_job *const job = arg;
    const int n_vocab = (int)job->logits.cols;
    for (int row = first; row < first + n; row++) {
        const int out = job->first + row;
        if ((job->step->out_want[out] & OUT_SAMPLE) == 0) {
            continue;
        }
        const struct sample_params *const p = &job->step->sample[out];
        CHECK(p->u >= 0 && p->u < 1 && p->temperature >= 0 && p->top_k >= 0);
        CHECK(p->top_p > 0 && p->min_p >= 0 && p->min_p < 1 && p->repetition > 0);
        const float *const logits = row_f32(job->logits, row);
        struct draw d = {.simd = job->cpu->simd,
                         .params = p,
                         .n_vocab = n_vocab,
                         .scratch = scratch_of(job->cpu, thread, &job->step->limits)};
        int32_t id = NOT_DRAWN;
        if (p->n_allow == 0) {
            d.z = adjust(job->step, p, logits, n_vocab, d.scratch.z);
            id = draw_row(&d);
        }
        job->step->out_token[out] =
            id != NOT_DRAWN
                ? id
                : ref_sample_row(job->step, out, logits, n_vocab, d.scratch.z, d.scratch.candidate);
    }
}

void cpu_sample(struct backend *be, struct tensor logits, struct step *step, int first)
{
    const struct cpu_backend *const cpu = cpu_of(be);
    CHECK(first >= 0 && first + logits.rows <= step->n_out);
    CHECK(logits.cols > 0 && logits.cols <= step->limits.n_vocab);
    CHECK_VIEW(logits, DTYPE_F32, logits.rows, logits.cols);
    struct vocab_job job = {cpu, logits, step, first};
    pool_for(cpu->pool, (int)logits.rows, POOL_DYNAMIC, sample_rows, &job);
}
