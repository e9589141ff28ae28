/* Drawing the next token: a row is an item.
 *
 * The largest logit, and a draw from the whole distribution, need no order: blocks of the row are
 * summed and stepped over. With top_k, top_p or min_p the best 64 tokens are selected, then 1024,
 * and only where the filters keep more than those is the vocabulary sorted. What is rare (allow
 * lists, logits that are no distribution) is left to ref_sample_row. */
#include "kernels/cpu/cpu.h"

#include <math.h>
#include <string.h>

enum {
    DRAW_FEW = 64, /* best tokens looked at first: most filters end within them */
    WALK = 64,     /* tokens added up at a time while looking for the drawn one */
};

struct sample_job {
    const struct cpu_backend *cpu;
    struct tensor logits;
    struct step *step;
    int first;
};

/* Scratch of the ops on the vocabulary, carved from a thread's slice. */
struct vocab_scratch cpu_vocab_scratch(const struct cpu_backend *cpu, int thread,
                                       const struct step_limits *limits)
{
    const size_t n_vocab = (size_t)limits->n_vocab;
    const size_t n_select = cpu_select_max(limits) + SELECT_SLACK + SELECT_PAD;
    uint32_t *const words = cpu_slice(cpu, thread);
    return (struct vocab_scratch){
        .z = (float *)(void *)words,
        .candidate = (int32_t *)(void *)(words + n_vocab),
        .best_score = (float *)(void *)(words + 2 * n_vocab),
        .best = (int32_t *)(void *)(words + 3 * n_vocab),
        .key = {words + 4 * n_vocab, words + 5 * n_vocab},
        .select = {.score = (float *)(void *)(words + 6 * n_vocab),
                   .id = (int32_t *)(void *)(words + 6 * n_vocab + n_select)},
    };
}

size_t cpu_vocab_slice_bytes(const struct step_limits *limits)
{
    const size_t n_select = cpu_select_max(limits) + SELECT_SLACK + SELECT_PAD;
    return (6 * (size_t)limits->n_vocab + 2 * n_select) * sizeof(uint32_t);
}

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
        const int from = cpu_block_first(d->n_vocab, b);
        block_sum[b] = sum_shares(d, from, cpu_block_first(d->n_vocab, b + 1) - from);
        total += block_sum[b];
    }
    const double goal = d->params->u * total;
    double sum = 0;
    int32_t last = NOT_DRAWN;
    for (int b = 0; b < LOGIT_BLOCKS; b++) {
        const int end = cpu_block_first(d->n_vocab, b + 1);
        if (sum + block_sum[b] <= goal && b < LOGIT_BLOCKS - 1) {
            sum += block_sum[b];
            continue;
        }
        for (int from = cpu_block_first(d->n_vocab, b); from < end; from += WALK) {
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

/* Ascending key = descending logit; no NaN comes here, and -0 was made 0. */
static uint32_t sort_key(float z)
{
    const float positive_zero = z + 0.0f;
    uint32_t bits;
    memcpy(&bits, &positive_zero, sizeof bits);
    return (bits & 0x80000000u) != 0 ? bits : ~bits & 0x7fffffffu;
}

/* Sorts the whole vocabulary into scratch.best and best_score: three passes of a radix sort, which
 * keep the order of ids among equal logits. */
static void sort_all(const struct draw *d)
{
    enum { BITS = 11, N_BUCKET = 1 << BITS };
    const int n = d->n_vocab;
    uint32_t *from_key = d->scratch.key[0];
    uint32_t *to_key = d->scratch.key[1];
    int32_t *from = d->scratch.candidate;
    int32_t *to = d->scratch.best; /* an odd number of passes ends here */
    for (int i = 0; i < n; i++) {
        from_key[i] = sort_key(d->z[i]);
        from[i] = i;
    }
    for (int shift = 0; shift < 32; shift += BITS) {
        int place[N_BUCKET + 1] = {0};
        for (int i = 0; i < n; i++) {
            place[(from_key[i] >> shift & (N_BUCKET - 1)) + 1]++;
        }
        for (int b = 0; b < N_BUCKET; b++) {
            place[b + 1] += place[b];
        }
        for (int i = 0; i < n; i++) {
            const int at = place[from_key[i] >> shift & (N_BUCKET - 1)]++;
            to_key[at] = from_key[i];
            to[at] = from[i];
        }
        uint32_t *const key = from_key;
        int32_t *const id = from;
        from_key = to_key;
        from = to;
        to_key = key;
        to = id;
    }
    for (int i = 0; i < n; i++) {
        d->scratch.best_score[i] = d->z[d->scratch.best[i]];
    }
}

static int32_t draw_by_rank(const struct draw *d)
{
    const struct sample_params *const p = d->params;
    const bool has_top_k = p->top_k > 0 && p->top_k < d->n_vocab;
    const int most = has_top_k ? p->top_k : d->n_vocab;
    double total = 0; /* of the whole row; of top_k's tokens it is added up below */
    for (int b = 0; b < LOGIT_BLOCKS && !has_top_k && p->top_p < 1; b++) {
        const int from = cpu_block_first(d->n_vocab, b);
        total += sum_shares(d, from, cpu_block_first(d->n_vocab, b + 1) - from);
    }
    const int tries[] = {has_top_k ? p->top_k : DRAW_FEW, SELECT_MANY};
    for (int t = 0; t < 2; t++) {
        const int n = tries[t] < most ? tries[t] : most;
        if (n > SELECT_MANY) {
            break;
        }
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
    sort_all(d);
    for (int i = 0; i < most && has_top_k; i++) {
        total += share_of(d, d->scratch.best_score[i]);
    }
    return draw_among(d, most, total, true);
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
    const struct sample_job *const job = arg;
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
                         .scratch = cpu_vocab_scratch(job->cpu, thread, &job->step->limits)};
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
    struct sample_job job = {cpu, logits, step, first};
    pool_for(cpu->pool, (int)logits.rows, POOL_DYNAMIC, sample_rows, &job);
}
