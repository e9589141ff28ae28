/* `pkmserve memory add`, `rank` and `hot`: what files of counts tell. See models/counts.h for the
 * files; cmd_memory_count.c makes them. The lists of slots that rank and hot write are safetensors
 * files:
 *   memories.I.slots   I32 [n] ascending, of the table that memory I owns
 *   memories.I.score   F64 [n] by which they were chosen: rank's score, or hot's number of reads
 * with the metadata format, SLOTS_FORMAT, model, as in the counts, and by. */
#include "models/counts.h"
#include "server/cli/cmd.h"
#include "server/json/json.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define SLOTS_FORMAT "pkmserve-slots-1"

/* ---- add ------------------------------------------------------------------------------------ */

/* Adds the file to sum; the first file begins the sum. */
static enum err_code add_file(struct counts *sum, const char *path, struct err *err)
{
    struct counts more;
    enum err_code code = counts_read(&more, path, err);
    if (code == ERR_OK && sum->own == NULL) {
        code = counts_new_like(sum, &more, err);
        sum->path = path;
    } else if (code == ERR_OK) {
        code = counts_check_same(&more, sum, err);
    }
    if (code == ERR_OK) {
        code = counts_add(sum, &more, err);
    }
    counts_free(&more);
    return code;
}

int cmd_memory_add(const struct options *options)
{
    struct err err;
    struct counts sum = {0};
    enum err_code code = ERR_OK;
    for (int i = 0; i < options->n_operand && code == ERR_OK; i++) {
        code = add_file(&sum, options->operand[i], &err);
    }
    if (code == ERR_OK) {
        code = counts_write(&sum, options->output, &err);
    }
    counts_free(&sum);
    return code == ERR_OK ? 0 : cmd_fail(&err);
}

/* ---- lists of slots ------------------------------------------------------------------------- */

/* The slots of a table that were chosen. */
struct list {
    int32_t *slot; /* Owner: this. [n] ascending */
    double *score; /* Owner: this. [n] */
    int64_t n;
};

static void lists_free(struct list *list)
{
    for (int m = 0; m < MODEL_PKM_MAX; m++) {
        free(list[m].slot);
        free(list[m].score);
    }
}

/* Allocates space for n slots; n is at least 1. */
static enum err_code list_new(struct list *list, int64_t n, struct err *err)
{
    list->slot = malloc((size_t)n * sizeof *list->slot);
    list->score = malloc((size_t)n * sizeof *list->score);
    return list->slot != NULL && list->score != NULL
               ? ERR_OK
               : err_set(err, ERR_MEMORY, "no memory for a list of %lld slots", (long long)n);
}

static void list_add(struct list *list, int64_t slot, double score)
{
    list->slot[list->n] = (int32_t)slot;
    list->score[list->n++] = score;
}

static enum err_code lists_write(const struct list *list, const struct counts *counts,
                                 const char *by, const char *path, struct err *err)
{
    struct safetensors_part part[2 * MODEL_PKM_MAX] = {0};
    const struct safetensors_string metadata[] = {
        {"format", SLOTS_FORMAT}, {"model", counts->model}, {"by", by}};
    int n = 0;
    for (int kind = 0; kind < 2; kind++) { /* the wide type first */
        for (int m = 0; m < counts->n_memory; m++) {
            if (list[m].n > 0) {
                part[n] = (struct safetensors_part){.dtype = kind == 0 ? SAFETENSORS_F64
                                                                       : SAFETENSORS_I32,
                                                    .n_dim = 1,
                                                    .dim = {list[m].n}};
                (void)snprintf(part[n].name, sizeof part[n].name, "memories.%d.%s", m,
                               kind == 0 ? "score" : "slots");
                n++;
            }
        }
    }
    struct safetensors_out out = {0};
    enum err_code code = safetensors_out_open(&out, path, part, n, metadata, 3, err);
    for (int kind = 0; kind < 2 && code == ERR_OK; kind++) {
        for (int m = 0; m < counts->n_memory; m++) {
            const size_t count = (size_t)list[m].n;
            safetensors_out_add(&out, kind == 0 ? (const void *)list[m].score : list[m].slot,
                                count * (kind == 0 ? sizeof(double) : sizeof(int32_t)));
        }
    }
    return safetensors_out_close(&out, code, err);
}

/* ---- rank ----------------------------------------------------------------------------------- */

static double sum_reads(const struct counts_memory *memory)
{
    int64_t sum = 0; /* counts_parse has checked that it fits */
    for (int64_t i = 0; i < memory->n_slot; i++) {
        sum += memory->reads[i];
    }
    return (double)sum;
}

