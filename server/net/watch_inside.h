/* What the files of the watcher share; not for others. */
#ifndef SERVER_WATCH_INSIDE_H
#define SERVER_WATCH_INSIDE_H

#include "server/net/watch.h"

#include <pthread.h>

enum { WATCH_TICK_MS = 250 };

enum conn_state { CONN_FREE, CONN_HEAD, CONN_BODY, CONN_REFUSED, CONN_ANSWER, CONN_IDLE };

/* Guard of all but watch and index: mutex. */
struct watch_conn {
    struct watch *watch; /* Borrowed */
    uint32_t index;
    pthread_mutex_t mutex;
    uint32_t generation; /* counts uses of the entry: late epoll events are told apart */
    enum conn_state state;
    int fd;
    bool surplus;
    bool polled;         /* fd is in the epoll set */
    int64_t deadline_us; /* of HEAD, BODY, REFUSED and IDLE; 0 = none */
    uint64_t idle_bytes; /* IDLE: bytes received until the first look, 0 = not looked yet */
    struct exchange *x;  /* Borrowed from http.c while BODY, REFUSED, ANSWER */
    void *connection;    /* Borrowed: the library's, while asleep */
    bool asleep, woken;
    bool detached;   /* asleep, and another thread works on x: nothing here may touch it */
    bool left;       /* the client hung up while its exchange was awake */
    bool ended;      /* at the last look, the client had sent its last byte and all had been read */
    int64_t read_us; /* ANSWER: since when bytes have been waiting in the kernel for the client, 0 =
                      * none are */
    uint64_t read_bytes; /* what the client had taken then */
};

struct watch {
    struct watch_config config;
    struct watch_conn *conn; /* Owner: this. [config.n_conn] */
    atomic_int n_used;
    int epoll_fd, stop_fd;
    pthread_t thread;
    bool has_thread;
    atomic_int search; /* where the search for a free entry begins */
};

/* As watch_refuse and watch_end (watch_end.c), under the entry's mutex: the first two while BODY,
 * the last while ANSWER. One that is cut off has little time to read why: its place or memory is
 * wanted. */
void watch_refuse_locked(struct watch_conn *conn, const struct api_error *error);
void watch_cut_locked(struct watch_conn *conn, const struct api_error *error);
void watch_end_locked(struct watch_conn *conn, const char *code);

/* All places are taken: shuts the connection that has the least claim to its place, for another
 * one (watch_room.c). One that has said nothing has less time than one that is kept. Returns
 * whether the other one is surplus: all stay, or the one that was shut was surplus itself. */
bool watch_replace(struct watch *watch);

#endif
