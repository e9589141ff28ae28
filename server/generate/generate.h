/* One generation: from the bytes of a request to an answer, in any of the dialects.
 *
 *   generate_parse → engine_submit(job.request) → wait for n_item_done == n_item → generate_write
 *                                               → or sse.h, which tells events as it goes
 *
 * A dialect is how clients of one family write requests and read answers: the native one
 * (generate_parse.c, native_write.c), OpenAI's completions (openai.h), TGI's (tgi.h). They share
 * the readers of fields (generate_read.h), the job and the writer of its answer
 * (generate_writer.h), and all that comes after. Used by the routes and the command line, so that
 * there is one way. */
#ifndef SERVER_GENERATE_H
#define SERVER_GENERATE_H

#include "server/io/ablate.h"
#include "server/io/overlay.h"
#include "server/io/answer.h"
#include "server/io/slots.h"

enum { GENERATE_SAMPLE_MAX = 8, JOB_ID_MAX = 129 };

struct exchange_errors;

struct generate_job {
    const struct generate_dialect *dialect; /* Borrowed: static */
    struct json_t *body;                    /* Owner: this. Texts are borrowed from it */
    struct input_list inputs;               /* Owner: this; their ids belong to the request */
    struct request *request; /* Owner: one reference. Item = input · n_sample + sample */
    int n_sample;
    int logprobs;        /* of the continuation, with echo of the prompt too; -1 = not asked for */
    int prompt_logprobs; /* of the prompt, in a list of its own; -1 = not asked for */
    bool echo, stream, details;
    enum input_memory memory;
    struct slots_wish slots;          /* with MEMORY_SLOTS */
    struct request_ablate ablate;     /* until the request takes it */
    struct request_overlays overlays; /* likewise */
    char id[JOB_ID_MAX];              /* the client's, "" = none */
    bool id_is_integer;
    char ignored[FIELDS_IGNORED_MAX];

    /* For the request, until it is made. */
    int n_top, lang;
    enum priority priority;

    /* What only one dialect asks for. */
    struct {
        bool usage, usage_always; /* in streams: at the end, in each chunk */
        bool ids;                 /* token ids beside the text */
        bool tokens_as_ids;       /* tokens are spelled token_id:N */
        bool echo_bos;            /* echo lists a BOS that the server put in front */
    } openai;
    struct {
        bool sampled; /* the seed mattered */
        bool listed;  /* the answer is a list of one */
        bool tops;    /* the best tokens are listed */
    } tgi;
};

/* What can be reported about a choice at some moment of a stream. */
struct generate_event {
    int item;
    bool first;              /* nothing was reported about it before: with echo the prompt comes
                              * now */
    int token;               /* index of a new token; -1 = none */
    int64_t offset;          /* its offset, in characters of the continuation; -1 = unknown */
    const struct text *text; /* what the token let out */
    const char *fresh;       /* [n_fresh] the characters that the token completed */
    size_t n_fresh;
    bool last;               /* the choice is over */
    const struct text *rest; /* last: what was held back until then */
    bool all;                /* last: so are all others */
};

/* See generate_writer.h. */
struct generate_writer;
typedef bool generate_part(struct generate_writer *writer, struct text *out,
                           struct api_error *error);

struct generate_dialect {
    const char *id_prefix;                /* of the answer's id */
    const struct exchange_errors *errors; /* how errors are written; NULL = as OpenAI does */
    const char *end;                      /* what a stream ends with */
    /* Reads and checks all fields, tokenises. *sampling is zero. false: error says why. */
    bool (*read)(struct generate_job *job, struct fields *fields, struct sampling *sampling,
                 const struct api_limits *limits);
    /* What a choice of a whole answer is made of, and what is told of a choice in a stream, as it
     * goes over the wire: in order, ended by NULL. The first choice also has what precedes all of
     * them, the last one what follows them. */
    generate_part *const *choice, *const *event;
};

extern const struct generate_dialect generate_native;
extern const struct generate_dialect generate_route; /* POST /generate: the native or TGI's */
/* The native parts, in native_write.c. */
extern generate_part *const native_choice_parts[];
extern generate_part *const native_event_parts[];

/* Reads and checks everything, tokenises, fills the request (all but id and wake). false: error
 * says why. The job must be freed in either case. A body in another dialect than the given one is
 * read in its own: job->dialect tells which, also after an error. */
bool generate_parse(struct generate_job *job, const struct generate_dialect *dialect,
                    const char *body, size_t bytes, const struct api_limits *limits,
                    struct api_error *error);
/* Cancels what still runs. Zeroed is fine. */
void generate_free(struct generate_job *job);

int64_t generate_n_prompt(const struct generate_job *job);
int64_t generate_n_completion(const struct generate_job *job);

/* ---- what the dialects' answers share ------------------------------------------------------- */

const struct input *generate_input(const struct generate_job *job, int item);

/* Token i of the continuation. */
struct answer_token generate_token(const struct generate_job *job, const struct item *item, int i,
                                   int64_t offset);
/* "finish_reason" and "stop_reason" of an item that is over. */
void generate_write_finish(struct text *out, const struct item *item,
                           const struct sampling *sampling);
/* Begin and end one event around a JSON object. */
void generate_event_open(struct text *out);
void generate_event_close(struct text *out);

#endif
