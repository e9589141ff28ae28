/* Runs token sequences through a model on any backend, cut into steps in any way, and writes
 * everything that comes out, for tests/gpu/golden.py to compare.
 *
 *   forward MODEL SEQUENCES OUTPUT [--device cuda] [--dtype auto|f32|bf16|f16]
 *           [--placement device|host] [--deterministic on|off] [--rows 0] [--together] [--top 8]
 *           [--logits] [--drawn] [--set NAME=VALUE]...
 *   forward --cases FILE     a case per line: these arguments, separated by blanks
 *   forward --hold DEVICE    keeps the device open until standard input ends
 *
 * SEQUENCES holds one sequence per line: its language id, then its token ids. --rows N,M,... are
 * the rows that sequences 0, 1, ... take per step (in turn; 0: all at once). Alone, a step has one
 * sequence; --together puts all into each step, so that prompts and single tokens mix. With --drawn
 * single rows are drawn tokens, which have kernels, bits and, without --logits, captured graphs of
 * their own on a GPU. --set sets an environment variable for this case.
 *
 * A GPU needs seconds for a process's context, and anew when no process has one: hence many cases
 * in one process, each with a backend of its own, and --hold. After each case of a FILE, its OUTPUT
 * is a line on standard output; the first that fails ends the process with status 1.
 *
 * OUTPUT is a series of arrays: a line "NAME DTYPE ROWS COLUMNS", then the raw elements. Of
 * sequence s: s.logprob (of the next token; after the last, of the drawn one), s.rank, s.drawn
 * (greedy), s.entropy, s.top_id, s.top_logprob, s.slots.m and s.shares.m of memory m, s.logits. */
#include "models/model.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SEQ_MAX = 64, IDS_MAX = 1 << 16, ROWS_MAX = 8, WORD_MAX = 64, SETTING_MAX = 8 };

struct sequence {
    int32_t *ids; /* Owner: run_case, as of the results */
    int n_ids, lang, done;
    float *logprob, *entropy, *top_logprob, *logits;
    int32_t *rank, *drawn, *top_id;
    int32_t *slots[MODEL_PKM_MAX];
    float *shares[MODEL_PKM_MAX];
};

/* What the environment had before the case. */
struct setting {
    char *name, *old; /* Owner: this; old NULL: nothing */
};

struct forward {
    struct backend *be;
    struct model *model;
    const struct model_info *info;
    struct step *step;
    struct sequence seq[SEQ_MAX];
    int n_seq, n_ids, n_page; /* n_ids of the longest sequence, n_page of each */
    int rows[ROWS_MAX], n_rows;
    int n_top;
    bool together, logits, drawn;
    int row_seq[IDS_MAX], row_pos[IDS_MAX]; /* of the running step */
    struct setting setting[SETTING_MAX];
    int n_setting;
};

static _Noreturn void die(const char *what, const char *why)
{
    (void)fprintf(stderr, "forward: %s: %s\n", what, why);
    exit(1);
}

static void *array(int64_t rows, int64_t cols)
{
    void *const data = calloc((size_t)(rows * cols) + 1, sizeof(float));
    if (data == NULL) {
        die("memory", "not enough for the results");
    }
    return data;
}

/* ---- sequences ------------------------------------------------------------------------------ */

