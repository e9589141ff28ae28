/* See word_table.h. */
#include "engine/word_table.h"
#include "kernels/fnv.h"

#include <stdlib.h>
#include <string.h>

enum err_code word_table_open(struct word_table *table, int32_t max, const char *what,
                              struct err *err)
{
    CHECK(max >= 0 && max < 1 << 29);
    uint32_t n_bucket = 2;
    while (n_bucket < 2 * (uint32_t)max) {
        n_bucket *= 2;
    }
    *table = (struct word_table){.max = max, .bucket_mask = n_bucket - 1};
    table->word = calloc((size_t)max + 1, sizeof *table->word);
    table->bucket = malloc(n_bucket * sizeof *table->bucket);
    if (table->word == NULL || table->bucket == NULL) {
        word_table_close(table);
        return err_set(err, ERR_MEMORY, "%s: no memory for a table of %d words", what, max);
    }
    memset(table->bucket, 0xff, n_bucket * sizeof *table->bucket); /* all -1 */
    return ERR_OK;
}

void word_table_close(struct word_table *table)
{
    free(table->word);
    free(table->bucket);
    *table = (struct word_table){0};
}

/* The bucket that holds the word, or the free one where it belongs. */
static uint32_t bucket_of(const struct word_table *table, const char *text, size_t bytes,
                          const char *suffix)
{
    const size_t more = strlen(suffix);
    const uint64_t hash = fnv_hash(fnv_hash(FNV_BEGIN, text, bytes), suffix, more);
    /* With the high bits folded in, the low ones are good enough to choose a bucket. */
    uint32_t at = (uint32_t)(hash ^ hash >> 32) & table->bucket_mask;
    for (; table->bucket[at] >= 0; at = (at + 1) & table->bucket_mask) {
        const struct word_entry *const word = &table->word[table->bucket[at]];
        if (word->bytes == bytes + more && memcmp(word->text, text, bytes) == 0 &&
            memcmp(word->text + bytes, suffix, more) == 0) {
            break;
        }
    }
    return at;
}

int32_t word_table_find(const struct word_table *table, const char *text, size_t bytes,
                        const char *suffix)
{
    return table->bucket[bucket_of(table, text, bytes, suffix)];
}

int32_t word_table_add(struct word_table *table, const char *text, size_t bytes)
{
    const uint32_t at = bucket_of(table, text, bytes, "");
    if (table->bucket[at] < 0) {
        CHECK(table->n < table->max && bytes <= UINT32_MAX);
        table->word[table->n] = (struct word_entry){text, (uint32_t)bytes};
        table->bucket[at] = table->n++;
    }
    return table->bucket[at];
}
