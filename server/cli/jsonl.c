/* Lines in, results out, the engine between them: see jsonl.h. */
#include "server/cli/jsonl.h"

#include "server/cli/jsonl_record.h"
#include "server/cli/progress.h"
#include "server/json/json.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

enum {
    READER_MAX = 4,
    CORES_PER_READER = 8, /* one reader tokenises fast enough for so many */
};
/* Limit for lines that were read and not yet written: their texts, ids and results. A single line
 * may exceed it. */
static const int64_t bytes_max = INT64_C(64) << 20;

enum slot_state { SLOT_READ, SLOT_BAD, SLOT_SUBMITTED };

/* A line on its way. */
struct slot {
    atomic_int state;
    union jsonl_job job;
    struct text line; /* Owner: this */
    int file;
    int64_t number;
    int64_t taken; /* bytes of the input up to its end */
    int64_t cost;  /* bytes that it counts. Guard: mutex */
    struct api_error error;
    struct err fatal; /* code ERR_OK: none. Ends the run */
};

struct jsonl {
    const struct options *options;
    const struct jsonl_kind *kind;
    struct cmd_engine ce;
    struct text defaults_text; /* what the options say about every request */
    struct fields defaults;    /* the same, read */
    uint64_t fields;
    struct jsonl_out out;
    struct text record; /* of this run; empty for standard output */
    struct progress progress;
    int64_t n_document, n_token;
    int64_t n_unk, n_unk_of; /* tokens of the texts unknown to the vocabulary, and all of them */

    pthread_t reader[READER_MAX];
    int n_reader;
    pthread_mutex_t reading; /* one at a time; held before mutex */
    struct jsonl_in in;      /* Guard: reading. Its files and total do not change after open */
    struct err in_error;     /* Guard: reading. Why no more lines are read */

    pthread_mutex_t mutex;
    pthread_cond_t room;
    /* Guard of the following: mutex. */
    struct slot *slot;  /* Owner: this. [CMD_QUEUE], a ring */
    int64_t head, tail; /* lines written, lines read */
    int64_t bytes;      /* of those between them */
    bool over, stop;    /* no more lines will come; no more are wanted */
};

/* ---- one line -------------------------------------------------------------------------------- */

/* Makes a request from a line that is not one: its text, and its id if it has a simple one. */
static bool take_text(const struct jsonl *it, const struct slot *slot, struct text *body,
                      struct api_error *error)
{
    const char *const name = it->options->text_field;
    const char *text = NULL;
    size_t bytes = 0;
    char id[SCORE_ID_MAX];
    struct fields fields;
    struct api_error no_id = {0};
    bool ok = fields_open(&fields, slot->line.data, slot->line.n, error);
    if (ok) {
        fields.defaults = &it->defaults;
        fields_text(&fields, name, &text, &bytes);
        ok = text != NULL ||
             api_error_set(error, 400, "invalid_value", name,
                           "the line has no field %.60s, which --text-field names", name);
    }
    if (ok) {
        json_open(body, '{');
        json_key(body, it->kind->text_field);
        json_string_n(body, text, bytes);
        fields.error = &no_id;
        const bool is_integer = input_id(&fields, id, sizeof id);
        if (is_integer) {
            json_field_int(body, "id", strtoll(id, NULL, 10));
        } else if (id[0] != '\0') {
            json_field_string(body, "id", id);
        }
        json_close(body, '}');
    }
    fields_close(&fields);
    return ok;
}

static bool parse(const struct jsonl *it, struct slot *slot, bool too_long)
{
    const struct api_limits *const limits = &it->ce.limits;
    if (too_long) {
        return api_error_set(&slot->error, 413, "body_too_large", NULL,
                             "the line has more than %lld bytes (--max-line-bytes)",
                             (long long)it->options->max_line_bytes);
    }
    if (it->options->text_field[0] == '\0') {
        return it->kind->parse(&slot->job, slot->line.data, slot->line.n, limits, &slot->error);
    }
    struct text body = {0};
    bool ok = take_text(it, slot, &body, &slot->error);
    if (ok && body.failed) {
        ok = api_error_set(&slot->error, 500, "out_of_memory", NULL, "no memory for the line");
    }
    ok = ok && it->kind->parse(&slot->job, body.data, body.n, limits, &slot->error);
    text_free(&body);
    return ok;
}

static void wake(void *ctx)
{
    sem_post(ctx);
}

