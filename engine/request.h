/* A request and its results: what a front end hands to the engine, and what it reads back.
 *
 *   front end                                    engine thread
 *   request_new, request_set_item
 *   engine_submit ───────► queue ───────────────► admit, then step after step
 *   reads n_out, state (acquire) ◄── wake() ──── after each step that published something
 *   request_release                              drops its own reference when all items are done
 *
 * A request is immutable after submit, except for the fields marked "engine writes": arrays that
 * the engine fills front to back and whose valid length it publishes with a release store. They are
 * allocated at their full, bounded size before submit, so a slow reader never holds up the engine
 * and the engine never allocates. The request is shared by its front end and the engine; the last
 * one to release it frees it. */
#ifndef ENGINE_REQUEST_H
#define ENGINE_REQUEST_H

#include "engine/overlays.h"
#include "engine/request_ablate.h"
#include "engine/request_memory.h"
#include "models/model.h"

#include <stdatomic.h>

enum {
    STOP_MAX = 16,
    STOP_BYTES_MAX = 256,
    STOP_ID_MAX = 64,
    LOGIT_BIAS_MAX = 300,
    ALLOW_MAX = 1024,
    TARGET_MAX = 100,
    /* Tokens of a text where neither the model nor max_model_len sets a limit. */
    ENGINE_TEXT_MAX = 1 << 28
};

enum request_kind { REQUEST_GENERATE, REQUEST_SCORE };
enum priority { PRIORITY_INTERACTIVE, PRIORITY_BULK };

enum finish {
    FINISH_NONE = 0,  /* still waiting or running */
    FINISH_STOP,      /* eos, a stop id or a stop string */
    FINISH_LENGTH,    /* max_tokens (or a context limit) reached; scoring: done */
    FINISH_CANCELLED, /* the client left */
    FINISH_TIMEOUT,   /* deadline passed: in the queue if the item never started */
    FINISH_SHUTDOWN,  /* the server stopped before it was done */
    FINISH_ERROR,     /* the engine failed: request.error says how */
};

/* How tokens are drawn: the validated fields of the contract. */
struct sampling {
    float temperature, top_p, min_p;
    float typical_p; /* (0, 1]; 1 = off, and so is 0 */
    float repetition, presence, frequency;
    int top_k;
    int max_tokens;
    int min_tokens; /* eos and stop ids are not drawn before; stop strings do not count before */
    uint64_t seed;
    bool ignore_eos;
    bool include_stop; /* keep the stop string in the text (front end's use) */
    bool show_control; /* control tokens are part of the text, for stop strings too */
    int n_stop;
    struct {
        char text[STOP_BYTES_MAX];
        int bytes;
    } stop[STOP_MAX];
    int n_stop_id;
    int32_t stop_id[STOP_ID_MAX];
    int n_bias;
    struct {
        int32_t token;
        float bias;
    } bias[LOGIT_BIAS_MAX];
    int n_allow;
    int32_t allow[ALLOW_MAX]; /* distinct */
};

/* What the memories did over an item's positions: one per memory layer. Guard: written by the
 * engine until the item's state is published, read after. Positions in order, weights added in that
 * order. */
struct pkm_trace {
    int64_t lookups; /* positions · heads · k_top */
    int64_t n_position;
    /* Either sums per slot or, if that is less or was asked for, every look-up. The other is
     * NULL. */
    uint32_t *count; /* [n_slot] accesses, those of weight 0 too */
    double *weight;  /* [n_slot] sum of weights */
    int32_t *slots;  /* [position_max, n_head·k_top] */
    float *weights;  /* same shape */
};

/* One prompt and sample, or one document to score. */
struct item {
    int32_t *ids; /* Owner: the request. [n_ids] input tokens, BOS included */
    int64_t n_ids;
    int sample_index; /* keys the random numbers, with seed and prompt_index */
    int prompt_index;
    int max_tokens; /* generation: fewer than the request's, for this item; 0 = as many */
    /* Scoring: ids[score_from ..] are scored; those before are context, which is fed but not
     * scored. 1 .. n_ids; request_set_item turns 0 into 1. */
    int64_t score_from;
    bool traced; /* the memory look-ups are kept; request_set_item decides */
    bool bare;   /* scoring: log-probabilities alone; no alternatives, entropy, targets or trace */
    /* Scoring in blocks, as evaluators of research code do it; 0 = in windows of the request. The
     * ids are cut into blocks of `block` tokens; each is read from an empty cache, and of each the
     * first block_used tokens (2 .. block) take part: all of them but the first one are predicted.
     * What stands behind the last whole block takes no part. score_from is 1, without targets; a
     * memory trace needs block_used == block. */
    int64_t block, block_used;
    int64_t slot_bytes; /* that telling the look-ups takes in an answer: counted with its results */

