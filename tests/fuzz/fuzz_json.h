/* That an answer is JSON, for the fuzz targets of requests. */
#ifndef TESTS_FUZZ_JSON_H
#define TESTS_FUZZ_JSON_H

#include "kernels/err.h"
#include "server/json/text.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>

static inline void fuzz_json(struct text *out)
{
    CHECK(!out->failed && out->data != NULL);
    json_error_t why;
    /* The model may draw the byte 0, and a seed has 64 bits. */
    const size_t flags = JSON_REJECT_DUPLICATES | JSON_ALLOW_NUL | JSON_DECODE_INT_AS_REAL;
    json_t *const parsed = json_loadb(out->data, out->n, flags, &why);
    /* A token may be the byte 0, and its text a key: correct, but more than this reader takes. */
    if (parsed == NULL && json_error_code(&why) != json_error_null_byte_in_key) {
        (void)fprintf(stderr, "%s at byte %d of\n%.*s\n", why.text, why.position, (int)out->n,
                      out->data);
        abort();
    }
    json_decref(parsed);
}

#endif
