/* The writer of every JSON answer.
 *
 * Answers are written front to back in the contract's field order, straight into one buffer: a
 * scored document of 100,000 tokens is far cheaper this way than as a tree of values. The writer
 * puts the commas; the caller opens, names and closes. Reading JSON is fields.h. */
#ifndef SERVER_JSON_H
#define SERVER_JSON_H

#include "server/json/text.h"

void json_open(struct text *text, char bracket); /* '{' or '[' */
void json_close(struct text *text, char bracket);
/* Names the next value. name is plain ASCII without characters to escape. */
void json_key(struct text *text, const char *name);

/* data is valid UTF-8; other bytes become U+FFFD, so that an answer is always valid JSON. */
void json_string_n(struct text *text, const char *data, size_t n);
/* The same in parts, none of which ends within a character. */
void json_string_begin(struct text *text);
void json_string_part(struct text *text, const char *data, size_t n);
void json_string_end(struct text *text);
void json_put_string(struct text *text, const char *string); /* NULL is written as null */
void json_put_int(struct text *text, int64_t value);
void json_put_uint(struct text *text, uint64_t value);
void json_put_bool(struct text *text, bool value);
void json_put_null(struct text *text);
/* Fixed round-trip precision, so that equal numbers print equal: 9 digits for a float, 17 for a
 * double. NaN and infinities are written as null. */
void json_put_float(struct text *text, float value);
void json_put_double(struct text *text, double value);
/* Milliseconds and rates: 3 decimals are enough, and shorter. */
void json_put_fixed(struct text *text, double value);

/* The same with their name. */
void json_field_string(struct text *text, const char *name, const char *string);
void json_field_int(struct text *text, const char *name, int64_t value);
void json_field_bool(struct text *text, const char *name, bool value);
void json_field_null(struct text *text, const char *name);
void json_field_float(struct text *text, const char *name, float value);
/* A setting that somebody gave, in the fewest digits that are the same float: 0.7, not
 * 0.699999988. */
void json_field_setting(struct text *text, const char *name, float value);
void json_field_double(struct text *text, const char *name, double value);
void json_field_fixed(struct text *text, const char *name, double value);

#endif
