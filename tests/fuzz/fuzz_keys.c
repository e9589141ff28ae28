/* Fuzz target: a key file, an Authorization header and a traceparent header from any bytes. Needs
 * server/net/keys.c alone. Run by `make fuzz`; tests/fuzz/corpus/keys holds the seeds. */
#include "server/net/keys.h"

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/mman.h>
#include <unistd.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

static void check_keys(const char *text, size_t bytes)
{
    static struct key key[KEYS_MAX];
    struct err err = {0};
    int n = 0;
    const enum err_code code = keys_parse(key, &n, text, bytes, "fuzz", &err);
    if (code != ERR_OK) {
        CHECK(err.code == code && err.message[0] != '\0' && strchr(err.message, '\n') == NULL);
        return;
    }
    CHECK(n >= 1 && n <= KEYS_MAX);
    for (int i = 0; i < n; i++) {
        CHECK(key[i].bytes >= 1 && key[i].bytes <= KEY_BYTES_MAX && key[i].text[0] != '#');
        CHECK(memchr(key[i].text, ' ', key[i].bytes) == NULL);
        CHECK(key[i].binding.n >= 0 && key[i].binding.n <= OVERLAYS_OF_REQUEST);
        for (int b = 0; b < key[i].binding.n; b++) {
            CHECK(overlays_is_name(key[i].binding.name[b]));
        }
    }
}

/* The keys "k1" and "k2" of a file, the second one bound to an overlay. */
static struct keys *open_keys(void)
{
    static const char file[] = "k1\nk2 acme\n";
    struct keys *keys = NULL;
    char path[64];
    const int fd = memfd_create("keys", MFD_CLOEXEC);
    CHECK(fd >= 0 && write(fd, file, sizeof file - 1) == sizeof file - 1);
    (void)snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    CHECK(keys_open(&keys, path, NULL) == ERR_OK && keys_n(keys) == 2);
    (void)close(fd);
    return keys;
}

static void check_authorization(const char *text)
{
    static struct keys *keys;
    keys = keys != NULL ? keys : open_keys();
    uint64_t client = 0;
    if (keys_allow(keys, text, &client)) {
        struct overlay_names binding;
        CHECK(client == 1 || client == 2);
        const char *const word = strstr(text, client == 1 ? " k1" : " k2");
        CHECK(word != NULL && (word[3] == '\0' || word[3] == ' ' || word[3] == '\t'));
        CHECK(strncasecmp(text, "bearer ", 7) == 0);
        keys_binding(keys, client, &binding);
        CHECK(binding.n == (client == 2));
    } else {
        CHECK(client == 0);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    char *const text = malloc(bytes + 1);
    CHECK(text != NULL);
    memcpy(text, data, bytes);
    text[bytes] = '\0';
    check_keys(text, bytes);
    check_authorization(text);
    char trace[TRACE_ID_MAX];
    char span[TRACE_SPAN_MAX];
    if (keys_trace(text, trace, span)) {
        CHECK(strlen(trace) == TRACE_ID_MAX - 1 && strlen(span) == TRACE_SPAN_MAX - 1);
    } else {
        CHECK(trace[0] == '\0' && span[0] == '\0');
    }
    free(text);
    return 0;
}
