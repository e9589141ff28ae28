/* The store of overlays: see overlays.h. */
#include "engine/overlays_inside.h"

#include "models/overlay_image.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { PIECE_BYTES = 1 << 20, ARENA_ALIGN = 64 };

/* ---- opening and closing -------------------------------------------------------------------- */

static void unref_store(struct overlays *overlays)
{
    if (atomic_fetch_sub_explicit(&overlays->refs, 1, memory_order_acq_rel) == 1) {
        (void)pthread_mutex_destroy(&overlays->lock);
        (void)pthread_mutex_destroy(&overlays->put_lock);
        (void)pthread_cond_destroy(&overlays->uploaded);
        free(overlays);
    }
}

enum err_code overlays_open(struct overlays **overlays, struct backend *be,
                            const struct model_info *info, const char *model_dir, int64_t bytes,
                            struct err *err)
{
    *overlays = NULL;
    struct overlays *const o = calloc(1, sizeof *o);
    if (o == NULL) {
        return err_set(err, ERR_MEMORY, "no memory for the list of overlays");
    }
    o->be = be;
    o->info = info;
    o->bytes = (size_t)bytes;
    atomic_init(&o->refs, 1);
    CHECK(pthread_mutex_init(&o->lock, NULL) == 0 && pthread_mutex_init(&o->put_lock, NULL) == 0);
    CHECK(pthread_cond_init(&o->uploaded, NULL) == 0);
    void *arena = NULL;
    enum err_code code =
        be->op->buffer_new(be, &arena, o->bytes, "overlays (--overlay-bytes)", err);
    o->arena = arena;
    code = code == ERR_OK ? tensors_open(&o->tensors, model_dir, err) : code;
    if (code != ERR_OK) {
        overlays_close(o);
        return code;
    }
    *overlays = o;
    return ERR_OK;
}

/* NULL is fine. */
static void leave_and_unref(struct overlay_version *version)
{
    if (version != NULL) {
        overlays_leave(version);
        overlays_unref(version);
    }
}

void overlays_close(struct overlays *overlays)
{
    if (overlays == NULL) {
        return;
    }
    for (int i = 0; i < OVERLAYS_MAX; i++) {
        leave_and_unref(overlays->name[i].newest);
        overlays->name[i].newest = NULL;
    }
    tensors_close(overlays->tensors);
    if (overlays->arena != NULL) {
        overlays->be->op->buffer_free(overlays->be, overlays->arena);
    }
    unref_store(overlays);
}

/* ---- versions ------------------------------------------------------------------------------- */

/* Frees a version that is in no list. */
static void free_version(struct overlay_version *version)
{
    for (int i = 0; i < version->info.n_memory; i++) {
        free(version->slots[i].slot);
    }
    free(version);
}

void overlays_leave(struct overlay_version *version)
{
    if (atomic_fetch_sub_explicit(&version->readers, 1, memory_order_acq_rel) != 1) {
        return;
    }
    struct overlays *const store = version->store;
    pthread_mutex_lock(&store->lock);
    struct overlay_version **at = &store->first;
    while (*at != version) {
        at = &(*at)->next;
    }
    *at = version->next;
    store->used -= version->bytes;
    pthread_mutex_unlock(&store->lock);
}

void overlays_unref(struct overlay_version *version)
{
    if (atomic_fetch_sub_explicit(&version->refs, 1, memory_order_acq_rel) == 1) {
        struct overlays *const store = version->store;
        free_version(version);
        unref_store(store);
    }
}

struct overlay_name *overlays_find_name(struct overlays *overlays, const char *name)
{
    for (int i = 0; i < OVERLAYS_MAX; i++) {
        if (overlays->name[i].newest != NULL && strcmp(overlays->name[i].name, name) == 0) {
            return &overlays->name[i];
        }
    }
    return NULL;
}

void overlays_tell_newest(const struct overlay_name *name, struct overlay_info *info)
{
    *info = name->newest->info;
    info->n_request = name->n_request;
}

/* Takes the first gap of the arena that is large enough, and enters the version into the list
 * there. */
