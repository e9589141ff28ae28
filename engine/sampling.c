/* Random numbers and adjustment lists: see sampling.h. */
#include "engine/sampling.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- random numbers ------------------------------------------------------------------------ */

void sampling_philox(const uint32_t counter[4], const uint32_t key[2], uint32_t out[4])
{
    /* Multipliers and key increments (the golden ratio and √3 - 1) as published. */
    const uint64_t m0 = 0xd2511f53u;
    const uint64_t m1 = 0xcd9e8d57u;
    uint32_t c[4] = {counter[0], counter[1], counter[2], counter[3]};
    uint32_t k0 = key[0];
    uint32_t k1 = key[1];
    for (int round = 0; round < 10; round++) {
        const uint64_t p0 = m0 * c[0];
        const uint64_t p1 = m1 * c[2];
        c[0] = (uint32_t)(p1 >> 32) ^ c[1] ^ k0;
        c[1] = (uint32_t)p1;
        c[2] = (uint32_t)(p0 >> 32) ^ c[3] ^ k1;
        c[3] = (uint32_t)p0;
        k0 += 0x9e3779b9u;
        k1 += 0xbb67ae85u;
    }
    memcpy(out, c, sizeof c);
}

double sampling_uniform(uint64_t seed, int prompt_index, int sample_index, int64_t position)
{
    const uint32_t key[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)};
    const uint32_t counter[4] = {(uint32_t)position, (uint32_t)((uint64_t)position >> 32),
                                 (uint32_t)prompt_index, (uint32_t)sample_index};
    uint32_t word[4];
    sampling_philox(counter, key, word);
    return (double)(((uint64_t)word[0] << 32 | word[1]) >> 11) * 0x1p-53;
}

/* ---- counts -------------------------------------------------------------------------------- */

int sampling_entries_max(int64_t context, int n_vocab)
{
    const int64_t most = context + LOGIT_BIAS_MAX + STOP_ID_MAX + MODEL_END_MAX;
    return (int)(most < n_vocab ? most : n_vocab);
}

enum err_code sampling_counts_open(struct sampling_counts *counts, int n_entry_max, struct err *err)
{
    CHECK(n_entry_max > 0 && n_entry_max < 1 << 28);
    uint32_t n_index = 4;
    while (n_index < 2u * (uint32_t)n_entry_max) { /* at most half full: short probes */
        n_index *= 2;
    }
    *counts = (struct sampling_counts){
        .entry = malloc((size_t)n_entry_max * sizeof *counts->entry),
        .index = malloc(n_index * sizeof *counts->index),
        .n_entry_max = n_entry_max,
        .mask = n_index - 1,
    };
    if (counts->entry == NULL || counts->index == NULL) {
        sampling_counts_close(counts);
        return err_set(err, ERR_MEMORY, "no memory for the counts of %d tokens", n_entry_max);
    }
    return ERR_OK;
}

void sampling_counts_close(struct sampling_counts *counts)
{
    free(counts->entry);
    free(counts->index);
    *counts = (struct sampling_counts){0};
}

/* The entry of token, made if it is new. */
static struct sample_adjust *entry_of(struct sampling_counts *counts, int32_t token)
{
    /* Fibonacci hashing: neighbouring ids, which are common, spread over the table. */
    uint32_t at = ((uint32_t)token * 0x9e3779b9u >> 7) & counts->mask;
    while (counts->index[at] >= 0) {
        struct sample_adjust *const entry = &counts->entry[counts->index[at]];
        if (entry->token == token) {
            return entry;
        }
        at = (at + 1) & counts->mask;
    }
    CHECK(counts->n_entry < counts->n_entry_max);
    counts->index[at] = counts->n_entry;
    struct sample_adjust *const entry = &counts->entry[counts->n_entry++];
    *entry = (struct sample_adjust){.token = token};
    return entry;
}

/* A multiplier of exactly 1 and a penalty of exactly 0 mean "off". */
static bool is_off(float value, float off)
{
    return !(value < off) && !(value > off);
}

void sampling_begin(struct sampling_counts *counts, const struct sampling *sampling,
                    const int32_t *prompt, int64_t n_prompt, const struct end_ids *ends)
{
    memset(counts->index, 0xff, ((size_t)counts->mask + 1) * sizeof *counts->index);
    counts->n_entry = 0;
    if (sampling->min_tokens > 0) {
        for (int i = 0; i < sampling->n_stop_id; i++) {
            (void)entry_of(counts, sampling->stop_id[i]);
        }
        for (int i = 0; i < ends->n && !sampling->ignore_eos; i++) {
            (void)entry_of(counts, ends->id[i]);
        }
    }
    counts->n_banned = counts->n_entry;
    for (int i = 0; i < sampling->n_bias; i++) {
        entry_of(counts, sampling->bias[i].token)->bias += sampling->bias[i].bias;
    }
    const bool repetition = !is_off(sampling->repetition, 1.0f);
    counts->counting =
        repetition || !is_off(sampling->presence, 0.0f) || !is_off(sampling->frequency, 0.0f);
    for (int64_t i = 0; repetition && i < n_prompt; i++) {
        entry_of(counts, prompt[i])->n_prompt++;
    }
}

void sampling_count(struct sampling_counts *counts, int32_t token)
{
    if (counts->counting) {
        entry_of(counts, token)->n_generated++;
    }
}

void sampling_fill(const struct sampling_counts *counts, const struct sampling *sampling,
                   const struct item *item, int n_generated, struct step *step, int i)
{
    struct sample_params *const p = &step->sample[i];
    *p = (struct sample_params){
        .u = sampling_uniform(sampling->seed, item->prompt_index, item->sample_index,
                              item->n_ids + n_generated),
        .temperature = sampling->temperature,
        .top_p = sampling->top_p,
        .min_p = sampling->min_p,
        .typical_p = sampling->typical_p < 1 ? sampling->typical_p : 0,
        .repetition = sampling->repetition,
        .presence = sampling->presence,
        .frequency = sampling->frequency,
        .top_k = sampling->top_k,
        .adjust_first = step->n_adjust,
        .allow_first = step->n_allow,
        .n_allow = sampling->n_allow,
    };
    CHECK(step->n_allow + sampling->n_allow <= step->limits.n_allow_max);
    memcpy(step->allow + step->n_allow, sampling->allow,
           (size_t)sampling->n_allow * sizeof *step->allow);
    step->n_allow += sampling->n_allow;

    /* Tokens whose ban is over, without bias and count, stay in the list: they change nothing. */
    CHECK(step->n_adjust + counts->n_entry <= step->limits.n_adjust_max);
    struct sample_adjust *const adjust = step->adjust + step->n_adjust;
    memcpy(adjust, counts->entry, (size_t)counts->n_entry * sizeof *adjust);
    for (int b = 0; n_generated < sampling->min_tokens && b < counts->n_banned; b++) {
        adjust[b].bias = -INFINITY;
    }
    p->n_adjust = counts->n_entry;
    step->n_adjust += counts->n_entry;
}