static void read_sequence(struct forward *f, const char *path, char *line)
{
    static int32_t ids[IDS_MAX];
    if (f->n_seq == SEQ_MAX) {
        die(path, "more than 64 sequences");
    }
    struct sequence *const s = &f->seq[f->n_seq++];
    char *save = NULL;
    const char *word = strtok_r(line, " \n", &save);
    s->lang = word == NULL ? 0 : atoi(word);
    while ((word = strtok_r(NULL, " \n", &save)) != NULL && s->n_ids < IDS_MAX) {
        const long id = strtol(word, NULL, 10);
        if (id < 0 || id >= f->info->n_vocab) {
            die(path, "an id is not in the vocabulary");
        }
        ids[s->n_ids++] = (int32_t)id;
    }
    if (s->n_ids == 0 || (f->info->context > 0 && s->n_ids > f->info->context)) {
        die(path, "a sequence is empty, or longer than the context");
    }
    const int64_t n = s->n_ids;
    s->ids = array(n, 1);
    memcpy(s->ids, ids, (size_t)n * sizeof *ids);
    s->logprob = array(n, 1);
    s->entropy = array(n, 1);
    s->rank = array(n, 1);
    s->drawn = array(n, 1);
    s->top_id = array(n, f->n_top);
    s->top_logprob = array(n, f->n_top);
    s->logits = f->logits ? array(n, f->info->n_vocab) : NULL;
    for (int m = 0; m < f->info->n_memory; m++) {
        const struct pkm_shape *const shape = &f->info->memory[m].shape;
        s->slots[m] = array(n, (int64_t)shape->n_head * shape->k_top);
        s->shares[m] = array(n, (int64_t)shape->n_head * shape->k_top);
    }
    f->n_ids = s->n_ids > f->n_ids ? s->n_ids : f->n_ids;
}

static void read_sequences(struct forward *f, const char *path)
{
    FILE *const file = fopen(path, "r");
    char *line = NULL;
    size_t bytes = 0;
    if (file == NULL) {
        die(path, "cannot be opened");
    }
    while (getline(&line, &bytes, file) > 0) {
        read_sequence(f, path, line);
    }
    free(line);
    (void)fclose(file);
    if (f->n_seq == 0) {
        die(path, "holds no sequence");
    }
}

static void free_sequences(struct forward *f)
{
    for (int i = 0; i < f->n_seq; i++) {
        const struct sequence *const s = &f->seq[i];
        free(s->ids);
        free(s->logprob);
        free(s->entropy);
        free(s->rank);
        free(s->drawn);
        free(s->top_id);
        free(s->top_logprob);
        free(s->logits);
        for (int m = 0; m < MODEL_PKM_MAX; m++) {
            free(s->slots[m]);
            free(s->shares[m]);
        }
    }
}

/* ---- steps ---------------------------------------------------------------------------------- */

static void add_row(struct forward *f, int index)
{
    struct step *const step = f->step;
    struct sequence *const s = &f->seq[index];
    const int r = step->n_tok++;
    const int pos = s->done++;
    f->row_seq[r] = index;
    f->row_pos[r] = pos;
    step->token[r] = s->ids[pos];
    step->pos[r] = pos;
    step->lang[r] = s->lang;
    step->out_row[r] = r;
    step->out_want[r] = OUT_SAMPLE | OUT_LOGPROB | OUT_ENTROPY | OUT_TOP;
    step->target[r] = pos + 1 < s->n_ids ? s->ids[pos + 1] : TARGET_SAMPLED;
    step->sample[r] = (struct sample_params){.top_p = 1, .repetition = 1};
    step->n_out = step->n_tok;
}

static void add_sequence(struct forward *f, int index)
{
    struct step *const step = f->step;
    const struct sequence *const s = &f->seq[index];
    const int left = s->n_ids - s->done;
    const int wanted = f->rows[index % f->n_rows];
    const int n = wanted == 0 || wanted > left ? left : wanted;
    for (int p = 0; p < f->n_page; p++) { /* pages of sequences interleave: order must not matter */
        step->page[step->n_seq * f->n_page + p] = p * f->n_seq + index;
    }
    for (int i = 0; i < n; i++) {
        add_row(f, index);
    }
    step->seq_first[++step->n_seq] = step->n_tok;
}

