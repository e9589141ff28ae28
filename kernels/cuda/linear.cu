/* The linear layer: packing of weights, choice of the kernel, preparing the rows of many.
 * linear.cuh defines the sum and the layouts; gemv.cu and gemm.cu compute it, each
 * output the same to the bit, so the choice between them is one of speed alone. Rows of requests go
 * to cuBLASLt (linear_lt.cu) where it takes the weight, however many they are; drawn tokens never
 * do. With fast math all calls of many rows do, whatever they hold. Of an F32 weight that is split
 * (linear_split.cu) rows of requests are multiplied by its BF16 matrix as by any other. */
#include "kernels/cuda/linear.cuh"

#include "kernels/cuda/backend.cuh"

#include <stdlib.h>
#include <string.h>

enum {
    GEMV_ROWS = 16,       /* so many are few whatever the weights */
    SMALL_TILE = 64,      /* rows and outputs of gemm's smallest tile */
    IDLE_SHARE = 4,       /* fewer such tiles than a quarter of the multiprocessors are too few */
    PASS_ROWS_MAX = 4096, /* of many rows that are prepared at once */
    PASS_ROWS_MIN = 128,
    PASS_BYTES = 64 << 20,
    LT_PASS_ROWS_MIN = 256, /* of a call of cuBLASLt, where one with more would need more memory */
    LT_PASS_BYTES = 64 << 20,
    PREPARE_THREADS = 128,
    PACK_COLUMNS = 512, /* of a row that are converted at once; a multiple of 4 */
    DIM_MAX = 65535 * 64
};

static int64_t round_up(int64_t n, int64_t step)
{
    return (n + step - 1) / step * step;
}

static int64_t block_k(enum dtype dtype)
{
    return dtype == DTYPE_F32 ? LINEAR_BLOCK_F32 : LINEAR_BLOCK_BF16;
}

/* ---- weights -------------------------------------------------------------------------------- */

size_t linear_bytes(int64_t n_out, int64_t n_in, enum dtype dtype)
{
    return static_cast<size_t>(round_up(n_out, LINEAR_TILE)) *
           static_cast<size_t>(round_up(n_in, block_k(dtype))) * dtype_bytes(dtype);
}

struct linear_map linear_map_of(int64_t n_in, enum dtype dtype, bool row_major)
{
    const int64_t row_bytes =
        round_up(n_in, block_k(dtype)) * static_cast<int64_t>(dtype_bytes(dtype));
    const int64_t tile = LINEAR_TILE * row_bytes;
    if (row_major) {
        return {.tile = tile,
                .block = LINEAR_TILE_BLOCK_BYTES / LINEAR_TILE,
                .half = static_cast<int32_t>(tile / 2),
                .row = static_cast<int32_t>(row_bytes),
                .piece = 16};
    }
    if (dtype == DTYPE_F32) {
        return {
            .tile = tile, .block = LINEAR_TILE_BLOCK_BYTES, .half = 128, .row = 16, .piece = 256};
    }
    return {.tile = tile,
            .block = LINEAR_TILE_BLOCK_BYTES,
            .half = LINEAR_TILE_BLOCK_BYTES / 2,
            .row = LINEAR_BLOCK_BF16 * 2,
            .piece = 16};
}

/* Byte of element [r, k] in the packed weights, k a multiple of 4. The three after it follow: F32
 * and row-major at once, BF16 packed in twos, 8 bytes apart. */
static size_t place_of(const struct linear_map *map, int64_t r, int64_t k, enum dtype dtype,
                       bool row_major)
{
    const int64_t half = r % LINEAR_TILE / 8;
    const int64_t first = r / LINEAR_TILE * map->tile + r % 8 * map->row;
    if (dtype == DTYPE_F32) {
        return static_cast<size_t>(first + half * map->half + k / LINEAR_BLOCK_F32 * map->block +
                                   k % LINEAR_BLOCK_F32 / 4 * map->piece);
    }
    const int64_t at =
        first + k / LINEAR_BLOCK_BF16 * map->block + k % LINEAR_BLOCK_BF16 / 8 * map->piece;
    return static_cast<size_t>(row_major ? at + half * map->half + k % 8 * 2
                                         : at + k % 8 / 4 * map->half + half * 4);
}

