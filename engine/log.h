/* The log: one event, one line, on standard error, written by one write(2), so lines of several
 * threads do not mix. Any thread.
 *
 *   2026-01-31T12:00:00.123Z level=info event=ready port=8000 model="my model"
 *   {"ts":"2026-01-31T12:00:00.123Z","level":"info","event":"ready","port":8000,"model":"my model"}
 *
 * The format of an event gives space-separated key=value pairs; a value that may hold anything but
 * letters, digits and common punctuation goes through log_quote. */
#ifndef ENGINE_LOG_H
#define ENGINE_LOG_H

#include <stdbool.h>
#include <stddef.h>

enum log_level { LEVEL_DEBUG, LEVEL_INFO, LEVEL_WARN, LEVEL_ERROR };

/* Longest line; what is longer is cut and marked with truncated=true. */
enum { LOG_LINE_MAX = 4096 };

/* Once, before other threads start. Until then: info, as text. */
void log_begin(enum log_level least, bool json);

void log_event(enum log_level level, const char *event, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* Writes text in double quotes into out, with quotes, backslashes and control characters escaped as
 * in JSON, cut to fit; returns out. */
const char *log_quote(char *out, size_t out_max, const char *text);

#endif
