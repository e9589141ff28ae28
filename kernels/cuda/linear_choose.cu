/* Whether cuBLASLt multiplies rows of requests by weights of a shape, and by which algorithms.
 *
 * The one that defines the bits is the first of those that cuBLASLt recommends for a call of many
 * rows that
 *   - splits no sum over blocks and reduces nothing afterwards, as it says itself;
 *   - gives a row the same bits in calls of every multiple of LT_ROWS rows up to the largest, at
 *     every place of them, with and without bias and ReLU, wherever memory of 16-byte alignment
 *     begins and however far rows of y lie apart;
 *   - agrees with our own product within rounding.
 * The second is tried on the device, on numbers of its own, before the first weight of the shape is
 * laid out: the rows of x repeat with a period that no tile has, and begin with another one in each
 * call, so every row of every call is compared with its like in a call of LT_ROWS rows.
 *
 * Its tile may suit many rows and leave most multiprocessors idle with few. So for each of some
 * sizes of calls there is the fastest of those that are recommended for that size and give, in each
 * call of it, the same bits as the first. On an H200 all that cuBLASLt 13 recommends do: each adds
 * up one element's products in the same order.
 *
 * Bytes, of [n_out, k] weights and calls of up to n rows: about n / 32 times x and y of n rows, and
 * the weights n / 16 times, from the second-level cache where they fit, times 4 epilogues. */
#include "kernels/cuda/backend.cuh"
#include "kernels/cuda/linear_lt.cuh"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#if LT_IS_BUILT

enum {
    CANDIDATES = 16, /* that cuBLASLt is asked for */
    FAST_TRIED = 6,  /* of them, that are timed for a size */
    TIMED_RUNS = 8,
    TILE_ROWS = 128,  /* of the tiles that suit many rows */
    TRIAL_PERIOD = 7, /* rows of x that differ */
    EPILOGUES = 4,    /* with and without bias, with and without ReLU */
    TRIAL_THREADS = 128
};

namespace
{

/* to[rows of the grid, k] ← some fixed numbers below scale, again after each period rows (0:
 * never), and what they are as F32, where that is wanted. */
template <enum dtype type>
__global__ void trial_fill(uint16_t *to, float *wide, int k, int period, float scale, uint32_t salt)
{
    const uint32_t r = period > 0 ? blockIdx.x % static_cast<unsigned>(period) : blockIdx.x;
    const int64_t first = static_cast<int64_t>(blockIdx.x) * k;
    grid_wait();
    for (int i = static_cast<int>(threadIdx.x); i < k; i += static_cast<int>(blockDim.x)) {
        uint32_t mixed =
            (r * static_cast<uint32_t>(k) + static_cast<uint32_t>(i) + salt) * 2654435761u;
        mixed = (mixed ^ (mixed >> 15)) * 0x2c1b3c6du;
        const float value = scale * (static_cast<float>(mixed >> 8) * 0x1p-23f - 1);
        const uint16_t half = static_cast<uint16_t>(operand_pair<type>(value, 0));
        to[first + i] = half;
        if (wide != NULL) {
            wide[first + i] = type == DTYPE_F16 ? f16_widen(half) : bf16_widen(half);
        }
    }
}

/* Adds to count how many values of the grid's rows of y differ from row (shift + row) %
 * TRIAL_PERIOD of wanted: by more than a tolerance above 0, else in their bits. */
__global__ void trial_compare(unsigned *count, const float *y, int64_t y_stride,
                              const float *wanted, int n_out, int shift, float tolerance)
{
    const float *const a = y + blockIdx.x * y_stride;
    const float *const b =
        wanted +
        static_cast<int64_t>((blockIdx.x + static_cast<unsigned>(shift)) % TRIAL_PERIOD) * n_out;
    unsigned n = 0;
    grid_wait();
    for (int i = static_cast<int>(threadIdx.x); i < n_out; i += static_cast<int>(blockDim.x)) {
        const bool is_same = tolerance > 0 ? fabsf(a[i] - b[i]) <= tolerance
                                           : __float_as_uint(a[i]) == __float_as_uint(b[i]);
        n += is_same ? 0 : 1;
    }
    if (n > 0) {
        (void)atomicAdd(count, n);
    }
}

} // namespace

