/* generation_config.json: what is read, what is passed over, and every bound. */
#include "models/generation_config.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static enum err_code parse(struct model_sampling *sampling, const char *text, struct err *err)
{
    *err = (struct err){0};
    return generation_config_parse(sampling, text, strlen(text), "dir/generation_config.json", err);
}

static void expect(const char *text, const struct model_sampling *expected)
{
    struct model_sampling is;
    struct err err;
    assert_int_equal(parse(&is, text, &err), ERR_OK);
    assert_float_equal(is.temperature, expected->temperature, 0);
    assert_float_equal(is.top_p, expected->top_p, 0);
    assert_float_equal(is.min_p, expected->min_p, 0);
    assert_float_equal(is.repetition, expected->repetition, 0);
    assert_int_equal(is.top_k, expected->top_k);
}

static void test_reads_every_key(void **state)
{
    (void)state;
    const struct model_sampling all = {0.5F, 0.75F, 0.125F, 1.25F, 40};
    expect("{\"temperature\": 0.5, \"top_p\": 0.75, \"min_p\": 0.125, \"repetition_penalty\": 1.25,"
           " \"top_k\": 40}",
           &all);
}

static void test_what_is_not_given_changes_nothing(void **state)
{
    (void)state;
    expect("{}", &MODEL_SAMPLING_PLAIN);
    expect("{\"temperature\": null, \"top_k\": null, \"do_sample\": null}", &MODEL_SAMPLING_PLAIN);
    expect("{\"do_sample\": true, \"max_length\": 512, \"eos_token_id\": [1, 2], \"num_beams\": 4,"
           " \"transformers_version\": \"5\"}",
           &MODEL_SAMPLING_PLAIN);
    const struct model_sampling cold = {0.5F, 1, 0, 1, 0};
    expect("{\"temperature\": 0.5, \"top_k\": -1}", &cold);
}

static void test_do_sample_false_is_the_likeliest_token(void **state)
{
    (void)state;
    const struct model_sampling greedy = {0, 1, 0, 1, 50};
    expect("{\"do_sample\": false, \"temperature\": 0.5, \"top_k\": 50}", &greedy);
}

static void test_refuses(void **state)
{
    (void)state;
    static const char *const cases[][2] = {
        {"{\"temperature\": 2.5}", "temperature is 2.5, but must be in [0, 2]"},
        {"{\"temperature\": -0.1}", "temperature is -0.1"},
        {"{\"temperature\": \"warm\"}", "temperature must be a number"},
        {"{\"top_p\": 0}", "top_p is 0, but must be in (0, 1]"},
        {"{\"top_p\": 1e-60}", "top_p is 0"},
        {"{\"top_p\": 1.5}", "top_p is 1.5"},
        {"{\"min_p\": 1}", "min_p is 1, but must be in [0, 1)"},
        {"{\"repetition_penalty\": 0}", "repetition_penalty is 0"},
        {"{\"top_k\": 2.5}", "top_k must be an integer"},
        {"{\"top_k\": -2}", "top_k is -2, but must be in [-1, "},
        {"{\"top_k\": 1000000000000}", "top_k is 1e+12"},
        {"{\"do_sample\": 1}", "do_sample must be true or false"},
        {"{\"temperature\": 1, \"temperature\": 1}", "not valid JSON"},
        {"[]", "a JSON object is expected"},
        {"{", "not valid JSON"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct model_sampling sampling;
        struct err err;
        const enum err_code code = parse(&sampling, cases[i][0], &err);
        if (code != ERR_FORMAT || strstr(err.message, cases[i][1]) == NULL ||
            strstr(err.message, "dir/generation_config.json: ") == NULL) {
            fail_msg("%s: expected an error that names the file and \"%s\"; got \"%s\"",
                     cases[i][0], cases[i][1], err.message);
        }
    }
}

static void test_the_file_is_optional_and_bounded(void **state)
{
    (void)state;
    char dir[] = "/tmp/test_generation.XXXXXX";
    char path[64];
    struct model_sampling sampling = {0};
    struct err err = {0};
    assert_non_null(mkdtemp(dir));
    assert_int_equal(generation_config_read(&sampling, dir, &err), ERR_OK);
    assert_float_equal(sampling.temperature, 1, 0);
    (void)snprintf(path, sizeof path, "%s/generation_config.json", dir);
    FILE *const file = fopen(path, "w");
    assert_non_null(file);
    (void)fputs("{\"temperature\": 0.5}", file);
    (void)fflush(file);
    assert_int_equal(generation_config_read(&sampling, dir, &err), ERR_OK);
    assert_float_equal(sampling.temperature, 0.5, 0);
    for (int i = 0; i < GENERATION_CONFIG_BYTES_MAX; i++) {
        (void)fputc(' ', file);
    }
    (void)fclose(file);
    assert_int_equal(generation_config_read(&sampling, dir, &err), ERR_FORMAT);
    assert_non_null(strstr(err.message, "longer than the limit of 1048576 bytes"));
    (void)remove(path);
    (void)remove(dir);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_reads_every_key),
        cmocka_unit_test(test_what_is_not_given_changes_nothing),
        cmocka_unit_test(test_do_sample_false_is_the_likeliest_token),
        cmocka_unit_test(test_refuses),
        cmocka_unit_test(test_the_file_is_optional_and_bounded),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
