/* The cases of test_double.py: each is a function that returns whether the result was right. */
#ifndef CUDA_HOST_CASES_H
#define CUDA_HOST_CASES_H

#include "kernels/cuda/portable.cuh"

#include <stdlib.h>

struct test_case {
    const char *name;
    bool (*run)(void);
};

/* What must work: cases.cu. What is wrong and must be found: bugs.cu. Both end with a NULL name. */
extern const struct test_case good_cases[];
extern const struct test_case bug_cases[];
/* Exits with status 2 and the line unless x holds: for what no case is about. */
#define REQUIRE(x)                                                                                 \
    do {                                                                                           \
        if (!(x)) {                                                                                \
            fprintf(stderr, "%s:%d: %s does not hold\n", __FILE__, __LINE__, #x);                  \
            exit(2);                                                                               \
        }                                                                                          \
    } while (0)

/* n elements of device memory with these values, or poison. */
template <typename T> T *device_array(int n, const T *values = nullptr)
{
    T *data;
    const size_t bytes = sizeof(T) * static_cast<size_t>(n);
    REQUIRE(cudaMalloc(&data, bytes) == cudaSuccess);
    if (values != nullptr) {
        REQUIRE(cudaMemcpy(data, values, bytes, cudaMemcpyHostToDevice) == cudaSuccess);
    }
    return data;
}

/* Waits for the device and compares; prints the first difference. */
template <typename T> bool device_equals(const T *data, const T *expected, int n)
{
    T *const got = static_cast<T *>(malloc(sizeof(T) * static_cast<size_t>(n)));
    REQUIRE(got != nullptr && cudaDeviceSynchronize() == cudaSuccess);
    REQUIRE(cudaMemcpy(got, data, sizeof(T) * static_cast<size_t>(n), cudaMemcpyDeviceToHost) ==
            cudaSuccess);
    bool is_equal = true;
    for (int i = 0; i < n && is_equal; ++i) {
        is_equal = got[i] == expected[i];
        if (!is_equal) {
            fprintf(stderr, "element %d: expected %g, got %g\n", i,
                    static_cast<double>(expected[i]), static_cast<double>(got[i]));
        }
    }
    free(got);
    return is_equal;
}

#endif