/* What the candidates of a shape are tried with, all in one block of device memory. */
struct trial {
    enum dtype dtype;
    int n_out, k, n_max;
    void *block; /* Owner */
    unsigned *count;
    uint16_t *w, *x;     /* x [n_max + TRIAL_PERIOD, k] */
    float *bias;         /* [n_out] */
    float *y;            /* room for n_max rows, wherever they begin and however far apart */
    float *wanted, *own; /* [LT_ROWS, n_out] of the first rows of x: cuBLASLt's, our own */
    const cublasLtMatmulAlgo_t *algo; /* Borrowed: whose bits are wanted */
};

/* Values between rows of y, and before the first, in a call; calls after which those repeat. */
enum { TRIAL_GAP = 8, TRIAL_PLACES = 6 };

static void trial_fill_all(struct cuda *cu, const struct trial *t)
{
    const unsigned n_row = static_cast<unsigned>(t->n_max + TRIAL_PERIOD);
    const unsigned n_weight =
        static_cast<unsigned>((t->n_out + LINEAR_TILE - 1) / LINEAR_TILE * LINEAR_TILE);
    uint16_t *const bias = reinterpret_cast<uint16_t *>(t->own); /* not in use yet */
    auto *const fill = t->dtype == DTYPE_F16 ? trial_fill<DTYPE_F16> : trial_fill<DTYPE_BF16>;
    LAUNCH(fill, n_weight, TRIAL_THREADS, 0, cuda_queue(cu), t->w, static_cast<float *>(NULL), t->k,
           0, 1 / sqrtf(static_cast<float>(t->k)), 1u);
    cuda_check(cu, "linear");
    LAUNCH(fill, n_row, TRIAL_THREADS, 0, cuda_queue(cu), t->x, static_cast<float *>(NULL), t->k,
           static_cast<int>(TRIAL_PERIOD), 1.0f, 77u);
    cuda_check(cu, "linear");
    LAUNCH(fill, 1u, TRIAL_THREADS, 0, cuda_queue(cu), bias, t->bias, t->n_out, 0, 1.0f, 5u);
    cuda_check(cu, "linear");
}

static enum err_code trial_new(struct cuda *cu, struct trial *t, struct err *err)
{
    const size_t n_out = static_cast<size_t>(t->n_out);
    const size_t k = static_cast<size_t>(t->k);
    const size_t n_row = static_cast<size_t>(t->n_max) + TRIAL_PERIOD;
    const size_t sizes[] = {sizeof(unsigned),
                            linear_bytes(t->n_out, t->k, t->dtype),
                            n_row * k * sizeof(uint16_t),
                            n_out * sizeof(float),
                            (static_cast<size_t>(t->n_max) * (n_out + TRIAL_GAP) + TRIAL_GAP) *
                                sizeof(float),
                            LT_ROWS * n_out * sizeof(float),
                            LT_ROWS * n_out * sizeof(float)};
    enum { N_SIZE = sizeof sizes / sizeof *sizes };
    size_t first[N_SIZE + 1] = {0};
    for (int i = 0; i < N_SIZE; i++) {
        first[i + 1] = first[i] + (sizes[i] + 255) / 256 * 256;
    }
    const enum err_code code =
        resource_device_new(cu, &t->block, first[N_SIZE], "the choice of a matrix product", err);
    if (code != ERR_OK) {
        return code;
    }
    char *const at = static_cast<char *>(t->block);
    t->count = reinterpret_cast<unsigned *>(at);
    t->w = reinterpret_cast<uint16_t *>(at + first[1]);
    t->x = reinterpret_cast<uint16_t *>(at + first[2]);
    t->bias = reinterpret_cast<float *>(at + first[3]);
    t->y = reinterpret_cast<float *>(at + first[4]);
    t->wanted = reinterpret_cast<float *>(at + first[5]);
    t->own = reinterpret_cast<float *>(at + first[6]);
    trial_fill_all(cu, t);
    return ERR_OK;
}