/* Adds to score [n_slot] what one memory contributes for the slots that the task reads. tfidf is
 * the formula of "Continual Learning via Sparse Memory Finetuning" (arXiv 2510.15103), where a text
 * stands for a batch. For kl, p · log(p / q), each slot of the background counts one read more, so
 * that q is never 0. */
static void add_scores(double *score, const struct counts_memory *task,
                       const struct counts_memory *background, int64_t n_document, bool tfidf)
{
    const double all = sum_reads(task);
    const double all_background = sum_reads(background) + (double)background->n_slot;
    for (int64_t i = 0; i < task->n_slot; i++) {
        if (task->reads[i] > 0) {
            const double p = (double)task->reads[i] / all;
            const double q = ((double)background->reads[i] + 1) / all_background;
            score[i] +=
                tfidf ? p * log(((double)n_document + 1) / ((double)background->documents[i] + 1))
                      : p * log(p / q);
        }
    }
}

/* The scores of a table's rows; of a table that several memories read, the sum over these. */
static enum err_code table_scores(double **score, const struct counts *task,
                                  const struct counts *background, int table, bool tfidf,
                                  struct err *err)
{
    const int64_t n_slot = task->memory[table].n_slot;
    *score = calloc((size_t)n_slot, sizeof **score);
    if (*score == NULL) {
        return err_set(err, ERR_MEMORY, "no memory for the scores of %lld slots",
                       (long long)n_slot);
    }
    for (int m = table; m < task->n_memory; m++) {
        if (task->memory[m].table == table) {
            add_scores(*score, &task->memory[m], &background->memory[m], background->n_document,
                       tfidf);
        }
    }
    return ERR_OK;
}

/* The best slots of all tables: a heap whose first entry is the worst of them. */
struct best {
    double score;
    int32_t slot;
    int table;
};

/* Whether a goes before b: a higher score, or among equals the earlier slot. */
static bool is_better(const struct best *a, const struct best *b)
{
    if (a->score > b->score || a->score < b->score) {
        return a->score > b->score;
    }
    return a->table != b->table ? a->table < b->table : a->slot < b->slot;
}

static void sift_down(struct best *heap, int64_t n, int64_t at)
{
    for (int64_t child = 2 * at + 1; child < n; child = 2 * at + 1) {
        child += child + 1 < n && is_better(&heap[child], &heap[child + 1]);
        if (!is_better(&heap[at], &heap[child])) {
            return;
        }
        const struct best other = heap[child];
        heap[child] = heap[at];
        heap[at] = other;
        at = child;
    }
}

static void sift_up(struct best *heap, int64_t at)
{
    while (at > 0 && is_better(&heap[(at - 1) / 2], &heap[at])) {
        const struct best other = heap[(at - 1) / 2];
        heap[(at - 1) / 2] = heap[at];
        heap[at] = other;
        at = (at - 1) / 2;
    }
}

/* Keeps the slots of a table that are among the best so far. Slots that the task reads no more
 * often than texts of any kind do, with a score of 0 or below, are left out. */
static void keep_best(struct best *heap, int64_t *n, int64_t top, const double *score,
                      int64_t n_slot, int table)
{
    for (int64_t i = 0; i < n_slot; i++) {
        const struct best it = {score[i], (int32_t)i, table};
        if (!(it.score > 0)) {
            continue;
        }
        if (*n < top) {
            heap[*n] = it;
            sift_up(heap, (*n)++);
        } else if (is_better(&it, &heap[0])) {
            heap[0] = it;
            sift_down(heap, *n, 0);
        }
    }
}

static int by_slot(const void *a, const void *b)
{
    const struct best *const x = a;
    const struct best *const y = b;
    return x->table != y->table ? x->table - y->table : (x->slot > y->slot) - (x->slot < y->slot);
}

