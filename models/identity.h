/* model.sha256: what a model directory contained, and what the model computed, when it was made.
 * models/convert/identity.py writes it; models/FORMAT.md describes it. Two things can be compared:
 *
 *   the files     by lines in sha256sum's form, "64 digits, two spaces, name"
 *   the results   by a probe in lines that sha256sum ignores: token ids, the log-probability of
 *                 each next one in fp32, and how far each dtype may be from those:
 *                   # probe tokens 17 4 ...
 *                   # probe logprobs -3.25 ...
 *                   # probe tolerance bf16 0.05
 *
 * Nothing in the file is trusted: its size, names, numbers and their counts are bounded here. */
#ifndef MODELS_IDENTITY_H
#define MODELS_IDENTITY_H

#include "models/model.h"
#include "models/sha256.h"

#define IDENTITY_NAME "model.sha256"

enum {
    IDENTITY_BYTES_MAX = 1 << 20,
    IDENTITY_FILE_MAX = 1024,
    IDENTITY_FILE_NAME_MAX = 256,
    IDENTITY_TOKEN_MAX = 256,
};

struct identity_file {
    char name[IDENTITY_FILE_NAME_MAX]; /* in the model directory, without a slash */
    char sha256[SHA256_HEX];
};

struct identity {
    char *path; /* Owner: for messages */
    int n_file;
    struct identity_file *file; /* Owner: [n_file], names distinct */
    int n_token;                /* 0 = there is no probe */
    int32_t token[IDENTITY_TOKEN_MAX];
    float logprob[IDENTITY_TOKEN_MAX]; /* [n_token - 1] of the next token; finite, at most 0 */
    float tolerance[DTYPE_N];          /* 0 = the file does not say */
};

/* Owner of *identity: the caller, by identity_free. The message names the line. */
enum err_code identity_parse(struct identity **identity, const char *text, size_t bytes,
                             const char *path, struct err *err);
/* Reads it from the model in dir. Without the file *identity is NULL, which is not an error. */
enum err_code identity_read(struct identity **identity, const char *dir, struct err *err);
void identity_free(struct identity *identity); /* NULL is fine */

/* Reads every file that is listed; ERR_FORMAT names the first with another sum, ERR_IO one that is
 * missing. options gets its progress. */
enum err_code identity_check_files(const struct identity *identity, const char *dir,
                                   const struct model_options *options, struct err *err);
/* How far results in this dtype may be from the stored ones; 0 = there is nothing to compare with.
 * fast_math: matrix products have a lower precision than dtype. */
float identity_tolerance(const struct identity *identity, const struct model_info *info,
                         bool fast_math);
/* Compares the log-probabilities of tokens 1 .. n, of the probe's n_token - 1: *difference is the
 * largest, ERR_FORMAT names the first position that is beyond the tolerance, or not a number. */
enum err_code identity_compare(const struct identity *identity, const float *logprob, int n,
                               float tolerance, float *difference, struct err *err);

#endif
