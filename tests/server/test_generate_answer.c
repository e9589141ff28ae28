/* Answers in pieces: none is long, whatever the request was, and together they are
 * the whole. The results are filled in here. */
#include "server/generate/openai.h"
#include "server/generate/sse.h"
#include "server/generate/tgi.h"
#include "server/score/score.h"

#include <jansson.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum {
    N_VOCAB = 4096,
    N_PROMPT = 3000, /* tokens; each of their lists is longer than a piece of a stream */
    ENOUGH = 2000,
    ABOVE = 4500,            /* a step of a prompt's text, or a token and what follows its list */
    STREAM_PIECE = 64 * 1024 /* see sse.c */
};

static struct model_info info = {
    .n_vocab = N_VOCAB,
    .context = 16384,
    .bos_id = 1,
    .eos_id = 2,
    .add_bos = true,
    .n_memory = 2,
    .memory = {{.layer = 1, .shape = {.n_head = 2, .k_top = 4}, .n_slot = 16},
               {.layer = 3, .shape = {.n_head = 1, .k_top = 4}, .n_slot = 16}}};
static struct api_limits limits = {.info = &info,
                                   .model_name = "m",
                                   .context = 16384,
                                   .memory_trace = MEMORY_TRACE_ON,
                                   .trace_bytes = {16 << 20, "--memory-trace-bytes"},
                                   .max_trace = {16 << 20, "--max-trace-bytes"},
                                   .max_items = {8, "--max-items"},
                                   .max_score_items = {8, "--max-score-items"},
                                   .max_score_tokens = {1 << 20, "--max-score-tokens"},
                                   .max_score_positions = {1 << 20, "--max-score-positions"},
                                   .max_logprobs = 20,
                                   .default_max_tokens = 8,
                                   .timeout_ms = 1000,
                                   .max_timeout_ms = 10000,
                                   .ping_us = 15000000,
                                   .fingerprint = "fp_0"};
static const struct answer_meta meta = {.id = "i", .model = "m"};

/* Look-ups of n positions. */
static void trace_item(struct item *item, int64_t n)
{
    for (int m = 0; item->trace != NULL && m < info.n_memory; m++) {
        struct pkm_trace *const trace = &item->trace[m];
        const int n_hit = info.memory[m].shape.n_head * info.memory[m].shape.k_top;
        trace->n_position = n;
        trace->lookups = n * n_hit;
        for (int64_t i = 0; i < n * n_hit; i++) {
            trace->slots[i] = (int32_t)(i * 5 % 16);
            trace->weights[i] = 0.001f * (float)(1 + i % 77);
        }
    }
}

static void end_item(const struct request *request, struct item *item)
{
    const int n_top = request->n_top > 0 ? request->n_top : 0;
    const int n_out = item_max_tokens(request, item);
    for (int i = 0; i < n_out; i++) {
        item->out_id[i] = 300 + (i * 37 + request->item[0].sample_index) % 3000;
        for (int j = 0; j < n_top; j++) {
            item->out_top_id[i * n_top + j] = 400 + i + j;
            item->out_top_logprob[i * n_top + j] = -0.3f * (float)j;
        }
        if (item->out_logprob != NULL) {
            item->out_logprob[i] = -0.7f * (float)(i + 1);
            item->out_rank[i] = 1 + i % 7;
        }
    }
    for (int64_t i = 0; item->prompt_rank != NULL && i < item->n_ids; i++) {
        item->prompt_logprob[i] = -0.1f * (float)i;
        item->prompt_rank[i] = 1 + (int)(i % 9);
        for (int j = 0; j < n_top; j++) {
            item->prompt_top_id[i * n_top + j] = 500 + (int)(i % 1000) + j;
            item->prompt_top_logprob[i * n_top + j] = -0.2f * (float)j;
        }
    }
    atomic_store(&item->n_out, n_out);
    atomic_store(&item->state, FINISH_LENGTH);
}

