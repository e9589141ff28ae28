/* The JSON writer and the strict reading of fields, without a server. */
#include "server/json/fields.h"
#include "server/json/json.h"

#include <jansson.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

/* ---- writing ------------------------------------------------------------------------------- */

static void expect_text(struct text *text, const char *expected)
{
    text_add(text, "", 1);
    assert_string_equal(text->data, expected);
    text_free(text);
}

static void test_commas_and_nesting(void **state)
{
    (void)state;
    struct text t = {0};
    json_open(&t, '{');
    json_field_int(&t, "a", -1);
    json_key(&t, "b");
    json_open(&t, '[');
    json_put_int(&t, 1);
    json_open(&t, '{');
    json_close(&t, '}');
    json_put_null(&t);
    json_put_bool(&t, true);
    json_close(&t, ']');
    json_field_string(&t, "c", NULL);
    json_key(&t, "d");
    json_put_uint(&t, UINT64_MAX);
    json_close(&t, '}');
    expect_text(&t, "{\"a\":-1,\"b\":[1,{},null,true],\"c\":null,\"d\":18446744073709551615}");
}

static void test_integers(void **state)
{
    (void)state;
    const int64_t values[] = {0, 9, 10, -10, 4096, INT64_MAX, INT64_MIN};
    struct text t = {0};
    for (size_t i = 0; i < sizeof values / sizeof values[0]; i++) {
        json_put_int(&t, values[i]);
    }
    expect_text(&t, "0,9,10,-10,4096,9223372036854775807,-9223372036854775808");
}

static void test_strings_are_escaped_and_valid(void **state)
{
    (void)state;
    struct text t = {0};
    json_string_n(&t, "a\"\\\n\r\t\x01\x7f\0b", 10);
    expect_text(&t, "\"a\\\"\\\\\\n\\r\\t\\u0001\\u007f\\u0000b\"");
    json_string_n(&t, "\xc3\xa9\xff\xe2\x82|\xed\xa0\x80", 9);
    expect_text(
        &t,
        "\"\xc3\xa9\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd|\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd\"");
    json_string_n(&t, NULL, 0);
    expect_text(&t, "\"\"");
}

/* Equal numbers print equal, and what is printed reads back as the same number. */
static void test_numbers_round_trip(void **state)
{
    (void)state;
    const float floats[] = {0.0f, -0.0f, 1.0f, -0.1f, 3.4028234e38f, 1e-45f, -12.3456789f, 1e10f};
    for (size_t i = 0; i < sizeof floats / sizeof floats[0]; i++) {
        struct text t = {0};
        json_put_float(&t, floats[i]);
        text_add(&t, "", 1);
        assert_true(strtof(t.data, NULL) == floats[i]);
        assert_non_null(strpbrk(t.data, ".e"));
        text_free(&t);
    }
    const double doubles[] = {0.1, 1e300, -5e-324, 2.0 / 3, 123456789012345678.0};
    for (size_t i = 0; i < sizeof doubles / sizeof doubles[0]; i++) {
        struct text t = {0};
        json_put_double(&t, doubles[i]);
        text_add(&t, "", 1);
        assert_true(strtod(t.data, NULL) == doubles[i]);
        text_free(&t);
    }
    struct text t = {0};
    json_open(&t, '[');
    json_put_float(&t, -INFINITY);
    json_put_double(&t, (double)NAN);
    json_put_fixed(&t, 1.23456);
    json_put_fixed(&t, 1e20);
    json_put_float(&t, 1.0f);
    json_close(&t, ']');
    expect_text(&t, "[null,null,1.235,1e+20,1.0]");
}

/* ---- reading ------------------------------------------------------------------------------- */

/* Reads body, runs the readers once, and gives the error's code, "" if none. */
struct read {
    struct api_error error;
    int i;
    float f;
    bool b;
    uint64_t u;
    char ignored[FIELDS_IGNORED_MAX];
};

static const char *read_body(struct read *r, const char *body, bool strict)
{
    *r = (struct read){.i = -7, .f = -7};
    struct fields fields;
    if (fields_open(&fields, body, strlen(body), &r->error)) {
        fields_int(&fields, "i", "int", 0, 10, &r->i);
        fields_float(&fields, "f", NULL, (struct fields_range){0, 1, true, false}, &r->f);
        fields_bool(&fields, "b", "bool", &r->b);
        (void)fields_u64(&fields, "u", 0, &r->u);
        fields_finish(&fields, strict, r->ignored);
    }
    fields_close(&fields);
    return r->error.status == 0 ? "" : r->error.code;
}

