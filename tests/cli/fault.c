/* A library to preload: FAULT_CALL names a kind of call ("memory", "growth", "getline", "readdir",
 * "thread"), and the FAULT_N-th one by the program itself (not by a library) fails; "growth" is a
 * realloc to GROWTH_BYTES or more; of "tokenizer" the N-th call of malloc by SentencePiece or by
 * C++'s library, which allocates for it. FAULT_N=0: none
 * fails, and standard error ends in "calls N", which is how many there were. */
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <link.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { GROWTH_BYTES = 20000 };

static uintptr_t first, end; /* of the program's code */
static long n_call, n_fail;
static const char *call = "";

static int see(struct dl_phdr_info *info, size_t bytes, void *ctx)
{
    (void)bytes;
    (void)ctx;
    for (int i = 0; i < info->dlpi_phnum; i++) { /* the program comes first */
        const ElfW(Phdr) *const part = &info->dlpi_phdr[i];
        if (part->p_type == PT_LOAD && (part->p_flags & PF_X) != 0) {
            first = info->dlpi_addr + part->p_vaddr;
            end = first + part->p_memsz;
        }
    }
    return 1;
}

__attribute__((constructor)) static void begin(void)
{
    const char *const n = getenv("FAULT_N");
    const char *const name = getenv("FAULT_CALL");
    (void)dl_iterate_phdr(see, NULL);
    n_fail = n != NULL ? atol(n) : 0;
    call = name != NULL ? name : "";
}

__attribute__((destructor)) static void finish(void)
{
    if (n_fail == 0) {
        (void)fprintf(stderr, "calls %ld\n", n_call);
    }
}

static int fails(const char *name, const void *caller)
{
    const uintptr_t from = (uintptr_t)caller;
    return from >= first && from < end && strcmp(name, call) == 0 &&
           __atomic_add_fetch(&n_call, 1, __ATOMIC_RELAXED) == n_fail;
}

#define NEXT(type, name) ((type)dlsym(RTLD_NEXT, name))

extern void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t), *__libc_realloc(void *, size_t);

static int tokenizer_fails(const void *caller)
{
    Dl_info from;
    return strcmp(call, "tokenizer") == 0 && dladdr(caller, &from) != 0 &&
           (strstr(from.dli_fname, "sentencepiece") != NULL ||
            strstr(from.dli_fname, "libstdc++") != NULL) &&
           __atomic_add_fetch(&n_call, 1, __ATOMIC_RELAXED) == n_fail;
}

void *malloc(size_t bytes)
{
    const void *const caller = __builtin_return_address(0);
    return fails("memory", caller) || tokenizer_fails(caller) ? (errno = ENOMEM, NULL)
                                                              : __libc_malloc(bytes);
}

void *calloc(size_t n, size_t bytes)
{
    return fails("memory", __builtin_return_address(0)) ? (errno = ENOMEM, NULL)
                                                        : __libc_calloc(n, bytes);
}

void *realloc(void *memory, size_t bytes)
{
    const void *const caller = __builtin_return_address(0);
    return fails("memory", caller) || (bytes >= GROWTH_BYTES && fails("growth", caller))
               ? (errno = ENOMEM, NULL)
               : __libc_realloc(memory, bytes);
}

/* What getline is in glibc. */
ssize_t __getdelim(char **line, size_t *room, int delimiter, FILE *file)
{
    typedef ssize_t (*next)(char **, size_t *, int, FILE *);
    return fails("getline", __builtin_return_address(0))
               ? (errno = EIO, -1)
               : NEXT(next, "__getdelim")(line, room, delimiter, file);
}

struct dirent *readdir(DIR *dir)
{
    typedef struct dirent *(*next)(DIR *);
    return fails("readdir", __builtin_return_address(0)) ? (errno = EIO, NULL)
                                                         : NEXT(next, "readdir")(dir);
}

int pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *),
                   void *arg)
{
    typedef int (*next)(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);
    return fails("thread", __builtin_return_address(0))
               ? EAGAIN
               : NEXT(next, "pthread_create")(thread, attributes, run, arg);
}
