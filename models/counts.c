/* Counts of how slots were read: see counts.h. */
#include "models/counts.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* What follows "memories.I." in the names of the tensors, all of 8-byte elements. */
enum part { PART_READS, PART_WEIGHT, PART_DOCUMENTS, PART_N };
static const char *const part_names[PART_N] = {"reads", "weight", "documents"};

enum { TABLES_BYTES = 3 * MODEL_PKM_MAX + 1, NUMBER_BYTES = 24 };

void counts_identity(char hex[SHA256_HEX], const struct tensors *tensors)
{
    struct sha256 sum;
    sha256_begin(&sum);
    for (int i = 0; i < tensors_n(tensors); i++) {
        const struct safetensors_entry *const entry = tensors_at(tensors, i);
        if (!tensors_is_value_table(entry)) {
            sha256_add(&sum, entry->name, strlen(entry->name) + 1);
            sha256_add(&sum, entry->data, entry->bytes);
        }
    }
    sha256_end_hex(&sum, hex);
}

/* ---- made, read, freed ---------------------------------------------------------------------- */

/* Gives arrays of zeros to the memories, whose n_slot is set. */
static enum err_code take_arrays(struct counts *counts, struct err *err)
{
    int64_t n_slot = 0;
    for (int m = 0; m < counts->n_memory; m++) {
        n_slot += counts->memory[m].n_slot;
    }
    /* One more than needed, since calloc of 0 may return NULL. */
    char *at = counts->own = calloc((size_t)n_slot + 1, PART_N * sizeof(int64_t));
    if (at == NULL) {
        return err_set(err, ERR_MEMORY, "no memory for the counts of %lld slots",
                       (long long)n_slot);
    }
    for (int m = 0; m < counts->n_memory; m++) {
        struct counts_memory *const memory = &counts->memory[m];
        const size_t bytes = (size_t)memory->n_slot * sizeof(int64_t);
        memory->reads = (int64_t *)(void *)at;
        memory->weight = (double *)(void *)(at + bytes);
        memory->documents = (int64_t *)(void *)(at + 2 * bytes);
        at += PART_N * bytes;
    }
    return ERR_OK;
}

enum err_code counts_new(struct counts *counts, const struct model_info *info, const char *model,
                         struct err *err)
{
    *counts = (struct counts){.path = "counts", .n_memory = info->n_memory};
    if (info->n_memory == 0) {
        return err_set(err, ERR_UNSUPPORTED,
                       "the model has no memories: there is nothing to count");
    }
    (void)snprintf(counts->model, sizeof counts->model, "%s", model);
    for (int m = 0; m < info->n_memory; m++) {
        counts->memory[m].n_slot = info->memory[m].n_slot;
        counts->memory[m].table = model_table_of(info, m);
    }
    return take_arrays(counts, err);
}

enum err_code counts_new_like(struct counts *counts, const struct counts *other, struct err *err)
{
    *counts = (struct counts){.path = other->path, .n_memory = other->n_memory};
    memcpy(counts->model, other->model, sizeof counts->model);
    for (int m = 0; m < other->n_memory; m++) {
        counts->memory[m].n_slot = other->memory[m].n_slot;
        counts->memory[m].table = other->memory[m].table;
    }
    return take_arrays(counts, err);
}

/* If the file has memories.I.PART, *m and the result tell its place. -1: no such tensor is
 * known. */
static int part_of(const char *name, int *m)
{
    static const char prefix[] = "memories.";
    char again[SAFETENSORS_NAME_MAX];
    if (strncmp(name, prefix, sizeof prefix - 1) != 0) {
        return -1;
    }
    const long index = strtol(name + sizeof prefix - 1, NULL, 10);
    for (int part = 0; index >= 0 && index < MODEL_PKM_MAX && part < PART_N; part++) {
        (void)snprintf(again, sizeof again, "%s%ld.%s", prefix, index, part_names[part]);
        if (strcmp(name, again) == 0) {
            *m = (int)index;
            return part;
        }
    }
    return -1;
}

