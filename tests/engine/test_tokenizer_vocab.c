/* The tokenizers that are lists of words: what the authors' programs make of the same texts, round
 * trips, offsets, streams, merge rules against a slow and plain applier, hostile files. */
#include "engine/bpe.h"
#include "engine/tokenizer.h"
#include "engine/tokenizer_impl.h"
#include "kernels/utf8.h"

#include <jansson.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define ALL_ATTENTION "tests/golden/allattention/vocab/"

static char *copy(const char *text)
{
    char *const made = text != NULL ? strdup(text) : NULL;
    assert_true(text == NULL || made != NULL);
    return made;
}

static int count_lines(const char *text)
{
    int n = 0;
    for (const char *c = text; *c != '\0'; c++) {
        n += *c == '\n' || c[1] == '\0';
    }
    return n;
}

static struct tokenizer *from(const char *kind, const char *vocabulary, const char *codes)
{
    struct tokenizer *t = NULL;
    struct err err = {0};
    if (tokenizer_vocab_parse(&t, kind, copy(vocabulary), strlen(vocabulary), copy(codes),
                              codes != NULL ? strlen(codes) : 0, count_lines(vocabulary),
                              &err) != ERR_OK) {
        fail_msg("%s", err.message);
    }
    return t;
}

/* ---- what comes out ---- */

/* Encodes text and checks that the offsets cut it and a stream equals the whole decoding. */
static size_t encode(const struct tokenizer *t, const char *text, int32_t ids[], size_t max)
{
    int32_t *got = NULL;
    size_t *offsets = NULL;
    size_t n = 0;
    struct err err = {0};
    if (tokenizer_encode(t, text, strlen(text), false, &got, &n, &offsets, &err) != ERR_OK) {
        fail_msg("%s", err.message);
    }
    assert_in_range(n, 0, max);
    for (size_t i = 0; i < n; i++) {
        assert_true(i == 0 ? offsets[0] == 0 : offsets[i] > offsets[i - 1]);
        assert_true(offsets[i] < strlen(text));
        ids[i] = got[i];
    }
    free(got);
    free(offsets);
    return n;
}

static void expect_ids(const struct tokenizer *t, const char *text, const int32_t *due, size_t n)
{
    int32_t *const ids = calloc(strlen(text) + 1, sizeof *ids);
    assert_non_null(ids);
    assert_int_equal(encode(t, text, ids, strlen(text) + 1), n);
    for (size_t i = 0; i < n; i++) {
        if (ids[i] != due[i]) {
            fail_msg("token %zu of \"%s\": expected %d, got %d", i, text, due[i], ids[i]);
        }
    }
    free(ids);
}

static void expect_text(const struct tokenizer *t, const int32_t *ids, size_t n, const char *due)
{
    char *text = NULL;
    size_t bytes = 0;
    assert_int_equal(tokenizer_decode(t, ids, n, &text, &bytes, NULL), ERR_OK);
    assert_string_equal(text, due);
    const size_t room = tokenizer_bytes_max(t) + 16;
    char *const out = malloc(room);
    assert_non_null(out);
    struct detok detok;
    detok_begin(&detok, t, true);
    size_t at = 0;
    for (size_t i = 0; i <= n; i++) {
        const size_t k =
            i < n ? detok_push(&detok, ids[i], out, room) : detok_end(&detok, out, room);
        assert_true(k <= bytes - at);
        assert_memory_equal(text + at, out, k);
        at += k;
    }
    assert_int_equal(at, bytes);
    free(out);
    free(text);
}

static void expect_same(const struct tokenizer *t, const char *text)
{
    int32_t *const ids = calloc(strlen(text) + 1, sizeof *ids);
    assert_non_null(ids);
    const size_t n = encode(t, text, ids, strlen(text) + 1);
    expect_text(t, ids, n, text);
    free(ids);
}

#define IDS(...) (const int32_t[]){__VA_ARGS__}, sizeof((int32_t[]){__VA_ARGS__}) / sizeof(int32_t)

/* ---- the authors' own results ---- */

static json_t *load(const char *path)
{
    json_error_t fault;
    json_t *const root = json_load_file(path, 0, &fault);
    if (root == NULL) {
        fail_msg("%s: %s (run from the repository root)", path, fault.text);
    }
    return root;
}

