/* model.sha256: what is read from it, each line that is refused by its number, and comparing with
 * files and results. */
#include "models/identity.h"
#include "tests/models/writer.h"

#include <math.h>

#define SUM "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad" /* of "abc" */
#define PROBE "# probe tokens 1 2 3\n# probe logprobs -1.5 -2\n"

static struct identity *parsed(const char *text)
{
    struct identity *identity = NULL;
    struct err err = {0};
    if (identity_parse(&identity, text, strlen(text), "m/model.sha256", &err) != ERR_OK) {
        fail_msg("%s", err.message);
    }
    return identity;
}

static void test_reads_files_and_probe(void **state)
{
    (void)state;
    struct identity *const it =
        parsed("# a remark\n\n" SUM "  config.json\n" SUM " *a b\n" PROBE
               "# probe tolerance f32 0.001\n# probe tolerance int8 0.25\n# probably not\n");
    assert_int_equal(it->n_file, 2);
    assert_string_equal(it->file[0].name, "config.json");
    assert_string_equal(it->file[1].name, "a b");
    assert_string_equal(it->file[1].sha256, SUM);
    assert_true(it->n_token == 3 && it->token[2] == 3 && it->logprob[0] == -1.5F);
    assert_true(it->tolerance[DTYPE_F32] == 0.001F && it->tolerance[DTYPE_BF16] == 0);
    assert_true(it->tolerance[DTYPE_I8] == 0.25F);
    identity_free(it);
}

