/* Opening cuBLASLt: lt_library.cuh. Called once by linear_lt.cu. */
#include "kernels/cuda/lt_library.cuh"

#if LT_IS_BUILT

#include <dlfcn.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>

#define LT_TEXT_OF(number) #number
#define LT_TEXT(macro) LT_TEXT_OF(macro)
#define LT_MAJOR LT_TEXT(CUBLAS_VER_MAJOR)
#define LT_NAME "libcublasLt.so." LT_MAJOR

static enum err_code refuse(const char *reason, struct err *err)
{
    return err_set(err, ERR_UNSUPPORTED,
                   "cuBLASLt does not load: %.160s; install " LT_NAME " (CUDA " LT_MAJOR
                   ") beside libpkmserve_cuda.so, or do without",
                   reason != NULL ? reason : LT_NAME);
}

/* Beside the library that this is part of. Said by path: a run path of $ORIGIN would say the same,
 * but not where a sanitizer replaces dlopen. */
static void *open_beside(void)
{
    Dl_info own;
    const int is_known = dladdr(reinterpret_cast<const void *>(lt_library_open), &own);
    const char *const slash = is_known != 0 ? strrchr(own.dli_fname, '/') : NULL;
    if (slash == NULL) {
        return NULL;
    }
    char path[PATH_MAX];
    const int n = snprintf(path, sizeof path, "%.*s/" LT_NAME,
                           static_cast<int>(slash - own.dli_fname), own.dli_fname);
    return n > 0 && n < PATH_MAX ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : NULL;
}

enum err_code lt_library_open(struct lt_library *lt, struct err *err)
{
    void *const beside = open_beside();
    void *const library = beside != NULL ? beside : dlopen(LT_NAME, RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) {
        return refuse(dlerror(), err);
    }
#define LT_FIND(name)                                                                              \
    lt->name = reinterpret_cast<decltype(lt->name)>(dlsym(library, #name));                        \
    if (lt->name == NULL) {                                                                        \
        return refuse(dlerror(), err);                                                             \
    }
    LT_FUNCTIONS(LT_FIND)
#undef LT_FIND
    return ERR_OK;
}

#endif
