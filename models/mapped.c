/* See mapped.h. */
#include "models/mapped.h"
#include "models/file.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

/* What the handler of SIGBUS knows. A place is in use while first is not 0. */
struct range {
    atomic_uintptr_t first;
    atomic_size_t bytes;
    atomic_bool cut; /* a read went past the new end of the file */
};

static struct range ranges[MAPPED_MAX];
static pthread_mutex_t ranges_mutex = PTHREAD_MUTEX_INITIALIZER; /* guards the taking of places */
static uintptr_t page_bytes;

/* Replaces the file by zeros from the page that cannot be read to the end of its mapping. It uses
 * only system calls and atomics, because it runs in the middle of a computation. */
static void on_sigbus(int signal_number, siginfo_t *info, void *context)
{
    (void)context;
    const int saved = errno;
    const uintptr_t page = (uintptr_t)info->si_addr & ~(page_bytes - 1);
    for (int i = 0; i < MAPPED_MAX && info->si_code > 0; i++) {
        const uintptr_t first = atomic_load(&ranges[i].first);
        const size_t bytes = atomic_load(&ranges[i].bytes);
        if (first == 0 || page < first || page - first >= bytes) {
            continue;
        }
        void *const zeros = mmap((void *)page, bytes - (page - first), PROT_READ,
                                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
        if (zeros != MAP_FAILED) {
            atomic_store(&ranges[i].cut, true);
            errno = saved;
            return;
        }
    }
    (void)signal(signal_number, SIG_DFL); /* no page of ours */
    (void)raise(signal_number);
}

static void install_handler(void)
{
    page_bytes = (uintptr_t)sysconf(_SC_PAGESIZE);
    struct sigaction action = {.sa_sigaction = on_sigbus, .sa_flags = SA_SIGINFO};
    CHECK(sigaction(SIGBUS, &action, NULL) == 0);
}

static int take_range(void *data, size_t bytes)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    CHECK(pthread_once(&once, install_handler) == 0);
    CHECK(pthread_mutex_lock(&ranges_mutex) == 0);
    int i = 0;
    while (i < MAPPED_MAX && atomic_load(&ranges[i].first) != 0) {
        i++;
    }
    if (i < MAPPED_MAX) {
        atomic_store(&ranges[i].cut, false);
        atomic_store(&ranges[i].bytes, bytes);
        atomic_store(&ranges[i].first, (uintptr_t)data);
    }
    CHECK(pthread_mutex_unlock(&ranges_mutex) == 0);
    return i < MAPPED_MAX ? i : -1;
}

static enum err_code map(struct mapped *mapped, size_t bytes_min, struct err *err)
{
    struct stat status = {0};
    if (fstat(mapped->fd, &status) != 0) {
        return err_set(err, ERR_IO, "%s: cannot be looked at: %s", mapped->path, strerror(errno));
    }
    if (status.st_size < (off_t)bytes_min) {
        return err_set(err, ERR_FORMAT, "%s: not a safetensors file of at least %zu bytes",
                       mapped->path, bytes_min);
    }
    mapped->bytes = (size_t)status.st_size;
    mapped->modified = status.st_mtim;
    void *const data = mmap(NULL, mapped->bytes, PROT_READ, MAP_PRIVATE, mapped->fd, 0);
    if (data == MAP_FAILED) {
        return err_set(err, ERR_IO, "%s: cannot map %zu bytes: %s", mapped->path, mapped->bytes,
                       strerror(errno));
    }
    mapped->range = take_range(data, mapped->bytes);
    if (mapped->range < 0) {
        (void)munmap(data, mapped->bytes);
        return err_set(err, ERR_IO, "%s: cannot map it beside %d other files", mapped->path,
                       MAPPED_MAX);
    }
    mapped->data = data;
    return ERR_OK;
}

enum err_code mapped_open(struct mapped *mapped, const char *path, size_t bytes_min,
                          struct err *err)
{
    FILE *file = NULL;
    *mapped = (struct mapped){.path = path};
    enum err_code code = file_open(&file, path, false, err);
    if (code != ERR_OK) {
        return code;
    }
    mapped->fd = fcntl(fileno(file), F_DUPFD_CLOEXEC, 3);
    if (mapped->fd < 0) {
        code = err_set(err, ERR_IO, "%s: cannot open: %s", path, strerror(errno));
    } else {
        code = map(mapped, bytes_min, err);
    }
    if (code != ERR_OK && mapped->fd >= 0) {
        (void)close(mapped->fd);
    }
    (void)fclose(file);
    return code;
}

void mapped_close(struct mapped *mapped)
{
    if (mapped->data != NULL) {
        atomic_store(&ranges[mapped->range].first, 0);
        (void)munmap(mapped->data, mapped->bytes);
        (void)close(mapped->fd);
    }
    *mapped = (struct mapped){0};
}

enum err_code mapped_check_reads(const struct mapped *mapped, struct err *err)
{
    return !atomic_load(&ranges[mapped->range].cut)
               ? ERR_OK
               : err_set(err, ERR_IO,
                         "%s: the file was cut short, or could not be read, while it was in use: "
                         "replace a model by renaming new files into place, and start again",
                         mapped->path);
}

enum err_code mapped_check(const struct mapped *mapped, struct err *err)
{
    struct stat now;
    if (mapped_check_reads(mapped, err) != ERR_OK) {
        return ERR_IO;
    }
    const bool same = fstat(mapped->fd, &now) == 0 && (size_t)now.st_size == mapped->bytes &&
                      now.st_mtim.tv_sec == mapped->modified.tv_sec &&
                      now.st_mtim.tv_nsec == mapped->modified.tv_nsec;
    return same ? ERR_OK
                : err_set(err, ERR_IO,
                          "%s: the file was changed while it was in use: replace a model by "
                          "renaming new files into place, and start again",
                          mapped->path);
}