static enum slot_state submit(struct jsonl *it, struct slot *slot)
{
    struct request *const request = it->kind->request(&slot->job);
    request->wake = wake;
    request->wake_ctx = &it->ce.wake;
    /* All lines are equally urgent: first come, first served. Nobody waits for one, and a result
     * must not depend on how busy the machine is. */
    request->priority = PRIORITY_INTERACTIVE;
    request->deadline_us = 0;
    (void)snprintf(request->id, sizeof request->id, "cli");
    struct err err = {0};
    if (engine_submit(it->ce.engine, request, &err) == ERR_OK) {
        return SLOT_SUBMITTED;
    }
    if (err.code == ERR_ARGUMENT) {
        (void)api_error_set(&slot->error, 400, "invalid_value", NULL, "%s", err.message);
    } else {
        slot->fatal = err;
    }
    return SLOT_BAD;
}

/* Waits until another line may be read. false: no more are wanted. */
static bool wait_for_room(struct jsonl *it)
{
    pthread_mutex_lock(&it->mutex);
    while (!it->over && !it->stop && (it->tail - it->head == CMD_QUEUE || it->bytes >= bytes_max)) {
        pthread_cond_wait(&it->room, &it->mutex);
    }
    const bool wanted = !it->over && !it->stop;
    pthread_mutex_unlock(&it->mutex);
    return wanted;
}

/* Takes the next line. false: there is none. */
static bool take_line(struct jsonl *it, struct slot **slot, bool *too_long)
{
    struct jsonl_in *const in = &it->in;
    bool more = false;
    pthread_mutex_lock(&it->reading);
    if (wait_for_room(it)) {
        more = jsonl_in_next(in, &more, &it->in_error) == ERR_OK && more;
        pthread_mutex_lock(&it->mutex);
        it->over = !more;
        if (more) {
            *slot = &it->slot[it->tail++ % CMD_QUEUE];
            *too_long = in->too_long;
            **slot = (struct slot){.line = in->line,
                                   .file = in->file,
                                   .number = in->number,
                                   .taken = in->taken,
                                   .cost = 2 * (int64_t)in->line.n};
            in->line = (struct text){0};
            it->bytes += (*slot)->cost;
        }
        pthread_mutex_unlock(&it->mutex);
    }
    pthread_mutex_unlock(&it->reading);
    return more;
}

static void *read_lines(void *ctx)
{
    struct jsonl *const it = ctx;
    struct slot *slot = NULL;
    bool too_long = false;
    while (take_line(it, &slot, &too_long)) {
        enum slot_state state = SLOT_BAD;
        if (parse(it, slot, too_long)) {
            const struct request *const request = it->kind->request(&slot->job);
            const int64_t cost = 2 * request->bytes + (int64_t)request->trace_bytes;
            pthread_mutex_lock(&it->mutex);
            slot->cost += cost;
            it->bytes += cost;
            pthread_mutex_unlock(&it->mutex);
            state = submit(it, slot);
        } else if (strcmp(slot->error.code, "out_of_memory") == 0 && !slot->error.is_for_good) {
            (void)err_set(&slot->fatal, ERR_MEMORY, "%s", slot->error.text.message);
        }
        atomic_store(&slot->state, (int)state);
        sem_post(&it->ce.wake);
    }
    sem_post(&it->ce.wake);
    return NULL;
}

/* ---- results --------------------------------------------------------------------------------- */

static bool is_done(const struct jsonl *it, struct slot *slot)
{
    switch ((enum slot_state)atomic_load(&slot->state)) {
    case SLOT_READ: return false;
    case SLOT_BAD: return true;
    case SLOT_SUBMITTED: break;
    }
    struct request *const request = it->kind->request(&slot->job);
    return atomic_load(&request->n_item_done) == request->n_item;
}

/* Whether an error is one of the line alone: what it asks for, its numbers. Any other one ends the
 * run, which --resume continues. */
static bool is_of_line(const struct api_error *error)
{
    return error->status < 499 || strcmp(error->code, "numerical_error") == 0;
}

/* Appends the answer of a request that is over. false: slot.error says why there is none. */
static bool write_answer(struct jsonl *it, struct slot *slot, struct text *out, struct err *err)
{
    char place[OPTIONS_PATH_MAX + 32];
    const char *const name = jsonl_in_name(&it->in, slot->file);
    (void)snprintf(place, sizeof place, "%.*s:%lld", OPTIONS_PATH_MAX, name,
                   (long long)slot->number);
    struct answer_meta meta = {.bare = true, .id = place, .model = it->options->served_model_name};
    it->kind->id(&slot->job, &meta);
    const bool is_whole = answer_check(it->kind->request(&slot->job), &slot->error);
    if (is_whole && it->kind->take != NULL) {
        return it->kind->take(it->kind->ctx, &slot->job, name, slot->number, err) == ERR_OK;
    }
    if (is_whole &&
        it->kind->write(out, &slot->job, it->fields, &it->ce.limits, &meta, &slot->error)) {
        return true;
    }
    if (!is_of_line(&slot->error)) {
        (void)cmd_refused(&slot->error, err);
    }
    return false;
}

