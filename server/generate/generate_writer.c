/* Answers of generations, piece by piece: see generate_writer.h. */
#include "server/generate/generate_writer.h"

#include "engine/scoring.h"

/* Of a text, or of a list of ids, at once: enough that steps cost nothing, and far less than a
 * piece. */
enum { STEP_BYTES = 4096, STEP_TOKENS = 64 };

void generate_writer_begin(struct generate_writer *writer, const struct generate_job *job,
                           const struct api_limits *limits, const struct answer_meta *meta)
{
    *writer = (struct generate_writer){.job = job, .limits = limits, .meta = meta};
}

void generate_writer_end(struct generate_writer *writer)
{
    answer_walk_end(&writer->walk);
    text_stream_end(&writer->gen);
    text_free(&writer->scratch);
}

const struct item *generate_writer_item(const struct generate_writer *w)
{
    return &w->job->request->item[w->item];
}

/* ---- which tokens -------------------------------------------------------------------------- */

struct generate_span generate_writer_prompt(const struct generate_writer *w)
{
    return (struct generate_span){0, generate_writer_item(w)->n_ids};
}

struct generate_span generate_writer_output(const struct generate_writer *w)
{
    const struct item *const item = generate_writer_item(w);
    const int first = w->event != NULL && w->event->token >= 0 ? w->event->token : 0;
    const int n = w->event != NULL ? w->event->token + 1 : atomic_load(&item->n_out);
    return (struct generate_span){item->n_ids + first, item->n_ids + n};
}

struct generate_span generate_writer_span(const struct generate_writer *w, int64_t from)
{
    struct generate_span span = generate_writer_output(w);
    if (w->job->echo && (w->event == NULL || w->event->first)) {
        span.at = from;
    }
    return span;
}

/* ---- walks --------------------------------------------------------------------------------- */

static void close_walks(struct generate_writer *w)
{
    answer_walk_end(&w->walk);
    text_stream_end(&w->gen);
}

static bool open_walks(struct generate_writer *w, bool prompt, bool output, struct api_error *error)
{
    const struct tokenizer *const tokenizer = w->limits->tokenizer;
    const bool ok =
        (!prompt || answer_walk_begin(&w->walk, generate_input(w->job, w->item), tokenizer)) &&
        (!output || text_stream_begin(&w->gen, w->job->request, generate_writer_item(w), tokenizer,
                                      &w->limits->info->ends));
    return ok || api_error_set(error, 500, "out_of_memory", NULL, "no memory for the answer");
}

/* Takes the next token of the continuation; the text that it lets out is added to scratch. */
static int64_t push_output(struct generate_writer *w)
{
    const struct item *const item = generate_writer_item(w);
    return text_stream_push(&w->gen, (enum finish)atomic_load(&item->state),
                            atomic_load(&item->n_out), &w->scratch);
}

/* ---- the list that is open ----------------------------------------------------------------- */

static struct answer_token prompt_token(struct generate_writer *w)
{
    const struct item *const item = generate_writer_item(w);
    const struct input *const input = generate_input(w->job, w->item);
    const int n_top = w->job->request->n_top;
    const int64_t i = w->at;
    struct answer_token token = {.id = item->ids[i],
                                 .before = i > 0 ? item->ids[i - 1] : -1,
                                 .offset = w->limits->tokenizer != NULL ? 0 : -1,
                                 .first = i == 0,
                                 .added = i < input->n_bos, /* it comes before the text */
                                 .has_bytes = true,
                                 .has_rank = true,
                                 .n_top = n_top};
    if (w->placed && !token.added) {
        token.offset = answer_walk_next(&w->walk, i - input->n_bos, token.id);
    }
    if (item->prompt_logprob != NULL) {
        token.logprob = item->prompt_logprob[i];
        token.rank = item->prompt_rank[i];
    }
    if (n_top > 0 && item->prompt_top_id != NULL) {
        token.top_id = item->prompt_top_id + i * n_top;
        token.top_logprob = item->prompt_top_logprob + i * n_top;
    }
    return token;
}

static struct answer_token output_token(struct generate_writer *w, struct text *out)
{
    const struct item *const item = generate_writer_item(w);
    int64_t offset = -1;
    if (w->placed && w->event != NULL) {
        offset = w->event->offset;
    } else if (w->placed) {
        text_clear(&w->scratch);
        offset = push_output(w);
        out->failed = out->failed || w->scratch.failed;
    }
    struct answer_token token = generate_token(w->job, item, (int)(w->at - item->n_ids),
                                               offset >= 0 ? w->n_before + offset : -1);
    token.fresh = w->gen.buffer;
    token.n_fresh = w->gen.n_fresh;
    return token;
}

