/* Fuzz target: a key file, an Authorization header and a traceparent header from any bytes. Needs
 * server/net/keys.c alone. Run by `make fuzz`; tests/fuzz/corpus/keys holds the seeds. */
#include "server/net/keys.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

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

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    char *const text = malloc(bytes + 1);
    CHECK(text != NULL);
    memcpy(text, data, bytes);
    text[bytes] = '\0';
    check_keys(text, bytes);
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
