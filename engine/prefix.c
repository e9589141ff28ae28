/* Equal beginnings of texts are computed once. Engine thread only; called by the loop.
 *
 * A unit comes by pages that it need not compute at two moments: when it is admitted, and before
 * each step in which it still has a prompt or document to run through, because another unit may
 * have finished some meanwhile. What it computes itself it keeps for others as soon as a page is
 * full, generated tokens included.
 *
 * Nothing is shared where a sequence's pages are a ring, in which later positions take the places
 * of earlier ones: kvpages then keep nothing.
 *
 * Computed in any case is every position of which something is wanted: the last one of a prompt,
 * what is scored or echoed with log-probabilities, all of a text whose memory look-ups are traced.
 *
 * Units that want a page which another one is filling wait: they get no rows. Before each step the
 * unit whose next page is neither finished nor claimed claims it (kvpages_claim); the others find
 * the claim. Nobody is waited for longer than it runs: a claim ends with the page's last row, or
 * with the unit, whose pages are given back, and the next step begins with claims made anew. Only a
 * unit that waits for nobody holds a claim, so no two wait for each other and every step has rows.
 * An interactive unit does not wait for a bulk one, it takes the claim over, and at most what one
 * step gives the bulk one is computed twice. Windows of a text of several do not wait either, since
 * their predictions come in the order of the text.
 *
 * Reading in step n+1 what step n wrote is what decoding does too: no backend needs to know. */
#include "engine/loop.h"

static void count(atomic_llong *counter, int64_t n)
{
    (void)atomic_fetch_add_explicit(counter, n, memory_order_relaxed);
}

/* Page i of a unit, after before; ids are those of the page. */
static struct kvpages_key key_of(const int32_t *page, int i, int lang, const int32_t *ids)
{
    struct kvpages_key key = {.before = i > 0 ? page[i - 1] : -1, .lang = lang};
    for (int r = 0; r < KV_PAGE; r++) {
        key.ids[r] = ids[r];
    }
    return key;
}

bool prefix_take(struct engine *engine, struct sequence *seq, int n_page)
{
    struct kvpages *const pages = &engine->pages;
    const int32_t *const ids = seq->item->ids + seq->base;
    int n = 0;
    for (; (int64_t)(n + 1) * KV_PAGE <= seq->n_skip; n++) {
        const struct kvpages_key key =
            key_of(seq->page, n, seq->job->request->lang, ids + (int64_t)n * KV_PAGE);
        seq->page[n] = kvpages_use(pages, &key);
        if (seq->page[n] < 0) {
            break;
        }
    }
    if (!kvpages_take(pages, n_page - n, seq->page + n)) {
        kvpages_give(pages, n, seq->page);
        return false;
    }
    seq->n_page = n_page;
    seq->n_kept = n;
    sequence_skip(seq, (int64_t)n * KV_PAGE);
    if (pages->shares && seq->n_skip >= KV_PAGE) {
        count(&engine->stats.prefix_queries, seq->n_feed);
        count(&engine->stats.prefix_hits, (int64_t)n * KV_PAGE);
    }
    return true;
}

bool prefix_advance(struct engine *engine, struct sequence *seq)
{
    const struct request *const request = seq->job->request;
    for (;;) {
        const int i = seq->n_kept;
        const int64_t first = (int64_t)i * KV_PAGE;
        const int64_t end = first + KV_PAGE;
        if (!engine->pages.shares || !seq->shares || sequence_decodes(seq) || end > seq->n_feed) {
            return true;
        }
        const struct kvpages_key key =
            key_of(seq->page, i, request->lang, seq->item->ids + seq->base + first);
        const bool skips = end <= seq->n_skip;
        CHECK(seq->n_done >= first && seq->n_done < end);
        const int32_t page = skips ? kvpages_use(&engine->pages, &key) : -1;
        if (page < 0) {
            const bool mine =
                kvpages_claim(&engine->pages, &key, seq->page[i], (int)request->priority);
            return mine || !skips || !seq->waits;
        }
        kvpages_give(&engine->pages, 1, &seq->page[i]);
        seq->page[i] = page;
        seq->n_kept++;
        count(&engine->stats.prefix_hits, end - seq->n_done);
        sequence_skip(seq, end - seq->n_done);
    }
}

void prefix_keep(struct engine *engine, struct sequence *seq)
{
    while (engine->pages.shares && seq->shares &&
           (int64_t)(seq->n_kept + 1) * KV_PAGE <= seq->n_done) {
        const int i = seq->n_kept++;
        int32_t ids[KV_PAGE];
        for (int r = 0; r < KV_PAGE; r++) {
            ids[r] = sequence_token(seq, (int64_t)i * KV_PAGE + r);
        }
        const struct kvpages_key key = key_of(seq->page, i, seq->job->request->lang, ids);
        seq->page[i] = kvpages_keep(&engine->pages, &key, seq->page[i]);
    }
}
