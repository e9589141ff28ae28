/* The error of a request, as the HTTP contract has it. Parsers, routes and the transport share it;
 * how a dialect writes it on the wire is the dialect's own business (net/exchange.h). */
#ifndef SERVER_ERROR_H
#define SERVER_ERROR_H

#include "kernels/err.h"

#include <stdbool.h>

enum { API_PARAM_MAX = 96 };

struct api_error {
    int status;                /* HTTP status; 0 = no error */
    const char *code;          /* static: "invalid_value", ... */
    char param[API_PARAM_MAX]; /* field, "" = none */
    struct err text;           /* text.message says what is wrong and what to do */
    int retry_after_s;         /* for the header; 0 = none */
    bool is_for_good;          /* "out_of_memory" of this body also where there is more memory */
};

/* Sets the error unless there is one already. param may be NULL. Always returns false, so that a
 * parser can end with `return api_error_set(...)`. */
bool api_error_set(struct api_error *error, int status, const char *code, const char *param,
                   const char *format, ...) __attribute__((format(printf, 5, 6)));
/* "invalid_request_error", ...: the contract's type of a status. */
const char *api_error_type(int status);

#endif
