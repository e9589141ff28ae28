/* How quickly a tokenizer reads texts, for tests/bench/tokenizer.py.
 *
 *   bench_tokenizer TOKENIZER N_VOCAB TEXTS SECONDS [IDS]
 *
 * TEXTS is a file of texts, each ended by NUL. All are encoded again and again for SECONDS, by one
 * thread. Prints, as JSON, the seconds of opening, and the bytes of one round and the seconds of
 * the quickest. IDS, if given, gets the ids of each text on a line. */
#include "engine/tokenizer.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static double now(void)
{
    struct timespec t;
    (void)clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static char *read_file(const char *path, size_t *bytes)
{
    FILE *const file = fopen(path, "rb");
    if (file == NULL || fseek(file, 0, SEEK_END) != 0) {
        fprintf(stderr, "bench_tokenizer: cannot read %s\n", path);
        exit(1);
    }
    *bytes = (size_t)ftell(file);
    rewind(file);
    char *const text = malloc(*bytes + 1);
    CHECK(text != NULL && fread(text, 1, *bytes, file) == *bytes);
    text[*bytes] = '\0';
    (void)fclose(file);
    return text;
}

/* Encodes all texts; out may be NULL. Returns the seconds. */
static double encode_all(const struct tokenizer *tokenizer, const char *texts, size_t bytes,
                         FILE *out)
{
    double seconds = 0;
    for (size_t at = 0; at < bytes;) {
        const size_t n = strlen(texts + at);
        int32_t *ids = NULL;
        size_t n_ids = 0;
        struct err err = {0};
        const double begin = now();
        if (tokenizer_encode(tokenizer, texts + at, n, true, &ids, &n_ids, NULL, &err) != ERR_OK) {
            fprintf(stderr, "bench_tokenizer: %s\n", err.message);
            exit(1);
        }
        seconds += now() - begin;
        for (size_t i = 0; out != NULL && i < n_ids; i++) {
            fprintf(out, i == 0 ? "%d" : " %d", ids[i]);
        }
        if (out != NULL) {
            fputc('\n', out);
        }
        free(ids);
        at += n + 1;
    }
    return seconds;
}

int main(int argc, char **argv)
{
    if (argc < 5) {
        fprintf(stderr, "usage: bench_tokenizer TOKENIZER N_VOCAB TEXTS SECONDS [IDS]\n");
        return 2;
    }
    size_t bytes = 0;
    char *const texts = read_file(argv[3], &bytes);
    struct tokenizer *tokenizer = NULL;
    struct err err = {0};
    const double begin = now();
    if (tokenizer_open(&tokenizer, NULL, argv[1], NULL, atoi(argv[2]), &err) != ERR_OK) {
        fprintf(stderr, "bench_tokenizer: %s\n", err.message);
        return 1;
    }
    const double opening = now() - begin;
    if (argc > 5) {
        FILE *const out = fopen(argv[5], "w");
        if (out == NULL) {
            fprintf(stderr, "bench_tokenizer: cannot write %s\n", argv[5]);
            return 1;
        }
        (void)encode_all(tokenizer, texts, bytes, out);
        (void)fclose(out);
    }
    double best = 0;
    for (double total = 0; total < atof(argv[4]);) {
        const double seconds = encode_all(tokenizer, texts, bytes, NULL);
        best = best <= 0 || seconds < best ? seconds : best;
        total += seconds + 1e-6;
    }
    printf("{\"open\":%.6f,\"bytes\":%zu,\"seconds\":%.6f}\n", opening, bytes, best);
    tokenizer_close(tokenizer);
    free(texts);
    return 0;
}
