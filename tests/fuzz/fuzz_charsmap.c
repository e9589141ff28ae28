/* Fuzz target: the check of a SentencePiece model's map of characters on any bytes. A map that it
 * lets pass is followed here as the library does, along any text: nothing is read outside of it.
 * Run by `make fuzz`; tests/fuzz/corpus/charsmap holds the seeds. */
#include "engine/charsmap.h"

#include <stdint.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

enum { TEXT_MAX = 32 };

static uint32_t unit_at(const uint8_t *map, uint32_t n_unit, uint32_t at)
{
    CHECK(at < n_unit);
    const uint8_t *const unit = map + 4 + 4 * (size_t)at;
    return (uint32_t)unit[0] | (uint32_t)unit[1] << 8 | (uint32_t)unit[2] << 16 |
           (uint32_t)unit[3] << 24;
}

/* Darts-clone's search for the beginnings of a text. */
static void search(const uint8_t *map, size_t bytes, const uint8_t *text, size_t n_text)
{
    const uint32_t n_unit = (map[0] | (uint32_t)map[1] << 8 | (uint32_t)map[2] << 16) / 4;
    const uint8_t *const strings = map + 4 + 4 * (size_t)n_unit;
    const size_t n_string = bytes - 4 - 4 * (size_t)n_unit;
    uint32_t at = 0;
    uint32_t unit = unit_at(map, n_unit, at);
    at ^= unit >> 10 << ((unit & 1u << 9) >> 6);
    for (size_t i = 0; i < n_text; i++) {
        at ^= text[i];
        unit = unit_at(map, n_unit, at);
        if ((unit & (1u << 31 | 0xff)) != text[i]) {
            return;
        }
        at ^= unit >> 10 << ((unit & 1u << 9) >> 6);
        if ((unit >> 8 & 1) != 0) {
            const uint32_t value = unit_at(map, n_unit, at) & ~(1u << 31);
            CHECK(value < n_string && memchr(strings + value, '\0', n_string - value) != NULL);
        }
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    const size_t n_text = bytes > 0 && data[0] < TEXT_MAX && data[0] < bytes ? data[0] : 0;
    const uint8_t *const map = data + (bytes > 0 ? 1 + n_text : 0);
    const size_t n_map = bytes > 0 ? bytes - 1 - n_text : 0;
    struct err err = {0};
    const enum err_code code = charsmap_check((const char *)map, n_map, "fuzz", &err);
    if (code != ERR_OK) {
        CHECK(err.code == code && err.message[0] != '\0' && strchr(err.message, '\n') == NULL);
    } else if (n_map > 0 && n_map < 1 << 24) {
        for (size_t i = 0; i < n_text; i++) {
            search(map, n_map, data + 1 + i, n_text - i);
        }
    }
    return 0;
}