/* Columns k .. k+n-1 of row r, into piece, as PACK_COLUMNS elements with zeros after n. */
static void pack_columns(unsigned char *dst, const struct linear_map *map, const void *piece,
                         int64_t r, int64_t k, int64_t n, enum dtype dtype, bool row_major)
{
    const unsigned char *from = static_cast<const unsigned char *>(piece);
    for (int64_t i = 0; i < n; i += 4) {
        unsigned char *const at = dst + place_of(map, r, k + i, dtype, row_major);
        if (dtype == DTYPE_F32) {
            memcpy(at, from, 16);
            from += 16;
        } else {
            memcpy(at, from, 4);
            memcpy(at + (row_major ? 4 : 8), from + 4, 4);
            from += 8;
        }
    }
}

void linear_pack(void *dst, const struct cuda_source *source, enum dtype dtype, bool row_major)
{
    const struct tensor *const host = &source->view;
    const struct linear_map map = linear_map_of(host->cols, dtype, row_major);
    memset(dst, 0, linear_bytes(host->rows, host->cols, dtype));
    for (int64_t r = 0; r < host->rows; r++) {
        for (int64_t k = 0; k < host->cols; k += PACK_COLUMNS) {
            alignas(16) unsigned char piece[PACK_COLUMNS * sizeof(float)];
            const int64_t left = host->cols - k;
            const int64_t n = left < PACK_COLUMNS ? left : static_cast<int64_t>(PACK_COLUMNS);
            const size_t elem = dtype_bytes(dtype);
            cuda_host_values(piece, source, r, k, n, dtype);
            memset(piece + static_cast<size_t>(n) * elem, 0,
                   static_cast<size_t>(round_up(n, 4) - n) * elem);
            pack_columns(static_cast<unsigned char *>(dst), &map, piece, r, k, n, dtype, row_major);
        }
    }
}

/* ---- memory for prepared rows --------------------------------------------------------------- */

/* F32, which is also large enough for BF16. */
static int64_t prepared_row_bytes(int64_t n_in)
{
    return round_up(n_in, LINEAR_BLOCK_BF16) * static_cast<int64_t>(sizeof(float));
}

/* Rows that a call prepares and multiplies at once. */
static int64_t pass_rows(int64_t n_in)
{
    const int64_t rows = PASS_BYTES / prepared_row_bytes(n_in);
    const int64_t least = rows > PASS_ROWS_MIN ? rows : static_cast<int64_t>(PASS_ROWS_MIN);
    return (least < PASS_ROWS_MAX ? least : static_cast<int64_t>(PASS_ROWS_MAX)) / LT_ROWS *
           LT_ROWS;
}

/* Of a call of cuBLASLt without fast math: as many as keep all multiprocessors busy. Each number of
 * rows up to this is tried when the weight is made, with memory for all results. */
static int64_t lt_pass_rows(const struct cuda *cu, int64_t n_in, int64_t n_out)
{
    const int64_t fit = LT_PASS_BYTES / (n_out * static_cast<int64_t>(sizeof(float)));
    const int64_t least = fit > LT_PASS_ROWS_MIN ? fit : static_cast<int64_t>(LT_PASS_ROWS_MIN);
    const int64_t busy = static_cast<int64_t>(cu->n_sm) * (2 * LT_ROWS);
    const int64_t rows = least < busy ? least / LT_ROWS * LT_ROWS : busy;
    const int64_t most = pass_rows(n_in);
    return rows < most ? rows : most;
}

