/* The life of the server: see serve.h.
 *
 *   port opens, all work 503 model_loading ─► engine opens in a thread of its own ─► ready
 *   SIGTERM or SIGINT ─► not ready, Connection: close, work still taken for drain_delay_s
 *                     ─► no new work (503 shutting_down), running work has shutdown_timeout_s;
 *                        this lasts a second at least, so that a load balancer which does not ask
 *                        for health learns from an answer, not from a closed connection
 *                     ─► the rest is cut short with an error ─► exit 0
 *   Ctrl-C            ─► the same without drain_delay_s: who sits at the terminal needs no time to
 *                        send clients elsewhere
 *   a second signal   ─► exit 1 at once
 *   the engine fails  ─► what runs has ended with an error, new work 503 engine_failed, not ready
 *                     ─► the same way out ─► exit 1, so that it is started anew
 *
 * Called by main.c. The main thread only waits: for the loader first, then for signals or for the
 * engine's failure. */
#include "server/serve.h"

#include "engine/clock.h"
#include "engine/log.h"
#include "engine/request_memory.h"
#include "engine/stats.h"
#include "server/api/info.h"
#include "server/api/routes.h"
#include "server/api/usage.h"
#include "server/cli/cmd.h"
#include "server/io/input.h"
#include "server/net/http.h"
#include "server/notify.h"

#include <errno.h>
#include <malloc.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/signalfd.h>
#include <unistd.h>

enum {
    SERVE_REFUSE_US = 1000000,    /* before the port is closed, new work gets a 503 for so long */
    TRIM_MS = 1000,               /* how often memory that was freed is given back to the system */
    SERVE_FLUSH_US = 2 * 1000000, /* at least, for the last answers to reach slow clients */
    ADMIN_CONNECTIONS = 64,
    SERVE_LOG_MS = 1000, /* for the last lines of the log */
};

/* The thread that opens the engine; signals and probes are answered meanwhile. */
struct loader {
    struct server *server; /* Borrowed */
    struct engine *engine; /* Owner: the main thread, after done_fd says so */
    struct err err;
    int done_fd;
    int failed_fd; /* tells, later on, that the engine has failed */
    pthread_t thread;
};

/* ---- loading ------------------------------------------------------------------------------- */

static void loader_progress(void *ctx, const char *phase, double done)
{
    static const char *const phases[] = {"map", "check", "pack", "warmup", "selftest"};
    struct server *const server = ctx;
    for (size_t i = 0; i < sizeof phases / sizeof phases[0]; i++) {
        if (strcmp(phase, phases[i]) == 0) {
            atomic_store(&server->phase, phases[i]);
        }
    }
    atomic_store(&server->progress_permille, (int)(done * 1000));
}

static void raise_fd(int event_fd)
{
    const uint64_t one = 1;
    CHECK(write(event_fd, &one, sizeof one) == sizeof one);
}

/* Engine thread. */
static void loader_engine_failed(void *ctx)
{
    raise_fd(((struct loader *)ctx)->failed_fd);
}

static struct engine_options serve_engine_options(struct server *server)
{
    struct engine_options options = options_engine(server->options);
    options.memory_trace = true; /* input.c refuses what --memory-trace does not allow */
    options.shared = true;
    options.model.progress = loader_progress;
    options.model.progress_ctx = server;
    return options;
}

static void *loader_run(void *arg)
{
    struct loader *const loader = arg;
    struct engine_options options = serve_engine_options(loader->server);
    options.failed = loader_engine_failed;
    options.failed_ctx = loader;
    if (engine_open(&loader->engine, &options, &loader->err) != ERR_OK) {
        loader->engine = NULL;
    }
    raise_fd(loader->done_fd);
    return NULL;
}

/* Requests may not be kept waiting by answers that nobody reads. */
static void relieve_results(void *ctx, int64_t bytes)
{
    const struct server *const server = ctx;
    http_relieve(server->http, false, bytes);
}

