/* The log: one event, one line, on standard error. Any thread.
 *
 * A tool's events are written at once. A server calls log_start: then a thread of its own writes
 * the lines, which wait for it in a buffer. So nobody else ever waits for standard error, whose
 * reader may have stopped; lines that find the buffer full are dropped and counted, and once there
 * is room again the event log_lines_dropped says how many are missing.
 *
 *   2026-01-31T12:00:00.123Z level=info event=ready port=8000 model="my model"
 *   {"ts":"2026-01-31T12:00:00.123Z","level":"info","event":"ready","port":8000,"model":"my model"}
 *
 * The format of an event gives space-separated key=value pairs; a value that may hold anything but
 * letters, digits and common punctuation goes through log_quote. */
#ifndef ENGINE_LOG_H
#define ENGINE_LOG_H

#include "kernels/err.h"

#include <stdbool.h>
#include <stddef.h>

enum log_level { LEVEL_DEBUG, LEVEL_INFO, LEVEL_WARN, LEVEL_ERROR };

/* Longest line; what is longer is cut and marked with truncated=true. */
enum { LOG_LINE_MAX = 4096 };

/* Once, before other threads start. Until then: info, as text. */
void log_begin(enum log_level least, bool json);

/* From now on lines wait in a buffer of so many bytes, at least 2 * LOG_LINE_MAX, for a thread that
 * writes them. Once, after log_begin. The thread lives as long as the process. */
enum err_code log_start(size_t buffer_bytes, struct err *err);
/* Before the end: waits until all lines are written, for so long at most. */
void log_flush(int patience_ms);
/* Lines dropped since the start. */
long long log_dropped(void);

void log_event(enum log_level level, const char *event, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* Writes text in double quotes into out, with quotes, backslashes and control characters escaped as
 * in JSON, cut to fit; returns out. */
const char *log_quote(char *out, size_t out_max, const char *text);

#endif
