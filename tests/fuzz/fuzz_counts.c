/* Fuzz target: the reader of counts on any bytes. It must refuse, or return numbers with which the
 * commands can reckon: sums that fit, shares of texts, tables that exist. Run by `make fuzz`;
 * tests/fuzz/corpus/counts holds the seeds. */
#include "models/counts.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

static void check_memory(const struct counts *counts, int m)
{
    const struct counts_memory *const memory = &counts->memory[m];
    int64_t sum = 0;
    CHECK(memory->n_slot > 0 && memory->table <= m &&
          counts->memory[memory->table].table == memory->table &&
          counts->memory[memory->table].n_slot == memory->n_slot);
    for (int64_t i = 0; i < memory->n_slot; i++) {
        CHECK(memory->reads[i] >= 0 && isfinite(memory->weight[i]));
        CHECK(memory->documents[i] >= 0 && memory->documents[i] <= counts->n_document);
        CHECK(!__builtin_add_overflow(sum, memory->reads[i], &sum));
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    struct counts counts;
    struct counts sum;
    struct err err = {0};
    const enum err_code code = counts_parse(&counts, data, bytes, "fuzz", &err);
    if (code != ERR_OK) {
        CHECK(err.code == code && err.message[0] != '\0' && strchr(err.message, '\n') == NULL);
        CHECK(counts.n_memory == 0 && counts.tensor.entry == NULL);
        return 0;
    }
    CHECK(counts.n_memory > 0 && counts.n_memory <= MODEL_PKM_MAX);
    for (int m = 0; m < counts.n_memory; m++) {
        check_memory(&counts, m);
    }
    CHECK(counts_new_like(&sum, &counts, &err) == ERR_OK);
    CHECK(counts_check_same(&sum, &counts, &err) == ERR_OK);
    CHECK(counts_add(&sum, &counts, &err) == ERR_OK);
    if (counts_add(&sum, &counts, &err) == ERR_OK) { /* or twice of it exceeds 63 bits */
        int64_t *reads = NULL;
        CHECK(counts_table_reads(&reads, &sum, 0, &err) == ERR_OK);
        CHECK(reads[0] >= 2 * counts.memory[0].reads[0]);
        free(reads);
    }
    counts_free(&sum);
    counts_free(&counts);
    return 0;
}
