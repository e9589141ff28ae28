/* The checker (check.h) as a program of its own, for machines without cmocka: compares every op of
 * one backend with kernels/ref. Used by `make check-gpu`; test_kernels runs the same in `make
 * test`.
 *
 *   CHECK_BACKEND=cuda       or cpu-avx512, cpu-avx2, cpu-plain, ref; default cuda
 *   CHECK_OP=linear          only this row of the table
 *   CHECK_PERCENT=20         that many per cent of the usual cases, at least one of each row
 *   CHECK_SEED=7             other cases than the usual ones
 *   CHECK_CASE=0x1234        the single case that a failure named (with CHECK_OP)
 *
 * A GPU can search keys, multiply weights and attend to requests in two ways: both are checked,
 * whatever PKMSERVE_CUDA_SPLIT, _GEMM, _ATTENTION, _DRAWN and _FLAT are.
 *
 * Prints one line per op and way. Exit status: 0 all is well, 1 something failed, 2 it could not
 * start. */
#include "tests/kernels/check.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { N_THREAD_MANY = 3 };

static const char *setting(const char *name, const char *otherwise)
{
    const char *const value = getenv(name);
    return value != NULL && value[0] != '\0' ? value : otherwise;
}

static enum err_code side_open(struct backend **be, const char *name, int n_thread, struct err *err)
{
    if (strncmp(name, "cpu-", 4) == 0) {
        return cpu_open(be, name + 4, n_thread, err);
    }
    const struct backend_options options = {.device = name, .n_thread = n_thread};
    return backend_open(be, &options, err);
}

static enum err_code sides_open(struct check *c, const char *name, struct err *err)
{
    enum err_code code = side_open(&c->side[SIDE_ONE], name, 1, err);
    code = code == ERR_OK ? side_open(&c->side[SIDE_MANY], name, N_THREAD_MANY, err) : code;
    return code == ERR_OK ? ref_open(&c->side[SIDE_REF], err) : code;
}

static void sides_close(struct check *c)
{
    for (int side = 0; side < SIDE_N; side++) {
        backend_close(c->side[side]);
        c->side[side] = NULL;
    }
}

static bool is_search(const struct check_row *row)
{
    return row->run == check_pkm_search || row->run == check_pkm_search_many ||
           row->run == check_pkm_search_large || row->run == check_pkm_ties ||
           row->run == check_pkm_nan;
}

static bool is_linear(const struct check_row *row)
{
    return strstr(row->name, "linear") != NULL;
}

static bool is_split_row(const struct check_row *row)
{
    return is_search(row) || is_linear(row);
}

static void run_row(struct check *c, const struct check_row *row, const char *way)
{
    const char *const one = setting("CHECK_CASE", NULL);
    const int n_case = c->n_case;
    const int n_failed = c->n_failed;
    const int n_near = c->n_near;
    if (one != NULL) {
        check_run_case(c, row, strtoull(one, NULL, 0));
    } else {
        check_run(c, row->name, strtoull(setting("CHECK_SEED", "1"), NULL, 0),
                  atoi(setting("CHECK_PERCENT", "100")));
    }
    (void)printf("%s%s: %d cases, %d failed", row->name, way, c->n_case - n_case,
                 c->n_failed - n_failed);
    if (is_search(row)) {
        (void)printf(", %d slots other than ref's, as near as rounding", c->n_near - n_near);
    }
    (void)printf("\n");
    (void)fflush(stdout);
}

static bool is_attention(const struct check_row *row)
{
    return row->run == check_attention || row->run == check_attention_bf16 ||
           row->run == check_attention_long || row->run == check_attention_many;
}

/* What a variable of the environment, 0 or 1, decides about a fast path, and the rows that have
 * it. */
struct way {
    const char *name, *variable;
    const char *usual, *otherwise; /* without the way, by it */
    bool (*has)(const struct check_row *row);
};

static const struct way ways[] = {
    {", split", "PKMSERVE_CUDA_SPLIT", "0", "1", is_split_row},
    {", without gemm", "PKMSERVE_CUDA_GEMM", "1", "0", is_linear},
    {", tensor cores", "PKMSERVE_CUDA_ATTENTION", "0", "1", is_attention},
    {", drawn in tiles", "PKMSERVE_CUDA_DRAWN", "1", "0", is_attention},
    {", flat as any", "PKMSERVE_CUDA_FLAT", "1", "0", is_search},
};
enum { N_WAY = sizeof ways / sizeof *ways };

/* All rows without any of them, or those that have the way by it. */
static enum err_code run_rows(struct check *c, const char *name, const char *only,
                              const struct way *way, struct err *err)
{
    for (int i = 0; i < N_WAY; i++) {
        (void)setenv(ways[i].variable, way == &ways[i] ? ways[i].otherwise : ways[i].usual, 1);
    }
    const enum err_code code = sides_open(c, name, err);
    for (const struct check_row *row = check_rows; code == ERR_OK && row->name != NULL; row++) {
        if ((only == NULL || strcmp(only, row->name) == 0) && (way == NULL || way->has(row))) {
            run_row(c, row, way == NULL ? "" : way->name);
        }
    }
    sides_close(c);
    return code;
}

int main(void)
{
    const char *const name = setting("CHECK_BACKEND", "cuda");
    const char *const only = setting("CHECK_OP", NULL);
    struct check *const c = calloc(1, sizeof *c);
    struct err err = {0};
    enum err_code code =
        c == NULL ? err_set(&err, ERR_MEMORY, "no memory") : run_rows(c, name, only, NULL, &err);
    for (int i = 0; code == ERR_OK && i < N_WAY && strcmp(name, "cuda") == 0; i++) {
        code = run_rows(c, name, only, &ways[i], &err);
    }
    if (code != ERR_OK) {
        (void)fprintf(stderr, "run_check: %s\n", err.message);
        free(c);
        return 2;
    }
    const bool is_well = c->n_failed == 0 && c->n_case > 0;
    if (c->n_case == 0) {
        (void)fprintf(stderr, "run_check: CHECK_OP=%s names no row\n", only);
    }
    free(c);
    return is_well ? 0 : 1;
}
