/* What the answers of all dialects share: see generate.h. */
#include "server/generate/generate.h"

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
    const int32_t *const ids = i > 0 ? item->out_id + i : item->ids + item->n_ids;
    struct answer_token token = {.id = item->out_id[i],
                                 .before = i > 0 || item->n_ids > 0 ? ids[-1] : -1,
                                 .offset = offset,
                                 .n_top = -1};
    if (item->out_logprob != NULL) {
        token.logprob = item->out_logprob[i];
    }
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

/* ---- pieces of answers --------------------------------------------------------------------- */

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

void generate_event_open(struct text *out)
{
    text_puts(out, "data: ");
    out->comma = false;
    json_open(out, '{');
}

void generate_event_close(struct text *out)
{
    json_close(out, '}');
    text_puts(out, "\n\n");
}
