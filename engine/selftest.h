/* What runs before the first request. Called by engine_open, on its thread.
 *
 * The warm-up: some backends prepare each shape of a decode step when it first runs; that time is
 * spent here, so that no request waits for it.
 *
 * The self-test: a fixed short text is computed whole, in chunks, and together with another text;
 * where drawn tokens are computed apart, its last tokens also as if they had been drawn, alone and
 * together with as many others as may run, with rows of prompts in between. All results of a kind
 * must be numbers, or minus infinity, and agree to the bit; otherwise the results of this machine,
 * build or model would depend on which other requests run, and the engine does not start. With
 * fast_math they may depend on that. Before it the fast paths that the backend has are tried,
 * together first. Where the self-test or the probe does not pass with them, all is tested again
 * without.
 *
 * The probe of model.sha256: what the model computed when it was made, against what it computes
 * here. */
#ifndef ENGINE_SELFTEST_H
#define ENGINE_SELFTEST_H

#include "models/identity.h"

/* What is tested. Nothing else may use the step or the cache meanwhile. */
struct selftest {
    struct backend *be;  /* Borrowed, as are the model and the step */
    struct model *model; /* reserved */
    struct step *step;
    struct step *twin; /* of a backend that runs ahead; else NULL */
    int n_page;        /* of the cache */
    int max_seqs;      /* that run at once */
    int context;       /* positions that a text may have */
    bool fast_math;
};

/* Runs a decode step of each size that the backend prepares on its first use (capture_max). The
 * backend's error, if any. */
enum err_code selftest_warm_up(const struct selftest *test, struct err *err);
/* Whether the backend computes the same bits for a text whole, in chunks and together with another,
 * all of them numbers; with fast_math only the latter. ERR_NUMERICAL, or the backend's own
 * error. */
enum err_code selftest_run(const struct selftest *test, struct err *err);
/* Tries the fast paths that the backend uses: a text is computed without any, as a prompt and as
 * drawn tokens, then by the exact ones together, which must give the same bits, then by the others
 * too, which must give log-probabilities that differ by no more in the mean than rounding explains.
 * Where they do not, each is tried by itself, and those that pass once more together. What does not
 * pass is left out, with a line in the log. An error of the device is returned. */
enum err_code selftest_fast_paths(const struct selftest *test, struct err *err);
/* Leaves all of them out; whether there were any. */
bool selftest_leave_fast_paths(const struct selftest *test);
/* Compares the results of the first n tokens with the stored ones, see identity_compare; as many of
 * the probe's tokens as a text may have here. */
enum err_code selftest_identity(const struct selftest *test, const struct identity *identity,
                                float tolerance, int *n, float *difference, struct err *err);

#endif
