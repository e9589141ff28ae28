/* Another reading of the kernels' files, for persistent.cu alone: what they call kernels are functions, and
 * what they call a block is a group of a block's threads that place_here() describes. Of what they call
 * shared memory, the dynamic one is the group's, the rest the block's (has_block). Their text stays the
 * one that is launched otherwise, so the bits are the same. tests/cuda_host reads it in yet another way.
 *
 * Read last: what follows knows no other kernels and launches nothing. */
#ifndef KERNELS_CUDA_AS_BODY_CUH
#define KERNELS_CUDA_AS_BODY_CUH

#define KERNELS_AS_BODIES /* leaves out what launches */

#undef __global__
#undef __launch_bounds__
#undef threadIdx
#undef blockIdx
#undef blockDim
#undef gridDim
#undef DYN_SHARED
#undef KERNEL_ARG

#define __global__ static __device__ __forceinline__
#define __launch_bounds__(...)
#define threadIdx (place_thread())
#define blockIdx (place_block())
#define blockDim (place_block_size())
#define gridDim (place_grid_size())
#define __syncthreads() place_sync()
#define grid_wait() place_wait()
#define DYN_SHARED(T, name) T *const name = reinterpret_cast<T *>(place_shared())
#define KERNEL_ARG(T) const T &

/* Each has what launches it left out. */
#ifdef __CUDACC__
#pragma nv_diag_suppress 177
#else
#pragma GCC diagnostic ignored "-Wunused-function"
#endif

#endif
