/* Rows of embeddings: what embed.cu writes and norm.cuh norms without a way through memory. */
#ifndef KERNELS_CUDA_EMBED_CUH
#define KERNELS_CUDA_EMBED_CUH

#include "kernels/cuda/rows.cuh"

struct embed_table {
    const void *data; /* [rows, d]; NULL: no such table */
    bool is_bf16;
};

/* Row r is tok[token] (+ pos[position]) (+ lang[language]) of the step's row r. */
struct embed_from {
    const struct step_view *view; /* NULL: there is no embedding */
    struct embed_table tok, pos, lang;
    int d;
};

static inline struct embed_table embed_table_of(const struct weight *w)
{
    return {w == NULL ? NULL : cuda_weight_of(w)->data, w != NULL && w->dtype == DTYPE_BF16};
}

static inline struct embed_from embed_from_of(struct tensor y, const struct step_view *view,
                                              const struct weight *tok, const struct weight *pos,
                                              const struct weight *lang)
{
    return {view, embed_table_of(tok), embed_table_of(pos), embed_table_of(lang),
            static_cast<int>(y.cols)};
}

/* The element at which a row of each table begins. */
struct embed_row {
    int64_t tok, pos, lang;
};

__device__ __forceinline__ struct embed_row embed_row_of(const struct embed_from &e, int64_t row)
{
    const int32_t given = e.view->token[row];
    const int64_t token = given >= 0 ? given : e.view->drawn[-1 - given]; /* step_token_drawn */
    const int64_t pos = e.pos.data != NULL ? e.view->pos[row] : 0;
    const int64_t lang = e.lang.data != NULL ? e.view->lang[row] : 0;
    return {token * e.d, pos * e.d, lang * e.d};
}

template <bool aligned>
__device__ __forceinline__ float4 embed_load(struct embed_table t, int64_t at, int n)
{
    if (!t.is_bf16) {
        return group_load<aligned>(static_cast<const float *>(t.data) + at, n);
    }
    const uint16_t *const from = static_cast<const uint16_t *>(t.data) + at;
    if (aligned && n >= GROUP) {
        return bf16_widen_four(*reinterpret_cast<const uint2 *>(from));
    }
    float4 group = {0, 0, 0, 0};
    group.x = bf16_widen(from[0]);
    group.y = n > 1 ? bf16_widen(from[1]) : 0;
    group.z = n > 2 ? bf16_widen(from[2]) : 0;
    group.w = n > 3 ? bf16_widen(from[3]) : 0;
    return group;
}

/* The group of n columns from c on. */
template <bool aligned>
__device__ __forceinline__ float4 embed_group(const struct embed_from &e,
                                              const struct embed_row &row, int c, int n)
{
    float4 sum = embed_load<aligned>(e.tok, row.tok + c, n);
    if (e.pos.data != NULL) {
        sum = group_add(sum, embed_load<aligned>(e.pos, row.pos + c, n));
    }
    if (e.lang.data != NULL) {
        sum = group_add(sum, embed_load<aligned>(e.lang, row.lang + c, n));
    }
    return sum;
}

/* The groups at n columns, all asked for before the first is used: for tables whose rows have
 * groups alone. */
template <int n>
__device__ __forceinline__ void embed_load_groups(float4 (&group)[n], struct embed_table t,
                                                  int64_t at, const int (&c)[n])
{
    if (t.is_bf16) {
        const uint16_t *const from = static_cast<const uint16_t *>(t.data) + at;
        uint2 bits[n];
#pragma unroll
        for (int i = 0; i < n; i++) {
            bits[i] = *reinterpret_cast<const uint2 *>(from + c[i]);
        }
#pragma unroll
        for (int i = 0; i < n; i++) {
            group[i] = bf16_widen_four(bits[i]);
        }
    } else {
        const float *const from = static_cast<const float *>(t.data) + at;
#pragma unroll
        for (int i = 0; i < n; i++) {
            group[i] = *reinterpret_cast<const float4 *>(from + c[i]);
        }
    }
}

template <int n>
__device__ __forceinline__ void embed_groups(float4 (&sum)[n], const struct embed_from &e,
                                             const struct embed_row &row, const int (&c)[n])
{
    float4 more[n];
    embed_load_groups<n>(sum, e.tok, row.tok, c);
    if (e.pos.data != NULL) {
        embed_load_groups<n>(more, e.pos, row.pos, c);
#pragma unroll
        for (int i = 0; i < n; i++) {
            sum[i] = group_add(sum[i], more[i]);
        }
    }
    if (e.lang.data != NULL) {
        embed_load_groups<n>(more, e.lang, row.lang, c);
#pragma unroll
        for (int i = 0; i < n; i++) {
            sum[i] = group_add(sum[i], more[i]);
        }
    }
}

#endif