/* At least so many bytes at *data; what was there is given back first. */
static enum err_code reserve(struct cuda *cu, void **data, size_t *bytes, int64_t wanted,
                             const char *purpose, struct err *err)
{
    if (static_cast<size_t>(wanted) <= *bytes) {
        return ERR_OK;
    }
    (void)cudaFree(*data);
    *bytes = 0;
    const enum err_code code =
        resource_device_new(cu, data, static_cast<size_t>(wanted), purpose, err);
    *bytes = code == ERR_OK ? static_cast<size_t>(wanted) : 0;
    return code;
}

enum err_code linear_reserve(struct cuda *cu, struct cuda_weight *w, struct err *err)
{
    if (cu->linear == NULL) {
        cu->linear = static_cast<struct linear_state *>(calloc(1, sizeof *cu->linear));
        if (cu->linear == NULL) {
            return err_set(err, ERR_MEMORY, "linear: no host memory left");
        }
        cu->linear->last = -1;
    }
    struct linear_state *const state = cu->linear;
    const int64_t n_in = w->head.cols;
    const int64_t n_out = w->head.rows;
    enum err_code code =
        reserve(cu, &state->x, &state->x_bytes, pass_rows(n_in) * prepared_row_bytes(n_in),
                "rows of matrix products", err);
    const int64_t n_room = round_up(cu->be.n_tok_good, LT_ROWS);
    w->is_row_major = cu->is_fast;
    if (code == ERR_OK && !cu->is_fast && w->head.dtype != DTYPE_F32) {
        code = linear_lt_takes(cu, &w->head, lt_pass_rows(cu, n_in, n_out), &w->is_row_major, err);
    }
    if (code == ERR_OK && w->is_row_major && !cu->is_fast) {
        code = reserve(cu, &state->y, &state->y_bytes,
                       LT_ROWS * n_out * static_cast<int64_t>(sizeof(float)),
                       "few rows of matrix products", err);
    }
    if (code == ERR_OK && w->is_row_major) {
        code =
            reserve(cu, &state->bias, &state->bias_bytes,
                    n_out * static_cast<int64_t>(sizeof(float)), "a bias of matrix products", err);
    }
    state->ready = state->leaving = {}; /* their rooms may move */
    const bool reads_rounded = w->head.dtype != DTYPE_F32 && n_in % LINEAR_BLOCK_BF16 == 0;
    for (int i = 0; i < LINEAR_ROOMS && code == ERR_OK && reads_rounded; i++) {
        void *room = state->room[i];
        code = reserve(cu, &room, &state->room_bytes[i],
                       n_room * n_in * static_cast<int64_t>(sizeof(uint16_t)),
                       "rounded rows of matrix products", err);
        state->room[i] = static_cast<uint16_t *>(room);
    }
    return code;
}

void linear_release(struct cuda *cu)
{
    if (cu->linear != NULL) {
        (void)cudaFree(cu->linear->x);
        (void)cudaFree(cu->linear->y);
        (void)cudaFree(cu->linear->bias);
        for (uint16_t *room : cu->linear->room) {
            (void)cudaFree(room);
        }
        free(cu->linear);
        cu->linear = NULL;
    }
}

/* ---- preparing many rows --------------------------------------------------------------------- */

