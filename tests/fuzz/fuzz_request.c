/* Fuzzes the request parsers and the answer writers: bytes of a body, as they would come in over
 * HTTP. The first byte chooses the route, its dialect, whether there is a tokenizer and whether the
 * model is a bare one, the rest is the body. What parses is "run" by filling in results, and every
 * answer and event must be valid JSON. */
#include "engine/tokenizer.h"
#include "server/generate/openai.h"
#include "server/generate/sse.h"
#include "server/generate/tgi.h"
#include "server/score/score_labels.h"
#include "server/score/score_stream.h"
#include "tests/fuzz/fuzz_json.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { N_VOCAB = 4096, CONTEXT = 64, TRACE_BYTES = 1 << 20 };

static struct model_info *new_info(void)
{
    struct model_info *const info = calloc(1, sizeof *info);
    CHECK(info != NULL);
    *info = (struct model_info){.n_vocab = N_VOCAB,
                                .context = CONTEXT,
                                .bos_id = 1,
                                .eos_id = 1,
                                .pad_id = 2,
                                .unk_id = 3,
                                .add_bos = true,
                                .n_lang = 2,
                                .n_memory = 1};
    memcpy(info->lang[0], "en", 3);
    memcpy(info->lang[1], "fr", 3);
    info->memory[0] = (struct pkm_info){
        .layer = 1,
        .shape = {.kind = PKM_PRODUCT, .n_head = 2, .k_top = 2, .n_key = 4, .d_key = 8},
        .n_slot = 16,
        .d_value = 8};
    return info;
}

/* A model without what others have: a limit of its context, special tokens, languages, memories. */
static const struct model_info bare = {
    .n_vocab = N_VOCAB, .bos_id = -1, .eos_id = -1, .pad_id = -1, .unk_id = -1};

/* Results that follow from the input, of the shapes that the engine writes. */
static void finish_item(const struct request *request, struct item *item, int n_out)
{
    for (int64_t i = 0; i < n_out; i++) {
        if (item->out_id != NULL) {
            item->out_id[i] = (int32_t)((item->ids[0] * 7 + i * 31) % N_VOCAB);
        }
        if (item->out_logprob != NULL) {
            item->out_logprob[i] = i == 9 ? -INFINITY : -0.25f * (float)i;
            item->out_rank[i] = 1;
        }
        for (int j = 0; item->out_top_id != NULL && j < request->n_top; j++) {
            item->out_top_id[i * request->n_top + j] = j;
            item->out_top_logprob[i * request->n_top + j] = -(float)j;
        }
    }
    for (int64_t i = 0; item->prompt_rank != NULL && i < item->n_ids; i++) {
        item->prompt_rank[i] = 1;
        for (int j = 0; j < request->n_top; j++) {
            item->prompt_top_id[i * request->n_top + j] = j;
            item->prompt_top_logprob[i * request->n_top + j] = -(float)j;
        }
    }
    for (int j = 0; item->out_target != NULL && j < request->n_target; j++) {
        item->out_target[j] = j % 3 == 2 ? -INFINITY : -(float)j;
    }
    if (item->trace != NULL) {
        struct pkm_trace *const trace = &item->trace[0];
        trace->n_position = item->n_ids;
        if (trace->count != NULL) {
            trace->count[3] = 1;
            trace->weight[3] = 0.5;
        }
    }
    atomic_store(&item->n_out, n_out);
    atomic_store(&item->state, FINISH_LENGTH);
}

static const struct answer_meta meta = {.id = "fuzz", .model = "m"};

static void fuzz_events(struct text *stream)
{
    for (size_t at = 0; at < stream->n;) {
        const char *const event = stream->data + at;
        const char *const end = memmem(event, stream->n - at, "\n\n", 2);
        CHECK(end != NULL && memcmp(event, "data: ", 6) == 0);
        struct text json = {.data = stream->data + at + 6, .n = (size_t)(end - event) - 6};
        if (json.n != 6 || memcmp(json.data, "[DONE]", 6) != 0) {
            fuzz_json(&json);
        }
        at += (size_t)(end - event) + 2;
    }
}

