/* One generation: from the bytes of a request to the native answer.
 *
 *   generate_parse → engine_submit(job.request) → wait for n_item_done == n_item → generate_write
 *
 * Used by POST /generate, its stream and the command line, so that there is one way. */
#ifndef SERVER_GENERATE_H
#define SERVER_GENERATE_H

#include "server/answer.h"

enum { GENERATE_SAMPLE_MAX = 8, JOB_ID_MAX = 129 };

struct generate_job {
    json_t *body;             /* Owner: this. Texts are borrowed from it */
    struct input_list inputs; /* Owner: this; their ids belong to the request */
    struct request *request;  /* Owner: one reference. Item = input · n_sample + sample */
    int n_sample;
    int logprobs; /* -1 = not asked for; a stream computes those of the chosen tokens anyway */
    bool echo, stream, details;
    enum input_memory memory;
    char id[JOB_ID_MAX]; /* the client's, "" = none */
    char ignored[FIELDS_IGNORED_MAX];
};

/* Reads and checks everything, tokenises, fills the request (all but id and wake). false: error
 * says why. The job must be freed in either case. */
bool generate_parse(struct generate_job *job, const char *body, size_t bytes,
                    const struct api_limits *limits, struct api_error *error);
/* Cancels what still runs. Zeroed is fine. */
void generate_free(struct generate_job *job);

int64_t generate_n_prompt(const struct generate_job *job);
int64_t generate_n_completion(const struct generate_job *job);

/* The whole answer. false: an item failed; what was written is useless. */
bool generate_write(struct text *out, const struct generate_job *job,
                    const struct api_limits *limits, const struct answer_meta *meta,
                    struct api_error *error);

/* ---- pieces that the stream shares --------------------------------------------------------- */

const struct input *generate_input(const struct generate_job *job, int item);
/* "finish_reason" and "stop_reason" of an item that is over. */
void generate_write_finish(struct text *out, const struct item *item,
                           const struct sampling *sampling);
/* "usage", "seed", "params" (with details) and "timings". */
void generate_write_tail(struct text *out, const struct generate_job *job,
                         const struct answer_meta *meta);
/* Token i of the continuation. */
struct answer_token generate_token(const struct generate_job *job, const struct item *item, int i,
                                   int64_t offset);
/* The entries of the prompt, as elements of an open list; without the BOS that the server added. */
bool generate_write_prompt(struct text *out, const struct generate_job *job, int item,
                           const struct tokenizer *tokenizer, struct api_error *error);

#endif
