/* A growing text buffer, for answers and events. Running out of memory is sticky: adding goes on as
 * a no-op, and whoever sends the text asks `failed` at the end. */
#ifndef SERVER_TEXT_H
#define SERVER_TEXT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct text {
    char *data; /* Owner: this. [n] bytes, not NUL-terminated; NULL while empty */
    size_t n;
    size_t capacity;
    bool failed; /* out of memory happened */
    bool comma;  /* for json.c: a value precedes at this level */
};

void text_free(struct text *text); /* frees the data and empties; NULL is fine */
void text_clear(struct text *text);
void text_add(struct text *text, const char *data, size_t n);
void text_puts(struct text *text, const char *string);
void text_printf(struct text *text, const char *format, ...) __attribute__((format(printf, 2, 3)));

#endif
