/* The tokenizer on the model that ships: exact round trips, offsets, streams, hostile text. */
#include "engine/tokenizer.h"
#include "kernels/utf8.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#define MODEL "models/demo/tokenizer.model"
enum { VOCAB = 4096 };

static struct tokenizer *tok;

static int setup(void **state)
{
    (void)state;
    struct err err = {0};
    if (tokenizer_open(&tok, "models/demo", NULL, NULL, VOCAB, &err) != ERR_OK || tok == NULL) {
        (void)fprintf(stderr, "run from the repository root: %s\n", err.message);
        return 1;
    }
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    tokenizer_close(tok);
    return 0;
}

/* ---- texts ---- */

static const char *const texts[] = {
    "",
    "a",
    " ",
    "  ",
    "The quick brown fox jumps over the lazy dog.",
    "  leading, trailing and    inner   spaces  ",
    "one\ntwo\r\nthree\n\n\nfour\n",
    "\n",
    "\ttabs\tand\vothers\f",
    "digits 1234567890 3.14159 1,000,000",
    "caf\xc3\xa9 na\xc3\xafve \xe2\x82\xac"
    "5 \xc2\xa0 \xe2\x80\x94 \xe2\x80\x9cquoted\xe2\x80\x9d",
    "\xe6\x97\xa5\xe6\x9c\xac\xe8\xaa\x9e \xd0\xa0\xd1\x83\xd1\x81 "
    "\xd8\xb9\xd8\xb1\xd8\xa8\xd9\x8a",
    "\xf0\x9f\x99\x82\xf0\x9f\x91\xa9\xe2\x80\x8d\xf0\x9f\x94\xac emoji",  /* with a joiner */
    "e\xcc\x81 combining; \xef\xac\x81 ligature; \xef\xbc\xa1 full width", /* not normalised */
    "\xe2\x96\x81literal\xe2\x96\x81marks \xe2\x96\x81",                   /* U+2581 */
    "<s></s><pad><unk><0x0A><0xFF>",
    "\xef\xbf\xbd and \xef\xbb\xbf and \xf4\x8f\xbf\xbf and \x01\x7f",
};
enum { N_TEXT = sizeof texts / sizeof texts[0] };

struct encoded {
    int32_t *ids;
    size_t n;
    size_t *offsets;
};

static struct encoded encode(const char *text, size_t bytes, bool allow_control)
{
    struct encoded e = {0};
    struct err err = {0};
    if (tokenizer_encode(tok, text, bytes, allow_control, &e.ids, &e.n, &e.offsets, &err) !=
        ERR_OK) {
        fail_msg("encode: %s", err.message);
    }
    for (size_t i = 0; i < e.n; i++) {
        assert_in_range(e.ids[i], 0, VOCAB - 1);
    }
    return e;
}

static void encoded_free(struct encoded *e)
{
    free(e->ids);
    free(e->offsets);
}

static void assert_text(const char *got, size_t got_bytes, const char *expected, size_t bytes)
{
    if (got_bytes != bytes || memcmp(got, expected, bytes) != 0) {
        fail_msg("expected %zu bytes \"%s\", got %zu bytes \"%s\"", bytes, expected, got_bytes,
                 got);
    }
}

static void assert_round_trip(const char *text, size_t bytes)
{
    struct encoded e = encode(text, bytes, false);
    char *back = NULL;
    size_t n = 0;
    assert_int_equal(tokenizer_decode(tok, e.ids, e.n, &back, &n, NULL), ERR_OK);
    assert_text(back, n, text, bytes);
    /* Offsets: token i spells the bytes from offsets[i] to the next one's. */
    char piece[1024];
    for (size_t i = 0; i < e.n; i++) {
        const size_t end = i + 1 < e.n ? e.offsets[i + 1] : bytes;
        const size_t width = tokenizer_bytes(tok, e.ids[i], piece, sizeof piece);
        assert_true(e.offsets[i] <= end && end <= bytes);
        assert_text(piece, width, text + e.offsets[i], end - e.offsets[i]);
    }
    free(back);
    encoded_free(&e);
}

static void round_trips_exactly(void **state)
{
    (void)state;
    for (int t = 0; t < N_TEXT; t++) {
        assert_round_trip(texts[t], strlen(texts[t]));
    }
    assert_round_trip("a\0b\0", 4); /* NUL is a byte like others */
}

