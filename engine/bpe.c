/* See bpe.h. */
#include "engine/bpe.h"
#include "engine/merges.h"
#include "kernels/utf8.h"
#include "engine/word_table.h"

#include <stdlib.h>
#include <string.h>

static const char word_end[] = "</w>";
enum { WORD_END_BYTES = 4, SYMBOL_GONE = -2 };
#define PART_END UINT32_MAX

struct bpe {
    char *text;                /* Owner: this. The symbols' bytes are in it */
    struct word_table symbols; /* characters, and what rules make */
    struct merges merges;
};

/* ---- the rules ----------------------------------------------------------------------------- */

/* Whether a part is one character, marked as the last of a word or not. */
static bool is_character(const char *text, size_t bytes)
{
    const size_t n = (size_t)utf8_next(text, bytes).bytes;
    return n == bytes ||
           (n + WORD_END_BYTES == bytes && memcmp(text + n, word_end, WORD_END_BYTES) == 0);
}

/* Enters "left right count", of which the count only has to be one; the bytes of left and right
 * are moved together, so that what they make is in the text too. */
static enum err_code parse_rule(struct bpe *bpe, char *line, size_t bytes, const char *path,
                                struct err *err)
{
    const int number = bpe->merges.n + 1;
    char *const space = memchr(line, ' ', bytes);
    char *const after = space != NULL ? space + 1 : line;
    char *const end = space != NULL ? memchr(after, ' ', (size_t)(line + bytes - after)) : NULL;
    bool good = end != NULL && space > line && end > after && end + 1 < line + bytes &&
                utf8_valid_prefix(line, bytes) == bytes;
    for (const char *c = end; good && ++c < line + bytes;) {
        good = *c >= '0' && *c <= '9';
    }
    if (!good) {
        return err_set(err, ERR_FORMAT,
                       "%s: line %d is not \"left right count\" as fastBPE writes it", path,
                       number);
    }
    const size_t n_left = (size_t)(space - line);
    const size_t n_right = (size_t)(end - after);
    char *const right = line + n_left;
    memmove(right, after, n_right);
    if ((!is_character(line, n_left) && word_table_find(&bpe->symbols, line, n_left, "") < 0) ||
        (!is_character(right, n_right) && word_table_find(&bpe->symbols, right, n_right, "") < 0)) {
        return err_set(err, ERR_FORMAT,
                       "%s: line %d joins a part that is neither a character nor made by an "
                       "earlier line",
                       path, number);
    }
    struct merge rule;
    rule.left = word_table_add(&bpe->symbols, line, n_left);
    rule.right = word_table_add(&bpe->symbols, right, n_right);
    rule.joined = word_table_add(&bpe->symbols, line, n_left + n_right);
    const int32_t same = merges_add(&bpe->merges, rule);
    if (same >= 0) {
        return err_set(err, ERR_FORMAT, "%s: line %d repeats line %d", path, number, same + 1);
    }
    return ERR_OK;
}

static enum err_code reserve_rules(struct bpe *bpe, int32_t n, const char *path, struct err *err)
{
    const enum err_code code = merges_open(&bpe->merges, n, path, err);
    return code != ERR_OK ? code : word_table_open(&bpe->symbols, 3 * n, path, err);
}

enum err_code bpe_parse(struct bpe **bpe, char *text, size_t bytes, const char *path,
                        struct err *err)
{
    *bpe = NULL;
    struct bpe *const made = calloc(1, sizeof *made);
    if (made == NULL) {
        free(text);
        return err_set(err, ERR_MEMORY, "%s: no memory", path);
    }
    made->text = text;
    size_t n_line = bytes > 0 && text[bytes - 1] != '\n' ? 1 : 0;
    for (size_t i = 0; i < bytes; i++) {
        n_line += text[i] == '\n';
    }
    enum err_code code = n_line > MERGES_MAX
                             ? err_set(err, ERR_FORMAT, "%s: has %zu lines, the limit is %d", path,
                                       n_line, (int)MERGES_MAX)
                             : reserve_rules(made, (int32_t)n_line, path, err);
    for (char *line = text; code == ERR_OK && line < text + bytes;) {
        const size_t left = (size_t)(text + bytes - line);
        const char *const newline = memchr(line, '\n', left);
        const size_t n = newline != NULL ? (size_t)(newline - line) : left;
        code = parse_rule(made, line, n, path, err);
        line += n + 1;
    }
    if (code != ERR_OK) {
        bpe_close(made);
        return code;
    }
    *bpe = made;
    return ERR_OK;
}

void bpe_close(struct bpe *bpe)
{
    if (bpe != NULL) {
        word_table_close(&bpe->symbols);
        merges_close(&bpe->merges);
        free(bpe->text);
        free(bpe);
    }
}

