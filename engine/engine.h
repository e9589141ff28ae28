/* The engine: owns time. Who runs, when, and where tokens go.
 *
 * One thread, started by engine_open, owns the backend, the model, the cache pages and the
 * sequences; nothing inside engine/ is locked but the queue. The other threads build a struct
 * request (request.h), submit it, and read its results while the engine appends to them. */
#ifndef ENGINE_ENGINE_H
#define ENGINE_ENGINE_H

#include "engine/request.h"

struct engine_stats;
struct identity;
struct pkm_counts;
struct pkm_stats;
struct tokenizer;

/* The strings and the contexts are borrowed: they must outlive the engine. */
struct engine_options {
    const char *model_dir;
    const char *tokenizer_path; /* NULL = in model_dir */
    struct backend_options backend;
    struct model_options model;
    int max_model_len;        /* 0 = the model's context; still 0 = it has no limit */
    int max_seqs;             /* sequences running at once */
    int max_batch_tokens;     /* rows of one step; 0 = what suits the backend */
    int bulk_step_ms;         /* target time of a step that mixes bulk and interactive work; 0 =
                               * none */
    int max_queue;            /* waiting requests */
    int64_t max_queue_tokens; /* positions that they make the engine compute, together */
    /* Cache size in positions. 0 = max_seqs texts of full length (in a model without a context
     * limit: of the positions that a token sees), but at most a quarter of the free memory, or nine
     * tenths of a device's own. */
    int64_t kv_tokens;
    int max_logprobs;           /* largest n_top */
    int64_t max_request_bytes;  /* ids and results of all requests together; 0 = any */
    int64_t memory_trace_bytes; /* memory traces of all requests; reserved, not yet touched */
    bool memory_trace;          /* allow trace_memory */
    int64_t overlay_bytes;      /* reserved for overlays; 0 = none are taken. Without memories it is
                                 * not reserved */
    const char *overlay_dir;    /* whose files are overlays from the start; NULL = none */
    bool memory_counts;         /* count all look-ups slot by slot (pkm_counts.h) */
    bool shared;                /* others may come: no request takes all places (plan.h) */
    bool failures_told;         /* do not log failures: the caller, a tool, reports them itself */
    bool prefix_cache; /* compute equal beginnings of texts once. Off in models whose pages form a
                        * ring */
    /* Called once by the engine thread after it has failed and ended all work; must not block and
     * not call back into the engine. May be NULL. */
    void (*failed)(void *ctx);
    void *failed_ctx;
};

enum engine_state { ENGINE_LOADING, ENGINE_READY, ENGINE_DRAINING, ENGINE_FAILED, ENGINE_STOPPED };

struct engine;

/* What was compared with the model's model.sha256 (models/identity.h) before the engine was ready;
 * what differed would have kept it from opening. */
struct engine_identity {
    const struct identity *file; /* Borrowed: the engine's; NULL = there is none */
    bool files;                  /* the files, by their sums */
    int n;                       /* the results of so many tokens of the probe; 0 = none */
    /* of a log-probability: the limit, and the largest difference that was found */
    float tolerance, difference;
};

/* Loads the model, reserves everything, lets the backend prepare what it can, runs the self-test (a
 * fixed short forward, twice: chunked and whole must agree to the bit, unless backend.fast_math
 * gave that up), compares the model with its model.sha256 and starts the thread. Blocks until
 * ready. */
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
engine_limits(const struct engine *engine); /* effective: zeros resolved */
const struct engine_identity *engine_identity(const struct engine *engine);
/* Why the probe was not compared; NULL = it was. */
const char *engine_identity_gap(const struct engine_identity *compared);
const struct backend *engine_backend(const struct engine *engine); /* name and description only */
enum engine_state engine_state(const struct engine *engine);
/* Milliseconds since the last step ended while work is pending; 0 when idle. */
int64_t engine_stalled_ms(const struct engine *engine);
struct engine_stats *engine_stats(struct engine *engine);
/* NULL: none are taken. */
struct overlays *engine_overlays(const struct engine *engine);
/* For request_use_memory. */
struct request_memory *engine_request_memory(const struct engine *engine);
/* Seconds until a request submitted now would likely start, from the measured drain rate; >= 1.
 * of_all: until all positions that wait now are admitted, for who found too many of them. */
int engine_retry_after_s(struct engine *engine, bool of_all);

/* How all traffic since the start has used memory m, from a sample of one position in 64; lookups
 * says how large the sample is (pkm_totals.h). Takes tens of milliseconds per million slots.
 * ERR_MEMORY. */
enum err_code engine_pkm_stats(const struct engine *engine, int m, struct pkm_stats *stats,
                               struct err *err);
/* NULL: they are off, or the model has no memories. */
const struct pkm_counts *engine_counts(const struct engine *engine);
/* Positions sampled so far. */
int64_t engine_pkm_sampled(const struct engine *engine);

#endif
