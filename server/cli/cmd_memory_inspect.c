/* `pkmserve memory inspect`: describes a file of counts or an overlay. An overlay is compared with
 * the model that it was made for, if that is the one given, or without --model the one shipped. */
#include "models/counts.h"
#include "models/table.h"
#include "server/cli/cmd.h"
#include "server/json/json.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Smallest, mean and largest of some numbers. */
struct spread {
    double min, sum, max;
    int64_t n;
};

static void spread_add(struct spread *spread, double value)
{
    spread->min = spread->n == 0 || value < spread->min ? value : spread->min;
    spread->max = spread->n == 0 || value > spread->max ? value : spread->max;
    spread->sum += value;
    spread->n++;
}

static void json_spread(struct text *out, const char *name, const struct spread *spread)
{
    json_key(out, name);
    json_open(out, '{');
    json_field_double(out, "min", spread->min);
    json_field_double(out, "mean", spread->n > 0 ? spread->sum / (double)spread->n : NAN);
    json_field_double(out, "max", spread->max);
    json_close(out, '}');
}

static void print_spread(const char *name, const struct spread *spread)
{
    printf("  %-22s from %.6g to %.6g, %.6g on average\n", name, spread->min, spread->max,
           spread->sum / (double)spread->n);
}

/* ---- counts --------------------------------------------------------------------------------- */

static void print_counted(struct text *out, const struct counts *counts, int m)
{
    const struct counts_memory *const memory = &counts->memory[m];
    int64_t n_read = 0;
    int64_t reads = 0;
    double weight = 0;
    for (int64_t i = 0; i < memory->n_slot; i++) {
        n_read += memory->reads[i] > 0;
        reads += memory->reads[i];
        weight += memory->weight[i];
    }
    if (out == NULL) {
        printf("memory %d: slots that were read: %lld of %lld; reads: %lld, of weight %.6g\n", m,
               (long long)n_read, (long long)memory->n_slot, (long long)reads, weight);
        return;
    }
    json_open(out, '{');
    json_field_int(out, "memory", m);
    json_field_int(out, "table", memory->table);
    json_field_int(out, "slots", memory->n_slot);
    json_field_int(out, "slots_read", n_read);
    json_field_int(out, "reads", reads);
    json_field_double(out, "weight", weight);
    json_close(out, '}');
}

static enum err_code inspect_counts(const struct mapped *file, bool json, struct err *err)
{
    struct counts counts;
    struct text out = {0};
    enum err_code code = ERR_OK;
    if (counts_parse(&counts, file->data, file->bytes, file->path, err) != ERR_OK) {
        return err->code;
    }
    if (json) {
        json_open(&out, '{');
        json_field_string(&out, "format", COUNTS_FORMAT);
        json_field_string(&out, "model", counts.model);
        json_field_int(&out, "documents", counts.n_document);
        json_field_int(&out, "positions", counts.n_position);
        json_key(&out, "memories");
        json_open(&out, '[');
    } else {
        printf("%s: counts; texts: %lld, positions: %lld\nmodel %s\n", file->path,
               (long long)counts.n_document, (long long)counts.n_position, counts.model);
    }
    for (int m = 0; m < counts.n_memory; m++) {
        print_counted(json ? &out : NULL, &counts, m);
    }
    if (json) {
        json_close(&out, ']');
        json_close(&out, '}');
        code = cmd_print(&out, err);
    }
    text_free(&out);
    counts_free(&counts);
    return code;
}

/* ---- overlays ------------------------------------------------------------------------------- */

struct inspection {
    const struct options *options;
    struct overlay overlay;
    struct model_info *info; /* Owner: this */
    struct tensors *tensors; /* Owner: this. The base; NULL = it is not known */
    struct counts counts;    /* n_memory 0 = no counts were given */
};

static bool model_is_given(const struct options *options)
{
    return options->model != options->model_path;
}

/* Opens the base. If the shipped model does not fit an overlay, that only means that it is not its
 * base. */
