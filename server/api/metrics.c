/* The counters of the front end and the writers of the Prometheus text format: see metrics.h. */
#include "server/api/metrics.h"

#include "engine/clock.h"
#include "engine/stats.h"
#include "kernels/err.h"

#include <math.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

enum { METRICS_NAME_MAX = 96 };

static const int codes[METRICS_CODE_N - 1] = {200, 400, 401, 403, 404, 405, 408, 413,
                                              422, 424, 429, 499, 500, 503, 504};
static const char *const methods[METRICS_METHOD_N] = {"GET", "HEAD", "POST", "other"};
static const char *const forms[METRICS_FORM_N] = {"text", "ids", "ranking", "pairs"};

/* Why a request was turned away, by the code of its error. */
static const char *const reasons[METRICS_REASON_N] = {
    "queue_full", "queue_tokens_full", "client_limit", "loading",     "draining",         "invalid",
    "auth",       "too_large",         "buffers_full", "slow_reader", "queue_memory_full"};

int64_t metrics_unix_seconds(void)
{
    return (int64_t)time(NULL);
}

void metrics_begin(struct metrics *metrics)
{
    histogram_begin(&metrics->tokenize, stats_bounds_e2e, stats_n_e2e);
    histogram_begin(&metrics->body_wait, stats_bounds_e2e, stats_n_e2e);
}

static void add(atomic_llong *counter, long long n)
{
    (void)atomic_fetch_add_explicit(counter, n, memory_order_relaxed);
}

long long metrics_get(const atomic_llong *counter)
{
    return atomic_load_explicit(counter, memory_order_relaxed);
}

static int reason_of(int status, const char *code)
{
    const char *reason = NULL;
    if (code == NULL || strcmp(code, "route_not_found") == 0 ||
        strcmp(code, "method_not_allowed") == 0) { /* there was no route to refuse it */
        return -1;
    }
    if (strcmp(code, "queue_full") == 0 || strcmp(code, "queue_tokens_full") == 0 ||
        strcmp(code, "client_limit") == 0 || strcmp(code, "buffers_full") == 0 ||
        strcmp(code, "slow_reader") == 0 || strcmp(code, "queue_memory_full") == 0) {
        reason = code;
    } else if (strcmp(code, "model_loading") == 0) {
        reason = "loading";
    } else if (strcmp(code, "shutting_down") == 0) {
        reason = "draining";
    } else if (status == 413) {
        reason = "too_large";
    } else if (status == 401 || strcmp(code, "overlay_forbidden") == 0) { /* by the key */
        reason = "auth";
    } else if (status >= 400 && status < 499 && status != 424) { /* that one was accepted */
        reason = "invalid";
    }
    for (int i = 0; reason != NULL && i < METRICS_REASON_N; i++) {
        if (strcmp(reasons[i], reason) == 0) {
            return i;
        }
    }
    return -1;
}

void metrics_count(struct metrics *metrics, int route, const char *method, int status,
                   const char *code)
{
    int c = 0;
    while (c < METRICS_CODE_N - 1 && codes[c] != status) {
        c++;
    }
    add(&metrics->request[route][c], 1);
    int m = 0;
    while (m < METRICS_METHOD_N - 1 && strcmp(methods[m], method) != 0) {
        m++;
    }
    add(&metrics->method[m], 1);
    const int reason = reason_of(status, code);
    if (reason >= 0) {
        add(&metrics->rejected[reason], 1);
    }
}

void metrics_add_score(struct metrics_score *score, int64_t n_token, int64_t n_unk,
                       int64_t n_position, double nll)
{
    add(&score->items, 1);
    add(&score->tokens, n_token);
    add(&score->unknown, n_unk);
    add(&score->positions, n_position);
    if (isfinite(nll) && nll > 0) {
        add(&score->nll_micro, llround(nll * 1e6));
    }
}

void metrics_tokenize_time(struct metrics *metrics, int64_t from_us)
{
    histogram_add(&metrics->tokenize, (double)(clock_now_us() - from_us) * 1e-6);
}

void metrics_body_wait(struct metrics *metrics, int64_t us)
{
    histogram_add(&metrics->body_wait, (double)us * 1e-6);
}

/* ---- writing ------------------------------------------------------------------------------- */

void metrics_put_head(struct text *out, const char *name, const char *type, const char *help)
{
    text_printf(out, "# HELP pkmserve_%s %s\n# TYPE pkmserve_%s %s\n", name, help, name, type);
}

void metrics_put_one(struct text *out, const char *name, const char *type, const char *help,
                     double value)
{
    metrics_put_head(out, name, type, help);
    text_printf(out, "pkmserve_%s %.17g\n", name, value);
}