static void test_refuses_by_line(void **state)
{
    (void)state;
    static const struct {
        const char *text, *what;
    } rows[] = {
        {SUM, "line 1: expected is a line as sha256sum writes it"},
        {"\n" SUM " config.json", "line 2: expected is"},
        {"BA7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad  x", "line 1: expected"},
        {"\\" SUM "  x", "line 1: expected is"},
        {SUM "  ", "line 1: expected is"},
        {SUM "  ../x", "line 1: the name must be"},
        {SUM "  a/b", "line 1: the name must be"},
        {SUM "  .", "line 1: the name must be"},
        {SUM "  a\r\n", "line 1: the name must be"},
        {SUM "  x\n" SUM "  x\n", "line 2: a second sum of x"},
        {"# probe", "line 1: a probe has tokens, logprobs and tolerance"},
        {"# probe tokenz 1 2", "line 1: a probe has tokens"},
        {"# probe tokens 1", "line 1: a probe has two tokens at least"},
        {"# probe tokens 1 -2", "line 1: '-2' is not a token's id"},
        {"# probe tokens 1 2.5", "line 1: '2.5' is not a token's id"},
        {"# probe tokens 1 0x10", "line 1: '0x10' is not a token's id"},
        {"# probe tokens 1 2147483648", "is not a token's id"},
        {"# probe tokens 1 1111111111111111111111111111111111111",
         "line 1: '?' is not a token's id"},
        {PROBE PROBE, "line 3: a second list of tokens"},
        {PROBE "# probe logprobs -1", "line 3: a second list of log-probabilities"},
        {"# probe tokens 1 2 3\n# probe logprobs -1 nan", "line 2: 'nan' is not a log-probability"},
        {"# probe tokens 1 2 3\n# probe logprobs -1 0.5", "line 2: '0.5' is not a log-probability"},
        {"# probe tokens 1 2 3\n# probe logprobs -1e9 0", "line 2: '-1e9' is not"},
        {"# probe tokens 1 2 3\n",
         "the probe's tokens: 3, its log-probabilities: 0; expected are 2"},
        {"# probe logprobs -1\n", "tokens: 0, its log-probabilities: 1; expected are 0"},
        {"# probe tolerance f16 0.1", "a tolerance for 'f16', which is not f32, bf16 or int8"},
        {"# probe tolerance f32", "line 1: a tolerance is a dtype and a number"},
        {"# probe tolerance f32 0", "line 1: a tolerance is a dtype and a number"},
        {"# probe tolerance f32 inf", "line 1: a tolerance is a dtype and a number"},
        {"# probe tolerance f32 1 2", "line 1: a tolerance is a dtype and a number"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        struct identity *identity = NULL;
        struct err err = {0};
        const enum err_code code =
            identity_parse(&identity, rows[i].text, strlen(rows[i].text), "m/model.sha256", &err);
        if (code != ERR_FORMAT || identity != NULL || strstr(err.message, rows[i].what) == NULL) {
            fail_msg("case %zu: expected '%s', got code %d: %s", i, rows[i].what, (int)code,
                     err.message);
        }
    }
}

static void test_refuses_what_is_too_much(void **state)
{
    (void)state;
    char text[IDENTITY_FILE_MAX * 80];
    size_t n = 0;
    struct identity *identity = NULL;
    struct err err = {0};
    for (int i = 0; i <= IDENTITY_FILE_MAX; i++) {
        n += (size_t)snprintf(text + n, sizeof text - n, SUM "  %d\n", i);
    }
    assert_int_equal(identity_parse(&identity, text, n, "x", &err), ERR_FORMAT);
    assert_string_equal(err.message, "x: line 1025: more files than the limit of 1024");
    n = (size_t)snprintf(text, sizeof text, "# probe tokens");
    for (int i = 0; i <= IDENTITY_TOKEN_MAX; i++) {
        n += (size_t)snprintf(text + n, sizeof text - n, " 1");
    }
    assert_int_equal(identity_parse(&identity, text, n, "x", &err), ERR_FORMAT);
    assert_string_equal(err.message, "x: line 1: more tokens than the limit of 256");
}

static void test_compares_files(void **state)
{
    (void)state;
    const struct model_options options = {0};
    char dir[] = "/tmp/pkmserve-identity-XXXXXX";
    char path[64];
    struct err err = {0};
    assert_non_null(mkdtemp(dir));
    struct identity *const it = parsed(SUM "  a.txt\n");
    assert_int_equal(identity_check_files(it, dir, &options, &err), ERR_IO);
    assert_non_null(strstr(err.message, "a.txt: cannot open"));
    (void)snprintf(path, sizeof path, "%s/a.txt", dir);
    for (int changed = 0; changed < 2; changed++) {
        FILE *const file = fopen(path, "w");
        assert_non_null(file);
        (void)fputs(changed ? "abd" : "abc", file);
        (void)fclose(file);
        assert_int_equal(identity_check_files(it, dir, &options, &err),
                         changed ? ERR_FORMAT : ERR_OK);
    }
    assert_non_null(strstr(err.message, "a.txt: its SHA-256 is a52d159f262b2c6d..., but "
                                        "model.sha256 has ba7816bf8f01cfea..."));
    identity_free(it);
    (void)remove(path);
    struct identity *none = NULL;
    assert_int_equal(identity_read(&none, dir, &err), ERR_OK);
    assert_null(none);
    (void)remove(dir);
}

static void test_compares_results_by_dtype(void **state)
{
    (void)state;
    struct identity *const it =
        parsed(PROBE "# probe tolerance f32 0.01\n# probe tolerance bf16 0.5\n");
    struct model_info info = {.dtype = DTYPE_F32};
    struct err err = {0};
    float difference = -1;
    assert_true(identity_tolerance(it, &info, false) == 0.01F);
    assert_true(identity_tolerance(it, &info, true) == 0.5F);
    info.cache_dtype = DTYPE_BF16;
    assert_true(identity_tolerance(it, &info, false) == 0.5F);
    info.dtype = DTYPE_F16; /* as for BF16 */
    assert_true(identity_tolerance(it, &info, false) == 0.5F);
    info.dtype = DTYPE_I8;
    assert_true(identity_tolerance(it, &info, false) == 0);

    const float near[2] = {-1.5F, -2.25F};
    assert_int_equal(identity_compare(it, near, 2, 0.5F, &difference, &err), ERR_OK);
    assert_true(difference == 0.25F);
    assert_int_equal(identity_compare(it, near, 2, 0.125F, &difference, &err), ERR_FORMAT);
    assert_non_null(strstr(err.message, "m/model.sha256: the log-probability at position 2 of the "
                                        "probe is -2.25, but -2 is stored, and they may differ by "
                                        "0.125: the weights are not"));
    assert_int_equal(identity_compare(it, near, 1, 0.125F, &difference, &err), ERR_OK);
    const float wrong[2] = {NAN, -2};
    assert_int_equal(identity_compare(it, wrong, 2, 0.5F, &difference, &err), ERR_FORMAT);
    identity_free(it);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_reads_files_and_probe),     cmocka_unit_test(test_refuses_by_line),
        cmocka_unit_test(test_refuses_what_is_too_much),  cmocka_unit_test(test_compares_files),
        cmocka_unit_test(test_compares_results_by_dtype),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
