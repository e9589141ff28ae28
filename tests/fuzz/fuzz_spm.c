/* SentencePiece models of any bytes, as whole files: the first two bytes are the model's
 * vocab_size, the third is the length of a text that follows, the rest is the file. Either it is
 * refused with a message, or the text is refused or becomes ids of the vocabulary whose offsets do
 * not fall, and any ids give valid UTF-8, the same whole and as a stream. Run by `make fuzz`;
 * tests/fuzz/corpus/spm holds the seeds. */
#include "engine/tokenizer.h"
#include "tests/fuzz/fuzz_decode.h"

#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

/* The loader takes a path: this one leads to a file in memory. */
static struct tokenizer *open_bytes(const uint8_t *file, size_t bytes, int n_vocab)
{
    const int fd = memfd_create("spm", MFD_CLOEXEC);
    CHECK(fd >= 0 && write(fd, file, bytes) == (ssize_t)bytes);
    char path[32];
    (void)snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    struct tokenizer *tokenizer = NULL;
    struct err err = {0};
    const enum err_code code = tokenizer_open(&tokenizer, "", path, NULL, n_vocab, &err);
    CHECK((code == ERR_OK) == (tokenizer != NULL));
    CHECK(code == ERR_OK || (err.code == code && err.message[0] != '\0'));
    CHECK(close(fd) == 0);
    return tokenizer;
}

static void check_decoding(const struct tokenizer *tokenizer, const int32_t *ids, size_t n_ids)
{
    char *text = NULL;
    size_t text_bytes = 0;
    fuzz_decode(tokenizer, ids, n_ids, &text, &text_bytes);
    free(text);
}

static void check_text(const struct tokenizer *tokenizer, const char *text, size_t bytes,
                       int n_vocab)
{
    int32_t *ids = NULL;
    size_t *offsets = NULL;
    size_t n = 0;
    if (tokenizer_encode(tokenizer, text, bytes, bytes % 2 == 0, &ids, &n, &offsets, NULL) ==
        ERR_OK) {
        for (size_t i = 0; i < n; i++) {
            CHECK(ids[i] >= 0 && ids[i] < n_vocab);
            /* A space that the model itself puts behind a text begins at its end. */
            CHECK(offsets[i] <= bytes && (i == 0 || offsets[i] >= offsets[i - 1]));
        }
        check_decoding(tokenizer, ids, n);
    }
    free(ids);
    free(offsets);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    if (bytes < 3) {
        return 0;
    }
    const int n_vocab = data[0] | data[1] << 8;
    const size_t n_text = data[2] < bytes - 3 ? data[2] : bytes - 3;
    const uint8_t *const text = data + 3;
    struct tokenizer *const tokenizer = open_bytes(text + n_text, bytes - 3 - n_text, n_vocab);
    if (tokenizer == NULL) {
        return 0;
    }
    check_text(tokenizer, (const char *)text, n_text, n_vocab);
    int32_t ids[UINT8_MAX];
    for (size_t i = 0; i < n_text; i++) {
        ids[i] = n_vocab > 0 ? text[i] % n_vocab : 0;
    }
    check_decoding(tokenizer, ids, n_vocab > 0 ? n_text : 0);
    tokenizer_close(tokenizer);
    return 0;
}
