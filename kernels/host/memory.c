/* Memory of backends whose device is the host: see host.h. */
#include "kernels/host/host.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum {
    SMALL_ALIGN = 128, /* two cache lines: neighbours are prefetched in pairs */
    HUGE_PAGE = 2 << 20,
    HUGE_MIN = HUGE_PAGE / 2, /* smallest block that gets huge pages: a matrix of 1024 x 1024 in
                               * int8 */
};

static size_t align_of(size_t bytes)
{
    return bytes >= HUGE_MIN ? HUGE_PAGE : SMALL_ALIGN;
}

static size_t round_up(size_t bytes, size_t to)
{
    return (bytes + to - 1) / to * to;
}

/* The header in front of the memory. */
struct owner {
    void *base;
    size_t bytes; /* from base on */
    bool is_mapped;
};

void *host_alloc(size_t bytes)
{
    const size_t align = align_of(bytes);
    if (bytes > SIZE_MAX - 3 * align) {
        return NULL;
    }
    const size_t padded = round_up(bytes, align);
    struct owner owner = {.bytes = sizeof owner + padded + align, .is_mapped = align == HUGE_PAGE};
    if (owner.is_mapped) {
        owner.base =
            mmap(NULL, owner.bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        owner.base = owner.base == MAP_FAILED ? NULL : owner.base;
    } else {
        owner.base = calloc(1, owner.bytes);
    }
    if (owner.base == NULL) {
        return NULL;
    }
    const size_t base = (size_t)(uintptr_t)owner.base;
    struct owner *const data =
        (void *)((char *)owner.base + (round_up(base + sizeof owner, align) - base));
    data[-1] = owner;
    if (owner.is_mapped) {
        (void)madvise(data, padded, MADV_HUGEPAGE);
    }
    return data;
}

void host_free(void *data)
{
    if (data == NULL) {
        return;
    }
    const struct owner owner = ((struct owner *)data)[-1];
    if (owner.is_mapped) {
        (void)munmap(owner.base, owner.bytes);
    } else {
        free(owner.base);
    }
}

enum err_code host_buffer_new(struct backend *be, void **data, size_t bytes, const char *purpose,
                              struct err *err)
{
    *data = host_alloc(bytes);
    if (*data == NULL) {
        return err_set(err, ERR_MEMORY, "%s: %s has no %zu bytes left; lower the limits", purpose,
                       be->name, bytes);
    }
    return ERR_OK;
}

void host_buffer_free(struct backend *be, void *data)
{
    (void)be;
    host_free(data);
}

/* ---- transfers ------------------------------------------------------------------------------ */

void host_upload(struct backend *be, struct tensor dst, const void *host)
{
    (void)be;
    const size_t row_bytes = (size_t)dst.cols * dtype_bytes(dst.dtype);
    const size_t stride_bytes = (size_t)dst.stride * dtype_bytes(dst.dtype);
    for (size_t r = 0; r < (size_t)dst.rows; r++) {
        memcpy((char *)dst.data + r * stride_bytes, (const char *)host + r * row_bytes, row_bytes);
    }
}

void host_download(struct backend *be, void *host, struct tensor src)
{
    (void)be;
    const size_t row_bytes = (size_t)src.cols * dtype_bytes(src.dtype);
    const size_t stride_bytes = (size_t)src.stride * dtype_bytes(src.dtype);
    for (size_t r = 0; r < (size_t)src.rows; r++) {
        memcpy((char *)host + r * row_bytes, (const char *)src.data + r * stride_bytes, row_bytes);
    }
}

/* ---- memory left ---------------------------------------------------------------------------- */

/* A number of bytes in a one-line file, or INT64_MAX ("max", or there is no such file). */
static int64_t read_bytes_file(const char *path)
{
    long long value = 0;
    FILE *const file = fopen(path, "r");
    const bool ok = file != NULL && fscanf(file, "%lld", &value) == 1 && value >= 0;
    if (file != NULL) {
        (void)fclose(file);
    }
    return ok ? value : INT64_MAX;
}

/* What the kernel deems available to this process, within the limit of its container. */
int64_t host_memory_available(struct backend *be)
{
    (void)be;
    int64_t bytes = INT64_MAX;
    FILE *const file = fopen("/proc/meminfo", "r");
    char line[256];
    while (file != NULL && fgets(line, sizeof line, file) != NULL) {
        long long kib = 0;
        if (sscanf(line, "MemAvailable: %lld kB", &kib) == 1 && kib >= 0) {
            bytes = kib * 1024;
            break;
        }
    }
    if (file != NULL) {
        (void)fclose(file);
    }
    const int64_t limit = read_bytes_file("/sys/fs/cgroup/memory.max");
    const int64_t used = read_bytes_file("/sys/fs/cgroup/memory.current");
    if (limit != INT64_MAX && used <= limit && limit - used < bytes) {
        bytes = limit - used;
    }
    return bytes;
}
