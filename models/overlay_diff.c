/* See overlay_diff.h. */
#include "models/overlay_diff.h"

#include "models/safetensors_out.h"
#include "models/table.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A model directory that is compared. */
struct side {
    const char *dir;
    struct model_info info;
    struct tensors *tensors; /* Owner: this */
};

/* The tables of one memory, values and perhaps experts, on both sides. */
struct pair {
    struct table base, tuned;
};

struct changed {
    int memory;
    int n_table; /* 2 = with experts */
    struct pair table[2];
    int32_t *slot; /* Owner: this. [n] ascending */
    int64_t n;
    char hash[SHA256_HEX];
};

struct diff {
    struct side base, tuned;
    struct changed changed[MODEL_PKM_MAX]; /* [n] */
    int n;
    float *row; /* Owner: this. [2, width] */
    int64_t width;
};

/* ---- what must be alike --------------------------------------------------------------------- */

static enum err_code open_side(struct side *side, const char *dir, struct err *err)
{
    side->dir = dir;
    const enum err_code code = model_info_read(&side->info, dir, err);
    return code == ERR_OK ? tensors_open(&side->tensors, dir, err) : code;
}

static enum err_code check_shapes(const struct diff *diff, struct err *err)
{
    const struct model_info *const a = &diff->base.info;
    const struct model_info *const b = &diff->tuned.info;
    bool same = a->n_memory == b->n_memory && a->d_model == b->d_model;
    for (int m = 0; m < a->n_memory && same; m++) {
        const struct pkm_info *const x = &a->memory[m];
        const struct pkm_info *const y = &b->memory[m];
        same = x->layer == y->layer && x->place == y->place && x->n_slot == y->n_slot &&
               x->d_value == y->d_value && x->values_of == y->values_of &&
               x->experts == y->experts && x->shape.n_head == y->shape.n_head &&
               x->shape.k_top == y->shape.k_top;
    }
    if (!same) {
        return err_set(
            err, ERR_FORMAT,
            "%s and %s: their memories differ in shape or number: an overlay has rows of "
            "the same tables",
            diff->base.dir, diff->tuned.dir);
    }
    return a->n_memory > 0
               ? ERR_OK
               : err_set(err, ERR_UNSUPPORTED, "%s: the model has no memories", diff->base.dir);
}

static enum err_code only_in(const struct safetensors_entry *entry, const struct side *other,
                             struct err *err)
{
    return err_set(err, ERR_FORMAT, "%s: tensor %s is missing from %s", entry->path, entry->name,
                   other->dir);
}

/* All tensors but the tables are the same bytes on both sides. */
static enum err_code check_rest(const struct diff *diff, struct err *err)
{
    const struct tensors *const a = diff->base.tensors;
    const struct tensors *const b = diff->tuned.tensors;
    for (int i = 0; i < tensors_n(b); i++) {
        const struct safetensors_entry *const entry = tensors_at(b, i);
        if (!tensors_is_value_table(entry) && tensors_find(a, entry->name) < 0) {
            return only_in(entry, &diff->base, err);
        }
    }
    for (int i = 0; i < tensors_n(a); i++) {
        const struct safetensors_entry *const x = tensors_at(a, i);
        const int index = tensors_find(b, x->name);
        if (tensors_is_value_table(x)) {
            continue;
        }
        if (index < 0) {
            return only_in(x, &diff->tuned, err);
        }
        const struct safetensors_entry *const y = tensors_at(b, index);
        if (x->dtype != y->dtype || x->bytes != y->bytes ||
            memcmp(x->data, y->data, x->bytes) != 0) {
            return err_set(err, ERR_FORMAT,
                           "%s: tensor %s is another one than in %s: an overlay has rows of value "
                           "tables alone",
                           y->path, y->name, x->path);
        }
    }
    return ERR_OK;
}

/* ---- the rows ------------------------------------------------------------------------------- */

static bool row_differs(const struct diff *diff, const struct pair *pair, int64_t i)
{
    const struct table *const a = &pair->base;
    const struct table *const b = &pair->tuned;
    if (a->dtype == b->dtype) {
        const size_t bytes = a->entry->bytes / (size_t)a->rows;
        const size_t scale = a->scale != NULL ? a->scale->bytes / (size_t)a->rows : 0;
        const size_t at = (size_t)i;
        return memcmp(a->entry->data + at * bytes, b->entry->data + at * bytes, bytes) != 0 ||
               (scale > 0 &&
                memcmp(a->scale->data + at * scale, b->scale->data + at * scale, scale) != 0);
    }
    table_row(diff->row, a, i);
    table_row(diff->row + diff->width, b, i);
    return memcmp(diff->row, diff->row + diff->width, (size_t)a->cols * sizeof(float)) != 0;
}