/* An inner object has its own names, and its own digits of large numbers. */
static void test_inner_objects(void **state)
{
    (void)state;
    static const char body[] = "{\"u\":1,\"other\":{\"u\":2},\"in\":{\"list\":[{\"u\":3}],"
                               "\"x\":\"in\",\"u\":18446744073709551615},\"y\":{\"u\":4}}";
    struct api_error error = {0};
    struct fields fields;
    struct fields inner;
    uint64_t u = 0;
    char ignored[FIELDS_IGNORED_MAX] = "";
    assert_true(fields_open(&fields, body, sizeof body - 1, &error));
    assert_true(fields_open_in(&inner, &fields, "in"));
    assert_true(fields_u64(&inner, "u", 0, &u));
    assert_true(u == UINT64_MAX);
    fields_finish(&inner, false, ignored);
    assert_int_equal(json_object_size(inner.object), 1); /* what is ignored is freed */
    assert_false(fields_open_in(&inner, &fields, "absent"));
    assert_int_equal(error.status, 0);
    assert_false(fields_open_in(&inner, &fields, "u"));
    assert_string_equal(error.param, "u");
    fields_finish(&fields, false, ignored);
    assert_string_equal(ignored, "in.list, in.x, other, y");
    assert_int_equal(json_object_size(fields.object), 2);
    fields_close(&fields);
}

static void test_types_are_strict(void **state)
{
    (void)state;
    static const struct {
        const char *body, *code, *param;
    } cases[] = {
        {"{\"i\":3}", "", ""},
        {"{\"i\":3.0}", "", ""},
        {"{\"i\":null,\"f\":null,\"b\":null}", "", ""},
        {"{\"int\":3}", "", ""},
        {"{\"i\":null,\"int\":3}", "", ""},
        {"{\"i\":1,\"int\":3}", "conflicting_fields", "int"},
        {"{\"i\":1.5}", "invalid_value", "i"},
        {"{\"i\":true}", "invalid_value", "i"},
        {"{\"i\":\"3\"}", "invalid_value", "i"},
        {"{\"i\":11}", "invalid_value", "i"},
        {"{\"int\":11}", "invalid_value", "int"},
        {"{\"i\":-1}", "invalid_value", "i"},
        {"{\"i\":1e40}", "invalid_value", "i"},
        {"{\"i\":99999999999999999999}", "invalid_value", "i"},
        {"{\"f\":1}", "", ""},
        {"{\"f\":0}", "invalid_value", "f"},
        {"{\"f\":1e-60}", "", ""}, /* rounds to 0 as a float, and becomes the next one */
        {"{\"f\":1.0000001}", "invalid_value", "f"},
        {"{\"f\":false}", "invalid_value", "f"},
        {"{\"b\":1}", "invalid_value", "b"},
        {"{\"b\":\"true\"}", "invalid_value", "b"},
        {"{\"bool\":1}", "invalid_value", "bool"},
        {"{\"b\":true,\"bool\":true}", "conflicting_fields", "bool"},
        {"[1]", "invalid_json", ""},
        {"", "invalid_json", ""},
        {"{\"i\":1,\"i\":1}", "invalid_json", ""},
        {"{\"i\":\"\xff\"}", "invalid_utf8", ""},
        {"{\"i\":\"\\u0000\"}", "invalid_value", "i"},
        {"{\"f\":NaN}", "invalid_json", ""},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct read r;
        const char *const code = read_body(&r, cases[i].body, false);
        if (strcmp(code, cases[i].code) != 0 || strcmp(r.error.param, cases[i].param) != 0) {
            fail_msg("%s: expected \"%s\" for \"%s\", got \"%s\" for \"%s\" (%s)", cases[i].body,
                     cases[i].code, cases[i].param, code, r.error.param, r.error.text.message);
        }
    }
}

