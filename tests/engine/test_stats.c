/* Histograms, and the log's one-line promise. */
#include "engine/log.h"
#include "engine/stats.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>
#include <jansson.h>

static void observations_land_in_their_buckets(void **state)
{
    (void)state;
    static const double bound[] = {1, 2, 5};
    struct histogram h;
    histogram_begin(&h, bound, 3);
    const double values[] = {0, 1, 1.5, 2, 5, 5.1, 100};
    for (size_t i = 0; i < sizeof values / sizeof values[0]; i++) {
        histogram_add(&h, values[i]);
    }
    assert_int_equal(atomic_load(&h.bucket[0]), 2); /* le="1" holds 1 itself */
    assert_int_equal(atomic_load(&h.bucket[1]), 2);
    assert_int_equal(atomic_load(&h.bucket[2]), 1);
    assert_int_equal(atomic_load(&h.bucket[3]), 2);
    assert_int_equal(atomic_load(&h.count), 7);
    assert_true(fabs(atomic_load(&h.sum) - 114.6) < 1e-9);
    histogram_add(&h, NAN);
    histogram_add(&h, -1);
    assert_int_equal(atomic_load(&h.count), 7);
    /* The max_tokens of a model without a context limit, in a server that is up for weeks. */
    for (int i = 0; i < 100000; i++) {
        histogram_add(&h, 1 << 28);
    }
    assert_true(atomic_load(&h.sum) > 1e5 * (1 << 28));
}

static void bounds_ascend_and_fit(void **state)
{
    (void)state;
    const struct {
        const double *bound;
        int n;
    } all[] = {
        {stats_bounds_ttft, stats_n_ttft}, {stats_bounds_itl, stats_n_itl},
        {stats_bounds_e2e, stats_n_e2e},   {stats_bounds_tokens, stats_n_tokens},
        {stats_bounds_pow2, stats_n_pow2}, {stats_bounds_step_tokens, stats_n_step_tokens},
    };
    for (size_t a = 0; a < sizeof all / sizeof all[0]; a++) {
        assert_in_range(all[a].n, 1, HISTOGRAM_BUCKET_MAX);
        for (int i = 1; i < all[a].n; i++) {
            assert_true(all[a].bound[i] > all[a].bound[i - 1]);
        }
    }
}

/* The contract: 1-2-5 to the context. What is above it no request can tell apart. */
static void bounds_of_lengths_end_at_the_context(void **state)
{
    (void)state;
    static const struct {
        int context;
        double last;
    } all[] = {{1, 1}, {3, 2}, {499, 200}, {500, 500}, {512, 500}, {1 << 28, 200000}};
    static struct engine_stats stats;
    for (size_t a = 0; a < sizeof all / sizeof all[0]; a++) {
        engine_stats_begin(&stats, all[a].context);
        const struct histogram *const lengths[] = {&stats.prompt_len, &stats.generation_len,
                                                   &stats.max_tokens};
        for (size_t i = 0; i < sizeof lengths / sizeof lengths[0]; i++) {
            assert_true(lengths[i]->bound[lengths[i]->n_bound - 1] == all[a].last);
        }
    }
}

/* ---- log ---- */

/* What log_event writes to standard error while inside this pair. */
static int saved_stderr;
static int pipe_out;

static void capture_begin(void)
{
    int fd[2];
    assert_int_equal(pipe(fd), 0);
    saved_stderr = dup(STDERR_FILENO);
    assert_true(dup2(fd[1], STDERR_FILENO) >= 0);
    assert_int_equal(close(fd[1]), 0);
    pipe_out = fd[0];
}

static void capture_end(char *text, size_t text_max)
{
    assert_true(dup2(saved_stderr, STDERR_FILENO) >= 0);
    assert_int_equal(close(saved_stderr), 0);
    size_t n = 0;
    ssize_t got = 0;
    while ((got = read(pipe_out, text + n, text_max - 1 - n)) > 0) {
        n += (size_t)got;
    }
    text[n] = '\0';
    assert_int_equal(close(pipe_out), 0);
}

