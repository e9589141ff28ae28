/* Descriptions of overlays, and the overlays of a request: see overlays.h. */
#include "engine/overlays_inside.h"

#include <stdlib.h>
#include <string.h>

/* ---- telling -------------------------------------------------------------------------------- */

static int compare_names(const void *a, const void *b)
{
    return strcmp(((const struct overlay_info *)a)->name, ((const struct overlay_info *)b)->name);
}

int overlays_list(struct overlays *overlays, struct overlay_info *info, int n_max)
{
    int n = 0;
    pthread_mutex_lock(&overlays->lock);
    for (int i = 0; i < OVERLAYS_MAX && n < n_max; i++) {
        if (overlays->name[i].newest != NULL) {
            overlays_tell_newest(&overlays->name[i], &info[n++]);
        }
    }
    pthread_mutex_unlock(&overlays->lock);
    qsort(info, (size_t)n, sizeof *info, compare_names);
    return n;
}

bool overlays_find(struct overlays *overlays, const char *name, struct overlay_info *info)
{
    pthread_mutex_lock(&overlays->lock);
    const struct overlay_name *const entry = overlays_find_name(overlays, name);
    if (entry != NULL) {
        overlays_tell_newest(entry, info);
    }
    pthread_mutex_unlock(&overlays->lock);
    return entry != NULL;
}

int64_t overlays_used(struct overlays *overlays)
{
    pthread_mutex_lock(&overlays->lock);
    const size_t used = overlays->used;
    pthread_mutex_unlock(&overlays->lock);
    return (int64_t)used;
}

int64_t overlays_bytes(const struct overlays *overlays)
{
    return (int64_t)overlays->bytes;
}

void overlays_reads(struct overlays *overlays, long long *n_read, long long *n_hit)
{
    *n_hit = atomic_load_explicit(&overlays->n_hit, memory_order_relaxed);
    *n_read = atomic_load_explicit(&overlays->n_read, memory_order_relaxed);
}

/* ---- requests ------------------------------------------------------------------------------- */

/* The first slot that both lists have, or -1. */
static int32_t shared_slot(const struct overlay_slots *a, const struct overlay_slots *b)
{
    int64_t i = 0;
    int64_t j = 0;
    while (i < a->n && j < b->n) {
        if (a->slot[i] == b->slot[j]) {
            return a->slot[i];
        }
        const bool first = a->slot[i] < b->slot[j];
        i += first;
        j += !first;
    }
    return -1;
}

static enum err_code check_apart(const struct overlay_version *a, const struct overlay_version *b,
                                 struct err *err)
{
    for (int i = 0; i < a->info.n_memory; i++) {
        for (int j = 0; j < b->info.n_memory; j++) {
            const struct overlay_slots *const one = &a->slots[i];
            const int32_t slot =
                one->memory == b->slots[j].memory ? shared_slot(one, &b->slots[j]) : -1;
            if (slot >= 0) {
                return err_set(err, ERR_ARGUMENT,
                               "the overlays %s and %s both have rows for slot %d of memory %d: "
                               "those of one request must not share any",
                               a->info.name, b->info.name, slot, one->memory);
            }
        }
    }
    return ERR_OK;
}

/* By content, so that the same overlays in another order or under other names make the same
 * digest. */
static int compare_digests(const void *a, const void *b)
{
    return memcmp(a, b, SHA256_BYTES);
}

static void digest_all(struct request_overlays *taken)
{
    unsigned char all[OVERLAYS_OF_REQUEST][SHA256_BYTES];
    for (int i = 0; i < taken->n; i++) {
        memcpy(all[i], taken->version[i]->digest, SHA256_BYTES);
    }
    qsort(all, (size_t)taken->n, sizeof all[0], compare_digests);
    struct sha256 sum;
    sha256_begin(&sum);
    sha256_add(&sum, all, (size_t)taken->n * sizeof all[0]);
    sha256_end(&sum, taken->digest);
}

