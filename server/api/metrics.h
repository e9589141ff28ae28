/* Counters of the front end, and the writers that all of GET /metrics uses (metrics_text.h).
 *
 * The engine keeps its own (engine/stats.h); here is what only the front end knows. All atomic and
 * relaxed: a scrape stops no one and waits for no one. */
#ifndef SERVER_METRICS_H
#define SERVER_METRICS_H

#include "engine/stats.h"
#include "server/json/text.h"

enum { METRICS_ROUTE_MAX = 32, METRICS_CODE_N = 16, METRICS_REASON_N = 11, METRICS_METHOD_N = 4 };
enum metrics_form {
    METRICS_FORM_TEXT,
    METRICS_FORM_IDS,
    METRICS_FORM_RANKING,
    METRICS_FORM_PAIRS,
    METRICS_FORM_N
};

struct metrics_score {
    atomic_llong items, tokens, unknown, positions, nll_micro;
};

struct metrics {
    atomic_llong request[METRICS_ROUTE_MAX][METRICS_CODE_N];
    atomic_llong rejected[METRICS_REASON_N];
    atomic_llong method[METRICS_METHOD_N];
    struct metrics_score score[METRICS_FORM_N];
    struct histogram tokenize, body_wait;
};

void metrics_begin(struct metrics *metrics);
/* An exchange is over. code is its error's code or NULL. */
void metrics_count(struct metrics *metrics, int route, const char *method, int status,
                   const char *code);
/* One item was scored; n_unk of its tokens are unknown to the vocabulary; nll in nats, infinity is
 * not counted. */
void metrics_add_score(struct metrics_score *score, int64_t n_token, int64_t n_unk,
                       int64_t n_position, double nll);
/* Reading and tokenising took from from_us until now. */
void metrics_tokenize_time(struct metrics *metrics, int64_t from_us);
/* A long body waited for a thread to read it. */
void metrics_body_wait(struct metrics *metrics, int64_t us);

/* Appends the front end's counters as Prometheus text. route_name gives the label of a route, of
 * which there are n_route. */
void metrics_put_front(struct text *out, const struct metrics *metrics, int n_route,
                       const char *(*route_name)(int route));

long long metrics_get(const atomic_llong *counter);
/* The # lines of one of our metrics; name is without "pkmserve_". */
void metrics_put_head(struct text *out, const char *name, const char *type, const char *help);
/* One of our metrics with a single value, or one of our histograms. */
void metrics_put_one(struct text *out, const char *name, const char *type, const char *help,
                     double value);
void metrics_put_own_histogram(struct text *out, const char *name, const char *help,
                               const struct histogram *h);
/* A histogram under its full name; labels: "" or "name=\"value\",...", without braces. every: 1
 * prints all bounds, n every n-th one, beginning with the first. */
void metrics_put_histogram(struct text *out, const char *name, const char *labels, const char *help,
                           const struct histogram *h, int every);
/* The counter of ended sequences by reason, in the same way. */
void metrics_put_finished(struct text *out, const char *name, const char *labels,
                          const struct engine_stats *stats);
/* A label's value: quotes, backslashes and line ends escaped. */
void metrics_put_label(struct text *out, const char *value);

int64_t metrics_unix_seconds(void);

#endif
