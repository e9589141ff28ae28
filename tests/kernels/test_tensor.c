/* Conversions of half-precision numbers and views: kernels/tensor.h. */
#include "kernels/tensor.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

static uint32_t bits_of(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static float float_of(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static void test_bf16_rounds_to_nearest_even(void **state)
{
    (void)state;
    static const struct {
        uint32_t from;
        uint16_t to;
    } cases[] = {
        {0x3f800000, 0x3f80},                       /* 1 */
        {0x3f807fff, 0x3f80},                       /* just below the middle: down */
        {0x3f808000, 0x3f80},                       /* the middle, even below: down */
        {0x3f808001, 0x3f81},                       /* just above: up */
        {0x3f818000, 0x3f82},                       /* the middle, odd below: up */
        {0xbf818000, 0xbf82},                       /* the sign does not matter */
        {0x3fffffff, 0x4000},                       /* the carry runs into the exponent */
        {0x00000000, 0x0000},                       /* 0 and -0 */
        {0x80000000, 0x8000}, {0x00000001, 0x0000}, /* the smallest subnormal */
        {0x00018000, 0x0002},                       /* subnormals round like the others */
        {0x7f800000, 0x7f80},                       /* infinities */
        {0xff800000, 0xff80}, {0x7f7fffff, 0x7f80}, /* the largest float rounds to infinity */
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const uint16_t got = bf16_from_f32(float_of(cases[i].from));
        if (got != cases[i].to) {
            fail_msg("bf16 of 0x%08x: expected 0x%04x, got 0x%04x", cases[i].from, cases[i].to,
                     got);
        }
    }
}

/* A NaN whose payload lies in the low bits must not become infinity. */
static void test_bf16_keeps_nan(void **state)
{
    (void)state;
    static const uint32_t nans[] = {0x7fc00000, 0x7f800001, 0xff800001, 0x7fffffff, 0xffffffff};
    for (size_t i = 0; i < sizeof nans / sizeof *nans; i++) {
        const uint16_t got = bf16_from_f32(float_of(nans[i]));
        assert_true(isnan(bf16_to_f32(got)));
        assert_int_equal(got >> 15, nans[i] >> 31);
    }
}

static void test_bf16_round_trip_is_exact(void **state)
{
    (void)state;
    for (uint32_t bits = 0; bits < 0x10000; bits++) {
        const float value = bf16_to_f32((uint16_t)bits);
        assert_int_equal(bits_of(value), bits << 16);
        if (!isnan(value)) {
            assert_int_equal(bf16_from_f32(value), bits);
        }
    }
}

/* Every half against its definition: ±2^(e-15)·(1 + m/1024), subnormal ±2^-14·m/1024. */
static void test_f16_is_exact(void **state)
{
    (void)state;
    for (uint32_t bits = 0; bits < 0x10000; bits++) {
        const float got = f16_to_f32((uint16_t)bits);
        const int exponent = (int)(bits >> 10 & 31);
        const double mantissa = (double)(bits & 1023) / 1024;
        const double sign = (bits & 0x8000) != 0 ? -1 : 1;
        if (exponent == 31) {
            assert_true((bits & 1023) != 0 ? isnan(got) != 0 : isinf(got) != 0);
            assert_true((bits & 1023) != 0 || (got < 0) == (sign < 0));
            continue;
        }
        const double expected =
            sign * (exponent == 0 ? ldexp(mantissa, -14) : ldexp(1 + mantissa, exponent - 15));
        if ((double)got != expected || (signbit(got) != 0) != (signbit(expected) != 0)) {
            fail_msg("f16 0x%04x: expected %.17g, got %.9g", bits, expected, (double)got);
        }
    }
}

/* Each of them again, those between two by the nearer, and no infinity. */
static void test_f16_saturates(void **state)
{
    (void)state;
    for (uint32_t bits = 0; bits < 0x7c00; bits++) {
        const double value = (double)f16_to_f32((uint16_t)bits);
        const double next = bits == 0x7bff ? 65536 : (double)f16_to_f32((uint16_t)(bits + 1));
        const uint32_t up = bits == 0x7bff ? bits : bits + 1;
        const float half = (float)((value + next) / 2); /* exact */
        assert_int_equal(f16_saturated((float)value), bits);
        assert_int_equal(f16_saturated((float)-value), bits | 0x8000);
        assert_int_equal(f16_saturated(nextafterf(half, 0)), bits);
        assert_int_equal(f16_saturated(half), bits % 2 == 0 ? bits : up);
        assert_int_equal(f16_saturated(nextafterf(half, INFINITY)), up);
    }
    assert_int_equal(f16_saturated(1e30f), 0x7bff);
    assert_int_equal(f16_saturated(INFINITY), 0x7bff);
    assert_int_equal(f16_saturated(-INFINITY), 0xfbff);
    assert_true(isnan(f16_to_f32(f16_saturated(NAN))));
}

static void test_dtypes_have_sizes_and_names(void **state)
{
    (void)state;
    static const size_t bytes[DTYPE_N] = {4, 2, 2, 1, 1, 4};
    static const char *const names[DTYPE_N] = {"f32", "f16", "bf16", "int8", "q4", "i32"};
    for (int d = 0; d < DTYPE_N; d++) {
        assert_int_equal(dtype_bytes((enum dtype)d), bytes[d]);
        assert_string_equal(dtype_name((enum dtype)d), names[d]);
    }
}

static void test_views_keep_the_stride(void **state)
{
    (void)state;
    float data[3 * 8] = {0};
    const struct tensor t = tensor_make(data, 3, 8, DTYPE_F32);
    const struct tensor cols = tensor_cols(t, 5, 2);
    assert_ptr_equal(cols.data, &data[5]);
    assert_int_equal(cols.rows, 3);
    assert_int_equal(cols.cols, 2);
    assert_int_equal(cols.stride, 8);
    const struct tensor head = tensor_head(cols, 2);
    assert_ptr_equal(head.data, &data[5]);
    assert_int_equal(head.rows, 2);
    assert_int_equal(head.stride, 8);
    const struct tensor half = tensor_cols(tensor_make(data, 3, 8, DTYPE_BF16), 3, 1);
    assert_ptr_equal(half.data, (char *)data + 6);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_bf16_rounds_to_nearest_even),
        cmocka_unit_test(test_bf16_keeps_nan),
        cmocka_unit_test(test_bf16_round_trip_is_exact),
        cmocka_unit_test(test_f16_is_exact),
        cmocka_unit_test(test_f16_saturates),
        cmocka_unit_test(test_dtypes_have_sizes_and_names),
        cmocka_unit_test(test_views_keep_the_stride),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
