/* Errors of the HTTP contract: see error.h. */
#include "server/json/error.h"

#include <stdarg.h>
#include <stdio.h>

bool api_error_set(struct api_error *error, int status, const char *code, const char *param,
                   const char *format, ...)
{
    if (error->status != 0) {
        return false;
    }
    char message[sizeof error->text.message];
    va_list args;
    va_start(args, format);
    (void)vsnprintf(message, sizeof message, format, args);
    va_end(args);
    error->status = status;
    error->code = code;
    (void)snprintf(error->param, sizeof error->param, "%s", param != NULL ? param : "");
    (void)err_set(&error->text, ERR_ARGUMENT, "%s", message);
    return false;
}

const char *api_error_type(int status)
{
    switch (status) {
    case 401: return "authentication_error";
    case 403: return "permission_error";
    case 404:
    case 405: return "not_found_error";
    case 429: return "rate_limit_error";
    case 500: return "server_error";
    case 503: return "unavailable_error";
    case 504: return "timeout_error";
    default: return "invalid_request_error";
    }
}
