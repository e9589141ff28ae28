/* The native answer of a generation: see generate.h. */
#include "server/generate.h"

#include "server/gentext.h"

const struct input *generate_input(const struct generate_job *job, int item)
{
    return &job->inputs.input[item / job->n_sample];
}

int64_t generate_n_prompt(const struct generate_job *job)
{
    int64_t n = 0;
    for (int i = 0; i < job->inputs.n; i++) {
        n += job->inputs.input[i].n_ids;
    }
    return n;
}

int64_t generate_n_completion(const struct generate_job *job)
{
    int64_t n = 0;
    for (int i = 0; i < job->request->n_item; i++) {
        n += atomic_load(&job->request->item[i].n_out);
    }
    return n;
}

/* ---- tokens -------------------------------------------------------------------------------- */

struct answer_token generate_token(const struct generate_job *job, const struct item *item, int i,
                                   int64_t offset)
{
    const struct request *const request = job->request;
    struct answer_token token = {
        .id = item->out_id[i], .offset = offset, .logprob = item->out_logprob[i], .n_top = -1};
    if (job->logprobs >= 0) {
        token.has_bytes = true;
        token.has_rank = true;
        token.rank = item->out_rank[i];
        token.n_top = request->n_top;
    }
    if (token.n_top > 0) {
        token.top_id = item->out_top_id + (int64_t)i * request->n_top;
        token.top_logprob = item->out_top_logprob + (int64_t)i * request->n_top;
    }
    return token;
}

bool generate_write_prompt(struct text *out, const struct generate_job *job, int item_index,
                           const struct tokenizer *tokenizer, struct api_error *error)
{
    const struct request *const request = job->request;
    const struct item *const item = &request->item[item_index];
    const struct input *const input = generate_input(job, item_index);
    struct answer_walk walk;
    if (!answer_walk_begin(&walk, input, tokenizer)) {
        return api_error_set(error, 500, "out_of_memory", NULL, "no memory for the answer");
    }
    for (int64_t i = input->n_bos; i < item->n_ids; i++) {
        struct answer_token token = {.id = item->ids[i],
                                     .offset =
                                         answer_walk_next(&walk, i - input->n_bos, item->ids[i]),
                                     .first = i == 0,
                                     .logprob = item->prompt_logprob[i],
                                     .has_bytes = true,
                                     .has_rank = true,
                                     .rank = item->prompt_rank[i],
                                     .n_top = request->n_top};
        if (request->n_top > 0) {
            token.top_id = item->prompt_top_id + i * request->n_top;
            token.top_logprob = item->prompt_top_logprob + i * request->n_top;
        }
        answer_put_token(out, tokenizer, &token);
    }
    answer_walk_end(&walk);
    return true;
}

/* ---- choices ------------------------------------------------------------------------------- */

void generate_write_finish(struct text *out, const struct item *item,
                           const struct sampling *sampling)
{
    const bool stop = atomic_load(&item->state) == FINISH_STOP;
    json_field_string(out, "finish_reason", stop ? "stop" : "length");
    json_key(out, "stop_reason");
    if (item->stop_string >= 0) {
        json_string_n(out, sampling->stop[item->stop_string].text,
                      (size_t)sampling->stop[item->stop_string].bytes);
    } else if (item->stop_id >= 0) {
        json_put_int(out, item->stop_id);
    } else {
        json_put_null(out);
    }
}

/* "text" (prompt first with echo) and "logprobs" are made in one walk over the tokens. */
static bool write_text_and_logprobs(struct text *out, const struct generate_job *job, int index,
                                    const struct api_limits *limits, struct api_error *error)
{
    const struct item *const item = &job->request->item[index];
    const struct input *const input = generate_input(job, index);
    const int n_out = atomic_load(&item->n_out);
    const enum finish state = (enum finish)atomic_load(&item->state);
    struct text text = {0};
    struct text list = {0};
    struct gentext gen = {0};
    bool ok = true;
    if (job->echo) {
        ok = answer_input_text(&text, input, item->ids, limits->tokenizer, error);
    }
    const int64_t before = text_count_chars(text.data != NULL ? text.data : "", text.n);
    ok = ok && (gentext_begin(&gen, job->request, item, limits->tokenizer, limits->info->eos_id) ||
                api_error_set(error, 500, "out_of_memory", NULL, "no memory for the answer"));
    if (ok && job->echo && job->logprobs >= 0) {
        ok = generate_write_prompt(&list, job, index, limits->tokenizer, error);
    }
    for (int i = 0; ok && i < n_out; i++) {
        const int64_t offset = gentext_push(&gen, state, n_out, &text);
        if (job->logprobs >= 0) {
            const struct answer_token token =
                generate_token(job, item, i, offset >= 0 ? before + offset : -1);
            answer_put_token(&list, limits->tokenizer, &token);
        }
    }
    if (ok) {
        gentext_flush(&gen, &text);
        json_key(out, "text");
        if (limits->tokenizer != NULL) {
            json_string_n(out, text.data, text.n);
        } else {
            json_put_null(out);
        }
        json_key(out, "token_ids");
        json_open(out, '[');
        for (int64_t i = job->echo ? input->n_bos : item->n_ids; i < item->n_ids; i++) {
            json_put_int(out, item->ids[i]);
        }
        for (int i = 0; i < n_out; i++) {
            json_put_int(out, item->out_id[i]);
        }
        json_close(out, ']');
        generate_write_finish(out, item, &job->request->sampling);
        json_key(out, "logprobs");
        if (job->logprobs >= 0) {
            json_open(out, '[');
            text_add(out, list.data, list.n);
            json_close(out, ']');
        } else {
            json_put_null(out);
        }
        out->failed = out->failed || text.failed || list.failed;
    }
    gentext_end(&gen);
    text_free(&text);
    text_free(&list);
    return ok;
}

