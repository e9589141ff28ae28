/* Normalization Form C of Unicode 16.0 (Unicode Standard Annex 15): characters are taken apart into
 * their canonical parts, marks are put in order, and parts are joined again.
 *
 * A text is copied as long as no character in it can change (UNICODE_UNSTABLE); each run of such
 * characters is normalized together with the character before it, which they may join. Time is
 * linear in the text, also for a text that is nothing but marks. */
#ifndef ENGINE_NFC_H
#define ENGINE_NFC_H

#include "kernels/err.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Whether normalizing cannot change the text (valid UTF-8). */
bool nfc_is_stable(const char *text, size_t bytes);

/* A normalized text, and where its bytes come from. */
struct nfc_text {
    char *text;     /* [bytes], not ended by NUL. Owner: this */
    uint32_t *from; /* [bytes + 1] the byte of the source at which the character, or the characters
                     * that were joined, begins; never falling; the last is the source's end. Owner:
                     * this */
    size_t bytes, bytes_max;
};

/* Normalizes text (valid UTF-8, at most UINT32_MAX bytes) into out, whose former content is
 * replaced; out begins zeroed. ERR_MEMORY leaves out as valid as it was. */
enum err_code nfc_normalize(struct nfc_text *out, const char *text, size_t bytes, struct err *err);
void nfc_free(struct nfc_text *out);

/* The tables of nfc_table.c, made by unicode_tables.py; Hangul is arithmetic. */
struct nfc_mapping {
    uint32_t code, first, second; /* code is first and second; second 0: first alone */
};
struct nfc_marks {
    uint32_t first, last, order; /* code points first to last, canonical combining class order */
};
extern const int nfc_n_mapping;
extern const struct nfc_mapping nfc_mapping[]; /* by code */
extern const int nfc_n_pair;
extern const uint16_t nfc_pair[]; /* mappings that are joined again, by (first, second) */
extern const int nfc_n_marks;
extern const struct nfc_marks nfc_marks[]; /* by code point; what is in none has class 0 */

#endif