/* n rows of x, from the first on, into y. */
static struct linear_args trial_args(const struct trial *t, float *y, int n, int epilogue)
{
    struct linear_args a = {};
    a.y = y;
    a.y_stride = t->n_out;
    a.x = t->x;
    a.x_stride = t->k;
    a.w = reinterpret_cast<const unsigned char *>(t->w);
    a.map = linear_map_of(t->k, t->dtype, true);
    a.bias = epilogue % 2 != 0 ? t->bias : NULL;
    a.act = epilogue / 2 != 0 ? ACT_RELU : ACT_NONE;
    a.n_tok = n;
    a.n_in = t->k;
    a.n_out = t->n_out;
    a.n_block = t->k / LINEAR_BLOCK_BF16;
    a.n_tile = (t->n_out + LINEAR_TILE - 1) / LINEAR_TILE;
    a.is_row_major = true;
    a.is_f16 = t->dtype == DTYPE_F16;
    a.x_is_aligned = a.x_is_rounded = true;
    return a;
}

/* ---- what a candidate must be --------------------------------------------------------------- */

static uint32_t config_of(const struct linear_lt *lt, const cublasLtMatmulAlgo_t *algo,
                          cublasLtMatmulAlgoConfigAttributes_t which)
{
    uint32_t value = UINT32_MAX;
    size_t n_written = 0;
    const cublasStatus_t status = lt->library.cublasLtMatmulAlgoConfigGetAttribute(
        algo, which, &value, sizeof value, &n_written);
    return status == CUBLAS_STATUS_SUCCESS ? value : UINT32_MAX;
}

/* Whether no sum is split, as it says itself. */
static bool is_whole(const struct linear_lt *lt, const cublasLtMatmulAlgo_t *algo)
{
    return config_of(lt, algo, CUBLASLT_ALGO_CONFIG_SPLITK_NUM) <= 1 &&
           config_of(lt, algo, CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME) ==
               CUBLASLT_REDUCTION_SCHEME_NONE;
}

/* n times the same product. */
static bool multiply(struct cuda *cu, const struct trial *t, const cublasLtMatmulAlgo_t *algo,
                     const struct linear_args *a, int n)
{
    struct lt_plan plan;
    bool ok = lt_plan_describe(cu->lt, &plan, a, t->dtype);
    plan.algo = *algo;
    for (int i = 0; ok && i < n; i++) {
        ok = lt_multiply(cu, &plan, a) == CUBLAS_STATUS_SUCCESS;
    }
    lt_plan_clear(cu->lt, &plan);
    if (!ok) {
        (void)cudaGetLastError(); /* a candidate less */
    }
    return ok;
}

static void compare(struct cuda *cu, const struct trial *t, const struct linear_args *y,
                    const float *wanted, int shift, float tolerance)
{
    LAUNCH(trial_compare, static_cast<unsigned>(y->n_tok), TRIAL_THREADS, 0, cuda_queue(cu),
           t->count, y->y, y->y_stride, wanted, t->n_out, shift, tolerance);
    cuda_check(cu, "linear");
}

/* Whether nothing has differed since the count was zeroed. */
static bool is_all_same(struct cuda *cu, const struct trial *t)
{
    unsigned count = 1;
    (void)cuda_ok(
        cu, cudaMemcpyAsync(&count, t->count, sizeof count, cudaMemcpyDeviceToHost, cu->stream),
        "linear");
    return graphs_wait(cu) && count == 0;
}

/* Whether its first rows are those of our own product within rounding: of the sum of absolute
 * products, about √k / 4, tensor cores may lose 2^-17. They become what all others are compared
 * with. */
