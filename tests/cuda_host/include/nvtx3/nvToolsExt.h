/* NVTX, as far as the backend uses it: the ranges that CUDA_HOST_TRACE puts beside launches. */
#ifndef CUDA_HOST_NVTOOLSEXT_H
#define CUDA_HOST_NVTOOLSEXT_H

/* Both return how many ranges are open besides this one; negative where none was. */
int nvtxRangePushA(const char *message);
int nvtxRangePop(void);

#endif