void metrics_put_histogram(struct text *out, const char *name, const char *labels, const char *help,
                           const struct histogram *h, int every)
{
    const char *const comma = labels[0] != '\0' ? "," : "";
    text_printf(out, "# HELP %s %s\n# TYPE %s histogram\n", name, help, name);
    long long sum = 0;
    for (int i = 0; i < h->n_bound; i++) {
        sum += metrics_get(&h->bucket[i]);
        if (i % every == 0) {
            text_printf(out, "%s_bucket{%s%sle=\"%.15g\"} %lld\n", name, labels, comma, h->bound[i],
                        sum);
        }
    }
    /* The count is the sum of the buckets, so that a scrape in the middle of an observation is
     * consistent. */
    sum += metrics_get(&h->bucket[h->n_bound]);
    text_printf(out, "%s_bucket{%s%sle=\"+Inf\"} %lld\n", name, labels, comma, sum);
    const char *const open = labels[0] != '\0' ? "{" : "";
    const char *const close = labels[0] != '\0' ? "}" : "";
    text_printf(out, "%s_sum%s%s%s %.17g\n", name, open, labels, close,
                atomic_load_explicit(&h->sum, memory_order_relaxed));
    text_printf(out, "%s_count%s%s%s %lld\n", name, open, labels, close, sum);
}

void metrics_put_finished(struct text *out, const char *name, const char *labels,
                          const struct engine_stats *stats)
{
    const char *const comma = labels[0] != '\0' ? "," : "";
    const struct {
        const char *reason;
        const atomic_llong *n;
    } finished[] = {{"stop", &stats->success_stop},
                    {"length", &stats->success_length},
                    {"abort", &stats->aborted},
                    {"error", &stats->errored}};
    text_printf(out, "# HELP %s Sequences ended, by reason.\n# TYPE %s counter\n", name, name);
    for (size_t i = 0; i < sizeof finished / sizeof finished[0]; i++) {
        text_printf(out, "%s{%s%sfinished_reason=\"%s\"} %lld\n", name, labels, comma,
                    finished[i].reason, metrics_get(finished[i].n));
    }
}

void metrics_put_own_histogram(struct text *out, const char *name, const char *help,
                               const struct histogram *h)
{
    char full[METRICS_NAME_MAX];
    const int n = snprintf(full, sizeof full, "pkmserve_%s", name);
    CHECK(n > 0 && n < (int)sizeof full);
    metrics_put_histogram(out, full, "", help, h, 1);
}

void metrics_put_label(struct text *out, const char *value)
{
    for (const char *c = value; *c != '\0'; c++) {
        if (*c == '"' || *c == '\\') {
            text_add(out, "\\", 1);
        }
        text_add(out, *c == '\n' ? " " : c, 1);
    }
}

static void write_requests(struct text *out, const struct metrics *metrics, int n_route,
                           const char *(*route_name)(int route))
{
    metrics_put_head(out, "requests_total", "counter", "Requests by route and HTTP status.");
    for (int r = 0; r < n_route; r++) {
        for (int c = 0; c < METRICS_CODE_N; c++) {
            const long long n = metrics_get(&metrics->request[r][c]);
            if (n == 0) {
                continue;
            }
            char code[8] = "other";
            if (c < METRICS_CODE_N - 1) {
                (void)snprintf(code, sizeof code, "%d", codes[c]);
            }
            text_printf(out, "pkmserve_requests_total{route=\"%s\",code=\"%s\"} %lld\n",
                        route_name(r), code, n);
        }
    }
    metrics_put_head(out, "requests_rejected_total", "counter", "Requests turned away, by reason.");
    for (int i = 0; i < METRICS_REASON_N; i++) {
        text_printf(out, "pkmserve_requests_rejected_total{reason=\"%s\"} %lld\n", reasons[i],
                    metrics_get(&metrics->rejected[i]));
    }
    metrics_put_head(out, "http_requests_total", "counter", "HTTP requests by method.");
    for (int i = 0; i < METRICS_METHOD_N; i++) {
        text_printf(out, "pkmserve_http_requests_total{method=\"%s\"} %lld\n", methods[i],
                    metrics_get(&metrics->method[i]));
    }
}

static void write_score(struct text *out, const struct metrics *metrics)
{
    static const char *const names[] = {"score_items_total", "score_tokens_total",
                                        "score_unknown_tokens_total", "score_positions_total",
                                        "score_nll_nats_total"};
    static const char *const helps[] = {
        "Items scored.", "Tokens whose log-probability was counted.",
        "Tokens of scored texts that the vocabulary does not know.",
        "Positions computed for scoring, overlaps of windows included.",
        "Sum of the negative log-probabilities of all scored tokens, in nats."};
    for (int k = 0; k < 5; k++) {
        metrics_put_head(out, names[k], "counter", helps[k]);
        for (int f = 0; f < METRICS_FORM_N; f++) {
            const struct metrics_score *const s = &metrics->score[f];
            const atomic_llong *const value[] = {&s->items, &s->tokens, &s->unknown, &s->positions,
                                                 &s->nll_micro};
            text_printf(out, "pkmserve_%s{form=\"%s\"} %.17g\n", names[k], forms[f],
                        (double)metrics_get(value[k]) * (k == 4 ? 1e-6 : 1));
        }
    }
}

void metrics_put_front(struct text *out, const struct metrics *metrics, int n_route,
                       const char *(*route_name)(int route))
{
    write_requests(out, metrics, n_route, route_name);
    metrics_put_own_histogram(out, "request_tokenize_time_seconds",
                              "Time to read and tokenise a request.", &metrics->tokenize);
    metrics_put_own_histogram(out, "request_body_wait_seconds",
                              "Time that a long body waited for a thread to read it.",
                              &metrics->body_wait);
    write_score(out, metrics);
}
