/* An engine for the command line tools: see cmd_engine.h. */
#include "server/cli/cmd_engine.h"

#include "kernels/utf8.h"
#include "models/file_out.h"
#include "server/cli/progress.h"
#include "server/json/json.h"

#include <errno.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* A tool scores whole corpora, so the only limit is memory. Far below the point where sums would
 * overflow. */
static const int64_t tokens_unlimited = INT64_C(1) << 40;
/* Bytes of address space; what is not used costs nothing. */
static const int64_t trace_unlimited = INT64_C(1) << 36;

enum { LOOK_MS = 100, READ_BYTES = 1 << 14 };

void cmd_lift_limits(struct api_limits *limits)
{
    limits->max_score_items.most = INT_MAX;
    limits->max_score_tokens.most = limits->max_score_positions.most = tokens_unlimited;
    limits->timeout_ms = limits->max_timeout_ms = INT_MAX;
    limits->strict = true; /* a field that we write and the parser ignores is a bug */
    limits->memory_trace = MEMORY_TRACE_ON;
    limits->max_trace.most = INT64_MAX;
}

enum err_code cmd_check_tokenizer(const struct options *options, const struct tokenizer *tokenizer,
                                  struct err *err)
{
    if (!tokenizer && !options->ids && !options->jsonl) { /* lines may hold ids */
        return err_set(err, ERR_UNSUPPORTED,
                       "%s: the model has no tokenizer; give token ids, with --ids",
                       options->model);
    }
    return ERR_OK;
}

enum err_code cmd_no_overlay(const struct options *options, struct err *err)
{
    return err_set(err, ERR_UNSUPPORTED,
                   "--overlay %.200s: overlays are rows of memories, and %.200s has none",
                   options->overlay, options->model);
}

/* --overlay: a file whose rows every request reads, as if its key were bound to it. */
static enum err_code read_overlay(struct cmd_engine *ce, const struct options *options,
                                  struct err *err)
{
    if (options->overlay[0] == '\0') {
        return ERR_OK;
    }
    if (ce->limits.overlays == NULL) {
        return cmd_no_overlay(options, err);
    }
    ce->overlay.n = 1;
    ce->limits.binding = &ce->overlay;
    return overlays_read_file(ce->limits.overlays, options->overlay, ce->overlay.name[0], err);
}

enum err_code cmd_engine_open(struct cmd_engine *ce, const struct options *options, struct err *err)
{
    *ce = (struct cmd_engine){0};
    struct progress progress;
    struct engine_options engine = options_engine(options);
    progress_begin(&progress, NULL, 0);
    engine.model.progress = progress_load;
    engine.model.progress_ctx = &progress;
    engine.max_queue_tokens = tokens_unlimited;
    engine.memory_trace = true;
    engine.max_queue = CMD_QUEUE;
    engine.max_request_bytes = 0;
    engine.memory_trace_bytes =
        options->memory || options->jsonl || options->slots[0] != '\0' ? trace_unlimited : 0;
    engine.failures_told = true;
    const enum err_code code = engine_open(&ce->engine, &engine, err);
    progress_end(&progress);
    if (code != ERR_OK) {
        return code;
    }
    CHECK(sem_init(&ce->wake, 0, 0) == 0);
    ce->limits = input_limits(options, ce->engine);
    cmd_lift_limits(&ce->limits);
    const enum err_code read = read_overlay(ce, options, err);
    return read == ERR_OK ? cmd_check_tokenizer(options, ce->limits.tokenizer, err) : read;
}

void cmd_engine_close(struct cmd_engine *ce)
{
    if (ce->engine) {
        engine_close(ce->engine);
        sem_destroy(&ce->wake);
    }
}

static void wake(void *ctx)
{
    sem_post(ctx);
}

void cmd_engine_wait(struct cmd_engine *ce)
{
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_nsec += LOOK_MS * 1000000L;
    until.tv_sec += until.tv_nsec / 1000000000L;
    until.tv_nsec %= 1000000000L;
    sem_timedwait(&ce->wake, &until);
    while (sem_trywait(&ce->wake) == 0) { /* several wakes count as one */
    }
}