static size_t read_ids(const json_t *array, int32_t **ids)
{
    const size_t n = json_array_size(array);
    *ids = calloc(n + 1, sizeof **ids);
    assert_non_null(*ids);
    for (size_t i = 0; i < n; i++) {
        (*ids)[i] = (int32_t)json_integer_value(json_array_get(array, i));
    }
    return n;
}

/* The tokenizer whose vocabulary is a list of words. */
static struct tokenizer *from_list(const char *kind, const json_t *list)
{
    char text[4096] = "";
    for (size_t i = 0; i < json_array_size(list); i++) {
        const size_t n = strlen(text);
        (void)snprintf(text + n, sizeof text - n, "%s\n",
                       json_string_value(json_array_get(list, i)));
    }
    return from(kind, text, NULL);
}

static void expect_list(const struct tokenizer *t, const char *text, const json_t *due)
{
    int32_t *ids = NULL;
    const size_t n = read_ids(due, &ids);
    expect_ids(t, text, ids, n);
    free(ids);
}

/* A file as the authors read it: the last line ends too. */
static char *file_text(const char *path)
{
    static char text[1 << 16];
    FILE *const file = fopen(path, "rb");
    assert_non_null(file);
    const size_t n = fread(text, 1, sizeof text - 2, file);
    assert_int_equal(fclose(file), 0);
    text[n] = '\0';
    if (n > 0 && text[n - 1] != '\n') {
        (void)strcpy(text + n, "\n");
    }
    return text;
}

static void words_are_the_authors(void **state)
{
    (void)state;
    json_t *const root = load(ALL_ATTENTION "expected.json");
    const char *const orders[] = {"first_appearance", "by_count"};
    for (int i = 0; i < 2; i++) {
        const json_t *const due = json_object_get(json_object_get(root, "words"), orders[i]);
        struct tokenizer *const t = from_list("word", json_object_get(due, "vocab"));
        expect_list(t, file_text(ALL_ATTENTION "train.txt"), json_object_get(due, "train_ids"));
        expect_list(t, file_text(ALL_ATTENTION "eval.txt"), json_object_get(due, "eval_ids"));
        tokenizer_close(t);
    }
    json_decref(root);
}

static void bytes_are_the_authors(void **state)
{
    (void)state;
    json_t *const root = load(ALL_ATTENTION "expected.json");
    const json_t *const due = json_object_get(root, "bytes");
    struct tokenizer *const t = from_list("byte", json_object_get(due, "vocab"));
    int32_t *ids = NULL;
    const size_t n = read_ids(json_object_get(due, "ids"), &ids);
    /* Not UTF-8, so a request cannot hold it; the ids can, and give back the bytes. */
    const char *const hex = json_string_value(json_object_get(due, "raw_hex"));
    for (size_t i = 0; i < n; i++) {
        char byte[4] = "";
        unsigned value = '\n'; /* of the <eos> after the last line */
        if (2 * i < strlen(hex)) {
            assert_int_equal(sscanf(hex + 2 * i, "%2x", &value), 1);
        }
        assert_int_equal(tokenizer_bytes(t, ids[i], byte, sizeof byte), 1);
        assert_int_equal((unsigned char)byte[0], value);
    }
    expect_ids(t, "<a>\n caf\xc3\xa9\r\n\n", ids, 13);
    free(ids);
    tokenizer_close(t);
    json_decref(root);
}

static void characters_are_the_authors(void **state)
{
    (void)state;
    json_t *const root = load(ALL_ATTENTION "expected.json");
    const json_t *const due = json_object_get(root, "chars");
    struct tokenizer *const t = from_list("char", json_object_get(due, "vocab"));
    /* Their preparation strips the file; its end is a line's end. */
    expect_list(t, "anarchism originated as a term\n", json_object_get(due, "ids"));
    expect_same(t, " a term\n as");
    /* A request's text is no file and may go on: nothing is added behind it. */
    int32_t *ids = NULL;
    const size_t n = read_ids(json_object_get(due, "ids"), &ids);
    expect_ids(t, "anarchism originated as a term", ids, n - 1);
    free(ids);
    tokenizer_close(t);
    json_decref(root);
}

