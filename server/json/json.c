/* The JSON writer: see json.h. */
#include "server/json/json.h"

#include "kernels/utf8.h"
#include "kernels/err.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void json_separate(struct text *text)
{
    if (text->comma) {
        text_add(text, ",", 1);
    }
    text->comma = true;
}

void json_open(struct text *text, char bracket)
{
    json_separate(text);
    text_add(text, &bracket, 1);
    text->comma = false;
}

void json_close(struct text *text, char bracket)
{
    text_add(text, &bracket, 1);
    text->comma = true;
}

void json_key(struct text *text, const char *name)
{
    json_separate(text);
    text_add(text, "\"", 1);
    text_puts(text, name);
    text_add(text, "\":", 2);
    text->comma = false;
}

static void json_escape(struct text *text, unsigned char c)
{
    switch (c) {
    case '"': text_add(text, "\\\"", 2); break;
    case '\\': text_add(text, "\\\\", 2); break;
    case '\n': text_add(text, "\\n", 2); break;
    case '\r': text_add(text, "\\r", 2); break;
    case '\t': text_add(text, "\\t", 2); break;
    default: text_printf(text, "\\u%04x", c); break;
    }
}

void json_string_begin(struct text *text)
{
    json_separate(text);
    text_add(text, "\"", 1);
}

void json_string_part(struct text *text, const char *data, size_t n)
{
    CHECK(data != NULL || n == 0);
    size_t plain = 0; /* first byte not yet written */
    size_t i = 0;
    while (i < n) {
        const struct utf8_char c = utf8_next(data + i, n - i);
        const bool valid = c.status == UTF8_CHAR;
        if (valid && c.code >= 0x20 && c.code != '"' && c.code != '\\' && c.code != 0x7f) {
            i += (size_t)c.bytes;
            continue;
        }
        text_add(text, data + plain, i - plain);
        if (valid) {
            json_escape(text, (unsigned char)c.code);
        } else {
            text_add(text, "\xef\xbf\xbd", 3);
        }
        i += (size_t)c.bytes;
        plain = i;
    }
    if (n > plain) {
        text_add(text, data + plain, n - plain);
    }
}

void json_string_end(struct text *text)
{
    text_add(text, "\"", 1);
}

void json_string_n(struct text *text, const char *data, size_t n)
{
    json_string_begin(text);
    json_string_part(text, data, n);
    json_string_end(text);
}

void json_put_string(struct text *text, const char *string)
{
    if (string == NULL) {
        json_put_null(text);
    } else {
        json_string_n(text, string, strlen(string));
    }
}

/* By hand: in long lists of ids, printf was most of the time. */
static void json_put_decimal(struct text *text, bool is_negative, uint64_t value)
{
    char digits[24];
    size_t at = sizeof digits;
    for (; value >= 10; value /= 10) {
        digits[--at] = (char)('0' + value % 10);
    }
    digits[--at] = (char)('0' + value);
    if (is_negative) {
        digits[--at] = '-';
    }
    json_separate(text);
    text_add(text, digits + at, sizeof digits - at);
}

void json_put_int(struct text *text, int64_t value)
{
    json_put_decimal(text, value < 0, value < 0 ? -(uint64_t)value : (uint64_t)value);
}

void json_put_uint(struct text *text, uint64_t value)
{
    json_put_decimal(text, false, value);
}

void json_put_bool(struct text *text, bool value)
{
    json_separate(text);
    text_puts(text, value ? "true" : "false");
}

void json_put_null(struct text *text)
{
    json_separate(text);
    text_add(text, "null", 4);
}

/* A real number keeps a mark of being one: 1 is written as 1.0. */
static void json_put_digits(struct text *text, double value, const char *format)
{
    if (!isfinite(value)) {
        json_put_null(text);
        return;
    }
    char digits[64];
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wformat-nonliteral"
    const int n = snprintf(digits, sizeof digits, format, value);
#pragma GCC diagnostic pop
    CHECK(n > 0 && (size_t)n < sizeof digits);
    json_separate(text);
    text_add(text, digits, (size_t)n);
    if (strpbrk(digits, ".e") == NULL) {
        text_add(text, ".0", 2);
    }
}

void json_put_float(struct text *text, float value)
{
    json_put_digits(text, (double)value, "%.9g");
}

void json_put_double(struct text *text, double value)
{
    json_put_digits(text, value, "%.17g");
}

void json_put_fixed(struct text *text, double value)
{
    /* %f of a huge number would not fit the buffer: 1e15 ms are 31,000 years. */
    json_put_digits(text, value, fabs(value) < 1e15 ? "%.3f" : "%.17g");
}

void json_field_string(struct text *text, const char *name, const char *string)
{
    json_key(text, name);
    json_put_string(text, string);
}

void json_field_int(struct text *text, const char *name, int64_t value)
{
    json_key(text, name);
    json_put_int(text, value);
}

void json_field_bool(struct text *text, const char *name, bool value)
{
    json_key(text, name);
    json_put_bool(text, value);
}

void json_field_null(struct text *text, const char *name)
{
    json_key(text, name);
    json_put_null(text);
}

void json_field_float(struct text *text, const char *name, float value)
{
    json_key(text, name);
    json_put_float(text, value);
}

void json_field_setting(struct text *text, const char *name, float value)
{
    static const char *const formats[] = {"%.6g", "%.7g", "%.8g", "%.9g"};
    const char *format = formats[0];
    for (int i = 0; i < 3; i++) {
        char digits[32];
        (void)snprintf(digits, sizeof digits, "%.*g", 6 + i, (double)value);
        if (strtof(digits, NULL) == value) {
            break;
        }
        format = formats[i + 1];
    }
    json_key(text, name);
    json_put_digits(text, (double)value, format);
}

void json_field_double(struct text *text, const char *name, double value)
{
    json_key(text, name);
    json_put_double(text, value);
}

void json_field_fixed(struct text *text, const char *name, double value)
{
    json_key(text, name);
    json_put_fixed(text, value);
}
