/* See nfc.h. */
#include "engine/nfc.h"
#include "engine/unicode.h"
#include "kernels/utf8.h"

#include <stdlib.h>
#include <string.h>

/* Hangul syllables are a leading consonant, a vowel and perhaps a trailing consonant. */
enum {
    HANGUL_S = 0xac00,
    HANGUL_L = 0x1100,
    HANGUL_V = 0x1161,
    HANGUL_T = 0x11a7, /* one before the first: T number 0 is none */
    N_L = 19,
    N_V = 21,
    N_T = 28,
    N_S = N_L * N_V * N_T,
    PARTS_MAX =
        4, /* canonical parts of one character: Unicode's longest is 4, there is room for more */
};

/* ---- tables -------------------------------------------------------------------------------- */

static uint32_t order_of(uint32_t code)
{
    int low = 0;
    int high = nfc_n_marks;
    while (low < high) {
        const int middle = (low + high) / 2;
        if (nfc_marks[middle].last < code) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low < nfc_n_marks && nfc_marks[low].first <= code ? nfc_marks[low].order : 0;
}

static const struct nfc_mapping *mapping_of(uint32_t code)
{
    int low = 0;
    int high = nfc_n_mapping;
    while (low < high) {
        const int middle = (low + high) / 2;
        if (nfc_mapping[middle].code < code) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low < nfc_n_mapping && nfc_mapping[low].code == code ? &nfc_mapping[low] : NULL;
}

/* The canonical parts of code, at most PARTS_MAX. */
static int decompose(uint32_t code, uint32_t part[PARTS_MAX])
{
    if (code >= HANGUL_S && code < HANGUL_S + N_S) {
        const uint32_t s = code - HANGUL_S;
        part[0] = HANGUL_L + s / (N_V * N_T);
        part[1] = HANGUL_V + s / N_T % N_V;
        part[2] = HANGUL_T + s % N_T;
        return s % N_T != 0 ? 3 : 2;
    }
    /* Only the first part of a mapping has parts itself. */
    uint32_t tail[PARTS_MAX];
    int n_tail = 0;
    const struct nfc_mapping *mapping = NULL;
    while ((mapping = mapping_of(code)) != NULL) {
        code = mapping->first;
        if (mapping->second != 0) {
            CHECK(n_tail < PARTS_MAX - 1);
            tail[n_tail++] = mapping->second;
        }
    }
    part[0] = code;
    for (int i = 1; i <= n_tail; i++) {
        part[i] = tail[n_tail - i];
    }
    return n_tail + 1;
}

/* What first and second are together; 0 = they are not joined. */
static uint32_t compose(uint32_t first, uint32_t second)
{
    if (first >= HANGUL_L && first < HANGUL_L + N_L && second >= HANGUL_V &&
        second < HANGUL_V + N_V) {
        return HANGUL_S + ((first - HANGUL_L) * N_V + (second - HANGUL_V)) * N_T;
    }
    if (first >= HANGUL_S && first < HANGUL_S + N_S && (first - HANGUL_S) % N_T == 0 &&
        second > HANGUL_T && second < HANGUL_T + N_T) {
        return first + (second - HANGUL_T);
    }
    int low = 0;
    int high = nfc_n_pair;
    while (low < high) {
        const int middle = (low + high) / 2;
        const struct nfc_mapping *const m = &nfc_mapping[nfc_pair[middle]];
        if (m->first < first || (m->first == first && m->second < second)) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    const struct nfc_mapping *const m = low < nfc_n_pair ? &nfc_mapping[nfc_pair[low]] : NULL;
    return m != NULL && m->first == first && m->second == second ? m->code : 0;
}

/* ---- one run ------------------------------------------------------------------------------- */

struct part {
    uint32_t code, order;
    uint32_t from; /* byte of the source */
};

/* A run of characters that may change each other. */
struct run {
    struct part *part;   /* [max] Owner: this */
    struct part *sorted; /* [max] scratch for ordering. Owner: this */
    size_t n, max;
};

static bool run_add(struct run *run, uint32_t code, uint32_t from)
{
    if (run->max - run->n < PARTS_MAX) {
        const size_t max = 2 * run->max + 64;
        struct part *const part = realloc(run->part, max * sizeof *part);
        if (part == NULL) {
            return false;
        }
        run->part = part;
        struct part *const sorted = realloc(run->sorted, max * sizeof *sorted);
        if (sorted == NULL) {
            return false;
        }
        run->sorted = sorted;
        run->max = max;
    }
    uint32_t code_part[PARTS_MAX];
    const int n = decompose(code, code_part);
    for (int i = 0; i < n; i++) {
        run->part[run->n++] = (struct part){code_part[i], order_of(code_part[i]), from};
    }
    return true;
}

/* Marks by rising class, equal ones as they came: a count of each class, so that time is linear. */
static void order_marks(struct run *run, size_t first, size_t end)
{
    bool in_order = true;
    for (size_t i = first + 1; i < end; i++) {
        in_order = in_order && run->part[i - 1].order <= run->part[i].order;
    }
    if (in_order) {
        return;
    }
    size_t begin[257] = {0};
    for (size_t i = first; i < end; i++) {
        begin[run->part[i].order + 1]++;
    }
    for (int order = 0; order < 256; order++) {
        begin[order + 1] += begin[order];
    }
    for (size_t i = first; i < end; i++) {
        run->sorted[begin[run->part[i].order]++] = run->part[i];
    }
    memcpy(run->part + first, run->sorted, (end - first) * sizeof *run->part);
}

static void order_run(struct run *run)
{
    for (size_t i = 0; i < run->n;) {
        size_t end = i;
        while (end < run->n && run->part[end].order != 0) {
            end++;
        }
        order_marks(run, i, end);
        i = end > i ? end : i + 1;
    }
}

/* Joins what can be joined: a character joins the last one of class 0, unless a character between
 * them has class 0 or a class that is not lower. */
static void compose_run(struct run *run)
{
    size_t n = 0;
    size_t starter = SIZE_MAX;
    for (size_t i = 0; i < run->n; i++) {
        const struct part p = run->part[i];
        const bool adjacent = starter != SIZE_MAX && starter + 1 == n;
        const bool free_way =
            starter != SIZE_MAX && (adjacent || (p.order != 0 && run->part[n - 1].order < p.order));
        const uint32_t joined = free_way ? compose(run->part[starter].code, p.code) : 0;
        if (joined != 0) {
            run->part[starter].code = joined;
            continue;
        }
        if (p.order == 0) {
            starter = n;
        }
        run->part[n++] = p;
    }
    run->n = n;
    /* Marks were reordered: makes sure that the source positions never fall. */
    for (size_t i = n; i > 1; i--) {
        if (run->part[i - 2].from > run->part[i - 1].from) {
            run->part[i - 2].from = run->part[i - 1].from;
        }
    }
}

/* ---- the text ------------------------------------------------------------------------------ */

bool nfc_is_stable(const char *text, size_t bytes)
{
    for (size_t at = 0; at < bytes;) {
        /* Nothing below U+0300, whose bytes begin below 0xcc, ever changes. */
        if ((unsigned char)text[at] < 0xcc) {
            at++;
            continue;
        }
        const struct utf8_char c = utf8_next(text + at, bytes - at);
        if (unicode_bits(c.code) & UNICODE_UNSTABLE) {
            return false;
        }
        at += (size_t)c.bytes;
    }
    return true;
}

static bool reserve(struct nfc_text *out, size_t more)
{
    if (more < out->bytes_max - out->bytes) { /* one more, for from's last entry */
        return true;
    }
    const size_t max = 2 * out->bytes_max + more + 64;
    char *const text = realloc(out->text, max);
    if (text == NULL) {
        return false;
    }
    out->text = text;
    uint32_t *const from = realloc(out->from, max * sizeof *from);
    if (from == NULL) {
        return false;
    }
    out->from = from;
    out->bytes_max = max;
    return true;
}

static bool write_run(struct nfc_text *out, const struct run *run)
{
    if (!reserve(out, 4 * run->n)) {
        return false;
    }
    for (size_t i = 0; i < run->n; i++) {
        const int n = utf8_write(out->text + out->bytes, run->part[i].code);
        for (int j = 0; j < n; j++) {
            out->from[out->bytes++] = run->part[i].from;
        }
    }
    return true;
}

/* The end of the run that begins at text[at]: a character, and all behind it that may change. */
static size_t run_end(const char *text, size_t bytes, size_t at, bool *changes)
{
    const struct utf8_char first = utf8_next(text + at, bytes - at);
    *changes = (unicode_bits(first.code) & UNICODE_UNSTABLE) != 0;
    for (at += (size_t)first.bytes; at < bytes;) {
        const struct utf8_char c = utf8_next(text + at, bytes - at);
        if (!(unicode_bits(c.code) & UNICODE_UNSTABLE)) {
            break;
        }
        *changes = true;
        at += (size_t)c.bytes;
    }
    return at;
}

static bool copy(struct nfc_text *out, const char *text, size_t first, size_t end)
{
    if (!reserve(out, end - first)) {
        return false;
    }
    const struct utf8_char c = utf8_next(text + first, end - first);
    for (size_t i = 0; i < (size_t)c.bytes; i++) {
        out->text[out->bytes] = text[first + i];
        out->from[out->bytes++] = (uint32_t)first;
    }
    return true;
}

enum err_code nfc_normalize(struct nfc_text *out, const char *text, size_t bytes, struct err *err)
{
    CHECK(bytes <= UINT32_MAX);
    out->bytes = 0;
    struct run run = {0};
    bool good = reserve(out, bytes);
    for (size_t at = 0; good && at < bytes;) {
        bool changes = false;
        const size_t end = run_end(text, bytes, at, &changes);
        run.n = 0;
        for (size_t i = at; good && changes && i < end;) {
            const struct utf8_char c = utf8_next(text + i, end - i);
            good = run_add(&run, c.code, (uint32_t)i);
            i += (size_t)c.bytes;
        }
        if (good && changes) {
            order_run(&run);
            compose_run(&run);
        }
        good = good && (changes ? write_run(out, &run) : copy(out, text, at, end));
        at = end;
    }
    free(run.part);
    free(run.sorted);
    if (!good) {
        return err_set(err, ERR_MEMORY, "no memory to normalize a text of %zu bytes", bytes);
    }
    out->from[out->bytes] = (uint32_t)bytes;
    return ERR_OK;
}

void nfc_free(struct nfc_text *out)
{
    free(out->text);
    free(out->from);
    *out = (struct nfc_text){0};
}