/* A prompt of n ids, or of as many words, and fields that follow it. */
static void begin(struct generate_job *job, const struct generate_dialect *dialect,
                  const char *prompt, bool is_text, int n, const char *fields)
{
    struct text body = {0};
    struct api_error error = {0};
    text_printf(&body, "{\"%s\":%s", prompt, is_text ? "\"" : "[300");
    for (int i = 1; i < n; i++) {
        if (is_text) {
            text_puts(&body, " caf\xc3\xa9");
        } else {
            text_printf(&body, ",%d", 300 + i * 7 % 3000);
        }
    }
    text_printf(&body, "%s,%s}", is_text ? "\"" : "]", fields);
    const bool ok = generate_parse(job, dialect, body.data, body.n, &limits, &error);
    if (!ok) {
        fail_msg("%s: %s", fields, error.text.message);
    }
    text_free(&body);
    for (int i = 0; i < job->inputs.n; i++) {
        assert_null(job->inputs.input[i].ids); /* the request's, where they are counted */
    }
    assert_true(request_take_traces(job->request, &info));
    for (int i = 0; i < job->request->n_item; i++) {
        struct item *const item = &job->request->item[i];
        end_item(job->request, item);
        trace_item(item, item->n_ids + item_max_tokens(job->request, item) - 1);
    }
    atomic_store(&job->request->n_item_done, job->request->n_item);
}

static const struct {
    const struct generate_dialect *dialect;
    const char *prompt;
    bool is_text;
    int n;
    const char *fields;
} cases[] = {
    {&generate_native, "prompt", false, N_PROMPT,
     "\"max_tokens\":600,\"echo\":true,\"logprobs\":20"},
    {&generate_native, "prompt", true, N_PROMPT,
     "\"max_tokens\":600,\"echo\":true,\"logprobs\":0,\"n\":2,\"temperature\":1"},
    {&generate_native, "prompt", true, N_PROMPT, "\"max_tokens\":600,\"echo\":true"},
    {&openai_dialect, "prompt", false, N_PROMPT,
     "\"max_tokens\":600,\"echo\":true,\"logprobs\":20"},
    {&openai_dialect, "prompt", true, N_PROMPT,
     "\"max_tokens\":600,\"echo\":true,\"logprobs\":5,\"n\":2,\"temperature\":1,\"return_token_"
     "ids\":true"},
    {&openai_dialect, "prompt", true, N_PROMPT, "\"max_tokens\":600,\"prompt_logprobs\":20"},
    {&generate_native, "prompt", false, 400, "\"max_tokens\":100,\"memory\":\"tokens\""},
    {&generate_native, "prompt", false, N_PROMPT, "\"max_tokens\":600,\"memory\":\"slots\""},
    {&openai_dialect, "prompt", true, N_PROMPT, "\"max_tokens\":600,\"memory\":\"slots\""},
    {&tgi_dialect, "inputs", true, N_PROMPT,
     "\"parameters\":{\"max_new_tokens\":600,\"details\":true,\"top_n_tokens\":5,"
     "\"decoder_input_details\":true,\"return_full_text\":true}"},
};

/* A piece is short, and goes on where the whole answer was after n bytes. Returns its bytes. */
static size_t check_piece(const struct text *piece, const struct text *whole, size_t n,
                          const char *what)
{
    assert_false(piece->failed);
    if (piece->n > ENOUGH + ABOVE) {
        fail_msg("%s: a piece has %zu bytes, of %d", what, piece->n, ENOUGH);
    }
    assert_true(n + piece->n <= whole->n);
    assert_memory_equal(piece->data, whole->data + n, piece->n);
    return piece->n;
}

static void test_no_piece_is_long(void **state)
{
    (void)state;
    for (size_t c = 0; c < sizeof cases / sizeof cases[0]; c++) {
        struct generate_job job;
        struct generate_writer writer;
        struct api_error error = {0};
        struct text whole = {0};
        struct text piece = {0};
        size_t n = 0;
        bool done = false;
        begin(&job, cases[c].dialect, cases[c].prompt, cases[c].is_text, cases[c].n,
              cases[c].fields);
        assert_true(generate_write(&whole, &job, &limits, &meta, &error));
        json_t *const answer = json_loadb(whole.data, whole.n, 0, NULL);
        assert_non_null(answer);
        json_decref(answer);
        generate_writer_begin(&writer, &job, &limits, &meta);
        while (!done) {
            text_clear(&piece);
            assert_true(generate_writer_next(&writer, &piece, ENOUGH, &done, &error));
            n += check_piece(&piece, &whole, n, cases[c].fields);
        }
        assert_int_equal(n, whole.n);
        generate_writer_end(&writer);
        text_free(&piece);
        text_free(&whole);
        generate_free(&job);
    }
}

