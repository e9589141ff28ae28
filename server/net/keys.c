/* API keys and trace ids: see keys.h. */
#include "server/net/keys.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

enum { KEYS_FILE_MAX = KEYS_MAX * (KEY_BYTES_MAX + 64 + OVERLAYS_OF_REQUEST * OVERLAY_NAME_MAX) };

struct keys {
    const char *path; /* Borrowed */
    pthread_rwlock_t lock;
    /* Guard of the following: lock. */
    struct key *key; /* Owner: this. [n] */
    int n;
    uint64_t n_client; /* numbers given to keys so far */
};

/* ---- the file ------------------------------------------------------------------------------ */

static bool is_blank(char c)
{
    return c == ' ' || c == '\t' || c == '\r';
}

/* "acme,fix-7", perhaps with blanks around the names and brackets around all. */
static enum err_code parse_binding(struct overlay_names *binding, const char *list, size_t bytes,
                                   int number, const char *path, struct err *err)
{
    if (bytes >= 2 && list[0] == '[' && list[bytes - 1] == ']') {
        list++;
        bytes -= 2;
    }
    for (size_t at = 0; at <= bytes;) {
        const char *const comma = memchr(list + at, ',', bytes - at);
        size_t end = comma != NULL ? (size_t)(comma - list) : bytes;
        const size_t next = end + 1;
        while (at < end && is_blank(list[at])) {
            at++;
        }
        while (end > at && is_blank(list[end - 1])) {
            end--;
        }
        char name[OVERLAY_NAME_MAX] = "";
        if (end - at < sizeof name) {
            memcpy(name, list + at, end - at);
        }
        if (strlen(name) != end - at || !overlays_is_name(name) ||
            binding->n == OVERLAYS_OF_REQUEST) {
            return err_set(
                err, ERR_FORMAT,
                "%s: line %d: after a key and a blank come the names of its overlays, "
                "%d at most, each 1 to %d of a-z, 0-9, \".\", \"_\" and \"-\", separated by "
                "commas",
                path, number, OVERLAYS_OF_REQUEST, OVERLAY_NAME_MAX - 1);
        }
        memcpy(binding->name[binding->n++], name, sizeof name);
        at = next;
    }
    return ERR_OK;
}

static enum err_code parse_line(struct key *key, int n, const char *line, size_t bytes, int number,
                                const char *path, struct err *err)
{
    const size_t line_bytes = bytes;
    for (bytes = 0; bytes < line_bytes && !is_blank(line[bytes]); bytes++) {
    }
    if (bytes > KEY_BYTES_MAX) {
        return err_set(err, ERR_FORMAT, "%s: line %d has %zu bytes, but a key has at most %d", path,
                       number, bytes, KEY_BYTES_MAX);
    }
    for (size_t i = 0; i < bytes; i++) {
        if (line[i] <= 0x20 || line[i] >= 0x7f) {
            return err_set(err, ERR_FORMAT,
                           "%s: line %d has a byte that is not printable ASCII: give one key per "
                           "line",
                           path, number);
        }
    }
    if (n >= KEYS_MAX) {
        return err_set(err, ERR_FORMAT, "%s: line %d: more than %d keys", path, number, KEYS_MAX);
    }
    memset(&key[n], 0, sizeof key[n]);
    memcpy(key[n].text, line, bytes);
    key[n].bytes = bytes;
    size_t list = bytes;
    while (list < line_bytes && is_blank(line[list])) {
        list++;
    }
    return list == line_bytes
               ? ERR_OK
               : parse_binding(&key[n].binding, line + list, line_bytes - list, number, path, err);
}

enum err_code keys_parse(struct key *key, int *n, const char *text, size_t bytes, const char *path,
                         struct err *err)
{
    *n = 0;
    int number = 0;
    for (size_t at = 0; at < bytes;) {
        const char *const end = memchr(text + at, '\n', bytes - at);
        size_t stop = end != NULL ? (size_t)(end - text) : bytes;
        const size_t next = stop + 1;
        number++;
        while (at < stop && is_blank(text[at])) {
            at++;
        }
        while (stop > at && is_blank(text[stop - 1])) {
            stop--;
        }
        if (stop > at && text[at] != '#') {
            const enum err_code code = parse_line(key, *n, text + at, stop - at, number, path, err);
            if (code != ERR_OK) {
                return code;
            }
            (*n)++;
        }
        at = next;
    }
    if (*n == 0) {
        return err_set(err, ERR_FORMAT, "%s: no key in it: give one key per line", path);
    }
    return ERR_OK;
}