static void relieve_traces(void *ctx)
{
    struct server *const server = ctx;
    struct engine *const engine = atomic_load(&server->engine);
    const int64_t bytes = engine != NULL ? atomic_load(&engine_stats(engine)->trace_wait_bytes) : 0;
    if (bytes > 0) {
        http_relieve(server->http, true, bytes);
    }
}

/* The address for clients on this machine: a server may listen on a wildcard, but a client cannot
 * connect to it. */
static const char *ready_url(char *url, size_t url_max, const char *host, int port)
{
    const char *const shown = strcmp(host, "0.0.0.0") == 0 ? "127.0.0.1"
                              : strcmp(host, "::") == 0    ? "::1"
                                                           : host;
    const bool bracket = strchr(shown, ':') != NULL;
    (void)snprintf(url, url_max, "http://%s%s%s:%d", bracket ? "[" : "", shown, bracket ? "]" : "",
                   port);
    return url;
}

static void log_ready(const struct server *server, const struct engine *engine)
{
    const struct engine_options *const limits = engine_limits(engine);
    const struct model_info *const info = engine_model(engine);
    char name[2 * OPTIONS_NAME_MAX];
    char host[256];
    char backend[256];
    char url[256];
    char quoted_url[2 * sizeof url];
    const int port = http_port(server->http);
    log_event(
        LEVEL_INFO, "ready",
        "port=%d host=%s url=%s model=%s family=%s dtype=%s context=%d memories=%d backend=%s "
        "max_seqs=%d max_batch_tokens=%d kv_tokens=%lld seconds=%.2f",
        port, log_quote(host, sizeof host, server->options->host),
        log_quote(quoted_url, sizeof quoted_url,
                  ready_url(url, sizeof url, server->options->host, port)),
        log_quote(name, sizeof name, server->limits.model_name), info->family,
        dtype_name(info->dtype), limits->max_model_len, info->n_memory,
        log_quote(backend, sizeof backend, engine_backend(engine)->description), limits->max_seqs,
        limits->max_batch_tokens, (long long)limits->kv_tokens,
        (double)(clock_now_us() - server->begin_us) * 1e-6);
}

/* ---- ending -------------------------------------------------------------------------------- */

static void exit_now(int signal_number)
{
    (void)signal_number;
    _exit(1);
}

/* From here on a signal ends the process at once. */
static void arm_second_signal(const sigset_t *signals)
{
    const struct sigaction action = {.sa_handler = exit_now};
    CHECK(sigaction(SIGTERM, &action, NULL) == 0 && sigaction(SIGINT, &action, NULL) == 0);
    CHECK(signal(SIGHUP, SIG_IGN) != SIG_ERR);
    CHECK(pthread_sigmask(SIG_UNBLOCK, signals, NULL) == 0);
}

/* hurried: nobody has to notice first that the server is ending. */
static void drain(struct server *server, struct engine *engine, bool hurried)
{
    const struct options *const options = server->options;
    const bool failed = engine_state(engine) == ENGINE_FAILED;
    const int delay_s = hurried ? 0 : options->drain_delay_s;
    log_event(
        LEVEL_INFO, "draining",
        "reason=%s delay_s=%d timeout_s=%d advice=\"a second signal ends the process at once\"",
        failed ? "engine_failed" : "signal", delay_s, options->shutdown_timeout_s);
    notify_manager("STOPPING=1");
    atomic_store(&server->draining, true);
    http_drain(server->http);
    for (unsigned left_s = (unsigned)delay_s; left_s > 0;) {
        left_s = sleep(left_s);
    }
    const int64_t closed_us = clock_now_us();
    atomic_store(&server->closed_us, closed_us);
    const int64_t deadline_us = closed_us + options->shutdown_timeout_s * INT64_C(1000000);
    while (http_n_unread(server->http) > 0 && clock_now_us() < deadline_us) {
        (void)usleep(5000); /* bodies that had arrived in time become requests */
    }
    int n_cut = engine_drain(engine, deadline_us);
    /* Without the delay there is nobody who should notice. */
    while (delay_s > 0 && clock_now_us() - closed_us < SERVE_REFUSE_US) {
        (void)usleep(10000);
    }
    /* The engine has ended, and every request with it: what is left is to send the answers. */
    (void)http_stop(server->admin, 0); /* it looks into the other */
    const int64_t flush_us = clock_now_us() + SERVE_FLUSH_US;
    n_cut += http_stop(server->http, flush_us > deadline_us ? flush_us : deadline_us);
    server->http = server->admin = NULL;
    log_event(LEVEL_INFO, "stopped", "cut_short=%d", n_cut);
}