/* Refuses what overlay_parse would refuse. */
static enum err_code check_row(const struct diff *diff, const struct table *table, int64_t i,
                               struct err *err)
{
    table_row(diff->row, table, i);
    for (int64_t c = 0; c < table->cols; c++) {
        if (!isfinite(diff->row[c])) {
            return err_set(err, ERR_NUMERICAL, "%s: tensor %s: row %lld holds NaN or infinity",
                           table->entry->path, table->entry->name, (long long)i);
        }
    }
    return ERR_OK;
}

/* Before row i: some rows at a time, those before it. */
static void release_rows(const struct changed *it, int64_t i)
{
    enum { N = 256 };
    for (int t = 0; t < it->n_table && i > 0 && i % N == 0; t++) {
        table_release(&it->table[t].base, i - N, N);
        table_release(&it->table[t].tuned, i - N, N);
    }
}

/* Finds the rows of memory m that differ; n 0 = none. */
static enum err_code find_rows(const struct diff *diff, struct changed *it, int m, struct err *err)
{
    const struct pkm_info *const memory = &diff->base.info.memory[m];
    enum err_code code = ERR_OK;
    *it = (struct changed){.memory = m, .n_table = memory->experts ? 2 : 1};
    for (int t = 0; t < it->n_table && code == ERR_OK; t++) {
        struct pair *const pair = &it->table[t];
        code = table_open(&pair->base, diff->base.tensors, &diff->base.info, m, t > 0, err);
        if (code == ERR_OK) {
            code = table_open(&pair->tuned, diff->tuned.tensors, &diff->tuned.info, m, t > 0, err);
        }
    }
    int64_t room = 0;
    for (int64_t i = 0; i < memory->n_slot && code == ERR_OK; i++) {
        release_rows(it, i);
        if (!row_differs(diff, &it->table[0], i) &&
            (it->n_table == 1 || !row_differs(diff, &it->table[1], i))) {
            continue;
        }
        for (int t = 0; t < it->n_table && code == ERR_OK; t++) {
            code = check_row(diff, &it->table[t].tuned, i, err);
        }
        if (it->n == room) {
            room = room > 0 ? 2 * room : 1024;
            int32_t *const more = realloc(it->slot, (size_t)room * sizeof *more);
            if (more == NULL) {
                return err_set(err, ERR_MEMORY, "no memory for a list of %lld rows",
                               (long long)room);
            }
            it->slot = more;
        }
        it->slot[it->n++] = (int32_t)i;
    }
    return code;
}

static enum err_code find_all(struct diff *diff, struct err *err)
{
    enum err_code code = ERR_OK;
    for (int m = 0; m < diff->base.info.n_memory && code == ERR_OK; m++) {
        struct changed *const it = &diff->changed[diff->n];
        if (diff->base.info.memory[m].values_of != m) {
            continue;
        }
        code = find_rows(diff, it, m, err);
        if (it->n > 0) {
            diff->n++;
        }
        if (code == ERR_OK && it->n > 0) {
            code = overlay_base_hash(it->hash, diff->base.tensors, &diff->base.info, m, err);
        }
    }
    if (code == ERR_OK && diff->n == 0) {
        code = err_set(err, ERR_ARGUMENT, "%s and %s: no row differs: there is nothing to write",
                       diff->base.dir, diff->tuned.dir);
    }
    return code;
}

/* ---- the file ------------------------------------------------------------------------------- */

enum { PART_MAX = 5 * MODEL_PKM_MAX };

static enum safetensors_dtype dtype_of(const struct table *table)
{
    return table->dtype == DTYPE_Q4 ? SAFETENSORS_F32 : table->entry->dtype;
}

/* What is written, in order. kind: 0 slots, 1 rows, 2 their scales. */
struct piece {
    const struct changed *changed;
    const struct table *table;
    int kind;
};

struct plan {
    struct safetensors_part part[PART_MAX];
    struct piece piece[PART_MAX];
    int n;
};

static void plan_add(struct plan *plan, const struct changed *it, int t, int kind)
{
    const struct table *const table = &it->table[t].tuned;
    struct safetensors_part *const part = &plan->part[plan->n];
    *part = (struct safetensors_part){.dtype = kind == 0   ? SAFETENSORS_I32
                                               : kind == 1 ? dtype_of(table)
                                                           : SAFETENSORS_F32,
                                      .n_dim = kind == 1 ? 2 : 1,
                                      .dim = {it->n, table->cols}};
    const char *const rows = t == 0 ? "rows" : "experts";
    (void)snprintf(part->name, sizeof part->name, "memories.%d.%s%s", it->memory,
                   kind == 0 ? "slots" : rows, kind == 2 ? ".scale" : "");
    plan->piece[plan->n++] = (struct piece){it, table, kind};
}

