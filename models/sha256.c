/* See sha256.h. Names as in FIPS 180-4, section 6.2. */
#include "models/sha256_inside.h"

#include "models/sha256.h"

#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#elif defined(__aarch64__) && (!defined(__clang__) || defined(__ARM_FEATURE_SHA2))
#include <arm_neon.h>
#include <sys/auxv.h>
#define HAS_ARMV8 1
#endif

enum { LENGTH_AT = 56 /* where the last block has the message's length in bits */ };

/* The first 32 bits of the fractional parts of the cube roots of the first 64 primes. */
static const uint32_t K[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

static uint32_t rotate(uint32_t x, int n)
{
    return x >> n | x << (32 - n);
}

static uint32_t big_endian(const unsigned char *at)
{
    return (uint32_t)at[0] << 24 | (uint32_t)at[1] << 16 | (uint32_t)at[2] << 8 | (uint32_t)at[3];
}

/* Unrolled, so that all indices are known and no variable has to move. */
static void add_block(uint32_t state[8], const unsigned char *block)
{
    uint32_t w[16]; /* the last 16 words of the schedule */
    uint32_t v[8];
    memcpy(v, state, sizeof v);
#pragma GCC unroll 64
    for (int t = 0; t < 64; t++) {
        if (t < 16) {
            w[t] = big_endian(block + 4 * t);
        } else {
            const uint32_t w15 = w[(t - 15) & 15];
            const uint32_t w2 = w[(t - 2) & 15];
            const uint32_t s0 = rotate(w15, 7) ^ rotate(w15, 18) ^ w15 >> 3;
            const uint32_t s1 = rotate(w2, 17) ^ rotate(w2, 19) ^ w2 >> 10;
            w[t & 15] += s0 + w[(t - 7) & 15] + s1;
        }
        /* With each round a becomes b, and so on: the ith variable is at (i - t) mod 8. */
        const uint32_t a = v[-t & 7];
        const uint32_t b = v[(1 - t) & 7];
        const uint32_t c = v[(2 - t) & 7];
        const uint32_t e = v[(4 - t) & 7];
        const uint32_t f = v[(5 - t) & 7];
        const uint32_t g = v[(6 - t) & 7];
        uint32_t *const d = &v[(3 - t) & 7];
        uint32_t *const h = &v[(7 - t) & 7];
        const uint32_t s1 = rotate(e, 6) ^ rotate(e, 11) ^ rotate(e, 25);
        const uint32_t t1 = *h + s1 + ((e & f) ^ (~e & g)) + K[t] + w[t & 15];
        const uint32_t s0 = rotate(a, 2) ^ rotate(a, 13) ^ rotate(a, 22);
        *d += t1;
        *h = t1 + s0 + ((a & b) ^ (a & c) ^ (b & c));
    }
    for (int i = 0; i < 8; i++) {
        state[i] += v[i];
    }
}

void sha256_blocks_plain(uint32_t state[8], const unsigned char *data, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        add_block(state, data + i * SHA256_BLOCK);
    }
}

#if defined(__x86_64__)

/* The instructions for SHA of x86: two rounds each, and four words of the schedule. They want the
 * variables as (a, b, e, f) and (c, d, g, h), the first of them in the highest place. */
__attribute__((target("sha,sse4.1"))) static void blocks_fast(uint32_t state[8],
                                                              const unsigned char *data, size_t n)
{
    const __m128i big_endian_words = _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203);
    const __m128i cdab = _mm_shuffle_epi32(_mm_loadu_si128((const __m128i *)(void *)state), 0xb1);
    const __m128i efgh =
        _mm_shuffle_epi32(_mm_loadu_si128((const __m128i *)(void *)(state + 4)), 0x1b);
    __m128i abef = _mm_alignr_epi8(cdab, efgh, 8);
    __m128i cdgh = _mm_blend_epi16(efgh, cdab, 0xf0);
    for (size_t i = 0; i < n; i++) {
        const unsigned char *const block = data + i * SHA256_BLOCK;
        const __m128i abef_before = abef;
        const __m128i cdgh_before = cdgh;
        __m128i w[4]; /* the last 16 words */
#pragma GCC unroll 16
        for (int t = 0; t < 16; t++) {
            if (t < 4) {
                const void *const at = block + 16 * t;
                w[t] = _mm_shuffle_epi8(_mm_loadu_si128(at), big_endian_words);
            } else {
                const __m128i w7 = _mm_alignr_epi8(w[(t + 3) & 3], w[(t + 2) & 3], 4);
                const __m128i s0 = _mm_sha256msg1_epu32(w[t & 3], w[(t + 1) & 3]);
                w[t & 3] = _mm_sha256msg2_epu32(_mm_add_epi32(s0, w7), w[(t + 3) & 3]);
            }
            const void *const k = K + 4 * t;
            const __m128i sum = _mm_add_epi32(w[t & 3], _mm_loadu_si128(k));
            cdgh = _mm_sha256rnds2_epu32(cdgh, abef, sum); /* two rounds on, this is abef */
            abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(sum, 0x0e));
        }
        abef = _mm_add_epi32(abef, abef_before);
        cdgh = _mm_add_epi32(cdgh, cdgh_before);
    }
    const __m128i feba = _mm_shuffle_epi32(abef, 0x1b);
    const __m128i dchg = _mm_shuffle_epi32(cdgh, 0xb1);
    _mm_storeu_si128((__m128i *)(void *)state, _mm_blend_epi16(feba, dchg, 0xf0));
    _mm_storeu_si128((__m128i *)(void *)(state + 4), _mm_alignr_epi8(dchg, feba, 8));
}

