/* Strict reading of request bodies: see fields.h. */
#include "server/json/fields.h"

#include "models/json_file.h"

#include <float.h>
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- one object ---------------------------------------------------------------------------- */

/* The name in front of the number that ends at byte at; "" if it stands in a list or the name is
 * long. */
static void fields_name_before(char name[48], const char *body, size_t at)
{
    name[0] = '\0';
    while (at > 0 && strchr("0123456789+-.eE", body[at - 1]) != NULL) {
        at--;
    }
    bool colon = false;
    while (at > 0 && strchr(" \t\r\n:", body[at - 1]) != NULL) {
        at--;
        colon = colon || body[at] == ':';
    }
    const char *const end = at > 0 && body[at - 1] == '"' ? body + at - 1 : NULL;
    const char *const begin = colon && end != NULL ? memrchr(body, '"', at - 1) : NULL;
    if (begin != NULL && end - begin <= 40) {
        (void)snprintf(name, 48, "%.*s", (int)(end - begin - 1), begin + 1);
    }
}

static bool fields_parse_error(const json_error_t *from, const char *body, size_t bytes,
                               struct api_error *error)
{
    const enum json_error_code why = json_error_code(from);
    if (why == json_error_invalid_utf8) {
        return api_error_set(error, 400, "invalid_utf8", NULL,
                             "the body is not valid UTF-8 near byte %d", from->position);
    }
    if (why == json_error_null_byte_in_key) {
        return api_error_set(error, 400, "invalid_json", NULL,
                             "the character U+0000 is accepted in texts only, not in names of "
                             "fields (line %d, column %d)",
                             from->line, from->column);
    }
    if (why == json_error_numeric_overflow) {
        char name[48] = "";
        if (from->position > 0 && (size_t)from->position <= bytes) {
            fields_name_before(name, body, (size_t)from->position);
        }
        return api_error_set(error, 400, "invalid_value", name[0] != '\0' ? name : NULL,
                             "a number in the body is beyond what any field takes: %s (line %d, "
                             "column %d)",
                             from->text, from->line, from->column);
    }
    const bool quotes =
        body[0] == '{' && memchr(body, '\'', bytes) != NULL && memchr(body, '"', bytes) == NULL;
    return api_error_set(
        error, 400, "invalid_json", NULL,
        "the body is not the JSON object that is expected: %s (line %d, column %d)%s", from->text,
        from->line, from->column, quotes ? ": strings of JSON stand in double quotes" : "");
}

bool fields_open(struct fields *fields, const char *body, size_t bytes, struct api_error *error)
{
    *fields = (struct fields){.body = body, .body_bytes = bytes, .error = error};
    if (bytes == 0) {
        return api_error_set(error, 400, "invalid_json", NULL,
                             "the body is empty, but must be a JSON object");
    }
    const size_t strict = JSON_REJECT_DUPLICATES | JSON_ALLOW_NUL;
    json_error_t why;
    bool no_memory = false;
    fields->object = json_read(body, bytes, strict, &why, &no_memory);
    if (fields->object == NULL && json_error_code(&why) == json_error_numeric_overflow) {
        /* An integer above 63 bits becomes a real, and the field's own check names it. */
        fields->object = json_read(body, bytes, strict | JSON_DECODE_INT_AS_REAL, &why, &no_memory);
    }
    if (no_memory) {
        error->is_for_good = why.text[0] != '\0';
        return api_error_set(error, 500, "out_of_memory", NULL, "no memory to read the body%s%s",
                             error->is_for_good ? ": " : "", why.text);
    }
    if (fields->object == NULL) {
        return fields_parse_error(&why, body, bytes, error);
    }
    if (!json_is_object(fields->object)) {
        return api_error_set(error, 400, "invalid_json", NULL,
                             "the body must be a JSON object, not an array");
    }
    return true;
}

void fields_close(struct fields *fields)
{
    json_decref(fields->object);
    fields->object = NULL;
}

static bool fields_wrong(struct fields *fields, const char *name, const char *expected,
                         const json_t *value);

bool fields_open_in(struct fields *inner, struct fields *fields, const char *name)
{
    json_t *const value = fields_get(fields, name, NULL);
    *inner = (struct fields){.body = fields->body,
                             .body_bytes = fields->body_bytes,
                             .parent = name,
                             .error = fields->error};
    if (value == NULL) {
        return false;
    }
    if (!json_is_object(value)) {
        return fields_wrong(fields, name, "an object", value);
    }
    inner->object = value;
    return true;
}

