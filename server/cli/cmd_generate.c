/* `pkmserve generate`: continues a prompt. The options become the body of a /generate request,
 * which the code of that route parses; its text is printed as it comes. */
#include "engine/clock.h"
#include "server/cli/jsonl.h"
#include "server/generate/generate_writer.h"
#include "server/io/text_stream.h"
#include "server/json/json.h"

#include <unistd.h>

struct generation {
    const struct options *options;
    struct cmd_engine ce;
    struct generate_job job;
    struct text_stream gen;
    bool streams;     /* text goes out as it comes */
    int n_id_printed; /* --ids */
    bool no_memory;   /* a part of the text was not printed */
};

static enum err_code put_prompt(struct text *body, const struct options *options, int n_vocab,
                                struct err *err)
{
    const char *const prompt = options->n_operand > 0 ? options->operand[0] : "-";
    const bool file = prompt[0] == '-' && prompt[1] == '\0';
    struct text input = {0};
    enum err_code code = ERR_OK;
    if (file) {
        code = cmd_read_file(&input, prompt, err);
    } else {
        text_puts(&input, prompt);
    }
    json_key(body, "prompt");
    if (code == ERR_OK && input.failed) {
        code = err_set(err, ERR_MEMORY, "no memory for the prompt");
    }
    if (code == ERR_OK) {
        code = cmd_put_input(body, &input, options->ids, n_vocab,
                             file ? "standard input" : "the prompt", err);
    }
    text_free(&input);
    return code;
}

/* An option that was not given is left out, so that the model's recommendation holds. */
static void put_given(struct text *body, const char *name, double value)
{
    if (value > OPTION_NOT_GIVEN) {
        json_field_double(body, name, value);
    }
}

static void put_sampling(struct text *body, const struct options *options)
{
    if (options->max_tokens != OPTION_INT_NOT_GIVEN) {
        json_field_int(body, "max_tokens", options->max_tokens);
    }
    json_field_int(body, "min_tokens", options->min_tokens);
    if (options->top_k != OPTION_INT_NOT_GIVEN) {
        json_field_int(body, "top_k", options->top_k);
    }
    put_given(body, "temperature", options->temperature);
    put_given(body, "top_p", options->top_p);
    put_given(body, "min_p", options->min_p);
    put_given(body, "repetition_penalty", options->repetition_penalty);
    json_field_double(body, "typical_p", options->typical_p);
    json_field_double(body, "presence_penalty", options->presence_penalty);
    json_field_double(body, "frequency_penalty", options->frequency_penalty);
    json_field_bool(body, "ignore_eos", options->ignore_eos);
    if (options->stop[0] != '\0') {
        json_field_string(body, "stop", options->stop);
    }
    if (options->has_seed) {
        json_key(body, "seed");
        json_put_uint(body, options->seed);
    }
    cmd_put_language(body, options);
}

static enum err_code parse(struct generation *it, struct err *err)
{
    struct text body = {0};
    json_open(&body, '{');
    put_sampling(&body, it->options);
    enum err_code code = put_prompt(&body, it->options, it->ce.limits.info->n_vocab, err);
    code = code == ERR_OK ? cmd_put_ablate(&body, it->options, err) : code;
    json_close(&body, '}');
    if (code == ERR_OK && body.failed) {
        code = err_set(err, ERR_MEMORY, "no memory for the prompt");
    }
    struct api_error error = {0};
    if (code == ERR_OK &&
        !generate_parse(&it->job, &generate_native, body.data, body.n, &it->ce.limits, &error)) {
        code = cmd_refused(&error, err);
    }
    text_free(&body);
    return code;
}

static void print_text(struct generation *it, int n_out, enum finish state)
{
    struct text out = {0};
    while (text_stream_ready(&it->gen, n_out, state)) {
        text_stream_push(&it->gen, state, n_out, &out);
    }
    if (state != FINISH_NONE) {
        text_stream_flush(&it->gen, &out);
    }
    if (out.n > 0) {
        fwrite(out.data, 1, out.n, stdout);
    }
    it->no_memory = it->no_memory || out.failed;
    text_free(&out);
}