namespace
{

/* to[rows of the grid, n_piece·8] of type ← x[n_tok, n_in] rounded, zeros after n_in and n_tok. One
 * thread per 8 values. Moves 6 bytes per value; 1024 rows of 1024 stay in the second-level
 * cache. */
template <enum dtype type>
__global__ void linear_round(uint4 *to, const float *x, int64_t x_stride, int n_tok, int n_in,
                             int n_piece, bool x_is_aligned)
{
    const int piece = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
    grid_wait();
    if (piece >= n_piece) {
        return;
    }
    const int64_t r = blockIdx.y;
    const int first = piece * 8;
    const int n_col = r < n_tok ? n_in : 0;
    const float *const in = x + r * x_stride + first;
    float v[8];
    if (x_is_aligned && first + 8 <= n_col) {
        const float4 lo = *reinterpret_cast<const float4 *>(in);
        const float4 hi = *reinterpret_cast<const float4 *>(in + 4);
        v[0] = lo.x, v[1] = lo.y, v[2] = lo.z, v[3] = lo.w;
        v[4] = hi.x, v[5] = hi.y, v[6] = hi.z, v[7] = hi.w;
    } else {
#pragma unroll
        for (int i = 0; i < 8; i++) {
            v[i] = first + i < n_col ? in[i] : 0;
        }
    }
    to[r * n_piece + piece] =
        make_uint4(operand_pair<type>(v[0], v[1]), operand_pair<type>(v[2], v[3]),
                   operand_pair<type>(v[4], v[5]), operand_pair<type>(v[6], v[7]));
}

/* to[n_tok, n_piece·4] ← x[n_tok, n_in], zeros after n_in: rows at 16-byte addresses. */
__global__ void linear_pad(float4 *to, const float *x, int64_t x_stride, int n_in, int n_piece)
{
    const int piece = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
    grid_wait();
    if (piece >= n_piece) {
        return;
    }
    const int64_t r = blockIdx.y;
    const int first = piece * 4;
    const float *const in = x + r * x_stride + first;
    float v[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        v[i] = first + i < n_in ? in[i] : 0;
    }
    to[r * n_piece + piece] = make_float4(v[0], v[1], v[2], v[3]);
}

} // namespace

static void prepare_rows(struct cuda *cu, struct linear_args *args, bool round, int k_padded)
{
    const int64_t n_row =
        round && args->is_row_major ? round_up(args->n_tok, LT_ROWS) : args->n_tok;
    if (args->n_x < args->n_in) {
        linear_split_rows(cu, cu->linear->x, args, static_cast<int>(n_row), !round);
        cuda_check(cu, "linear");
    } else if (round) {
        const int n_piece = k_padded / 8;
        const dim3 grid(static_cast<unsigned>((n_piece + PREPARE_THREADS - 1) / PREPARE_THREADS),
                        static_cast<unsigned>(n_row));
        LAUNCH((args->is_f16 ? linear_round<DTYPE_F16> : linear_round<DTYPE_BF16>), grid,
               dim3(PREPARE_THREADS), 0, cuda_queue(cu), static_cast<uint4 *>(cu->linear->x),
               static_cast<const float *>(args->x), args->x_stride, args->n_tok, args->n_in,
               n_piece, args->x_is_aligned);
        cuda_check(cu, "linear");
    } else {
        const int n_piece = k_padded / 4;
        const dim3 grid(static_cast<unsigned>((n_piece + PREPARE_THREADS - 1) / PREPARE_THREADS),
                        static_cast<unsigned>(args->n_tok));
        LAUNCH(linear_pad, grid, dim3(PREPARE_THREADS), 0, cuda_queue(cu),
               static_cast<float4 *>(cu->linear->x), static_cast<const float *>(args->x),
               args->x_stride, args->n_in, n_piece);
        cuda_check(cu, "linear");
    }
    args->x = cu->linear->x;
    args->x_stride = k_padded;
    args->x_is_aligned = true;
    args->x_is_rounded = round;
}

/* Writes the rows into the reserved memory if the kernel needs them otherwise than they are, and
 * lets args read them there: rounded or, F32, whole blocks of k; for gemv in F32 (few) at 16-byte
 * addresses; and of split weights all. */
static void prepare(struct cuda *cu, struct linear_args *args, enum dtype dtype, bool few)
{
    const int k_padded = args->n_block * static_cast<int>(block_k(dtype));
    const bool round = dtype != DTYPE_F32 && !few;
    const bool is_whole = args->n_x == args->n_in && (few || args->n_in == k_padded);
    if (round || !args->x_is_aligned || !is_whole) {
        prepare_rows(cu, args, round, k_padded);
    }
}

/* ---- rounded rows ---------------------------------------------------------------------------- */

