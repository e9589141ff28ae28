/* The error type and CHECK: see err.h. */
#include "kernels/err.h"
#include "kernels/utf8.h"

#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Whether a terminal or a reader of lines would take the character for more than text: a control,
 * the end of a line or a paragraph, a change of direction. */
static bool is_control(uint32_t code)
{
    return code < 0x20 || (code >= 0x7f && code < 0xa0) || (code >= 0x2028 && code <= 0x202e) ||
           (code >= 0x2066 && code <= 0x2069);
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
    size_t left = strlen(err->message);
    for (char *c = err->message; left > 0;) {
        const struct utf8_char next = utf8_next(c, left);
        const bool shown = next.status == UTF8_CHAR && !is_control(next.code);
        const size_t n = shown ? (size_t)next.bytes : 1;
        *c = shown ? *c : '?';
        c += n;
        left -= n;
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
