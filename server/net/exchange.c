/* The answer side of an exchange: see exchange.h. */
#include "server/net/exchange.h"

#include "engine/engine.h"
#include "server/json/json.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void exchange_header(struct exchange *x, const char *name, const char *format, ...)
{
    CHECK(x->n_header < EXCHANGE_HEADER_MAX);
    char *value = NULL;
    va_list args;
    va_start(args, format);
    const int n = vasprintf(&value, format, args);
    va_end(args);
    if (n >= 0) { /* without memory for a header the answer goes out without it */
        x->header[x->n_header++] = (struct exchange_header){name, value};
    }
}

static int openai_status(const struct api_error *error)
{
    return error->status;
}

static void openai_put(struct text *out, const struct api_error *error, const char *request_id)
{
    json_open(out, '{');
    json_key(out, "error");
    json_open(out, '{');
    json_field_string(out, "message", error->text.message);
    json_field_string(out, "type", api_error_type(error->status));
    json_field_string(out, "param", error->param[0] != '\0' ? error->param : NULL);
    json_field_string(out, "code", error->code);
    json_close(out, '}');
    json_field_string(out, "request_id", request_id);
    json_close(out, '}');
}

static const struct exchange_errors openai_errors = {.status = openai_status, .put = openai_put};

static const struct exchange_errors *errors_of(const struct exchange *x)
{
    return x->errors != NULL ? x->errors : &openai_errors;
}

void exchange_put_error(struct exchange *x, const struct api_error *error)
{
    errors_of(x)->put(&x->out, error, x->id);
}

void exchange_error(struct exchange *x, const struct api_error *error)
{
    CHECK(error->status != 0 && error->code != NULL);
    text_free(&x->out);
    exchange_put_error(x, error);
    text_puts(&x->out, "\n");
    if (error->retry_after_s > 0) {
        exchange_header(x, "Retry-After", "%d", error->retry_after_s);
        exchange_header(x, "retry-after-ms", "%d", error->retry_after_s * 1000);
    }
    x->status = errors_of(x)->status(error);
    x->code = error->code;
    x->content_type = "application/json";
}

void exchange_refuse(struct exchange *x, int status, const char *code, const char *param,
                     const char *format, ...)
{
    char message[sizeof((struct err *)0)->message];
    va_list args;
    va_start(args, format);
    (void)vsnprintf(message, sizeof message, format, args);
    va_end(args);
    struct api_error error = {0};
    (void)api_error_set(&error, status, code, param, "%s", message);
    exchange_error(x, &error);
}

void exchange_json(struct exchange *x, int status)
{
    if (x->out.failed) {
        exchange_refuse(x, 500, "out_of_memory", NULL, "no memory for the answer");
        return;
    }
    text_puts(&x->out, "\n");
    x->status = status;
    x->content_type = "application/json";
}

void exchange_stream_head(struct exchange *x, const char *content_type,
                          const struct request *request)
{
    x->status = 200;
    x->content_type = content_type;
    exchange_header(x, "Cache-Control", "no-store");
    exchange_header(x, "X-Accel-Buffering", "no");
    exchange_header(x, "x-prompt-tokens", "%lld", (long long)x->n_prompt);
    const int64_t start_us = atomic_load(&request->start_us);
    if (start_us != 0) {
        exchange_header(x, "x-queue-time", "%.0f",
                        (double)(start_us - atomic_load(&request->submit_us)) * 1e-3);
    }
}

void exchange_free(struct exchange *x)
{
    if (x == NULL) {
        return;
    }
    if (x->work != NULL) {
        x->work->free(x->work_data);
    }
    for (int i = 0; i < x->n_header; i++) {
        free(x->header[i].value);
    }
    text_free(&x->body);
    text_free(&x->out);
    free(x);
}
