/* The engine: owns time. Who runs, when, and where tokens go.
 *
 * One thread, started by engine_open, owns the backend, the model, the cache pages and the
 * sequences; nothing inside engine/ is locked but the queue. The other threads build a struct
 * request, submit it, and read its results while the engine appends to them.
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
#ifndef ENGINE_ENGINE_H
#define ENGINE_ENGINE_H

#include "engine/stats.h"
#include "engine/tokenizer.h"
#include "models/model.h"

#include <stdatomic.h>

/* ---- requests ----------------------------------------------------------------------------- */

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
struct memory_trace {
    int64_t lookups; /* positions · heads · k_top */
    int64_t n_position;
    uint32_t *count; /* [n_slot] accesses, those of weight 0 too */
    double *weight;  /* [n_slot] sum of shares */
    int32_t *slots;  /* [position_max, n_head·k_top] or NULL: only with "tokens" */
    float *shares;   /* same shape */
};

/* One prompt and sample, or one document to score. */
struct item {
    int32_t *ids; /* Owner: the request. [n_ids] input tokens, BOS included */
    int64_t n_ids;
    int sample_index; /* keys the random numbers, with seed and prompt_index */
    int prompt_index;
    int max_tokens; /* generation: fewer than the request's, for this item; 0 = as many */
    /* Scoring: ids[score_from ..] are scored, what stands before is context, of which nothing is
     * computed but what they attend to. 1 .. n_ids; request_set_item makes 0 a 1. */
    int64_t score_from;
    bool bare; /* scoring: log-probabilities alone; no alternatives, entropy, targets or trace */

    /* Engine writes. Valid for reading: the first n_out entries (acquire), all after state. */
    atomic_int n_out;    /* generation: tokens in out_*; scoring: predictions done (progress) */
    atomic_int state;    /* enum finish; != FINISH_NONE means nothing more will be written */
    int32_t *out_id;     /* generation: [item_max_tokens]; scoring: NULL (the tokens are in ids) */
    float *out_logprob;  /* generation: [item_max_tokens] (only if n_top >= 0);
                          * scoring: [n_ids-score_from], log p(ids[score_from+i] | its window) */
    int32_t *out_rank;   /* as out_logprob */
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
    int32_t stop_id;            /* FINISH_STOP by a token: its id; else -1 */
    int stop_string;            /* FINISH_STOP by a string: its index; else -1 */
    int64_t stop_begin;         /* byte in the generated text where that string begins */
    int64_t n_position;         /* positions run through, windows' overlaps included */
    int64_t n_cached;           /* of them: taken from the cache instead of being computed */
    struct memory_trace *trace; /* [n_memory] or NULL */
};

struct request {
    char id[64]; /* for logs */
    enum request_kind kind;
    enum priority priority;
    struct sampling sampling; /* generation */
    int lang;                 /* language id, 0 if the model has none */
    int n_top;                /* -1 = no log-probabilities (generation), 0 = chosen token only */
    bool echo;                /* generation: prompt_* wanted */
    bool entropy;             /* scoring */
    int n_target;             /* scoring: tokens whose log-probability behind the text is wanted */
    int32_t target[TARGET_MAX];
    int64_t window, stride; /* scoring: positions per window, new predictions per window; without a
                             * context limit ENGINE_TEXT_MAX, which makes one stream of a text */
    bool trace_memory, trace_tokens;
    int64_t deadline_us; /* engine_now_us() time; 0 = none */

    int n_item;
    struct item *item; /* Owner: the request. [n_item] */

    void (*wake)(void *ctx); /* called by the engine thread after it published something; must
                              * not block and not call back into the engine. May be NULL */
    void *wake_ctx;          /* Borrowed: must live until the front end's release returns */

    atomic_bool cancel; /* set by the front end: stop within a step */
    struct err error;   /* engine writes, before state FINISH_ERROR */
    /* Engine writes, times by engine_now_us(); 0 = not yet. Atomic so that they can be read live.
     */
    atomic_llong submit_us, start_us, first_us, done_us;
    atomic_int n_item_done; /* items with a state; == n_item means all is over (release) */

