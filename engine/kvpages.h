/* The pages of the key/value cache: who holds them, and what the full ones hold, so that equal
 * beginnings of texts are computed once. Engine thread only; nothing is allocated after open.
 *
 * A page is free, or held by sequences (its references), or idle: held by nobody, but finished and
 * kept in case its beginning comes again. Finished pages form trees: what the keys and values of a
 * position are depends on the language and on all tokens up to it, so a page is identified by the
 * page before it, which is identified in the same way, the language and its own KV_PAGE tokens; and
 * by a scope, so that texts of one client are not found by another, and by what the request changes
 * in the model. kvpages_use compares all of that; its own hash only says where to look.
 *
 *   free ──take──► held ──keep──► held, finished ──give──► idle ──use──► held, finished
 *     ▲              │                                      │
 *     └─────give─────┘◄──────────────take: the oldest───────┘
 *
 * Who holds a page holds all before it, and gives the last one back first. Hence the pages after an
 * idle one are idle, and for longer: taking the oldest takes a tree's leaves before its roots, and
 * no page outlives the one that identifies it. */
#ifndef ENGINE_KVPAGES_H
#define ENGINE_KVPAGES_H

#include "kernels/backend.h"

struct kvpage;

struct kvpages {
    struct kvpage *page;    /* Owner: this. [n_page] */
    int32_t *free_page;     /* Owner: this. [n_page], the first n_free are free */
    int32_t *bucket;        /* Owner: this. [mask + 1] first page of each chain, -1 = none */
    uint32_t mask;          /* buckets, a power of two, less one */
    uint64_t seed;          /* of the hash: nobody outside can aim at one bucket */
    int32_t oldest, newest; /* idle pages, by when they became idle; -1 = none */
    int n_page, n_free, n_idle;
    int n_finished; /* held and idle ones */
    bool shares;    /* false: no page is ever kept for others */
};

/* What a page holds, or will hold. Without padding: keys are compared and hashed byte by byte. */
struct kvpages_key {
    uint64_t scope;     /* whose texts may share it: request.scope */
    uint64_t change[2]; /* of what the request changes in the model: request.change */
    int32_t before;     /* the page before it, held by the caller; -1: the text begins here */
    int32_t lang;
    int32_t ids[KV_PAGE];
};

enum err_code kvpages_open(struct kvpages *pages, int n_page, bool shares, struct err *err);
void kvpages_close(struct kvpages *pages); /* zeroed or closed ones are fine */

/* Takes all n pages or none: free ones first, then the oldest idle ones. Admission takes the worst
 * case of a sequence at once, so no sequence runs out of pages later and none is pre-empted. */
bool kvpages_take(struct kvpages *pages, int n, int32_t *page);
/* Drops a reference to each, the last one first: page[] in the order of the text. */
void kvpages_give(struct kvpages *pages, int n, const int32_t *page);

/* The owner of the page's content: the one that was given to kvpages_keep. */
uint64_t kvpages_owner(const struct kvpages *pages, int32_t page);
/* The finished page that holds this, with a reference for the caller; -1 if there is none. */
int32_t kvpages_use(struct kvpages *pages, const struct kvpages_key *key);
/* Announces that the caller is filling its page with these tokens, so that others may wait for it.
 * false: another sequence of the same rank or a better one (a lower number) has announced it
 * already. The claim ends with kvpages_keep, when the page is given back, or when a better rank
 * claims the same tokens. */
bool kvpages_claim(struct kvpages *pages, const struct kvpages_key *key, int32_t page, int rank);
/* The caller's page now holds these tokens and will not change again: others may use it. Returns
 * the page that the caller holds from now on: its own, or another one with the same content. */
int32_t kvpages_keep(struct kvpages *pages, const struct kvpages_key *key, int32_t page,
                     uint64_t owner);
/* Empties the table: no present page will be found again. Sequences keep the pages that they
 * hold. */
void kvpages_forget(struct kvpages *pages);

/* Pages held by sequences. */
int kvpages_n_held(const struct kvpages *pages);
/* Pages that hold n positions. */
int kvpages_for(int64_t n_position);

#endif
