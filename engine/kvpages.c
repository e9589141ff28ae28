/* The pages of the cache and what they hold: see kvpages.h. */
#include "engine/kvpages.h"

#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

_Static_assert(sizeof(struct kvpages_key) == 32 + KV_PAGE * sizeof(int32_t), "keys have padding");

enum page_state {
    PAGE_PLAIN,    /* not in the table: only its holder knows what it holds */
    PAGE_CLAIMED,  /* in the table: its holder is filling it */
    PAGE_FINISHED, /* in the table: anyone may use it */
};

struct kvpage {
    int32_t refs;
    enum page_state state;
    int rank;               /* claimed: of who claimed it */
    int n_after;            /* pages in the table that follow this one */
    struct kvpages_key key; /* in the table */
    uint64_t owner;         /* finished: who did it */
    int32_t chain;          /* the next page of its bucket */
    int32_t older, newer;   /* while idle */
};

enum err_code kvpages_open(struct kvpages *pages, int n_page, bool shares, struct err *err)
{
    CHECK(n_page > 0);
    uint32_t n_bucket = 1;
    while (n_bucket < (uint32_t)n_page) {
        n_bucket *= 2;
    }
    *pages = (struct kvpages){.page = calloc((size_t)n_page, sizeof *pages->page),
                              .free_page = malloc((size_t)n_page * sizeof(int32_t)),
                              .bucket = malloc(n_bucket * sizeof(int32_t)),
                              .mask = n_bucket - 1,
                              .oldest = -1,
                              .newest = -1,
                              .n_page = n_page,
                              .n_free = n_page,
                              .shares = shares};
    if (pages->page == NULL || pages->free_page == NULL || pages->bucket == NULL) {
        kvpages_close(pages);
        return err_set(err, ERR_MEMORY, "no memory for a list of %d cache pages", n_page);
    }
    for (int i = 0; i < n_page; i++) {
        pages->free_page[i] = n_page - 1 - i; /* page 0 is taken first */
    }
    for (uint32_t b = 0; b < n_bucket; b++) {
        pages->bucket[b] = -1;
    }
    /* A failure leaves 0: results never depend on the seed. */
    (void)!getrandom(&pages->seed, sizeof pages->seed, GRND_NONBLOCK);
    return ERR_OK;
}

void kvpages_close(struct kvpages *pages)
{
    free(pages->page);
    free(pages->free_page);
    free(pages->bucket);
    *pages = (struct kvpages){0};
}

int kvpages_n_held(const struct kvpages *pages)
{
    return pages->n_page - pages->n_free - pages->n_idle;
}

int kvpages_for(int64_t n_position)
{
    CHECK(n_position >= 0 && n_position <= INT_MAX - KV_PAGE);
    return (int)((n_position + KV_PAGE - 1) / KV_PAGE);
}

/* ---- idle pages ---------------------------------------------------------------------------- */

static void idle_add(struct kvpages *pages, int32_t p)
{
    pages->page[p].older = pages->newest;
    pages->page[p].newer = -1;
    *(pages->newest >= 0 ? &pages->page[pages->newest].newer : &pages->oldest) = p;
    pages->newest = p;
    pages->n_idle++;
}

static void idle_remove(struct kvpages *pages, int32_t p)
{
    const struct kvpage *const page = &pages->page[p];
    *(page->older >= 0 ? &pages->page[page->older].newer : &pages->oldest) = page->newer;
    *(page->newer >= 0 ? &pages->page[page->newer].older : &pages->newest) = page->older;
    pages->n_idle--;
}

/* ---- the table ----------------------------------------------------------------------------- */

static int32_t *bucket_of(struct kvpages *pages, const struct kvpages_key *key)
{
    /* Multiply and fold, word by word; the constants are those of the golden ratio and of
     * MurmurHash. */
    uint64_t h = (pages->seed ^ key->scope) * UINT64_C(0x9e3779b97f4a7c15);
    h = (h ^ key->change[0] ^ key->change[1]) * UINT64_C(0xff51afd7ed558ccd);
    h ^= (uint64_t)(uint32_t)key->before << 32 | (uint32_t)key->lang;
    for (int i = 0; i < KV_PAGE; i++) {
        h = (h ^ (uint32_t)key->ids[i]) * UINT64_C(0x9e3779b97f4a7c15);
        h ^= h >> 32;
    }
    h *= UINT64_C(0xff51afd7ed558ccd);
    return &pages->bucket[(uint32_t)(h >> 32) & pages->mask];
}

/* The page in the table that holds these tokens or is being filled with them; -1 if there is
 * none. */
static int32_t table_find(struct kvpages *pages, const struct kvpages_key *key)
{
    int32_t p = *bucket_of(pages, key);
    while (p >= 0 && memcmp(&pages->page[p].key, key, sizeof *key) != 0) {
        p = pages->page[p].chain;
    }
    return p;
}