/* Characters from all over Unicode, in runs: what has no piece goes through byte pieces. */
static void round_trips_random_unicode(void **state)
{
    (void)state;
    unsigned random = 12345;
    for (int round = 0; round < 200; round++) {
        char text[512];
        size_t n = 0;
        while (n < sizeof text - 8) {
            random = random * 1664525u + 1013904223u;
            uint32_t c = random >> 8;
            static const uint32_t top[] = {0x7f, 0x7f, 0x7ff, 0x2fff, 0xffff, 0x10ffff};
            c %= top[(random >> 4) % 6] + 1;
            if (c >= 0xd800 && c <= 0xdfff) {
                continue;
            }
            if (c < 0x80) {
                text[n++] = (char)c;
            } else if (c < 0x800) {
                text[n++] = (char)(0xc0 | c >> 6);
                text[n++] = (char)(0x80 | (c & 0x3f));
            } else if (c < 0x10000) {
                text[n++] = (char)(0xe0 | c >> 12);
                text[n++] = (char)(0x80 | (c >> 6 & 0x3f));
                text[n++] = (char)(0x80 | (c & 0x3f));
            } else {
                text[n++] = (char)(0xf0 | c >> 18);
                text[n++] = (char)(0x80 | (c >> 12 & 0x3f));
                text[n++] = (char)(0x80 | (c >> 6 & 0x3f));
                text[n++] = (char)(0x80 | (c & 0x3f));
            }
        }
        assert_round_trip(text, n);
    }
}

static void newline_is_a_piece_of_its_own(void **state)
{
    (void)state;
    struct encoded e = encode("a\n\nb", 4, false);
    assert_int_equal(e.n, 4);
    assert_int_equal(e.ids[1], e.ids[2]);
    assert_string_equal(tokenizer_piece(tok, e.ids[1]), "\n");
    encoded_free(&e);
}

/* ---- control pieces ---- */

static void typed_control_pieces_are_text(void **state)
{
    (void)state;
    static const char *const typed[] = {"<s>",    "</s>",     "<pad>", "<unk>", "<0x0A>",
                                        "a</s>b", "</s></s>", " </s>", "</s>\n"};
    for (size_t t = 0; t < sizeof typed / sizeof typed[0]; t++) {
        struct encoded e = encode(typed[t], strlen(typed[t]), false);
        for (size_t i = 0; i < e.n; i++) {
            if (tokenizer_is_control(tok, e.ids[i])) {
                fail_msg("\"%s\" gives control id %d", typed[t], e.ids[i]);
            }
        }
        assert_true(e.n > 1); /* "<0x0A>" is no byte piece either */
        encoded_free(&e);
    }
}

static void a_lone_control_piece_where_allowed(void **state)
{
    (void)state;
    struct encoded e = encode("</s>", 4, true);
    assert_int_equal(e.n, 1);
    assert_int_equal(e.ids[0], 1);
    assert_int_equal(e.offsets[0], 0);
    encoded_free(&e);
    e = encode("</s> ", 5, true);
    assert_true(e.n > 1);
    encoded_free(&e);
    assert_true(tokenizer_is_control(tok, 0) && tokenizer_is_control(tok, 2) &&
                tokenizer_is_control(tok, 3));
    assert_false(tokenizer_is_control(tok, 300));
}

/* ---- streams ---- */

/* Pushes ids one by one; the sum must be what decoding the list gives. */
static void assert_stream(const int32_t *ids, size_t n_ids)
{
    char *whole = NULL;
    size_t n_whole = 0;
    assert_int_equal(tokenizer_decode(tok, ids, n_ids, &whole, &n_whole, NULL), ERR_OK);
    const size_t room = tokenizer_bytes_max(tok) + 16;
    char *const out = malloc(room);
    char *const sum = malloc(n_whole + (n_ids + 1) * room);
    assert_non_null(out);
    assert_non_null(sum);
    size_t n = 0;
    struct detok detok;
    detok_begin(&detok, tok, true);
    for (size_t i = 0; i <= n_ids; i++) {
        const size_t got =
            i < n_ids ? detok_push(&detok, ids[i], out, room) : detok_end(&detok, out, room);
        assert_int_equal(utf8_valid_prefix(out, got), got); /* whole characters only */
        memcpy(sum + n, out, got);
        n += got;
    }
    assert_text(sum, n, whole, n_whole);
    free(whole);
    free(out);
    free(sum);
}

