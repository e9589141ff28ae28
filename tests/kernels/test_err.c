/* Errors are one line, bounded and named: kernels/err.h. */
#include "kernels/err.h"

#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

static void test_sets_code_and_message(void **state)
{
    (void)state;
    struct err err = {0};
    assert_int_equal(err_set(&err, ERR_FORMAT, "%s: %d exceeds %d", "config.json", 7, 5),
                     ERR_FORMAT);
    assert_int_equal(err.code, ERR_FORMAT);
    assert_string_equal(err.message, "config.json: 7 exceeds 5");
}

static void test_without_err_returns_code(void **state)
{
    (void)state;
    assert_int_equal(err_set(NULL, ERR_IO, "%s", "lost"), ERR_IO);
}

/* A file name with a line break must not forge a second line of a log. */
static void test_control_characters_become_question_marks(void **state)
{
    (void)state;
    struct err err = {0};
    (void)err_set(&err, ERR_IO, "%s",
                  "a\nb\rc\td\x7f"
                  "e\x1b[31m");
    assert_string_equal(err.message, "a?b?c?d?e?[31m");
}

static void test_utf8_stays(void **state)
{
    (void)state;
    struct err err = {0};
    (void)err_set(&err, ERR_IO, "%s", "modèle/重み");
    assert_string_equal(err.message, "modèle/重み");
}

static void test_long_message_is_cut(void **state)
{
    (void)state;
    char argument[2000];
    memset(argument, 'x', sizeof argument - 1);
    argument[sizeof argument - 1] = '\0';
    struct {
        struct err err;
        char guard[8];
    } box = {.guard = "guard"};
    (void)err_set(&box.err, ERR_ARGUMENT, "%s", argument);
    assert_int_equal(strlen(box.err.message), sizeof box.err.message - 1);
    assert_string_equal(box.guard, "guard");
}

/* Names are stable: logs and alerts are written against them. */
static void test_every_code_has_its_name(void **state)
{
    (void)state;
    static const char *const names[] = {
        [ERR_OK] = "ok",
        [ERR_ARGUMENT] = "argument",
        [ERR_IO] = "io",
        [ERR_FORMAT] = "format",
        [ERR_UNSUPPORTED] = "unsupported",
        [ERR_MEMORY] = "memory",
        [ERR_DEVICE] = "device",
        [ERR_NUMERICAL] = "numerical",
        [ERR_QUEUE_FULL] = "queue_full",
        [ERR_QUEUE_TOKENS] = "queue_tokens_full",
        [ERR_QUEUE_MEMORY] = "queue_memory_full",
        [ERR_CLOSED] = "closed",
        [ERR_TIMEOUT] = "timeout",
    };
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        assert_string_equal(err_code_name((enum err_code)i), names[i]);
    }
}

/* A broken invariant names its place and ends the process, in optimised builds too. */
static void test_check_aborts_and_says_where(void **state)
{
    (void)state;
    int fds[2];
    assert_int_equal(pipe(fds), 0);
    const pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        (void)signal(SIGABRT, SIG_DFL);
        (void)dup2(fds[1], STDERR_FILENO);
        const int one = 1;
        CHECK(one == 2);
        _exit(0);
    }
    (void)close(fds[1]);
    char line[256] = "";
    size_t used = 0;
    for (ssize_t n = 1; n > 0 && used<sizeof line - 1; used += n> 0 ? (size_t)n : 0) {
        n = read(fds[0], line + used, sizeof line - 1 - used);
    }
    (void)close(fds[0]);
    int status = 0;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT);
    assert_non_null(strstr(line, "test_err.c:"));
    assert_non_null(strstr(line, "CHECK failed: one == 2\n"));
}

static void test_check_holds_silently(void **state)
{
    (void)state;
    int n_evaluated = 0;
    CHECK(++n_evaluated == 1);
    assert_int_equal(n_evaluated, 1);
}

/* Characters come through; what is none, and what a terminal would act on, does not. */
static void test_messages_are_text(void **state)
{
    (void)state;
    static const char *const cases[][2] = {
        {"a\xc3\xa9\xe2\x96\x81\xf0\x9f\x98\x80", "a\xc3\xa9\xe2\x96\x81\xf0\x9f\x98\x80"},
        {"a\n\x1b[m\x7f", "a??[m?"},
        {"\xc2\x9b \xe2\x80\xa8 \xe2\x80\xae", "?? ??? ???"},
        {"\xbf\xbf \xc0\x80 \xed\xa0\x80 \xf5\x80\x80\x80", "?? ?? ??? ????"},
        {"cut \xe2\x96", "cut ??"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct err err;
        (void)err_set(&err, ERR_IO, "%s", cases[i][0]);
        assert_string_equal(err.message, cases[i][1]);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_sets_code_and_message),
        cmocka_unit_test(test_without_err_returns_code),
        cmocka_unit_test(test_control_characters_become_question_marks),
        cmocka_unit_test(test_utf8_stays),
        cmocka_unit_test(test_long_message_is_cut),
        cmocka_unit_test(test_every_code_has_its_name),
        cmocka_unit_test(test_check_aborts_and_says_where),
        cmocka_unit_test(test_check_holds_silently),
        cmocka_unit_test(test_messages_are_text),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