/* For rows that a product by weights of that type reads. */
static struct room room_for(struct cuda *cu, struct tensor y, enum dtype dtype)
{
    struct linear_state *const state = cu->linear;
    if (state == NULL || dtype == DTYPE_F32 || y.cols % LINEAR_BLOCK_BF16 != 0) {
        return {};
    }
    const int64_t bytes =
        round_up(y.rows, LT_ROWS) * y.cols * static_cast<int64_t>(sizeof(uint16_t));
    const int at = state->ready.data == state->room[0] ? 1 : 0;
    if (static_cast<size_t>(bytes) > state->room_bytes[at]) {
        return {};
    }
    state->leaving = {.of = y.data,
                      .of_stride = y.stride,
                      .rows = y.rows,
                      .cols = y.cols,
                      .dtype = dtype,
                      .data = state->room[at]};
    return {state->room[at], dtype};
}

struct room linear_room(struct cuda *cu, struct tensor y)
{
    return room_for(cu, y, cu->dense == CUDA_DENSE_F16 ? DTYPE_F16 : DTYPE_BF16);
}

void linear_next(struct cuda *cu)
{
    if (cu->linear != NULL) {
        cu->linear->ready = cu->linear->leaving;
        cu->linear->leaving = {};
    }
}

/* x rounded to dtype, if the op before has left it so. Of x itself nothing is read then. */
static const uint16_t *rounded_of(const struct linear_state *state, struct tensor x,
                                  enum dtype dtype)
{
    const struct linear_rounded *const r = &state->ready;
    const bool is_x = r->of != NULL && r->of == x.data && r->of_stride == x.stride &&
                      r->rows == x.rows && r->cols == x.cols && r->dtype == dtype;
    return is_x ? r->data : NULL;
}

/* ---- the next weight ------------------------------------------------------------------------- */

/* Products come in the same order in every step. Notes that w's comes now; returns what has
 * followed it before, or NULL. */
static const struct cuda_weight *next_of(struct linear_state *state, const struct weight *w)
{
    const struct cuda_weight *const weight = cuda_weight_of(w);
    int at = 0;
    while (at < state->n_order && state->order[at].weight != weight) {
        at++;
    }
    if (at == LINEAR_ORDER_MAX) {
        return NULL;
    }
    if (at == state->n_order) {
        state->order[state->n_order++] = {weight, NULL};
    }
    if (state->last >= 0 && state->last != at) { /* an op that is recorded is launched twice */
        state->order[state->last].next = weight;
    }
    state->last = at;
    return state->order[at].next;
}

void linear_forget_order(struct cuda *cu)
{
    if (cu->linear != NULL) {
        cu->linear->n_order = 0;
        cu->linear->last = -1;
    }
}

/* Of a product by w, lets args say what comes next. */
static void ask_next(struct cuda *cu, struct linear_args *args, const struct weight *w)
{
    const struct cuda_weight *const next = next_of(cu->linear, w);
    if (next != NULL && cu->is_drawn && cu->overlaps && next->pinned == NULL) {
        args->next = static_cast<const unsigned char *>(next->data);
        args->next_bytes = static_cast<uint32_t>(
            next->bytes < LINEAR_NEXT_MAX ? next->bytes : static_cast<size_t>(LINEAR_NEXT_MAX));
    }
}

/* ---- the op --------------------------------------------------------------------------------- */

static bool gemv_takes(const struct weight *w)
{
    return w->dtype == DTYPE_F32 || w->cols <= GEMV_IN_MAX;
}

/* Which kernel is faster: up to 16 rows the one that reads weights as fast as memory gives them;
 * then, as far as tiles of the other leave the device partly idle, still that one. */
static bool is_few(const struct cuda *cu, int64_t n_tok, const struct weight *w)
{
    const int64_t n_out = w->rows;
    if (!gemv_takes(w)) {
        return false;
    }
    const int64_t tiles =
        (n_tok + SMALL_TILE - 1) / SMALL_TILE * ((n_out + SMALL_TILE - 1) / SMALL_TILE);
    return n_tok <= GEMV_ROWS || (n_tok <= 32 && w->dtype != DTYPE_F32) ||
           (n_tok <= SMALL_TILE && tiles < 2 * cu->n_sm) || tiles * IDLE_SHARE <= cu->n_sm;
}