static bool agrees(struct cuda *cu, const struct trial *t, int epilogue)
{
    const struct linear_args first = trial_args(t, t->wanted, LT_ROWS, epilogue);
    struct linear_args own = first;
    own.y = t->own;
    t->k <= GEMV_IN_MAX ? gemv(cu, &own, t->dtype) : gemm(cu, &own, t->dtype);
    if (!multiply(cu, t, t->algo, &first, 1)) {
        return false;
    }
    compare(cu, t, &first, t->own, 0, 0x1p-17f * (sqrtf(static_cast<float>(t->k)) + 1));
    return true;
}

/* Whether a row has the wanted bits by algo however many share the call and wherever it stands, in
 * calls of n_min to n_max rows. */
static bool has_same_bits(struct cuda *cu, const struct trial *t, const cublasLtMatmulAlgo_t *algo,
                          int epilogue, int n_min, int n_max)
{
    (void)cuda_ok(cu, cudaMemsetAsync(t->count, 0, sizeof *t->count, cu->stream), "linear");
    bool ok = agrees(cu, t, epilogue);
    const int n_size = (n_max - n_min) / LT_ROWS + 1;
    for (int i = 0; ok && i < (n_size < TRIAL_PLACES ? +TRIAL_PLACES : n_size); i++) {
        const int n = n_min + i % n_size * LT_ROWS;
        const int shift = i % TRIAL_PERIOD;
        struct linear_args a = trial_args(t, t->y + i % (TRIAL_GAP / 4) * 4, n, epilogue);
        a.x = t->x + static_cast<int64_t>(shift) * t->k;
        a.y_stride += i % (TRIAL_GAP / 4 + 1) * 4;
        ok = multiply(cu, t, algo, &a, 1);
        if (ok) {
            compare(cu, t, &a, t->wanted, shift, 0);
        }
    }
    return is_all_same(cu, t) && ok;
}

static bool passes(struct cuda *cu, const struct trial *t, const cublasLtMatmulAlgo_t *algo,
                   int n_min, int n_max)
{
    bool ok = is_whole(cu->lt, algo);
    for (int epilogue = 0; ok && epilogue < EPILOGUES; epilogue++) {
        ok = has_same_bits(cu, t, algo, epilogue, n_min, n_max);
    }
    return ok;
}

/* ---- choosing ------------------------------------------------------------------------------- */

/* Appends to what the log and /info say. */
__attribute__((format(printf, 2, 3))) static void say(struct cuda *cu, const char *format, ...)
{
    const size_t n = strlen(cu->be.products);
    va_list args;
    va_start(args, format);
    (void)vsnprintf(cu->be.products + n, sizeof cu->be.products - n, format, args);
    va_end(args);
}

static void say_choice(struct cuda *cu, const struct lt_shape *shape)
{
    const struct linear_lt *const lt = cu->lt;
    const char *const type = shape->dtype == DTYPE_F16 ? " f16" : "";
    if (!shape->is_taken) {
        say(cu, "; %dx%d%s own kernels%s", shape->n_out, shape->k, type,
            shape->is_untried ? " (no memory to try others)" : "");
        return;
    }
    say(cu, "; %dx%d%s %u/%u/%u", shape->n_out, shape->k, type,
        config_of(lt, &shape->algo, CUBLASLT_ALGO_CONFIG_ID),
        config_of(lt, &shape->algo, CUBLASLT_ALGO_CONFIG_TILE_ID),
        config_of(lt, &shape->algo, CUBLASLT_ALGO_CONFIG_STAGES_ID));
}

void linear_lt_say(struct cuda *cu)
{
    struct linear_lt *const lt = cu->lt;
    cu->be.products[0] = '\0';
    if (!cu->uses_lt) {
        say(cu, "own kernels: cuBLASLt %zu does not pass the self-test",
            lt->library.cublasLtGetVersion());
        return;
    }
    say(cu, "cuBLASLt %zu", lt->library.cublasLtGetVersion());
    for (int i = 0; i < lt->n_shape; i++) {
        say_choice(cu, &lt->shape[i]);
    }
}