/* *text is malloc'd. */
static enum err_code read_file(const char *path, char **text, size_t *bytes, struct err *err)
{
    /* A pipe that nobody writes to is at its end, not waited for; one that somebody does is read. */
    const int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    FILE *const file = fd >= 0 && fcntl(fd, F_SETFL, O_RDONLY) == 0 ? fdopen(fd, "r") : NULL;
    if (file == NULL) {
        if (fd >= 0) {
            (void)close(fd);
        }
        return err_set(err, ERR_IO, "--api-key-file %s: %s", path, strerror(errno));
    }
    *text = malloc(KEYS_FILE_MAX + 1);
    *bytes = *text != NULL ? fread(*text, 1, KEYS_FILE_MAX + 1, file) : 0;
    const bool failed = ferror(file) != 0;
    (void)fclose(file);
    enum err_code code = ERR_OK;
    if (*text == NULL) {
        code = err_set(err, ERR_MEMORY, "%s: no memory to read it", path);
    } else if (failed) {
        code = err_set(err, ERR_IO, "%s: %s", path, strerror(errno));
    } else if (*bytes > KEYS_FILE_MAX) {
        code = err_set(err, ERR_FORMAT, "%s: more than %d bytes", path, (int)KEYS_FILE_MAX);
    }
    if (code != ERR_OK) {
        free(*text);
        *text = NULL;
    }
    return code;
}

/* The number of the equal key; 0 = none is equal. */
static uint64_t number_of(const struct key *key, int n, const struct key *wanted)
{
    for (int i = 0; i < n; i++) {
        if (key[i].bytes == wanted->bytes &&
            memcmp(key[i].text, wanted->text, wanted->bytes) == 0) {
            return key[i].client;
        }
    }
    return 0;
}

/* Gives each key the number that an equal one has already, or a new one. Guard: lock. */
static void number_keys(struct keys *keys, struct key *fresh, int n)
{
    for (int i = 0; i < n; i++) {
        uint64_t client = number_of(keys->key, keys->n, &fresh[i]);
        client = client != 0 ? client : number_of(fresh, i, &fresh[i]); /* a key stated twice */
        fresh[i].client = client != 0 ? client : ++keys->n_client;
    }
}

enum err_code keys_reload(struct keys *keys, int *n, struct err *err)
{
    char *text = NULL;
    size_t bytes = 0;
    enum err_code code = read_file(keys->path, &text, &bytes, err);
    if (code != ERR_OK) {
        return code;
    }
    struct key *fresh = calloc(KEYS_MAX, sizeof *fresh);
    if (fresh == NULL) {
        code = err_set(err, ERR_MEMORY, "%s: no memory for the keys", keys->path);
    } else {
        code = keys_parse(fresh, n, text, bytes, keys->path, err);
    }
    if (code == ERR_OK) {
        (void)pthread_rwlock_wrlock(&keys->lock);
        number_keys(keys, fresh, *n);
        struct key *const old = keys->key;
        keys->key = fresh;
        keys->n = *n;
        (void)pthread_rwlock_unlock(&keys->lock);
        fresh = old;
    }
    free(fresh);
    free(text);
    return code;
}

enum err_code keys_open(struct keys **keys, const char *path, struct err *err)
{
    *keys = calloc(1, sizeof **keys);
    if (*keys == NULL || pthread_rwlock_init(&(*keys)->lock, NULL) != 0) {
        free(*keys);
        *keys = NULL;
        return err_set(err, ERR_MEMORY, "%s: no memory for the keys", path);
    }
    (*keys)->path = path;
    int n = 0;
    const enum err_code code = keys_reload(*keys, &n, err);
    if (code != ERR_OK) {
        keys_close(*keys);
        *keys = NULL;
    }
    return code;
}

void keys_close(struct keys *keys)
{
    if (keys != NULL) {
        (void)pthread_rwlock_destroy(&keys->lock);
        free(keys->key);
        free(keys);
    }
}

