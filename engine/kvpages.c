/* The free pages of the cache: see kvpages.h. */
#include "engine/kvpages.h"

#include "kernels/backend.h"

#include <limits.h>
#include <stdlib.h>

enum err_code kvpages_open(struct kvpages *pages, int n_page, struct err *err)
{
    CHECK(n_page > 0);
    *pages = (struct kvpages){.free_page = malloc((size_t)n_page * sizeof(int32_t))};
    if (pages->free_page == NULL) {
        return err_set(err, ERR_MEMORY, "no memory for a list of %d cache pages", n_page);
    }
    pages->n_page = pages->n_free = n_page;
    for (int i = 0; i < n_page; i++) {
        pages->free_page[i] = n_page - 1 - i; /* page 0 is taken first */
    }
    return ERR_OK;
}

void kvpages_close(struct kvpages *pages)
{
    free(pages->free_page);
    *pages = (struct kvpages){0};
}

bool kvpages_take(struct kvpages *pages, int n, int32_t *page)
{
    CHECK(n >= 0);
    if (n > pages->n_free) {
        return false;
    }
    for (int i = 0; i < n; i++) {
        page[i] = pages->free_page[--pages->n_free];
    }
    return true;
}

void kvpages_give(struct kvpages *pages, int n, const int32_t *page)
{
    CHECK(n >= 0 && n <= pages->n_page - pages->n_free);
    for (int i = n - 1; i >= 0; i--) {
        CHECK(page[i] >= 0 && page[i] < pages->n_page);
        pages->free_page[pages->n_free++] = page[i];
    }
}

int kvpages_for(int64_t n_position)
{
    CHECK(n_position >= 0 && n_position <= INT_MAX - KV_PAGE);
    return (int)((n_position + KV_PAGE - 1) / KV_PAGE);
}
