/* What a request may ask for, and the texts and ids it brings.
 *
 * The parsers of requests (generate.h, score.h) take the body's bytes and these limits and know
 * nothing of HTTP: the routes, the command line and the fuzz target call the same functions. */
#ifndef SERVER_INPUT_H
#define SERVER_INPUT_H

#include "engine/engine.h"
#include "server/json/fields.h"
#include "server/options/options.h"

/* How many of something one request may have. */
struct input_limit {
    int64_t most;
    const char *flag; /* static: the option that sets it, for errors */
};

/* --memory-trace: none, only "summary", or all. */
enum input_memory_limit { MEMORY_TRACE_OFF, MEMORY_TRACE_SUMMARY, MEMORY_TRACE_ON };

/* Fixed once the engine is open. All pointers are borrowed and outlive every request. */
struct api_limits {
    const struct model_info *info;
    const struct tokenizer *tokenizer; /* NULL = the model takes ids only */
    const char *model_name;
    /* Requests are lines of a file: the values for fields that they leave out, and their ids may be
     * integers. NULL = they come by a route. */
    const struct fields *defaults;
    int context;                     /* positions, of at most ENGINE_TEXT_MAX; 0 = no limit */
    struct request_memory *requests; /* what the arrays of requests are counted in */
    struct input_limit trace_bytes;  /* bytes of memory traces of one request */
    struct input_limit max_trace;    /* bytes of slots in the answer of one request */
    struct input_limit max_items, max_score_items, max_score_tokens, max_score_positions;
    int max_logprobs;
    int default_max_tokens;
    int timeout_ms, max_timeout_ms;
    int64_t ping_us;                      /* time between the comments of a silent stream */
    bool strict;                          /* unknown fields are errors */
    enum input_memory_limit memory_trace; /* what "memory" may be */
    bool echo_bos;                        /* unless a completion says otherwise */
    struct overlays *overlays;            /* NULL: there are none */
    const struct overlay_names *binding;  /* of the client's key; NULL = not bound to any overlay */
    char fingerprint[24]; /* of model and build: equal ones give equal answers to equal seeds */
};

/* The limits of an open engine. Borrows from both. */
struct api_limits input_limits(const struct options *options, const struct engine *engine);

/* Bounds of what a request may hold in memory besides its tokens. */
enum {
    /* Bytes of text for each allowed token. Real texts stay far below this, and a text that has
     * more is refused before it is tokenised. */
    INPUT_BYTES_PER_TOKEN = 64,
    INPUT_TRACE_POSITIONS_MAX = 512, /* positions of an item with "memory":"tokens" */
};

/* One prompt or document. */
struct input {
    const char *text; /* Borrowed from the body, or own; NULL when given as ids */
    size_t text_bytes;
    char *own;    /* Owner: this. The text, where it is put together from parts; else NULL */
    int32_t *ids; /* Owner: this until request_set_item takes them. [n_ids], BOS first */
    int64_t n_ids;
    int n_bos;    /* ids that the server put in front: 0 or 1, more only for blocks of scoring */
    int n_eos;    /* ids that it put behind: 0 or 1 */
    bool special; /* as input_marks says */
    /* Owner: this. [n_ids - n_bos - n_eos] first byte of each token; NULL for ids */
    size_t *offsets;
};

struct input_list {
    struct input *input; /* Owner: this. [n] */
    int n;
};

void input_list_free(struct input_list *list);

/* Passes on the error of request_set_item. Returns false. */
bool input_item_error(struct api_error *error, const struct err *err);
/* The traces of the request's n items take too much memory. Returns false. */
bool input_traces_too_large(struct api_error *error, int n, const struct api_limits *limits);

/* Whether BOS is put before texts and before ids, and EOS after either. */
struct input_marks {
    bool bos_text, bos_ids, eos;
    int32_t prefix; /* the token used in place of BOS; 0 = BOS */
    bool special;   /* special tokens that a text spells become those tokens */
};

/* What a field of inputs may hold. */
struct input_rules {
    const char *name; /* of the field, for errors */
    bool text, ids;   /* which of them; both are possible */
    struct input_marks marks;
    struct input_limit items;         /* the inputs */
    const struct input_limit *tokens; /* the ids of all of them together; NULL = as many as come */
};

/* Reads value (str, [str], [int] or [[int]], as far as rules allow) and tokenises. */
bool input_read(struct input_list *list, struct json_t *value, const struct input_rules *rules,
                const struct api_limits *limits, struct api_error *error);

/* The two halves of reading one: ids and offsets of text, and what goes around the ids. place:
 * where it stands, "pairs[3].context" of the field "pairs", for errors. */
bool input_tokenise(struct input *input, const char *place, const struct api_limits *limits,
                    struct api_error *error);
bool input_add_marks(struct input *input, const char *place, struct input_marks marks,
                     const struct model_info *info, struct api_error *error);

/* A list of token ids below n_vocab, at most tokens; NULL = as many as there are. *ids is malloc'd.
 * false: error. */
bool input_ids(const struct json_t *value, const char *place, const struct input_limit *tokens,
               int n_vocab, int32_t **ids, int64_t *n_ids, struct api_error *error);

/* A limit is exceeded: n items where items are the most, or more tokens than that. Both return
 * false. */
bool input_too_many_items(struct api_error *error, const char *param, size_t n,
                          struct input_limit items);
bool input_too_many_tokens(struct api_error *error, const char *param, struct input_limit tokens);

/* Fields that several requests share. */
enum input_memory { MEMORY_OFF, MEMORY_SUMMARY, MEMORY_TOKENS, MEMORY_SLOTS };
void input_model(struct fields *fields, const struct api_limits *limits);
void input_language(struct fields *fields, const struct api_limits *limits, int *lang);
enum input_memory input_memory(struct fields *fields, const struct api_limits *limits);
/* PRIORITY_*, or -1 if not given. */
int input_priority(struct fields *fields);
int64_t input_deadline(struct fields *fields, const struct api_limits *limits);
/* cache_salt, 1 ... 1024 bytes: the scope of the cached pages that the request may use, 0 if not
 * given. Who does not know the salt cannot find them, nor tell from times that they are there. */
uint64_t input_cache_scope(struct fields *fields);
/* The client's own name of the request, id or request_id: at most id_max - 1 bytes. "" if not
 * given. Whether it is an integer, in a line of a file. */
bool input_id(struct fields *fields, char *id, size_t id_max);
/* Fields of other servers that would change the answer: each is refused by its name, unless its
 * value says that it is not wanted, or the dialect has asked for it before. */
void input_refuse(struct fields *fields);

#endif
