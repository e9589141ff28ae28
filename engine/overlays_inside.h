/* The inside of the store of overlays: what overlays.c and overlays_request.c share. */
#ifndef ENGINE_OVERLAYS_INSIDE_H
#define ENGINE_OVERLAYS_INSIDE_H

#include "engine/overlays.h"
#include "models/tensors.h"

#include <pthread.h>
#include <stdatomic.h>

/* The slots of one memory: to find out whether two overlays share one, and which look-ups hit. */
struct overlay_slots {
    int memory;
    int64_t n;
    int32_t *slot; /* Owner: the version. [n] ascending */
};

struct overlay_version {
    struct overlays *store;       /* one reference */
    atomic_int refs;              /* requests, and the name while it is the newest */
    atomic_int readers;           /* those of them that may read its rows still */
    struct overlay_info info;     /* but n_request */
    size_t first, bytes;          /* of the arena */
    struct overlay_version *next; /* Guard: lock. The list of all versions, by first */
    struct step_redirect redirect[MODEL_PKM_MAX]; /* [n_memory] */
    struct overlay_slots slots[MODEL_PKM_MAX];    /* [n_memory] */
    unsigned char digest[SHA256_BYTES];           /* of the changes to the rows */
};

/* A name that was deleted keeps its entry, so that its versions go on counting, until another name
 * needs it. */
struct overlay_name {
    char name[OVERLAY_NAME_MAX];    /* "" = was never used */
    struct overlay_version *newest; /* NULL = there is none: deleted, or never used */
    int n_version;                  /* versions that there have been */
    int64_t n_request;
};

/* Bytes on their way to the device. */
struct overlay_upload {
    const char *from; /* NULL: none */
    size_t at, bytes; /* of the arena: the part that is still to be written */
};

struct overlays {
    struct backend *be;            /* Borrowed: until overlays_close */
    const struct model_info *info; /* Borrowed: likewise */
    struct tensors *tensors;       /* Owner: this. The base's files */
    char *arena;                   /* Owner: this. In the backend's memory. [bytes] */
    size_t bytes;
    atomic_int refs; /* the engine, and each version */
    /* One put at a time. Guard of hash: this. */
    pthread_mutex_t put_lock;
    char hash[MODEL_PKM_MAX][SHA256_HEX]; /* of the base's tables; "" = not summed yet */

    pthread_mutex_t lock; /* guards all that follows but the atomics */
    pthread_cond_t uploaded;
    struct overlay_name name[OVERLAYS_MAX];
    struct overlay_version *first;
    size_t used;
    struct overlay_upload upload;
    void (*wake)(void *ctx); /* NULL: the engine's thread does not run */
    void *wake_ctx;
    bool ended;
    atomic_llong n_read, n_hit;
};

/* Will read the rows no more: the last reader gives the room back. The reference stays. */
void overlays_leave(struct overlay_version *version);
/* Drops the reference of who has left. */
void overlays_unref(struct overlay_version *version);
/* The entry of a name that has a version, or NULL. Under the lock. */
struct overlay_name *overlays_find_name(struct overlays *overlays, const char *name);
/* Copies the description of the newest version. Under the lock. */
void overlays_tell_newest(const struct overlay_name *name, struct overlay_info *info);

#endif