/* ---- a word -------------------------------------------------------------------------------- */

/* A part of the word; its right neighbour joins it, and is then gone. */
struct bpe_part {
    size_t first;          /* byte of the word */
    uint32_t before, next; /* neighbours; PART_END = none */
    uint32_t joined;       /* the part that was joined before it by the same rule */
    int32_t symbol;        /* -1: no rule knows it */
};

/* The rule for a part and its right neighbour, -1 = none. */
static int32_t rule_at(const struct bpe *bpe, const struct bpe_part *part, uint32_t at)
{
    if (at == PART_END || part[at].symbol < 0 || part[at].next == PART_END ||
        part[part[at].next].symbol < 0) {
        return -1;
    }
    return merges_find(&bpe->merges, part[at].symbol, part[part[at].next].symbol);
}

static void queue_look(struct merge_queue *queue, const struct bpe *bpe,
                       const struct bpe_part *part, uint32_t at)
{
    const int32_t rule = rule_at(bpe, part, at);
    if (rule >= 0) {
        merge_queue_put(queue, (struct merge_place){rule, at});
    }
}

static void join(struct bpe_part *part, uint32_t at, int32_t symbol)
{
    const uint32_t right = part[at].next;
    part[at].symbol = symbol;
    part[at].next = part[right].next;
    part[right].symbol = SYMBOL_GONE;
    if (part[at].next != PART_END) {
        part[part[at].next].before = at;
    }
}

/* Applies one rule wherever it holds, from left to right, and only then looks at the new
 * neighbours, for which an even earlier rule may hold: so does fastBPE. The heap takes at most two
 * of them for each join, hence its size. */
static void apply_first_rule(const struct bpe *bpe, struct bpe_part *part,
                             struct merge_queue *queue)
{
    const int32_t rule = queue->heap[0].rule;
    uint32_t joined = PART_END;
    while (queue->n > 0 && queue->heap[0].rule == rule) {
        const uint32_t at = merge_queue_take(queue).part;
        if (rule_at(bpe, part, at) == rule) {
            join(part, at, bpe->merges.rule[rule].joined);
            part[at].joined = joined;
            joined = at;
        }
    }
    for (; joined != PART_END; joined = part[joined].joined) {
        queue_look(queue, bpe, part, part[joined].before);
        queue_look(queue, bpe, part, joined);
    }
}

static bool reserve(struct bpe_scratch *scratch, size_t n)
{
    if (n <= scratch->part_max) {
        return true;
    }
    const size_t room = n + (n < 1 << 16 ? n : 0) + 64; /* few are long */
    bpe_scratch_free(scratch);
    scratch->part = malloc(room * sizeof *scratch->part);
    scratch->heap = malloc(3 * room * sizeof *scratch->heap);
    scratch->end = malloc(room * sizeof *scratch->end);
    if (scratch->part == NULL || scratch->heap == NULL || scratch->end == NULL) {
        bpe_scratch_free(scratch);
        return false;
    }
    scratch->part_max = room;
    return true;
}

enum err_code bpe_split(const struct bpe *bpe, struct bpe_scratch *scratch, const char *word,
                        size_t bytes, struct err *err)
{
    CHECK(bytes >= 1 && bytes < PART_END);
    if (!reserve(scratch, bytes)) {
        return err_set(err, ERR_MEMORY, "no memory to split a word of %zu bytes", bytes);
    }
    struct bpe_part *const part = scratch->part;
    struct merge_queue queue = {.heap = scratch->heap};
    uint32_t n = 0;
    for (size_t at = 0; at < bytes; n++) {
        const size_t width = (size_t)utf8_next(word + at, bytes - at).bytes;
        const bool last = at + width == bytes;
        part[n] = (struct bpe_part){
            .first = at, .before = n > 0 ? n - 1 : PART_END, .next = last ? PART_END : n + 1};
        part[n].symbol = word_table_find(&bpe->symbols, word + at, width, last ? word_end : "");
        at += width;
    }
    for (uint32_t i = 0; i < n; i++) {
        queue_look(&queue, bpe, part, i);
    }
    while (queue.n > 0) {
        apply_first_rule(bpe, part, &queue);
    }
    scratch->n_piece = 0;
    for (uint32_t i = 0; i != PART_END; i = part[i].next) {
        scratch->end[scratch->n_piece++] =
            part[i].next != PART_END ? part[part[i].next].first : bytes;
    }
    return ERR_OK;
}

void bpe_scratch_free(struct bpe_scratch *scratch)
{
    free(scratch->part);
    free(scratch->heap);
    free(scratch->end);
    *scratch = (struct bpe_scratch){0};
}
