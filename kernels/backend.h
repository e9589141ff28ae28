/* The backend: the one way from the models to the arithmetic.
 *
 * A model's forward pass is a list of ops (op.h); nothing above kernels/ knows which machine
 * executes them. A backend is a table: the resources below, and a function for each op. kernels/ref
 * is plain C, the specification; kernels/cpu uses vectors and threads; kernels/cuda runs on the
 * GPU.
 *
 * One thread (the engine's) calls a backend; a backend may own more threads below this line. */
#ifndef KERNELS_BACKEND_H
#define KERNELS_BACKEND_H

#include "kernels/op.h"

/* ---- measured rates of the machine -------------------------------------------------------- */

struct machine_rate {
    double read_bytes_per_s; /* plain read of a large array by all threads; 0 = not measured */
    double peak_per_s; /* of the multiply-add for weights of a type, which counts two; 0 likewise */
};

/* ---- the table ---------------------------------------------------------------------------- */

/* Owner of everything made here: the caller, who frees it before close. */
struct backend_ops {
    void (*close)(struct backend *be);
    /* Zero-filled memory of the device, 64-byte aligned. purpose names it in errors. */
    enum err_code (*buffer_new)(struct backend *be, void **data, size_t bytes, const char *purpose,
                                struct err *err);
    void (*buffer_free)(struct backend *be, void *data);
    /* Packs host (a view of host memory: F32, F16, BF16, I8 with row_scale, or Q4 with
     * row_scale_f16) into a new weight. */
    enum err_code (*weight_new)(struct backend *be, struct weight **weight,
                                const struct tensor *host, const struct weight_desc *desc,
                                const char *name, struct err *err);
    void (*weight_free)(struct backend *be, struct weight *weight);
    size_t (*weight_bytes)(const struct weight *weight);
    enum err_code (*step_new)(struct backend *be, struct step **step,
                              const struct step_limits *limits, struct err *err);
    /* A second step of the same sizes, of a backend with runs_ahead; of others ERR_UNSUPPORTED. It
     * shares the device's memory with step: which of the two began first is computed first. Freed
     * before step is. */
    enum err_code (*step_twin)(struct backend *be, struct step **twin, struct step *step,
                               struct err *err);
    void (*step_free)(struct backend *be, struct step *step);
    void (*upload)(struct backend *be, struct tensor dst, const void *host);
    void (*download)(struct backend *be, void *host, struct tensor src);
    /* Bytes of the device's memory that may still be taken; INT64_MAX if nothing says. */
    int64_t (*memory_available)(struct backend *be);
    /* Checks the step's inputs (step_check) and brings them to the device; the ops that follow work
     * on it. */
    void (*step_begin)(struct backend *be, struct step *step);
    /* Starts the ops since step_begin where they do not run as they are called (is_async), and
     * returns without waiting for them. */
    void (*submit)(struct backend *be, struct step *step);
    /* Brings src to the host with the step's results, without a wait of its own. After submit and
     * before finish. src has no gaps between rows; of one step at most limits.n_fetch_bytes are
     * fetched. Returns where they are from finish until this step's next step_begin. Borrowed. */
    const void *(*fetch)(struct backend *be, struct step *step, struct tensor src);
    /* Submits if that has not been done, waits for all ops since this step's step_begin, makes the
     * results readable, reports the first failure. */
    enum err_code (*finish)(struct backend *be, struct step *step, struct err *err);
    /* Computes by fast_path[i] from now on, or without it. No step is open. */
    void (*fast_path_use)(struct backend *be, int i, bool is_used);
    /* Measures for about a third of a second, the peak for weights of that type. One without an
     * instruction of its own is computed as F32. */
    void (*measure)(struct backend *be, enum dtype dtype, struct machine_rate *rate);

    struct op_table compute; /* called by op.c alone */
};

/* A faster way to compute than the plainest one, for a device that may turn out to be none for it:
 * the self-test compares its results with those without it. */
struct fast_path {
    const char *name; /* for the log and /info */
    bool is_exact;    /* results have the same bits with it; else they differ by rounding */
    bool is_used;
};
enum { FAST_PATH_MAX = 12 };

struct backend {
    const struct backend_ops *op;
    char name[32];         /* "ref", "cpu-amx", "cpu-avx512", "cpu-neon", "cpu-plain", "cuda" */
    char description[160]; /* for logs and /info: instruction set or device name, threads, memory */
    char note[384];     /* one line for the log, or "": why "auto" chose this backend, or what was
                         * asked for and is not there */
    char products[384]; /* one line, or "": what library multiplies matrices by which algorithms,
                         * where others may give other last bits. Written while weights are made */
    char warning[384];  /* one line, or "": what has slowed steps down since the backend was opened.
                         * Guard: the engine's thread, which logs it and empties it */
    struct fast_path fast_path[FAST_PATH_MAX];
    int n_fast_path; /* that there are; weights that are made may bring one */
    int n_thread;
    size_t memory_bytes; /* memory usable for weights and cache; 0 = unknown */
    bool is_host;        /* its memory is the host's: it reads mapped files in place */
    bool has_int8;       /* makes I8 weights */
    /* Makes F16 matrices, and reads values and experts as F16 where their source is. */
    bool has_f16;
    bool has_int8_slots; /* reads values and experts of memories as I8 where their source is */
    bool prefers_bf16;   /* products of BF16 and F16 weights are many times as fast as of F32 */
    int n_tok_good;      /* rows of a step beyond which more give hardly more rows per second */
    bool is_async;       /* the host is free between submit and finish */
    /* Between a step's submit and its finish its twin may begin, and hold tokens that the step
     * draws: step_token_drawn. */
    bool runs_ahead;
    /* It may compute rows of tokens that came in a request otherwise than rows of drawn tokens, so
     * that a token has other bits as the one than as the other. Hence all rows of a step are of one
     * kind: step.is_drawn. Within a kind a row's bits depend on the row alone. */
    bool phases_apart;
    /* Steps of up to this many sequences, one row each, are captured as graphs on first use: run
     * one of each size before serving. 0 = no graphs. */
    int capture_max;
    int64_t n_prepared; /* steps so far that ran as a graph. Guard: the engine's thread */
};

struct backend_options {
    const char *device; /* "auto", "cpu", "cuda"; "ref" for tests */
    int n_thread;       /* 0 = one per core available to the process */
    bool fast_math;     /* matrix products may depend on how many rows share the call */
    const char *gpu;    /* a number, or a bus id as nvidia-smi shows it; NULL or "" = the first */
};

/* Opens the best backend that options allow. "auto" takes the GPU where there is one, else the CPU.
 * The CPU's instruction set is the best of the machine, or what PKMSERVE_ISA names (amx, avx512,
 * avx2; on ARM64 neon-bf16, neon-dot, neon; plain, ref); a set the machine lacks or an unknown name
 * is ERR_UNSUPPORTED / ERR_ARGUMENT.
 * Owner of *be: the caller, who ends it with backend_close. */
enum err_code backend_open(struct backend **be, const struct backend_options *options,
                           struct err *err);
void backend_close(struct backend *be); /* NULL is fine */

/* The backends, opened by backend_open alone and by the checker. */
enum err_code ref_open(struct backend **be, struct err *err);
enum err_code cpu_open(struct backend **be, const char *isa /* NULL = best */, int n_thread,
                       struct err *err);

#endif