/* Every event of a stream, put together again from its pieces. */
static void fuzz_stream(const struct generate_job *job, const struct api_limits *limits)
{
    struct sse sse;
    struct exchange x = {.id = "fuzz"};
    struct api_error error = {0};
    struct text stream = {0};
    CHECK(sse_begin(&sse, job, limits, &meta));
    enum exchange_next next = EXCHANGE_STREAM;
    for (int calls = 0; next == EXCHANGE_STREAM; calls++) {
        CHECK(calls < 100000); /* it comes to an end */
        text_clear(&x.out);
        next = sse_next(&sse, &x, &error);
        text_add(&stream, x.out.data, x.out.n);
    }
    CHECK(next == EXCHANGE_END);
    sse_end(&sse);
    fuzz_events(&stream);
    for (int i = 0; i < x.n_header; i++) {
        free(x.header[i].value);
    }
    text_free(&x.out);
    text_free(&stream);
}

/* In pieces, as a server sends it, the answer is the same. */
static void check_generate_pieces(const struct text *whole, const struct generate_job *job,
                                  const struct api_limits *limits)
{
    struct generate_writer writer;
    struct api_error error = {0};
    struct text piece = {0};
    size_t n = 0;
    bool done = false;
    generate_writer_begin(&writer, job, limits, &meta);
    while (!done) {
        text_clear(&piece);
        CHECK(generate_writer_next(&writer, &piece, 64, &done, &error));
        CHECK(n + piece.n <= whole->n && memcmp(whole->data + n, piece.data, piece.n) == 0);
        n += piece.n;
    }
    CHECK(n == whole->n);
    generate_writer_end(&writer);
    text_free(&piece);
}

static void fuzz_generate(const struct generate_dialect *dialect, const char *body, size_t bytes,
                          const struct api_limits *limits)
{
    struct generate_job job;
    struct api_error error = {0};
    if (generate_parse(&job, dialect, body, bytes, limits, &error)) {
        struct request *const request = job.request;
        CHECK(request_take_traces(request, limits->info));
        for (int i = 0; i < request->n_item; i++) {
            struct item *const item = &request->item[i];
            finish_item(request, item, item_max_tokens(request, item));
        }
        atomic_store(&request->n_item_done, request->n_item);
        struct text out = {0};
        if (job.stream) {
            fuzz_stream(&job, limits);
        } else {
            CHECK(generate_write(&out, &job, limits, &meta, &error));
            check_generate_pieces(&out, &job, limits);
            fuzz_json(&out);
        }
        text_free(&out);
    } else {
        CHECK(error.status >= 400 && error.code != NULL && error.text.message[0] != '\0');
    }
    generate_free(&job);
}

static void finish_score(const struct score_job *job)
{
    struct request *const request = job->request;
    for (int i = 0; i < request->n_item; i++) {
        struct item *const item = &request->item[i];
        finish_item(request, item, (int)(item->n_ids - item->score_from));
    }
    atomic_store(&request->n_item_done, request->n_item);
}

/* The stream's lines, put together again from its pieces: each is JSON. */
static void stream_score(const struct score_job *job, const struct api_limits *limits)
{
    struct score_stream stream;
    struct exchange x = {0};
    struct api_error error = {0};
    struct text line = {0};
    score_stream_begin(&stream, job, limits, false);
    for (enum exchange_next next = EXCHANGE_STREAM; next != EXCHANGE_END;) {
        next = score_stream_next(&stream, &x, &meta, &error);
        CHECK(next == EXCHANGE_STREAM || next == EXCHANGE_END);
        for (size_t i = 0; i < x.out.n; i++) {
            if (x.out.data[i] == '\n') {
                fuzz_json(&line);
                text_clear(&line);
            } else {
                text_add(&line, x.out.data + i, 1);
            }
        }
        text_clear(&x.out);
    }
    CHECK(line.n == 0);
    text_free(&line);
    score_stream_end(&stream);
    text_free(&x.out);
    for (int i = 0; i < x.n_header; i++) {
        free(x.header[i].value);
    }
}

/* In pieces, as a server sends it, the answer is the same. */
static void check_score_pieces(const struct text *whole, const struct score_job *job,
                               const struct api_limits *limits)
{
    struct score_writer writer;
    struct api_error error = {0};
    struct text piece = {0};
    size_t n = 0;
    bool done = false;
    score_writer_begin(&writer, job, limits);
    while (!done) {
        text_clear(&piece);
        CHECK(score_write_piece(&writer, &piece, 100, &meta, &done, &error));
        CHECK(n + piece.n <= whole->n && memcmp(whole->data + n, piece.data, piece.n) == 0);
        n += piece.n;
    }
    CHECK(n == whole->n);
    score_writer_end(&writer);
    text_free(&piece);
}