/* ---- the rest ------------------------------------------------------------------------------ */

static void write_ids(struct text *out, const char *name, const int32_t *ids, int n)
{
    json_key(out, name);
    json_open(out, '[');
    for (int i = 0; i < n; i++) {
        json_put_int(out, ids[i]);
    }
    json_close(out, ']');
}

/* What the request came down to: every sampling field with the value that was used. */
static void write_params(struct text *out, const struct generate_job *job)
{
    const struct sampling *const s = &job->request->sampling;
    json_key(out, "params");
    json_open(out, '{');
    json_field_int(out, "max_tokens", s->max_tokens);
    json_field_int(out, "min_tokens", s->min_tokens);
    json_field_float(out, "temperature", s->temperature);
    json_field_float(out, "top_p", s->top_p);
    json_field_int(out, "top_k", s->top_k);
    json_field_float(out, "min_p", s->min_p);
    json_field_float(out, "repetition_penalty", s->repetition);
    json_field_float(out, "presence_penalty", s->presence);
    json_field_float(out, "frequency_penalty", s->frequency);
    json_key(out, "logit_bias");
    json_open(out, '{');
    for (int i = 0; i < s->n_bias; i++) {
        char id[16];
        (void)snprintf(id, sizeof id, "%d", s->bias[i].token);
        json_field_float(out, id, s->bias[i].bias);
    }
    json_close(out, '}');
    write_ids(out, "allowed_token_ids", s->allow, s->n_allow);
    write_ids(out, "stop_token_ids", s->stop_id, s->n_stop_id);
    json_key(out, "stop");
    json_open(out, '[');
    for (int i = 0; i < s->n_stop; i++) {
        json_string_n(out, s->stop[i].text, (size_t)s->stop[i].bytes);
    }
    json_close(out, ']');
    json_field_bool(out, "ignore_eos", s->ignore_eos);
    json_field_bool(out, "include_stop", s->include_stop);
    json_field_int(out, "n", job->n_sample);
    json_key(out, "seed");
    json_put_uint(out, s->seed);
    json_field_string(out, "priority",
                      job->request->priority == PRIORITY_BULK ? "bulk" : "interactive");
    json_close(out, '}');
}

void generate_write_tail(struct text *out, const struct generate_job *job,
                         const struct answer_meta *meta)
{
    const struct request *const request = job->request;
    const int64_t n_prompt = generate_n_prompt(job);
    const int64_t n_completion = generate_n_completion(job);
    answer_usage(out, n_prompt, n_completion);
    json_key(out, "seed");
    json_put_uint(out, request->sampling.seed);
    if (job->details) {
        write_params(out, job);
    }
    int64_t n_decoded = 0;
    for (int i = 0; i < request->n_item; i++) {
        const int n_out = atomic_load(&request->item[i].n_out);
        n_decoded += n_out > 1 ? n_out - 1 : 0;
    }
    answer_timings(out, request, meta->begin_us, n_prompt, n_decoded);
}

bool generate_write(struct text *out, const struct generate_job *job,
                    const struct api_limits *limits, const struct answer_meta *meta,
                    struct api_error *error)
{
    const struct request *const request = job->request;
    if (!answer_check(request, error)) {
        return false;
    }
    json_open(out, '{');
    answer_head(out, meta, "generation");
    json_key(out, "choices");
    json_open(out, '[');
    for (int i = 0; i < request->n_item; i++) {
        json_open(out, '{');
        json_field_int(out, "index", i);
        if (!write_text_and_logprobs(out, job, i, limits, error)) {
            return false;
        }
        if (job->memory != MEMORY_OFF &&
            !answer_memory(out, &request->item[i], limits->info, job->memory, error)) {
            return false;
        }
        json_close(out, '}');
    }
    json_close(out, ']');
    generate_write_tail(out, job, meta);
    json_close(out, '}');
    return true;
}