static char text[3 * LOG_LINE_MAX];

static void text_lines_have_stamp_level_and_event(void **state)
{
    (void)state;
    char quoted[64];
    log_begin(LEVEL_INFO, false);
    capture_begin();
    log_event(LEVEL_DEBUG, "hidden", "a=1");
    log_event(LEVEL_WARN, "slow", "ms=%d id=%s", 12, log_quote(quoted, sizeof quoted, "a \"b\"\n"));
    capture_end(text, sizeof text);
    assert_int_equal(text[4], '-');
    assert_int_equal(text[23], 'Z');
    assert_string_equal(text + 24, " level=warn event=slow ms=12 id=\"a \\\"b\\\"\\u000a\"\n");
}

/* U+009B begins a terminal's sequences as ESC [ does, and U+0085 ends a line for some readers. */
static void no_control_character_comes_through(void **state)
{
    (void)state;
    char quoted[128];
    assert_string_equal(log_quote(quoted, sizeof quoted, "\x1b[31m\x7f\xc2\x9b\xc2\x85\xc2\xa0"),
                        "\"\\u001b[31m\\u007f\\u009b\\u0085\xc2\xa0\"");
}

static void json_lines_parse(void **state)
{
    (void)state;
    char quoted[64];
    log_begin(LEVEL_INFO, true);
    capture_begin();
    log_event(LEVEL_INFO, "ready", "port=8000 ratio=-0.50 ok=true id=007 name=%s model=demo",
              log_quote(quoted, sizeof quoted, "x \"y\" \xff\xc3\xa9"));
    capture_end(text, sizeof text);
    json_error_t error;
    json_t *const line = json_loads(text, 0, &error);
    if (line == NULL) {
        fail_msg("%s: %s", error.text, text);
    }
    assert_int_equal(json_integer_value(json_object_get(line, "port")), 8000);
    assert_true(fabs(json_real_value(json_object_get(line, "ratio")) + 0.5) < 1e-9);
    assert_true(json_is_true(json_object_get(line, "ok")));
    assert_string_equal(json_string_value(json_object_get(line, "id")), "007");
    assert_string_equal(json_string_value(json_object_get(line, "name")),
                        "x \"y\" \xef\xbf\xbd\xc3\xa9");
    assert_string_equal(json_string_value(json_object_get(line, "model")), "demo");
    assert_string_equal(json_string_value(json_object_get(line, "event")), "ready");
    json_decref(line);
    log_begin(LEVEL_INFO, false);
}

static void a_line_stays_one_line_and_bounded(void **state)
{
    (void)state;
    static char big[2 * LOG_LINE_MAX];
    memset(big, 'a', sizeof big - 1);
    for (int json = 0; json < 2; json++) {
        log_begin(LEVEL_INFO, json != 0);
        capture_begin();
        log_event(LEVEL_INFO, "big", "first=1 line=\r\n value=%s", big);
        capture_end(text, sizeof text);
        assert_true(strlen(text) < LOG_LINE_MAX + 64);
        assert_ptr_equal(strchr(text, '\n'), text + strlen(text) - 1);
        assert_non_null(strstr(text, json ? "\"truncated\":true}" : " truncated=true\n"));
        if (json) {
            json_t *const line = json_loads(text, 0, NULL);
            assert_non_null(line);
            json_decref(line);
        }
    }
    log_begin(LEVEL_INFO, false);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(observations_land_in_their_buckets),
        cmocka_unit_test(bounds_ascend_and_fit),
        cmocka_unit_test(bounds_of_lengths_end_at_the_context),
        cmocka_unit_test(text_lines_have_stamp_level_and_event),
        cmocka_unit_test(no_control_character_comes_through),
        cmocka_unit_test(json_lines_parse),
        cmocka_unit_test(a_line_stays_one_line_and_bounded),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