    atomic_int refs; /* request_new gives 1; engine_submit takes another */
    /* Keeps wake and the front end's release apart: 0 idle, 1 in wake, 2 the front end has left.
     * Private to engine/. */
    atomic_int wake_guard;
};

/* Tokens that an item of a generation ends with at the latest. */
int item_max_tokens(const struct request *request, const struct item *item);

/* Allocates a request with n_item items, all zero but stop_id/stop_string -1; NULL if out of
 * memory. */
struct request *request_new(enum request_kind kind, int n_item);
/* Takes the ids (malloc'd, ownership passes) of item i and allocates its result arrays after the
 * fields kind, sampling, n_top, n_target, echo, entropy, trace_* and the item's max_tokens,
 * score_from and bare are set. */
enum err_code request_set_item(struct request *request, int i, int32_t *ids, int64_t n_ids,
                               const struct model_info *info, struct err *err);
/* The front end's last use: cancels what still runs and drops the front end's reference; the last
 * reference frees. When it returns, wake is not running and will not be called again; it waits for
 * a wake in flight, so do not hold a lock that wake takes. NULL is fine. */
void request_release(struct request *request);
void request_cancel(struct request *request);

/* Bytes of memory_trace for one item: the front end bounds the sum before it allocates. */
size_t request_trace_bytes(const struct model_info *info, int64_t n_ids_and_out, bool tokens);

/* ---- the engine --------------------------------------------------------------------------- */

/* The strings and the contexts are borrowed: they must outlive the engine. */
struct engine_options {
    const char *model_dir;
    const char *tokenizer_path; /* NULL = in model_dir */
    struct backend_options backend;
    struct model_options model;
    int max_model_len;        /* 0 = the model's context; still 0 = it has no limit */
    int max_seqs;             /* sequences running at once */
    int max_batch_tokens;     /* rows of one step */
    int bulk_step_ms;         /* time of a step that bulk rows share with generations; 0 = any */
    int max_queue;            /* waiting requests */
    int64_t max_queue_tokens; /* their tokens together (prompt + max_tokens; scoring: ids) */
    int64_t kv_tokens;        /* cache size in positions; 0 = max_seqs · context (without a limit:
                               * what the model sees), at most a quarter of the memory that is
                               * free, or all but a tenth of a device's own */
    int max_logprobs;         /* largest n_top */
    bool memory_trace;        /* allow trace_memory */
    bool failures_told;       /* a tool: who submits says what has failed, and the log does not */
    bool prefix_cache; /* compute equal beginnings of texts once; off where pages are a ring */
    /* Called once by the engine thread after it has failed and ended all work; must not block and
     * not call back into the engine. May be NULL. */
    void (*failed)(void *ctx);
    void *failed_ctx;
};

enum engine_state { ENGINE_LOADING, ENGINE_READY, ENGINE_DRAINING, ENGINE_FAILED, ENGINE_STOPPED };

struct engine;

/* Positions that a text may have, by the engine's max_model_len. */
static inline int engine_context(int max_model_len)
{
    return max_model_len > 0 ? max_model_len : ENGINE_TEXT_MAX;
}

/* Loads the model, reserves everything, lets the backend prepare what it can, runs the self-test (a
 * fixed short forward, twice: chunked and whole must agree to the bit, unless backend.fast_math
 * gave that up) and starts the thread. Blocks until ready. */
enum err_code engine_open(struct engine **engine, const struct engine_options *options,
                          struct err *err);
/* Stops taking requests (ERR_CLOSED), finishes what runs and waits until deadline_us, then ends the
 * rest with FINISH_SHUTDOWN. Returns the number of requests cut short. */
int engine_drain(struct engine *engine, int64_t deadline_us);
void engine_close(struct engine *engine); /* drains with no patience, frees all. NULL is fine */

/* Hands a complete request over; never blocks. Lengths against the context, ids against the
 * vocabulary and sampling against its bounds are checked here (ERR_ARGUMENT, the message names
 * field, limit and value); then ERR_QUEUE_FULL, ERR_QUEUE_TOKENS (an empty queue takes a request of
 * any size), or ERR_CLOSED when the engine drains or has failed (engine_state tells which). On
 * success the engine holds a reference. */