enum err_code cmd_engine_run(struct cmd_engine *ce, struct request *request,
                             void (*look)(void *ctx), void *ctx, struct err *err)
{
    request->wake = wake;
    request->wake_ctx = &ce->wake;
    snprintf(request->id, sizeof request->id, "cli");
    const enum err_code code = engine_submit(ce->engine, request, err);
    while (code == ERR_OK && atomic_load(&request->n_item_done) < request->n_item) {
        cmd_engine_wait(ce);
        look(ctx);
    }
    return code;
}

static enum err_code read_all(struct text *text, FILE *file, const char *path, struct err *err)
{
    char buffer[READ_BYTES];
    size_t n = 0;
    do {
        n = fread(buffer, 1, sizeof buffer, file);
        text_add(text, buffer, n);
    } while (n == sizeof buffer);
    if (ferror(file)) {
        return err_set(err, ERR_IO, "%s: cannot be read: %s", path, strerror(errno));
    }
    if (text->failed) {
        return err_set(err, ERR_MEMORY, "%s: no memory to read it", path);
    }
    return ERR_OK;
}

struct answer_meta cmd_meta(const struct options *options, int64_t begin_us)
{
    return (struct answer_meta){.id = "cli",
                                .model = options->served_model_name,
                                .created = (int64_t)time(NULL),
                                .begin_us = begin_us};
}

enum err_code cmd_refused(const struct api_error *error, struct err *err)
{
    const char *const flag = options_flag(error->param);
    const char *const message = error->text.message;
    if (flag == NULL) {
        return err_set(err, ERR_FORMAT, "%s", message);
    }
    /* The parser's message begins with the field; the user of a command knows it by its flag. */
    const size_t bytes = strlen(error->param);
    const bool leads = strncmp(message, error->param, bytes) == 0;
    return leads ? err_set(err, ERR_ARGUMENT, "--%s%s", flag, message + bytes)
                 : err_set(err, ERR_ARGUMENT, "--%s: %s", flag, message);
}

enum err_code cmd_answered(const struct request *request, const char *const *path, int n,
                           struct err *err)
{
    struct api_error error = {0};
    if (answer_check(request, &error)) {
        return ERR_OK;
    }
    const int text = n > 1 ? answer_without_number(request) : -1;
    (void)cmd_refused(&error, err);
    return text >= 0 ? err_set(err, err->code, "%.300s: %s", path[text], request->error.message)
                     : err->code;
}

enum err_code cmd_print_answer(struct text *out, const struct api_error *error, struct err *err)
{
    const enum err_code code = error == NULL ? cmd_print(out, err) : cmd_refused(error, err);
    text_free(out);
    return code;
}

enum err_code cmd_read_file(struct text *text, const char *path, struct err *err)
{
    if (strcmp(path, "-") == 0) {
        cmd_tell_terminal();
        return read_all(text, stdin, "standard input", err);
    }
    FILE *const file = fopen(path, "rb");
    if (!file) {
        return err_set(err, ERR_IO, "%s: cannot be opened: %s", path, strerror(errno));
    }
    const enum err_code code = read_all(text, file, path, err);
    fclose(file);
    return code;
}

static enum err_code put_ids(struct text *body, const struct text *input, int n_vocab,
                             const char *path, struct err *err)
{
    static const char blanks[] = " \t\r\n";
    size_t at = 0;
    int line = 1;
    int64_t n = 0;
    json_open(body, '[');
    while (at < input->n) {
        const size_t begin = at;
        int64_t id = 0;
        while (at < input->n && input->data[at] >= '0' && input->data[at] <= '9' &&
               id <= INT32_MAX) {
            id = id * 10 + (input->data[at++] - '0');
        }
        const bool blank = at < input->n && memchr(blanks, input->data[at], sizeof blanks - 1);
        if (id <= INT32_MAX && at < input->n && !blank) {
            return err_set(
                err, ERR_FORMAT,
                "%s: line %d: byte %zu of the file begins no token id: --ids takes whole "
                "numbers separated by blanks",
                path, line, begin);
        }
        if (id >= n_vocab) {
            return err_set(err, ERR_FORMAT,
                           "%s: line %d: byte %zu of the file begins a number beyond the token ids "
                           "0 ... %d",
                           path, line, begin, n_vocab - 1);
        }
        if (at > begin) {
            json_put_int(body, id);
            n++;
        }
        line += blank && input->data[at] == '\n';
        at += blank;
    }
    json_close(body, ']');
    return n > 0 ? ERR_OK : err_set(err, ERR_FORMAT, "%s: holds no token id", path);
}