static void see(void *ctx, const char *name, int layer, const struct tensor *t)
{
    const struct forward *const f = ctx;
    const size_t n_vocab = (size_t)f->info->n_vocab;
    if (strcmp(name, "logits") != 0) {
        return;
    }
    float *const rows = array(t->rows, t->cols);
    f->be->op->download(f->be, rows, *t);
    for (int i = 0; i < (int)t->rows; i++) { /* layer is the chunk's first output */
        const struct sequence *const s = &f->seq[f->row_seq[layer + i]];
        memcpy(s->logits + (size_t)f->row_pos[layer + i] * n_vocab, rows + (size_t)i * n_vocab,
               n_vocab * sizeof *rows);
    }
    free(rows);
}

static void collect(const struct forward *f)
{
    const struct step *const step = f->step;
    for (int r = 0; r < step->n_tok; r++) {
        const struct sequence *const s = &f->seq[f->row_seq[r]];
        const size_t pos = (size_t)f->row_pos[r];
        const size_t n_top = (size_t)f->n_top;
        s->logprob[pos] = step->out_logprob[r];
        s->rank[pos] = step->out_rank[r];
        s->drawn[pos] = step->out_token[r];
        s->entropy[pos] = step->out_entropy[r];
        memcpy(s->top_id + pos * n_top, step->top_id + (size_t)r * n_top, n_top * 4);
        memcpy(s->top_logprob + pos * n_top, step->top_logprob + (size_t)r * n_top, n_top * 4);
    }
    for (int m = 0; m < f->info->n_memory; m++) {
        struct tensor slots, shares;
        model_pkm_hits(f->model, m, step->n_tok, &slots, &shares);
        const size_t cols = (size_t)slots.cols;
        int32_t *const slot = array(slots.rows, slots.cols);
        float *const share = array(slots.rows, slots.cols);
        f->be->op->download(f->be, slot, slots);
        f->be->op->download(f->be, share, shares);
        for (int r = 0; r < step->n_tok; r++) {
            const struct sequence *const s = &f->seq[f->row_seq[r]];
            const size_t at = (size_t)f->row_pos[r] * cols;
            memcpy(s->slots[m] + at, slot + (size_t)r * cols, cols * sizeof *slot);
            memcpy(s->shares[m] + at, share + (size_t)r * cols, cols * sizeof *share);
        }
        free(slot);
        free(share);
    }
}

/* One step of sequences first .. last-1; false if none of them has tokens left. */
static bool run_step(struct forward *f, int first, int last)
{
    struct step *const step = f->step;
    const struct model_tap tap = {see, f};
    struct err err = {0};
    step->n_tok = step->n_seq = step->n_out = 0;
    step->n_top = f->n_top;
    step->seq_first[0] = 0;
    for (int i = first; i < last; i++) {
        if (f->seq[i].done < f->seq[i].n_ids) {
            add_sequence(f, i);
        }
    }
    if (step->n_tok == 0) {
        return false;
    }
    step->ops_list = !f->logits;
    step->is_drawn = f->be->phases_apart && f->drawn && step->n_tok == step->n_seq;
    f->be->op->step_begin(f->be, step);
    model_forward(f->model, step, f->logits ? &tap : NULL);
    if (f->be->op->finish(f->be, step, &err) != ERR_OK) {
        die("step", err.message);
    }
    collect(f);
    return true;
}

static void run_all(struct forward *f)
{
    const int width = f->together ? f->n_seq : 1;
    for (int i = 0; i < f->n_seq; i += width) {
        while (run_step(f, i, i + width)) {
        }
    }
}

static void reserve(struct forward *f)
{
    struct err err = {0};
    const int n_tok = f->together ? f->n_seq * f->n_ids : f->n_ids;
    if (n_tok > IDS_MAX) {
        die("sequences", "more than 65536 tokens in one step");
    }
    f->n_page = (f->n_ids + KV_PAGE - 1) / KV_PAGE;
    const struct step_limits limits = {.n_tok_max = n_tok,
                                       .n_seq_max = f->n_seq,
                                       .n_page_max = f->n_page,
                                       .n_out_max = n_tok,
                                       .n_top_max = f->n_top,
                                       .n_vocab = f->info->n_vocab,
                                       .d_model = f->info->d_attention,
                                       .n_head = f->info->n_head};
    if (model_reserve(f->model, &limits, f->n_seq * f->n_page, &err) != ERR_OK ||
        f->be->op->step_new(f->be, &f->step, &limits, &err) != ERR_OK) {
        die("reserve", err.message);
    }
}