/* Every case has the same dictionary rows; the converted model's vocabulary is made of them. */
static void xlm_is_the_authors(void **state)
{
    (void)state;
    json_t *const root = load("tests/golden/xlm/dense12/expected.json");
    /* The words that the rows name, at their ids; the others are fillers. */
    static const struct {
        int id;
        const char *word;
    } known[] = {{0, "<s>"},   {1, "</s>"}, {2, "<pad>"}, {3, "<unk>"},
                 {16, "da@@"}, {20, "ka"},  {33, "fe"},   {47, "ci"}};
    char text[4096] = "";
    for (int id = 0; id < 200; id++) {
        const size_t n = strlen(text);
        (void)snprintf(text + n, sizeof text - n, id >= 4 && id < 14 ? "<special%d>\n" : "w%d\n",
                       id - 4);
        for (size_t k = 0; k < sizeof known / sizeof *known; k++) {
            if (known[k].id == id) {
                (void)snprintf(text + n, sizeof text - n, "%s\n", known[k].word);
            }
        }
    }
    struct tokenizer *const t = from("xlm", text, NULL);
    const json_t *const rows = json_object_get(root, "tokenize");
    assert_true(json_array_size(rows) > 0);
    for (size_t i = 0; i < json_array_size(rows); i++) {
        const json_t *const row = json_array_get(rows, i);
        char line[256];
        (void)snprintf(line, sizeof line, "%s\n", json_string_value(json_object_get(row, "text")));
        expect_list(t, line, json_object_get(row, "ids"));
    }
    assert_true(tokenizer_is_control(t, 1) && tokenizer_is_control(t, 13));
    assert_false(tokenizer_is_control(t, 3) || tokenizer_is_control(t, 14));
    assert_string_equal(tokenizer_kind(t), "xlm");
    tokenizer_close(t);
    json_decref(root);
}

/* ---- text and back ---- */

#define SPECIAL "<s>\n</s>\n<pad>\n<unk>\n"

static void split_words_come_back_whole(void **state)
{
    (void)state;
    struct tokenizer *const t = from("xlm", SPECIAL "da@@\nka\nfe\n@@\n", NULL);
    expect_ids(t, "  da@@ ka \t fe", IDS(4, 5, 6));
    expect_text(t, IDS(4, 5, 6), "daka fe");
    expect_text(t, IDS(1, 5, 1, 6, 3, 4), "ka fe <unk> da"); /* </s> adds nothing */
    expect_text(t, IDS(5, 7, 5), "ka ka");
    expect_ids(t, "ka\nfe\r\n\rka", IDS(5, 1, 6, 1, 1, 5)); /* a line's end is </s> */
    expect_ids(t, " <s> ", NULL, 0);
    struct detok detok;
    char out[64];
    detok_begin(&detok, t, false);
    detok_follow(&detok, 5);
    assert_int_equal(detok_push(&detok, 6, out, sizeof out), 3); /* " fe" */
    detok_begin(&detok, t, false);
    detok_follow(&detok, 4);
    assert_int_equal(detok_push(&detok, 6, out, sizeof out), 2); /* "da@@" + "fe" */
    tokenizer_close(t);
}

static void a_lone_control_word_where_allowed(void **state)
{
    (void)state;
    struct tokenizer *const t = from("xlm", SPECIAL "ka\n", NULL);
    int32_t *ids = NULL;
    size_t n = 0;
    assert_int_equal(tokenizer_encode(t, "</s>", 4, true, &ids, &n, NULL, NULL), ERR_OK);
    assert_int_equal(n, 1);
    assert_int_equal(ids[0], 1);
    free(ids);
    tokenizer_close(t);
}

