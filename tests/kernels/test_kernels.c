/* Compares every op of every instruction set of this machine, and of the CUDA backend, with
 * kernels/ref: see check.h. The CUDA backend is that of PKMSERVE_CUDA_LIBRARY, or the test double
 * of this build (make cuda-host), which runs a kernel's threads in several orders: what depends on
 * the order lacks a barrier.
 *
 *   CHECK_BACKEND="cpu-plain cuda"   only these backends, and no rates of the machine
 *   CHECK_OP=linear          only this row of the table
 *   CHECK_SEED=7             other cases than the usual ones
 *   CHECK_SCALE=20           that many times as many cases
 *   CHECK_PERCENT=1          at most that many per cent of the table's cases, at least one of each row
 *   CHECK_ORDER=forward      of the CUDA backend's orders only this one
 *   TEST_FEW=1               not ref by itself: what it accesses it does as the others' reference
 *   CHECK_CASE=0x1234        the single case that a failure named (with CHECK_BACKEND, CHECK_OP)
 *   test_kernels --bench     times the ops instead */
#include "tests/cuda_library.h"
#include "tests/kernels/check.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { N_THREAD_MANY = 3 };

/* One backend to check. percent of the table's cases keeps it within its share of the tests' time:
 * the double takes microseconds per CUDA thread, and ref by itself is what all others are compared
 * with. */
struct subject {
    const char *isa;
    const char *order; /* CUDA_HOST_ORDER of the double, or NULL */
    int percent;
    const char *overlap;   /* PKMSERVE_CUDA_OVERLAP */
    const char *split;     /* PKMSERVE_CUDA_SPLIT */
    const char *attention; /* PKMSERVE_CUDA_ATTENTION, _DRAWN, _FLAT */
};

/* avx512-pairs and -wide are what avx512 chooses from by machine: how BF16 weights are multiplied.
 */
static const struct subject subjects[] = {
    {"ref", NULL, 10, NULL, NULL, NULL},          {"plain", NULL, 50, NULL, NULL, NULL},
#if defined(__x86_64__)
    {"avx2", NULL, 50, NULL, NULL, NULL},         {"amx", NULL, 100, NULL, NULL, NULL},
    {"avx512-pairs", NULL, 50, NULL, NULL, NULL}, {"avx512-wide", NULL, 50, NULL, NULL, NULL},
#elif defined(__aarch64__)
    {"neon", NULL, 50, NULL, NULL, NULL},       {"neon-dot", NULL, 50, NULL, NULL, NULL},
    {"neon-bf16", NULL, 100, NULL, NULL, NULL},
#endif
    {"cuda", "forward", 5, "1", "1", "1"},        {"cuda", "reverse", 5, "0", "0", "0"},
    {"cuda", "random", 5, "0", "1", "1"},
};
enum { N_SUBJECT = sizeof subjects / sizeof *subjects };

static enum err_code subject_open(struct backend **be, const struct subject *subject, int n_thread,
                                  struct err *err)
{
    if (strcmp(subject->isa, "ref") == 0) {
        return ref_open(be, err);
    }
    if (strcmp(subject->isa, "cuda") != 0) {
        return cpu_open(be, subject->isa, n_thread, err);
    }
    *be = NULL;
    if (!cuda_library_find()) {
        return err_set(err, ERR_UNSUPPORTED, "no CUDA library: make cuda-host builds the double");
    }
    (void)setenv("CUDA_HOST_ORDER", subject->order, 1);
    (void)setenv("PKMSERVE_CUDA_OVERLAP", subject->overlap, 1);
    (void)setenv("PKMSERVE_CUDA_SPLIT", subject->split, 1);
    (void)setenv("PKMSERVE_CUDA_ATTENTION", subject->attention, 1);
    (void)setenv("PKMSERVE_CUDA_DRAWN", subject->attention, 1);
    (void)setenv("PKMSERVE_CUDA_FLAT", subject->attention, 1);
    const struct backend_options options = {"cuda", n_thread, false, NULL};
    return backend_open(be, &options, err);
}

static const char *setting(const char *name)
{
    const char *const value = getenv(name);
    return value != NULL && value[0] != '\0' ? value : NULL;
}

static bool is_cpu(const struct subject *subject)
{
    return strcmp(subject->isa, "ref") != 0 && strcmp(subject->isa, "cuda") != 0;
}

/* Whether name is one of names, which stand between spaces. */
static bool is_among(const char *names, const char *name)
{
    const size_t n = strlen(name);
    for (const char *at = names; (at = strstr(at, name)) != NULL; at += n) {
        if ((at == names || at[-1] == ' ') && (at[n] == ' ' || at[n] == '\0')) {
            return true;
        }
    }
    return false;
}

static bool is_wanted(const struct subject *subject)
{
    const char *const only = setting("CHECK_BACKEND");
    char name[32];
    (void)snprintf(name, sizeof name, "%s%s", is_cpu(subject) ? "cpu-" : "", subject->isa);
    const char *const order = setting("CHECK_ORDER");
    if (only == NULL && setting("TEST_FEW") != NULL && strcmp(name, "ref") == 0) {
        return false;
    }
    return (only == NULL || is_among(only, name)) &&
           (order == NULL || subject->order == NULL || strcmp(order, subject->order) == 0);
}

/* Opens the three sides, or says why the machine cannot. */
static enum err_code sides_open(struct check *c, const struct subject *subject, struct err *err)
{
    enum err_code code = subject_open(&c->side[SIDE_ONE], subject, 1, err);
    code = code == ERR_OK ? subject_open(&c->side[SIDE_MANY], subject, N_THREAD_MANY, err) : code;
    return code == ERR_OK ? ref_open(&c->side[SIDE_REF], err) : code;
}

