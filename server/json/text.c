/* The growing text buffer: see text.h. */
#include "server/json/text.h"

#include "kernels/err.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void text_free(struct text *text)
{
    if (text != NULL) {
        free(text->data);
        *text = (struct text){0};
    }
}

void text_clear(struct text *text)
{
    text->n = 0;
    text->comma = false;
}

/* Makes room for n more bytes; false when that is impossible. */
static bool text_reserve(struct text *text, size_t n)
{
    if (text->failed || n > SIZE_MAX / 2 - text->n) {
        text->failed = true;
        return false;
    }
    const size_t need = text->n + n;
    if (need <= text->capacity) {
        return true;
    }
    size_t capacity = text->capacity < 256 ? 256 : text->capacity;
    while (capacity < need) {
        capacity += capacity / 2;
    }
    char *const data = realloc(text->data, capacity);
    if (data == NULL) {
        text->failed = true;
        return false;
    }
    text->data = data;
    text->capacity = capacity;
    return true;
}

void text_add(struct text *text, const char *data, size_t n)
{
    if (n > 0 && text_reserve(text, n)) {
        memcpy(text->data + text->n, data, n);
        text->n += n;
    }
}

void text_puts(struct text *text, const char *string)
{
    text_add(text, string, strlen(string));
}

void text_printf(struct text *text, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    va_list again;
    va_copy(again, args);
    const int n = vsnprintf(NULL, 0, format, args);
    va_end(args);
    CHECK(n >= 0);
    if (text_reserve(text, (size_t)n + 1)) {
        (void)vsnprintf(text->data + text->n, (size_t)n + 1, format, again);
        text->n += (size_t)n;
    }
    va_end(again);
}
