/* See byte_bpe.h. */
#include "engine/byte_bpe.h"

#include <stdlib.h>
#include <string.h>

#define PART_END UINT32_MAX
enum {
    SHORT_MAX = 48, /* bytes of a piece up to which it is quicker to look through all neighbours */
    TOKEN_GONE = -1,
};

/* ---- the tokens ---------------------------------------------------------------------------- */

enum err_code byte_bpe_open(struct byte_bpe *bpe, int32_t n_word, int32_t n_merge, const char *path,
                            struct err *err)
{
    *bpe = (struct byte_bpe){0};
    memset(bpe->byte_id, 0xff, sizeof bpe->byte_id); /* all -1 */
    if (word_table_open(&bpe->words, n_word, path, err) != ERR_OK ||
        merges_open(&bpe->merges, n_merge, path, err) != ERR_OK) {
        byte_bpe_close(bpe);
        return ERR_MEMORY;
    }
    bpe->word_id = calloc((size_t)n_word + 1, sizeof *bpe->word_id);
    bpe->whole = calloc((size_t)n_word + 1, sizeof *bpe->whole);
    if (bpe->word_id == NULL || bpe->whole == NULL) {
        byte_bpe_close(bpe);
        return err_set(err, ERR_MEMORY, "%s: no memory for %d tokens", path, n_word);
    }
    return ERR_OK;
}

void byte_bpe_close(struct byte_bpe *bpe)
{
    word_table_close(&bpe->words);
    merges_close(&bpe->merges);
    free(bpe->word_id);
    free(bpe->whole);
    *bpe = (struct byte_bpe){0};
}

bool byte_bpe_add(struct byte_bpe *bpe, const char *word, size_t bytes, int32_t id)
{
    CHECK(bytes >= 1 && bytes <= BYTE_BPE_WORD_MAX);
    const int32_t number = word_table_add(&bpe->words, word, bytes);
    if (number != bpe->words.n - 1 || bpe->whole[number]) {
        return false;
    }
    bpe->whole[number] = true; /* until byte_bpe_finish: the number is taken */
    bpe->word_id[number] = id;
    bpe->longest = bytes > bpe->longest ? bytes : bpe->longest;
    if (bytes == 1) {
        bpe->byte_id[(unsigned char)word[0]] = id;
    }
    return true;
}

int32_t byte_bpe_find(const struct byte_bpe *bpe, const char *word, size_t bytes)
{
    const int32_t number =
        bytes <= bpe->longest ? word_table_find(&bpe->words, word, bytes, "") : -1;
    return number < 0 ? -1 : bpe->word_id[number];
}

enum err_code byte_bpe_finish(struct byte_bpe *bpe, struct err *err)
{
    if (bpe->ignore_merges) {
        return ERR_OK; /* whole is true of all */
    }
    memset(bpe->whole, 0, (size_t)bpe->words.n * sizeof *bpe->whole);
    struct byte_bpe_scratch scratch = {0};
    enum err_code code = ERR_OK;
    for (int32_t i = 0; code == ERR_OK && i < bpe->words.n; i++) {
        const struct word_entry word = bpe->words.word[i];
        code = byte_bpe_split(bpe, &scratch, word.text, word.bytes, err);
        bpe->whole[i] = code == ERR_OK && scratch.n == 1 && scratch.part[0].id == bpe->word_id[i];
    }
    byte_bpe_scratch_free(&scratch);
    return code;
}

/* ---- a piece ------------------------------------------------------------------------------- */

/* Tokens left and right are the bytes first to end of the piece. Returns the rank of their joining,
 * which is also its number for joined(), or -1. */
static inline int32_t rank_of(const struct byte_bpe *bpe, int32_t left, int32_t right,
                              const char *piece, size_t first, size_t end)
{
    return bpe->ranked ? byte_bpe_find(bpe, piece + first, end - first)
                       : merges_find(&bpe->merges, left, right);
}

static inline int32_t joined(const struct byte_bpe *bpe, int32_t rank)
{
    return bpe->ranked ? rank : bpe->merges.rule[rank].joined;
}

/* The piece is short: the lowest rank is looked for among all neighbours. */
static void split_short(const struct byte_bpe *bpe, struct byte_bpe_scratch *scratch,
                        const char *piece, size_t bytes)
{
    int32_t id[SHORT_MAX];
    uint32_t start[SHORT_MAX + 1]; /* the last one is the end */
    int32_t rank[SHORT_MAX];       /* of each token with the one behind it */
    size_t n = bytes;
    for (size_t i = 0; i < n; i++) {
        id[i] = bpe->byte_id[(unsigned char)piece[i]];
        start[i] = (uint32_t)i;
    }
    start[n] = (uint32_t)n;
    for (size_t i = 0; i + 1 < n; i++) {
        rank[i] = rank_of(bpe, id[i], id[i + 1], piece, i, i + 2);
    }
    for (;;) {
        size_t best = SIZE_MAX;
        for (size_t i = 0; i + 1 < n; i++) {
            if (rank[i] >= 0 && (best == SIZE_MAX || rank[i] < rank[best])) {
                best = i;
            }
        }
        if (best == SIZE_MAX) {
            break;
        }
        id[best] = joined(bpe, rank[best]);
        n--;
        for (size_t i = best + 1; i < n; i++) {
            id[i] = id[i + 1];
            rank[i - 1] = rank[i];
        }
        for (size_t i = best + 1; i <= n; i++) {
            start[i] = start[i + 1];
        }
        if (best + 1 < n) {
            rank[best] = rank_of(bpe, id[best], id[best + 1], piece, start[best], start[best + 2]);
        }
        if (best > 0) {
            rank[best - 1] =
                rank_of(bpe, id[best - 1], id[best], piece, start[best - 1], start[best + 1]);
        }
    }
    scratch->n = n;
    for (size_t i = 0; i < n; i++) {
        scratch->part[i] = (struct byte_bpe_part){.id = id[i], .first = start[i]};
    }
}