static void streams_equal_whole_decoding(void **state)
{
    (void)state;
    for (int t = 0; t < N_TEXT; t++) {
        struct encoded e = encode(texts[t], strlen(texts[t]), false);
        assert_stream(e.ids, e.n);
        encoded_free(&e);
    }
}

static int32_t byte_id(int byte)
{
    char name[8];
    (void)snprintf(name, sizeof name, "<0x%02X>", byte);
    for (int32_t id = 0; id < VOCAB; id++) {
        if (strcmp(tokenizer_piece(tok, id), name) == 0) {
            return id;
        }
    }
    fail_msg("no byte piece %s", name);
    return -1;
}

static void streams_of_random_ids_equal_whole_decoding(void **state)
{
    (void)state;
    const int32_t first_byte = byte_id(0);
    unsigned random = 99;
    for (int round = 0; round < 300; round++) {
        int32_t ids[64];
        for (int i = 0; i < 64; i++) {
            random = random * 1664525u + 1013904223u;
            /* Mostly bytes, so that broken characters of all kinds come up; control ids too. */
            ids[i] = random >> 30 != 0 ? first_byte + (int32_t)(random >> 12 & 0xff)
                                       : (int32_t)((random >> 8) % VOCAB);
        }
        assert_stream(ids, 64);
    }
}

static void broken_characters_become_replacements(void **state)
{
    (void)state;
    static const struct {
        int bytes[6];
        const char *expected;
    } cases[] = {
        {{0xe2, 0x82, 0xac, -1}, "\xe2\x82\xac"},
        {{0xe2, 0x82, -1}, "\xef\xbf\xbd\xef\xbf\xbd"},
        {{0x80, 'a', -1},
         "\xef\xbf\xbd"
         "a"},
        {{0xe2, 0x82, 'a', -1},
         "\xef\xbf\xbd\xef\xbf\xbd"
         "a"},
        {{0xc0, 0x80, -1}, "\xef\xbf\xbd\xef\xbf\xbd"},                   /* overlong */
        {{0xed, 0xa0, 0x80, -1}, "\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd"}, /* surrogate */
        {{0xf0, 0x9f, 0xc3, 0xa9, -1}, "\xef\xbf\xbd\xef\xbf\xbd\xc3\xa9"},
        {{0xff, -1}, "\xef\xbf\xbd"},
    };
    for (size_t c = 0; c < sizeof cases / sizeof cases[0]; c++) {
        int32_t ids[6];
        size_t n = 0;
        for (; cases[c].bytes[n] >= 0; n++) {
            ids[n] = byte_id(cases[c].bytes[n]);
        }
        char *text = NULL;
        size_t bytes = 0;
        assert_int_equal(tokenizer_decode(tok, ids, n, &text, &bytes, NULL), ERR_OK);
        assert_text(text, bytes, cases[c].expected, strlen(cases[c].expected));
        free(text);
    }
}

/* An unfinished character is not shown, nor is a finished one held. */
static void holds_back_unfinished_characters_only(void **state)
{
    (void)state;
    char out[1024];
    struct detok detok;
    detok_begin(&detok, tok, false);
    assert_int_equal(detok_push(&detok, byte_id(0xe2), out, sizeof out), 0);
    assert_int_equal(detok_push(&detok, 1, out, sizeof out), 0); /* control: no bytes */
    assert_int_equal(detok_push(&detok, byte_id(0x82), out, sizeof out), 0);
    assert_int_equal(detok_push(&detok, byte_id(0xac), out, sizeof out), 3);
    assert_int_equal(detok_push(&detok, byte_id('a'), out, sizeof out), 1);
    assert_int_equal(detok_end(&detok, out, sizeof out), 0);
}

