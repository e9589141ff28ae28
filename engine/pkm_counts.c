/* See pkm_counts.h. */
#include "engine/pkm_counts.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Written by the engine thread alone. */
struct pkm_count {
    atomic_llong reads;
    _Atomic double weight;
    atomic_llong documents;
};

enum { BITS = 64 };

static size_t words_of(const struct pkm_info *memory)
{
    return ((size_t)memory->n_slot + BITS - 1) / BITS;
}

enum err_code pkm_counts_open(struct pkm_counts *counts, const struct model_info *info,
                              const char *dir, int n_seq, struct err *err)
{
    struct tensors *tensors = NULL;
    *counts = (struct pkm_counts){.n_seq = info->n_memory > 0 ? n_seq : 0};
    if (counts->n_seq == 0) {
        return ERR_OK;
    }
    if (tensors_open(&tensors, dir, err) != ERR_OK) {
        return err->code;
    }
    counts_identity(counts->model, tensors);
    tensors_close(tensors);
    for (int m = 0; m < info->n_memory; m++) {
        const size_t n_slot = (size_t)info->memory[m].n_slot;
        counts->count[m] = calloc(n_slot, sizeof *counts->count[m]);
        counts->seen[m] =
            calloc((size_t)n_seq * words_of(&info->memory[m]), sizeof *counts->seen[m]);
        if (counts->count[m] == NULL || counts->seen[m] == NULL) {
            pkm_counts_close(counts);
            return err_set(err, ERR_MEMORY,
                           "no memory for the counts of %zu memory slots: leave out "
                           "--memory-counts, or lower --max-seqs",
                           n_slot);
        }
    }
    return ERR_OK;
}

void pkm_counts_close(struct pkm_counts *counts)
{
    for (int m = 0; m < MODEL_PKM_MAX; m++) {
        free(counts->count[m]);
        free(counts->seen[m]);
    }
    *counts = (struct pkm_counts){0};
}

void pkm_counts_begin(struct pkm_counts *counts, const struct model_info *info, int seq)
{
    CHECK(seq >= 0 && seq < counts->n_seq);
    for (int m = 0; m < info->n_memory; m++) {
        const size_t n = words_of(&info->memory[m]);
        memset(counts->seen[m] + (size_t)seq * n, 0, n * sizeof *counts->seen[m]);
    }
    (void)atomic_fetch_add_explicit(&counts->n_document, 1, memory_order_relaxed);
}

void pkm_counts_add(struct pkm_counts *counts, const struct model_info *info, int m, int seq,
                    const int32_t *slots, const float *weights, int64_t n_hit)
{
    const int64_t n_slot = info->memory[m].n_slot;
    uint64_t *const seen = counts->seen[m] + (size_t)seq * words_of(&info->memory[m]);
    for (int64_t i = 0; i < n_hit; i++) {
        const int32_t slot = slots[i];
        if (isnan(weights[i])) {
            continue; /* a NaN would stay in the sum for ever */
        }
        CHECK(slot >= 0 && slot < n_slot);
        struct pkm_count *const count = &counts->count[m][slot];
        const long long reads = atomic_load_explicit(&count->reads, memory_order_relaxed);
        const double weight = atomic_load_explicit(&count->weight, memory_order_relaxed);
        atomic_store_explicit(&count->reads, reads + 1, memory_order_relaxed);
        atomic_store_explicit(&count->weight, weight + (double)weights[i], memory_order_relaxed);
        const uint64_t bit = UINT64_C(1) << slot % BITS;
        if ((seen[slot / BITS] & bit) == 0) {
            seen[slot / BITS] |= bit;
            const long long documents =
                atomic_load_explicit(&count->documents, memory_order_relaxed);
            atomic_store_explicit(&count->documents, documents + 1, memory_order_relaxed);
        }
    }
}

void pkm_counts_end_step(struct pkm_counts *counts, int n_tok)
{
    (void)atomic_fetch_add_explicit(&counts->n_position, n_tok, memory_order_relaxed);
}

void pkm_counts_head(const struct pkm_counts *counts, const struct model_info *info,
                     struct counts *head)
{
    *head = (struct counts){
        .path = "counts",
        .n_document = atomic_load_explicit(&counts->n_document, memory_order_relaxed),
        .n_position = atomic_load_explicit(&counts->n_position, memory_order_relaxed),
        .n_memory = info->n_memory};
    memcpy(head->model, counts->model, sizeof head->model);
    for (int m = 0; m < info->n_memory; m++) {
        head->memory[m].n_slot = info->memory[m].n_slot;
        head->memory[m].table = model_table_of(info, m);
    }
}

void pkm_counts_copy(const struct pkm_counts *counts, const struct counts *head, int m,
                     enum pkm_counts_part part, int64_t first, int64_t n, void *out)
{
    CHECK(first >= 0 && n <= head->memory[m].n_slot - first);
    for (int64_t i = 0; i < n; i++) {
        const struct pkm_count *const count = &counts->count[m][first + i];
        if (part == COUNTS_WEIGHT) {
            ((double *)out)[i] = atomic_load_explicit(&count->weight, memory_order_relaxed);
            continue;
        }
        const int64_t number = atomic_load_explicit(
            part == COUNTS_READS ? &count->reads : &count->documents, memory_order_relaxed);
        const bool later = part == COUNTS_DOCUMENTS && number > head->n_document;
        ((int64_t *)out)[i] = later ? head->n_document : number;
    }
}