    /* Engine writes. Valid for reading: the first n_out entries (acquire), all after state. */
    atomic_int n_out;    /* generation: tokens in out_*; scoring: predictions done (progress) */
    atomic_int state;    /* enum finish; != FINISH_NONE means nothing more will be written */
    int32_t *out_id;     /* generation: [item_max_tokens]; scoring: NULL (the tokens are in ids) */
    float *out_logprob;  /* generation: [item_max_tokens] (only if n_top >= 0);
                          * scoring: [n_ids-score_from], log p(ids[score_from+i] | its window) */
    int32_t *out_rank;   /* as out_logprob; 0: not scored, no block predicts it */
    float *out_entropy;  /* scoring with entropy: as out_logprob; else NULL */
    int32_t *out_top_id; /* [.., n_top] if n_top > 0; else NULL */
    float *out_top_logprob;
    float *out_target; /* scoring with targets: [n_target], log p(target[j] | all of ids, or as much
                        * as a window holds); else NULL */
    /* Generation with echo and n_top >= 0: [n_ids], entry 0 unused (NaN). Valid from the first
     * generated token on. */
    float *prompt_logprob;
    int32_t *prompt_rank;
    int32_t *prompt_top_id; /* [n_ids, n_top] */
    float *prompt_top_logprob;
    int32_t stop_id;    /* FINISH_STOP by a token: its id; else -1 */
    int stop_string;    /* FINISH_STOP by a string: its index; else -1 */
    int64_t stop_begin; /* byte in the generated text where that string begins */
    int64_t n_position; /* positions run through, windows' overlaps included */
    int64_t n_cached;   /* of them: taken from the cache instead of being computed */
    int64_t n_own;      /* of those: from pages that requests of the same owner have computed */
    struct pkm_trace *trace; /* [n_memory] or NULL */
};

struct request {
    char id[64];     /* for logs */
    uint64_t client; /* a number for who sent it, for fairness between clients; 0 = unknown */
    bool is_tenant;  /* the client is known to be one of several, by its API key or by its address
                      * behind a trusted proxy: it leaves places to the others even while none of
                      * them waits */
    uint64_t scope;  /* pages of the cache are shared with requests of the same scope only */
    uint64_t owner;  /* n_own counts pages that requests of the same owner have computed */
    enum request_kind kind;
    enum priority priority;
    struct sampling sampling; /* generation */
    int lang;                 /* language id, 0 if the model has none */
    int n_top;                /* -1 = no log-probabilities (generation), 0 = chosen token only */
    bool echo;                /* generation: prompt_* wanted */
    bool entropy;             /* scoring */
    int n_target;             /* scoring: number of tokens to score as continuations of the text */
    int32_t target[TARGET_MAX];
    int64_t window, stride; /* scoring: positions per window, and new predictions per window.
                             * Without a context limit both are ENGINE_TEXT_MAX, and a text is one
                             * stream */
    /* scoring: no position runs twice, so the last window may be shorter: stride is window, and
     * score_from 1 */
    bool is_apart;
    bool trace_memory, trace_tokens;
    int64_t deadline_us; /* clock_now_us() time; 0 = none */
    struct request_ablate ablate;
    struct request_overlays overlays;
    /* Of what these two change in the model, zeros where they change nothing; engine_submit. Pages
     * of the cache are shared only with requests of the same. */
    uint64_t change[2];

    int n_item;
    struct item *item; /* Owner: the request. [n_item] */

    struct request_memory *memory; /* a reference, or NULL: nothing is bounded yet */
    atomic_llong bytes;            /* of ids and result arrays, as long as they are counted there */
    size_t trace_bytes;            /* that the traces of all items will take; request_set_item */
    struct memory_block traces;    /* Guard: the engine thread until the end, then who frees */

