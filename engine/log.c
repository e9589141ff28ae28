/* The log: see log.h. */
#include "engine/log.h"

#include "kernels/utf8.h"
#include "kernels/err.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

/* Values that the whole program shares; set once before there are threads. */
static enum log_level log_least = LEVEL_INFO;
static bool log_json = false;

/* The lines that wait for the writer's thread. Without a buffer log_event writes them itself. */
static struct {
    pthread_mutex_t mutex;  /* guards what follows, but for buffer and capacity */
    pthread_cond_t changed; /* lines came, or lines went */
    char *buffer;           /* Owner: log_start; never freed, as a late line may come at any time */
    size_t capacity;
    size_t begin, n;    /* the waiting bytes: from begin, around the end */
    bool writing;       /* the thread has taken lines and not yet written them */
    long long n_untold; /* dropped lines that no line of the log has reported yet */
} ring = {.mutex = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER};
static atomic_llong log_n_dropped;

void log_begin(enum log_level least, bool json)
{
    log_least = least;
    log_json = json;
}

/* A line under construction; what does not fit is dropped and remembered. */
struct line {
    char text[LOG_LINE_MAX + 64]; /* room for the mark and the end */
    size_t n;
    bool cut;
};

static void put(struct line *line, const char *text, size_t bytes)
{
    if (line->cut || bytes > LOG_LINE_MAX - line->n) {
        line->cut = true;
        return;
    }
    memcpy(line->text + line->n, text, bytes);
    line->n += bytes;
}

static void put_string(struct line *line, const char *text)
{
    put(line, text, strlen(text));
}

const char *log_quote(char *out, size_t out_max, const char *text)
{
    CHECK(out_max >= 3);
    const size_t bytes = strlen(text);
    size_t n = 0;
    out[n++] = '"';
    for (size_t at = 0; at < bytes;) {
        const struct utf8_char c = utf8_next(text + at, bytes - at);
        char escaped[8];
        int width = c.bytes;
        if (c.status != UTF8_CHAR || c.code < 0x20 || (c.code >= 0x7f && c.code < 0xa0)) {
            width = snprintf(escaped, sizeof escaped, "\\u%04x",
                             c.status == UTF8_CHAR ? c.code : 0xfffdu);
        } else if (c.code == '"' || c.code == '\\') {
            width = snprintf(escaped, sizeof escaped, "\\%c", (char)c.code);
        } else {
            memcpy(escaped, text + at, (size_t)c.bytes);
        }
        if (n + (size_t)width + 2 > out_max) {
            break;
        }
        memcpy(out + n, escaped, (size_t)width);
        n += (size_t)width;
        at += (size_t)c.bytes;
    }
    out[n++] = '"';
    out[n] = '\0';
    return out;
}

/* Whether value can stand in JSON as it is: a number, true, false, or a quoted string. */
static bool is_json_value(const char *value, size_t bytes)
{
    if (bytes >= 2 && value[0] == '"' && value[bytes - 1] == '"') {
        return true;
    }
    if ((bytes == 4 && memcmp(value, "true", 4) == 0) ||
        (bytes == 5 && memcmp(value, "false", 5) == 0)) {
        return true;
    }
    size_t i = bytes > 0 && value[0] == '-' ? 1 : 0;
    const size_t first = i;
    while (i < bytes && value[i] >= '0' && value[i] <= '9') {
        i++;
    }
    const size_t n_digit = i - first;
    if (n_digit == 0 || (n_digit > 1 && value[first] == '0')) {
        return false; /* JSON has no leading zeros: an id of digits stays a string */
    }
    if (i < bytes && value[i] == '.') {
        const size_t point = i++;
        while (i < bytes && value[i] >= '0' && value[i] <= '9') {
            i++;
        }
        return i == bytes && i > point + 1;
    }
    return i == bytes;
}