static void sides_close(struct check *c)
{
    for (int side = 0; side < SIDE_N; side++) {
        backend_close(c->side[side]);
    }
}

static void sides_reopen(struct check *c, const void *subject)
{
    sides_close(c);
    memset(c->side, 0, sizeof c->side);
    CHECK(sides_open(c, subject, NULL) == ERR_OK);
}

static void run_one_case(struct check *c, const char *only, const char *seed)
{
    for (const struct check_row *row = check_rows; row->name != NULL; row++) {
        if (only == NULL || strcmp(only, row->name) == 0) {
            check_run_case(c, row, strtoull(seed, NULL, 0));
        }
    }
}

static void test_subject(void **state)
{
    const struct subject *const subject = *state;
    const char *const isa = subject->isa;
    struct check *const c = calloc(1, sizeof *c);
    assert_non_null(c);
    c->is_double = subject->order != NULL;
    c->reopen = subject->order == NULL ? sides_reopen : NULL;
    c->subject = subject;
    struct err err = {0};
    const enum err_code code = is_wanted(subject) ? sides_open(c, subject, &err) : ERR_UNSUPPORTED;
    if (code == ERR_UNSUPPORTED) {
        print_message("%s: skipped: %s\n", isa, is_wanted(subject) ? err.message : "not asked for");
        sides_close(c);
        free(c);
        skip();
    }
    if (code != ERR_OK) {
        fail_msg("%s: %s", isa, err.message);
    }
    const char *const seed = setting("CHECK_SEED");
    const char *const scale = setting("CHECK_SCALE");
    const char *const most = setting("CHECK_PERCENT");
    const int percent =
        most != NULL && atoi(most) < subject->percent ? atoi(most) : subject->percent;
    if (setting("CHECK_CASE") != NULL) {
        run_one_case(c, setting("CHECK_OP"), setting("CHECK_CASE"));
    } else {
        check_run(c, setting("CHECK_OP"), seed == NULL ? 1 : strtoull(seed, NULL, 0),
                  percent * (scale == NULL ? 1 : atoi(scale)));
    }
    const int n_failed = c->n_failed;
    print_message("%s%s%s: %d cases, %d failed; %d slots other than ref's, as near as rounding\n",
                  c->side[SIDE_ONE]->name, subject->order == NULL ? "" : ", threads ",
                  subject->order == NULL ? "" : subject->order, c->n_case, n_failed, c->n_near);
    sides_close(c);
    free(c);
    assert_int_equal(n_failed, 0);
}

/* Every slot of a backend's table is filled, and its names are set. */
static void test_tables_are_full(void **state)
{
    (void)state;
    for (int i = 0; i < N_SUBJECT; i++) {
        struct backend *be = NULL;
        struct err err = {0};
        if (!is_wanted(&subjects[i]) || subject_open(&be, &subjects[i], 2, &err) != ERR_OK) {
            continue;
        }
        void *slots[sizeof *be->op / sizeof(void *)];
        memcpy(slots, be->op, sizeof *be->op);
        for (size_t s = 0; s < sizeof slots / sizeof *slots; s++) {
            if (slots[s] == NULL) {
                fail_msg("%s: slot %zu of struct backend_ops is NULL", be->name, s);
            }
        }
        assert_true(be->n_thread >= 1 && be->name[0] != '\0' && be->description[0] != '\0');
        backend_close(be);
    }
}

static void test_rates_are_measured(void **state)
{
    (void)state;
    if (setting("CHECK_BACKEND") != NULL) {
        skip();
    }
    struct backend *be = NULL;
    const struct backend_options options = {"cpu", 1, false, NULL};
    assert_int_equal(backend_open(&be, &options, NULL), ERR_OK);
    for (int dtype = DTYPE_F32; dtype <= DTYPE_I8; dtype++) {
        struct machine_rate rate = {0};
        be->op->measure(be, (enum dtype)dtype, &rate);
        assert_true(rate.read_bytes_per_s > 0);
        assert_true(rate.peak_per_s > 0);
    }
    backend_close(be);
}

static void bench(void)
{
    (void)printf("| backend    | op               |  rows | us, best of  |\n");
    (void)printf("|------------|------------------|------:|-------------:|\n");
    for (int i = 0; i < N_SUBJECT; i++) {
        struct check *const c = calloc(1, sizeof *c);
        if (c == NULL) {
            return;
        }
        struct err err = {0};
        if (is_wanted(&subjects[i]) && sides_open(c, &subjects[i], &err) == ERR_OK) {
            const struct check_row row = {"bench", check_bench, 1, false};
            check_run_case(c, &row, 1);
        }
        sides_close(c);
        free(c);
    }
}

int main(int argc, char **argv)
{
    if (argc > 1 && strcmp(argv[1], "--bench") == 0) {
        bench();
        return 0;
    }
    struct CMUnitTest tests[2 + N_SUBJECT] = {
        cmocka_unit_test(test_tables_are_full),
        cmocka_unit_test(test_rates_are_measured),
    };
    char names[N_SUBJECT][64];
    for (int i = 0; i < N_SUBJECT; i++) {
        const struct subject *const subject = &subjects[i];
        (void)snprintf(names[i], sizeof names[i], "kernels of %s%s%s%s",
                       is_cpu(subject) ? "cpu-" : "", subject->isa,
                       subject->order != NULL ? ", " : "",
                       subject->order != NULL ? subject->order : "");
        tests[2 + i] =
            (struct CMUnitTest){names[i], test_subject, NULL, NULL, (void *)(uintptr_t)subject};
    }
    return cmocka_run_group_tests(tests, NULL, NULL);
}