const char *fields_type_name(const json_t *value)
{
    switch (json_typeof(value)) {
    case JSON_OBJECT: return "an object";
    case JSON_ARRAY: return "a list";
    case JSON_STRING: return "a string";
    case JSON_INTEGER: return "an integer";
    case JSON_REAL: return "a number with a fraction or out of range";
    case JSON_TRUE:
    case JSON_FALSE: return "a boolean";
    case JSON_NULL: return "null";
    }
    return "something else";
}

struct fields_shown fields_shown(const json_t *value)
{
    struct fields_shown shown;
    if (value == NULL) {
        (void)snprintf(shown.text, sizeof shown.text, "nothing");
    } else if (json_is_integer(value)) {
        (void)snprintf(shown.text, sizeof shown.text, "%lld", (long long)json_integer_value(value));
    } else if (json_is_array(value) && json_array_size(value) == 0) {
        (void)snprintf(shown.text, sizeof shown.text, "an empty list");
    } else if (json_is_real(value)) {
        (void)snprintf(shown.text, sizeof shown.text, "%.15g", json_real_value(value));
    } else {
        (void)snprintf(shown.text, sizeof shown.text, "%s", fields_type_name(value));
    }
    return shown;
}

static void fields_see(struct fields *fields, const char *name)
{
    CHECK(fields->n_seen < FIELDS_SEEN_MAX);
    fields->seen[fields->n_seen++] = name;
}

static bool fields_wrong(struct fields *fields, const char *name, const char *expected,
                         const json_t *value)
{
    return api_error_set(fields->error, 400, "invalid_value", name, "%s must be %s, not %s", name,
                         expected, fields_type_name(value));
}

static bool fields_given(const struct fields *fields, const char *name)
{
    const json_t *const value = json_object_get(fields->object, name);
    return value != NULL && !json_is_null(value);
}

json_t *fields_get(struct fields *fields, const char *name, const char *alias)
{
    fields_see(fields, name);
    if (alias != NULL) {
        fields_see(fields, alias);
    }
    const bool has_value = fields_given(fields, name);
    const bool has_other = alias != NULL && fields_given(fields, alias);
    if (has_value && has_other) {
        (void)api_error_set(fields->error, 400, "conflicting_fields", alias,
                            "%s and %s mean the same: give one of them", name, alias);
        return NULL;
    }
    if (has_value || has_other) {
        return json_object_get(fields->object, has_value ? name : alias);
    }
    return fields->defaults != NULL ? json_object_get(fields->defaults->object, name) : NULL;
}

bool fields_has(struct fields *fields, const char *name)
{
    const bool given = fields_given(fields, name);
    if (!given) {
        fields_see(fields, name);
    }
    return given;
}

const char *fields_used(const struct fields *fields, const char *name, const char *alias)
{
    return alias != NULL && !fields_given(fields, name) ? alias : name;
}

bool fields_is_integer(const json_t *value, int64_t *integer)
{
    if (json_is_integer(value)) {
        *integer = json_integer_value(value);
        return true;
    }
    if (!json_is_real(value)) {
        return false;
    }
    const double real = json_real_value(value);
    if (!(fabs(real) <= 0x1p53) || real != floor(real)) {
        return false;
    }
    *integer = (int64_t)real;
    return true;
}

static void fields_integer(struct fields *fields, const char *name, const char *alias, int64_t min,
                           int64_t max, int64_t *value)
{
    const json_t *const given = fields_get(fields, name, alias);
    if (given == NULL) {
        return;
    }
    const char *const used = fields_used(fields, name, alias);
    int64_t integer = 0;
    if (json_is_real(given) && !fields_is_integer(given, &integer)) {
        (void)api_error_set(fields->error, 400, "invalid_value", used,
                            "%s is %.15g, but must be an integer %lld ... %lld", used,
                            json_real_value(given), (long long)min, (long long)max);
    } else if (!fields_is_integer(given, &integer)) {
        (void)fields_wrong(fields, used, "an integer", given);
    } else if (integer < min || integer > max) {
        (void)api_error_set(fields->error, 400, "invalid_value", used,
                            "%s is %lld, but must be %lld ... %lld", used, (long long)integer,
                            (long long)min, (long long)max);
    } else {
        *value = integer;
    }
}

void fields_int(struct fields *fields, const char *name, const char *alias, int min, int max,
                int *value)
{
    int64_t wide = *value;
    fields_integer(fields, name, alias, min, max, &wide);
    *value = (int)wide;
}

void fields_int64(struct fields *fields, const char *name, int64_t min, int64_t max, int64_t *value)
{
    fields_integer(fields, name, NULL, min, max, value);
}

