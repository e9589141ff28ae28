/* Opening backends by name: kernels/backend.c. */
#include "kernels/backend.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static void expect_error(const char *device, int n_thread, enum err_code code, const char *words)
{
    const struct backend_options options = {device, n_thread};
    struct backend *be = (struct backend *)&options; /* anything but NULL */
    struct err err = {0};
    assert_int_equal(backend_open(&be, &options, &err), code);
    assert_null(be);
    if (strstr(err.message, words) == NULL) {
        fail_msg("device %s: expected a message with \"%s\", got \"%s\"", device, words,
                 err.message);
    }
}

static int clear_isa(void **state)
{
    (void)state;
    return unsetenv("PKMSERVE_ISA");
}

static void test_ref_opens(void **state)
{
    (void)state;
    const struct backend_options options = {"ref", 0};
    struct backend *be = NULL;
    assert_int_equal(backend_open(&be, &options, NULL), ERR_OK);
    assert_string_equal(be->name, "ref");
    backend_close(be);
}

static void test_auto_opens_the_cpu(void **state)
{
    (void)state;
    const struct backend_options options = {"auto", 1};
    struct backend *be = NULL;
    assert_int_equal(backend_open(&be, &options, NULL), ERR_OK);
    assert_memory_equal(be->name, "cpu-", 4);
    backend_close(be);
}

static void test_environment_forces_the_instruction_set(void **state)
{
    (void)state;
    static const char *const sets[][2] = {{"ref", "ref"}, {"plain", "cpu-plain"}};
    for (size_t i = 0; i < sizeof sets / sizeof *sets; i++) {
        assert_int_equal(setenv("PKMSERVE_ISA", sets[i][0], 1), 0);
        const struct backend_options options = {"cpu", 1};
        struct backend *be = NULL;
        assert_int_equal(backend_open(&be, &options, NULL), ERR_OK);
        assert_string_equal(be->name, sets[i][1]);
        backend_close(be);
    }
    assert_int_equal(setenv("PKMSERVE_ISA", "sse9", 1), 0);
    expect_error("cpu", 1, ERR_ARGUMENT, "sse9");
}

static void test_cuda_is_refused_by_name(void **state)
{
    (void)state;
    expect_error("cuda", 0, ERR_UNSUPPORTED, "cuda");
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
        cmocka_unit_test_setup(test_ref_opens, clear_isa),
        cmocka_unit_test_setup(test_auto_opens_the_cpu, clear_isa),
        cmocka_unit_test_setup_teardown(test_environment_forces_the_instruction_set, clear_isa,
                                        clear_isa),
        cmocka_unit_test_setup(test_cuda_is_refused_by_name, clear_isa),
        cmocka_unit_test_setup(test_unknown_device_is_named, clear_isa),
        cmocka_unit_test_setup(test_negative_threads_are_refused, clear_isa),
        cmocka_unit_test_setup(test_close_takes_null, clear_isa),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