static void test_u64_has_all_its_bits(void **state)
{
    (void)state;
    static const struct {
        const char *body;
        bool ok;
        uint64_t value;
    } cases[] = {
        {"{\"u\":0}", true, 0},
        {"{\"u\":9223372036854775807}", true, INT64_MAX},
        {"{\"u\":9223372036854775808}", true, UINT64_C(9223372036854775808)},
        {"{\"u\" : 18446744073709551615 }", true, UINT64_MAX},
        {"{\"a\":{\"u\":1},\"c\":\"u\\\":5\",\"u\":18446744073709551614}", true, UINT64_MAX - 1},
        {"{\"a\":18446744073709551615,\"u\":9007199254740993}", true, 9007199254740993},
        {"{\"u\":3.0}", true, 3},
        {"{\"u\":18446744073709551616}", false, 0},
        {"{\"u\":-1}", false, 0},
        {"{\"u\":-18446744073709551615}", false, 0},
        {"{\"u\":1.8446744073709551615e19}", true, UINT64_MAX},
        {"{\"u\":1.8446744073709551616e19}", false, 0},
        {"{\"u\":1e19}", true, UINT64_C(10000000000000000000)},
        {"{\"u\":0.5}", false, 0},
        {"{\"u\":\"5\"}", false, 0},
        {"{\"u\":true}", false, 0},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct read r;
        const char *const code = read_body(&r, cases[i].body, false);
        if ((code[0] == '\0') != cases[i].ok || r.u != cases[i].value) {
            fail_msg("%s: expected %d %llu, got \"%s\" %llu", cases[i].body, cases[i].ok,
                     (unsigned long long)cases[i].value, code, (unsigned long long)r.u);
        }
    }
}

static void test_unknown_names_are_collected_or_refused(void **state)
{
    (void)state;
    struct read r;
    assert_string_equal(read_body(&r, "{\"i\":1,\"x\":1,\"a b,c\":{},\"\xc3\xa9\":2}", false), "");
    assert_string_equal(r.ignored, "x, a%20b%2Cc, %C3%A9");
    assert_string_equal(read_body(&r, "{\"i\":1}", true), "");
    assert_string_equal(r.ignored, "");
    assert_string_equal(read_body(&r, "{\"x\":1}", true), "unknown_field");
    assert_string_equal(r.error.param, "x");
}

static void test_names_without_end_stay_within_the_header(void **state)
{
    (void)state;
    struct text body = {0};
    text_puts(&body, "{\"");
    for (int i = 0; i < 5000; i++) {
        text_puts(&body, "\xc3\xa9");
    }
    text_puts(&body, "\":1}");
    text_add(&body, "", 1);
    struct read r;
    assert_string_equal(read_body(&r, body.data, false), "");
    assert_string_equal(r.ignored, "...");
    text_free(&body);
}

/* ---- without memory ------------------------------------------------------------------------ */

static int n_left; /* how many times memory is given */
static json_malloc_t theirs;
static json_free_t their_free;

static void *give(size_t bytes)
{
    return theirs(n_left-- > 0 ? bytes : SIZE_MAX / 2);
}

/* More than there is shall be refused, as without the sanitizer. */
const char *__asan_default_options(void);
const char *__asan_default_options(void)
{
    return "allocator_may_return_null=1";
}

/* Whichever piece of memory is missing, the body is not called wrong, whatever was wrong with the
 * one before. */
static void test_no_memory_is_no_fault_of_the_body(void **state)
{
    (void)state;
    static const char *const bodies[] = {
        "{\"a\":[1,{\"b\":-2.5}],\"c\":true}",
        "{\"a long name of a field\":\"a text that grows, and grows\\u0000\"}",
        "{\"u\":[18446744073709551615,1e3]}"};
    for (size_t i = 0; i < sizeof bodies / sizeof *bodies; i++) {
        bool is_open = false;
        for (int n = 0; !is_open; n++) {
            static const char wrong[] = "[1e999]";
            struct api_error error = {0};
            struct fields fields;
            assert_false(fields_open(&fields, wrong, sizeof wrong - 1, &error));
            fields_close(&fields);
            error = (struct api_error){0};
            n_left = n;
            json_get_alloc_funcs(&theirs, &their_free);
            json_set_alloc_funcs(give, their_free);
            is_open = fields_open(&fields, bodies[i], strlen(bodies[i]), &error);
            json_set_alloc_funcs(theirs, their_free);
            fields_close(&fields);
            assert_true(n < 1000);
            assert_string_equal(is_open ? "" : error.code, is_open ? "" : "out_of_memory");
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_commas_and_nesting),
        cmocka_unit_test(test_integers),
        cmocka_unit_test(test_strings_are_escaped_and_valid),
        cmocka_unit_test(test_numbers_round_trip),
        cmocka_unit_test(test_inner_objects),
        cmocka_unit_test(test_types_are_strict),
        cmocka_unit_test(test_u64_has_all_its_bits),
        cmocka_unit_test(test_unknown_names_are_collected_or_refused),
        cmocka_unit_test(test_names_without_end_stay_within_the_header),
        cmocka_unit_test(test_no_memory_is_no_fault_of_the_body),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
