/* Byte-level BPE: files and text of any bytes. The first byte chooses: one of the golden
 * tokenizers, the rest is text; or a file (tokenizer.json, or a rank file), ended by NUL, then
 * text; or the same with merges.txt, ended by NUL, between them. Either the files are refused, or
 * any text that is UTF-8 becomes ids whose offsets never fall and which, unless it was normalized,
 * give it back, and any ids give valid UTF-8, the same whole and as a stream. */
#include "engine/tokenizer_bpe.h"
#include "tests/fuzz/fuzz_decode.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

enum { N_GOLDEN = 4, FROM_FILE = N_GOLDEN, FROM_PAIR, N_CHOICE };

static struct tokenizer *golden(int which)
{
    static struct tokenizer *opened[N_GOLDEN];
    static const struct {
        const char *path;
        int n_vocab;
    } files[N_GOLDEN] = {{"tests/golden/byte-bpe/gpt2/tokenizer.json", 1024},
                         {"tests/golden/byte-bpe/llama3/tokenizer.json", 1305},
                         {"tests/golden/byte-bpe/qwen2/tokenizer.json", 1607},
                         {"tests/golden/byte-bpe/flags/tokenizer.json", 912}};
    if (opened[which] == NULL) {
        struct err err = {0};
        (void)tokenizer_open(&opened[which], NULL, files[which].path, NULL, files[which].n_vocab,
                             &err);
        CHECK(opened[which] != NULL);
    }
    return opened[which];
}

/* Whether decoding gives a text back: nothing normalizes it or takes white space out of it. */
static bool is_lossless(const struct tokenizer *tokenizer)
{
    const struct bpe_tokenizer *const t = (const struct bpe_tokenizer *)tokenizer;
    return !t->nfc && t->raw.n + t->normalized.n == 0;
}

static void check_text(const struct tokenizer *t, const char *text, size_t bytes, bool special)
{
    int32_t *ids = NULL;
    size_t *offsets = NULL;
    size_t n = 0;
    if (tokenizer_encode(t, text, bytes, special, &ids, &n, &offsets, NULL) != ERR_OK) {
        CHECK(utf8_valid_prefix(text, bytes) < bytes); /* the only reason there is */
        return;
    }
    for (size_t i = 0; i < n; i++) {
        CHECK(ids[i] >= 0 && ids[i] < t->n_piece);
        CHECK(offsets[i] < bytes && (i == 0 || offsets[i] >= offsets[i - 1]));
    }
    char *back = NULL;
    size_t n_back = 0;
    fuzz_decode(t, ids, n, &back, &n_back);
    CHECK(!is_lossless(t) || (n_back == bytes && memcmp(back, text, bytes) == 0));
    free(back);
    free(ids);
    free(offsets);
}

static void check(const struct tokenizer *t, const uint8_t *data, size_t bytes)
{
    check_text(t, (const char *)data, bytes, true);
    check_text(t, (const char *)data, bytes, false);
    int32_t ids[64];
    const size_t n = bytes / 2 < 64 ? bytes / 2 : 64;
    for (size_t i = 0; i < n; i++) {
        ids[i] = (data[2 * i] | data[2 * i + 1] << 8) % t->n_piece;
    }
    char *text = NULL;
    size_t text_bytes = 0;
    fuzz_decode(t, ids, n, &text, &text_bytes);
    free(text);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    if (bytes == 0) {
        return 0;
    }
    const int choice = data[0] % N_CHOICE;
    if (choice < N_GOLDEN) {
        check(golden(choice), data + 1, bytes - 1);
        return 0;
    }
    size_t at = 1;
    struct bpe_source source = {.path = "tokenizer", .merges_path = "merges.txt"};
    char *const file = fuzz_take(data, bytes, &at, &source.bytes);
    char *const merges =
        choice == FROM_PAIR ? fuzz_take(data, bytes, &at, &source.merges_bytes) : NULL;
    source.text = file;
    source.merges = merges;
    struct tokenizer *t = NULL;
    if (tokenizer_bpe_parse(&t, &source, 300, NULL) == ERR_OK) {
        check(t, data + at, bytes - at);
    }
    tokenizer_close(t);
    free(file);
    free(merges);
    return 0;
}