/* Of /score, whose writer is another, the memory trace. */
static void test_no_piece_of_a_trace_is_long(void **state)
{
    (void)state;
    static const char *const memories[] = {"tokens", "slots"};
    for (int c = 0; c < 2; c++) {
        struct score_job job;
        struct score_writer writer;
        struct api_error error = {0};
        struct text body = {0};
        struct text whole = {0};
        struct text piece = {0};
        size_t n = 0;
        bool done = false;
        text_printf(&body, "{\"memory\":\"%s\",\"tokens\":[300", memories[c]);
        for (int i = 1; i < (c == 0 ? 500 : N_PROMPT); i++) {
            text_printf(&body, ",%d", 300 + i * 7 % 3000);
        }
        text_puts(&body, "]}");
        assert_true(score_parse(&job, body.data, body.n, &limits, &error));
        text_free(&body);
        assert_true(request_take_traces(job.request, &info));
        struct item *const item = &job.request->item[0];
        trace_item(item, item->n_ids - 1);
        atomic_store(&item->n_out, (int)(item->n_ids - item->score_from));
        atomic_store(&item->state, FINISH_LENGTH);
        atomic_store(&job.request->n_item_done, 1);
        assert_true(score_write(&whole, &job, &limits, &meta, &error));
        assert_true(whole.n > 10 * (ENOUGH + ABOVE));
        score_writer_begin(&writer, &job, &limits);
        while (!done) {
            text_clear(&piece);
            assert_true(score_write_piece(&writer, &piece, ENOUGH, &meta, &done, &error));
            n += check_piece(&piece, &whole, n, memories[c]);
        }
        assert_int_equal(n, whole.n);
        score_writer_end(&writer);
        text_free(&piece);
        text_free(&whole);
        score_free(&job);
    }
}

static void end_exchange(struct exchange *x)
{
    for (int i = 0; i < x->n_header; i++) {
        free(x->header[i].value);
    }
    text_free(&x->out);
}

/* The next event of a stream that ends in a NUL; the caller owns it. NULL: [DONE]. */
static json_t *next_event(char **at)
{
    char *const end = strstr(*at, "\n\n");
    assert_non_null(end);
    assert_memory_equal(*at, "data: ", 6);
    json_t *const event = json_loadb(*at + 6, (size_t)(end - *at) - 6, 0, NULL);
    *at = end + 2;
    return event;
}

static void test_an_event_with_a_long_prompt_comes_in_pieces(void **state)
{
    (void)state;
    struct generate_job job;
    struct sse sse;
    struct exchange x = {0};
    struct api_error error = {0};
    struct text stream = {0};
    int n_piece = 0;
    begin(
        &job, &openai_dialect, "prompt", false, N_PROMPT,
        "\"max_tokens\":3,\"echo\":true,\"logprobs\":20,\"n\":2,\"temperature\":1,\"stream\":true");
    assert_true(sse_begin(&sse, &job, &limits, &meta));
    for (enum exchange_next next = EXCHANGE_STREAM; next != EXCHANGE_END; n_piece++) {
        text_clear(&x.out);
        next = sse_next(&sse, &x, &error);
        assert_true(next == EXCHANGE_STREAM || next == EXCHANGE_END);
        assert_true(x.out.n <= STREAM_PIECE + ABOVE);
        text_add(&stream, x.out.data, x.out.n);
    }
    assert_true(n_piece > 10);
    text_add(&stream, "", 1);
    char *at = stream.data;
    for (int i = 0; i < 6; i++) { /* three tokens of each choice, the last of which ends it */
        json_t *const event = next_event(&at);
        json_t *const choice = json_array_get(json_object_get(event, "choices"), 0);
        const size_t n = i % 3 == 0 ? N_PROMPT + 1 : 1;
        assert_int_equal(json_integer_value(json_object_get(choice, "index")), i / 3);
        const char *key = NULL;
        json_t *list = NULL;
        json_object_foreach(json_object_get(choice, "logprobs"), key, list)
        {
            assert_int_equal(json_array_size(list), n);
        }
        assert_int_equal(json_is_null(json_object_get(choice, "finish_reason")), i % 3 != 2);
        json_decref(event);
    }
    assert_string_equal(at, "data: [DONE]\n\n");
    sse_end(&sse);
    end_exchange(&x);
    text_free(&stream);
    generate_free(&job);
}

