/* The overlays of a running model: rows of its value tables that a request reads instead of the base's
 * (models/overlay.h), by name and version.
 *
 *   overlays_put ─► checked ─► room in the arena ─► filled ─► the name's newest version
 *   overlays_take ─► references to the newest versions of some names, for one request
 *   overlays_drop, another put, overlays_delete ─► the last reference gives the room back
 *
 * All rows lie in one block of the backend's memory, reserved at the start. A version never changes.
 * Where the backend's memory is the host's, whoever puts also writes the rows, into room that nobody
 * reads yet. A device's is written by the engine's thread alone, a piece between two steps, and
 * overlays_put waits until all pieces are there. Nobody else waits for anything: requests that run keep
 * their versions, and those that come take the newest that is whole.
 *
 * Any thread, where nothing else is said. */
#ifndef ENGINE_OVERLAYS_H
#define ENGINE_OVERLAYS_H

#include "models/model.h"
#include "models/sha256.h"

enum {
    OVERLAY_NAME_MAX = 64 + 1,
    OVERLAYS_MAX = 256,      /* names */
    OVERLAYS_OF_REQUEST = 8, /* that one request may have */
};

struct overlays;
struct overlay_version;

/* What is told of a version. */
struct overlay_info {
    char name[OVERLAY_NAME_MAX];
    int version;             /* 1, 2 ... of this name */
    char sha256[SHA256_HEX]; /* of the file */
    int64_t bytes;           /* that it takes of the arena */
    bool add;
    int n_memory;
    int memory[MODEL_PKM_MAX];    /* [n_memory] ascending */
    int64_t n_row[MODEL_PKM_MAX]; /* [n_memory] */
    int64_t n_request;            /* that have named it, in any version */
};

/* What a request reads instead of the base's rows. */
struct request_overlays {
    struct overlay_version *version[OVERLAYS_OF_REQUEST]; /* [n] a reference to each */
    int n;
    struct step_redirect *entry; /* Owner: this. [n_entry] ascending by memory */
    int n_entry;
    unsigned char digest[SHA256_BYTES]; /* of the contents, in any order; zeros without any */
};

/* The overlays that an API key is bound to. */
struct overlay_names {
    int n; /* 0 = it is not bound */
    char name[OVERLAYS_OF_REQUEST][OVERLAY_NAME_MAX];
};

/* Reserves bytes of the backend's memory for a model that be and info belong to, and opens its files. Owner
 * of *overlays: the caller. */
enum err_code overlays_open(struct overlays **overlays, struct backend *be,
                            const struct model_info *info, const char *model_dir, int64_t bytes,
                            struct err *err);
/* Before the backend closes and after the engine's thread has ended. Versions that requests still hold
 * stay valid, but cannot be read from. NULL is fine. */
void overlays_close(struct overlays *overlays);
/* Whether a name is one: 1 to 64 of a-z, 0-9, point, underscore and hyphen. */
bool overlays_is_name(const char *name);

/* Makes the content of a file, aligned as malloc aligns, the newest version of name; the same content as
 * now makes none. *info tells of it. ERR_ARGUMENT, ERR_FORMAT, ERR_UNSUPPORTED, ERR_NUMERICAL: the file
 * or the name is not as it must be; ERR_QUEUE_FULL: names or bytes do not suffice; ERR_CLOSED: the
 * engine has ended. Waits for one put at a time, and for the engine's thread where that uploads: not
 * for a thread that others wait for. */
enum err_code overlays_put(struct overlays *overlays, const char *name, const void *file,
                           size_t bytes, struct overlay_info *info, struct err *err);
/* Puts each file NAME.safetensors of dir; ERR_IO. Errors name the file. */
enum err_code overlays_read_dir(struct overlays *overlays, const char *dir, struct err *err);
/* Puts a file under the name that its own begins with, which *name becomes. */
enum err_code overlays_read_file(struct overlays *overlays, const char *path,
                                 char name[OVERLAY_NAME_MAX], struct err *err);
/* Forgets a name; false: there is none. Requests that have it keep it. */
bool overlays_delete(struct overlays *overlays, const char *name);

/* Tells of all names, at most n_max, in the order of the names. Returns how many. */
int overlays_list(struct overlays *overlays, struct overlay_info *info, int n_max);
/* The newest version of name; false: there is none. */
bool overlays_find(struct overlays *overlays, const char *name, struct overlay_info *info);
/* Bytes of all versions that are held, and of the arena. */
int64_t overlays_used(struct overlays *overlays);
int64_t overlays_bytes(const struct overlays *overlays);
/* Look-ups of rows that were counted, and of them, those that an overlay answered. */
void overlays_reads(struct overlays *overlays, long long *n_read, long long *n_hit);

/* The newest versions of n distinct names, n <= OVERLAYS_OF_REQUEST. ERR_IO: one does not exist, the
 * message names it; ERR_ARGUMENT: two have rows for the same slot; ERR_MEMORY. On failure there is
 * nothing to drop. */
enum err_code overlays_take(struct overlays *overlays, const char *const *name, int n,
                            struct request_overlays *taken, struct err *err);
void overlays_drop(struct request_overlays *taken); /* zeroed is fine */
/* What one of the request's overlays is: name, version and sum. */
void overlays_tell(const struct request_overlays *taken, int i, struct overlay_info *info);

/* ---- engine only ---- */

/* overlays_open and overlays_read_dir, where bytes are given and the model has memories; else *overlays stays
 * as it is. dir NULL: none. */
enum err_code overlays_reserve(struct overlays **overlays, struct backend *be,
                               const struct model_info *info, const char *model_dir, int64_t bytes,
                               const char *dir, struct err *err);
/* Before the engine's thread starts: wake makes it call overlays_turn soon. Until then uploads run on the
 * thread that puts. */
void overlays_begin(struct overlays *overlays, void (*wake)(void *ctx), void *ctx);
/* The engine's thread ends: puts that wait fail. */
void overlays_end(struct overlays *overlays);
/* Uploads one piece of what is being put. Whether there is more. */
bool overlays_turn(struct overlays *overlays);
/* Counts which of a row's look-ups in memory m, slots[n], an overlay of the request answered. */
void overlays_count(struct overlays *overlays, const struct request_overlays *taken, int owner,
                    const int32_t *slots, int n);

#endif