enum err_code cmd_put_input(struct text *body, const struct text *input, bool ids, int n_vocab,
                            const char *path, struct err *err)
{
    const char *const shown = cmd_shown_path(path);
    if (ids) {
        return put_ids(body, input, n_vocab, shown, err);
    }
    const size_t valid = utf8_valid_prefix(input->data, input->n);
    if (valid < input->n) {
        return err_set(err, ERR_FORMAT, "%s: byte %zu is not UTF-8", shown, valid);
    }
    if (input->n > 0 && memchr(input->data, '\0', input->n)) {
        return err_set(err, ERR_FORMAT, "%s: holds a NUL byte, which is not text", shown);
    }
    json_string_n(body, input->data, input->n);
    return ERR_OK;
}

void cmd_put_language(struct text *body, const struct options *options)
{
    const char *const language = options->language;
    if (language[0] == '\0') {
        return;
    }
    json_key(body, "language");
    char *end = NULL;
    const long id = strtol(language, &end, 10);
    if (*end == '\0') {
        json_put_int(body, id);
    } else {
        json_put_string(body, language);
    }
}

void cmd_warn_unknown(int64_t n_unk, int64_t n_tokens, const struct tokenizer *tokenizer)
{
    const char *const kind = tokenizer != NULL ? tokenizer_kind(tokenizer) : "";
    if (n_unk * 100 <= n_tokens) {
        return;
    }
    fprintf(stderr,
            "pkmserve: warning: tokens unknown to the vocabulary: %lld of %lld, which makes the "
            "figures look better than they are: %s\n",
            (long long)n_unk, (long long)n_tokens,
            strcmp(kind, "xlm") == 0
                ? "the model expects text that is split with its BPE codes already; split the text "
                  "first, or convert the checkpoint again with --codes"
            : strcmp(kind, "xlm-bpe") == 0
                ? "is the text in the language and the spelling (lower case, accents, tokenised "
                  "punctuation) of the training data, and are these the codes it was split with?"
                : "is the text prepared as the model's training data was?");
}

/* ---- the files of a score ------------------------------------------------------------------- */

const char *const *cmd_paths(const struct options *options, int *n)
{
    static const char *const standard_input[] = {"-"};
    *n = options->n_operand > 0 ? options->n_operand : 1;
    return options->n_operand > 0 ? options->operand : standard_input;
}

enum err_code cmd_check_output(const char *option, const char *path, const struct options *options,
                               struct err *err)
{
    int n = 0;
    const char *const *const input = cmd_paths(options, &n);
    const enum err_code code = file_out_check_apart(option, path, input, n, err);
    return code == ERR_OK ? file_out_check(path, err) : code;
}

static bool ends_with(const char *path, const char *ending)
{
    const size_t n = strlen(path);
    const size_t n_ending = strlen(ending);
    return n >= n_ending && strcmp(path + n - n_ending, ending) == 0;
}

/* Whether each line of text that is not blank looks like a JSON object, judging by its first and
 * last character. */
static bool is_json_lines(const struct text *text)
{
    static const char blanks[] = " \t\r";
    bool some = false;
    for (size_t at = 0; at < text->n;) {
        const char *const line = text->data + at;
        const char *const feed = memchr(line, '\n', text->n - at);
        size_t end = feed != NULL ? (size_t)(feed - line) : text->n - at;
        at += end + 1;
        size_t first = 0;
        while (first < end && memchr(blanks, line[first], sizeof blanks - 1)) {
            first++;
        }
        while (end > first && memchr(blanks, line[end - 1], sizeof blanks - 1)) {
            end--;
        }
        if (end > first && (end - first < 2 || line[first] != '{' || line[end - 1] != '}')) {
            return false;
        }
        some = some || end > first;
    }
    return some;
}