/* Appends "key=value key=value" as JSON members. */
static void put_json_pairs(struct line *line, const char *pairs)
{
    const char *at = pairs;
    while (*at != '\0') {
        at += strspn(at, " ");
        const size_t key = strcspn(at, "= ");
        if (key == 0 || at[key] != '=') {
            at += key + (at[key] == '=' ? 1 : 0);
            continue;
        }
        const char *const value = at + key + 1;
        size_t bytes = strcspn(value, " ");
        if (value[0] == '"') {
            bytes = 1;
            while (value[bytes] != '\0' && value[bytes] != '"') {
                bytes += value[bytes] == '\\' && value[bytes + 1] != '\0' ? 2 : 1;
            }
            bytes += value[bytes] == '"' ? 1 : 0;
        }
        const size_t before = line->n;
        put_string(line, ",\"");
        put(line, at, key);
        put_string(line, "\":");
        if (is_json_value(value, bytes)) {
            put(line, value, bytes);
        } else {
            char plain[LOG_LINE_MAX];
            char quoted[LOG_LINE_MAX + 3];
            CHECK(bytes < sizeof plain); /* pairs fit into as much */
            memcpy(plain, value, bytes);
            plain[bytes] = '\0';
            put_string(line, log_quote(quoted, sizeof quoted, plain));
        }
        line->n = line->cut ? before : line->n; /* whole members only */
        at = value + bytes;
    }
}

static void write_all(const char *text, size_t bytes)
{
    while (bytes > 0) {
        const ssize_t n = write(STDERR_FILENO, text, bytes);
        if (n < 0 && errno == EAGAIN) { /* somebody made standard error non-blocking */
            struct pollfd out = {.fd = STDERR_FILENO, .events = POLLOUT};
            (void)poll(&out, 1, -1);
        } else if (n < 0 && errno != EINTR) {
            return; /* nowhere to report a log that cannot be written */
        }
        text += n > 0 ? n : 0;
        bytes -= n > 0 ? (size_t)n : 0;
    }
}

/* Appends a whole line, or counts it as dropped. */
static void ring_add(const char *text, size_t bytes)
{
    pthread_mutex_lock(&ring.mutex);
    if (bytes > ring.capacity - ring.n) {
        (void)atomic_fetch_add_explicit(&log_n_dropped, 1, memory_order_relaxed);
        ring.n_untold++;
    } else {
        const size_t end = (ring.begin + ring.n) % ring.capacity;
        const size_t first = bytes < ring.capacity - end ? bytes : ring.capacity - end;
        memcpy(ring.buffer + end, text, first);
        memcpy(ring.buffer, text + first, bytes - first);
        ring.n += bytes;
    }
    pthread_mutex_unlock(&ring.mutex);
    pthread_cond_broadcast(&ring.changed); /* now: whom it wakes takes the mutex */
}

void log_event(enum log_level level, const char *event, const char *format, ...)
{
    static const char *const names[] = {"debug", "info", "warn", "error"};
    if (level < log_least) {
        return;
    }
    char pairs[LOG_LINE_MAX];
    va_list args;
    va_start(args, format);
    const int n_pairs = vsnprintf(pairs, sizeof pairs, format, args);
    va_end(args);
    for (char *c = pairs; *c != '\0'; c++) { /* a line stays a line */
        *c = (unsigned char)*c < 0x20 || *c == 0x7f ? '?' : *c;
    }

    struct timespec now;
    struct tm utc;
    CHECK(clock_gettime(CLOCK_REALTIME, &now) == 0);
    CHECK(gmtime_r(&now.tv_sec, &utc) != NULL);
    char stamp[40];
    const size_t n_stamp = strftime(stamp, sizeof stamp, "%Y-%m-%dT%H:%M:%S", &utc);
    (void)snprintf(stamp + n_stamp, sizeof stamp - n_stamp, ".%03dZ", (int)(now.tv_nsec / 1000000));

    struct line line = {.n = 0};
    char head[160];
    (void)snprintf(head, sizeof head,
                   log_json ? "{\"ts\":\"%s\",\"level\":\"%s\",\"event\":\"%s\""
                            : "%s level=%s event=%s",
                   stamp, names[level], event);
    put_string(&line, head);
    if (log_json) {
        put_json_pairs(&line, pairs);
    } else if (pairs[0] != '\0') {
        put_string(&line, " ");
        put_string(&line, pairs);
    }
    const bool cut = line.cut || n_pairs < 0 || (size_t)n_pairs >= sizeof pairs;
    line.cut = false;
    const char *const mark = log_json ? ",\"truncated\":true" : " truncated=true";
    const char *const end = log_json ? "}\n" : "\n";
    (void)snprintf(line.text + line.n, sizeof line.text - line.n, "%s%s", cut ? mark : "", end);
    const size_t bytes = strlen(line.text);
    if (ring.buffer != NULL) {
        ring_add(line.text, bytes);
    } else {
        write_all(line.text, bytes);
    }
}

