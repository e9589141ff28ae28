/* Byte-level BPE against what Hugging Face's package makes of the same texts
 * (tests/golden/byte-bpe): classes, pieces, ids, text, streams; merging against a slow and plain
 * one; normalization; files that must be refused by name. */
#include "engine/nfc.h"
#include "engine/pretokenizer.h"
#include "engine/tokenizer_bpe.h"
#include "engine/unicode.h"
#include "kernels/utf8.h"

#include <jansson.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#define GOLDEN "tests/golden/byte-bpe/"

static json_t *load(const char *folder, const char *name)
{
    char path[200];
    (void)snprintf(path, sizeof path, GOLDEN "%s%s", folder, name);
    json_error_t fault;
    json_t *const root = json_load_file(path, JSON_ALLOW_NUL, &fault);
    if (root == NULL) {
        fail_msg("%s: %s", path, fault.text);
    }
    return root;
}

static struct tokenizer *from_source(const struct bpe_source *source, int n_vocab)
{
    struct tokenizer *t = NULL;
    struct err err = {0};
    if (tokenizer_bpe_parse(&t, source, n_vocab, &err) != ERR_OK) {
        fail_msg("%s", err.message);
    }
    return t;
}

static struct tokenizer *from_text(const char *text, int n_vocab)
{
    return from_source(
        &(struct bpe_source){.path = "tokenizer.json", .text = text, .bytes = strlen(text)},
        n_vocab);
}

static struct tokenizer *from_json(const json_t *root, int n_vocab)
{
    char *const text = json_dumps(root, 0);
    struct tokenizer *const t = from_text(text, n_vocab);
    free(text);
    return t;
}

static int n_vocab_of(const char *folder)
{
    json_t *const expected = load(folder, "expected.json");
    const int n = (int)json_integer_value(json_object_get(expected, "vocab_size"));
    json_decref(expected);
    return n;
}

struct encoded {
    int32_t *ids;
    size_t *offsets;
    size_t n;
};

static struct encoded encode(const struct tokenizer *t, const char *text, size_t bytes,
                             bool special)
{
    struct encoded e = {0};
    struct err err = {0};
    if (tokenizer_encode(t, text, bytes, special, &e.ids, &e.n, &e.offsets, &err) != ERR_OK) {
        fail_msg("%s", err.message);
    }
    for (size_t i = 0; i < e.n; i++) { /* offsets cut the text */
        assert_true(i == 0 ? e.offsets[0] == 0 : e.offsets[i] >= e.offsets[i - 1]);
        assert_true(e.offsets[i] < bytes);
    }
    return e;
}

static void encoded_free(struct encoded *e)
{
    free(e->ids);
    free(e->offsets);
}

/* The text of ids, whole and as a stream, which must agree. malloc'd. */
static char *decode(const struct tokenizer *t, const int32_t *ids, size_t n_ids, bool show_control,
                    size_t *bytes)
{
    const size_t room = tokenizer_bytes_max(t) + 16;
    struct detok detok;
    detok_begin(&detok, t, true);
    detok.show_control = show_control;
    char *const text = malloc((n_ids + 1) * room);
    char *const out = malloc(room); /* exactly so much: a sanitizer sees a byte more */
    assert_true(text != NULL && out != NULL);
    *bytes = 0;
    for (size_t i = 0; i <= n_ids; i++) {
        const size_t n =
            i < n_ids ? detok_push(&detok, ids[i], out, room) : detok_end(&detok, out, room);
        assert_int_equal(utf8_valid_prefix(out, n), n); /* whole characters only */
        memcpy(text + *bytes, out, n);
        *bytes += n;
    }
    free(out);
    if (!show_control) {
        char *whole = NULL;
        size_t n_whole = 0;
        assert_int_equal(tokenizer_decode(t, ids, n_ids, &whole, &n_whole, NULL), ERR_OK);
        assert_true(n_whole == *bytes && memcmp(whole, text, n_whole) == 0);
        free(whole);
    }
    return text;
}

/* ---- classes and pieces ---- */

static void test_classes(void **state)
{
    (void)state;
    json_t *const classes = load("", "classes.json");
    unsigned char *const due = calloc(0x110000, 1);
    assert_non_null(due);
    static const struct {
        const char *key;
        enum unicode_class class;
    } kinds[] = {
        {"s", UNICODE_SPACE}, {"L", UNICODE_LETTER}, {"N", UNICODE_NUMBER}, {"M", UNICODE_MARK}};
    for (size_t k = 0; k < 4; k++) {
        const json_t *const ranges = json_object_get(classes, kinds[k].key);
        assert_true(json_array_size(ranges) > 0);
        for (size_t i = 0; i < json_array_size(ranges); i++) {
            const json_t *const range = json_array_get(ranges, i);
            const json_int_t last = json_integer_value(json_array_get(range, 1));
            for (json_int_t c = json_integer_value(json_array_get(range, 0)); c <= last; c++) {
                due[c] = (unsigned char)kinds[k].class;
            }
        }
    }
    const json_t *const words = json_object_get(classes, "w");
    assert_true(json_array_size(words) > 0);
    size_t next = 0;
    for (uint32_t code = 0; code < 0x110000; code++) {
        const enum unicode_class got = unicode_class(code);
        const enum unicode_class kind = got == UNICODE_OTHER_NUMBER ? UNICODE_NUMBER
                                        : got == UNICODE_JOINER     ? UNICODE_OTHER
                                                                    : got;
        if (kind != due[code]) {
            fail_msg("U+%04X: expected class %d, got %d", code, due[code], got);
        }
        const json_t *const range = json_array_get(words, next);
        const bool in_word = range != NULL && code >= json_integer_value(json_array_get(range, 0));
        if (unicode_is_word(code) != in_word) {
            fail_msg("U+%04X: part of a word? expected %d", code, in_word);
        }
        next += in_word && code == json_integer_value(json_array_get(range, 1));
    }
    free(due);
    json_decref(classes);
}

