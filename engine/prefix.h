/* Equal beginnings of texts are computed once. Engine thread only; called by the loop.
 *
 * A sequence comes by pages that it need not compute at two moments: when it is admitted, and
 * before each step in which it still has a prompt or document to run through, because another
 * sequence may have finished some meanwhile. What it computes itself it keeps for others as soon as
 * a page is full; generated tokens too, unless the backend computes them otherwise than a prompt's
 * (phases_apart): then a page with one of them is nobody else's.
 *
 * Nothing is shared where a sequence's pages are a ring, in which later positions take the places
 * of earlier ones: kvpages then keep nothing.
 *
 * Computed in any case is every position of which something is wanted: the last one of a prompt,
 * what is scored or echoed with log-probabilities, all of a text whose memory look-ups are traced.
 *
 * Sequences that want a page which another one is filling wait: they get no rows. Before each step
 * the sequence whose next page is neither finished nor claimed claims it (kvpages_claim); the
 * others find the claim. Nobody is waited for longer than it runs: a claim ends with the page's
 * last row, or with the sequence, whose pages are given back, and the next step begins with claims
 * made anew. Only a sequence that waits for nobody holds a claim, so no two wait for each other and
 * every step has rows. An interactive sequence does not wait for a bulk one, it takes the claim
 * over, and at most what one step gives the bulk one is computed twice. Windows of a text of
 * several do not wait either, since their predictions come in the order of the text.
 *
 * Reading in step n+1 what step n wrote is what decoding does too: no backend needs to know. */
#ifndef ENGINE_PREFIX_H
#define ENGINE_PREFIX_H

#include "engine/kvpages.h"
#include "engine/sequence.h"
#include "engine/stats.h"

/* Takes n_page pages for a sequence; the first ones are those that hold its beginning already.
 * false: there are too few. */
bool prefix_take(struct kvpages *pages, struct engine_stats *stats, struct sequence *seq,
                 int n_page);
/* Moves seq past the pages that others have finished since. false: the next page is being filled by
 * another sequence, and seq waits for it. */
bool prefix_advance(struct kvpages *pages, struct engine_stats *stats, struct sequence *seq);
/* Keeps the pages that seq has filled for others; with drawn false, those without a drawn token. */
void prefix_keep(struct kvpages *pages, struct sequence *seq, bool drawn);

#endif