static enum err_code open_base(struct inspection *it, struct err *err)
{
    char hash[MODEL_PKM_MAX][SHA256_HEX] = {0};
    const char *const dir = it->options->model;
    enum err_code code = model_info_read(it->info, dir, err);
    if (code == ERR_OK) {
        code = tensors_open(&it->tensors, dir, err);
    }
    if (code == ERR_OK) { /* what costs nothing first */
        code = overlay_check(&it->overlay, it->info, NULL, err);
    }
    for (int i = 0; i < it->overlay.n_memory && code == ERR_OK; i++) {
        const int m = it->overlay.memory[i].memory;
        code = overlay_base_hash(hash[m], it->tensors, it->info, m, err);
    }
    if (code == ERR_OK) {
        code = overlay_check(&it->overlay, it->info, (const char(*)[SHA256_HEX])hash, err);
    }
    if (code != ERR_OK && !model_is_given(it->options)) {
        tensors_close(it->tensors);
        it->tensors = NULL;
        code = ERR_OK;
    }
    return code;
}

static enum err_code open_counts(struct inspection *it, struct err *err)
{
    char model[SHA256_HEX];
    if (it->options->counts[0] == '\0') {
        return ERR_OK;
    }
    if (it->tensors == NULL) {
        return err_set(err, ERR_ARGUMENT,
                       "--counts: whose they are is told by the model that the overlay was made "
                       "for: give --model");
    }
    counts_identity(model, it->tensors);
    enum err_code code = counts_read(&it->counts, it->options->counts, err);
    return code == ERR_OK ? counts_check(&it->counts, it->info, model, it->options->model, err)
                          : code;
}

/* What is printed about one row. */
struct row {
    double norm;   /* norm of the row that is read in place of the base's */
    double change; /* norm of the difference to the base's, relative to the base's */
    double cosine; /* cosine with the base's row; NaN if either is zero */
    int64_t reads; /* -1 = not asked for */
};

/* What a part of a row, its values or its expert, adds to the figures. */
struct products {
    double rr, bb, rb; /* of the row that is read and the base's */
    double difference; /* squared norm */
};

/* base and row are scratch, [cols]; table: of the base, NULL = not known. */
static void products_add(struct products *sum, const struct inspection *it,
                         const struct overlay_rows *rows, int64_t i, const struct table *table,
                         int32_t slot, float *base, float *row)
{
    table_overlay_row(row, rows, i);
    if (table != NULL) {
        table_row(base, table, slot);
    }
    for (int64_t c = 0; c < rows->rows.cols; c++) {
        const double b = table != NULL ? (double)base[c] : 0;
        const double r = (double)row[c] + (it->overlay.add ? b : 0);
        sum->rr += r * r;
        sum->bb += b * b;
        sum->rb += r * b;
        sum->difference += (r - b) * (r - b);
    }
}

/* A row with an expert is one vector of both. change and cosine mean nothing without a base. table:
 * of the values and of the experts, NULL = the base is not known; scratch: [2 * width]. */
static struct row row_of(const struct inspection *it, const struct overlay_memory *part, int64_t i,
                         const struct table *table, float *scratch, int64_t width)
{
    struct row told = {.reads = -1};
    struct products sum = {0};
    products_add(&sum, it, &part->values, i, table, part->slot[i], scratch, scratch + width);
    if (part->experts.rows.data != NULL) {
        products_add(&sum, it, &part->experts, i, table != NULL ? table + 1 : NULL, part->slot[i],
                     scratch, scratch + width);
    }
    told.norm = sqrt(sum.rr);
    told.cosine = sum.rr > 0 && sum.bb > 0 ? sum.rb / sqrt(sum.rr * sum.bb) : NAN;
    told.change = sum.bb > 0 ? sqrt(sum.difference / sum.bb) : NAN;
    return told;
}

struct told {
    struct spread norm, cosine, change;
    int64_t reads;
};