/* The redirections of all, ascending by memory. false: no memory. */
static bool list_entries(struct request_overlays *taken)
{
    int n = 1; /* there is at least one, because malloc(0) may return NULL */
    for (int i = 0; i < taken->n; i++) {
        n += taken->version[i]->info.n_memory;
    }
    taken->entry = malloc((size_t)n * sizeof *taken->entry);
    for (int m = 0; m < MODEL_PKM_MAX && taken->entry != NULL; m++) {
        for (int i = 0; i < taken->n; i++) {
            const struct overlay_version *const version = taken->version[i];
            for (int j = 0; j < version->info.n_memory; j++) {
                if (version->info.memory[j] == m) {
                    taken->entry[taken->n_entry++] = version->redirect[j];
                }
            }
        }
    }
    return taken->entry != NULL;
}

/* References to the newest versions. */
static enum err_code take_newest(struct overlays *overlays, const char *const *name, int n,
                                 struct request_overlays *taken, struct err *err)
{
    enum err_code code = ERR_OK;
    pthread_mutex_lock(&overlays->lock);
    for (int i = 0; i < n && code == ERR_OK; i++) {
        struct overlay_name *const entry = overlays_find_name(overlays, name[i]);
        if (entry == NULL) {
            code = err_set(err, ERR_IO, "there is no overlay \"%.80s\" here", name[i]);
            continue;
        }
        atomic_fetch_add_explicit(&entry->newest->refs, 1, memory_order_relaxed);
        atomic_fetch_add_explicit(&entry->newest->readers, 1, memory_order_relaxed);
        taken->version[taken->n++] = entry->newest;
        entry->n_request++;
    }
    pthread_mutex_unlock(&overlays->lock);
    return code;
}

enum err_code overlays_take(struct overlays *overlays, const char *const *name, int n,
                            struct request_overlays *taken, struct err *err)
{
    CHECK(n >= 1 && n <= OVERLAYS_OF_REQUEST);
    *taken = (struct request_overlays){0};
    enum err_code code = take_newest(overlays, name, n, taken, err);
    for (int i = 0; i < taken->n; i++) {
        for (int j = 0; j < i && code == ERR_OK; j++) {
            code = check_apart(taken->version[j], taken->version[i], err);
        }
    }
    if (code == ERR_OK && !list_entries(taken)) {
        code = err_set(err, ERR_MEMORY, "no memory for the request's overlays");
    }
    if (code != ERR_OK) {
        overlays_drop(taken);
        return code;
    }
    digest_all(taken);
    return ERR_OK;
}

void overlays_leave_all(struct request_overlays *taken)
{
    for (int i = 0; i < taken->n; i++) {
        overlays_leave(taken->version[i]);
    }
    taken->has_left = true;
}

void overlays_drop(struct request_overlays *taken)
{
    if (!taken->has_left) {
        overlays_leave_all(taken);
    }
    for (int i = 0; i < taken->n; i++) {
        overlays_unref(taken->version[i]);
    }
    free(taken->entry);
    *taken = (struct request_overlays){0};
}

void overlays_tell(const struct request_overlays *taken, int i, struct overlay_info *info)
{
    *info = taken->version[i]->info;
}

/* A search by halves. */
static bool has_slot(const struct overlay_slots *slots, int32_t slot)
{
    int64_t first = 0;
    int64_t n = slots->n;
    while (n > 0) { /* slots before first are smaller, those from first + n on are not */
        const int64_t half = n / 2;
        const bool smaller = slots->slot[first + half] < slot;
        first += smaller ? half + 1 : 0;
        n = smaller ? n - half - 1 : half;
    }
    return first < slots->n && slots->slot[first] == slot;
}

void overlays_count(struct overlays *overlays, const struct request_overlays *taken, int owner,
                    const int32_t *slots, int n)
{
    long long n_hit = 0;
    for (int v = 0; v < taken->n; v++) {
        const struct overlay_version *const version = taken->version[v];
        for (int m = 0; m < version->info.n_memory; m++) {
            for (int j = 0; j < n && version->slots[m].memory == owner; j++) {
                n_hit += has_slot(&version->slots[m], slots[j]);
            }
        }
    }
    atomic_fetch_add_explicit(&overlays->n_hit, n_hit, memory_order_relaxed);
    atomic_fetch_add_explicit(&overlays->n_read, n, memory_order_relaxed);
}