static void expect_pieces(enum pretokenizer kind, const char *text, size_t bytes, const size_t *due,
                          size_t n_due)
{
    size_t at = 0;
    for (size_t i = 0; i < n_due; i++) {
        const size_t end = at < bytes ? pretokenizer_end(kind, text, bytes, at) : at;
        if (end - at != due[i]) {
            fail_msg("pattern %d, piece %zu of \"%.200s\": expected %zu bytes, got %zu", (int)kind,
                     i, text, due[i], end - at);
        }
        at = end;
    }
    assert_int_equal(at, bytes);
}

static void test_splits(void **state)
{
    (void)state;
    static const char *const names[] = {"gpt2", "llama3", "qwen2"};
    json_t *const texts = load("", "texts.json");
    json_t *const splits = load("", "splits.json");
    for (int kind = 0; kind < 3; kind++) {
        const json_t *const list = json_object_get(splits, names[kind]);
        assert_int_equal(json_array_size(list), json_array_size(texts));
        for (size_t i = 0; i < json_array_size(list); i++) {
            const json_t *const text = json_object_get(json_array_get(texts, i), "text");
            const json_t *const lengths = json_array_get(list, i);
            const size_t n = json_array_size(lengths);
            size_t *const due = calloc(n + 1, sizeof *due);
            assert_non_null(due);
            for (size_t j = 0; j < n; j++) {
                due[j] = (size_t)json_integer_value(json_array_get(lengths, j));
            }
            expect_pieces((enum pretokenizer)kind, json_string_value(text),
                          json_string_length(text), due, n);
            free(due);
        }
    }
    json_decref(texts);
    json_decref(splits);
}

/* Text whose pieces are divided by '|'. */
static void test_pieces(void **state)
{
    (void)state;
    static const struct {
        enum pretokenizer kind;
        const char *pieces;
    } cases[] = {
        {PRETOKENIZER_GPT2, "it|'s| 12|.|  | a"},
        {PRETOKENIZER_GPT2, "'|S|\t|a|\r\n|\n|b|  "},
        {PRETOKENIZER_GPT2, "e|\xcc\x81|a|'s|up"},
        {PRETOKENIZER_LLAMA3, "IT|'S| |123|456|7| ...\n\n|\ta|  \n\n  \n| | b"},
        {PRETOKENIZER_LLAMA3, "'\xc5\xbf|up|\xcc\x81x|\xcc\x81\n"},
        {PRETOKENIZER_QWEN2, "1|2|\xc2\xbd|\xc2\xa0word|\r\n|x"},
        /* Marks belong to words: e and U+0301, a mark alone, a mark behind a number. */
        {PRETOKENIZER_QWEN35, "e\xcc\x81n|1|\xcc\x81|2| \xcc\x81|..|\xcc\x81|'Ll| !!\n"},
        {PRETOKENIZER_QWEN35, "\xe0\xb8\x97\xe0\xb8\xb5\xe0\xb9\x88|5|5| |5"},
        {PRETOKENIZER_DIGITS, "a|1|2|b|  |3| |4| c|'s|  "},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char text[100];
        size_t due[30];
        size_t n = 0;
        size_t bytes = 0;
        size_t first = 0;
        for (const char *c = cases[i].pieces;; c++) {
            if (*c == '|' || *c == '\0') {
                due[n++] = bytes - first;
                first = bytes;
                if (*c == '\0') {
                    break;
                }
            } else {
                text[bytes++] = *c;
            }
        }
        text[bytes] = '\0';
        expect_pieces(cases[i].kind, text, bytes, due, n);
    }
}

/* ---- the golden tokenizers ---- */

static void expect_ids(const struct encoded *e, const json_t *due, const char *what, size_t text)
{
    for (size_t i = 0; i < e->n && i < json_array_size(due); i++) {
        const json_int_t id = json_integer_value(json_array_get(due, i));
        if (e->ids[i] != id) {
            fail_msg("%s: text %zu, token %zu: expected %d, got %d", what, text, i, (int)id,
                     e->ids[i]);
        }
    }
    if (e->n != json_array_size(due)) {
        fail_msg("%s: text %zu: expected %zu tokens, got %zu", what, text, json_array_size(due),
                 e->n);
    }
}

static void check_encoding(const struct tokenizer *t, const json_t *expected, const char *what)
{
    json_t *const texts = load("", "texts.json");
    const json_t *const plain = json_object_get(expected, "ids_special_as_text");
    const json_t *const changed = json_object_get(expected, "not_restored_by_decoding");
    size_t next_changed = 0;
    for (size_t i = 0; i < json_array_size(texts); i++) {
        const json_t *const text = json_object_get(json_array_get(texts, i), "text");
        const char *const chars = json_string_value(text);
        const size_t bytes = json_string_length(text);
        const json_t *const due = json_array_get(json_object_get(expected, "ids"), i);
        struct encoded e = encode(t, chars, bytes, true);
        expect_ids(&e, due, what, i);
        size_t n = 0;
        char *const back = decode(t, e.ids, e.n, true, &n);
        const bool restored = n == bytes && memcmp(back, chars, n) == 0;
        const bool exception =
            json_integer_value(json_array_get(changed, next_changed)) == (json_int_t)i &&
            next_changed < json_array_size(changed);
        next_changed += exception ? 1 : 0;
        if (restored == exception) {
            fail_msg("%s: text %zu is %srestored by decoding", what, i, restored ? "" : "not ");
        }
        free(back);
        encoded_free(&e);
        char key[24];
        (void)snprintf(key, sizeof key, "%zu", i);
        const json_t *const other = json_object_get(plain, key);
        e = encode(t, chars, bytes, false);
        expect_ids(&e, other != NULL ? other : due, what, i);
        encoded_free(&e);
    }
    assert_int_equal(next_changed, json_array_size(changed));
    json_decref(texts);
}