static enum err_code take_part(struct counts_memory *memory, int part,
                               const struct safetensors_entry *entry, struct err *err)
{
    const enum safetensors_dtype dtype = part == PART_WEIGHT ? SAFETENSORS_F64 : SAFETENSORS_I64;
    if (entry->dtype != dtype || entry->n_dim != 1 || entry->n_elem < 1 ||
        entry->n_elem > INT32_MAX) {
        return err_set(err, ERR_FORMAT, "%s: tensor %s must be %s [n_slot], of 1 to %d slots",
                       entry->path, entry->name, safetensors_dtype_name(dtype), INT32_MAX);
    }
    if ((uintptr_t)entry->data % sizeof(int64_t) != 0) {
        return err_set(err, ERR_FORMAT,
                       "%s: tensor %s does not start at a multiple of its element size",
                       entry->path, entry->name);
    }
    if (memory->n_slot != 0 && memory->n_slot != entry->n_elem) {
        return err_set(err, ERR_FORMAT, "%s: tensor %s has %lld slots, others of its memory %lld",
                       entry->path, entry->name, (long long)entry->n_elem,
                       (long long)memory->n_slot);
    }
    void *const data = (void *)(uintptr_t)entry->data;
    memory->n_slot = entry->n_elem;
    if (part == PART_WEIGHT) {
        memory->weight = data;
    } else {
        *(part == PART_READS ? &memory->reads : &memory->documents) = data;
    }
    return ERR_OK;
}

static enum err_code take_parts(struct counts *counts, struct err *err)
{
    for (int i = 0; i < counts->tensor.n_entry; i++) {
        const struct safetensors_entry *const entry = &counts->tensor.entry[i];
        int m = 0;
        const int part = part_of(entry->name, &m);
        if (part < 0) {
            return err_set(err, ERR_FORMAT,
                           "%s: tensor %s is no part of counts: memories.I.reads, .weight and "
                           ".documents are, with I from 0 to %d",
                           counts->path, entry->name, MODEL_PKM_MAX - 1);
        }
        if (take_part(&counts->memory[m], part, entry, err) != ERR_OK) {
            return err->code;
        }
        counts->n_memory = m >= counts->n_memory ? m + 1 : counts->n_memory;
    }
    for (int m = 0; m < counts->n_memory; m++) {
        const struct counts_memory *const memory = &counts->memory[m];
        const int part = memory->reads == NULL    ? PART_READS
                         : memory->weight == NULL ? PART_WEIGHT
                                                  : PART_DOCUMENTS;
        if (memory->reads == NULL || memory->weight == NULL || memory->documents == NULL) {
            return err_set(err, ERR_FORMAT, "%s: tensor memories.%d.%s is missing", counts->path, m,
                           part_names[part]);
        }
    }
    return counts->n_memory > 0
               ? ERR_OK
               : err_set(err, ERR_FORMAT, "%s: counts must be of at least one memory",
                         counts->path);
}

/* A whole number of the metadata, from 0. */
static enum err_code read_number(int64_t *number, const struct counts *counts, const char *key,
                                 struct err *err)
{
    const char *const text = safetensors_metadata(&counts->tensor, key);
    char *end = NULL;
    errno = 0;
    *number = text != NULL ? strtoll(text, &end, 10) : -1;
    if (text == NULL || *end != '\0' || text == end || *number < 0 || errno != 0) {
        return err_set(err, ERR_FORMAT,
                       "%s: the metadata's %s is \"%.64s\": it must be a whole number from 0",
                       counts->path, key, text == NULL ? "" : text);
    }
    return ERR_OK;
}

static enum err_code read_tables(struct counts *counts, struct err *err)
{
    const char *const given = safetensors_metadata(&counts->tensor, "tables");
    const char *text = given;
    for (int m = 0; m < counts->n_memory; m++) {
        char *end = NULL;
        const long table = text != NULL ? strtol(text, &end, 10) : -1;
        const bool ends = end != NULL && *end == (m + 1 < counts->n_memory ? ',' : '\0');
        /* An owner reads its own table, and all memories with the same owner have tables of the
         * same length. */
        if (!ends || end == text || table < 0 || table > m ||
            (table < m && counts->memory[table].table != table) ||
            counts->memory[table].n_slot != counts->memory[m].n_slot) {
            return err_set(err, ERR_FORMAT,
                           "%s: the metadata's tables is \"%.64s\": it must have for each of %d "
                           "memories the index of the one whose values it reads",
                           counts->path, given == NULL ? "" : given, counts->n_memory);
        }
        counts->memory[m].table = (int)table;
        text = end + 1;
    }
    return ERR_OK;
}

static enum err_code read_metadata(struct counts *counts, struct err *err)
{
    const char *const format = safetensors_metadata(&counts->tensor, "format");
    const char *const model = safetensors_metadata(&counts->tensor, "model");
    if (format == NULL || strcmp(format, COUNTS_FORMAT) != 0) {
        return err_set(err, ERR_FORMAT,
                       "%s: no counts: the metadata's format is \"%.64s\", not \"" COUNTS_FORMAT
                       "\"",
                       counts->path, format == NULL ? "" : format);
    }
    if (model == NULL || !sha256_is_hex(model)) {
        return err_set(err, ERR_FORMAT,
                       "%s: the metadata's model must be the SHA-256 of a model in 64 digits",
                       counts->path);
    }
    memcpy(counts->model, model, sizeof counts->model);
    enum err_code code = read_number(&counts->n_document, counts, "documents", err);
    if (code == ERR_OK) {
        code = read_number(&counts->n_position, counts, "positions", err);
    }
    return code == ERR_OK ? read_tables(counts, err) : code;
}