/* What cuBLASLt recommends for calls of n rows; returns how many. */
static int recommended(const struct linear_lt *lt, const struct trial *t, int n,
                       cublasLtMatmulHeuristicResult_t (&found)[CANDIDATES])
{
    const struct linear_args a = trial_args(t, t->y, n, 0);
    struct lt_plan plan;
    memset(found, 0, sizeof found);
    const bool is_described = lt_plan_describe(lt, &plan, &a, t->dtype);
    plan.key.x_alignment = plan.key.y_alignment = 16; /* of rows that begin anywhere */
    const int n_found = is_described ? lt_recommend(lt, &plan, CANDIDATES, found) : 0;
    lt_plan_clear(lt, &plan);
    return n_found;
}

/* Milliseconds of some calls of n rows; INFINITY where it cannot. */
static float time_of(struct cuda *cu, const struct trial *t, const cublasLtMatmulAlgo_t *algo,
                     int n)
{
    const struct linear_args a = trial_args(t, t->y, n, 1);
    cudaEvent_t event[2] = {NULL, NULL};
    float ms = INFINITY;
    bool ok = cuda_ok(cu, cudaEventCreateWithFlags(&event[0], cudaEventDefault), "linear") &&
              cuda_ok(cu, cudaEventCreateWithFlags(&event[1], cudaEventDefault), "linear");
    if (ok && multiply(cu, t, algo, &a, 2)) { /* the first of which loads it */
        (void)cuda_ok(cu, cudaEventRecord(event[0], cu->stream), "linear");
        ok = multiply(cu, t, algo, &a, TIMED_RUNS);
        (void)cuda_ok(cu, cudaEventRecord(event[1], cu->stream), "linear");
        if (ok && graphs_wait(cu)) {
            (void)cuda_ok(cu, cudaEventElapsedTime(&ms, event[0], event[1]), "linear");
        }
    }
    for (cudaEvent_t const e : event) {
        (void)(e != NULL && cuda_ok(cu, cudaEventDestroy(e), "linear"));
    }
    return ms;
}

/* For calls of n_min to n_max rows, timed with n: the fastest that gives the wanted bits. */
static cublasLtMatmulAlgo_t fastest(struct cuda *cu, const struct trial *t, int n_min, int n_max,
                                    int n)
{
    cublasLtMatmulHeuristicResult_t found[CANDIDATES];
    const int n_found = recommended(cu->lt, t, n, found);
    float ms[FAST_TRIED];
    int n_tried = 0;
    for (int i = 0; i < n_found && n_tried < FAST_TRIED; i++) {
        if (found[i].state == CUBLAS_STATUS_SUCCESS && is_whole(cu->lt, &found[i].algo)) {
            ms[n_tried] = time_of(cu, t, &found[i].algo, n);
            found[n_tried++] = found[i];
        }
    }
    const float own_ms = time_of(cu, t, t->algo, n);
    while (cu->failure.code == ERR_OK) {
        int best = -1;
        for (int i = 0; i < n_tried; i++) {
            best = ms[i] < (best < 0 ? own_ms : ms[best]) ? i : best;
        }
        if (best < 0) {
            break;
        }
        if (passes(cu, t, &found[best].algo, n_min, n_max)) {
            return found[best].algo;
        }
        ms[best] = INFINITY;
    }
    return *t->algo;
}

/* Sizes are halves of one another, which calls are timed with: the largest a multiple of a tile's
 * rows. */
static void choose_sizes(struct cuda *cu, struct lt_shape *shape, const struct trial *t)
{
    const int top = t->n_max < TILE_ROWS ? t->n_max : t->n_max / TILE_ROWS * TILE_ROWS;
    int n_before = 0;
    for (int i = 0; i < LT_SIZES; i++) {
        const int n = ((top >> (LT_SIZES - 1 - i)) + LT_ROWS - 1) / LT_ROWS * LT_ROWS;
        const int n_max = i == LT_SIZES - 1 ? t->n_max : n;
        shape->size[i].n_max = n_max;
        shape->size[i].algo = shape->algo;
        if (n_max > n_before) {
            shape->size[i].algo = fastest(cu, t, n_before + LT_ROWS, n_max, n);
        }
        n_before = n_max;
    }
}