/* The piece is long: its parts are a list, in which the right one of two is gone when they are
 * joined, and a queue holds the places where a rule applies. */
struct long_piece {
    const struct byte_bpe *bpe;
    struct byte_bpe_part *part;
    const char *text;
    size_t bytes;
    struct merge_queue queue;
};

static int32_t rank_at(const struct long_piece *p, uint32_t at)
{
    const struct byte_bpe_part left = p->part[at];
    if (left.id == TOKEN_GONE || left.next == PART_END) {
        return -1;
    }
    const struct byte_bpe_part right = p->part[left.next];
    const size_t end = right.next == PART_END ? p->bytes : p->part[right.next].first;
    return rank_of(p->bpe, left.id, right.id, p->text, left.first, end);
}

static void look(struct long_piece *p, uint32_t at)
{
    const int32_t rank = at != PART_END ? rank_at(p, at) : -1;
    if (rank >= 0) {
        merge_queue_put(&p->queue, (struct merge_place){rank, at});
    }
}

static void join(struct long_piece *p, uint32_t at, int32_t id)
{
    struct byte_bpe_part *const left = &p->part[at];
    struct byte_bpe_part *const right = &p->part[left->next];
    left->id = id;
    left->next = right->next;
    right->id = TOKEN_GONE;
    if (left->next != PART_END) {
        p->part[left->next].before = at;
    }
    look(p, left->before);
    look(p, at);
}

/* Each joining takes one place out of the queue and puts at most two in: it never holds more than
 * twice the bytes. */
static void split_long(const struct byte_bpe *bpe, struct byte_bpe_scratch *scratch,
                       const char *piece, size_t bytes)
{
    struct long_piece p = {bpe, scratch->part, piece, bytes, {.heap = scratch->heap}};
    const uint32_t n = (uint32_t)bytes;
    for (uint32_t i = 0; i < n; i++) {
        p.part[i] = (struct byte_bpe_part){.id = bpe->byte_id[(unsigned char)piece[i]],
                                           .first = i,
                                           .before = i > 0 ? i - 1 : PART_END,
                                           .next = i + 1 < n ? i + 1 : PART_END};
    }
    for (uint32_t i = 0; i < n; i++) {
        look(&p, i);
    }
    while (p.queue.n > 0) {
        const struct merge_place place = merge_queue_take(&p.queue);
        if (rank_at(&p, place.part) == place.rule) {
            join(&p, place.part, joined(bpe, place.rule));
        }
    }
    scratch->n = 0;
    for (uint32_t i = 0; i != PART_END;) {
        const struct byte_bpe_part part = p.part[i];
        p.part[scratch->n++] = part;
        i = part.next;
    }
}

static bool reserve(struct byte_bpe_scratch *scratch, size_t bytes)
{
    if (bytes <= scratch->part_max) {
        return true;
    }
    const size_t max = bytes + (bytes < 1 << 16 ? bytes : 0) + SHORT_MAX;
    byte_bpe_scratch_free(scratch);
    scratch->part = malloc(max * sizeof *scratch->part);
    scratch->heap = malloc(2 * max * sizeof *scratch->heap);
    if (scratch->part == NULL || scratch->heap == NULL) {
        byte_bpe_scratch_free(scratch);
        return false;
    }
    scratch->part_max = max;
    return true;
}

enum err_code byte_bpe_split(const struct byte_bpe *bpe, struct byte_bpe_scratch *scratch,
                             const char *piece, size_t bytes, struct err *err)
{
    CHECK(bytes >= 1 && bytes < PART_END);
    if (!reserve(scratch, bytes)) {
        return err_set(err, ERR_MEMORY, "no memory to split a piece of %zu bytes", bytes);
    }
    const int32_t number =
        bytes <= bpe->longest ? word_table_find(&bpe->words, piece, bytes, "") : -1;
    if (number >= 0 && bpe->whole[number]) {
        scratch->n = 1;
        scratch->part[0] = (struct byte_bpe_part){.id = bpe->word_id[number]};
    } else if (bytes <= SHORT_MAX) {
        split_short(bpe, scratch, piece, bytes);
    } else {
        split_long(bpe, scratch, piece, bytes);
    }
    return ERR_OK;
}

void byte_bpe_scratch_free(struct byte_bpe_scratch *scratch)
{
    free(scratch->part);
    free(scratch->heap);
    *scratch = (struct byte_bpe_scratch){0};
}