static bool ask_machine(void)
{
    const unsigned ssse3_sse41 = 1u << 9 | 1u << 19;
    const unsigned sha = 1u << 29;
    unsigned a = 0;
    unsigned b = 0;
    unsigned c = 0;
    unsigned d = 0;
    return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & ssse3_sse41) == ssse3_sse41 &&
           __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (b & sha) != 0;
}

#elif defined(HAS_ARMV8)

/* The instructions for SHA of ARMv8: four rounds of (a, b, c, d), four of (e, f, g, h), and four
 * words of the schedule. */
__attribute__((target("+crypto"))) static void blocks_fast(uint32_t state[8],
                                                           const unsigned char *data, size_t n)
{
    uint32x4_t abcd = vld1q_u32(state);
    uint32x4_t efgh = vld1q_u32(state + 4);
    for (size_t i = 0; i < n; i++) {
        const unsigned char *const block = data + i * SHA256_BLOCK;
        const uint32x4_t abcd_before = abcd;
        const uint32x4_t efgh_before = efgh;
        uint32x4_t w[4]; /* the last 16 words */
#pragma GCC unroll 16
        for (int t = 0; t < 16; t++) {
            if (t < 4) {
                w[t] = vreinterpretq_u32_u8(vrev32q_u8(vld1q_u8(block + 16 * t)));
            } else {
                const uint32x4_t s0 = vsha256su0q_u32(w[t & 3], w[(t + 1) & 3]);
                w[t & 3] = vsha256su1q_u32(s0, w[(t + 2) & 3], w[(t + 3) & 3]);
            }
            const uint32x4_t sum = vaddq_u32(w[t & 3], vld1q_u32(K + 4 * t));
            const uint32x4_t before = abcd;
            abcd = vsha256hq_u32(abcd, efgh, sum);
            efgh = vsha256h2q_u32(efgh, before, sum);
        }
        abcd = vaddq_u32(abcd, abcd_before);
        efgh = vaddq_u32(efgh, efgh_before);
    }
    vst1q_u32(state, abcd);
    vst1q_u32(state + 4, efgh);
}

static bool ask_machine(void)
{
    return (getauxval(AT_HWCAP) & HWCAP_SHA2) != 0;
}

#else

#define blocks_fast sha256_blocks_plain

static bool ask_machine(void)
{
    return false;
}

#endif

/* Asked once: in a virtual machine the question is slow. */
static bool has_instructions(void)
{
    static atomic_int known; /* 0: not asked yet; 1: no; 2: yes */
    int answer = atomic_load_explicit(&known, memory_order_relaxed);
    if (answer == 0) {
        answer = ask_machine() ? 2 : 1;
        atomic_store_explicit(&known, answer, memory_order_relaxed);
    }
    return answer == 2;
}

void sha256_blocks(uint32_t state[8], const unsigned char *data, size_t n)
{
    if (has_instructions()) {
        blocks_fast(state, data, n);
    } else {
        sha256_blocks_plain(state, data, n);
    }
}

void sha256_begin(struct sha256 *sum)
{
    /* The first 32 bits of the fractional parts of the square roots of the first 8 primes. */
    *sum = (struct sha256){.state = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f,
                                     0x9b05688c, 0x1f83d9ab, 0x5be0cd19}};
}

void sha256_add(struct sha256 *sum, const void *data, size_t bytes)
{
    const unsigned char *at = data;
    size_t used = (size_t)(sum->n_byte % SHA256_BLOCK);
    sum->n_byte += bytes;
    while (bytes > 0) {
        if (used == 0 && bytes >= SHA256_BLOCK) {
            const size_t n = bytes / SHA256_BLOCK;
            sha256_blocks(sum->state, at, n);
            at += n * SHA256_BLOCK;
            bytes -= n * SHA256_BLOCK;
            continue;
        }
        const size_t n = bytes < SHA256_BLOCK - used ? bytes : SHA256_BLOCK - used;
        memcpy(sum->block + used, at, n);
        at += n;
        bytes -= n;
        used += n;
        if (used == SHA256_BLOCK) {
            sha256_blocks(sum->state, sum->block, 1);
            used = 0;
        }
    }
}

void sha256_end(struct sha256 *sum, unsigned char digest[SHA256_BYTES])
{
    static const unsigned char padding[SHA256_BLOCK] = {0x80};
    const uint64_t n_bit = 8 * sum->n_byte;
    const size_t used = (size_t)(sum->n_byte % SHA256_BLOCK);
    unsigned char length[8];
    for (int i = 0; i < 8; i++) {
        length[i] = (unsigned char)(n_bit >> (56 - 8 * i));
    }
    sha256_add(sum, padding, used < LENGTH_AT ? LENGTH_AT - used : SHA256_BLOCK + LENGTH_AT - used);
    sha256_add(sum, length, sizeof length);
    for (int i = 0; i < SHA256_BYTES; i++) {
        digest[i] = (unsigned char)(sum->state[i / 4] >> (24 - 8 * (i % 4)));
    }
}

bool sha256_is_hex(const char *text)
{
    return strlen(text) == SHA256_HEX - 1 && strspn(text, "0123456789abcdef") == SHA256_HEX - 1;
}

void sha256_end_hex(struct sha256 *sum, char hex[SHA256_HEX])
{
    unsigned char digest[SHA256_BYTES];
    sha256_end(sum, digest);
    for (int i = 0; i < SHA256_BYTES; i++) {
        (void)snprintf(hex + 2 * i, 3, "%02x", digest[i]);
    }
}
