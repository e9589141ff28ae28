/* `pkmserve memory count`: which slots texts read. Each file is a text, or with --jsonl each line;
 * they run as in `score`, and each position of a text counts once, however many windows contain it.
 * Only the counts are kept, 28 bytes for each slot, and the texts that are being computed. */
#include "models/counts.h"
#include "server/cli/texts.h"

#include <stdlib.h>

enum { GROUP_BYTES = 1 << 20 };

struct tally {
    struct counts counts;
    /* Owner: this. [n_slot] the number, from 1, of the last text that read the slot: its low 32
     * bits, which are enough for 4 billion texts. */
    uint32_t *seen[MODEL_PKM_MAX];
};

static void tally_free(struct tally *tally)
{
    for (int m = 0; m < MODEL_PKM_MAX; m++) {
        free(tally->seen[m]);
    }
    counts_free(&tally->counts);
}

static enum err_code tally_new(struct tally *tally, const char *dir, struct err *err)
{
    char model[SHA256_HEX] = "";
    struct tensors *tensors = NULL;
    struct model_info *const info = calloc(1, sizeof *info);
    if (info == NULL) {
        return err_set(err, ERR_MEMORY, "%s: no memory to open it", dir);
    }
    enum err_code code = model_info_read(info, dir, err);
    if (code == ERR_OK) {
        code = tensors_open(&tensors, dir, err);
    }
    if (code == ERR_OK && info->n_memory > 0) {
        counts_identity(model, tensors);
    }
    tensors_close(tensors);
    if (code == ERR_OK) {
        code = counts_new(&tally->counts, info, model, err);
    }
    for (int m = 0; m < info->n_memory && code == ERR_OK; m++) {
        tally->seen[m] = calloc((size_t)info->memory[m].n_slot, sizeof *tally->seen[m]);
        if (tally->seen[m] == NULL) {
            code = err_set(err, ERR_MEMORY, "no memory for the counts of %lld slots",
                           (long long)info->memory[m].n_slot);
        }
    }
    free(info);
    return code;
}

static void add_reads(struct tally *tally, int m, int64_t slot, int64_t reads, double weight)
{
    struct counts_memory *const memory = &tally->counts.memory[m];
    const uint32_t document = (uint32_t)tally->counts.n_document;
    memory->reads[slot] += reads;
    memory->weight[slot] += weight;
    if (tally->seen[m][slot] != document) {
        tally->seen[m][slot] = document;
        memory->documents[slot]++;
    }
}

/* Adds the look-ups of a text. */
static enum err_code tally_text(void *ctx, const struct texts_item *text, struct err *err)
{
    struct tally *const tally = ctx;
    const struct pkm_trace *const traces = text->item->trace;
    (void)err;
    tally->counts.n_document++;
    tally->counts.n_position += traces[0].n_position;
    for (int m = 0; m < tally->counts.n_memory; m++) {
        const struct pkm_trace *const trace = &traces[m];
        for (int64_t j = 0; trace->slots != NULL && j < trace->lookups; j++) {
            add_reads(tally, m, trace->slots[j], 1, (double)trace->weights[j]);
        }
        for (int64_t s = 0; trace->count != NULL && s < tally->counts.memory[m].n_slot; s++) {
            if (trace->count[s] > 0) {
                add_reads(tally, m, s, trace->count[s], trace->weight[s]);
            }
        }
    }
    return ERR_OK;
}

int cmd_memory_count(const struct options *options)
{
    struct err err;
    struct tally tally = {0};
    struct options own = *options;
    int status = -1;
    const struct texts texts = {
        .doing = "counting", .group_bytes = GROUP_BYTES, .take = tally_text, .ctx = &tally};
    own.memory = true; /* the traces are what is counted */
    enum err_code code = cmd_check_output("--output", options->output, options, &err);
    if (code == ERR_OK) {
        code = tally_new(&tally, options->model, &err);
    }
    if (code == ERR_OK) {
        code = texts_run(&texts, &own, &status, &err);
    }
    if (code == ERR_OK && status < 0) {
        code = counts_write(&tally.counts, options->output, &err);
    }
    if (code == ERR_OK && status < 0) {
        status = 0;
        printf("texts: %lld, positions: %lld\n", (long long)tally.counts.n_document,
               (long long)tally.counts.n_position);
    }
    tally_free(&tally);
    return code == ERR_OK ? status : cmd_fail(&err);
}