static void a_lone_name_where_allowed(void **state)
{
    (void)state;
    const char *const kinds[] = {"word", "char", "byte"};
    const char *const vocabs[] = {"a\n<eos>\n<unk>\n", "<\n<eos>\n<unk>\n", "60\n<eos>\n<unk>\n"};
    for (int i = 0; i < 3; i++) {
        struct tokenizer *const t = from(kinds[i], vocabs[i], NULL);
        for (int id = 1; id < 3; id++) {
            int32_t *ids = NULL;
            size_t n = 0;
            assert_int_equal(
                tokenizer_encode(t, tokenizer_piece(t, id), 5, true, &ids, &n, NULL, NULL), ERR_OK);
            assert_int_equal(n, 1);
            assert_int_equal(ids[0], id);
            free(ids);
        }
        const int32_t as_text[] = {i == 0 ? 1 : 0, 2, 2, 2, 2};
        expect_ids(t, "<eos>", as_text, i == 0 ? 1 : 5);
        tokenizer_close(t);
    }
}

/* Of Memory Layers at Scale: all bytes, and words that a text cannot hold. */
static void a_line_feed_may_be_a_byte(void **state)
{
    (void)state;
    struct tokenizer *const t = from("byte", "97\n10\n60\n<s>\n</s>\n", NULL);
    const int32_t text[] = {0, 1, 0};
    const int32_t begun[] = {3, 0, 4};
    int32_t *ids = NULL;
    size_t n = 0;
    expect_ids(t, "a\na", text, 3);
    assert_int_equal(tokenizer_encode(t, "<s>", 3, true, &ids, &n, NULL, NULL), ERR_OK);
    assert_int_equal(n, 1);
    assert_int_equal(ids[0], 3);
    free(ids);
    struct err err = {0};
    assert_int_equal(tokenizer_encode(t, "<s>", 3, false, &ids, &n, NULL, &err), ERR_ARGUMENT);
    expect_text(t, begun, 3, "a");
    tokenizer_close(t);
}

static void lines_of_words_come_back(void **state)
{
    (void)state;
    struct tokenizer *const t = from("word", "the\ncat\n<eos>\n=\n<unk>", NULL);
    expect_same(t, "the cat\n= the =\n\nthe <unk>\n");
    expect_ids(t, "the dog", IDS(0, 4));
    tokenizer_close(t);
}

static void text_that_cannot_be_spelled_is_refused(void **state)
{
    (void)state;
    const char *const kinds[] = {"word", "char", "byte"};
    const char *const vocabs[] = {"a\nb\n", "a\n_\n", "97\n32\n"};
    for (int i = 0; i < 3; i++) {
        struct tokenizer *const t = from(kinds[i], vocabs[i], NULL);
        struct err err = {0};
        int32_t *ids = NULL;
        size_t n = 0;
        assert_int_equal(tokenizer_encode(t, "a c", 3, false, &ids, &n, NULL, &err), ERR_ARGUMENT);
        assert_non_null(strstr(err.message, "no token for \"c\" at byte 2"));
        assert_int_equal(tokenizer_encode(t, "\n", 1, false, &ids, &n, NULL, &err), ERR_ARGUMENT);
        assert_int_equal(tokenizer_encode(t, "\xff", 1, false, &ids, &n, NULL, &err), ERR_ARGUMENT);
        tokenizer_close(t);
    }
}

/* ---- merge rules ---- */

static void rules_are_applied(void **state)
{
    (void)state;
    struct tokenizer *const t = from("xlm", SPECIAL "low@@\nest\ner\nlow\nl@@\no\n\xc3\xa9@@\n",
                                     "l o 9\nlo w 8\nlo w</w> 7\ne s 6\nes t</w> 5\ne r</w> 4\n");
    assert_string_equal(tokenizer_kind(t), "xlm-bpe");
    expect_ids(t, "lowest lower\tlow", IDS(4, 5, 4, 6, 7));
    expect_text(t, IDS(4, 5, 4, 6, 7), "lowest lower low");
    expect_ids(t, "lo", IDS(8, 9)); /* "l o" is no "l o</w>" */
    expect_ids(t,
               "\xc3\xa9"
               "er q",
               IDS(10, 6, 3));
    tokenizer_close(t);
}