static bool take_room(struct overlays *overlays, struct overlay_version *version)
{
    pthread_mutex_lock(&overlays->lock);
    struct overlay_version **at = &overlays->first;
    size_t first = 0;
    while (*at != NULL && (*at)->first - first < version->bytes) {
        first = (*at)->first + (*at)->bytes;
        at = &(*at)->next;
    }
    const bool fits = version->bytes <= overlays->bytes - first;
    if (fits) {
        version->first = first;
        version->next = *at;
        *at = version;
        overlays->used += version->bytes;
        atomic_fetch_add_explicit(&overlays->refs, 1, memory_order_relaxed);
    }
    pthread_mutex_unlock(&overlays->lock);
    return fits;
}

/* The entry for a name that is or will be there: its own, else one that was never used, else that
 * of a deleted name; NULL if there are too many names. Under the lock. */
static struct overlay_name *entry_for(struct overlays *overlays, const char *name)
{
    struct overlay_name *unused = NULL;
    for (int i = 0; i < OVERLAYS_MAX; i++) {
        struct overlay_name *const entry = &overlays->name[i];
        if (strcmp(entry->name, name) == 0) {
            return entry;
        }
        if (entry->newest == NULL &&
            (unused == NULL || (unused->name[0] != '\0' && entry->name[0] == '\0'))) {
            unused = entry;
        }
    }
    if (unused != NULL) {
        *unused = (struct overlay_name){0};
        (void)snprintf(unused->name, sizeof unused->name, "%s", name);
    }
    return unused;
}

/* Makes the version the newest of its name, which takes over its reference. false: there are too
 * many names. */
static bool publish(struct overlays *overlays, struct overlay_version *version,
                    struct overlay_info *info)
{
    struct overlay_version *before = NULL;
    pthread_mutex_lock(&overlays->lock);
    struct overlay_name *const name = entry_for(overlays, version->info.name);
    if (name != NULL) {
        before = name->newest;
        version->info.version = ++name->n_version;
        name->newest = version;
        overlays_tell_newest(name, info);
    }
    pthread_mutex_unlock(&overlays->lock);
    leave_and_unref(before);
    return name != NULL;
}

/* ---- putting -------------------------------------------------------------------------------- */

bool overlays_is_name(const char *name)
{
    static const char allowed[] = "abcdefghijklmnopqrstuvwxyz0123456789._-";
    const size_t n = strlen(name);
    return n >= 1 && n < OVERLAY_NAME_MAX && strspn(name, allowed) == n;
}

/* Whether the name's newest version has this content already; if so, *info describes it. */
static bool is_known(struct overlays *overlays, const char *name, const char *sha256,
                     struct overlay_info *info)
{
    pthread_mutex_lock(&overlays->lock);
    const struct overlay_name *const entry = overlays_find_name(overlays, name);
    const bool known = entry != NULL && strcmp(entry->newest->info.sha256, sha256) == 0;
    if (known) {
        overlays_tell_newest(entry, info);
    }
    pthread_mutex_unlock(&overlays->lock);
    return known;
}

/* Computes the hash of each of the base's tables that the overlay changes, once. Under put_lock. */
static enum err_code sum_bases(struct overlays *overlays, const struct overlay *overlay,
                               struct err *err)
{
    enum err_code code = ERR_OK;
    for (int i = 0; i < overlay->n_memory && code == ERR_OK; i++) {
        const int m = overlay->memory[i].memory;
        if (overlays->hash[m][0] == '\0') {
            code = overlay_base_hash(overlays->hash[m], overlays->tensors, overlays->info, m, err);
        }
    }
    return code == ERR_OK ? tensors_check_files(overlays->tensors, true, err) : code;
}

