/* Stores rows of keys and values in the pages of the cache, in the layout of kernels.h: keys
 * transposed, and BF16 rounded and by pairs. Bytes: those of the rows; but a key by itself writes a
 * word to each line of its page. */
#include "kernels/cpu/simd/internal.h"

enum { FETCH_OPEN = 4 }; /* prefetch this many heads ahead: a head has few lines here */

/* Transposes n words of four positions into a page of keys, 4 x 4 words at a time. */
static void store_keys_4(float *piece, const float *k, int64_t stride, int n)
{
    int c = 0;
    for (; c + 4 <= n; c += 4) {
        v4 row[4];
        for (int i = 0; i < 4; i++) {
            memcpy(&row[i], k + i * stride + c, sizeof row[i]);
        }
        const v4 low01 = __builtin_shufflevector(row[0], row[1], 0, 4, 1, 5);
        const v4 low23 = __builtin_shufflevector(row[2], row[3], 0, 4, 1, 5);
        const v4 high01 = __builtin_shufflevector(row[0], row[1], 2, 6, 3, 7);
        const v4 high23 = __builtin_shufflevector(row[2], row[3], 2, 6, 3, 7);
        const v4 column[4] = {__builtin_shufflevector(low01, low23, 0, 1, 4, 5),
                              __builtin_shufflevector(low01, low23, 2, 3, 6, 7),
                              __builtin_shufflevector(high01, high23, 0, 1, 4, 5),
                              __builtin_shufflevector(high01, high23, 2, 3, 6, 7)};
        for (int i = 0; i < 4; i++) {
            memcpy(piece + (int64_t)(c + i) * KV_PAGE, &column[i], sizeof column[i]);
        }
    }
    for (; c < n; c++) {
        for (int i = 0; i < 4; i++) {
            memcpy(piece + (int64_t)c * KV_PAGE + i, k + i * stride + c, sizeof *k);
        }
    }
}

/* n words of n_row <= 4 positions. Words are moved as bytes: those of pairs are no floats. */
static void store_keys(float *piece, const float *k, int64_t stride, int n_row, int n)
{
    if (n_row == 4) {
        store_keys_4(piece, k, stride, n);
        return;
    }
    for (int r = 0; r < n_row; r++) {
        for (int c = 0; c < n; c++) {
            memcpy(piece + (int64_t)c * KV_PAGE + r, k + r * stride + c, sizeof *k);
        }
    }
}

/* 2·n numbers, rounded, as n pairs. */
static void pair_columns(float *to, const float *from, int n)
{
    typedef uint64_t vq __attribute__((vector_size(sizeof(vf))));
    typedef uint32_t half __attribute__((vector_size(sizeof(vf) / 2)));
    enum { WORDS = LANES / 2 };
    for (int i = 0; i < n; i += WORDS) {
        const int n_word = n - i < WORDS ? n - i : WORDS;
        const vq bits = (vq)v_round_bf16(v_load_n(from + 2 * i, 2 * n_word));
        const half word = __builtin_convertvector((bits & 0xffffffffu) >> 16 | bits >> 32, half);
        memcpy(to + i, &word, (size_t)n_word * sizeof *to);
    }
}

/* Rows of k, a head's columns, into its piece of a page from position a->offset on. */
static void store_key_pairs(float *piece, const struct kv_rows *a, const float *k)
{
    enum { WORDS = 64 }; /* at a time */
    for (int c = 0; c < a->d_head; c += 2 * WORDS) {
        const int left = (a->d_head - c) / 2;
        const int n_word = left < WORDS ? left : WORDS;
        for (int r = 0; r < a->n_row; r += 4) {
            float word[4][WORDS];
            const int n_row = a->n_row - r < 4 ? a->n_row - r : 4;
            for (int i = 0; i < n_row; i++) {
                pair_columns(word[i], k + (r + i) * a->k_stride + c, n_word);
            }
            store_keys(piece + (int64_t)(c / 2) * KV_PAGE + r, word[0], WORDS, n_row, n_word);
        }
    }
}

/* Transposes n_word words of each position of a full page. */
void SIMD(close_keys)(float *piece, const float *by_position, int n_word)
{
    for (int r = 0; r < KV_PAGE; r += 4) {
        store_keys_4(piece + r, by_position + (int64_t)r * n_word, n_word, n_word);
    }
}