static enum err_code finish(struct jsonl *it, struct slot *slot, struct err *err)
{
    struct text out = {0};
    enum err_code code = slot->fatal.code;
    bool bad = atomic_load(&slot->state) == SLOT_BAD;
    if (code != ERR_OK) {
        *err = slot->fatal;
    } else if (!bad) {
        *err = (struct err){0};
        bad = !write_answer(it, slot, &out, err);
        code = err->code;
        it->n_token += bad ? 0 : it->kind->n_token(&slot->job);
        if (!bad && it->kind->n_unk != NULL) {
            int64_t n_tokens = 0;
            it->n_unk += it->kind->n_unk(&slot->job, it->ce.limits.info, &n_tokens);
            it->n_unk_of += n_tokens;
        }
    }
    if (code == ERR_OK && bad) {
        code = jsonl_out_add_bad(&it->out, jsonl_in_name(&it->in, slot->file), slot->number,
                                 slot->error.text.message, err);
    } else if (code == ERR_OK && it->kind->take != NULL) {
        it->out.n_result++;
    } else if (code == ERR_OK) {
        code = jsonl_out_add(&it->out, &out, err);
    }
    it->n_document++;
    text_free(&out);
    return code;
}

static void free_slot(struct jsonl *it, struct slot *slot)
{
    it->kind->free(&slot->job);
    text_free(&slot->line);
}

/* Writes the finished lines in order. *left: lines are still being computed or still to come. */
static enum err_code write_done(struct jsonl *it, bool *left, struct err *err)
{
    enum err_code code = ERR_OK;
    pthread_mutex_lock(&it->mutex);
    while (it->head < it->tail && code == ERR_OK && is_done(it, &it->slot[it->head % CMD_QUEUE])) {
        struct slot *const slot = &it->slot[it->head % CMD_QUEUE];
        pthread_mutex_unlock(&it->mutex);
        code = finish(it, slot, err);
        const int64_t total = it->in.total;
        progress_count(&it->progress, it->kind->doing, it->n_document, it->n_token,
                       total > 0 ? (double)slot->taken / (double)total : -1);
        free_slot(it, slot);
        pthread_mutex_lock(&it->mutex);
        it->bytes -= slot->cost;
        it->head++;
        pthread_cond_signal(&it->room);
    }
    *left = it->head < it->tail || !it->over;
    pthread_mutex_unlock(&it->mutex);
    return code;
}

/* ---- the run --------------------------------------------------------------------------------- */

static enum err_code start_readers(struct jsonl *it, struct err *err)
{
    const int cores = engine_backend(it->ce.engine)->n_thread;
    const int wanted = 1 + cores / CORES_PER_READER;
    it->slot = calloc(CMD_QUEUE, sizeof *it->slot);
    if (it->slot == NULL) {
        return err_set(err, ERR_MEMORY, "no memory for the lines");
    }
    while (it->n_reader < wanted && it->n_reader < READER_MAX) {
        if (pthread_create(&it->reader[it->n_reader], NULL, read_lines, it) != 0) {
            break;
        }
        it->n_reader++;
    }
    return it->n_reader > 0 ? ERR_OK : err_set(err, ERR_MEMORY, "no thread can be started");
}

static void stop_readers(struct jsonl *it)
{
    pthread_mutex_lock(&it->mutex);
    it->stop = true;
    pthread_cond_broadcast(&it->room);
    pthread_mutex_unlock(&it->mutex);
    for (int i = 0; i < it->n_reader; i++) {
        (void)pthread_join(it->reader[i], NULL);
    }
    for (int64_t i = it->head; i < it->tail; i++) {
        free_slot(it, &it->slot[i % CMD_QUEUE]);
    }
    free(it->slot);
}

static enum err_code run(struct jsonl *it, struct err *err)
{
    const double share = it->in.total > 0 ? (double)it->in.taken / (double)it->in.total : 0;
    progress_begin(&it->progress, "tokens", 0);
    it->progress.from = share;
    enum err_code code = start_readers(it, err);
    bool left = true;
    while (code == ERR_OK && left) {
        code = write_done(it, &left, err);
        if (code == ERR_OK) {
            code = jsonl_out_flush(&it->out, false, err);
        }
        if (code == ERR_OK && left) {
            cmd_engine_wait(&it->ce);
        }
    }
    stop_readers(it);
    progress_end(&it->progress);
    struct err late;
    /* Finished lines are kept, whatever has happened. */
    const enum err_code flushed = jsonl_out_flush(&it->out, true, code == ERR_OK ? err : &late);
    if (code == ERR_OK) {
        code = flushed;
    }
    if (code == ERR_OK && it->in_error.code != ERR_OK) {
        *err = it->in_error;
        code = err->code;
    }
    return code;
}

