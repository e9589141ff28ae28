/* Opening backends by name: kernels/backend.c. */
#include "kernels/backend.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static void expect_error(const char *device, int n_thread, enum err_code code, const char *words)
{
    const struct backend_options options = {device, n_thread, false, NULL};
    struct backend *be = (struct backend *)&options; /* anything but NULL */
    struct err err = {0};
    assert_int_equal(backend_open(&be, &options, &err), code);
    assert_null(be);
    if (strstr(err.message, words) == NULL) {
        fail_msg("device %s: expected a message with \"%s\", got \"%s\"", device, words,
                 err.message);
    }
}

static int clear_environment(void **state)
{
    (void)state;
    return unsetenv("PKMSERVE_ISA") | unsetenv("PKMSERVE_CUDA_LIBRARY");
}

static void test_ref_opens(void **state)
{
    (void)state;
    const struct backend_options options = {"ref", 0, false, NULL};
    struct backend *be = NULL;
    assert_int_equal(backend_open(&be, &options, NULL), ERR_OK);
    assert_string_equal(be->name, "ref");
    backend_close(be);
}

/* The tests' folder holds no CUDA library, so without a name there is none. */
static void test_auto_opens_the_cpu_and_says_why(void **state)
{
    (void)state;
    const struct backend_options options = {"auto", 1, false, NULL};
    struct backend *be = NULL;
    assert_int_equal(backend_open(&be, &options, NULL), ERR_OK);
    assert_memory_equal(be->name, "cpu-", 4);
    assert_non_null(strstr(be->note, "no GPU: cuda: there is no libpkmserve_cuda.so"));
    backend_close(be);
}

static void test_what_was_named_needs_no_note(void **state)
{
    (void)state;
    const struct backend_options options = {"cpu", 1, false, NULL};
    struct backend *be = NULL;
    assert_int_equal(backend_open(&be, &options, NULL), ERR_OK);
    assert_string_equal(be->note, "");
    backend_close(be);
}

static void test_environment_forces_the_instruction_set(void **state)
{
    (void)state;
    static const char *const sets[][2] = {{"ref", "ref"}, {"plain", "cpu-plain"}};
    for (size_t i = 0; i < sizeof sets / sizeof *sets; i++) {
        assert_int_equal(setenv("PKMSERVE_ISA", sets[i][0], 1), 0);
        const struct backend_options options = {"cpu", 1, false, NULL};
        struct backend *be = NULL;
        assert_int_equal(backend_open(&be, &options, NULL), ERR_OK);
        assert_string_equal(be->name, sets[i][1]);
        backend_close(be);
    }
    assert_int_equal(setenv("PKMSERVE_ISA", "sse9", 1), 0);
    expect_error("cpu", 1, ERR_ARGUMENT, "sse9");
}

/* ---- the CUDA library ---- */

/* Opening fails when cuda is asked for, and falls back, with the same reason, when it is not. */
static void expect_no_library(const char *library, const char *words)
{
    assert_int_equal(setenv("PKMSERVE_CUDA_LIBRARY", library, 1), 0);
    expect_error("cuda", 0, ERR_UNSUPPORTED, words);
    const struct backend_options options = {"auto", 1, false, NULL};
    struct backend *be = NULL;
    assert_int_equal(backend_open(&be, &options, NULL), ERR_OK);
    assert_memory_equal(be->name, "cpu-", 4);
    assert_non_null(strstr(be->note, words));
    backend_close(be);
}

static void test_cuda_without_a_library_says_where_it_looked(void **state)
{
    (void)state;
    expect_error("cuda", 0, ERR_UNSUPPORTED, "beside the program or in ../lib/pkmserve");
    expect_no_library("", "beside the program");
}

static void test_a_library_that_does_not_load_is_named(void **state)
{
    (void)state;
    expect_no_library("/nowhere/libpkmserve_cuda.so", "/nowhere/libpkmserve_cuda.so");
    expect_no_library("tests/kernels/test_backend.c", "does not load");
}

static void test_another_library_is_told_from_ours(void **state)
{
    (void)state;
    expect_no_library("libm.so.6", "is no CUDA backend");
}

static void test_a_library_of_another_version_is_refused(void **state)
{
    (void)state;
    const char *const build = getenv("B");
    char path[1024];
    (void)snprintf(path, sizeof path, "%s/tests/kernels/other_version.so",
                   build != NULL && build[0] != '\0' ? build : "build");
    expect_no_library(path, "of another version of pkmserve");
}

static void test_unknown_device_is_named(void **state)
{
    (void)state;
    expect_error("tpu", 0, ERR_ARGUMENT, "tpu");
    expect_error("", 0, ERR_ARGUMENT, "device");
}

static void test_negative_threads_are_refused(void **state)
{
    (void)state;
    expect_error("auto", -3, ERR_ARGUMENT, "-3");
}

static void test_close_takes_null(void **state)
{
    (void)state;
    backend_close(NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(test_ref_opens, clear_environment),
        cmocka_unit_test_setup_teardown(test_environment_forces_the_instruction_set,
                                        clear_environment, clear_environment),
        cmocka_unit_test_setup_teardown(test_auto_opens_the_cpu_and_says_why, clear_environment,
                                        clear_environment),
        cmocka_unit_test_setup_teardown(test_what_was_named_needs_no_note, clear_environment,
                                        clear_environment),
        cmocka_unit_test_setup_teardown(test_cuda_without_a_library_says_where_it_looked,
                                        clear_environment, clear_environment),
        cmocka_unit_test_setup_teardown(test_a_library_that_does_not_load_is_named,
                                        clear_environment, clear_environment),
        cmocka_unit_test_setup_teardown(test_another_library_is_told_from_ours, clear_environment,
                                        clear_environment),
        cmocka_unit_test_setup_teardown(test_a_library_of_another_version_is_refused,
                                        clear_environment, clear_environment),
        cmocka_unit_test_setup_teardown(test_unknown_device_is_named, clear_environment,
                                        clear_environment),
        cmocka_unit_test_setup_teardown(test_negative_threads_are_refused, clear_environment,
                                        clear_environment),
        cmocka_unit_test_setup_teardown(test_close_takes_null, clear_environment,
                                        clear_environment),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