static void put_id(struct generate_writer *w, struct text *out, const struct answer_token *token)
{
    (void)w;
    json_put_int(out, token->id);
}

/* Without what else is known of the tokens. */
static void step_ids(struct generate_writer *w, struct text *out)
{
    const struct item *const item = generate_writer_item(w);
    for (int i = 0; i < STEP_TOKENS && w->at < w->end; i++, w->at++) {
        json_put_int(out,
                     w->at < item->n_ids ? item->ids[w->at] : item->out_id[w->at - item->n_ids]);
    }
}

static void step_list(struct generate_writer *w, struct text *out)
{
    if (w->put == put_id) {
        step_ids(w, out);
    } else if (w->at < w->end) {
        const struct answer_token token =
            w->at < generate_writer_item(w)->n_ids ? prompt_token(w) : output_token(w, out);
        w->put(w, out, &token);
        w->at++;
    }
    if (w->at == w->end) {
        json_close(out, ']');
        close_walks(w);
        w->put = NULL;
    }
}

bool generate_writer_list(struct generate_writer *w, struct text *out, const char *name,
                          struct generate_span span, bool placed, generate_put *put,
                          struct api_error *error)
{
    const int64_t n_ids = generate_writer_item(w)->n_ids;
    CHECK(!placed || span.at >= n_ids || span.at <= generate_input(w->job, w->item)->n_bos);
    if (!open_walks(w, placed && span.at < n_ids, placed && w->event == NULL && span.end > n_ids,
                    error)) {
        return false;
    }
    w->at = span.at;
    w->end = span.end;
    w->placed = placed;
    w->put = put;
    json_key(out, name);
    json_open(out, '[');
    return true;
}

bool generate_writer_ids(struct generate_writer *w, struct text *out, const char *name,
                         struct generate_span span, struct api_error *error)
{
    return generate_writer_list(w, out, name, span, false, put_id, error);
}

/* ---- the text that is open ----------------------------------------------------------------- */

static void put_prompt_part(struct generate_writer *w, struct text *out, const char *data, size_t n)
{
    json_string_part(out, data, n);
    w->n_before += n > 0 ? text_count_chars(data, n) : 0;
}

/* true: that was the last of it. */
static bool step_prompt_text(struct generate_writer *w, struct text *out)
{
    const struct input *const input = generate_input(w->job, w->item);
    const char *const text = input->text + w->byte;
    const size_t left = input->text_bytes - w->byte;
    size_t n = left < STEP_BYTES ? left : STEP_BYTES;
    while (n < left && n > 1 && (text[n] & 0xC0) == 0x80) {
        n--; /* not within a character */
    }
    put_prompt_part(w, out, text, n);
    w->byte += n;
    return n == left;
}

/* What its ids spell. */
static bool step_prompt_ids(struct generate_writer *w, struct text *out)
{
    const int32_t *const ids = generate_writer_item(w)->ids;
    struct answer_walk *const walk = &w->walk;
    text_clear(&w->scratch);
    for (int i = 0; i < STEP_TOKENS && w->at < w->end; i++) {
        text_add(&w->scratch, walk->buffer,
                 detok_push(&walk->detok, ids[w->at++], walk->buffer, walk->buffer_max));
    }
    const bool over = w->at == w->end;
    if (over) {
        text_add(&w->scratch, walk->buffer,
                 detok_end(&walk->detok, walk->buffer, walk->buffer_max));
    }
    put_prompt_part(w, out, w->scratch.data, w->scratch.n);
    out->failed = out->failed || w->scratch.failed;
    return over;
}

static bool step_prompt(struct generate_writer *w, struct text *out)
{
    if (generate_input(w->job, w->item)->text != NULL) {
        return step_prompt_text(w, out);
    }
    return w->limits->tokenizer == NULL || step_prompt_ids(w, out);
}

static bool step_output(struct generate_writer *w, struct text *out)
{
    const int n_out = atomic_load(&generate_writer_item(w)->n_out);
    text_clear(&w->scratch);
    for (int i = 0; i < STEP_TOKENS && w->gen.n_token < n_out; i++) {
        (void)push_output(w);
    }
    const bool over = w->gen.n_token == n_out;
    if (over) {
        text_stream_flush(&w->gen, &w->scratch);
    }
    json_string_part(out, w->scratch.data, w->scratch.n);
    out->failed = out->failed || w->scratch.failed;
    return over;
}