/* SIGHUP: keys that cannot be read leave the old ones in force. */
static void reload_keys(struct server *server)
{
    struct err err = {0};
    int n = 0;
    char why[sizeof err.message + 3];
    if (server->keys == NULL) {
        log_event(LEVEL_WARN, "reload", "reason=%s",
                  log_quote(why, sizeof why, "nothing to read again: there is no --api-key-file"));
    } else if (keys_reload(server->keys, &n, &err) == ERR_OK) {
        log_event(LEVEL_INFO, "reload", "keys=%d", n);
    } else {
        log_event(LEVEL_ERROR, "reload", "reason=%s", log_quote(why, sizeof why, err.message));
    }
}

/* Large blocks are mapped by themselves, so that the system has them back when they are freed, and
 * few heaps are kept; what is free in those goes back in memory_trim. That gives back all but the
 * end of a heap, which free() gives back when a block joins it; so blocks join at once, and do not
 * wait in fast bins for a trim that would be too late for them. */
static void memory_begin(void)
{
#ifdef __GLIBC__
    (void)mallopt(M_MMAP_THRESHOLD, 64 << 10);
    (void)mallopt(M_TRIM_THRESHOLD, 1 << 20);
    (void)mallopt(M_ARENA_MAX, 4);
    (void)mallopt(M_MXFAST, 0);
#endif
}

/* What the process held when memory was last given back. */
struct trimmed {
    size_t free;     /* bytes of the heaps that are not in use */
    size_t resident; /* bytes */
};

static size_t resident_bytes(void)
{
    unsigned long long total = 0;
    unsigned long long resident = 0;
    FILE *const file = fopen("/proc/self/statm", "re");
    if (file == NULL) {
        return 0;
    }
    const int n = fscanf(file, "%llu %llu", &total, &resident);
    (void)fclose(file);
    return n == 2 ? (size_t)resident * (size_t)sysconf(_SC_PAGESIZE) : 0;
}

/* Gives back what is free, if more has become free since the last time, or if the process has
 * grown: what was given back and used again since is free, but resident. */
static void memory_trim(struct trimmed *last)
{
#ifdef __GLIBC__
    const size_t worth = 4 << 20;
    const struct trimmed now = {mallinfo2().fordblks, resident_bytes()};
    if (now.free <= last->free + worth && now.resident <= last->resident + worth) {
        last->free = now.free < last->free ? now.free : last->free;
        last->resident = now.resident < last->resident ? now.resident : last->resident;
        return;
    }
    (void)malloc_trim(0);
    /* What other threads freed meanwhile may not have been given back: it counts as new the next
     * time. */
    const size_t left = mallinfo2().fordblks;
    *last = (struct trimmed){left < now.free ? left : now.free, resident_bytes()};
#else
    (void)last;
#endif
}

/* Waits for a signal to end, or until event_fd is raised. true: the signal came; *typed: it is the
 * Ctrl-C of whoever sits at the terminal. */
static bool wait_for_signal(struct server *server, int signal_fd, int event_fd, bool *typed)
{
    struct pollfd fds[2] = {{.fd = signal_fd, .events = POLLIN},
                            {.fd = event_fd, .events = POLLIN}};
    struct trimmed last = {0};
    for (;;) {
        const int n = poll(fds, 2, TRIM_MS);
        if (n <= 0) {
            CHECK(n == 0 || errno == EINTR);
            memory_trim(&last);
            continue;
        }
        if ((fds[0].revents & POLLIN) == 0) {
            return false;
        }
        /* Takes the signal: one that stays pending would count as the second when they are
         * unblocked. */
        struct signalfd_siginfo taken;
        CHECK(read(signal_fd, &taken, sizeof taken) == sizeof taken);
        if (taken.ssi_signo != SIGHUP) {
            *typed = taken.ssi_signo == SIGINT && taken.ssi_code == SI_KERNEL;
            return true;
        }
        reload_keys(server);
    }
}