/* Refuses files whose perplexity would mean nothing: empty ones, and JSON that contains texts. */
static enum err_code check_text(const struct text *text, const char *path, bool as_text,
                                struct err *err)
{
    const char *const shown = cmd_shown_path(path);
    if (text->n == 0) {
        return err_set(err, ERR_FORMAT, "%s: is empty: there is nothing to score", shown);
    }
    const bool named =
        ends_with(path, ".jsonl") || ends_with(path, ".ndjson") || ends_with(path, ".json");
    if (!as_text && (named || is_json_lines(text))) {
        return err_set(
            err, ERR_FORMAT,
            "%s: JSON, whose braces and names would be scored as prose: take the texts "
            "out, or give --jsonl (not to compare), which takes a request from each line; "
            "--as-text takes the file as it is",
            shown);
    }
    return ERR_OK;
}

static enum err_code put_files(struct text *body, const struct options *options, int n_vocab,
                               const char *const *path, int n, struct err *err)
{
    const bool ids = options->ids;
    json_key(body, ids ? "tokens" : "text");
    json_open(body, '[');
    enum err_code code = ERR_OK;
    for (int i = 0; i < n && code == ERR_OK; i++) {
        struct text file = {0};
        code = cmd_read_file(&file, path[i], err);
        if (code == ERR_OK && !ids) {
            code = check_text(&file, path[i], options->as_text, err);
        }
        if (code == ERR_OK) {
            code = cmd_put_input(body, &file, ids, n_vocab, path[i], err);
        }
        text_free(&file);
    }
    json_close(body, ']');
    return code;
}

enum err_code cmd_put_ablate(struct text *body, const struct options *options, struct err *err)
{
    if (options->ablate[0] == '\0') {
        return ERR_OK;
    }
    struct text alone = {0};
    struct fields fields;
    struct api_error error = {0};
    char others[FIELDS_IGNORED_MAX] = "";
    json_open(&alone, '{');
    json_key(&alone, "ablate");
    text_puts(&alone, options->ablate);
    json_close(&alone, '}');
    if (!alone.failed && fields_open(&fields, alone.data, alone.n, &error)) {
        (void)fields_get(&fields, "ablate", NULL);
        fields_finish(&fields, true, others); /* others would be fields beside it */
        fields_close(&fields);
    }
    const bool ok = !alone.failed && error.status == 0;
    text_free(&alone);
    if (!ok) {
        return err_set(err, ERR_ARGUMENT,
                       "--ablate must be a JSON list such as '[{\"memory\": 0}]', not %.80s",
                       options->ablate);
    }
    json_key(body, "ablate");
    text_puts(body, options->ablate);
    return ERR_OK;
}

void cmd_put_score_options(struct text *body, const struct options *options)
{
    if (options->max_context > 0) {
        json_field_int(body, "max_context", options->max_context);
    }
    if (options->stride > 0) {
        json_field_int(body, "stride", options->stride);
    }
    if (strcmp(options->add_bos, "auto") != 0) {
        json_field_bool(body, "add_bos", strcmp(options->add_bos, "on") == 0);
    }
    if (strcmp(options->windows, "own") != 0) {
        json_field_string(body, "windows", options->windows);
    }
    if (options->bptt > 0) {
        json_field_int(body, "bptt", options->bptt);
    }
    if (options->batch_size > 0) {
        json_field_int(body, "batch_size", options->batch_size);
    }
    if (options->memory || options->slots[0] != '\0') {
        json_field_string(body, "memory", options->slots[0] != '\0' ? "slots" : "summary");
    }
    cmd_put_language(body, options);
}

enum err_code cmd_read_score(struct score_job *job, const struct options *options,
                             const struct api_limits *limits, const char *const *path, int n,
                             struct err *err)
{
    struct text body = {0};
    json_open(&body, '{');
    cmd_put_score_options(&body, options);
    enum err_code code = put_files(&body, options, limits->info->n_vocab, path, n, err);
    code = code == ERR_OK ? cmd_put_ablate(&body, options, err) : code;
    json_close(&body, '}');
    if (code == ERR_OK && body.failed) {
        code = err_set(err, ERR_MEMORY, "no memory for the files' text");
    }
    struct api_error error = {0};
    if (code == ERR_OK && !score_parse(job, body.data, body.n, limits, &error)) {
        code = cmd_refused(&error, err);
    }
    text_free(&body);
    return code;
}
