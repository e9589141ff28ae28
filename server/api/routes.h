/* Which path does what, and what all routes share: the server's state as requests see it.
 *
 * To add a route: one line in the table of routes.c, one function in an api_*.c;
 * for a dialect of generation, the line alone. */
#ifndef SERVER_ROUTES_H
#define SERVER_ROUTES_H

#include "server/api/ignored.h"
#include "server/api/metrics.h"
#include "server/api/probe.h"
#include "server/generate/generate.h"
#include "server/io/answer.h"
#include "server/io/input.h"
#include "server/net/clients.h"
#include "server/net/exchange.h"
#include "server/net/proxies.h"

/* Made by serve.c; lives as long as the process serves. */
struct server {
    const struct options *options; /* Borrowed */
    struct http *http;             /* Owner: serve.c */
    struct http *admin;            /* Owner: serve.c; NULL = there is only the main port */
    struct usage *usage;           /* Owner: serve.c; set before engine; NULL = no memories */
    struct keys *keys;             /* Owner: serve.c; NULL = no keys are required */
    _Atomic(struct engine *)
        engine;             /* Owner: serve.c. NULL while it loads; limits are set before */
    struct clients clients; /* Owner: serve.c */
    struct proxies proxies;
    struct api_limits limits;
    _Atomic(const char *) phase; /* while loading: the phase, a static text */
    atomic_int progress_permille;
    atomic_bool draining;      /* a signal came: not ready, connections close */
    _Atomic int64_t closed_us; /* requests that arrive later are refused; 0 = not yet */
    int64_t begin_us;          /* start of the process */
    int64_t created;           /* the same in seconds since 1970 */
    struct metrics metrics;
    struct ignored ignored;
    struct probe probe;
};

/* http.c's callbacks; ctx is the struct server. */
bool routes_head(void *ctx, struct exchange *x, const char *authorization, struct api_error *error);
void routes_handle(void *ctx, struct exchange *x);
void routes_done(void *ctx, const struct exchange *x);

/* Number of routes and their labels for metrics; the last stands for all unknown paths. */
int routes_n(void);
const char *routes_name(int route);

/* ---- for the api_*.c ----------------------------------------------------------------------- */

/* Hands the request to the engine, which wakes x; its parsing began at parse_us. false: x holds the
 * error. */
bool routes_submit(struct server *server, struct exchange *x, struct request *request,
                   int64_t parse_us);
/* The limits of this client: the server's, and the overlays that its key is bound to, which
 * *binding holds. */
struct api_limits routes_limits(struct server *server, const struct exchange *x,
                                struct overlay_names *binding);
/* After submit: names the ignored fields ("" = none) in a header and in the log. Returns what the
 * answer says besides its results. id: the one that the client gave, "" = x's. */
struct answer_meta routes_accept(struct server *server, struct exchange *x,
                                 const struct request *request, const char *id,
                                 const char *ignored);
/* Whether the client has left: then request is cancelled, and the answer only goes to the log. */
bool routes_gone(struct exchange *x, struct request *request);
/* Answers with error and the headers that go with its code. */
void routes_error(struct server *server, struct exchange *x, const struct api_error *error);
enum { ANSWER_PIECE_BYTES = 64 * 1024 };
/* x->out holds a piece of a whole answer; done: it is the last. request: what was computed for it;
 * NULL = nothing. An answer that is complete with its first piece is sent with its length, any
 * other in chunks, so that it is never in memory as a whole. */
enum exchange_next routes_piece(struct exchange *x, const struct request *request, bool done);
/* The answer cannot be written: answers with error, or cuts the connection if the head has been
 * sent. */
enum exchange_next routes_broken(struct server *server, struct exchange *x,
                                 const struct api_error *error);
/* POST of a generation in the given dialect, or in the one that the body asks for. */
void api_generate_as(struct server *server, struct exchange *x,
                     const struct generate_dialect *dialect);

void api_score(struct server *server, struct exchange *x);
void api_score_labels(struct server *server, struct exchange *x);
void api_tokenize(struct server *server, struct exchange *x);
void api_detokenize(struct server *server, struct exchange *x);
void api_tokenizer_info(struct server *server, struct exchange *x);
void api_models(struct server *server, struct exchange *x);
void api_overlays(struct server *server, struct exchange *x);
void api_overlay(struct server *server, struct exchange *x);
void api_info(struct server *server, struct exchange *x);
void api_version(struct server *server, struct exchange *x);
void api_live(struct server *server, struct exchange *x);
void api_ready(struct server *server, struct exchange *x);
void api_counts(struct server *server, struct exchange *x);
void api_metrics(struct server *server, struct exchange *x);
void api_root(struct server *server, struct exchange *x);
void api_openapi(struct server *server, struct exchange *x);
void api_page(struct server *server, struct exchange *x);
void api_chat(struct server *server, struct exchange *x);

#endif