/* ---- the whole ----------------------------------------------------------------------------- */

/* Who may ask: the keys, and whose word on addresses counts. */
static enum err_code read_access(struct server *server, struct err *err)
{
    const struct options *const options = server->options;
    const enum err_code code = options->api_key_file[0] != '\0'
                                   ? keys_open(&server->keys, options->api_key_file, err)
                                   : ERR_OK;
    return code != ERR_OK ? code : proxies_parse(&server->proxies, options->trusted_proxies, err);
}

/* --check: loads, runs the self-test, prints /info. */
static int serve_check(struct server *server)
{
    struct engine *engine = NULL;
    struct err err = {0};
    const enum err_code code = read_access(server, &err);
    keys_close(server->keys);
    if (code != ERR_OK) {
        return cmd_fail(&err);
    }
    const struct engine_options options = serve_engine_options(server);
    if (engine_open(&engine, &options, &err) != ERR_OK) {
        return cmd_fail(&err);
    }
    struct text out = {0};
    info_write(&out, engine, server->options, server->options->served_model_name);
    text_puts(&out, "\n");
    const bool ok = !out.failed && fwrite(out.data, 1, out.n, stdout) == out.n;
    text_free(&out);
    engine_close(engine);
    return ok ? 0 : 1;
}

/* Behind what the log's thread has still to write, so that the error is the last line. */
static int serve_fail(const struct err *err)
{
    log_flush(SERVE_LOG_MS);
    return cmd_fail(err);
}

/* After the port is open. */
static int serve_loop(struct server *server, const sigset_t *signals, int signal_fd)
{
    struct loader loader = {
        .server = server, .done_fd = eventfd(0, EFD_CLOEXEC), .failed_fd = eventfd(0, EFD_CLOEXEC)};
    const bool has_files = loader.done_fd >= 0 && loader.failed_fd >= 0;
    const int why = has_files ? pthread_create(&loader.thread, NULL, loader_run, &loader) : errno;
    if (why != 0) {
        (void)http_stop(server->admin, 0);
        (void)http_stop(server->http, 0);
        (void)err_set(&loader.err, ERR_IO, "cannot start the thread that loads the model: %s",
                      strerror(why));
        return serve_fail(&loader.err);
    }
    bool typed = false;
    if (wait_for_signal(server, signal_fd, loader.done_fd, &typed)) {
        log_event(LEVEL_INFO, "stopped", "phase=%s", atomic_load(&server->phase));
        /* Only the loading is in progress, which cannot be interrupted: nobody waits for it, though
         * it may just have ended. */
        CHECK(pthread_detach(loader.thread) == 0);
        log_flush(SERVE_LOG_MS);
        _exit(0);
    }
    CHECK(pthread_join(loader.thread, NULL) == 0);
    (void)close(loader.done_fd);
    struct engine *const engine = loader.engine;
    if (engine == NULL || usage_open(&server->usage, engine, &loader.err) != ERR_OK) {
        (void)http_stop(server->admin, 0);
        (void)http_stop(server->http, 0);
        engine_close(engine);
        return serve_fail(&loader.err);
    }
    server->limits = input_limits(server->options, engine);
    server->probe.compared = engine_identity(engine);
    request_memory_relieved_by(engine_request_memory(engine), relieve_results, server);
    atomic_store(&server->engine, engine);
    log_ready(server, engine);
    notify_manager("READY=1");
    (void)wait_for_signal(server, signal_fd, loader.failed_fd, &typed);
    arm_second_signal(signals);
    drain(server, engine, typed);
    usage_close(server->usage);
    const bool failed = engine_state(engine) == ENGINE_FAILED; /* also while it drained */
    engine_close(engine);
    (void)close(loader.failed_fd);
    return failed ? 1 : 0;
}