/* ---- output --------------------------------------------------------------------------------- */

static void put(FILE *file, int seq, const char *name, const char *dtype, const void *data,
                int64_t rows, int64_t cols)
{
    (void)fprintf(file, "%d.%s %s %lld %lld\n", seq, name, dtype, (long long)rows, (long long)cols);
    (void)fwrite(data, sizeof(float), (size_t)(rows * cols), file);
}

static void write_all(const struct forward *f, const char *path)
{
    FILE *const file = fopen(path, "wb");
    if (file == NULL) {
        die(path, "cannot be written");
    }
    for (int i = 0; i < f->n_seq; i++) {
        const struct sequence *const s = &f->seq[i];
        put(file, i, "logprob", "f32", s->logprob, s->n_ids, 1);
        put(file, i, "rank", "i32", s->rank, s->n_ids, 1);
        put(file, i, "drawn", "i32", s->drawn, s->n_ids, 1);
        put(file, i, "entropy", "f32", s->entropy, s->n_ids, 1);
        put(file, i, "top_id", "i32", s->top_id, s->n_ids, f->n_top);
        put(file, i, "top_logprob", "f32", s->top_logprob, s->n_ids, f->n_top);
        for (int m = 0; m < f->info->n_memory; m++) {
            const struct pkm_shape *const shape = &f->info->memory[m].shape;
            const int64_t cols = (int64_t)shape->n_head * shape->k_top;
            char name[32];
            (void)snprintf(name, sizeof name, "slots.%d", m);
            put(file, i, name, "i32", s->slots[m], s->n_ids, cols);
            (void)snprintf(name, sizeof name, "shares.%d", m);
            put(file, i, name, "f32", s->shares[m], s->n_ids, cols);
        }
        if (f->logits) {
            put(file, i, "logits", "f32", s->logits, s->n_ids, f->info->n_vocab);
        }
    }
    if (fclose(file) != 0) {
        die(path, "cannot be written");
    }
}

/* ---- settings ------------------------------------------------------------------------------- */

static void set(struct forward *f, const char *text)
{
    const char *const equals = strchr(text, '=');
    if (equals == NULL || f->n_setting == SETTING_MAX) {
        die(text, "is not NAME=VALUE, or one too many");
    }
    struct setting *const s = &f->setting[f->n_setting++];
    s->name = strndup(text, (size_t)(equals - text));
    const char *const old = s->name == NULL ? NULL : getenv(s->name);
    s->old = old == NULL ? NULL : strdup(old);
    if (s->name == NULL || setenv(s->name, equals + 1, 1) != 0) {
        die(text, "cannot be set");
    }
}

static void settings_undo(struct forward *f)
{
    while (f->n_setting > 0) {
        struct setting *const s = &f->setting[--f->n_setting];
        (void)(s->old == NULL ? unsetenv(s->name) : setenv(s->name, s->old, 1));
        free(s->name);
        free(s->old);
    }
}

/* ---- arguments ------------------------------------------------------------------------------ */

struct arguments {
    struct backend_options backend;
    struct model_options model;
};