static enum err_code read_shard(struct jsonl_shard *shard, const char *given, struct err *err)
{
    int used = 0;
    int index = 0;
    int of = 1;
    if (given[0] != '\0' && (sscanf(given, "%9d/%9d%n", &index, &of, &used) != 2 ||
                             given[used] != '\0' || index < 0 || of < 1 || index >= of)) {
        return err_set(err, ERR_ARGUMENT,
                       "--shard: '%.60s' is not I/N with I from 0 to N - 1, as in 0/4", given);
    }
    *shard = (struct jsonl_shard){index, of};
    return ERR_OK;
}

static enum err_code open_files(struct jsonl *it, struct err *err)
{
    const struct options *const options = it->options;
    const bool gives_lines = it->kind->take == NULL && options->output[0] != '\0';
    const char *const output = gives_lines ? options->output : "-";
    struct jsonl_shard shard = {0, 1};
    int n = 0;
    const char *const *const path = cmd_paths(options, &n);
    if (options->resume && strcmp(output, "-") == 0) {
        return err_set(err, ERR_ARGUMENT,
                       "--resume needs a file that tells what is done: give --output FILE");
    }
    if (score_fields_read(&it->fields, options->fields, err) != ERR_OK ||
        read_shard(&shard, options->shard, err) != ERR_OK ||
        jsonl_in_open(&it->in, path, n, shard, (size_t)options->max_line_bytes, err) != ERR_OK ||
        jsonl_out_open(&it->out, output, &it->in, err) != ERR_OK) {
        return err->code;
    }
    if (it->out.errors_path != NULL &&
        (jsonl_record_make(&it->record, it->kind->doing, options, &it->defaults_text, &it->in,
                           err) != ERR_OK ||
         jsonl_record_check(&it->record, &it->out, options->resume, err) != ERR_OK)) {
        return err->code;
    }
    return options->resume ? jsonl_out_resume(&it->out, &it->in, err) : ERR_OK;
}

/* From here on the files of an earlier run are gone. */
static enum err_code begin_files(struct jsonl *it, struct err *err)
{
    const enum err_code code = jsonl_record_put(&it->record, &it->out, err);
    return code != ERR_OK || it->options->resume ? code : jsonl_out_begin(&it->out, err);
}

static enum err_code make_defaults(struct jsonl *it, struct err *err)
{
    struct api_error error = {0};
    struct text *const body = &it->defaults_text;
    json_open(body, '{');
    it->kind->put_defaults(body, it->options);
    if (cmd_put_ablate(body, it->options, err) != ERR_OK) {
        return err->code;
    }
    json_close(body, '}');
    if (body->failed) {
        return err_set(err, ERR_MEMORY, "no memory for the options' request");
    }
    if (!fields_open(&it->defaults, body->data, body->n, &error)) {
        return err_set(err, ERR_ARGUMENT, "the options make no request: %s", error.text.message);
    }
    return ERR_OK;
}

static enum err_code open_all(struct jsonl *it, struct err *err)
{
    enum err_code code = make_defaults(it, err);
    if (code == ERR_OK) {
        code = open_files(it, err);
    }
    if (code == ERR_OK) {
        code = cmd_engine_open(&it->ce, it->options, err);
        it->ce.limits.defaults = &it->defaults;
        it->ce.limits.strict = it->options->strict;
    }
    if (code == ERR_OK && it->kind->begin != NULL) {
        code = it->kind->begin(it->kind->ctx, &it->ce, err);
    }
    return code == ERR_OK ? begin_files(it, err) : code;
}

int jsonl_run(const struct options *options, const struct jsonl_kind *kind)
{
    struct jsonl it = {.options = options,
                       .kind = kind,
                       .reading = PTHREAD_MUTEX_INITIALIZER,
                       .mutex = PTHREAD_MUTEX_INITIALIZER,
                       .room = PTHREAD_COND_INITIALIZER};
    struct err err;
    enum err_code code = open_all(&it, &err);
    if (code == ERR_OK) {
        code = run(&it, &err);
    }
    const int64_t n_bad = it.out.n_bad;
    if (code == ERR_OK && n_bad > 0) {
        fprintf(stderr, "pkmserve: bad lines: %lld of %lld%s%s\n", (long long)n_bad,
                (long long)(n_bad + it.out.n_result), it.out.errors_path != NULL ? ": see " : "",
                it.out.errors_path != NULL ? it.out.errors_path : "");
    }
    if (code == ERR_OK) {
        cmd_warn_unknown(it.n_unk, it.n_unk_of, it.ce.limits.tokenizer);
    }
    cmd_engine_close(&it.ce);
    fields_close(&it.defaults);
    text_free(&it.defaults_text);
    text_free(&it.record);
    jsonl_out_close(&it.out);
    jsonl_in_close(&it.in);
    return code != ERR_OK ? cmd_fail(&err) : n_bad > 0 && options->strict ? 1 : 0;
}