static void fuzz_score(const char *body, size_t bytes, const struct api_limits *limits)
{
    struct score_job job;
    struct api_error error = {0};
    if (score_parse(&job, body, bytes, limits, &error)) {
        CHECK(request_take_traces(job.request, limits->info));
        finish_score(&job);
        struct text out = {0};
        CHECK(score_write(&out, &job, limits, &meta, &error));
        fuzz_json(&out);
        check_score_pieces(&out, &job, limits);
        text_free(&out);
        stream_score(&job, limits);
    } else {
        CHECK(error.status >= 400 && error.code != NULL && error.text.message[0] != '\0');
    }
    score_free(&job);
}

static void fuzz_labels(const char *body, size_t bytes, const struct api_limits *limits)
{
    struct score_job job;
    struct api_error error = {0};
    if (score_labels_parse(&job, body, bytes, limits, &error)) {
        finish_score(&job);
        struct text out = {0};
        struct score_writer writer;
        bool done = false;
        score_writer_begin(&writer, &job, limits);
        while (!done) { /* in pieces of one item */
            CHECK(score_labels_write_piece(&writer, &out, out.n + 1, &meta, &done, &error));
        }
        score_writer_end(&writer);
        fuzz_json(&out);
        text_free(&out);
    } else {
        CHECK(error.status >= 400 && error.code != NULL && error.text.message[0] != '\0');
    }
    score_free(&job);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    /* Made once: opening a tokenizer takes longer than a thousand requests. */
    static struct model_info *info;
    static struct tokenizer *tokenizer;
    static struct request_memory *requests;
    if (info == NULL) {
        info = new_info();
        CHECK(request_memory_open(&requests, 0, TRACE_BYTES, NULL) == ERR_OK);
        /* Started from elsewhere the texts are refused, and the rest is fuzzed all the same. */
        CHECK(tokenizer_open(&tokenizer, "models/demo", NULL, NULL, N_VOCAB, NULL) == ERR_OK);
    }
    if (bytes == 0) {
        return 0;
    }
    const struct api_limits limits = {.info = (data[0] & 128) != 0 ? &bare : info,
                                      .tokenizer = (data[0] & 2) != 0 ? NULL : tokenizer,
                                      .model_name = "m",
                                      .context = (data[0] & 128) != 0 ? 0 : CONTEXT,
                                      .requests = requests,
                                      .trace_bytes = {TRACE_BYTES, "--memory-trace-bytes"},
                                      .max_trace = {4096, "--max-trace-bytes"},
                                      .max_items = {8, "--max-items"},
                                      .max_score_items = {8, "--max-score-items"},
                                      .max_score_tokens = {512, "--max-score-tokens"},
                                      .max_score_positions = {1 << 20, "--max-score-positions"},
                                      .max_logprobs = 5,
                                      .default_max_tokens = 8,
                                      .timeout_ms = 1000,
                                      .max_timeout_ms = 10000,
                                      .ping_us = 15000000,
                                      .fingerprint = "fp_0",
                                      .strict = (data[0] & 4) != 0,
                                      .memory_trace = (data[0] & 8) == 0 ? MEMORY_TRACE_ON
                                                                         : MEMORY_TRACE_SUMMARY};
    const char *const body = (const char *)data + 1;
    if ((data[0] & 1) != 0 && (data[0] & 64) != 0) {
        fuzz_labels(body, bytes - 1, &limits);
    } else if ((data[0] & 1) != 0) {
        fuzz_score(body, bytes - 1, &limits);
    } else if ((data[0] & 64) == 0) {
        const bool any = (data[0] & 32) == 0;
        fuzz_generate(any ? &generate_route : &generate_native, body, bytes - 1, &limits);
    } else if ((data[0] & 8) == 0) {
        fuzz_generate(&openai_dialect, body, bytes - 1, &limits);
    } else if ((data[0] & 32) == 0) {
        fuzz_generate(&tgi_stream_dialect, body, bytes - 1, &limits);
    } else {
        fuzz_generate(&tgi_root_dialect, body, bytes - 1, &limits);
    }
    return 0;
}