static void step_text(struct generate_writer *w, struct text *out)
{
    if ((w->text & GENERATE_PROMPT) != 0) {
        w->text &= step_prompt(w, out) ? ~(unsigned)GENERATE_PROMPT : ~0u;
    } else if ((w->text & GENERATE_OUTPUT) != 0) {
        w->text &= step_output(w, out) ? ~(unsigned)GENERATE_OUTPUT : ~0u;
    } else {
        json_string_part(out, w->event->text->data, w->event->text->n);
        json_string_part(out, w->event->rest->data, w->event->rest->n);
        w->text = 0;
    }
    if (w->text == 0) {
        json_string_end(out);
        close_walks(w);
    }
}

bool generate_writer_text(struct generate_writer *w, struct text *out, const char *name,
                          unsigned text, struct api_error *error)
{
    const struct input *const input = generate_input(w->job, w->item);
    if (!open_walks(w, (text & GENERATE_PROMPT) != 0, (text & GENERATE_OUTPUT) != 0, error)) {
        return false;
    }
    w->text = text;
    w->byte = 0;
    w->at = input->n_bos;
    w->end = input->n_ids - input->n_eos;
    json_key(out, name);
    json_string_begin(out);
    return true;
}

/* ---- the memory trace ---------------------------------------------------------------------- */

/* The step that drew token n read the positions before it: see sequence_trace. */
static int64_t first_position(const struct item *item, int token)
{
    return token > 0 ? item->n_ids + token - 1 : 0;
}

void generate_writer_memory(struct generate_writer *w, int n_told)
{
    const struct generate_job *const job = w->job;
    const struct item *const item = generate_writer_item(w);
    if (job->memory != MEMORY_OFF) {
        answer_memory_begin(&w->memory, job->request, item, w->limits->info, job->memory,
                            &job->slots, first_position(item, n_told));
    }
}

bool generate_memory_part(struct generate_writer *w, struct text *out, struct api_error *error)
{
    (void)out;
    (void)error;
    generate_writer_memory(w, 0);
    return true;
}

void generate_writer_slots(struct generate_writer *w, int token)
{
    const struct generate_job *const job = w->job;
    const struct item *const item = generate_writer_item(w);
    if (job->memory == MEMORY_SLOTS && item->n_ids + token > job->slots.start) {
        answer_memory_begin_part(&w->memory, job->request, item, w->limits->info, &job->slots,
                                 first_position(item, token), item->n_ids + token);
    }
}

/* ---- the whole ----------------------------------------------------------------------------- */

/* Whether the last part's list, text or trace goes on. */
static bool is_open(const struct generate_writer *w)
{
    return w->put != NULL || w->text != 0 || w->memory.next != ANSWER_MEMORY_OVER;
}

bool generate_writer_go(struct generate_writer *w, struct text *out, size_t enough,
                        struct api_error *error)
{
    bool ok = true;
    out->comma = w->comma;
    while (ok && w->part != NULL && out->n < enough) {
        if (w->put != NULL) {
            step_list(w, out);
        } else if (w->text != 0) {
            step_text(w, out);
        } else if (w->memory.next != ANSWER_MEMORY_OVER) {
            ok = answer_memory_next(&w->memory, out, enough, error);
        } else {
            ok = (*w->part++)(w, out, error);
        }
        if (!is_open(w) && *w->part == NULL) {
            w->part = NULL;
        }
    }
    w->comma = out->comma;
    return ok;
}

bool generate_writer_next(struct generate_writer *w, struct text *out, size_t enough, bool *done,
                          struct api_error *error)
{
    const struct request *const request = w->job->request;
    int64_t n_lookup = 0;
    while (w->item < request->n_item && out->n < enough && n_lookup < ANSWER_PIECE_LOOKUPS) {
        if (w->part == NULL) {
            w->part = w->job->dialect->choice;
            w->n_before = 0;
        }
        if (!generate_writer_go(w, out, enough, error)) {
            return false;
        }
        if (w->part == NULL) {
            n_lookup +=
                enough == SIZE_MAX ? 0 : answer_lookups(generate_writer_item(w), w->limits->info);
            w->item++;
        }
    }
    *done = w->item == request->n_item;
    return true;
}

bool generate_write(struct text *out, const struct generate_job *job,
                    const struct api_limits *limits, const struct answer_meta *meta,
                    struct api_error *error)
{
    struct generate_writer writer;
    bool done = false;
    generate_writer_begin(&writer, job, limits, meta);
    const bool ok = generate_writer_next(&writer, out, SIZE_MAX, &done, error);
    generate_writer_end(&writer);
    return ok;
}

void generate_writer_tell(struct generate_writer *w, const struct generate_event *event)
{
    CHECK(w->part == NULL);
    w->event = event;
    w->item = event->item;
    w->part = w->job->dialect->event;
}