    void (*wake)(void *ctx); /* called by the engine thread after it published something; must
                              * not block and not call back into the engine. May be NULL */
    void *wake_ctx;          /* Borrowed: must live until the front end's release returns */
    bool wakes_at_ends; /* only when an item has ended: results of items that run are not read */

    atomic_bool cancel; /* set by the front end: stop within a step */
    struct err error;   /* engine writes, before state FINISH_ERROR */
    /* Engine writes, times by clock_now_us(); 0 = not yet. Atomic so that they can be read live.
     */
    atomic_llong submit_us, start_us, first_us, done_us;
    atomic_int n_item_done; /* items with a state; == n_item means all is over (release) */

    atomic_int refs; /* request_new gives 1; engine_submit takes another */
    /* Keeps wake and request_release apart: 0 idle, 1 in wake, 2 the front end has left. Private to
     * engine/. */
    atomic_int wake_guard;
};

/* Most tokens that an item of a generation may get. */
int item_max_tokens(const struct request *request, const struct item *item);

/* Allocates a request with n_item items, all zero but stop_id/stop_string -1; NULL if out of
 * memory. */
struct request *request_new(enum request_kind kind, int n_item);
/* Counts what the request holds in memory from now on; before request_set_item. Without this call,
 * or with NULL, its arrays are not bounded. */
void request_use_memory(struct request *request, struct request_memory *memory);
/* Takes the ids (malloc'd, ownership passes) of item i and allocates its result arrays after the
 * fields kind, sampling, n_top, n_target, echo, entropy, trace_* and the item's max_tokens,
 * score_from and bare are set. */
enum err_code request_set_item(struct request *request, int i, int32_t *ids, int64_t n_ids,
                               const struct model_info *info, struct err *err);
/* Positions that the request makes the engine compute at most: prompts and max_tokens, or all
 * windows with their overlaps. All items are set. */
int64_t request_positions(const struct request *request);
/* Ends the front end's use: cancels what still runs and drops the front end's reference; the last
 * reference frees. When it returns, wake is not running and will not be called again. It waits for
 * a wake in progress, so do not hold a lock that wake takes. NULL is fine. */
void request_release(struct request *request);
void request_cancel(struct request *request);
/* Counts the arrays no longer, ahead of the release of a request that is over. Returns their bytes.
 * Any thread. */
int64_t request_uncount(struct request *request);

/* Bytes of the memory traces of one item: per memory the least of sums per slot and all look-ups,
 * or with tokens all look-ups. */
size_t request_trace_bytes(const struct model_info *info, int64_t n_ids_and_out, bool tokens);

/* Positions that a text may have, by max_model_len (0 = no limit). */
static inline int engine_context(int max_model_len)
{
    return max_model_len > 0 ? max_model_len : ENGINE_TEXT_MAX;
}

/* ---- engine only --------------------------------------------------------------------------- */

/* With min_tokens, the tokens that end a sequence are banned at first: whether none of those that
 * are allowed remains. */
bool sampling_bans_all(const struct sampling *s, const struct end_ids *ends);

/* What a request is checked against. */
struct request_limits {
    int context;        /* positions that a text may have */
    int n_top_max;      /* largest n_top */
    bool trace;         /* trace_memory is allowed */
    size_t trace_bytes; /* that the traces of a request may take */
    bool tokenizer;     /* there is one: stop strings need it */
};

/* Writes request->change. */
void request_sum_change(struct request *request);

/* Checks everything that the engine relies on: lengths against the context, ids against the
 * vocabulary, sampling against its bounds. *n_position becomes what the request counts in the
 * queue: the positions to compute. ERR_ARGUMENT, the message naming field, limit and value. */
enum err_code request_check(const struct request *request, const struct model_info *info,
                            const struct request_limits *limits, int64_t *n_position,
                            struct err *err);

/* Engine thread: calls wake unless the front end has left. */
void request_wake(struct request *request);
/* Drops the engine's reference. */
void request_drop(struct request *request);

/* Takes the memory of all traces; false: there is not enough now. True at once without traces or
 * when they were taken before. Engine thread. */
bool request_take_traces(struct request *request, const struct model_info *info);

/* Positions of an item's text at most: prompt and max_tokens, or the text. */
int64_t item_position_max(const struct request *request, const struct item *item);
/* Positions that computing an item takes at most. */
int64_t item_positions(const struct request *request, const struct item *item);

#endif