static enum err_code check_numbers(const struct counts *counts, int m, struct err *err)
{
    const struct counts_memory *const memory = &counts->memory[m];
    int64_t sum = 0;
    for (int64_t i = 0; i < memory->n_slot; i++) {
        const int64_t reads = memory->reads[i];
        const int64_t documents = memory->documents[i];
        if (reads < 0 || __builtin_add_overflow(sum, reads, &sum)) {
            return err_set(err, ERR_FORMAT,
                           "%s: tensor memories.%d.reads: %" PRId64 " at index %" PRId64
                           ": reads must be from 0, and their sum within 63 bits",
                           counts->path, m, reads, i);
        }
        if (!isfinite(memory->weight[i])) {
            return err_set(err, ERR_NUMERICAL,
                           "%s: tensor memories.%d.weight is not finite at index %" PRId64,
                           counts->path, m, i);
        }
        if (documents < 0 || documents > counts->n_document) {
            return err_set(err, ERR_FORMAT,
                           "%s: tensor memories.%d.documents: %" PRId64 " at index %" PRId64
                           ": it must be from 0 to the number of documents, %" PRId64,
                           counts->path, m, documents, i, counts->n_document);
        }
    }
    return ERR_OK;
}

enum err_code counts_parse(struct counts *counts, const void *file, size_t bytes, const char *path,
                           struct err *err)
{
    *counts = (struct counts){.path = path};
    enum err_code code = safetensors_parse(&counts->tensor, file, bytes, path, err);
    if (code == ERR_OK) {
        code = take_parts(counts, err);
    }
    if (code == ERR_OK) {
        code = read_metadata(counts, err);
    }
    for (int m = 0; m < counts->n_memory && code == ERR_OK; m++) {
        code = check_numbers(counts, m, err);
    }
    if (code != ERR_OK) {
        counts_free(counts);
    }
    return code;
}

enum err_code counts_read(struct counts *counts, const char *path, struct err *err)
{
    struct mapped file;
    *counts = (struct counts){0};
    enum err_code code = mapped_open(&file, path, 8, err);
    if (code != ERR_OK) {
        return code;
    }
    code = counts_parse(counts, file.data, file.bytes, path, err);
    if (code == ERR_OK) {
        code = mapped_check(&file, err);
    }
    counts->file = file;
    if (code != ERR_OK) {
        counts_free(counts);
    }
    return code;
}

void counts_free(struct counts *counts)
{
    free(counts->own);
    safetensors_free(&counts->tensor);
    mapped_close(&counts->file);
    *counts = (struct counts){0};
}

/* ---- of which model, and sums ---------------------------------------------------------------- */

static enum err_code another_model(const struct counts *counts, const char *model, const char *name,
                                   struct err *err)
{
    return err_set(err, ERR_FORMAT,
                   "%s: counts of another model: theirs has the SHA-256 %s, that of %s is %s",
                   counts->path, counts->model, name, model);
}

enum err_code counts_check_same(const struct counts *counts, const struct counts *other,
                                struct err *err)
{
    bool same = strcmp(counts->model, other->model) == 0 && counts->n_memory == other->n_memory;
    for (int m = 0; m < counts->n_memory && same; m++) {
        same = counts->memory[m].n_slot == other->memory[m].n_slot &&
               counts->memory[m].table == other->memory[m].table;
    }
    return same ? ERR_OK : another_model(counts, other->model, other->path, err);
}

enum err_code counts_check(const struct counts *counts, const struct model_info *info,
                           const char *model, const char *name, struct err *err)
{
    bool same = strcmp(counts->model, model) == 0 && counts->n_memory == info->n_memory;
    for (int m = 0; m < counts->n_memory && same; m++) {
        same = counts->memory[m].n_slot == info->memory[m].n_slot &&
               counts->memory[m].table == model_table_of(info, m);
    }
    return same ? ERR_OK : another_model(counts, model, name, err);
}