/* Over all memories that read the table: how often each of the overlay's slots was read. */
static int64_t slot_reads(const struct counts *counts, int table, int64_t slot)
{
    int64_t sum = 0;
    for (int m = table; m < counts->n_memory; m++) {
        sum += counts->memory[m].table == table ? counts->memory[m].reads[slot] : 0;
    }
    return sum;
}

static void print_memory(const struct inspection *it, const struct overlay_memory *part,
                         const struct told *told)
{
    printf("memory %d: rows: %lld, of width %lld, %s%s\n  base %s\n", part->memory,
           (long long)part->n, (long long)part->values.rows.cols,
           dtype_name(part->values.rows.dtype),
           part->experts.rows.data != NULL ? ", with experts" : "", part->base);
    print_spread(it->overlay.add && it->tensors == NULL ? "norm of what is added" : "norm",
                 &told->norm);
    if (it->tensors != NULL && told->cosine.n > 0) {
        print_spread("cosine to the base", &told->cosine);
    }
    if (it->tensors != NULL && told->change.n > 0) {
        print_spread("change, of the norm", &told->change);
    }
    if (it->counts.n_memory > 0) {
        int64_t all = 0;
        for (int64_t i = 0; i < it->info->memory[part->memory].n_slot; i++) {
            all += slot_reads(&it->counts, part->memory, i);
        }
        printf("  %-22s %lld, %.4f %% of all; texts: %lld\n", "reads of its slots",
               (long long)told->reads, all > 0 ? 100.0 * (double)told->reads / (double)all : 0.0,
               (long long)it->counts.n_document);
    }
}

static void json_row(struct text *out, const struct inspection *it, int32_t slot,
                     const struct row *row)
{
    json_open(out, '{');
    json_field_int(out, "slot", slot);
    json_field_double(out, "norm", row->norm);
    if (it->tensors != NULL) {
        json_field_double(out, "cosine", row->cosine);
        json_field_double(out, "change", row->change);
    }
    if (row->reads >= 0) {
        json_field_int(out, "reads", row->reads);
    }
    json_close(out, '}');
}

static enum err_code tell_memory(struct text *out, const struct inspection *it,
                                 const struct overlay_memory *part, struct err *err)
{
    struct told told = {0};
    struct table table[2];
    const bool experts = part->experts.rows.data != NULL;
    const int64_t cols = part->values.rows.cols;
    const int64_t width =
        experts && part->experts.rows.cols > cols ? part->experts.rows.cols : cols;
    for (int t = 0; t < 1 + experts && it->tensors != NULL; t++) {
        if (table_open(&table[t], it->tensors, it->info, part->memory, t > 0, err) != ERR_OK) {
            return err->code;
        }
    }
    float *const scratch = malloc(2 * (size_t)width * sizeof *scratch);
    if (scratch == NULL) {
        return err_set(err, ERR_MEMORY, "no memory for two rows of %lld columns", (long long)width);
    }
    json_open(out, '{');
    json_field_int(out, "memory", part->memory);
    json_field_string(out, "base", part->base);
    json_field_string(out, "dtype", dtype_name(part->values.rows.dtype));
    json_field_int(out, "columns", cols);
    json_field_bool(out, "experts", experts);
    json_key(out, "rows");
    json_open(out, '[');
    for (int64_t i = 0; i < part->n; i++) {
        struct row row = row_of(it, part, i, it->tensors != NULL ? table : NULL, scratch, width);
        spread_add(&told.norm, row.norm);
        if (isfinite(row.cosine)) {
            spread_add(&told.cosine, row.cosine);
        }
        if (isfinite(row.change)) {
            spread_add(&told.change, row.change);
        }
        if (it->counts.n_memory > 0) {
            row.reads = slot_reads(&it->counts, part->memory, part->slot[i]);
            told.reads += row.reads;
        }
        if (it->options->json) {
            json_row(out, it, part->slot[i], &row);
        }
    }
    json_close(out, ']');
    json_spread(out, "norm", &told.norm);
    json_close(out, '}');
    if (!it->options->json) {
        print_memory(it, part, &told);
    }
    free(scratch);
    return ERR_OK;
}