static struct linear_args args_of(const struct cuda *cu, struct tensor y, struct tensor x,
                                  const struct weight *w, struct tensor bias, enum act act)
{
    const int64_t k_step = block_k(w->dtype);
    const bool is_row_major = cuda_weight_of(w)->is_row_major;
    CHECK(w->rows <= DIM_MAX && w->cols <= DIM_MAX); /* a grid holds 65535 tiles of outputs */
    return {
        .y = static_cast<float *>(y.data),
        .y_stride = y.stride,
        .x = x.data,
        .x_stride = x.stride,
        .bias = static_cast<const float *>(bias.data),
        .w = static_cast<const unsigned char *>(cuda_weight_of(w)->data),
        .map = linear_map_of(w->cols, w->dtype, is_row_major),
        .n_tok = 0,
        .n_in = static_cast<int>(w->cols),
        .n_out = static_cast<int>(w->rows),
        .n_x = static_cast<int>(x.cols),
        .n_block = static_cast<int>(round_up(w->cols, k_step) / k_step),
        .n_tile = static_cast<int>(round_up(w->rows, LINEAR_TILE) / LINEAR_TILE),
        .act = act,
        .rounded = NULL,
        .is_row_major = is_row_major,
        .is_f16 = w->dtype == DTYPE_F16,
        .x_is_aligned = reinterpret_cast<uintptr_t>(x.data) % 16 == 0 && x.stride % 4 == 0,
        .x_is_rounded = false,
        .starts_early = cu->overlaps,
        .next = NULL,
        .next_bytes = 0,
        .next_slice = 0,
        .zero = 0,
        .norm = {},
    };
}

/* Rows first .. first+n-1 of a call. */
static struct linear_args args_rows(const struct linear_args *call, int64_t first, int64_t n)
{
    struct linear_args part = *call;
    part.y += first * call->y_stride;
    part.x = static_cast<const float *>(call->x) + first * call->x_stride;
    part.rounded = call->rounded == NULL ? NULL : call->rounded + first * call->n_out;
    part.n_tok = static_cast<int>(n);
    return part;
}

/* As many rows as the memory for prepared ones holds. x_rounded: all that there is of args' x, or
 * NULL: then few rows are rounded by gemv itself. */
static void linear_pass(struct cuda *cu, const struct linear_args *args, const uint16_t *x_rounded,
                        enum dtype dtype, bool by_gemv, bool by_lt)
{
    struct linear_args prepared = *args;
    if (x_rounded != NULL) {
        prepared.x = x_rounded;
        prepared.x_stride = args->n_in;
        prepared.x_is_aligned = true;
        prepared.x_is_rounded = true;
    } else if (by_lt) {
        prepare(cu, &prepared, dtype, false);
    }
    if (by_lt && linear_lt_run(cu, &prepared, dtype)) {
        return;
    }
    /* Slower, but right. */
    const bool for_gemv = by_gemv || (dtype == DTYPE_F32 && args->is_row_major);
    if (x_rounded == NULL) {
        prepared = *args;
        prepare(cu, &prepared, dtype,
                for_gemv && (dtype == DTYPE_F32 || args->n_tok <= GEMV_F32_ROWS));
    }
    if (for_gemv) {
        gemv(cu, &prepared, dtype);
    } else {
        gemm(cu, &prepared, dtype);
    }
}

static bool overlap(struct tensor a, struct tensor b)
{
    const float *const a_first = static_cast<const float *>(a.data);
    const float *const b_first = static_cast<const float *>(b.data);
    return a_first != NULL && b_first != NULL &&
           a_first < b_first + (b.rows - 1) * b.stride + b.cols &&
           b_first < a_first + (a.rows - 1) * a.stride + a.cols;
}

