/* The error type and CHECK: see err.h. */
#include "kernels/err.h"

#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

/* Bytes of the character at c, of UTF-8 that ends in NUL; 0: it is none, or it is one that a
 * terminal or a reader of lines would take for more than text: a control, the end of a line or a
 * paragraph, a change of direction. */
static int shown_bytes(const unsigned char *c)
{
    if (c[0] < 0x80) {
        return c[0] >= 0x20 && c[0] != 0x7f;
    }
    const int n = c[0] >= 0xf0 ? 4 : c[0] >= 0xe0 ? 3 : 2;
    uint32_t code = c[0] & (0x7fu >> n);
    for (int i = 1; i < n; i++) {
        if ((c[i] & 0xc0) != 0x80) {
            return 0;
        }
        code = code << 6 | (c[i] & 0x3fu);
    }
    const bool is_short = code < (n == 4 ? 0x10000u : n == 3 ? 0x800u : 0x80u);
    const bool is_none = c[0] < 0xc2 || c[0] > 0xf4 || is_short || code > 0x10ffff ||
                         (code >= 0xd800 && code < 0xe000);
    const bool is_control =
        code < 0xa0 || (code >= 0x2028 && code <= 0x202e) || (code >= 0x2066 && code <= 0x2069);
    return is_none || is_control ? 0 : n;
}

enum err_code err_set(struct err *err, enum err_code code, const char *format, ...)
{
    if (err == NULL) {
        return code;
    }
    va_list args;
    va_start(args, format);
    err->code = code;
    (void)vsnprintf(err->message, sizeof err->message, format, args);
    va_end(args);
    for (char *c = err->message; *c != '\0';) {
        const int n = shown_bytes((const unsigned char *)c);
        if (n == 0) {
            *c = '?';
        }
        c += n > 0 ? n : 1;
    }
    return code;
}

const char *err_code_name(enum err_code code)
{
    switch (code) {
    case ERR_OK: return "ok";
    case ERR_ARGUMENT: return "argument";
    case ERR_IO: return "io";
    case ERR_FORMAT: return "format";
    case ERR_UNSUPPORTED: return "unsupported";
    case ERR_MEMORY: return "memory";
    case ERR_DEVICE: return "device";
    case ERR_NUMERICAL: return "numerical";
    case ERR_QUEUE_FULL: return "queue_full";
    case ERR_QUEUE_TOKENS: return "queue_tokens_full";
    case ERR_QUEUE_MEMORY: return "queue_memory_full";
    case ERR_CLOSED: return "closed";
    case ERR_TIMEOUT: return "timeout";
    }
    return "unknown";
}

void check_failed(const char *file, int line, const char *condition)
{
    (void)fprintf(stderr, "%s:%d: CHECK failed: %s\n", file, line, condition);
    abort();
}