/* ---- the thread that writes ---------------------------------------------------------------- */

__attribute__((noreturn)) static void *ring_run(void *unused)
{
    (void)unused;
    static char taken[64 * 1024];
    pthread_mutex_lock(&ring.mutex);
    for (;;) {
        while (ring.n == 0) {
            pthread_cond_wait(&ring.changed, &ring.mutex);
        }
        const size_t until_end = ring.capacity - ring.begin;
        size_t bytes = ring.n < until_end ? ring.n : until_end;
        bytes = bytes < sizeof taken ? bytes : sizeof taken;
        memcpy(taken, ring.buffer + ring.begin, bytes);
        ring.begin = (ring.begin + bytes) % ring.capacity;
        ring.n -= bytes;
        ring.writing = true;
        pthread_mutex_unlock(&ring.mutex);
        write_all(taken, bytes);
        pthread_mutex_lock(&ring.mutex);
        ring.writing = false;
        pthread_cond_broadcast(&ring.changed);
        const long long n_untold = ring.n == 0 ? ring.n_untold : 0;
        if (n_untold > 0) { /* there is room again: say what is missing */
            ring.n_untold = 0;
            pthread_mutex_unlock(&ring.mutex);
            log_event(LEVEL_WARN, "log_lines_dropped", "lines=%lld", n_untold);
            pthread_mutex_lock(&ring.mutex);
        }
    }
}

enum err_code log_start(size_t buffer_bytes, struct err *err)
{
    CHECK(ring.buffer == NULL && buffer_bytes >= 2 * LOG_LINE_MAX);
    char *const buffer = malloc(buffer_bytes);
    if (buffer == NULL) {
        return err_set(err, ERR_MEMORY, "no memory for %zu bytes of log lines", buffer_bytes);
    }
    ring.buffer = buffer;
    ring.capacity = buffer_bytes;
    pthread_t thread;
    if (pthread_create(&thread, NULL, ring_run, NULL) != 0) {
        ring.buffer = NULL;
        free(buffer);
        return err_set(err, ERR_MEMORY, "the thread that writes the log cannot be started");
    }
    CHECK(pthread_detach(thread) == 0); /* it may be stuck in a write for ever */
    return ERR_OK;
}

void log_flush(int patience_ms)
{
    if (ring.buffer == NULL) {
        return;
    }
    struct timespec until;
    CHECK(clock_gettime(CLOCK_REALTIME, &until) == 0);
    until.tv_nsec += patience_ms % 1000 * 1000000L;
    until.tv_sec += patience_ms / 1000 + until.tv_nsec / 1000000000L;
    until.tv_nsec %= 1000000000L;
    pthread_mutex_lock(&ring.mutex);
    int status = 0;
    while ((ring.n > 0 || ring.writing) && status == 0) {
        status = pthread_cond_timedwait(&ring.changed, &ring.mutex, &until);
    }
    pthread_mutex_unlock(&ring.mutex);
}

long long log_dropped(void)
{
    return atomic_load_explicit(&log_n_dropped, memory_order_relaxed);
}
