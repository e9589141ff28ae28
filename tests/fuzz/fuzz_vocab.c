/* Vocabularies, merge rules and text of any bytes: the first byte chooses the kind; a NUL ends the
 * vocabulary, one more the rules; the rest is text. Either the files are refused, or any text is
 * refused or becomes ids of the vocabulary whose offsets rise, and any ids give valid UTF-8, the
 * same whole and as a stream. */
#include "engine/tokenizer.h"
#include "engine/tokenizer_impl.h"
#include "tests/fuzz/fuzz_decode.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

static void check_decoding(const struct tokenizer *t, const int32_t *ids, size_t n_ids)
{
    char *text = NULL;
    size_t text_bytes = 0;
    fuzz_decode(t, ids, n_ids, &text, &text_bytes);
    free(text);
}

static void check_text(const struct tokenizer *t, const char *text, size_t bytes)
{
    int32_t *ids = NULL;
    size_t *offsets = NULL;
    size_t n = 0;
    if (tokenizer_encode(t, text, bytes, bytes % 2 == 0, &ids, &n, &offsets, NULL) == ERR_OK) {
        for (size_t i = 0; i < n; i++) {
            CHECK(ids[i] >= 0 && ids[i] < t->n_piece);
            CHECK(i == 0 ? offsets[i] == 0 : offsets[i] > offsets[i - 1] && offsets[i] < bytes);
        }
        check_decoding(t, ids, n);
    }
    free(ids);
    free(offsets);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    static const char *const kinds[] = {"xlm", "word", "char", "byte"};
    if (bytes == 0) {
        return 0;
    }
    size_t at = 1;
    size_t n_vocabulary = 0;
    size_t n_codes = 0;
    char *const vocabulary = fuzz_take(data, bytes, &at, &n_vocabulary);
    char *const codes = fuzz_take(data, bytes, &at, &n_codes);
    int n_line = n_vocabulary > 0 && vocabulary[n_vocabulary - 1] != '\n' ? 1 : 0;
    for (size_t i = 0; i < n_vocabulary; i++) {
        n_line += vocabulary[i] == '\n';
    }
    struct tokenizer *t = NULL;
    if (n_codes == 0) {
        free(codes);
    }
    if (tokenizer_vocab_parse(&t, kinds[data[0] % 4], vocabulary, n_vocabulary,
                              n_codes > 0 ? codes : NULL, n_codes, n_line, NULL) != ERR_OK) {
        return 0;
    }
    check_text(t, (const char *)data + at, bytes - at);
    int32_t ids[64];
    const size_t n_ids = t->n_piece == 0 ? 0 : bytes - at < 64 ? bytes - at : 64;
    for (size_t i = 0; i < n_ids; i++) {
        ids[i] = data[at + i] % t->n_piece;
    }
    check_decoding(t, ids, n_ids);
    tokenizer_close(t);
    return 0;
}
