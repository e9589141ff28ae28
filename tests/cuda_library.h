/* Where tests find the library that holds the CUDA backend: what PKMSERVE_CUDA_LIBRARY names (a
 * GPU's, say), else the test double of this build. Tests skip what needs one where there is none;
 * `make cuda-host` builds the double. Header only, since each test is one program. */
#ifndef TESTS_CUDA_LIBRARY_H
#define TESTS_CUDA_LIBRARY_H

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

/* Makes the environment name the library, for backend_open. Unless it says otherwise, our own
 * kernels multiply rows of requests, too: then a row has the same bits in a prompt and drawn. */
static inline bool cuda_library_find(void)
{
    (void)setenv("PKMSERVE_CUDA_LT", "0", 0);
    const char *const named = getenv("PKMSERVE_CUDA_LIBRARY");
    if (named != NULL && named[0] != '\0') {
        return true;
    }
    const char *const build = getenv("B");
    char path[1024];
    const int n = snprintf(path, sizeof path, "%s/libpkmserve_cudahost.so",
                           build != NULL && build[0] != '\0' ? build : "build");
    return n > 0 && (size_t)n < sizeof path && access(path, R_OK) == 0 &&
           setenv("PKMSERVE_CUDA_LIBRARY", path, 1) == 0;
}

#endif
