/* Counts of how the slots of a model's memories were read: in texts by `pkmserve memory count`, in
 * live traffic by GET /memory/counts. A safetensors file, which has for each memory I
 *   memories.I.reads      I64 [n_slot]  look-ups of the slot
 *   memories.I.weight     F64 [n_slot]  sum of their weights, as used
 *   memories.I.documents  I64 [n_slot]  texts that read it: its document frequency
 * and as metadata: format, COUNTS_FORMAT; model, the result of counts_identity; documents and
 * positions, how many texts and positions were counted; tables, for each memory the index of the
 * memory whose table of values it reads, separated by commas.
 *
 * Nothing in a file is trusted: counts_parse checks all that the file alone can tell. Errors begin
 * with the file's path and name the tensor. */
#ifndef MODELS_COUNTS_H
#define MODELS_COUNTS_H

#include "models/mapped.h"
#include "models/safetensors_out.h"
#include "models/sha256.h"
#include "models/tensors.h"

#define COUNTS_FORMAT "pkmserve-counts-1"

struct counts_memory {
    int64_t n_slot;
    int table;          /* the memory whose values it reads: an earlier one, or this one */
    int64_t *reads;     /* [n_slot] from 0, their sum within 63 bits; about all three arrays, see
                         * own */
    double *weight;     /* [n_slot] finite; of both signs in a memory without softmax */
    int64_t *documents; /* [n_slot] 0 .. n_document */
};

struct counts {
    const char *path; /* Borrowed: for messages */
    char model[SHA256_HEX];
    int64_t n_document, n_position;
    int n_memory;
    struct counts_memory memory[MODEL_PKM_MAX]; /* [n_memory] */
    void *own; /* Owner: this. The arrays; NULL: they lie in the file and must not be written */
    struct mapped file;        /* Owner: this, of counts_read */
    struct safetensors tensor; /* Owner of the list, of counts_parse and counts_read */
};

/* Counts of different models must not be mixed. This tells models apart: the SHA-256 of all
 * tensors, names and bytes, but without the tables of values and experts. So a model keeps its
 * identity when rows of its tables change, since a slot then still means the same. Reads these
 * tensors once. */
void counts_identity(char hex[SHA256_HEX], const struct tensors *tensors);

/* Zeros for the model's memories; ERR_UNSUPPORTED if it has none. */
enum err_code counts_new(struct counts *counts, const struct model_info *info, const char *model,
                         struct err *err);
/* The same for the memories of other counts. */
enum err_code counts_new_like(struct counts *counts, const struct counts *other, struct err *err);
/* file, aligned as malloc aligns, and path must outlive counts; on failure there is nothing to
 * free. */
enum err_code counts_parse(struct counts *counts, const void *file, size_t bytes, const char *path,
                           struct err *err);
/* Maps the file, which must not change meanwhile, and parses it. */
enum err_code counts_read(struct counts *counts, const char *path, struct err *err);
void counts_free(struct counts *counts); /* a zeroed one is fine */

/* ERR_ARGUMENT, naming both, unless they come from the same model and memories. */
enum err_code counts_check_same(const struct counts *counts, const struct counts *other,
                                struct err *err);
/* The same check against a model whose identity is `model`, called name. */
enum err_code counts_check(const struct counts *counts, const struct model_info *info,
                           const char *model, const char *name, struct err *err);

/* Adds more to sum, which owns its arrays: the same model. ERR_ARGUMENT where a sum would
 * overflow. */
enum err_code counts_add(struct counts *sum, const struct counts *more, struct err *err);

/* The header of the file: see safetensors_header. */
char *counts_header(const struct counts *counts, size_t *bytes, struct err *err);
enum err_code counts_write(const struct counts *counts, const char *path, struct err *err);

/* Reads of the slots of a table, [n_slot], by all memories that read it. ERR_MEMORY. Owner: the
 * caller. */
enum err_code counts_table_reads(int64_t **reads, const struct counts *counts, int table,
                                 struct err *err);

#endif