void fields_float(struct fields *fields, const char *name, const char *alias,
                  struct fields_range range, float *value)
{
    const json_t *const given = fields_get(fields, name, alias);
    if (given == NULL) {
        return;
    }
    const char *const used = fields_used(fields, name, alias);
    if (!json_is_number(given)) {
        (void)fields_wrong(fields, used, "a number", given);
        return;
    }
    const double real = json_number_value(given);
    const bool low = range.open_min ? real <= range.min : real < range.min;
    const bool high = range.open_max ? real >= range.max : real > range.max;
    if (low || high || isnan(real)) {
        (void)api_error_set(fields->error, 400, "invalid_value", used,
                            "%s is %.15g, but must be in %c%g, %g%c", used, real,
                            range.open_min ? '(' : '[', range.min, range.max,
                            range.open_max ? ')' : ']');
        return;
    }
    /* Next to an open end, a double may round to that end: the next float within is as near. */
    const float narrow = (float)real;
    const bool at_end = (range.open_min && (double)narrow <= range.min) ||
                        (range.open_max && (double)narrow >= range.max);
    *value = at_end ? nextafterf(narrow, (float)(range.min + range.max) / 2) : narrow;
}

void fields_bool(struct fields *fields, const char *name, const char *alias, bool *value)
{
    const json_t *const given = fields_get(fields, name, alias);
    if (given != NULL && !json_is_boolean(given)) {
        (void)fields_wrong(fields, fields_used(fields, name, alias), "a boolean", given);
    } else if (given != NULL) {
        *value = json_is_true(given);
    }
}

static const char *fields_skip_blanks(const char *at, const char *end)
{
    while (at < end && strchr(" \t\r\n", *at) != NULL) {
        at++;
    }
    return at;
}

static bool fields_is_name(const char *string, size_t bytes, const char *name)
{
    return bytes == strlen(name) && memcmp(string, name, bytes) == 0;
}

/* Finds the digits of the object's own number called name in a body known to be valid JSON. NULL if
 * the key is written with escapes; then the value counts as too large. */
static const char *fields_digits(const struct fields *fields, const char *name)
{
    const char *const end = fields->body + fields->body_bytes;
    const int own_depth = fields->parent != NULL ? 2 : 1;
    bool own = fields->parent == NULL;
    int depth = 0;
    for (const char *at = fields->body; at < end; at++) {
        if (*at == '{' || *at == '[') {
            depth++;
        } else if (*at == '}' || *at == ']') {
            depth--;
        } else if (*at == '"') {
            const char *const string = ++at;
            while (at < end && *at != '"') {
                at += *at == '\\' ? 2 : 1;
            }
            const size_t bytes = (size_t)(at - string);
            const char *const after = fields_skip_blanks(at + 1, end);
            if (after >= end || *after != ':') {
                continue; /* a value, no key */
            }
            if (depth == 1 && fields->parent != NULL) {
                own = fields_is_name(string, bytes, fields->parent);
            }
            if (depth == own_depth && own && fields_is_name(string, bytes, name)) {
                return fields_skip_blanks(after + 1, end);
            }
        }
    }
    return NULL;
}

bool fields_u64(struct fields *fields, const char *name, int64_t min, uint64_t *value)
{
    const json_t *const given = fields_get(fields, name, NULL);
    if (given == NULL) {
        return false;
    }
    int64_t integer = 0;
    const int64_t exact = INT64_C(1) << 53;
    /* A real at 2^53 or above may stand for several integers: its digits tell which. */
    if (fields_is_integer(given, &integer) && integer >= min &&
        (json_is_integer(given) || (-exact < integer && integer < exact))) {
        *value = (uint64_t)integer;
        return true;
    }
    if (!json_is_number(given)) {
        return fields_wrong(fields, name, "an integer", given);
    }
    const struct fields *const from = fields_given(fields, name) ? fields : fields->defaults;
    const char *const digits = json_is_real(given) ? fields_digits(from, name) : NULL;
    _Static_assert(LDBL_MANT_DIG >= 64, "a long double holds each integer of 64 bits");
    /* The text is JSON, so the number ends before the body does. */
    const long double real = digits != NULL ? strtold(digits, NULL) : -1;
    if (real >= 0 && real < 0x1p64L && real == floorl(real)) {
        *value = (uint64_t)real;
        return true;
    }
    return api_error_set(fields->error, 400, "invalid_value", name,
                         "%s is %.15g, but must be an integer %lld ... 18446744073709551615", name,
                         json_number_value(given), (long long)min);
}