static void check_decoding(const struct tokenizer *t, const json_t *expected, const char *what)
{
    const json_t *const cases = json_object_get(expected, "decode");
    for (size_t i = 0; i < json_array_size(cases); i++) {
        const json_t *const item = json_array_get(cases, i);
        const json_t *const list = json_object_get(item, "ids");
        const json_t *const text = json_object_get(item, "text");
        const json_t *const skipped = json_object_get(item, "text_skip_special");
        int32_t ids[4096];
        size_t n = 0;
        for (size_t j = 0; j < json_array_size(list); j++) {
            const json_int_t id = json_integer_value(json_array_get(list, j));
            if (id < t->n_piece) { /* the server refuses what is no row of the model */
                ids[n++] = (int32_t)id;
            }
        }
        for (int show = 0; show < 2; show++) {
            const json_t *const due = show || skipped == NULL ? text : skipped;
            size_t bytes = 0;
            char *const got = decode(t, ids, n, show, &bytes);
            if (bytes != json_string_length(due) ||
                memcmp(got, json_string_value(due), bytes) != 0) {
                fail_msg("%s: decode[%zu]: expected \"%s\", got \"%.*s\"", what, i,
                         json_string_value(due), (int)bytes, got);
            }
            free(got);
        }
    }
    assert_true(json_array_size(cases) > 100);
}

/* Ids behind the last token are rows of a padded matrix: they have no text. */
static void check_folder(const char *folder, int n_more)
{
    char name[40];
    (void)snprintf(name, sizeof name, "%s/", folder);
    json_t *const file = load(name, "tokenizer.json");
    json_t *const expected = load(name, "expected.json");
    const int n = n_vocab_of(name);
    struct tokenizer *const t = from_json(file, n + n_more);
    assert_string_equal(tokenizer_kind(t), "byte-bpe");
    check_encoding(t, expected, folder);
    check_decoding(t, expected, folder);
    for (int id = n; id < n + n_more; id++) {
        assert_string_equal(tokenizer_piece(t, id), "");
        assert_int_equal(tokenizer_bytes(t, id, NULL, 0), 0);
    }
    tokenizer_close(t);
    json_decref(file);
    json_decref(expected);
}

static void test_gpt2(void **state)
{
    (void)state;
    check_folder("gpt2", 23);
}

static void test_llama3(void **state)
{
    (void)state;
    check_folder("llama3", 0);
}

static void test_qwen2(void **state)
{
    (void)state;
    check_folder("qwen2", 5);
}

static void test_flags(void **state)
{
    (void)state;
    check_folder("flags", 0);
}

/* A token of white space that takes what stands on both sides takes it once. */
static void test_white_space_that_is_swallowed(void **state)
{
    (void)state;
    json_t *const file = load("gpt2/", "tokenizer.json");
    json_t *const added = json_object_get(file, "added_tokens");
    json_array_append_new(added, json_pack("{s:i,s:s,s:b,s:b}", "id", 1001, "content", "\n\n",
                                           "lstrip", 1, "rstrip", 1));
    struct tokenizer *const t = from_json(file, 1002);
    static const char text[] = "a \n\n\n\n\n b\n\n\n\nc";
    struct encoded e = encode(t, text, sizeof text - 1, false);
    json_t *const due = json_pack("[i,i,i,i,i]", 64, 1001, 65, 1001, 66);
    expect_ids(&e, due, "white space", 0);
    encoded_free(&e);
    json_decref(due);
    json_decref(file);
    tokenizer_close(t);
}

/* What is searched in the normalized text is normalized itself, to twice its length here; what is
 * searched in the text as it came is not. Either is written as its file has it. */
static void test_added_tokens_that_nfc_changes(void **state)
{
    (void)state;
    json_t *const file = load("qwen2/", "tokenizer.json");
    const int n = n_vocab_of("qwen2/");
    static const char *const content[] = {"e\xcc\x81x", "\xe0\xa5\x98", "o\xcc\x81x"};
    for (int i = 0; i < 3; i++) {
        json_array_append_new(
            json_object_get(file, "added_tokens"),
            json_pack("{s:i,s:s,s:b}", "id", n + i, "content", content[i], "normalized", i < 2));
    }
    struct tokenizer *const t = from_json(file, n + 3);
    static const char text[] = "e\xcc\x81x\xc3\xa9x\xe0\xa5\x98\xe0\xa4\x95\xe0\xa4\xbco\xcc\x81x";
    struct encoded e = encode(t, text, sizeof text - 1, true);
    json_t *const due = json_pack("[i,i,i,i,i]", n, n, n + 1, n + 1, n + 2);
    expect_ids(&e, due, "normalized", 0);
    size_t bytes = 0;
    char *const back = decode(t, e.ids, e.n, false, &bytes);
    assert_int_equal(bytes, 2 * 4 + 2 * 3 + 4);
    assert_memory_equal(back, "e\xcc\x81xe\xcc\x81x\xe0\xa5\x98", 11);
    free(back);
    encoded_free(&e);
    e = encode(t, "\xc3\xb3x", 3, true);
    assert_true(e.n >= 1 && e.ids[0] < n);
    encoded_free(&e);
    json_decref(due);
    json_decref(file);
    tokenizer_close(t);
}