/* What a token proves wrong stands before it; a character that it completes does not. */
static void tells_apart_what_ends_before_a_token(void **state)
{
    (void)state;
    char out[1024];
    struct detok detok;
    detok_begin(&detok, tok, false);
    assert_int_equal(detok_push(&detok, byte_id(0xe2), out, sizeof out), 0);
    assert_int_equal(detok_push(&detok, byte_id(0x82), out, sizeof out), 0);
    assert_int_equal(detok_push(&detok, byte_id(0xac), out, sizeof out), 3);
    assert_int_equal(detok.n_before, 0);
    assert_int_equal(detok_push(&detok, byte_id(0xe2), out, sizeof out), 0);
    assert_int_equal(detok_push(&detok, byte_id(0x82), out, sizeof out), 0);
    assert_int_equal(detok_push(&detok, byte_id(0xc3), out, sizeof out), 6);
    assert_int_equal(detok.n_before, 2);
    assert_int_equal(detok_push(&detok, byte_id('a'), out, sizeof out), 4);
    assert_int_equal(detok.n_before, 1);
    assert_int_equal(detok_push(&detok, byte_id('a'), out, sizeof out), 1);
    assert_int_equal(detok.n_before, 0);
}

/* ---- bad input ---- */

static void invalid_utf8_is_refused(void **state)
{
    (void)state;
    static const char *const bad[] = {"\xff",
                                      "a\x80",
                                      "\xc3",
                                      "\xe2\x82",
                                      "\xed\xa0\x80",
                                      "\xc0\xaf",
                                      "\xf5\x80\x80\x80",
                                      "ok \xf0\x9f\x99"};
    for (size_t b = 0; b < sizeof bad / sizeof bad[0]; b++) {
        struct err err = {0};
        int32_t *ids = NULL;
        size_t n = 0;
        assert_int_equal(tokenizer_encode(tok, bad[b], strlen(bad[b]), false, &ids, &n, NULL, &err),
                         ERR_ARGUMENT);
        assert_non_null(strstr(err.message, "not valid UTF-8"));
        assert_null(ids);
    }
}

static void files_that_do_not_fit_are_refused(void **state)
{
    (void)state;
    struct err err = {0};
    struct tokenizer *t = NULL;
    assert_int_equal(tokenizer_open(&t, NULL, MODEL, NULL, VOCAB - 1, &err), ERR_FORMAT);
    assert_non_null(strstr(err.message, "4096"));
    assert_non_null(strstr(err.message, "4095"));
    assert_null(t);
    assert_int_equal(tokenizer_open(&t, NULL, "no/such/file", NULL, VOCAB, &err), ERR_IO);
    assert_non_null(strstr(err.message, "no/such/file"));
    assert_int_equal(tokenizer_open(&t, NULL, "Makefile", NULL, VOCAB, &err), ERR_FORMAT);
    assert_non_null(strstr(err.message, "Makefile"));
    /* A pipe is not waited for. */
    char pipe[] = "/tmp/test_tokenizer.XXXXXX";
    const int fd = mkstemp(pipe);
    assert_true(fd >= 0);
    (void)close(fd);
    assert_int_equal(unlink(pipe), 0);
    assert_int_equal(mkfifo(pipe, 0600), 0);
    assert_int_equal(tokenizer_open(&t, NULL, pipe, NULL, VOCAB, &err), ERR_IO);
    assert_non_null(strstr(err.message, "not a regular file"));
    assert_int_equal(tokenizer_open(&t, NULL, pipe, "word", VOCAB, &err), ERR_IO);
    assert_non_null(strstr(err.message, "not a regular file"));
    assert_int_equal(unlink(pipe), 0);
    /* A folder without one is a model of ids only. */
    assert_int_equal(tokenizer_open(&t, "tests/engine", NULL, NULL, VOCAB, &err), ERR_OK);
    assert_null(t);
}

/* Characters "▁", "a", "b" without a piece for what they cannot spell: the library's own stands
 * behind them and is no id. With 4 ids it is one. */