static enum err_code rank_all(struct list *list, const struct counts *task,
                              const struct counts *background, const struct options *options,
                              struct err *err)
{
    int64_t n_slot = 0;
    for (int m = 0; m < task->n_memory; m++) {
        n_slot += task->memory[m].n_slot;
    }
    const int64_t top = options->top < n_slot ? options->top : n_slot;
    int64_t n = 0;
    struct best *const heap = calloc((size_t)top + 1, sizeof *heap);
    enum err_code code =
        heap != NULL ? ERR_OK : err_set(err, ERR_MEMORY, "--top %d: no memory", options->top);
    for (int m = 0; m < task->n_memory && code == ERR_OK; m++) {
        double *score = NULL;
        if (task->memory[m].table == m) {
            code =
                table_scores(&score, task, background, m, strcmp(options->by, "tfidf") == 0, err);
        }
        if (score != NULL) {
            code = list_new(&list[m], top + 1, err);
            keep_best(heap, &n, top, score, task->memory[m].n_slot, m);
        }
        free(score);
    }
    if (code == ERR_OK && n > 0) {
        qsort(heap, (size_t)n, sizeof *heap, by_slot);
    }
    for (int64_t i = 0; i < n && code == ERR_OK; i++) {
        struct list *const to = &list[heap[i].table];
        list_add(to, heap[i].slot, heap[i].score);
    }
    free(heap);
    return code;
}

/* The shares of the task's and of the background's reads of a table that the listed slots have. */
static enum err_code shares_of(double share[2], const struct list *list,
                               const struct counts *const counts[2], int table, struct err *err)
{
    for (int c = 0; c < 2; c++) {
        int64_t *reads = NULL;
        if (counts_table_reads(&reads, counts[c], table, err) != ERR_OK) {
            return err->code;
        }
        double all = 0;
        double listed = 0;
        for (int64_t i = 0; i < counts[c]->memory[table].n_slot; i++) {
            all += (double)reads[i];
        }
        for (int64_t i = 0; i < list->n; i++) {
            listed += (double)reads[list->slot[i]];
        }
        share[c] = all > 0 ? listed / all : 0;
        free(reads);
    }
    return ERR_OK;
}

static enum err_code print_rank(const struct list *list, const struct counts *task,
                                const struct counts *background, bool json, struct err *err)
{
    const struct counts *const both[2] = {task, background};
    struct text out = {0};
    json_open(&out, '{');
    json_key(&out, "memories");
    json_open(&out, '[');
    for (int m = 0; m < task->n_memory; m++) {
        double share[2] = {0, 0};
        if (task->memory[m].table != m) {
            continue;
        }
        if (shares_of(share, &list[m], both, m, err) != ERR_OK) {
            text_free(&out);
            return err->code;
        }
        json_open(&out, '{');
        json_field_int(&out, "memory", m);
        json_field_int(&out, "slots", list[m].n);
        json_field_double(&out, "task_share", share[0]);
        json_field_double(&out, "background_share", share[1]);
        json_close(&out, '}');
        if (!json) {
            printf("memory %d: slots: %lld, with %.2f %% of the reads of the task and %.2f %% of "
                   "those "
                   "of the background\n",
                   m, (long long)list[m].n, 100 * share[0], 100 * share[1]);
        }
    }
    json_close(&out, ']');
    json_close(&out, '}');
    const enum err_code code = json ? cmd_print(&out, err) : ERR_OK;
    text_free(&out);
    return code;
}

int cmd_memory_rank(const struct options *options)
{
    struct err err;
    struct counts task = {0};
    struct counts background = {0};
    struct list list[MODEL_PKM_MAX] = {0};
    enum err_code code = counts_read(&task, options->operand[0], &err);
    if (code == ERR_OK) {
        code = counts_read(&background, options->background, &err);
    }
    if (code == ERR_OK) {
        code = counts_check_same(&background, &task, &err);
    }
    if (code == ERR_OK) {
        code = rank_all(list, &task, &background, options, &err);
    }
    bool any = false;
    for (int m = 0; m < task.n_memory; m++) {
        any = any || list[m].n > 0;
    }
    if (code == ERR_OK && !any) {
        code = err_set(&err, ERR_ARGUMENT,
                       "%s: no slot is read more than in %s: the list would be empty",
                       options->operand[0], options->background);
    }
    if (code == ERR_OK) {
        code = lists_write(list, &task, options->by, options->output, &err);
    }
    if (code == ERR_OK) {
        code = print_rank(list, &task, &background, options->json, &err);
    }
    lists_free(list);
    counts_free(&background);
    counts_free(&task);
    return code == ERR_OK ? 0 : cmd_fail(&err);
}

/* ---- hot ------------------------------------------------------------------------------------ */

static const int percents[] = {1, 5, 10, 20, 50};
enum { N_PERCENT = sizeof percents / sizeof percents[0] };

static int descending(const void *a, const void *b)
{
    const int64_t x = *(const int64_t *)a;
    const int64_t y = *(const int64_t *)b;
    return (x < y) - (x > y);
}