/* What fails while an event is half sent is told after it. */
static void test_an_error_waits_for_the_end_of_an_event(void **state)
{
    (void)state;
    struct generate_job job;
    struct sse sse;
    struct exchange x = {0};
    struct api_error error = {0};
    struct text stream = {0};
    begin(
        &job, &generate_native, "prompt", false, N_PROMPT,
        "\"max_tokens\":3,\"echo\":true,\"logprobs\":20,\"n\":2,\"temperature\":1,\"stream\":true");
    assert_true(sse_begin(&sse, &job, &limits, &meta));
    assert_int_equal(sse_next(&sse, &x, &error), EXCHANGE_STREAM);
    text_add(&stream, x.out.data, x.out.n);
    atomic_store(&job.request->item[1].state, FINISH_ERROR);
    (void)err_set(&job.request->error, ERR_MEMORY, "lost");
    for (enum exchange_next next = EXCHANGE_STREAM; next != EXCHANGE_END;) {
        text_clear(&x.out);
        next = sse_next(&sse, &x, &error);
        text_add(&stream, x.out.data, x.out.n);
    }
    assert_false(x.out.failed);
    assert_string_equal(x.code, "out_of_memory");
    text_add(&stream, "", 1);
    char *at = stream.data;
    for (int i = 0; i < 3; i++) { /* the prompt, its first token, the error */
        json_t *const event = next_event(&at);
        assert_int_equal(json_object_get(event, "error") != NULL, i == 2);
        json_decref(event);
    }
    assert_string_equal(at, "data: [DONE]\n\n");
    sse_end(&sse);
    end_exchange(&x);
    text_free(&stream);
    generate_free(&job);
}

static struct request *cut_short;

/* The first event's first part: while it is written, the engine ends all choices. */
static bool end_meanwhile(struct generate_writer *writer, struct text *out, struct api_error *error)
{
    (void)error;
    text_printf(out, "data: {\"index\":%d,\"last\":%d}\n\n", writer->event->item,
                writer->event->last);
    for (int i = 0; i < cut_short->n_item; i++) {
        atomic_store(&cut_short->item[i].state, FINISH_SHUTDOWN);
    }
    atomic_store(&cut_short->n_item_done, cut_short->n_item);
    return true;
}

/* What ends badly after sse_next has looked at it, and before its turn comes, is not told as an end
 * like others. */
static void test_an_error_in_the_middle_of_a_call_is_told(void **state)
{
    (void)state;
    static generate_part *const parts[] = {end_meanwhile, NULL};
    const struct generate_dialect dialect = {
        .end = "data: [DONE]\n\n", .read = generate_native.read, .event = parts};
    struct generate_job job;
    struct sse sse;
    struct exchange x = {0};
    struct api_error error = {0};
    begin(&job, &dialect, "prompt", false, 3,
          "\"max_tokens\":3,\"n\":2,\"temperature\":1,\"stream\":true");
    cut_short = job.request;
    atomic_store(&job.request->n_item_done, 0);
    for (int i = 0; i < job.request->n_item; i++) {
        atomic_store(&job.request->item[i].state, FINISH_NONE);
        atomic_store(&job.request->item[i].n_out, 1);
    }
    assert_true(sse_begin(&sse, &job, &limits, &meta));
    assert_int_equal(sse_next(&sse, &x, &error), EXCHANGE_STREAM);
    text_add(&x.out, "", 1);
    assert_string_equal(x.out.data, "data: {\"index\":0,\"last\":0}\n\n");
    text_clear(&x.out);
    assert_int_equal(sse_next(&sse, &x, &error), EXCHANGE_END);
    assert_string_equal(x.code, "shutting_down");
    text_add(&x.out, "", 1);
    char *at = x.out.data;
    json_t *const event = next_event(&at);
    assert_non_null(json_object_get(event, "error"));
    json_decref(event);
    assert_string_equal(at, "data: [DONE]\n\n");
    sse_end(&sse);
    end_exchange(&x);
    generate_free(&job);
}

static int set_up(void **state)
{
    (void)state;
    struct tokenizer *tokenizer = NULL;
    const enum err_code code = tokenizer_open(&tokenizer, "models/demo", NULL, NULL, N_VOCAB, NULL);
    limits.tokenizer = tokenizer;
    struct request_memory *requests = NULL;
    if (request_memory_open(&requests, 0, 16 << 20, NULL) != ERR_OK) {
        return -1;
    }
    limits.requests = requests;
    return code == ERR_OK && tokenizer != NULL ? 0 : -1;
}

static int take_down(void **state)
{
    (void)state;
    tokenizer_close((struct tokenizer *)limits.tokenizer);
    request_memory_drop(limits.requests);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_no_piece_is_long),
        cmocka_unit_test(test_no_piece_of_a_trace_is_long),
        cmocka_unit_test(test_an_event_with_a_long_prompt_comes_in_pieces),
        cmocka_unit_test(test_an_error_waits_for_the_end_of_an_event),
        cmocka_unit_test(test_an_error_in_the_middle_of_a_call_is_told),
    };
    return cmocka_run_group_tests(tests, set_up, take_down);
}