static enum err_code tell_overlay(const struct inspection *it, struct err *err)
{
    struct text out = {0};
    const struct overlay *const overlay = &it->overlay;
    enum err_code code = ERR_OK;
    if (!it->options->json) {
        printf("%s: an overlay that %s rows\nSHA-256 %s\n", overlay->path,
               overlay->add ? "adds to" : "replaces", overlay->sha256);
        if (it->tensors == NULL) {
            printf("made for another model than the shipped one: --model names it, for a "
                   "comparison\n");
        }
    }
    json_open(&out, '{');
    json_field_string(&out, "format", OVERLAY_FORMAT);
    json_field_string(&out, "mode", overlay->add ? "add" : "replace");
    json_field_string(&out, "sha256", overlay->sha256);
    json_key(&out, "memories");
    json_open(&out, '[');
    for (int i = 0; i < overlay->n_memory && code == ERR_OK; i++) {
        code = tell_memory(&out, it, &overlay->memory[i], err);
    }
    json_close(&out, ']');
    json_close(&out, '}');
    if (code == ERR_OK && it->options->json) {
        code = cmd_print(&out, err);
    }
    text_free(&out);
    return code;
}

static enum err_code inspect_overlay(const struct mapped *file, const struct options *options,
                                     struct err *err)
{
    struct inspection it = {.options = options, .info = calloc(1, sizeof *it.info)};
    enum err_code code = it.info != NULL ? ERR_OK : err_set(err, ERR_MEMORY, "no memory");
    if (code == ERR_OK) {
        code = overlay_parse(&it.overlay, file->data, file->bytes, file->path, err);
    }
    if (code == ERR_OK) {
        code = open_base(&it, err);
    }
    if (code == ERR_OK) {
        code = open_counts(&it, err);
    }
    if (code == ERR_OK) {
        code = tell_overlay(&it, err);
    }
    counts_free(&it.counts);
    tensors_close(it.tensors);
    overlay_free(&it.overlay);
    free(it.info);
    return code;
}

/* Which of the two the file is, judging by its header. */
static enum err_code is_counts(bool *counts, const struct mapped *file, struct err *err)
{
    struct safetensors st;
    if (safetensors_parse(&st, file->data, file->bytes, file->path, err) != ERR_OK) {
        return err->code;
    }
    const char *const format = safetensors_metadata(&st, "format");
    enum err_code code = ERR_OK;
    *counts = format != NULL && strcmp(format, COUNTS_FORMAT) == 0;
    if (!*counts && (format == NULL || strcmp(format, OVERLAY_FORMAT) != 0)) {
        code = err_set(err, ERR_FORMAT,
                       "%s: neither counts nor an overlay: the metadata's format is \"%.64s\", not "
                       "\"" COUNTS_FORMAT "\" or \"" OVERLAY_FORMAT "\"",
                       file->path, format == NULL ? "" : format);
    }
    safetensors_free(&st);
    return code;
}

int cmd_memory_inspect(const struct options *options)
{
    struct err err;
    struct mapped file = {0};
    bool counts = false;
    enum err_code code = mapped_open(&file, options->operand[0], 8, &err);
    if (code == ERR_OK) {
        code = is_counts(&counts, &file, &err);
    }
    if (code == ERR_OK && counts && options->counts[0] != '\0') {
        code = err_set(&err, ERR_ARGUMENT, "--counts goes with an overlay, and %s has counts",
                       file.path);
    }
    if (code == ERR_OK) {
        code = counts ? inspect_counts(&file, options->json, &err)
                      : inspect_overlay(&file, options, &err);
    }
    mapped_close(&file);
    return code == ERR_OK ? 0 : cmd_fail(&err);
}