/* fastBPE's own way: the earliest rule that any neighbours have, joined from left to right. */
static size_t split_slowly(char part[][160], size_t n, char rules[][2][80], int n_rule)
{
    for (;;) {
        int best = n_rule;
        for (size_t i = 0; i + 1 < n; i++) {
            for (int r = 0; r < best; r++) {
                if (strcmp(part[i], rules[r][0]) == 0 && strcmp(part[i + 1], rules[r][1]) == 0) {
                    best = r;
                }
            }
        }
        if (best == n_rule) {
            return n;
        }
        size_t to = 0;
        for (size_t i = 0; i < n; to++) {
            memmove(part[to], part[i], sizeof part[i]);
            if (i + 1 < n && strcmp(part[to], rules[best][0]) == 0 &&
                strcmp(part[i + 1], rules[best][1]) == 0) {
                (void)strcat(part[to], part[i + 1]);
                i++;
            }
            i++;
        }
        n = to;
    }
}

/* Random rules over two letters, made as learnbpe makes them but in any order that is possible. */
static void rules_equal_a_plain_applier(void **state)
{
    (void)state;
    unsigned seed = 7;
    for (int round = 0; round < 100; round++) {
        static char made[20][80];
        static char rules[16][2][80];
        static char part[32][160];
        int n_made = 0;
        int n_rule = 0;
        const char *const letters[] = {"a", "b", "a</w>", "b</w>"};
        char codes[4096] = "";
        for (int i = 0; i < 4; i++) {
            (void)strcpy(made[n_made++], letters[i]);
        }
        for (int i = 0; i < 16; i++) {
            const char *const left = made[rand_r(&seed) % n_made];
            const char *const right = made[rand_r(&seed) % n_made];
            bool known = strchr(left, '<') != NULL || strlen(left) + strlen(right) > 24;
            for (int r = 0; r < n_rule; r++) {
                known = known || (!strcmp(rules[r][0], left) && !strcmp(rules[r][1], right));
            }
            if (!known) {
                (void)strcpy(rules[n_rule][0], left);
                (void)strcpy(rules[n_rule++][1], right);
                (void)strcat(strcpy(made[n_made++], rules[n_rule - 1][0]), rules[n_rule - 1][1]);
                (void)snprintf(codes + strlen(codes), sizeof codes - strlen(codes), "%s %s 1\n",
                               left, right);
            }
        }
        struct bpe *bpe = NULL;
        assert_int_equal(bpe_parse(&bpe, copy(codes), strlen(codes), "codes", NULL), ERR_OK);
        struct bpe_scratch scratch = {0};
        for (int w = 0; w < 20; w++) {
            char word[32] = "";
            const size_t n = 1 + (size_t)rand_r(&seed) % 24;
            for (size_t i = 0; i < n; i++) {
                word[i] = rand_r(&seed) % 2 ? 'a' : 'b';
                (void)snprintf(part[i], sizeof part[i], "%c%s", word[i], i + 1 < n ? "" : "</w>");
            }
            const size_t due = split_slowly(part, n, rules, n_rule);
            assert_int_equal(bpe_split(bpe, &scratch, word, n, NULL), ERR_OK);
            assert_int_equal(scratch.n_piece, due);
            size_t at = 0;
            for (size_t i = 0; i < due; i++) {
                at += strlen(part[i]) - (i + 1 == due ? 4 : 0);
                assert_int_equal(scratch.end[i], at);
            }
        }
        bpe_scratch_free(&scratch);
        bpe_close(bpe);
    }
}

/* A word of many letters takes about as long as as many letters in short words. */
static void a_long_word_is_split(void **state)
{
    (void)state;
    enum { N = 1 << 18 };
    struct tokenizer *const t = from("xlm", SPECIAL "aaaa@@\naaaa\n",
                                     "a a 1\na a</w> 1\naa aa 1\n"
                                     "aa aa</w> 1\n");
    char *const word = malloc(N + 1);
    assert_non_null(word);
    memset(word, 'a', N);
    word[N] = '\0';
    int32_t *const ids = calloc(N, sizeof *ids);
    assert_non_null(ids);
    assert_int_equal(encode(t, word, ids, N), N / 4);
    assert_int_equal(ids[N / 4 - 1], 5);
    free(ids);
    free(word);
    tokenizer_close(t);
}

/* ---- hostile files ---- */

