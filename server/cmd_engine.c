/* An engine for the command line tools: see cmd_engine.h. */
#include "server/cmd_engine.h"

#include "engine/utf8.h"
#include "server/json.h"
#include "server/progress.h"

#include <errno.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* A tool scores whole corpora: memory is its limit. Far from where sums would overflow. */
static const int64_t tokens_unlimited = INT64_C(1) << 40;

enum { LOOK_MS = 100, READ_BYTES = 1 << 14 };

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
    const enum err_code code = engine_open(&ce->engine, &engine, err);
    progress_end(&progress);
    if (code != ERR_OK) {
        return code;
    }
    CHECK(sem_init(&ce->wake, 0, 0) == 0);
    ce->limits = input_limits(options, ce->engine);
    ce->limits.max_score_items = INT_MAX;
    ce->limits.max_score_tokens = tokens_unlimited;
    ce->limits.timeout_ms = ce->limits.max_timeout_ms = INT_MAX;
    ce->limits.strict = true; /* a field that we write and the parser ignores is a bug */
    ce->limits.memory_trace = true;
    if (!ce->limits.tokenizer && !options->ids) {
        return err_set(err, ERR_UNSUPPORTED,
                       "%s: the model has no tokenizer; give token ids, with --ids",
                       options->model);
    }
    return ERR_OK;
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

enum err_code cmd_engine_run(struct cmd_engine *ce, struct request *request,
                             void (*look)(void *ctx), void *ctx, struct err *err)
{
    request->wake = wake;
    request->wake_ctx = &ce->wake;
    snprintf(request->id, sizeof request->id, "cli");
    const enum err_code code = engine_submit(ce->engine, request, err);
    while (code == ERR_OK && atomic_load(&request->n_item_done) < request->n_item) {
        struct timespec until;
        clock_gettime(CLOCK_REALTIME, &until);
        until.tv_nsec += LOOK_MS * 1000000L;
        until.tv_sec += until.tv_nsec / 1000000000L;
        until.tv_nsec %= 1000000000L;
        sem_timedwait(&ce->wake, &until);
        while (sem_trywait(&ce->wake) == 0) { /* several wakes are one look */
        }
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

enum err_code cmd_print_answer(struct text *out, const struct api_error *error, struct err *err)
{
    if (error == NULL) {
        cmd_print(out);
    } else {
        *err = error->text;
    }
    text_free(out);
    return error == NULL ? ERR_OK : ERR_NUMERICAL;
}

enum err_code cmd_read_file(struct text *text, const char *path, struct err *err)
{
    if (strcmp(path, "-") == 0) {
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

static enum err_code put_ids(struct text *body, const struct text *input, const char *path,
                             struct err *err)
{
    static const char blanks[] = " \t\r\n";
    size_t at = 0;
    json_open(body, '[');
    while (at < input->n) {
        const size_t begin = at;
        int64_t id = 0;
        while (at < input->n && input->data[at] >= '0' && input->data[at] <= '9' &&
               id <= INT32_MAX) {
            id = id * 10 + (input->data[at++] - '0');
        }
        const bool blank = at < input->n && memchr(blanks, input->data[at], sizeof blanks - 1);
        if (id > INT32_MAX || (at < input->n && !blank)) {
            return err_set(err, ERR_FORMAT,
                           "%s: byte %zu begins no token id: --ids takes whole numbers separated "
                           "by blanks",
                           path, begin);
        }
        if (at > begin) {
            json_put_int(body, id);
        }
        at += blank;
    }
    json_close(body, ']');
    return ERR_OK;
}

enum err_code cmd_put_input(struct text *body, const struct text *input, bool ids, const char *path,
                            struct err *err)
{
    if (ids) {
        return put_ids(body, input, path, err);
    }
    const size_t valid = utf8_valid_prefix(input->data, input->n);
    if (valid < input->n) {
        return err_set(err, ERR_FORMAT, "%s: byte %zu is not UTF-8", path, valid);
    }
    if (input->n > 0 && memchr(input->data, '\0', input->n)) {
        return err_set(err, ERR_FORMAT, "%s: holds a NUL byte, which is not text", path);
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