static void an_unknown_piece_behind_the_words_is_refused_in_text(void **state)
{
    static const unsigned char model[] =
        "\x0a\x0c\x0a\x03\xe2\x96\x81\x15\0\0\0\0\x18\x01"
        "\x0a\x0a\x0a\x01"
        "a\x15\0\0\0\0\x18\x01\x0a\x0a\x0a\x01"
        "b\x15\0\0\0\0\x18\x01\x0a\x0e\x0a\x05<unk>\x15\0\0\0\0\x18\x02"
        "\x12\x02\x18\x04"          /* a model of characters */
        "\x1a\x04\x18\x00\x20\x00"; /* nothing put in front, nothing trimmed */
    char path[] = "/tmp/test_tokenizer.XXXXXX";
    struct tokenizer *opened = NULL;
    struct err err = {0};
    int32_t *ids = NULL;
    size_t n_ids = 0;
    (void)state;
    const int fd = mkstemp(path);
    assert_true(fd >= 0);
    assert_int_equal(write(fd, model, sizeof model - 1), sizeof model - 1);
    (void)close(fd);
    assert_int_equal(tokenizer_open(&opened, NULL, path, NULL, 2, &err), ERR_FORMAT);
    for (int n_vocab = 3; n_vocab <= 4; n_vocab++) {
        if (tokenizer_open(&opened, NULL, path, NULL, n_vocab, &err) != ERR_OK) {
            fail_msg("%d words: %s", n_vocab, err.message);
        }
        assert_int_equal(tokenizer_encode(opened, "ab a", 4, true, &ids, &n_ids, NULL, &err),
                         ERR_OK);
        assert_int_equal(n_ids, 4);
        assert_true(ids[0] == 1 && ids[1] == 2 && ids[2] == 0 && ids[3] == 1);
        free(ids);
        const enum err_code code = tokenizer_encode(opened,
                                                    "ab \xc3\xa9"
                                                    "a",
                                                    6, true, &ids, &n_ids, NULL, &err);
        if (n_vocab == 4) {
            assert_int_equal(code, ERR_OK);
            assert_int_equal(ids[3], 3);
            free(ids);
        } else {
            assert_int_equal(code, ERR_ARGUMENT);
            assert_non_null(strstr(err.message, "no piece for \"\xc3\xa9\" at byte 3"));
        }
        tokenizer_close(opened);
    }
    (void)unlink(path);
}

static void damaged_models_are_refused_or_work(void **state)
{
    (void)state;
    static char bytes[1 << 20];
    FILE *file = fopen(MODEL, "rb");
    assert_non_null(file);
    const size_t n = fread(bytes, 1, sizeof bytes, file);
    assert_int_equal(fclose(file), 0);
    char path[] = "/tmp/pkmserve-tokenizer-XXXXXX";
    const int fd = mkstemp(path);
    assert_true(fd >= 0);
    assert_int_equal(close(fd), 0);
    const size_t lengths[] = {0, 1, 10, n / 2, n - 1};
    for (size_t l = 0; l < sizeof lengths / sizeof lengths[0]; l++) {
        file = fopen(path, "wb");
        assert_non_null(file);
        assert_int_equal(fwrite(bytes, 1, lengths[l], file), lengths[l]);
        assert_int_equal(fclose(file), 0);
        struct err err = {0};
        struct tokenizer *t = NULL;
        assert_int_equal(tokenizer_open(&t, NULL, path, NULL, VOCAB, &err), ERR_FORMAT);
        assert_non_null(strstr(err.message, path));
    }
    assert_int_equal(unlink(path), 0);
}

static void tells_its_kind(void **state)
{
    (void)state;
    assert_string_equal(tokenizer_kind(tok), "sentencepiece-unigram");
    assert_false(tokenizer_dummy_prefix(tok));
    assert_string_equal(tokenizer_piece(tok, 1), "</s>");
    assert_in_range(tokenizer_bytes_max(tok), 2, 256);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(round_trips_exactly),
        cmocka_unit_test(round_trips_random_unicode),
        cmocka_unit_test(newline_is_a_piece_of_its_own),
        cmocka_unit_test(typed_control_pieces_are_text),
        cmocka_unit_test(a_lone_control_piece_where_allowed),
        cmocka_unit_test(streams_equal_whole_decoding),
        cmocka_unit_test(streams_of_random_ids_equal_whole_decoding),
        cmocka_unit_test(broken_characters_become_replacements),
        cmocka_unit_test(holds_back_unfinished_characters_only),
        cmocka_unit_test(tells_apart_what_ends_before_a_token),
        cmocka_unit_test(invalid_utf8_is_refused),
        cmocka_unit_test(files_that_do_not_fit_are_refused),
        cmocka_unit_test(an_unknown_piece_behind_the_words_is_refused_in_text),
        cmocka_unit_test(damaged_models_are_refused_or_work),
        cmocka_unit_test(tells_its_kind),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