/* The version's own copy of what the overlay names; NULL without memory. */
static struct overlay_version *new_version(struct overlays *overlays, const char *name,
                                           const struct overlay *overlay)
{
    struct overlay_version *const version = calloc(1, sizeof *version);
    if (version == NULL) {
        return NULL;
    }
    version->store = overlays;
    atomic_init(&version->refs, 1);
    atomic_init(&version->readers, 1);
    (void)snprintf(version->info.name, sizeof version->info.name, "%s", name);
    memcpy(version->info.sha256, overlay->sha256, sizeof version->info.sha256);
    version->info.add = overlay->add;
    for (int i = 0; i < overlay->n_memory; i++) {
        const struct overlay_memory *const from = &overlay->memory[i];
        struct overlay_slots *const to = &version->slots[i];
        *to = (struct overlay_slots){from->memory, from->n,
                                     malloc((size_t)from->n * sizeof *to->slot)};
        version->info.n_memory++;
        version->info.memory[i] = from->memory;
        version->info.n_row[i] = from->n;
        if (to->slot == NULL) {
            free_version(version);
            return NULL;
        }
        memcpy(to->slot, from->slot, (size_t)from->n * sizeof *to->slot);
    }
    struct sha256 sum;
    sha256_begin(&sum);
    sha256_add(&sum, overlay->sha256, sizeof overlay->sha256);
    sha256_end(&sum, version->digest);
    return version;
}

/* Uploads a piece of the version that is being put, if there is one. Returns whether there is more.
 * Called by the engine's thread, or before that runs: nobody else changes the upload until it is
 * complete. */
bool overlays_turn(struct overlays *overlays)
{
    pthread_mutex_lock(&overlays->lock);
    struct overlay_upload up = overlays->upload;
    pthread_mutex_unlock(&overlays->lock);
    if (up.from == NULL) {
        return false;
    }
    const size_t n = up.bytes < PIECE_BYTES ? up.bytes : PIECE_BYTES;
    const struct tensor to = tensor_make(overlays->arena + up.at, 1, (int64_t)n / 4, DTYPE_I32);
    overlays->be->op->upload(overlays->be, to, up.from);
    up = (struct overlay_upload){n < up.bytes ? up.from + n : NULL, up.at + n, up.bytes - n};
    pthread_mutex_lock(&overlays->lock);
    overlays->upload = up;
    (void)pthread_cond_broadcast(&overlays->uploaded);
    pthread_mutex_unlock(&overlays->lock);
    return up.from != NULL;
}

/* Brings the block to the device. Under put_lock. */
static enum err_code upload(struct overlays *overlays, const struct overlay_version *version,
                            const void *block, struct err *err)
{
    pthread_mutex_lock(&overlays->lock);
    overlays->upload = (struct overlay_upload){block, version->first, version->bytes};
    void (*const wake)(void *ctx) = overlays->wake;
    pthread_mutex_unlock(&overlays->lock);
    if (wake == NULL) { /* nobody else uses the backend yet */
        while (overlays_turn(overlays)) {
        }
    } else {
        wake(overlays->wake_ctx);
    }
    pthread_mutex_lock(&overlays->lock);
    while (overlays->upload.from != NULL && !overlays->ended) {
        (void)pthread_cond_wait(&overlays->uploaded, &overlays->lock);
    }
    const bool is_whole = overlays->upload.from == NULL;
    overlays->upload.from = NULL;
    pthread_mutex_unlock(&overlays->lock);
    return is_whole ? ERR_OK : err_set(err, ERR_CLOSED, "the engine has ended: nothing was put");
}

void overlays_begin(struct overlays *overlays, void (*wake)(void *ctx), void *ctx)
{
    overlays->wake = wake;
    overlays->wake_ctx = ctx;
}

void overlays_end(struct overlays *overlays)
{
    pthread_mutex_lock(&overlays->lock);
    overlays->ended = true;
    (void)pthread_cond_broadcast(&overlays->uploaded);
    pthread_mutex_unlock(&overlays->lock);
}