/* ---- requests ------------------------------------------------------------------------------ */

/* The number of the equal key; 0 = none is equal. Looks at every byte of every key, whatever it
 * finds. */
static uint64_t find_equal(const struct key *key, int n, const struct key *given)
{
    uint64_t found = 0;
    for (int i = 0; i < n; i++) {
        size_t differs = key[i].bytes ^ given->bytes;
        for (int b = 0; b < KEY_BYTES_MAX; b++) {
            differs |= (size_t)(unsigned char)(key[i].text[b] ^ given->text[b]);
        }
        found |= differs == 0 ? key[i].client : 0;
    }
    return found;
}

int keys_n(struct keys *keys)
{
    (void)pthread_rwlock_rdlock(&keys->lock);
    const int n = keys->n;
    (void)pthread_rwlock_unlock(&keys->lock);
    return n;
}

bool keys_allow(struct keys *keys, const char *authorization, uint64_t *client)
{
    static const char scheme[] = "bearer";
    if (authorization == NULL || strncasecmp(authorization, scheme, sizeof scheme - 1) != 0 ||
        authorization[sizeof scheme - 1] != ' ') {
        return false;
    }
    const char *const token =
        authorization + sizeof scheme - 1 + strspn(authorization + sizeof scheme - 1, " ");
    struct key given = {.bytes = strcspn(token, " \t")};
    const char *const rest = token + given.bytes;
    if (given.bytes == 0 || given.bytes > KEY_BYTES_MAX || rest[strspn(rest, " \t")] != '\0') {
        return false;
    }
    memcpy(given.text, token, given.bytes);
    (void)pthread_rwlock_rdlock(&keys->lock);
    const uint64_t found = find_equal(keys->key, keys->n, &given);
    (void)pthread_rwlock_unlock(&keys->lock);
    *client = found != 0 ? found : *client;
    return found != 0;
}

void keys_binding(struct keys *keys, uint64_t client, struct overlay_names *binding)
{
    binding->n = 0;
    (void)pthread_rwlock_rdlock(&keys->lock);
    for (int i = 0; i < keys->n; i++) {
        if (keys->key[i].client == client) {
            *binding = keys->key[i].binding;
        }
    }
    (void)pthread_rwlock_unlock(&keys->lock);
}

/* n lower-case hexadecimal digits, not all zero unless zero_too. */
static bool is_hex(const char *text, size_t n, bool zero_too)
{
    return strspn(text, "0123456789abcdef") >= n && (zero_too || strspn(text, "0") < n);
}

bool keys_trace(const char *traceparent, char trace_id[TRACE_ID_MAX], char span_id[TRACE_SPAN_MAX])
{
    enum { TRACE_AT = 3, SPAN_AT = 36, FLAGS_AT = 53, LENGTH = 55 };
    trace_id[0] = '\0';
    span_id[0] = '\0';
    const size_t bytes = traceparent != NULL ? strlen(traceparent) : 0;
    if (bytes < LENGTH || traceparent[TRACE_AT - 1] != '-' || traceparent[SPAN_AT - 1] != '-' ||
        traceparent[FLAGS_AT - 1] != '-' || !is_hex(traceparent, 2, true) ||
        !is_hex(traceparent + TRACE_AT, TRACE_ID_MAX - 1, false) ||
        !is_hex(traceparent + SPAN_AT, TRACE_SPAN_MAX - 1, false) ||
        !is_hex(traceparent + FLAGS_AT, 2, true) || strncmp(traceparent, "ff", 2) == 0) {
        return false;
    }
    /* Version 00 ends here; later ones may go on after another dash. */
    const bool is_first = strncmp(traceparent, "00", 2) == 0;
    if (bytes > LENGTH && (is_first || traceparent[LENGTH] != '-')) {
        return false;
    }
    memcpy(trace_id, traceparent + TRACE_AT, TRACE_ID_MAX - 1);
    trace_id[TRACE_ID_MAX - 1] = '\0';
    memcpy(span_id, traceparent + SPAN_AT, TRACE_SPAN_MAX - 1);
    span_id[TRACE_SPAN_MAX - 1] = '\0';
    return true;
}
