/* Reading a request's JSON strictly.
 *
 * A request body is one JSON object. Duplicate keys, invalid UTF-8, NaN and bytes after the end are
 * errors; so is a value of another type than the contract's: a boolean is not a number, 1.0
 * is the integer 1, 1.5 is not. null stands for "not given". Names that nobody asked for are
 * collected: the answer lists them in X-Ignored-Fields, or with --strict the request is refused.
 * The first error wins and is sticky, so that a parser reads all its fields in one go and asks
 * once. */
#ifndef SERVER_FIELDS_H
#define SERVER_FIELDS_H

#include "server/json/error.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct json_t; /* jansson's; only the parsers include its header */

/* ---- one object ---------------------------------------------------------------------------- */

enum { FIELDS_SEEN_MAX = 128, FIELDS_IGNORED_MAX = 1024 };

struct fields {
    struct json_t *object; /* Owner: this */
    const char *body;      /* Borrowed: the text that object came from */
    size_t body_bytes;
    const char *parent;                /* static: the field that object is; NULL = the body */
    const struct fields *defaults;     /* Borrowed: values for what this object leaves out; NULL =
                                        * none */
    const char *seen[FIELDS_SEEN_MAX]; /* static names that the parser has asked for */
    int n_seen;
    struct api_error *error; /* Borrowed */
};

/* Parses body. false: error says why. The fields must be closed in either case. */
bool fields_open(struct fields *fields, const char *body, size_t bytes, struct api_error *error);
void fields_close(struct fields *fields);
/* Opens the object that name holds, borrowed from fields and not to be closed. false: name is
 * absent or null, or no object, which is an error. */
bool fields_open_in(struct fields *inner, struct fields *fields, const char *name);

/* The value of name, or NULL if it is absent or null and has no default. alias may be NULL; both
 * given is an error. */
struct json_t *fields_get(struct fields *fields, const char *name, const char *alias);
/* Whether name has a value; used to tell dialects apart, so it does not count as asking for the
 * field. If the value is null, the field is not reported as ignored. */
bool fields_has(struct fields *fields, const char *name);

/* Whether a parser has asked for name before. */
bool fields_asked(const struct fields *fields, const char *name);

/* Typed readers: leave *value alone when the field is absent, check bounds when it is there. */
void fields_int(struct fields *fields, const char *name, const char *alias, int min, int max,
                int *value);
void fields_int64(struct fields *fields, const char *name, int64_t min, int64_t max,
                  int64_t *value);
/* Of a name and its alias, the one that the client used. */
const char *fields_used(const struct fields *fields, const char *name, const char *alias);
/* min and max are inclusive unless open_min / open_max. */
struct fields_range {
    double min, max;
    bool open_min, open_max;
};
void fields_float(struct fields *fields, const char *name, const char *alias,
                  struct fields_range range, float *value);
void fields_bool(struct fields *fields, const char *name, const char *alias, bool *value);
/* All 64 bits, which jansson's own integers do not hold; also of a real without fraction, as 1e19.
 * Of numbers below 0, min is the least; they count as 2^64 more. true if given. */
bool fields_u64(struct fields *fields, const char *name, int64_t min, uint64_t *value);
/* A string of closed choices; returns the index, or -1 if absent. choices ends with NULL. */
int fields_choice(struct fields *fields, const char *name, const char *const *choices);
/* A name or a word, NULL if absent; U+0000 in it is an error. Texts, which may contain it, are read
 * with json_string_length. */
const char *fields_string(struct fields *fields, const char *name, const char *alias);
/* The same of a value: NULL if it is no string or holds U+0000. */
const char *fields_word(const struct json_t *value);

/* A text, which may hold U+0000: *text is borrowed from fields, NULL if it is absent or no string,
 * which is an error. */
void fields_text(struct fields *fields, const char *name, const char **text, size_t *bytes);

/* "a list", "a string", ...: what a value is, for messages. */
const char *fields_type_name(const struct json_t *value);
/* A value as a message names it: a number itself, of anything else what it is. NULL: nothing. */
struct fields_shown {
    char text[48];
};
struct fields_shown fields_shown(const struct json_t *value);

/* An integer anywhere: an integer, or a real without fraction within ±2^53. */
bool fields_is_integer(const struct json_t *value, int64_t *integer);

/* Appends the names that nobody asked for to the list ignored, percent-escaped and comma-separated
 * (unchanged if there are none; ends with "..." if too long); with strict the first one is an
 * error. Their values are freed: the request keeps the texts in its body, and small JSON values may
 * take fifty times the bytes that they had in the body. */
void fields_finish(struct fields *fields, bool strict, char ignored[FIELDS_IGNORED_MAX]);

#endif