static enum log_level log_level_of(const char *name)
{
    static const char *const names[] = {"debug", "info", "warn", "error"};
    for (int i = 0; i < 4; i++) {
        if (strcmp(name, names[i]) == 0) {
            return (enum log_level)i;
        }
    }
    return LEVEL_INFO;
}

/* Reads the keys and opens the ports. */
static enum err_code serve_open(struct server *server, struct err *err)
{
    const struct options *const options = server->options;
    if (read_access(server, err) != ERR_OK) {
        return err->code;
    }
    const enum err_code counted = clients_open(&server->clients, options->max_connections, err);
    if (counted != ERR_OK) {
        return counted;
    }
    struct http_config config = {
        .host = options->host,
        .port = options->port,
        .max_connections = options->max_connections,
        .n_more_files = options->admin_port > 0 ? 2 * ADMIN_CONNECTIONS : 0,
        .max_body_bytes = options->max_body_bytes,
        .max_body_flag = "--max-body-bytes",
        .overload_status = strcmp(options->overload_status, "503") == 0 ? 503 : 429,
        .max_buffered_bytes = options->max_buffered_bytes,
        .min_read_rate = options->min_read_rate,
        .read_window_s = options->read_window_s,
        .body_threads = options->body_threads,
        .proxies = &server->proxies,
        .keepalive_s = options->keepalive_s,
        .header_timeout_s = options->header_timeout_s,
        .body_timeout_s = options->body_timeout_s,
        .head = routes_head,
        .handle = routes_handle,
        .done = routes_done,
        .tick = relieve_traces,
        .ctx = server};
    enum err_code code = http_start(&server->http, &config, err);
    if (code == ERR_OK && options->admin_port > 0) { /* second: /metrics asks for the first */
        config.host = options->admin_host;
        config.port = options->admin_port;
        config.max_connections = ADMIN_CONNECTIONS;
        config.max_body_bytes = options->overlay_bytes; /* the only bodies at this port are
                                                         * overlays */
        config.max_body_flag = "--overlay-bytes";
        config.max_buffered_bytes += options->overlay_bytes;
        config.admin = true;
        config.tick = NULL;
        code = http_start(&server->admin, &config, err);
        if (code != ERR_OK) {
            (void)http_stop(server->http, 0);
        }
    }
    return code;
}

const bool serve_is_here = true;

int serve_run(const struct options *options)
{
    memory_begin();
    log_begin(log_level_of(options->log_level), strcmp(options->log_format, "json") == 0);
    struct server *const server = calloc(1, sizeof *server);
    if (server == NULL) {
        return cmd_fail(&(struct err){.message = "no memory for the server"});
    }
    server->options = options;
    server->begin_us = clock_now_us();
    server->created = metrics_unix_seconds();
    atomic_init(&server->phase, "start");
    ignored_begin(&server->ignored);
    metrics_begin(&server->metrics);
    probe_begin(&server->probe, options->deterministic);
    int status = 1;
    if (strcmp(options->check, "off") != 0) {
        status = serve_check(server);
        free(server);
        return status;
    }
    /* Blocked before any thread exists, so that all inherit it and only signal_fd gets them. */
    sigset_t signals;
    (void)sigemptyset(&signals);
    (void)sigaddset(&signals, SIGTERM);
    (void)sigaddset(&signals, SIGINT);
    (void)sigaddset(&signals, SIGHUP);
    CHECK(pthread_sigmask(SIG_BLOCK, &signals, NULL) == 0);
    CHECK(signal(SIGPIPE, SIG_IGN) != SIG_ERR);
    const int signal_fd = signalfd(-1, &signals, SFD_CLOEXEC);
    struct err err = {0};
    status = signal_fd < 0 ? cmd_fail(&(struct err){ERR_IO, "cannot open a file for signals"})
             : log_start((size_t)options->log_buffer_bytes, &err) == ERR_OK &&
                     serve_open(server, &err) == ERR_OK
                 ? serve_loop(server, &signals, signal_fd)
                 : serve_fail(&err);
    log_flush(SERVE_LOG_MS);
    keys_close(server->keys);
    clients_close(&server->clients);
    (void)close(signal_fd);
    free(server);
    return status;
}