/* Writes the rows into the version's part of the arena. Under put_lock. */
static enum err_code write_rows(struct overlays *overlays, struct overlay_version *version,
                                const struct overlay_image *image, const struct overlay *overlay,
                                struct err *err)
{
    char *const at = overlays->arena + version->first;
    void *const block = overlays->be->is_host ? at : malloc(version->bytes);
    if (block == NULL) {
        return err_set(err, ERR_MEMORY, "%s: no memory for its %zu bytes", overlay->path,
                       version->bytes);
    }
    for (int i = 0; i < image->n_memory; i++) {
        version->redirect[i] = overlay_image_redirect(image, i, at);
    }
    enum err_code code = overlay_image_fill(block, image, overlay, err);
    if (code == ERR_OK) {
        code = tensors_check_files(overlays->tensors, true, err);
    }
    if (!overlays->be->is_host) {
        code = code == ERR_OK ? upload(overlays, version, block, err) : code;
        free(block);
    }
    return code;
}

/* Puts a checked overlay. Under put_lock. */
static enum err_code put_checked(struct overlays *overlays, const char *name,
                                 const struct overlay *overlay, struct overlay_info *info,
                                 struct err *err)
{
    struct overlay_image image;
    enum err_code code =
        overlay_image_plan(&image, overlay, overlays->tensors, overlays->info, overlays->be, err);
    if (code != ERR_OK) {
        return code;
    }
    struct overlay_version *const version = new_version(overlays, name, overlay);
    if (version == NULL) {
        return err_set(err, ERR_MEMORY, "%s: no memory for its slots", overlay->path);
    }
    version->bytes = (image.bytes + ARENA_ALIGN - 1) / ARENA_ALIGN * ARENA_ALIGN;
    version->info.bytes = (int64_t)version->bytes;
    if (!take_room(overlays, version)) {
        code = err_set(err, ERR_QUEUE_FULL,
                       "%s: takes %zu bytes in one piece, and %lld of the %zu for all overlays "
                       "(--overlay-bytes) are in use: delete some, or raise that",
                       overlay->path, version->bytes, (long long)overlays_used(overlays),
                       overlays->bytes);
        free_version(version);
        return code;
    }
    code = write_rows(overlays, version, &image, overlay, err);
    if (code == ERR_OK && !publish(overlays, version, info)) {
        code = err_set(err, ERR_QUEUE_FULL,
                       "%s: there are %d overlays, which is the limit: delete one", name,
                       OVERLAYS_MAX);
    }
    if (code != ERR_OK) {
        leave_and_unref(version);
    }
    return code;
}

enum err_code overlays_put(struct overlays *overlays, const char *name, const void *file,
                           size_t bytes, struct overlay_info *info, struct err *err)
{
    struct overlay overlay;
    if (!overlays_is_name(name)) {
        return err_set(err, ERR_ARGUMENT,
                       "an overlay's name must be 1 to %d of a-z, 0-9, \".\", \"_\" and \"-\", not "
                       "\"%.80s\"",
                       OVERLAY_NAME_MAX - 1, name);
    }
    enum err_code code = overlay_parse(&overlay, file, bytes, name, err);
    if (code != ERR_OK) {
        return code;
    }
    pthread_mutex_lock(&overlays->put_lock);
    code = overlay_check(&overlay, overlays->info, NULL, err);
    code = code == ERR_OK ? sum_bases(overlays, &overlay, err) : code;
    if (code == ERR_OK) {
        const char(*const hash)[SHA256_HEX] = (const char(*)[SHA256_HEX])overlays->hash;
        code = overlay_check(&overlay, overlays->info, hash, err);
    }
    if (code == ERR_OK && !is_known(overlays, name, overlay.sha256, info)) {
        code = put_checked(overlays, name, &overlay, info, err);
    }
    pthread_mutex_unlock(&overlays->put_lock);
    overlay_free(&overlay);
    return code;
}

bool overlays_delete(struct overlays *overlays, const char *name)
{
    struct overlay_version *newest = NULL;
    pthread_mutex_lock(&overlays->lock);
    struct overlay_name *const entry = overlays_find_name(overlays, name);
    if (entry != NULL) {
        newest = entry->newest;
        entry->newest = NULL;
    }
    pthread_mutex_unlock(&overlays->lock);
    leave_and_unref(newest);
    return entry != NULL;
}
