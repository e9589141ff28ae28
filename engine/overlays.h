/* The overlays of a running model: rows of its value tables that a request reads instead of the
 * base's (models/overlay.h), by name and version.
 *
 *   overlays_put ─► checked ─► room in the arena ─► filled ─► the name's newest version
 *   overlays_take ─► references to the newest versions of some names, for one request
 *   overlays_leave_all, overlays_drop, another put, overlays_delete ─► the last one that may
 *   read the rows gives the room back, the last reference the description
 *
 * All rows lie in one block of the backend's memory, reserved at the start. A version never
 * changes. Where the backend's memory is the host's, whoever puts also writes the rows, into room
 * that nobody reads yet. A device's is written by the engine's thread alone, a piece between two
 * steps, and overlays_put waits until all pieces are there. Nobody else waits for anything:
 * requests that run keep their versions, and those that come take the newest that is whole.
 *
 * Any thread, where nothing else is said. */
#ifndef ENGINE_OVERLAYS_H
#define ENGINE_OVERLAYS_H

#include "models/model.h"
#include "models/sha256.h"

enum {
    OVERLAY_NAME_MAX = 64 + 1,
    OVERLAYS_MAX = 256,      /* names */
    OVERLAYS_OF_REQUEST = 8, /* overlays that one request may have */
};

struct overlays;
struct overlay_version;

/* A description of a version. */
struct overlay_info {
    char name[OVERLAY_NAME_MAX];
    int version;             /* 1, 2 ... of this name */
    char sha256[SHA256_HEX]; /* of the file */
    int64_t bytes;           /* bytes that it takes of the arena */
    bool add;
    int n_memory;
    int memory[MODEL_PKM_MAX];    /* [n_memory] ascending */
    int64_t n_row[MODEL_PKM_MAX]; /* [n_memory] */
    int64_t n_request;            /* requests that have named it, in any version */
};

/* What a request reads instead of the base's rows. */
struct request_overlays {
    struct overlay_version *version[OVERLAYS_OF_REQUEST]; /* [n] a reference to each */
    int n;
    struct step_redirect *entry; /* Owner: this. [n_entry] ascending by memory */
    int n_entry;
    unsigned char digest[SHA256_BYTES]; /* of the contents, the same in any order; zeros if there
                                         * are none */
    bool has_left; /* no row will be read any more. Only for the engine, and for who drops it */
};

/* The overlays that an API key is bound to. */
struct overlay_names {
    int n; /* 0 = it is not bound */
    char name[OVERLAYS_OF_REQUEST][OVERLAY_NAME_MAX];
};

/* Reserves bytes of the backend's memory for a model that be and info belong to, and opens its
 * files. Owner of *overlays: the caller. */
enum err_code overlays_open(struct overlays **overlays, struct backend *be,
                            const struct model_info *info, const char *model_dir, int64_t bytes,
                            struct err *err);
/* Before the backend closes and after the engine's thread has ended. Versions that requests still
 * hold stay valid, but cannot be read from. NULL is fine. */
void overlays_close(struct overlays *overlays);
/* Whether a name is one: 1 to 64 of a-z, 0-9, point, underscore and hyphen. */
bool overlays_is_name(const char *name);

/* Makes the content of a file, aligned as malloc aligns, the newest version of name; if the content
 * is the same as the newest one's, no version is made. *info describes the result. ERR_ARGUMENT,
 * ERR_FORMAT, ERR_UNSUPPORTED, ERR_NUMERICAL: the file or the name is not valid; ERR_QUEUE_FULL:
 * there is no space for another name or for the bytes; ERR_CLOSED: the engine has ended. Only one
 * call runs at a time, and it waits for the engine's thread if that uploads: do not call it on a
 * thread that others wait for. */
enum err_code overlays_put(struct overlays *overlays, const char *name, const void *file,
                           size_t bytes, struct overlay_info *info, struct err *err);
/* Puts a file under the name that its own name begins with; *name becomes that name. */
enum err_code overlays_read_file(struct overlays *overlays, const char *path,
                                 char name[OVERLAY_NAME_MAX], struct err *err);
/* Removes a name; false: there is none. Requests that use it keep their version. */
bool overlays_delete(struct overlays *overlays, const char *name);

/* Describes all names, at most n_max, in the order of the names. Returns how many. */
int overlays_list(struct overlays *overlays, struct overlay_info *info, int n_max);
/* The newest version of name; false: there is none. */
bool overlays_find(struct overlays *overlays, const char *name, struct overlay_info *info);
/* The bytes that all versions take, and the size of the arena. */
int64_t overlays_used(struct overlays *overlays);
int64_t overlays_bytes(const struct overlays *overlays);
/* The look-ups that were counted, and how many of them an overlay answered. */
void overlays_reads(struct overlays *overlays, long long *n_read, long long *n_hit);

/* The newest versions of n distinct names, n <= OVERLAYS_OF_REQUEST. ERR_IO: a name does not exist,
 * and the message tells which; ERR_ARGUMENT: two overlays have rows for the same slot; ERR_MEMORY.
 * After a failure there is nothing to drop. */
enum err_code overlays_take(struct overlays *overlays, const char *const *name, int n,
                            struct request_overlays *taken, struct err *err);
void overlays_drop(struct request_overlays *taken); /* zeroed is fine */
/* Describes one of the request's overlays: name, version and hash. */
void overlays_tell(const struct request_overlays *taken, int i, struct overlay_info *info);

/* ---- engine only ---- */

/* Calls overlays_open if bytes are given and the model has memories, and puts each file
 * NAME.safetensors of dir; otherwise *overlays stays as it is. dir NULL: no directory. Errors name
 * the file. */
enum err_code overlays_reserve(struct overlays **overlays, struct backend *be,
                               const struct model_info *info, const char *model_dir, int64_t bytes,
                               const char *dir, struct err *err);
/* Called before the engine's thread starts: wake makes that thread call overlays_turn soon. Before
 * this call, the thread that puts an overlay uploads it. */
void overlays_begin(struct overlays *overlays, void (*wake)(void *ctx), void *ctx);
/* The engine's thread has ended: calls of overlays_put that wait for it fail. */
void overlays_end(struct overlays *overlays);
/* Uploads one piece of the overlay that is being put. Returns whether there is more. */
bool overlays_turn(struct overlays *overlays);
/* All results of the request are there: it reads no more rows, but can still be told of. */
void overlays_leave_all(struct request_overlays *taken);
/* Counts which of a row's look-ups in memory m, slots[n], an overlay of the request answered. */
void overlays_count(struct overlays *overlays, const struct request_overlays *taken, int owner,
                    const int32_t *slots, int n);

#endif