/* As many slots as a share of n_slot is, at least one. */
static int64_t slots_of(double share, int64_t n_slot)
{
    const int64_t n = (int64_t)ceil(share * (double)n_slot - 1e-9);
    return n < 1 ? 1 : n;
}

/* The shares of reads that a table's hottest slots have, and the list of the hottest n; slots that
 * nobody read are left out. */
static enum err_code hot_table(struct list *list, double share[N_PERCENT], int64_t *n_read,
                               const struct counts *counts, int table, double wanted,
                               struct err *err)
{
    const int64_t n_slot = counts->memory[table].n_slot;
    int64_t *reads = NULL;
    int64_t *const sorted = malloc((size_t)n_slot * sizeof *sorted);
    if (sorted == NULL || counts_table_reads(&reads, counts, table, err) != ERR_OK) {
        free(sorted);
        return err_set(err, ERR_MEMORY, "no memory to sort %lld slots", (long long)n_slot);
    }
    memcpy(sorted, reads, (size_t)n_slot * sizeof *sorted);
    qsort(sorted, (size_t)n_slot, sizeof *sorted, descending);
    double all = 0;
    for (int64_t i = 0; i < n_slot; i++) {
        all += (double)sorted[i];
        *n_read += sorted[i] > 0;
    }
    double sum = 0;
    int64_t at = 0;
    for (int p = 0; p < N_PERCENT; p++) {
        for (; at < slots_of(percents[p] / 100.0, n_slot); at++) {
            sum += (double)sorted[at];
        }
        share[p] = all > 0 ? sum / all : 0;
    }
    int64_t n = slots_of(wanted, n_slot);
    n = n < *n_read ? n : *n_read;
    /* Several slots may have as many reads as the last one of the list: the first of them are
     * taken. */
    const int64_t least = n > 0 ? sorted[n - 1] : 0;
    int64_t n_least = 0;
    for (int64_t i = 0; i < n; i++) {
        n_least += sorted[i] == least;
    }
    enum err_code code = n > 0 ? list_new(list, n, err) : ERR_OK;
    for (int64_t i = 0; i < n_slot && code == ERR_OK && n > 0; i++) {
        if (reads[i] > least || (reads[i] == least && n_least-- > 0)) {
            list_add(list, i, (double)reads[i]);
        }
    }
    free(sorted);
    free(reads);
    return code;
}

static void print_hot(struct text *out, const struct counts *counts, int table,
                      const double share[N_PERCENT], int64_t n_read, const struct list *list,
                      bool json)
{
    const long long n_slot = counts->memory[table].n_slot;
    json_open(out, '{');
    json_field_int(out, "memory", table);
    json_field_int(out, "slots", n_slot);
    json_field_int(out, "slots_read", n_read);
    json_field_int(out, "hot", list->n);
    json_key(out, "share_of_reads");
    json_open(out, '{');
    for (int p = 0; p < N_PERCENT; p++) {
        char name[8];
        (void)snprintf(name, sizeof name, "%d", percents[p]);
        json_field_double(out, name, share[p]);
    }
    json_close(out, '}');
    json_close(out, '}');
    if (json) {
        return;
    }
    printf("memory %d: slots that were read: %lld of %lld\n", table, (long long)n_read, n_slot);
    for (int p = 0; p < N_PERCENT; p++) {
        printf("  the top %2d %% of the slots have %6.2f %% of the reads\n", percents[p],
               100 * share[p]);
    }
}

int cmd_memory_hot(const struct options *options)
{
    struct err err;
    struct counts counts;
    struct list list[MODEL_PKM_MAX] = {0};
    struct text out = {0};
    enum err_code code = counts_read(&counts, options->operand[0], &err);
    json_open(&out, '{');
    json_key(&out, "memories");
    json_open(&out, '[');
    for (int m = 0; m < counts.n_memory && code == ERR_OK; m++) {
        double share[N_PERCENT] = {0};
        int64_t n_read = 0;
        if (counts.memory[m].table == m) {
            code = hot_table(&list[m], share, &n_read, &counts, m, options->share, &err);
            if (code == ERR_OK) {
                print_hot(&out, &counts, m, share, n_read, &list[m], options->json);
            }
        }
    }
    json_close(&out, ']');
    json_close(&out, '}');
    if (code == ERR_OK && options->output[0] != '\0') {
        code = lists_write(list, &counts, "reads", options->output, &err);
    }
    if (code == ERR_OK && options->json) {
        code = cmd_print(&out, &err);
    }
    text_free(&out);
    lists_free(list);
    counts_free(&counts);
    return code == ERR_OK ? 0 : cmd_fail(&err);
}
