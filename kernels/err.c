/* The error type and CHECK: see err.h. */
#include "kernels/err.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

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
    for (char *c = err->message; *c != '\0'; c++) {
        if ((unsigned char)*c < 0x20 || *c == 0x7f) {
            *c = '?';
        }
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
