/* The thread that computes how memories are used: see usage.h. */
#include "server/api/usage.h"

#include "engine/clock.h"
#include "engine/log.h"
#include "engine/pkm_stats.h"

#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

struct usage {
    const struct engine *engine; /* Borrowed */
    pthread_t thread;
    pthread_mutex_t mutex; /* guards the rest */
    pthread_cond_t changed;
    bool wanted, closing;
    int64_t computed_us; /* when; 0 = never */
    int64_t n_sampled;   /* of how many positions */
    struct pkm_stats stats[MODEL_PKM_MAX];
};

/* Without the mutex. false: no memory. */
static bool usage_compute(const struct usage *usage, struct pkm_stats *stats)
{
    struct err err = {0};
    for (int m = 0; m < engine_model(usage->engine)->n_memory; m++) {
        if (engine_pkm_stats(usage->engine, m, &stats[m], &err) != ERR_OK) {
            char why[2 * sizeof err.message];
            log_event(LEVEL_WARN, "memory_usage", "error=%s",
                      log_quote(why, sizeof why, err.message));
            return false;
        }
    }
    return true;
}

static void *usage_run(void *arg)
{
    struct usage *const usage = arg;
    struct pkm_stats stats[MODEL_PKM_MAX] = {0};
    pthread_mutex_lock(&usage->mutex);
    for (;;) {
        while (!usage->wanted && !usage->closing) {
            pthread_cond_wait(&usage->changed, &usage->mutex);
        }
        if (usage->closing) {
            break;
        }
        pthread_mutex_unlock(&usage->mutex);
        const int64_t n_sampled = engine_pkm_sampled(usage->engine);
        const bool computed = usage_compute(usage, stats);
        pthread_mutex_lock(&usage->mutex);
        if (computed) {
            memcpy(usage->stats, stats, sizeof stats);
            usage->n_sampled = n_sampled;
        }
        usage->computed_us = clock_now_us();
        usage->wanted = false;
    }
    pthread_mutex_unlock(&usage->mutex);
    return NULL;
}

enum err_code usage_open(struct usage **usage, const struct engine *engine, struct err *err)
{
    *usage = NULL;
    if (engine_model(engine)->n_memory == 0) {
        return ERR_OK;
    }
    struct usage *const u = calloc(1, sizeof *u);
    if (u == NULL) {
        return err_set(err, ERR_MEMORY, "no memory for the memory statistics");
    }
    u->engine = engine;
    CHECK(pthread_mutex_init(&u->mutex, NULL) == 0 && pthread_cond_init(&u->changed, NULL) == 0);
    if (pthread_create(&u->thread, NULL, usage_run, u) != 0) {
        free(u);
        return err_set(err, ERR_MEMORY, "the thread for memory statistics cannot be started");
    }
    *usage = u;
    return ERR_OK;
}

void usage_close(struct usage *usage)
{
    if (usage == NULL) {
        return;
    }
    pthread_mutex_lock(&usage->mutex);
    usage->closing = true;
    pthread_cond_signal(&usage->changed);
    pthread_mutex_unlock(&usage->mutex);
    CHECK(pthread_join(usage->thread, NULL) == 0);
    free(usage);
}

/* ---- writing ------------------------------------------------------------------------------- */

/* The last results; starts a new computation if they are old. Returns the positions that they are
 * about. */
static int64_t usage_look(struct usage *usage, struct pkm_stats *stats)
{
    const int64_t now_us = clock_now_us();
    pthread_mutex_lock(&usage->mutex);
    memcpy(stats, usage->stats, sizeof usage->stats);
    const int64_t n_sampled = usage->n_sampled;
    const bool due =
        usage->computed_us == 0 || now_us - usage->computed_us >= USAGE_EVERY_S * INT64_C(1000000);
    if (due && engine_pkm_sampled(usage->engine) != n_sampled) {
        usage->wanted = true;
        pthread_cond_signal(&usage->changed);
    }
    pthread_mutex_unlock(&usage->mutex);
    return n_sampled;
}

/* One metric for all memories, by weight and by count if there are two values. */
static void usage_put(struct text *out, const struct model_info *info, const char *name,
                      const char *help, const double *weight, const double *count)
{
    text_printf(out, "# HELP pkmserve_%s %s\n# TYPE pkmserve_%s gauge\n", name, help, name);
    for (int m = 0; m < info->n_memory; m++) {
        const int layer = info->memory[m].layer;
        const char *const mark = memory_place_mark(info->memory[m].place);
        if (count == NULL) {
            text_printf(out, "pkmserve_%s{layer=\"%d%s\"} %.17g\n", name, layer, mark, weight[m]);
            continue;
        }
        text_printf(out,
                    "pkmserve_%s{layer=\"%d%s\",weighting=\"weight\"} %.17g\n"
                    "pkmserve_%s{layer=\"%d%s\",weighting=\"count\"} %.17g\n",
                    name, layer, mark, weight[m], name, layer, mark, count[m]);
    }
}

void usage_write(struct text *out, struct usage *usage)
{
    if (usage == NULL) {
        return;
    }
    struct pkm_stats stats[MODEL_PKM_MAX];
    const struct model_info *const info = engine_model(usage->engine);
    const int64_t n_sampled = usage_look(usage, stats);
    text_printf(out,
                "# HELP pkmserve_memory_sampled_positions Positions that memory_used_ratio, "
                "memory_kl_nats and memory_top90_slots are of.\n"
                "# TYPE pkmserve_memory_sampled_positions gauge\n"
                "pkmserve_memory_sampled_positions %lld\n",
                (long long)n_sampled);
    if (n_sampled == 0) {
        return; /* there are no results yet */
    }
    double used[MODEL_PKM_MAX];
    double kl[2][MODEL_PKM_MAX];
    double top[2][MODEL_PKM_MAX];
    for (int m = 0; m < info->n_memory; m++) {
        used[m] = stats[m].used;
        kl[0][m] = stats[m].kl_w;
        kl[1][m] = stats[m].kl_u;
        top[0][m] = stats[m].top90_w < 0 ? NAN : (double)stats[m].top90_w;
        top[1][m] = (double)stats[m].top90_u;
    }
    usage_put(out, info, "memory_used_ratio", "Share of the slots read, of the sampled positions.",
              used, NULL);
    usage_put(out, info, "memory_kl_nats", "Distance of the slots' use from an even one.", kl[0],
              kl[1]);
    usage_put(out, info, "memory_top90_slots", "Slots that cover nine tenths of the use.", top[0],
              top[1]);
}