static void damaged_files_are_refused(void **state)
{
    (void)state;
    static const struct {
        const char *kind, *vocabulary, *codes;
        int n;
        const char *says;
    } bad[] = {
        {"word", "a\nb\n", NULL, 3, "its number of lines is 2, the model's vocab_size is 3"},
        {"word", "", NULL, 1, "its number of lines is 0"},
        {"word", "a\n\nb\n", NULL, 3, "line 2 is empty"},
        {"word", "a\nb\na\n", NULL, 3, "line 3 repeats line 1"},
        {"word", "a\r\nb\r\n", NULL, 2, "line 1 holds"},
        {"word", "a\n\xc3\n", NULL, 2, "line 2 is not valid UTF-8"},
        {"char", "a\nbc\n", NULL, 2, "line 2 is \"bc\""},
        {"byte", "97\n256\n", NULL, 2, "line 2 is \"256\""},
        {"byte", "97\n097\n", NULL, 2, "line 2 is \"097\""},
        {"byte", "<eos>\n10\n", NULL, 2, "line 2 is \"10\""},
        {"byte", "1e\n", NULL, 1, "line 1 is \"1e\""},
        {"xlm", "ka\n</s>\n<pad>\n<unk>\n", NULL, 4, "line 1 is \"ka\""},
        {"xlm", "<s>\nka\n<pad>\n<unk>\n", NULL, 4, "line 2 is \"ka\""},
        {"xlm", "<s>\n</s>\nka\n<unk>\n", NULL, 4, "line 3 is \"ka\""},
        {"xlm", "<s>\n</s>\n<pad>\nka\n", NULL, 4, "line 4 is \"ka\""},
        {"xlm", "<s>\n</s>\n", NULL, 2, "line 3 is \"\""},
        {"xlm", SPECIAL, "a b\n", 4, "line 1 is not"},
        {"xlm", SPECIAL, "a b 1\n\n", 4, "line 2 is not"},
        {"xlm", SPECIAL, "a b x\n", 4, "line 1 is not"},
        {"xlm", SPECIAL, " b 1\n", 4, "line 1 is not"},
        {"xlm", SPECIAL, "a b \n", 4, "line 1 is not"},
        {"xlm", SPECIAL, "a \xff 1\n", 4, "line 1 is not"},
        {"xlm", SPECIAL, "a b 1\na b 1\n", 4, "line 2 repeats line 1"},
        {"xlm", SPECIAL, "ab c 1\na b 1\n", 4, "line 1 joins a part"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        struct tokenizer *t = NULL;
        struct err err = {0};
        assert_int_equal(tokenizer_vocab_parse(&t, bad[i].kind, copy(bad[i].vocabulary),
                                               strlen(bad[i].vocabulary), copy(bad[i].codes),
                                               bad[i].codes != NULL ? strlen(bad[i].codes) : 0,
                                               bad[i].n, &err),
                         ERR_FORMAT);
        assert_null(t);
        if (strstr(err.message, bad[i].says) == NULL) {
            fail_msg("expected \"%s\", got \"%s\"", bad[i].says, err.message);
        }
    }
}

static void a_missing_vocabulary_is_named(void **state)
{
    (void)state;
    struct tokenizer *t = NULL;
    struct err err = {0};
    assert_int_equal(tokenizer_open(&t, "tests/engine", NULL, "char", 3, &err), ERR_IO);
    assert_non_null(strstr(err.message, "tests/engine/vocab.txt"));
    assert_int_equal(tokenizer_open(&t, NULL, "tests", "char", 3, &err), ERR_IO);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(words_are_the_authors),
        cmocka_unit_test(bytes_are_the_authors),
        cmocka_unit_test(characters_are_the_authors),
        cmocka_unit_test(xlm_is_the_authors),
        cmocka_unit_test(split_words_come_back_whole),
        cmocka_unit_test(a_lone_control_word_where_allowed),
        cmocka_unit_test(a_lone_name_where_allowed),
        cmocka_unit_test(a_line_feed_may_be_a_byte),
        cmocka_unit_test(lines_of_words_come_back),
        cmocka_unit_test(text_that_cannot_be_spelled_is_refused),
        cmocka_unit_test(rules_are_applied),
        cmocka_unit_test(rules_equal_a_plain_applier),
        cmocka_unit_test(a_long_word_is_split),
        cmocka_unit_test(damaged_files_are_refused),
        cmocka_unit_test(a_missing_vocabulary_is_named),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
