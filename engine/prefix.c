/* Equal beginnings of texts are computed once: see prefix.h. */
#include "engine/prefix.h"

static void count(atomic_llong *counter, int64_t n)
{
    (void)atomic_fetch_add_explicit(counter, n, memory_order_relaxed);
}

/* Page i of a sequence, after before; ids are those of the page. */
static struct kvpages_key key_of(const struct sequence *seq, int i, const int32_t *ids)
{
    const struct request *const request = seq->job->request;
    struct kvpages_key key = {.scope = request->scope,
                              .change = {request->change[0], request->change[1]},
                              .before = i > 0 ? seq->page[i - 1] : -1,
                              .lang = request->lang};
    for (int r = 0; r < KV_PAGE; r++) {
        key.ids[r] = ids[r];
    }
    return key;
}

/* Prompt tokens count as read whether they are computed or not. */
static void skip(struct engine_stats *stats, struct sequence *seq, int64_t n, int64_t n_own)
{
    if (seq->job->request->kind == REQUEST_GENERATE) {
        count(&stats->prompt_tokens, n);
    }
    sequence_skip(seq, n, n_own);
}

bool prefix_take(struct kvpages *pages, struct engine_stats *stats, struct sequence *seq,
                 int n_page)
{
    const int32_t *const ids = seq->item->ids + seq->base;
    int n = 0;
    int n_own = 0;
    for (; (int64_t)(n + 1) * KV_PAGE <= seq->n_skip; n++) {
        const struct kvpages_key key = key_of(seq, n, ids + (int64_t)n * KV_PAGE);
        seq->page[n] = kvpages_use(pages, &key);
        if (seq->page[n] < 0) {
            break;
        }
        n_own += kvpages_owner(pages, seq->page[n]) == seq->job->request->owner;
    }
    if (!kvpages_take(pages, n_page - n, seq->page + n)) {
        kvpages_give(pages, n, seq->page);
        return false;
    }
    seq->n_page = n_page;
    seq->n_kept = n;
    skip(stats, seq, (int64_t)n * KV_PAGE, (int64_t)n_own * KV_PAGE);
    if (pages->shares && seq->n_skip >= KV_PAGE) {
        count(&stats->prefix_queries, seq->n_feed);
        count(&stats->prefix_hits, (int64_t)n * KV_PAGE);
    }
    return true;
}

bool prefix_advance(struct kvpages *pages, struct engine_stats *stats, struct sequence *seq)
{
    const struct request *const request = seq->job->request;
    for (;;) {
        const int i = seq->n_kept;
        const int64_t first = (int64_t)i * KV_PAGE;
        const int64_t end = first + KV_PAGE;
        if (!pages->shares || !seq->shares || sequence_decodes(seq) || end > seq->n_feed) {
            return true;
        }
        const struct kvpages_key key = key_of(seq, i, seq->item->ids + seq->base + first);
        const bool skips = end <= seq->n_skip;
        CHECK(seq->n_done >= first && seq->n_done < end);
        const int32_t page = skips ? kvpages_use(pages, &key) : -1;
        if (page < 0) {
            const bool mine = kvpages_claim(pages, &key, seq->page[i], (int)request->priority);
            return mine || !skips || !seq->waits;
        }
        kvpages_give(pages, 1, &seq->page[i]);
        seq->page[i] = page;
        seq->n_kept++;
        count(&stats->prefix_hits, end - seq->n_done);
        const bool own = kvpages_owner(pages, page) == request->owner;
        skip(stats, seq, end - seq->n_done, own ? end - seq->n_done : 0);
    }
}

void prefix_keep(struct kvpages *pages, struct sequence *seq, bool drawn)
{
    const int64_t n_given = seq->item->n_ids - seq->base;
    const int64_t n_full = drawn || seq->n_done < n_given ? seq->n_done : n_given;
    while (pages->shares && seq->shares && (int64_t)(seq->n_kept + 1) * KV_PAGE <= n_full) {
        const int i = seq->n_kept++;
        int32_t ids[KV_PAGE];
        for (int r = 0; r < KV_PAGE; r++) {
            ids[r] = sequence_token(seq, (int64_t)i * KV_PAGE + r);
        }
        const struct kvpages_key key = key_of(seq, i, ids);
        seq->page[i] = kvpages_keep(pages, &key, seq->page[i], seq->job->request->owner);
    }
}