/* The same tokenizer from vocab.json and merges.txt, and from OpenAI's names of them. */
static void test_vocab_and_merges(void **state)
{
    (void)state;
    static const char *const names[][2] = {{"vocab.json", "merges.txt"},
                                           {"encoder.json", "vocab.bpe"}};
    json_t *const file = load("gpt2/", "tokenizer.json");
    json_t *const expected = load("gpt2/", "expected.json");
    json_t *const model = json_object_get(file, "model");
    json_t *const vocab = json_object_get(model, "vocab");
    json_object_set_new(vocab, "<|endoftext|>", json_integer(1000));
    for (int i = 0; i < 2; i++) {
        char dir[] = "/tmp/pkmserve-bpe-XXXXXX";
        char path[2][100];
        assert_non_null(mkdtemp(dir));
        for (int j = 0; j < 2; j++) {
            (void)snprintf(path[j], sizeof path[j], "%s/%s", dir, names[i][j]);
        }
        assert_int_equal(json_dump_file(vocab, path[0], JSON_ENSURE_ASCII), 0);
        struct tokenizer *t = NULL;
        struct err err = {0};
        assert_int_equal(tokenizer_open(&t, dir, NULL, NULL, 1001, &err), ERR_FORMAT);
        assert_non_null(strstr(err.message, "merges.txt must stand beside it"));
        FILE *const merges = fopen(path[1], "w");
        assert_non_null(merges);
        const json_t *const list = json_object_get(model, "merges");
        for (size_t m = 0; m < json_array_size(list); m++) {
            const json_t *const merge = json_array_get(list, m);
            (void)fprintf(merges, "%s%s %s%s", m == 0 ? "#version: 0.2\n" : "",
                          json_string_value(json_array_get(merge, 0)),
                          json_string_value(json_array_get(merge, 1)),
                          m + 1 < json_array_size(list) ? "\n" : "");
        }
        assert_int_equal(fclose(merges), 0);
        if (tokenizer_open(&t, dir, NULL, NULL, 1001, &err) != ERR_OK) {
            fail_msg("%s", err.message);
        }
        assert_true(tokenizer_is_control(t, 1000));
        check_encoding(t, expected, names[i][0]);
        tokenizer_close(t);
        for (int j = 0; j < 2; j++) {
            (void)remove(path[j]);
        }
        (void)rmdir(dir);
    }
    json_decref(file);
    json_decref(expected);
}

/* ---- merging ---- */

/* The slow and plain way: look through all neighbours, join the first of lowest rank, again. */
static size_t merge_plainly(const struct byte_bpe *bpe, const char *piece, size_t bytes,
                            int32_t *ids)
{
    size_t *const start = calloc(bytes + 1, sizeof *start);
    assert_non_null(start);
    size_t n = bytes;
    for (size_t i = 0; i < n; i++) {
        ids[i] = bpe->byte_id[(unsigned char)piece[i]];
        start[i] = i;
    }
    start[n] = n;
    for (;;) {
        int32_t rank = -1;
        size_t best = 0;
        for (size_t i = 0; i + 1 < n; i++) {
            const int32_t r = bpe->ranked
                                  ? byte_bpe_find(bpe, piece + start[i], start[i + 2] - start[i])
                                  : merges_find(&bpe->merges, ids[i], ids[i + 1]);
            if (r >= 0 && (rank < 0 || r < rank)) {
                rank = r;
                best = i;
            }
        }
        if (rank < 0) {
            free(start);
            return n;
        }
        ids[best] = bpe->ranked ? rank : bpe->merges.rule[rank].joined;
        memmove(ids + best + 1, ids + best + 2, (n - best - 2) * sizeof *ids);
        memmove(start + best + 1, start + best + 2, (n - best - 1) * sizeof *start);
        n--;
    }
}

static uint32_t next_random(uint32_t *seed)
{
    *seed = *seed * 1664525u + 1013904223u;
    return *seed >> 8;
}

/* Pieces of any length, of few letters so that much is joined. */
static void check_merging(const struct byte_bpe *bpe, const char *alphabet)
{
    enum { LONGEST = 700 };
    char piece[LONGEST];
    int32_t due[LONGEST];
    struct byte_bpe_scratch scratch = {0};
    uint32_t seed = 7;
    for (int round = 0; round < 400; round++) {
        const size_t bytes = 1 + next_random(&seed) % (round % 4 == 0 ? LONGEST : 60);
        const size_t letters = 1 + next_random(&seed) % strlen(alphabet);
        for (size_t i = 0; i < bytes; i++) {
            piece[i] = alphabet[next_random(&seed) % letters];
        }
        size_t n = merge_plainly(bpe, piece, bytes, due);
        const int32_t whole = bpe->ignore_merges ? byte_bpe_find(bpe, piece, bytes) : -1;
        if (whole >= 0) {
            n = 1;
            due[0] = whole;
        }
        assert_int_equal(byte_bpe_split(bpe, &scratch, piece, bytes, NULL), ERR_OK);
        bool same = scratch.n == n;
        for (size_t i = 0; same && i < n; i++) {
            same = scratch.part[i].id == due[i];
        }
        if (!same) {
            fail_msg("round %d: \"%.*s\" is split otherwise than plainly", round, (int)bytes,
                     piece);
        }
    }
    byte_bpe_scratch_free(&scratch);
}

static void test_merging(void **state)
{
    (void)state;
    static const char *const folders[] = {"gpt2/", "llama3/", "qwen2/"};
    for (size_t i = 0; i < 3; i++) {
        json_t *const file = load(folders[i], "tokenizer.json");
        struct tokenizer *const t = from_json(file, n_vocab_of(folders[i]));
        check_merging(&((struct bpe_tokenizer *)t)->bpe, "etaoinsrhld g0 ");
        check_merging(&((struct bpe_tokenizer *)t)->bpe, "  =-\n");
        tokenizer_close(t);
        json_decref(file);
    }
}

/* A quarter of a megabyte without an end of a piece: quadratic time would be minutes. */
static void test_long_pieces(void **state)
{
    (void)state;
    static const char *const fill[] = {"a",  " ",  "=",           "\n", "\xcc\x81\xcc\xa7",
                                       "<|", "ab", "\xe1\x84\x80"};
    static const char *const folders[] = {"llama3/", "qwen2/"};
    enum { BYTES = 1 << 18 };
    char *const text = malloc(BYTES + 8);
    assert_non_null(text);
    for (size_t f = 0; f < 2; f++) {
        json_t *const file = load(folders[f], "tokenizer.json");
        struct tokenizer *const t = from_json(file, n_vocab_of(folders[f]));
        for (size_t i = 0; i < sizeof fill / sizeof fill[0]; i++) {
            const size_t n = strlen(fill[i]);
            size_t bytes = 0;
            for (; bytes < BYTES; bytes += n) {
                memcpy(text + bytes, fill[i], n);
            }
            struct encoded e = encode(t, text, bytes, true);
            size_t n_back = 0;
            char *back = NULL;
            assert_int_equal(tokenizer_decode(t, e.ids, e.n, &back, &n_back, NULL), ERR_OK);
            if (!((struct bpe_tokenizer *)t)->nfc) {
                assert_true(n_back == bytes && memcmp(back, text, bytes) == 0);
            }
            free(back);
            encoded_free(&e);
        }
        tokenizer_close(t);
        json_decref(file);
    }
    free(text);
}