/* Rows of k, position-major until the page is full. */
static void store_open_keys(float *piece, const struct kv_rows *a, const float *k)
{
    const int n_word = a->d_head / 2;
    for (int r = 0; r < a->n_row; r++) {
        pair_columns(piece + (int64_t)(a->offset + r) * n_word, k + r * a->k_stride, n_word);
    }
    if (a->offset + a->n_row == KV_PAGE) {
        memcpy(a->closing, piece, sizeof *piece * KV_PAGE * (size_t)n_word);
        SIMD(close_keys)(piece, a->closing, n_word);
    }
}

/* The same of v. With BF16, a single position leaves the other half of its words unchanged. */
static void store_value_pairs(float *piece, const struct kv_rows *a, const float *v)
{
    for (int r = 0; r < a->n_row;) {
        const int u = a->offset + r;
        const float *const row = v + r * a->v_stride;
        float *const to = piece + (int64_t)(u / 2) * a->d_head;
        if (u % 2 == 0 && r + 1 < a->n_row) {
            for (int c = 0; c < a->d_head; c += LANES) {
                const int n = lanes_left(a->d_head, c);
                const vu low = (vu)v_round_bf16(v_load_n(row + c, n));
                const vu high = (vu)v_round_bf16(v_load_n(row + a->v_stride + c, n));
                v_store_n(to + c, (vf)(low >> 16 | high), n);
            }
            r += 2;
            continue;
        }
        for (int c = 0; c < a->d_head; c += LANES) {
            const int n = lanes_left(a->d_head, c);
            const vu bits = (vu)v_round_bf16(v_load_n(row + c, n));
            const vu old = (vu)v_load_n(to + c, n);
            v_store_n(to + c,
                      (vf)(u % 2 == 0 ? old >> 16 << 16 | bits >> 16 : (old & 0xffff) | bits), n);
        }
        r++;
    }
}

static ALWAYS_INLINE void fetch_words(const float *from, int n)
{
    for (int c = 0; c < n; c += LINE_WORDS) {
        __builtin_prefetch(from + c, 1);
    }
}

/* Prefetches the lines that the first row of a head will be written to. */
static ALWAYS_INLINE void fetch_pieces(const struct kv_rows *a, bool is_open, const float *k_piece,
                                       const float *v_piece)
{
    const int n_part = a->is_pairs ? 2 : 1;
    const int n_word = a->d_head / n_part;
    fetch_words(v_piece + (int64_t)(a->offset / n_part) * a->d_head, a->d_head);
    if (is_open) {
        fetch_words(k_piece + (int64_t)a->offset * n_word, n_word);
        return;
    }
    for (int c = 0; c < n_word; c++) { /* each word has a line of its own */
        __builtin_prefetch(k_piece + (int64_t)c * KV_PAGE + a->offset, 1);
    }
}

void SIMD(kv_rows)(const struct kv_rows *a)
{
    const int64_t piece = (int64_t)KV_PAGE * a->d_head / (a->is_pairs ? 2 : 1);
    const bool is_open = a->closing != NULL && a->n_row < KV_PAGE;
    const int ahead = is_open ? FETCH_OPEN : 1;
    for (int h = 0; h < a->n_head; h++) {
        float *const k_page = a->k_page + h * piece;
        float *const k_piece = k_page + a->offset;
        float *const v_piece = a->v_page + h * piece;
        const float *const k = a->k + (int64_t)h * a->d_head;
        const float *const v = a->v + (int64_t)h * a->d_head;
        if (h + ahead < a->n_head) {
            fetch_pieces(a, is_open, k_page + ahead * piece, v_piece + ahead * piece);
        }
        if (a->is_pairs) {
            if (is_open) {
                store_open_keys(k_page, a, k);
            } else {
                store_key_pairs(k_piece, a, k);
            }
            store_value_pairs(v_piece, a, v);
            continue;
        }
        for (int r = 0; r < a->n_row; r += 4) {
            const int n_row = a->n_row - r < 4 ? a->n_row - r : 4;
            store_keys(k_piece + r, k + r * a->k_stride, a->k_stride, n_row, a->d_head);
        }
        for (int r = 0; r < a->n_row; r++) {
            memcpy(v_piece + (int64_t)(a->offset + r) * a->d_head, v + r * a->v_stride,
                   sizeof *v * (size_t)a->d_head);
        }
    }
}
