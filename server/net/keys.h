/* Who may ask: the API keys of --api-key-file, and what a request's head says of its sender.
 *
 * The file has one key per line, and behind it, after a blank, the overlays that it is bound to,
 * separated by commas; blank lines and lines that begin with # are left out. It is read
 * at start and again after SIGHUP; a file that cannot be taken then leaves the old keys in force.
 * Keys are compared in a time that depends on their number alone. */
#ifndef SERVER_KEYS_H
#define SERVER_KEYS_H

#include "engine/overlays.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    KEYS_MAX = 1024,
    KEY_BYTES_MAX = 256,
    TRACE_ID_MAX = 33,  /* 32 hexadecimal digits and the end */
    TRACE_SPAN_MAX = 17 /* 16 */
};

struct keys;

/* ERR_IO if the file cannot be read, ERR_FORMAT names path and line of what is no key. */
enum err_code keys_open(struct keys **keys, const char *path, struct err *err);
void keys_close(struct keys *keys); /* NULL is fine */

/* Reads the file again; *n becomes the number of keys. Any thread. */
enum err_code keys_reload(struct keys *keys, int *n, struct err *err);

/* The number of keys now. Any thread. */
int keys_n(struct keys *keys);

/* Whether an Authorization header (NULL = none) names one of the keys: "Bearer KEY". Then *client
 * is that key's number, 1 or more: no other key has it as long as the program runs, also after a
 * reload. Any thread. */
bool keys_allow(struct keys *keys, const char *authorization, uint64_t *client);

/* The overlays that the key with this number is bound to; n 0 = none, or there is no such key any
 * more. Any thread. */
void keys_binding(struct keys *keys, uint64_t client, struct overlay_names *binding);

struct key {
    size_t bytes;
    char text[KEY_BYTES_MAX]; /* zeros after bytes */
    uint64_t client;          /* its number: see keys_allow. Not from the file */
    struct overlay_names binding;
};
/* Reads text as a key file into key, at most KEYS_MAX; path is for errors. */
enum err_code keys_parse(struct key *key, int *n, const char *text, size_t bytes, const char *path,
                         struct err *err);

/* The ids of a W3C traceparent header (Trace Context, section 3.2): version-trace-parent-flags.
 * false: absent or not valid, and both ids are "". */
bool keys_trace(const char *traceparent, char trace_id[TRACE_ID_MAX], char span_id[TRACE_SPAN_MAX]);

#endif