static void choose(struct cuda *cu, struct lt_shape *shape, struct trial *t)
{
    cublasLtMatmulHeuristicResult_t found[CANDIDATES];
    const int n_found = recommended(cu->lt, t, t->n_max, found);
    for (int i = 0; i < n_found && !shape->is_taken && cu->failure.code == ERR_OK; i++) {
        shape->algo = found[i].algo;
        t->algo = &shape->algo;
        shape->is_taken =
            found[i].state == CUBLAS_STATUS_SUCCESS && passes(cu, t, t->algo, LT_ROWS, t->n_max);
    }
    if (shape->is_taken) {
        choose_sizes(cu, shape, t);
    }
}

/* Opens cuBLASLt unless it is open or not wanted; says which. */
static enum err_code need_library(struct cuda *cu, struct err *err)
{
    struct err reason = {ERR_OK, ""};
    if (cu->lt != NULL || cu->be.products[0] != '\0') {
        return ERR_OK;
    }
    const enum err_code code = cu->uses_lt
                                   ? linear_lt_open(cu, &reason)
                                   : err_set(&reason, ERR_UNSUPPORTED, "PKMSERVE_CUDA_LT=0");
    if (code == ERR_UNSUPPORTED) {
        cu->uses_lt = false;
        say(cu, "own kernels: %s", reason.message);
        return ERR_OK;
    }
    if (code == ERR_OK) {
        linear_lt_say(cu);
    } else if (err != NULL) {
        *err = reason;
    }
    return code;
}

static enum err_code try_shape(struct cuda *cu, struct lt_shape *shape, int n_max, struct err *err)
{
    struct trial t = {};
    t.dtype = shape->dtype;
    t.n_out = shape->n_out;
    t.k = shape->k;
    t.n_max = n_max;
    const enum err_code code = trial_new(cu, &t, err);
    if (code != ERR_OK) {
        return code;
    }
    choose(cu, shape, &t);
    (void)graphs_wait(cu);
    (void)cudaFree(t.block);
    if (cu->failure.code != ERR_OK && err != NULL) {
        *err = cu->failure;
    }
    return cu->failure.code;
}

enum err_code linear_lt_takes(struct cuda *cu, const struct weight *w, int64_t n_max, bool *takes,
                              struct err *err)
{
    *takes = false;
    const enum err_code opened = need_library(cu, err);
    if (opened != ERR_OK || cu->lt == NULL) {
        return opened;
    }
    struct linear_lt *const lt = cu->lt;
    const int n_out = static_cast<int>(w->rows);
    const int k =
        static_cast<int>((w->cols + LINEAR_BLOCK_BF16 - 1) / LINEAR_BLOCK_BF16) * LINEAR_BLOCK_BF16;
    const struct lt_shape *const known = lt_shape_find(lt, n_out, k, w->dtype);
    if (known != NULL) {
        *takes = known->is_taken;
        return ERR_OK;
    }
    if (lt->n_shape == LT_SHAPES) {
        return ERR_OK;
    }
    struct lt_shape *const shape = &lt->shape[lt->n_shape];
    *shape = {};
    shape->dtype = w->dtype;
    shape->n_out = n_out;
    shape->k = k;
    enum err_code code = ERR_OK;
    if (n_out % 4 == 0) { /* else rows of y do not begin at 16-byte addresses */
        code = try_shape(cu, shape, static_cast<int>(n_max), err);
    }
    if (code != ERR_OK && code != ERR_MEMORY) {
        return code;
    }
    shape->is_untried = code != ERR_OK;
    lt->n_shape++;
    linear_lt_say(cu);
    *takes = shape->is_taken;
    if (*takes) {
        cuda_fast_path(cu, "library", false, &cu->uses_lt);
    }
    return ERR_OK;
}

#endif