void cuda_linear(struct cuda *cu, struct tensor y, struct tensor x, const struct weight *w,
                 struct tensor bias, enum act act, enum linear_result result)
{
    const bool is_split = cuda_weight_of(w)->split != NULL && cu->splits && !cu->is_drawn;
    const struct weight *const given = w;
    w = is_split ? cuda_weight_of(w)->split : w;
    struct linear_args call = args_of(cu, y, x, w, bias, act);
    ask_next(cu, &call, given);
    const bool few = is_few(cu, y.rows, w);
    const bool by_gemv = few || (!cu->uses_gemm && gemv_takes(w));
    const bool by_lt = call.is_row_major && cu->uses_lt && (cu->is_fast ? !few : !cu->is_drawn);
    const int64_t n_pass =
        by_lt && !cu->is_fast ? lt_pass_rows(cu, w->cols, w->rows) : pass_rows(w->cols);
    CHECK(cu->linear != NULL &&
          cu->linear->x_bytes >= static_cast<size_t>(n_pass * prepared_row_bytes(w->cols)));
    const uint16_t *const x_rounded =
        !is_split ? rounded_of(cu->linear, x, w->dtype) : static_cast<const uint16_t *>(NULL);
    /* cuBLASLt leaves F32, which a pass over y for GELU rounds */
    const bool may_round = !by_lt || (act == ACT_GELU && y.stride % 4 == 0 &&
                                      reinterpret_cast<uintptr_t>(y.data) % 16 == 0);
    const bool is_left = result == LINEAR_TO_PRODUCT && may_round && !is_split;
    call.rounded = is_left ? room_for(cu, y, w->dtype).data : NULL;
    for (int64_t first = 0; first < y.rows; first += n_pass) {
        const int64_t left = y.rows - first;
        const struct linear_args part = args_rows(&call, first, left < n_pass ? left : n_pass);
        linear_pass(cu, &part, x_rounded == NULL ? NULL : x_rounded + first * w->cols, w->dtype,
                    by_gemv, by_lt && cu->uses_lt);
    }
    if (x_rounded != NULL && call.rounded == NULL && !overlap(y, x)) {
        cu->linear->leaving = cu->linear->ready; /* another product may read x, too */
    }
}

/* ---- rows that are normed on the way -------------------------------------------------------- */

/* So many rows gemv norms itself, of so many columns: they lie in shared memory. Of more rows the
 * norm takes a block longer than a launch does: on an H200 decode of 2, 4, 8 rows took 2 % less, 2
 * % more and 12 % more than apart. */
enum { NORM_ROWS_MAX = 2, NORM_COLS_MAX = 2048 };

/* Of 16 bits row-major weights, of F32 packed ones of so few outputs that blocks do not take turns:
 * each would norm anew. */
static bool weight_takes_norm(const struct cuda *cu, const struct weight *w)
{
    const bool is_row_major = cuda_weight_of(w)->is_row_major;
    return w->dtype == DTYPE_F32 ? !is_row_major && w->rows <= 2 * LINEAR_TILE * cu->n_sm
                                 : is_row_major;
}

bool linear_takes_norm(const struct cuda *cu, struct tensor y, const struct norm_op *norm,
                       const struct weight *w)
{
    const struct tensor none = {};
    const struct tensor read = norm->view == NULL ? norm->x : none; /* by all blocks, and r */
    return y.rows <= NORM_ROWS_MAX && w->cols <= NORM_COLS_MAX && norm_has_groups(norm) &&
           weight_takes_norm(cu, w) && !overlap(norm->y, read) && !overlap(norm->y, norm->r) &&
           !overlap(y, read) && !overlap(y, norm->r) && !overlap(y, norm->y);
}

void cuda_linear_normed(struct cuda *cu, struct tensor y, const struct norm_op *norm,
                        const struct weight *w, struct tensor bias, enum act act,
                        enum linear_result result)
{
    struct linear_args args = args_of(cu, y, norm->y, w, bias, act);
    ask_next(cu, &args, w);
    args.rounded = result == LINEAR_TO_PRODUCT ? room_for(cu, y, w->dtype).data : NULL;
    args.n_tok = static_cast<int>(y.rows);
    args.norm = norm_args_of(cu, norm);
    gemv(cu, &args, w->dtype);
}