/* Prints what has come since the last look. */
static void look(void *ctx)
{
    struct generation *const it = ctx;
    const struct item *const item = &it->job.request->item[0];
    /* Read the state first: if it says the end, all results are there. */
    const enum finish state = (enum finish)atomic_load(&item->state);
    const int n_out = atomic_load(&item->n_out);
    if (!it->streams) {
        return;
    }
    if (it->options->ids) {
        for (; it->n_id_printed < n_out; it->n_id_printed++) {
            printf("%s%d", it->n_id_printed ? " " : "", item->out_id[it->n_id_printed]);
        }
    } else {
        print_text(it, n_out, state);
    }
    fflush(stdout);
}

static enum err_code print_json(const struct generation *it, int64_t begin_us, struct err *err)
{
    const struct answer_meta meta = cmd_meta(it->options, begin_us);
    struct text out = {0};
    struct api_error error = {0};
    const bool ok = answer_check(it->job.request, &error) &&
                    generate_write(&out, &it->job, &it->ce.limits, &meta, &error);
    return cmd_print_answer(&out, ok ? NULL : &error, err);
}

/* Ends the streamed text; prints on standard error the seed that was drawn and, on a terminal, how
 * the generation went. */
static enum err_code print_end(const struct generation *it, struct err *err)
{
    const struct request *const request = it->job.request;
    struct api_error error = {0};
    putchar('\n');
    if (it->no_memory) {
        return err_set(err, ERR_MEMORY, "no memory for the text: a part of it was not printed");
    }
    if (!answer_check(request, &error)) {
        return cmd_refused(&error, err);
    }
    const unsigned long long seed = request->sampling.seed;
    if (isatty(STDERR_FILENO) == 1) {
        const int n = atomic_load(&request->item[0].n_out);
        const double seconds =
            (double)(atomic_load(&request->done_us) - atomic_load(&request->start_us)) / 1e6;
        fprintf(stderr, "[tokens %d, %.1f tokens/s, seed %llu]\n", n, n / seconds, seed);
    } else if (!it->options->has_seed && request->sampling.temperature > 0) {
        fprintf(stderr, "[seed %llu]\n", seed);
    }
    return ERR_OK;
}

/* ---- lines ---------------------------------------------------------------------------------- */

static bool line_parse(union jsonl_job *job, const char *body, size_t bytes,
                       const struct api_limits *limits, struct api_error *error)
{
    return generate_parse(&job->generate, &generate_native, body, bytes, limits, error);
}

static struct request *line_request(const union jsonl_job *job)
{
    return job->generate.request;
}

static void line_id(const union jsonl_job *job, struct answer_meta *meta)
{
    if (job->generate.id[0] != '\0') {
        meta->id = job->generate.id;
        meta->id_is_integer = job->generate.id_is_integer;
    }
}

static bool line_write(struct text *out, const union jsonl_job *job, uint64_t fields,
                       const struct api_limits *limits, const struct answer_meta *meta,
                       struct api_error *error)
{
    (void)fields; /* of results of scoring */
    return generate_write(out, &job->generate, limits, meta, error);
}

static int64_t line_n_token(const union jsonl_job *job)
{
    return generate_n_completion(&job->generate);
}

static void line_free(union jsonl_job *job)
{
    generate_free(&job->generate);
}

static const struct jsonl_kind lines = {.doing = "generating",
                                        .text_field = "prompt",
                                        .put_defaults = put_sampling,
                                        .parse = line_parse,
                                        .request = line_request,
                                        .id = line_id,
                                        .write = line_write,
                                        .n_token = line_n_token,
                                        .free = line_free};

int cmd_generate(const struct options *options)
{
    if (options->jsonl) {
        return jsonl_run(options, &lines);
    }
    struct generation it = {.options = options, .streams = !options->json};
    const int64_t begin_us = clock_now_us();
    struct err err;
    enum err_code code = cmd_engine_open(&it.ce, options, &err);
    if (code == ERR_OK) {
        code = parse(&it, &err);
    }
    if (code == ERR_OK && !text_stream_begin(&it.gen, it.job.request, &it.job.request->item[0],
                                             it.ce.limits.tokenizer, &it.ce.limits.info->ends)) {
        code = err_set(&err, ERR_MEMORY, "no memory for the text");
    }
    if (code == ERR_OK) {
        code = cmd_engine_run(&it.ce, it.job.request, look, &it, &err);
    }
    if (code == ERR_OK) {
        look(&it);
        code = options->json ? print_json(&it, begin_us, &err) : print_end(&it, &err);
    }
    text_stream_end(&it.gen);
    generate_free(&it.job);
    cmd_engine_close(&it.ce);
    return code == ERR_OK ? 0 : cmd_fail(&err);
}