/* All parts, the widest types first, so that each begins where its type must. */
static void make_plan(struct plan *plan, const struct diff *diff)
{
    for (size_t size = 4; size > 0; size /= 2) {
        for (int i = 0; i < diff->n; i++) {
            const struct changed *const it = &diff->changed[i];
            if (size == 4) {
                plan_add(plan, it, 0, 0);
            }
            for (int t = 0; t < it->n_table; t++) {
                const struct table *const table = &it->table[t].tuned;
                if (safetensors_dtype_bytes(dtype_of(table)) == size) {
                    plan_add(plan, it, t, 1);
                }
                if (size == 4 && table->dtype == DTYPE_I8) {
                    plan_add(plan, it, t, 2);
                }
            }
        }
    }
}

static void write_piece(struct safetensors_out *out, const struct diff *diff,
                        const struct piece *piece)
{
    const struct changed *const it = piece->changed;
    const struct table *const table = piece->table;
    const size_t bytes = table->entry->bytes / (size_t)table->rows;
    if (piece->kind == 0) {
        safetensors_out_add(out, it->slot, (size_t)it->n * sizeof *it->slot);
        return;
    }
    for (int64_t i = 0; i < it->n; i++) {
        const size_t at = (size_t)it->slot[i];
        if (piece->kind == 2) {
            safetensors_out_add(out, table->scale->data + at * sizeof(float), sizeof(float));
        } else if (table->dtype == DTYPE_Q4) {
            table_row(diff->row, table, it->slot[i]);
            safetensors_out_add(out, diff->row, (size_t)table->cols * sizeof(float));
        } else {
            safetensors_out_add(out, table->entry->data + at * bytes, bytes);
        }
    }
}

static enum err_code write_file(const struct diff *diff, const char *path, struct err *err)
{
    struct safetensors_string metadata[2 + MODEL_PKM_MAX] = {{"format", OVERLAY_FORMAT},
                                                             {"mode", "replace"}};
    char key[MODEL_PKM_MAX][16];
    struct plan *const plan = calloc(1, sizeof *plan);
    if (plan == NULL) {
        return err_set(err, ERR_MEMORY, "%s: no memory to write it", path);
    }
    make_plan(plan, diff);
    for (int i = 0; i < diff->n; i++) {
        (void)snprintf(key[i], sizeof key[i], diff->n == 1 ? "base" : "base.%d",
                       diff->changed[i].memory);
        metadata[2 + i] = (struct safetensors_string){key[i], diff->changed[i].hash};
    }
    struct safetensors_out out = {0};
    enum err_code code =
        safetensors_out_open(&out, path, plan->part, plan->n, metadata, 2 + diff->n, err);
    for (int i = 0; i < plan->n && code == ERR_OK; i++) {
        write_piece(&out, diff, &plan->piece[i]);
    }
    if (code == ERR_OK) { /* or what was written is not what was compared */
        code = tensors_check_files(diff->tuned.tensors, false, err);
    }
    free(plan);
    return safetensors_out_close(&out, code, err);
}

static enum err_code run(struct diff *diff, const char *base, const char *tuned, const char *path,
                         struct err *err)
{
    enum err_code code = open_side(&diff->base, base, err);
    if (code == ERR_OK) {
        code = open_side(&diff->tuned, tuned, err);
    }
    if (code == ERR_OK) {
        code = check_shapes(diff, err);
    }
    if (code == ERR_OK) {
        code = check_rest(diff, err);
    }
    for (int m = 0; m < diff->base.info.n_memory; m++) {
        const int64_t cols = diff->base.info.memory[m].d_value;
        diff->width = cols > diff->width ? cols : diff->width;
    }
    diff->width = diff->base.info.d_model > diff->width ? diff->base.info.d_model : diff->width;
    if (code == ERR_OK) {
        diff->row = malloc(2 * (size_t)diff->width * sizeof *diff->row);
        code = diff->row != NULL ? find_all(diff, err)
                                 : err_set(err, ERR_MEMORY, "no memory for two rows");
    }
    return code == ERR_OK ? write_file(diff, path, err) : code;
}

enum err_code overlay_diff_write(struct overlay_diff *told, const char *base, const char *tuned,
                                 const char *path, struct err *err)
{
    *told = (struct overlay_diff){0};
    struct diff *const diff = calloc(1, sizeof *diff);
    if (diff == NULL) {
        return err_set(err, ERR_MEMORY, "%s: no memory to compare it", base);
    }
    const enum err_code code = run(diff, base, tuned, path, err);
    for (int i = 0; i < MODEL_PKM_MAX; i++) {
        if (code == ERR_OK && i < diff->n) {
            told->n_row[diff->changed[i].memory] = diff->changed[i].n;
        }
        free(diff->changed[i].slot);
    }
    tensors_close(diff->base.tensors);
    tensors_close(diff->tuned.tensors);
    free(diff->row);
    free(diff);
    return code;
}