static void table_add(struct kvpages *pages, int32_t p, const struct kvpages_key *key,
                      enum page_state state)
{
    struct kvpage *const page = &pages->page[p];
    int32_t *const first = bucket_of(pages, key);
    CHECK(page->state == PAGE_PLAIN && page->refs > 0);
    page->key = *key;
    page->state = state;
    page->chain = *first;
    *first = p;
    if (key->before >= 0) {
        pages->page[key->before].n_after++;
    }
    pages->n_finished += state == PAGE_FINISHED;
}

static void table_remove(struct kvpages *pages, int32_t p)
{
    struct kvpage *const page = &pages->page[p];
    CHECK(page->n_after == 0); /* otherwise the pages that follow it would be mistaken for another
                                * text's */
    int32_t *link = bucket_of(pages, &page->key);
    while (*link != p) {
        link = &pages->page[*link].chain;
    }
    *link = page->chain;
    if (page->key.before >= 0) {
        pages->page[page->key.before].n_after--;
    }
    pages->n_finished -= page->state == PAGE_FINISHED;
    page->state = PAGE_PLAIN;
}

/* Whether a page may enter the table under this key: the page before it must be finished. */
static bool is_rooted(const struct kvpages *pages, const struct kvpages_key *key)
{
    CHECK(key->before < pages->n_page);
    CHECK(key->before < 0 || pages->page[key->before].refs > 0);
    return pages->shares && (key->before < 0 || pages->page[key->before].state == PAGE_FINISHED);
}

/* ---- taken and given back ------------------------------------------------------------------ */

bool kvpages_take(struct kvpages *pages, int n, int32_t *page)
{
    CHECK(n >= 0);
    if (n > pages->n_free + pages->n_idle) {
        return false;
    }
    for (int i = 0; i < n; i++) {
        if (pages->n_free > 0) {
            page[i] = pages->free_page[--pages->n_free];
        } else {
            page[i] = pages->oldest;
            idle_remove(pages, page[i]);
            table_remove(pages, page[i]);
        }
        CHECK(pages->page[page[i]].refs == 0 && pages->page[page[i]].state == PAGE_PLAIN);
        pages->page[page[i]].refs = 1;
    }
    return true;
}

void kvpages_give(struct kvpages *pages, int n, const int32_t *page)
{
    for (int i = n - 1; i >= 0; i--) {
        CHECK(page[i] >= 0 && page[i] < pages->n_page && pages->page[page[i]].refs > 0);
        struct kvpage *const given = &pages->page[page[i]];
        if (--given->refs > 0) {
            continue;
        }
        if (given->state == PAGE_FINISHED) {
            idle_add(pages, page[i]);
            continue;
        }
        if (given->state == PAGE_CLAIMED) {
            table_remove(pages, page[i]);
        }
        pages->free_page[pages->n_free++] = page[i];
    }
}

/* ---- used by others ------------------------------------------------------------------------ */

int32_t kvpages_use(struct kvpages *pages, const struct kvpages_key *key)
{
    const int32_t p = is_rooted(pages, key) ? table_find(pages, key) : -1;
    if (p < 0 || pages->page[p].state != PAGE_FINISHED) {
        return -1;
    }
    if (pages->page[p].refs++ == 0) {
        idle_remove(pages, p);
    }
    return p;
}

bool kvpages_claim(struct kvpages *pages, const struct kvpages_key *key, int32_t page, int rank)
{
    if (!is_rooted(pages, key)) {
        return true; /* nobody can wait for it */
    }
    const int32_t p = table_find(pages, key);
    if (p == page || (p >= 0 && pages->page[p].state == PAGE_FINISHED)) {
        return true;
    }
    if (p >= 0 && pages->page[p].rank <= rank) {
        return false;
    }
    if (p >= 0) {
        table_remove(pages, p);
    }
    table_add(pages, page, key, PAGE_CLAIMED);
    pages->page[page].rank = rank;
    return true;
}

uint64_t kvpages_owner(const struct kvpages *pages, int32_t page)
{
    CHECK(pages->page[page].state == PAGE_FINISHED);
    return pages->page[page].owner;
}

int32_t kvpages_keep(struct kvpages *pages, const struct kvpages_key *key, int32_t page,
                     uint64_t owner)
{
    if (!is_rooted(pages, key)) {
        return page;
    }
    const int32_t p = table_find(pages, key);
    if (p >= 0 && pages->page[p].state == PAGE_FINISHED) {
        const int32_t known = kvpages_use(pages, key);
        kvpages_give(pages, 1, &page);
        return known;
    }
    if (p >= 0) { /* its own claim, or that of a sequence with a worse rank */
        table_remove(pages, p);
    }
    table_add(pages, page, key, PAGE_FINISHED);
    pages->page[page].owner = owner;
    return page;
}

void kvpages_forget(struct kvpages *pages)
{
    for (int32_t p = 0; p < pages->n_page; p++) {
        struct kvpage *const page = &pages->page[p];
        if (page->refs == 0 && page->state == PAGE_FINISHED) {
            pages->free_page[pages->n_free++] = p;
        }
        page->state = PAGE_PLAIN;
        page->n_after = 0;
    }
    for (uint32_t b = 0; b <= pages->mask; b++) {
        pages->bucket[b] = -1;
    }
    pages->oldest = pages->newest = -1;
    pages->n_idle = pages->n_finished = 0;
}