/* ---- rank files ---- */

static size_t base64(char *out, const char *bytes, size_t n)
{
    static const char digit[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    size_t at = 0;
    for (size_t i = 0; i < n; i += 3) {
        uint32_t bits = 0;
        for (size_t j = 0; j < 3; j++) {
            bits = bits << 8 | (i + j < n ? (unsigned char)bytes[i + j] : 0);
        }
        for (size_t j = 0; j < 4; j++) {
            out[at++] = i + j <= n ? digit[bits >> (18 - 6 * j) & 63] : '=';
        }
    }
    return at;
}

/* llama3's tokens as a rank file; as many special ones behind them as the real one has. */
static char *rank_file(int *n_rank)
{
    json_t *const file = load("llama3/", "tokenizer.json");
    const json_t *const vocab = json_object_get(json_object_get(file, "model"), "vocab");
    char *const text = malloc(1 << 17);
    assert_non_null(text);
    size_t at = 0;
    const char *spelling = NULL;
    json_t *id = NULL;
    json_object_foreach((json_t *)vocab, spelling, id)
    {
        char bytes[200];
        const size_t n = bpe_bytes(bytes, spelling, strlen(spelling));
        assert_in_range(n, 1, sizeof bytes);
        at += base64(text + at, bytes, n);
        at += (size_t)sprintf(text + at, " %d\n", (int)json_integer_value(id));
    }
    *n_rank = (int)json_object_size(vocab);
    json_decref(file);
    return text;
}

static void test_ranks(void **state)
{
    (void)state;
    int n_rank = 0;
    char *const text = rank_file(&n_rank);
    const struct bpe_source source = {"tokenizer.model", text, strlen(text), NULL, NULL, 0};
    struct tokenizer *t = from_source(&source, n_rank + 256);
    const struct byte_bpe *const bpe = &((struct bpe_tokenizer *)t)->bpe;
    check_merging(bpe, "etaoinsrhld g0 ");
    check_merging(bpe, "  =-\n");
    static const char hello[] = "<|begin_of_text|>The old bridge<|eot_id|>";
    struct encoded e = encode(t, hello, sizeof hello - 1, true);
    assert_int_equal(e.ids[0], n_rank);
    assert_int_equal(e.ids[e.n - 1], n_rank + 9);
    assert_true(tokenizer_is_control(t, n_rank) && !tokenizer_is_control(t, n_rank - 1));
    encoded_free(&e);
    static const char named[] = "<|begin_of_text|><|end_of_text|><|start_header_id|>"
                                "<|end_header_id|><|eot_id|>";
    static const int places[] = {0, 1, 6, 7, 9};
    e = encode(t, named, sizeof named - 1, true);
    assert_int_equal(e.n, sizeof places / sizeof *places);
    for (size_t i = 0; i < e.n; i++) {
        assert_int_equal(e.ids[i], n_rank + places[i]);
    }
    encoded_free(&e);
    e = encode(t, hello, sizeof hello - 1, false);
    size_t n = 0;
    char *const back = decode(t, e.ids, e.n, false, &n);
    assert_true(n == sizeof hello - 1 && memcmp(back, hello, n) == 0);
    free(back);
    encoded_free(&e);
    assert_string_equal(tokenizer_piece(t, bpe->byte_id[' ']), "\xc4\xa0");
    tokenizer_close(t);
    /* Another number of ids: nothing is known of those behind the ranks. */
    t = from_source(&source, n_rank + 3);
    assert_string_equal(tokenizer_piece(t, n_rank), "");
    tokenizer_close(t);
    free(text);
}

/* ---- normalization ---- */

static void expect_nfc(const char *text, size_t bytes, const char *due, size_t n_due)
{
    struct nfc_text out = {0};
    assert_int_equal(nfc_normalize(&out, text, bytes, NULL), ERR_OK);
    if (out.bytes != n_due || memcmp(out.text, due, n_due) != 0) {
        fail_msg("NFC of \"%.*s\": expected \"%.*s\", got \"%.*s\"", (int)bytes, text, (int)n_due,
                 due, (int)out.bytes, out.text);
    }
    for (size_t i = 0; i < out.bytes; i++) {
        assert_true(out.from[i] <= out.from[i + 1] && out.from[i] < bytes);
    }
    assert_int_equal(out.from[out.bytes], bytes);
    nfc_free(&out);
}

/* Each code point by itself: what NFC makes of it stays so, and what is called stable is. */
static void test_nfc_of_each(void **state)
{
    (void)state;
    struct nfc_text once = {0};
    int n_changed = 0;
    for (uint32_t code = 0; code < 0x110000; code++) {
        char text[4];
        const size_t n = code < 0xd800 || code > 0xdfff ? (size_t)utf8_write(text, code) : 0;
        assert_int_equal(nfc_normalize(&once, text, n, NULL), ERR_OK);
        const bool same = once.bytes == n && memcmp(once.text, text, n) == 0;
        assert_true(same || !nfc_is_stable(text, n));
        n_changed += same ? 0 : 1;
        expect_nfc(once.text, once.bytes, once.text, once.bytes);
    }
    assert_int_equal(n_changed, 1120); /* of Unicode 16.0 */
    nfc_free(&once);
}

/* tests/engine/nfc.txt: strings and their NFC, made by Python's unicodedata of Unicode 16.0. */
static void test_nfc_of_strings(void **state)
{
    (void)state;
    FILE *const file = fopen("tests/engine/nfc.txt", "r");
    assert_non_null(file);
    char line[2000];
    int n_line = 0;
    while (fgets(line, sizeof line, file) != NULL) {
        char text[2][200];
        size_t n[2] = {0};
        int side = 0;
        for (char *c = line; *c != '\0' && *c != '\n';) {
            if (*c == ';') {
                side++;
                c++;
                continue;
            }
            n[side] += (size_t)utf8_write(text[side] + n[side], (uint32_t)strtoul(c, &c, 16));
            c += *c == ' ' ? 1 : 0;
        }
        assert_int_equal(side, 1);
        expect_nfc(text[0], n[0], text[1], n[1]);
        assert_true(nfc_is_stable(text[0], n[0]) ? n[0] == n[1] : true);
        n_line++;
    }
    assert_in_range(n_line, 300, 1000);
    assert_int_equal(fclose(file), 0);
}

/* ---- bytes that are no characters ---- */

static void test_repair(void **state)
{
    (void)state;
    json_t *const file = load("gpt2/", "tokenizer.json");
    struct tokenizer *const t = from_json(file, 1001);
    static const struct {
        const char *bytes, *text;
    } cases[] = {
        {"\xe2\x82", "\xef\xbf\xbd"},
        {"\xe2\x82"
         "A",
         "\xef\xbf\xbd"
         "A"},
        {"\xf0\x9f\x92\xf0", "\xef\xbf\xbd\xef\xbf\xbd"},
        {"\xc0\xaf", "\xef\xbf\xbd\xef\xbf\xbd"},
        {"\xed\xa0\x80", "\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd"},
        {"\xf5\x80", "\xef\xbf\xbd\xef\xbf\xbd"},
        {"\xe2\x82\xe2\x82\xac", "\xef\xbf\xbd\xe2\x82\xac"},
        {"\xef\xbf\xbd!", "\xef\xbf\xbd!"}, /* the model's own */
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        int32_t ids[8];
        size_t n = 0;
        for (const char *c = cases[i].bytes; *c != '\0'; c++) {
            ids[n++] = ((struct bpe_tokenizer *)t)->bpe.byte_id[(unsigned char)*c];
        }
        size_t bytes = 0;
        char *const text = decode(t, ids, n, false, &bytes);
        if (bytes != strlen(cases[i].text) || memcmp(text, cases[i].text, bytes) != 0) {
            fail_msg("case %zu: expected \"%s\", got \"%.*s\"", i, cases[i].text, (int)bytes, text);
        }
        free(text);
    }
    tokenizer_close(t);
    json_decref(file);
}

/* A token may be nothing but bytes that are no characters: three for one come out. */
static void test_token_of_wrong_bytes(void **state)
{
    (void)state;
    enum { N = 40 };
    json_t *const file = load("gpt2/", "tokenizer.json");
    json_t *const vocab = json_object_get(json_object_get(file, "model"), "vocab");
    char wrong[2 * N + 1];
    for (int i = 0; i < N; i++) {
        memcpy(wrong + 2 * i, "\xc3\xbf", 3); /* byte 0xff in the alphabet */
    }
    json_object_set_new(vocab, wrong, json_integer(1001));
    struct tokenizer *const t = from_json(file, 1002);
    size_t bytes = 0;
    const int32_t ids[] = {1001, 1001};
    char *const text = decode(t, ids, 2, false, &bytes);
    assert_int_equal(bytes, 2 * 3 * N);
    free(text);
    tokenizer_close(t);
    json_decref(file);
}

/* ---- files that are refused ---- */

/* Replaces what key names ("model.vocab") by value; "" takes it out. */
static void set(json_t *root, const char *key, const char *value)
{
    char name[100];
    (void)snprintf(name, sizeof name, "%s", key);
    json_t *object = root;
    char *part = name;
    for (char *dot = strchr(part, '.'); dot != NULL; dot = strchr(part, '.')) {
        *dot = '\0';
        object = json_is_array(object) ? json_array_get(object, (size_t)atoi(part))
                                       : json_object_get(object, part);
        part = dot + 1;
    }
    json_t *const made = value[0] != '\0' ? json_loads(value, JSON_DECODE_ANY, NULL) : NULL;
    assert_true(value[0] == '\0' || made != NULL);
    if (json_is_array(object)) {
        assert_int_equal(json_array_set_new(object, (size_t)atoi(part), made), 0);
    } else if (made != NULL) {
        assert_int_equal(json_object_set_new(object, part, made), 0);
    } else {
        assert_int_equal(json_object_del(object, part), 0);
    }
}

static void expect_refused(const char *text, int n_vocab, const char *needle, const char *what)
{
    struct tokenizer *t = NULL;
    struct err err = {0};
    const struct bpe_source source = {"here/tokenizer.json", text, strlen(text), NULL, NULL, 0};
    if (tokenizer_bpe_parse(&t, &source, n_vocab, &err) == ERR_OK) {
        fail_msg("%s: accepted", what);
    }
    assert_null(t);
    if (strstr(err.message, "here/tokenizer.json") != err.message ||
        strstr(err.message, needle) == NULL) {
        fail_msg("%s: expected \"%s\" in \"%s\"", what, needle, err.message);
    }
}

static void test_refusals(void **state)
{
    (void)state;
    static const struct {
        const char *folder, *key, *value, *needle;
    } cases[] = {
        {"gpt2/", "model.type", "\"WordPiece\"", "model.type is \"WordPiece\"; served is \"BPE\""},
        {"gpt2/", "model.type", "", "model.type is nothing"},
        {"gpt2/", "model.dropout", "0.1", "model.dropout is 0.1"},
        {"gpt2/", "model.unk_token", "\"<unk>\"", "model.unk_token is \"<unk>\""},
        {"gpt2/", "model.end_of_word_suffix", "\"</w>\"", "model.end_of_word_suffix"},
        {"gpt2/", "model.continuing_subword_prefix", "\"##\"", "model.continuing_subword_prefix"},
        {"gpt2/", "model.fuse_unk", "true", "model.fuse_unk is true"},
        {"gpt2/", "model.byte_fallback", "true", "model.byte_fallback is true"},
        {"gpt2/", "model.new_key", "1", "model has the key \"new_key\""},
        {"gpt2/", "model.ignore_merges", "1", "ignore_merges"},
        {"gpt2/", "new_key", "1", "the file has the key \"new_key\""},
        {"gpt2/", "model.vocab", "[]", "model.vocab must be an object"},
        {"gpt2/", "model.merges", "{}", "model.merges a list"},
        {"gpt2/", "model.vocab.the", "0.5", "the id of token \"the\" is 0.5"},
        {"gpt2/", "model.vocab.the", "\"1\"", "the id of token \"the\" is \"1\""},
        {"gpt2/", "model.vocab.zzzzzz", "1", "have the same id 1"},
        {"gpt2/", "model.vocab.zzzzzz", "-1", "has the id -1"},
        {"gpt2/", "model.vocab.zzzzzz", "5000", "has the id 5000, the model's vocab_size is 1001"},
        {"gpt2/", "model.vocab.\xc4\x80", "", "no token for the byte 0x00, \"\xc4\x80\""},
        {"gpt2/", "model.merges.3", "[\"a\", \"zzzzz\"]", "merge 4, \"a zzzzz\", joins what"},
        {"gpt2/", "model.merges.3", "[\"a\"]", "model.merges[3] is [\"a\"]"},
        {"gpt2/", "model.merges.3", "7", "model.merges[3] is 7"},
        {"gpt2/", "model.merges.3", "\"a  b\"", "merge 4 is not two tokens"},
        {"gpt2/", "model.merges.3", "\"ab\"", "merge 4 is not two tokens"},
        {"gpt2/", "model.merges.3", "\"\u3042 b\"", "joins what the vocabulary does not have"},
        {"gpt2/", "normalizer", "{\"type\":\"NFKC\"}", "normalizer is {\"type\":\"NFKC\"}"},
        {"qwen2/", "normalizer",
         "{\"type\":\"Sequence\",\"normalizers\":[{\"type\":\"NFC\"},{\"type\":\"Lowercase\"}]}",
         "normalizer is {\"type\":\"Lowercase\"}"},
        {"gpt2/", "pre_tokenizer", "null", "pre_tokenizer is null"},
        {"gpt2/", "pre_tokenizer.type", "\"Metaspace\"", "Metaspace"},
        {"gpt2/", "pre_tokenizer.add_prefix_space", "true", "add_prefix_space is true"},
        {"gpt2/", "pre_tokenizer.add_prefix_space", "", "add_prefix_space is nothing"},
        {"gpt2/", "pre_tokenizer.use_regex", "false", "use_regex is false"},
        {"qwen2/", "pre_tokenizer.pretokenizers.0.pattern.Regex", "\"\\\\p{L}+\"",
         "{\"Regex\":\"\\\\p{L}+\"}"},
        {"qwen2/", "pre_tokenizer.pretokenizers.0.behavior", "\"Removed\"", "Removed"},
        {"qwen2/", "pre_tokenizer.pretokenizers.0.invert", "true", "\"invert\":true"},
        {"qwen2/", "pre_tokenizer.pretokenizers.1.use_regex", "true", "use_regex behind a Split"},
        {"qwen2/", "pre_tokenizer.pretokenizers.1.type", "\"Digits\"", "Digits"},
        {"gpt2/", "decoder", "null", "decoder is null; served is ByteLevel"},
        {"gpt2/", "decoder.type", "\"WordPiece\"", "decoder is"},
        {"gpt2/", "post_processor.type", "\"BertProcessing\"", "post_processor is"},
        {"llama3/", "post_processor.processors.1.single",
         "[{\"Sequence\":{\"id\":\"A\"}},{\"SpecialToken\":{\"id\":\"<s>\"}}]",
         "at most one token before a text"},
        {"gpt2/", "added_tokens.0.content", "1", "added_tokens[0] is"},
        {"gpt2/", "added_tokens.0.id", "3000000000", "added_tokens[0] is"},
        {"gpt2/", "added_tokens.0.id", "2000", "has the id 2000"},
        {"gpt2/", "added_tokens.0.id", "5", "have the same id 5"},
        {"gpt2/", "added_tokens.0.lstrip", "0", "lstrip of an added token is 0"},
        {"gpt2/", "added_tokens.0.content", "\"\"", "has 0 bytes"},
        {"gpt2/", "added_tokens.0.new_key", "true", "an added token has the key \"new_key\""},
        {"gpt2/", "added_tokens.0.content", "\"!\"", "has the id 1000, but 0 in model.vocab"},
        {"qwen2/", "added_tokens.1.content", "\"<|endoftext|>\"", "is there twice"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        json_t *const root = load(cases[i].folder, "tokenizer.json");
        set(root, cases[i].key, cases[i].value);
        char *const text = json_dumps(root, 0);
        expect_refused(text, n_vocab_of(cases[i].folder), cases[i].needle, cases[i].key);
        free(text);
        json_decref(root);
    }
}

/* A byte more than a token may have, in each place where one is spelled. */
static void test_long_tokens(void **state)
{
    (void)state;
    static const struct {
        const char *key, *before, *after, *needle;
    } cases[] = {
        {"model.vocab", NULL, NULL, "is spelled in 4097 bytes, accepted are 1 to 4096"},
        {"model.merges.3", "[\"", "\", \"a\"]", "a part of merge 4 is longer than 4096 bytes"},
        {"model.merges.3", "[\"a\", \"", "\"]", "a part of merge 4 is longer than 4096 bytes"},
        {"added_tokens.0.content", "\"", "\"", "has 4097 bytes, accepted are 1 to 4096"},
    };
    char word[4097 + 1] = {0};
    memset(word, 'a', sizeof word - 1);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        json_t *const root = load("gpt2/", "tokenizer.json");
        if (cases[i].before == NULL) {
            json_object_set_new(json_object_get(json_object_get(root, "model"), "vocab"), word,
                                json_integer(1001));
        } else {
            char value[sizeof word + 20];
            (void)snprintf(value, sizeof value, "%s%s%s", cases[i].before, word, cases[i].after);
            set(root, cases[i].key, value);
        }
        char *const text = json_dumps(root, 0);
        expect_refused(text, 1002, cases[i].needle, cases[i].key);
        free(text);
        json_decref(root);
    }
}

/* A tokenizer of another model: more tokens than the model has, or many fewer. */
static void test_sizes(void **state)
{
    (void)state;
    json_t *const root = load("gpt2/", "tokenizer.json");
    char *const text = json_dumps(root, 0);
    expect_refused(text, 999, "its number of tokens is 1000, the model's vocab_size is 999",
                   "fewer");
    expect_refused(text, 1000, "has the id 1000, the model's vocab_size is 1000", "one fewer");
    expect_refused(text, 1258,
                   "its number of tokens is 1001, the model's vocab_size is 1258, of which at most "
                   "256 may be without a token",
                   "many more");
    tokenizer_close(from_text(text, 1257));
    free(text);
    json_decref(root);
}

static void test_refused_ranks(void **state)
{
    (void)state;
    int n = 0;
    char *const good = rank_file(&n);
    static const struct {
        const char *line, *needle;
    } cases[] = {{"QQ== 1", "line 1300 repeats a token"},
                 {"//// 5000", "line 1300 is not a token in base64"},
                 {"//// 7", "have the same id 7"},
                 {"//// -7", "line 1300 is not"},
                 {"///", "line 1300 is not"},
                 {"//=/ 1299", "line 1300 is not"},
                 {"", "line 1300 is not"},
                 {"//// 99999999999999999999", "line 1300 is not"}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char *const text = malloc(strlen(good) + 100);
        assert_non_null(text);
        (void)sprintf(text, "%s%s\n", good, cases[i].line);
        expect_refused(text, n + 256, cases[i].needle, cases[i].line);
        free(text);
    }
    free(good);
}

/* ---- which file of a directory ---- */

static void put_file(const char *dir, const char *name, const char *text, size_t bytes)
{
    char path[200];
    (void)snprintf(path, sizeof path, "%s/%s", dir, name);
    FILE *const file = fopen(path, "w");
    assert_non_null(file);
    assert_int_equal(fwrite(text, 1, bytes, file), bytes);
    assert_int_equal(fclose(file), 0);
}

static void expect_kind(const char *dir, const char *path, int n_vocab, const char *kind)
{
    struct tokenizer *t = NULL;
    struct err err = {0};
    if (tokenizer_open(&t, dir, path, NULL, n_vocab, &err) != ERR_OK) {
        fail_msg("%s", err.message);
    }
    if (kind == NULL) {
        assert_null(t);
    } else {
        assert_non_null(t);
        assert_string_equal(tokenizer_kind(t), kind);
    }
    tokenizer_close(t);
}

static void test_directory(void **state)
{
    (void)state;
    char dir[] = "/tmp/pkmserve-bpe-XXXXXX";
    assert_non_null(mkdtemp(dir));
    int n_rank = 0;
    char *const ranks = rank_file(&n_rank);
    json_t *const root = load("gpt2/", "tokenizer.json");
    char *const json = json_dumps(root, 0);
    static char spm[1 << 20];
    FILE *const file = fopen("models/demo/tokenizer.model", "r");
    assert_non_null(file);
    const size_t n_spm = fread(spm, 1, sizeof spm, file);
    (void)fclose(file);
    char path[100];
    (void)snprintf(path, sizeof path, "%s/tokenizer.model", dir);

    expect_kind(dir, NULL, 1001, NULL); /* ids only */
    put_file(dir, "tokenizer.model", ranks, strlen(ranks));
    expect_kind(dir, NULL, n_rank + 256, "byte-bpe");
    expect_kind(NULL, path, n_rank + 256, "byte-bpe");
    put_file(dir, "tokenizer.json", json, strlen(json)); /* it has the special tokens too */
    expect_kind(dir, NULL, 1001, "byte-bpe");
    put_file(dir, "tokenizer.model", spm, n_spm);
    expect_kind(dir, NULL, 4096, "sentencepiece-unigram");
    (void)remove(path);
    expect_kind(dir, NULL, 1001, "byte-bpe");
    put_file(dir, "tokenizer.json", "[]", 2);
    struct tokenizer *t = NULL;
    struct err err = {0};
    assert_int_equal(tokenizer_open(&t, dir, NULL, NULL, 1001, &err), ERR_FORMAT);
    assert_non_null(strstr(err.message, "a JSON object is expected"));
    (void)snprintf(path, sizeof path, "%s/tokenizer.json", dir);
    (void)remove(path);
    (void)rmdir(dir);
    free(ranks);
    free(json);
    json_decref(root);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_classes),
        cmocka_unit_test(test_splits),
        cmocka_unit_test(test_pieces),
        cmocka_unit_test(test_gpt2),
        cmocka_unit_test(test_llama3),
        cmocka_unit_test(test_qwen2),
        cmocka_unit_test(test_flags),
        cmocka_unit_test(test_white_space_that_is_swallowed),
        cmocka_unit_test(test_added_tokens_that_nfc_changes),
        cmocka_unit_test(test_vocab_and_merges),
        cmocka_unit_test(test_merging),
        cmocka_unit_test(test_long_pieces),
        cmocka_unit_test(test_ranks),
        cmocka_unit_test(test_nfc_of_each),
        cmocka_unit_test(test_nfc_of_strings),
        cmocka_unit_test(test_repair),
        cmocka_unit_test(test_token_of_wrong_bytes),
        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_long_tokens),
        cmocka_unit_test(test_sizes),
        cmocka_unit_test(test_refused_ranks),
        cmocka_unit_test(test_directory),
    };
    return cmocka_run_group_tests_name("byte-level BPE", tests, NULL, NULL);
}