static void parse_flag(struct forward *f, struct arguments *a, const char *flag, const char *value)
{
    if (strcmp(flag, "--device") == 0) {
        a->backend.device = value;
    } else if (strcmp(flag, "--dtype") == 0) {
        a->model.dtype = value;
    } else if (strcmp(flag, "--placement") == 0) {
        a->model.value_placement = strcmp(value, "host") == 0 ? PLACEMENT_HOST : PLACEMENT_DEVICE;
    } else if (strcmp(flag, "--deterministic") == 0) {
        a->backend.fast_math = strcmp(value, "off") == 0;
    } else if (strcmp(flag, "--set") == 0) {
        set(f, value);
    } else if (strcmp(flag, "--top") == 0) {
        f->n_top = atoi(value);
    } else if (strcmp(flag, "--rows") == 0) {
        for (f->n_rows = 0; f->n_rows < ROWS_MAX && *value != '\0'; value += *value == ',') {
            char *end = NULL;
            f->rows[f->n_rows++] = (int)strtol(value, &end, 10);
            value = end == value ? value + 1 : end;
        }
    } else {
        die(flag, "is no option");
    }
}

/* ---- cases ---------------------------------------------------------------------------------- */

static void parse(struct forward *f, struct arguments *a, int n_word, char **word)
{
    if (n_word < 3) {
        die("usage", "forward MODEL SEQUENCES OUTPUT [--FLAG VALUE]... [--together] [--logits] "
                     "[--drawn]");
    }
    f->n_rows = 1;
    f->n_top = 8;
    for (int i = 3; i < n_word; i++) {
        if (strcmp(word[i], "--together") == 0) {
            f->together = true;
        } else if (strcmp(word[i], "--logits") == 0) {
            f->logits = true;
        } else if (strcmp(word[i], "--drawn") == 0) {
            f->drawn = true;
        } else if (i + 1 < n_word) {
            parse_flag(f, a, word[i], word[i + 1]);
            i++;
        } else {
            die(word[i], "needs a value");
        }
    }
}

static void run_case(int n_word, char **word)
{
    struct forward *const f = calloc(1, sizeof *f);
    struct arguments a = {.backend = {.device = "cuda"},
                          .model = {.dtype = "auto", .value_placement = PLACEMENT_DEVICE}};
    struct err err = {0};
    if (f == NULL) {
        die("memory", "not enough for a case");
    }
    parse(f, &a, n_word, word);
    if (backend_open(&f->be, &a.backend, &err) != ERR_OK ||
        model_open(&f->model, f->be, word[0], &a.model, &err) != ERR_OK) {
        die(word[0], err.message);
    }
    f->info = model_info(f->model);
    read_sequences(f, word[1]);
    reserve(f);
    run_all(f);
    write_all(f, word[2]);
    free_sequences(f);
    f->be->op->step_free(f->be, f->step);
    model_close(f->model);
    backend_close(f->be);
    settings_undo(f);
    free(f);
}

static void run_cases(const char *path)
{
    FILE *const file = fopen(path, "r");
    char *line = NULL;
    size_t bytes = 0;
    if (file == NULL) {
        die(path, "cannot be opened");
    }
    while (getline(&line, &bytes, file) > 0) {
        char *word[WORD_MAX];
        char *save = NULL;
        int n_word = 0;
        for (char *w = strtok_r(line, " \n", &save); w != NULL && n_word < WORD_MAX;
             w = strtok_r(NULL, " \n", &save)) {
            word[n_word++] = w;
        }
        run_case(n_word, word);
        (void)puts(word[2]);
        (void)fflush(stdout);
    }
    free(line);
    (void)fclose(file);
}

static void hold(const char *device)
{
    const struct backend_options options = {.device = device};
    struct backend *be = NULL;
    struct err err = {0};
    if (backend_open(&be, &options, &err) != ERR_OK) {
        die(device, err.message);
    }
    while (getchar() != EOF) {
    }
    backend_close(be);
}

int main(int argc, char **argv)
{
    if (argc == 3 && strcmp(argv[1], "--cases") == 0) {
        run_cases(argv[2]);
    } else if (argc == 3 && strcmp(argv[1], "--hold") == 0) {
        hold(argv[2]);
    } else {
        run_case(argc - 1, argv + 1);
    }
    return 0;
}