enum err_code counts_add(struct counts *sum, const struct counts *more, struct err *err)
{
    CHECK(sum->own != NULL && sum->n_memory == more->n_memory);
    bool finite = true;
    bool fits = !__builtin_add_overflow(sum->n_document, more->n_document, &sum->n_document) &&
                !__builtin_add_overflow(sum->n_position, more->n_position, &sum->n_position);
    for (int m = 0; m < sum->n_memory; m++) {
        struct counts_memory *const to = &sum->memory[m];
        const struct counts_memory *const from = &more->memory[m];
        int64_t all = 0;
        for (int64_t i = 0; i < to->n_slot && fits; i++) {
            fits = !__builtin_add_overflow(to->reads[i], from->reads[i], &to->reads[i]) &&
                   !__builtin_add_overflow(all, to->reads[i], &all);
            to->weight[i] += from->weight[i];
            finite = finite && isfinite(to->weight[i]);
            to->documents[i] += from->documents[i];
        }
    }
    if (!finite) {
        return err_set(err, ERR_NUMERICAL,
                       "%s: added to the others, weights exceed the largest number of 64 bits",
                       more->path);
    }
    return fits ? ERR_OK
                : err_set(err, ERR_FORMAT, "%s: added to the others, the counts exceed 63 bits",
                          more->path);
}

enum err_code counts_table_reads(int64_t **reads, const struct counts *counts, int table,
                                 struct err *err)
{
    const int64_t n_slot = counts->memory[table].n_slot;
    int64_t *const sum = calloc((size_t)n_slot, sizeof *sum);
    *reads = sum;
    if (sum == NULL) {
        return err_set(err, ERR_MEMORY, "no memory for the reads of %lld slots", (long long)n_slot);
    }
    for (int m = table; m < counts->n_memory; m++) {
        for (int64_t i = 0; counts->memory[m].table == table && i < n_slot; i++) {
            if (__builtin_add_overflow(sum[i], counts->memory[m].reads[i], &sum[i])) {
                sum[i] = INT64_MAX;
            }
        }
    }
    return ERR_OK;
}

/* ---- written --------------------------------------------------------------------------------- */

/* What the header is made of. */
struct header {
    struct safetensors_part part[PART_N * MODEL_PKM_MAX];
    char documents[NUMBER_BYTES], positions[NUMBER_BYTES], tables[TABLES_BYTES];
    struct safetensors_string metadata[5];
};

/* Owner: the caller, by free. */
static struct header *header_of(const struct counts *counts, struct err *err)
{
    struct header *const head = calloc(1, sizeof *head);
    if (head == NULL) {
        (void)err_set(err, ERR_MEMORY, "no memory for the header of counts");
        return NULL;
    }
    size_t at = 0;
    for (int m = 0; m < counts->n_memory; m++) {
        for (int part = 0; part < PART_N; part++) {
            struct safetensors_part *const p = &head->part[PART_N * m + part];
            p->dtype = part == PART_WEIGHT ? SAFETENSORS_F64 : SAFETENSORS_I64;
            p->n_dim = 1;
            p->dim[0] = counts->memory[m].n_slot;
            (void)snprintf(p->name, sizeof p->name, "memories.%d.%s", m, part_names[part]);
        }
        at += (size_t)snprintf(head->tables + at, sizeof head->tables - at, "%s%d",
                               m > 0 ? "," : "", counts->memory[m].table);
    }
    (void)snprintf(head->documents, sizeof head->documents, "%" PRId64, counts->n_document);
    (void)snprintf(head->positions, sizeof head->positions, "%" PRId64, counts->n_position);
    head->metadata[0] = (struct safetensors_string){"format", COUNTS_FORMAT};
    head->metadata[1] = (struct safetensors_string){"model", counts->model};
    head->metadata[2] = (struct safetensors_string){"documents", head->documents};
    head->metadata[3] = (struct safetensors_string){"positions", head->positions};
    head->metadata[4] = (struct safetensors_string){"tables", head->tables};
    return head;
}

char *counts_header(const struct counts *counts, size_t *bytes, struct err *err)
{
    struct header *const head = header_of(counts, err);
    char *text = NULL;
    if (head != NULL) {
        text = safetensors_header(head->part, PART_N * counts->n_memory, head->metadata, 5, bytes);
        if (text == NULL) {
            (void)err_set(err, ERR_MEMORY, "no memory for the header of counts");
        }
    }
    free(head);
    return text;
}

enum err_code counts_write(const struct counts *counts, const char *path, struct err *err)
{
    struct safetensors_out out = {0};
    struct header *const head = header_of(counts, err);
    if (head == NULL) {
        return ERR_MEMORY;
    }
    enum err_code code = safetensors_out_open(&out, path, head->part, PART_N * counts->n_memory,
                                              head->metadata, 5, err);
    for (int m = 0; m < counts->n_memory && code == ERR_OK; m++) {
        const struct counts_memory *const memory = &counts->memory[m];
        const size_t bytes = (size_t)memory->n_slot * sizeof(int64_t);
        safetensors_out_add(&out, memory->reads, bytes);
        safetensors_out_add(&out, memory->weight, bytes);
        safetensors_out_add(&out, memory->documents, bytes);
    }
    free(head);
    return safetensors_out_close(&out, code, err);
}