int fields_choice(struct fields *fields, const char *name, const char *const *choices)
{
    const char *const given = fields_string(fields, name, NULL);
    if (given == NULL) {
        return -1;
    }
    char list[160] = "";
    for (int i = 0; choices[i] != NULL; i++) {
        if (strcmp(given, choices[i]) == 0) {
            return i;
        }
        const size_t used = strlen(list);
        (void)snprintf(list + used, sizeof list - used, "%s\"%s\"", i == 0 ? "" : ", ", choices[i]);
    }
    (void)api_error_set(fields->error, 400, "invalid_value", name,
                        "%s is \"%.40s\", but must be one of %s", name, given, list);
    return -1;
}

void fields_text(struct fields *fields, const char *name, const char **text, size_t *bytes)
{
    const json_t *const value = fields_get(fields, name, NULL);
    *text = json_string_value(value);
    *bytes = json_string_length(value);
    if (value != NULL && *text == NULL) {
        (void)fields_wrong(fields, name, "a string", value);
    }
}

const char *fields_string(struct fields *fields, const char *name, const char *alias)
{
    const json_t *const given = fields_get(fields, name, alias);
    if (given != NULL && !json_is_string(given)) {
        (void)fields_wrong(fields, fields_used(fields, name, alias), "a string", given);
        return NULL;
    }
    const char *const word = fields_word(given);
    if (given != NULL && word == NULL) {
        const char *const used = fields_used(fields, name, alias);
        (void)api_error_set(fields->error, 400, "invalid_value", used,
                            "%s holds the character U+0000, which only texts may", used);
    }
    return word;
}

const char *fields_word(const json_t *value)
{
    const char *const word = json_string_value(value);
    return word != NULL && strlen(word) == json_string_length(value) ? word : NULL;
}

/* Appends name to a header value: bytes that a header cannot hold, commas and percents as %XX. */
static bool fields_escape(char *out, size_t out_max, const char *name)
{
    static const char hex[] = "0123456789ABCDEF";
    size_t n = strlen(out);
    for (const unsigned char *c = (const unsigned char *)name; *c != '\0'; c++) {
        if (n + 4 >= out_max) {
            return false;
        }
        if (*c > 0x20 && *c < 0x7f && *c != '%' && *c != ',') {
            out[n++] = (char)*c;
        } else {
            out[n++] = '%';
            out[n++] = hex[*c >> 4];
            out[n++] = hex[*c & 15];
        }
        out[n] = '\0';
    }
    return true;
}

/* The same of parent.name; parent may be NULL. */
static bool fields_escape_path(char *out, size_t out_max, const char *parent, const char *name)
{
    return (parent == NULL ||
            (fields_escape(out, out_max, parent) && fields_escape(out, out_max, "."))) &&
           fields_escape(out, out_max, name);
}

bool fields_asked(const struct fields *fields, const char *name)
{
    bool seen = false;
    for (int i = 0; i < fields->n_seen && !seen; i++) {
        seen = strcmp(fields->seen[i], name) == 0;
    }
    return seen;
}

/* Appends the name to the list, which then ends with "..." if there is no room. */
static void fields_ignore(const struct fields *fields, const char *name,
                          char ignored[FIELDS_IGNORED_MAX])
{
    const size_t list_max = FIELDS_IGNORED_MAX - sizeof ", ...";
    const size_t before = strlen(ignored);
    if (before >= 3 && strcmp(ignored + before - 3, "...") == 0) {
        return;
    }
    if (before > 0) {
        (void)snprintf(ignored + before, FIELDS_IGNORED_MAX - before, ", ");
    }
    if (!fields_escape_path(ignored, list_max, fields->parent, name)) {
        (void)snprintf(ignored + before, FIELDS_IGNORED_MAX - before, "%s...",
                       before > 0 ? ", " : "");
    }
}

void fields_finish(struct fields *fields, bool strict, char ignored[FIELDS_IGNORED_MAX])
{
    const char *name = NULL;
    json_t *value = NULL;
    void *next = NULL;
    json_object_foreach_safe(fields->object, next, name, value)
    {
        if (fields_asked(fields, name)) {
            continue;
        }
        if (strict) {
            char shown[API_PARAM_MAX] = "";
            (void)fields_escape_path(shown, sizeof shown, fields->parent, name);
            (void)api_error_set(fields->error, 400, "unknown_field", shown,
                                "%s is not a field of this route (the server runs with --strict)",
                                shown);
            return;
        }
        fields_ignore(fields, name, ignored);
        (void)json_object_del(fields->object, name);
    }
}
