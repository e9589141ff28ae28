/* The tokenizer with any bytes: invalid UTF-8 is refused; valid text comes back exactly from its
 * ids, whole and as a stream, without a control id among them; any ids decode to valid UTF-8.
 * Needs models/demo/tokenizer.model, from the repository root; does nothing without. */
#include "engine/tokenizer.h"
#include "tests/fuzz/fuzz_decode.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

enum { VOCAB = 4096 };

static struct tokenizer *open_once(void)
{
    static struct tokenizer *tokenizer = NULL;
    static bool tried = false;
    if (!tried) {
        tried = true;
        (void)tokenizer_open(&tokenizer, "models/demo", NULL, NULL, VOCAB, NULL);
    }
    return tokenizer;
}

static void check_text(const struct tokenizer *tokenizer, const char *text, size_t bytes)
{
    int32_t *ids = NULL;
    size_t *offsets = NULL;
    size_t n_ids = 0;
    const enum err_code code =
        tokenizer_encode(tokenizer, text, bytes, false, &ids, &n_ids, &offsets, NULL);
    CHECK((code == ERR_OK) == (utf8_valid_prefix(text, bytes) == bytes));
    if (code != ERR_OK) {
        return;
    }
    for (size_t i = 0; i < n_ids; i++) {
        CHECK(ids[i] >= 0 && ids[i] < VOCAB && !tokenizer_is_control(tokenizer, ids[i]));
        CHECK(offsets[i] < bytes && (i == 0 || offsets[i] >= offsets[i - 1]));
    }
    char *back = NULL;
    size_t back_bytes = 0;
    fuzz_decode(tokenizer, ids, n_ids, &back, &back_bytes);
    CHECK(back_bytes == bytes && memcmp(back, text, bytes) == 0);
    free(back);
    free(ids);
    free(offsets);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    const struct tokenizer *const tokenizer = open_once();
    if (tokenizer == NULL) {
        return 0;
    }
    check_text(tokenizer, (const char *)data, bytes);
    const size_t n_ids = bytes / 2;
    int32_t *const ids = malloc(n_ids > 0 ? n_ids * sizeof *ids : 1);
    CHECK(ids != NULL);
    for (size_t i = 0; i < n_ids; i++) {
        ids[i] = (data[2 * i] | data[2 * i + 1] << 8) % VOCAB;
    }
    char *text = NULL;
    size_t text_bytes = 0;
    fuzz_decode(tokenizer, ids, n_ids, &text, &text_bytes);
    free(text);
    free(ids);
    return 0;
}
