/* Opening a backend by the names users write. Called by the engine and the tests.
 *
 * The CUDA backend is a library of its own, opened when it is asked for: so one program runs on
 * machines with and without CUDA, and only those with it need CUDA's libraries.
 * PKMSERVE_CUDA_LIBRARY names the library; else it is looked for beside the program and in
 * ../lib/pkmserve from there. It is never closed again: CUDA's own libraries do not survive that.
 */
#include "kernels/backend.h"
#include "kernels/cuda/entry.h"

#include <dlfcn.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define LIBRARY_NAME "libpkmserve_cuda.so"

static enum err_code open_cpu(struct backend **be, int n_thread, struct err *err)
{
    const char *const isa = getenv("PKMSERVE_ISA");
    if (isa != NULL && strcmp(isa, "ref") == 0) {
        return ref_open(be, err);
    }
    return cpu_open(be, isa != NULL && isa[0] != '\0' ? isa : NULL, n_thread, err);
}

/* ---- the CUDA library ----------------------------------------------------------------------- */

/* Writes the path of name, relative to the program's own folder; false where that is unknown or
 * there is no such file. */
static bool beside_program(char *path, size_t path_bytes, const char *name)
{
    char program[PATH_MAX];
    const ssize_t n = readlink("/proc/self/exe", program, sizeof program - 1);
    if (n <= 0) {
        return false;
    }
    program[n] = '\0';
    char *const slash = strrchr(program, '/');
    if (slash == NULL) {
        return false;
    }
    *slash = '\0';
    const int length = snprintf(path, path_bytes, "%s/%s", program, name);
    return length > 0 && (size_t)length < path_bytes && access(path, R_OK) == 0;
}

static enum err_code find_library(char *path, size_t path_bytes, struct err *err)
{
    const char *const named = getenv("PKMSERVE_CUDA_LIBRARY");
    if (named != NULL && named[0] != '\0') {
        const int length = snprintf(path, path_bytes, "%s", named);
        if (length < 0 || (size_t)length >= path_bytes) {
            return err_set(err, ERR_ARGUMENT, "PKMSERVE_CUDA_LIBRARY is longer than %zu bytes",
                           path_bytes - 1);
        }
        return ERR_OK;
    }
    if (beside_program(path, path_bytes, LIBRARY_NAME) ||
        beside_program(path, path_bytes, "../lib/pkmserve/" LIBRARY_NAME)) {
        return ERR_OK;
    }
    return err_set(err, ERR_UNSUPPORTED,
                   "cuda: there is no " LIBRARY_NAME " beside the program or in ../lib/pkmserve: "
                   "build it with make CUDA=1, or name it in PKMSERVE_CUDA_LIBRARY");
}

/* The library's idea of the shared structs must be ours. */
static enum err_code check_entry(const struct cuda_entry *entry, const char *path, struct err *err)
{
    if (entry != NULL && entry->abi == CUDA_ENTRY_ABI &&
        entry->table_size == sizeof(struct backend_ops) &&
        entry->step_size == sizeof(struct step) && entry->backend_size == sizeof(struct backend) &&
        entry->open != NULL) {
        return ERR_OK;
    }
    return err_set(err, ERR_UNSUPPORTED,
                   "cuda: %.200s is of another version of pkmserve (interface %u, this program has "
                   "%d): install both from one build",
                   path, entry == NULL ? 0 : entry->abi, CUDA_ENTRY_ABI);
}

static enum err_code open_cuda(struct backend **be, const struct backend_options *options,
                               struct err *err)
{
    char path[PATH_MAX + 64];
    enum err_code code = find_library(path, sizeof path, err);
    if (code != ERR_OK) {
        return code;
    }
    void *const library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) {
        const char *const reason = dlerror();
        return err_set(err, ERR_UNSUPPORTED,
                       "cuda: the library does not load: %.300s; install the one that was built "
                       "with this program, or use the CPU (device cpu)",
                       reason == NULL ? path : reason);
    }
    const struct cuda_entry *(*entry_of)(void) = NULL;
    void *const symbol = dlsym(library, CUDA_ENTRY_SYMBOL);
    if (symbol == NULL) {
        return err_set(err, ERR_UNSUPPORTED,
                       "cuda: %.200s is no CUDA backend: it has no symbol " CUDA_ENTRY_SYMBOL,
                       path);
    }
    memcpy(&entry_of, &symbol, sizeof entry_of); /* C has no cast from data to function */
    const struct cuda_entry *const entry = entry_of();
    code = check_entry(entry, path, err);
    return code == ERR_OK ? entry->open(be, options, err) : code;
}

/* ---- by name -------------------------------------------------------------------------------- */

/* The GPU if there is one, else the CPU; the backend's note says which, and why. */
static enum err_code open_auto(struct backend **be, const struct backend_options *options,
                               struct err *err)
{
    struct err reason = {ERR_OK, ""};
    if (open_cuda(be, options, &reason) == ERR_OK) {
        char other[sizeof(*be)->note];
        (void)snprintf(other, sizeof other, "%s", (*be)->note);
        (void)snprintf((*be)->note, sizeof(*be)->note, "a GPU was found%s%.360s",
                       other[0] != '\0' ? "; " : "", other);
        return ERR_OK;
    }
    const enum err_code code = open_cpu(be, options->n_thread, err);
    if (code == ERR_OK) {
        (void)snprintf((*be)->note, sizeof(*be)->note, "no GPU: %.360s", reason.message);
    }
    return code;
}

enum err_code backend_open(struct backend **be, const struct backend_options *options,
                           struct err *err)
{
    *be = NULL;
    const char *const device = options->device;
    if (options->n_thread < 0) {
        return err_set(err, ERR_ARGUMENT, "threads: %d is below 0 (0 = one per core)",
                       options->n_thread);
    }
    const bool names_gpu = options->gpu != NULL && options->gpu[0] != '\0';
    if (names_gpu && strcmp(device, "auto") != 0 && strcmp(device, "cuda") != 0) {
        return err_set(err, ERR_ARGUMENT,
                       "gpu: %.40s is named, and device %.40s uses none; leave one of the two out",
                       options->gpu, device);
    }
    if (strcmp(device, "auto") == 0 && !names_gpu) {
        return open_auto(be, options, err);
    }
    if (strcmp(device, "cpu") == 0) {
        return open_cpu(be, options->n_thread, err);
    }
    if (strcmp(device, "cuda") == 0 || names_gpu) {
        return open_cuda(be, options, err);
    }
    if (strcmp(device, "ref") == 0) {
        return ref_open(be, err);
    }
    return err_set(err, ERR_ARGUMENT, "device: %.40s is unknown; use auto, cpu or cuda", device);
}

void backend_close(struct backend *be)
{
    if (be != NULL) {
        be->op->close(be);
    }
}
