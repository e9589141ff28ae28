/* See charsmap.h.
 *
 *   u32 n, little-endian │ n bytes of a trie: units of u32 │ strings, each with a NUL behind it
 *
 * The trie is a double array (Darts-clone). A search begins at unit 0. With the byte c it goes from
 * unit p to the unit p ^ offset(p) ^ c, and stays there if that one's label is c. If a unit that it
 * has come to has a leaf, the unit at its p ^ offset(p) is the value: where the string begins that
 * the bytes so far are replaced by. */
#include "engine/charsmap.h"
#include "kernels/utf8.h"

#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>

#define VALUE_BIT (UINT32_C(1) << 31) /* of a unit that is a value, and so no node */

struct charsmap {
    const unsigned char *unit; /* [n_unit] of 4 bytes */
    uint32_t n_unit;
    const char *strings;
    size_t n_string;
};

static uint32_t word_at(const unsigned char *bytes)
{
    return (uint32_t)bytes[0] | (uint32_t)bytes[1] << 8 | (uint32_t)bytes[2] << 16 |
           (uint32_t)bytes[3] << 24;
}

static uint32_t unit_at(const struct charsmap *map, uint32_t at)
{
    return word_at(map->unit + 4 * (size_t)at);
}

/* What follows unit at: base ^ c for each byte c. */
static uint32_t base_of(const struct charsmap *map, uint32_t at)
{
    const uint32_t unit = unit_at(map, at);
    return at ^ (unit >> 10) << ((unit & 1u << 9) >> 6);
}

/* Whether all that a search may read at this unit is there. */
static bool is_inside(const struct charsmap *map, uint32_t at)
{
    const uint32_t base = base_of(map, at);
    if ((base | 0xff) >= map->n_unit) {
        return false;
    }
    const bool has_leaf = (unit_at(map, at) & 1u << 8) != 0;
    const uint32_t value = unit_at(map, base) & ~VALUE_BIT;
    return !has_leaf ||
           (value < map->n_string && ((unsigned char)map->strings[value] & 0xc0) != 0x80);
}

/* Walks to every unit that some text leads to. place: [n_unit]. */
static bool walk(const struct charsmap *map, bool *seen, uint32_t *place)
{
    size_t n = 0;
    place[n++] = 0;
    seen[0] = true;
    while (n > 0) {
        const uint32_t at = place[--n];
        if (!is_inside(map, at)) {
            return false;
        }
        const uint32_t base = base_of(map, at);
        for (uint32_t c = 0; c < 256; c++) {
            const uint32_t next = base ^ c;
            if (!seen[next] && (unit_at(map, next) & (VALUE_BIT | 0xff)) == c) {
                seen[next] = true;
                place[n++] = next;
            }
        }
    }
    return true;
}

enum err_code charsmap_check(const char *bytes, size_t n, const char *path, struct err *err)
{
    if (n == 0) {
        return ERR_OK;
    }
    const size_t n_trie = n > 4 ? word_at((const unsigned char *)bytes) : 0;
    bool good = n_trie > 0 && n_trie % 4 == 0 && n_trie < n - 4 && bytes[n - 1] == '\0';
    if (good) {
        const struct charsmap map = {(const unsigned char *)bytes + 4, (uint32_t)(n_trie / 4),
                                     bytes + 4 + n_trie, n - 4 - n_trie};
        bool *const seen = calloc(map.n_unit, sizeof *seen);
        uint32_t *const place = malloc(map.n_unit * sizeof *place);
        const bool no_memory = seen == NULL || place == NULL;
        good = !no_memory && utf8_valid_prefix(map.strings, map.n_string) == map.n_string &&
               walk(&map, seen, place);
        free(seen);
        free(place);
        if (no_memory) {
            return err_set(err, ERR_MEMORY, "%s: no memory to check its map of characters", path);
        }
    }
    return good ? ERR_OK
                : err_set(err, ERR_FORMAT,
                          "%s: normalizer_spec.precompiled_charsmap, of %zu bytes, is damaged: "
                          "some text would lead out of it",
                          path, n);
}