enum err_code engine_submit(struct engine *engine, struct request *request, struct err *err);

const struct model_info *engine_model(const struct engine *engine);
const struct tokenizer *engine_tokenizer(const struct engine *engine); /* NULL = ids only */
const struct engine_options *
engine_limits(const struct engine *engine);                        /* effective: zeros resolved */
const struct backend *engine_backend(const struct engine *engine); /* name and description only */
enum engine_state engine_state(const struct engine *engine);
/* Milliseconds since the last step ended while work is pending; 0 when idle. */
int64_t engine_stalled_ms(const struct engine *engine);
struct engine_stats *engine_stats(struct engine *engine);
/* Seconds until a request submitted now would likely start, from the measured drain rate; >= 1. */
int engine_retry_after_s(const struct engine *engine);

int64_t engine_now_us(void); /* monotonic clock */

/* ---- scoring arithmetic, shared by server and command line (engine/scoring.c) --------------- */

/* Windows of lm-evaluation-harness's rolling scheme over a sequence of n_ids tokens (BOS included,
 * n_ids >= 1) of which those from score_from on (1 .. n_ids) are scored: window k feeds tokens
 * first .. first+n_feed-1 and its last n_count predictions count; each scored token is predicted by
 * exactly one window. Window 0 counts as many as it can, window at most, and feeds what stands
 * before them as far as it fits; later ones count stride (the last: what is left) and start so that
 * they feed window tokens. With score_from 1 window 0 thus counts all of its predictions; with a
 * context before score_from and few tokens behind, there is one window that has lost what does not
 * fit on the left. The last token predicts nothing: none of these windows feeds it. */
struct score_window {
    int64_t first;   /* index into ids of the first token fed */
    int64_t n_feed;  /* tokens fed */
    int64_t n_count; /* predictions that count: the last n_count of n_feed (excluding feed_last) */
};
int64_t score_window_count(int64_t n_ids, int64_t score_from, int64_t window, int64_t stride);
struct score_window score_window_at(int64_t n_ids, int64_t score_from, int64_t window,
                                    int64_t stride, int64_t k);

/* Sums over one item or pooled over items; the definitions are those of the HTTP contract. */
struct score_sum {
    int64_t n_scored;
    double sum_logprob; /* in double, in position order */
    double min_logprob; /* 0 if n_scored is 0 */
    bool is_greedy;     /* every rank is 1 (false if n_scored is 0) */
    bool impossible;    /* some log-probability is -inf */
    bool nan;
};
struct score_sum score_sum_item(const struct item *item);

/* Bytes of text without the white space at its end (Python's str.rstrip), over UTF-8. */
size_t text_rstrip(const char *text, size_t bytes);
/* 1 + runs of white space of Python's \s (str), over UTF-8. */
int64_t text_count_words(const char *text, size_t bytes);
int64_t text_count_chars(const char *text, size_t bytes);

/* ---- memory statistics (engine/memory_stats.c) ---------------------------------------------- */

struct memory_stats {
    int64_t lookups;
    double used;       /* share of slots with non-zero weight */
    double kl_w, kl_u; /* log S + Σ z log z, nats: by weight, by count; NaN where undefined */
    double gini_w, gini_u;
    int64_t top50_w, top90_w, top99_w, top50_u, top90_u, top99_u; /* -1: undefined */
};
/* scratch: malloc'd inside; returns ERR_MEMORY if that fails. */
enum err_code memory_stats_of(const struct memory_trace *trace, int64_t n_slot,
                              struct memory_stats *stats, struct err *err);
/* The same of plain sums per slot, which are overwritten; lookups is left 0. */
void memory_stats_of_sums(double *weight, double *count, int64_t n_slot,
                          struct memory_stats *stats);

/* How memory m is used by all traffic since the start, from a sample: one position in 64 of those
 * computed, lookups says how much that is (memory_totals.h). Takes tens of milliseconds per million
 * slots. ERR_MEMORY. */
enum err_code engine_memory_stats(const struct engine *engine, int m, struct memory_stats *stats,
                                  struct err *err);
/* Positions sampled so far. */
int64_t engine_memory_sampled(const struct engine *engine);

#endif
