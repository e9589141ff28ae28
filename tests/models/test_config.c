/* config.json: every bound, every contradiction, and the message that names the field. */
#include "models/config.h"
#include "models/family.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include <cmocka.h>

/* A valid configuration, in which tests replace one piece of text. */
static const char *const VALID =
    "{\"model_type\": \"pkm_transformer\", \"vocab_size\": 200, \"d_model\": 64, \"n_layer\": 12,\n"
    " \"n_head\": 4, \"d_ff\": 256, \"max_position\": 512, \"activation\": \"gelu\",\n"
    " \"norm_eps\": 1e-12, \"tie_output\": true, \"bos_token_id\": 1, \"eos_token_id\": 1,\n"
    " \"pad_token_id\": 2, \"unk_token_id\": 3, \"add_bos\": true, \"dtype\": \"bf16\",\n"
    " \"languages\": [\"en\", \"fr\"], \"memories\": [\n"
    "  {\"layer\": 6, \"place\": \"in\", \"kind\": \"product\", \"n_head\": 4, \"k_top\": 16,\n"
    "   \"n_key\": 32, \"d_key\": 32, \"n_slot\": 1024, \"query_batch_norm\": true,\n"
    "   \"query_bias\": false},\n"
    "  {\"layer\": 7, \"place\": \"after\", \"kind\": \"flat\", \"n_head\": 2, \"k_top\": 9,\n"
    "   \"n_key\": 300, \"d_key\": 15, \"n_slot\": 300, \"query_batch_norm\": false,\n"
    "   \"query_bias\": true}]}";

/* Where a memory's entry can be added to. */
#define IN "\"place\": \"in\""
#define AFTER "\"place\": \"after\""

/* What a memory of memory_llama must have, and what makes its table one of experts. */
#define MEMORY "\"n_head\": 2, \"k_top\": 4, \"n_key\": 8, \"d_key\": 8, \"n_slot\": 64"
#define EXPERTS ", \"experts\": true"

/* VALID with the first occurrence of old replaced. Owner: the caller. */
static char *replace(const char *old, const char *new)
{
    const char *const at = strstr(VALID, old);
    if (at == NULL) {
        fail_msg("the test replaces %s, which is not in the valid configuration", old);
        return NULL;
    }
    const size_t bytes = strlen(VALID) + strlen(new) + 1;
    char *const text = malloc(bytes);
    assert_non_null(text);
    (void)snprintf(text, bytes, "%.*s%s%s", (int)(at - VALID), VALID, new, at + strlen(old));
    return text;
}

static enum err_code parse(const char *text, struct config *config, struct err *err)
{
    *err = (struct err){0};
    return config_parse(config, text, strlen(text), "dir/config.json", err);
}

static void refuse_text(const char *text, const char *what, const char *message)
{
    static struct config config;
    struct err err;
    const enum err_code code = parse(text, &config, &err);
    if (code != ERR_FORMAT || strstr(err.message, message) == NULL ||
        strstr(err.message, "dir/config.json") == NULL) {
        fail_msg("%s: expected ERR_FORMAT, naming dir/config.json and \"%s\"; got %s, \"%s\"; "
                 "rerun: build/tests/models/test_config",
                 what, message, err_code_name(code), err.message);
    }
}

static void test_reads_every_field(void **state)
{
    static struct config c;
    struct err err;
    (void)state;
    assert_int_equal(parse(VALID, &c, &err), ERR_OK);
    assert_string_equal(c.family->name, "pkm_transformer");
    assert_int_equal(c.n_vocab, 200);
    assert_int_equal(c.d_model, 64);
    assert_int_equal(c.n_layer, 12);
    assert_int_equal(c.n_head, 4);
    assert_int_equal(c.d_ff, 256);
    assert_int_equal(c.context, 512);
    assert_int_equal(c.act, ACT_GELU);
    assert_true(c.norm_eps == 1e-12f);
    assert_true(c.tie_output && c.add_bos);
    assert_int_equal(c.bos_id, 1);
    assert_int_equal(c.eos_id, 1);
    assert_int_equal(c.pad_id, 2);
    assert_int_equal(c.unk_id, 3);
    assert_int_equal(c.n_lang, 2);
    assert_string_equal(c.lang[1], "fr");
    assert_int_equal(c.n_memory, 2);
    const struct config_memory *const in = &c.memory[0];
    const struct config_memory *const after = &c.memory[1];
    assert_true(in->info.layer == 6 && in->info.place == MEMORY_IN &&
                in->info.shape.kind == PKM_PRODUCT);
    assert_true(in->info.shape.n_head == 4 && in->info.shape.k_top == 16);
    assert_true(in->info.shape.n_key == 32 && in->info.shape.d_key == 32);
    assert_true(in->info.n_slot == 1024 && in->info.d_value == 64);
    assert_true(in->query_batch_norm && !in->query_bias);
    assert_true(after->info.layer == 7 && after->info.place == MEMORY_AFTER);
    assert_true(after->info.shape.kind == PKM_FLAT && after->info.shape.d_key == 15);
    assert_true(!after->query_batch_norm && after->query_bias);
}

static void test_optional_keys_have_defaults(void **state)
{
    static struct config c;
    struct err err;
    (void)state;
    const char *const text =
        "{\"model_type\":\"pkm_transformer\",\"vocab_size\":2,\"d_model\":2,\"n_layer\":1,"
        "\"n_head\":1,\"d_ff\":1,\"max_position\":1,\"activation\":\"relu\",\"norm_eps\":1,"
        "\"tie_output\":false,\"tokenizer\":\"char\",\"adaptive_cutoffs\":[1],"
        "\"adaptive_widths\":[1]}";
    if (parse(text, &c, &err) != ERR_OK) {
        fail_msg("%s", err.message);
    }
    assert_true(c.bos_id == -1 && c.eos_id == -1 && c.pad_id == -1 && c.unk_id == -1);
    assert_true(!c.add_bos && c.n_lang == 0 && c.n_memory == 0 && c.act == ACT_RELU);
    assert_string_equal(c.tokenizer, "char");
    assert_true(c.n_cutoff == 1 && c.cutoff[0] == 1 && c.cutoff_width[0] == 1);
}

static void test_refuses(void **state)
{
    static const struct {
        const char *old, *new, *message;
    } rows[] = {
        {"\"vocab_size\": 200, ", "", "vocab_size is missing"},
        {"\"vocab_size\": 200", "\"vocab_size\": \"200\"", "vocab_size must be an integer"},
        {"\"vocab_size\": 200", "\"vocab_size\": 200.0", "vocab_size must be an integer"},
        {"\"vocab_size\": 200", "\"vocab_size\": 0", "vocab_size is 0, outside 1 .. 16777216"},
        {"\"vocab_size\": 200", "\"vocab_size\": 16777217", "vocab_size is 16777217, outside"},
        {"\"vocab_size\": 200", "\"vocab_size\": 99999999999999999999", "not valid JSON"},
        {"\"vocab_size\": 200", "\"vocab_size\": 3", "unk_token_id is 3, but vocab_size is 3"},
        {"\"d_model\": 64", "\"d_model\": 65537", "d_model is 65537, outside 1 .. 65536"},
        {"\"d_model\": 64", "\"d_model\": 66", "d_model 66 is not a multiple of n_head 4"},
        {"\"n_layer\": 12", "\"n_layer\": 1025", "n_layer is 1025, outside"},
        {"\"n_layer\": 12", "\"n_layer\": 7", "memories[1].layer is 7, but the last"},
        {"\"n_head\": 4", "\"n_head\": 0", "n_head is 0, outside"},
        {"\"d_ff\": 256", "\"d_ff\": -1", "d_ff is -1, outside 1 .. 1048576"},
        {"\"max_position\": 512", "\"max_position\": 1048577", "max_position is 1048577"},
        {"\"gelu\"", "\"swish\"", "activation is \"swish\"; served are \"gelu\", \"relu\""},
        {"\"gelu\"", "1", "activation must be a string"},
        {"1e-12", "0", "norm_eps is 0, outside"},
        {"1e-12", "1e-60", "norm_eps is 0, outside"},
        {"1e-12", "2", "norm_eps is 2, outside"},
        {"1e-12", "1e999", "not valid JSON"},
        {"1e-12", "null", "norm_eps must be a number"},
        {"\"tie_output\": true", "\"tie_output\": 1", "tie_output must be true or false"},
        {"\"bos_token_id\": 1", "\"bos_token_id\": -2", "bos_token_id is -2, outside -1 .."},
        {"\"bos_token_id\": 1", "\"bos_token_id\": -1", "add_bos is true, but there is no bos"},
        {"\"eos_token_id\": 1", "\"eos_token_id\": 200", "eos_token_id is 200, but vocab_size"},
        {"\"bf16\"", "\"int4\"", "dtype is \"int4\""},
        {"\"dtype\": \"bf16\"", "\"tokenizer\": \"wordpiece\"", "tokenizer is \"wordpiece\""},
        {"\"dtype\": \"bf16\"", "\"adaptive_cutoffs\": []", "adaptive_cutoffs must be an array"},
        {"\"dtype\": \"bf16\"", "\"adaptive_cutoffs\": [4.5]", "adaptive_cutoffs[0] must be"},
        {"\"dtype\": \"bf16\"", "\"adaptive_cutoffs\": [4]", "1 adaptive_cutoffs, but 0"},
        {"\"dtype\": \"bf16\"", "\"adaptive_cutoffs\": [4, 4], \"adaptive_widths\": [2, 1]",
         "adaptive_cutoffs[1] is 4"},
        {"\"dtype\": \"bf16\"", "\"adaptive_cutoffs\": [200], \"adaptive_widths\": [2]",
         "adaptive_cutoffs[0] is 200"},
        {"\"dtype\": \"bf16\"", "\"adaptive_cutoffs\": [4], \"adaptive_widths\": [2]",
         "tie_output is true"},
        {"\"dtype\": \"bf16\"", "\"adaptive_widths\": [65537]", "adaptive_widths[0] must be"},
        {"[\"en\", \"fr\"]", "[]", "languages must be an array of 1 to 256 names"},
        {"[\"en\", \"fr\"]", "\"en\"", "languages must be an array"},
        {"[\"en\", \"fr\"]", "[\"en\", 2]", "languages[1] must be a string"},
        {"[\"en\", \"fr\"]", "[\"en\", \"\"]", "languages[1] must be a string"},
        {"[\"en\", \"fr\"]", "[\"en\", \"en\"]", "languages names \"en\" twice"},
        {"\"pkm_transformer\"", "\"bert\"", "model_type is \"bert\"; served are"},
        {"\"dtype\"", "\"share_values\"", "unknown key \"share_values\""},
        {"\"dtype\"", "\"add_bos\"", "duplicate"},
        {"\"place\": \"in\"", "\"place\": \"in\", \"modulus\": 3",
         "unknown key \"memories[0].modulus\""},
        {"\"layer\": 6", "\"layer\": -1", "memories[0].layer is -1, outside"},
        {"\"layer\": 6", "\"layer\": 8", "memories[1] runs before memories[0]"},
        {"\"layer\": 6, \"place\": \"in\"", "\"layer\": 7, \"place\": \"after\"",
         "memories[0] and [1] are both after layer 7"},
        {"\"place\": \"in\"", "\"place\": \"before\"", "memories[0].place is \"before\""},
        {"\"product\"", "\"hash\"", "memories[0].kind is \"hash\""},
        {"\"k_top\": 16", "\"k_top\": 0", "memories[0].k_top is 0, outside 1 .. 1024"},
        {"\"k_top\": 16", "\"k_top\": 33", "memories[0].k_top is 33, more than n_key 32"},
        {"\"n_key\": 32", "\"n_key\": 33", "n_slot is 1024, but product keys with n_key 33 have"},
        {"\"n_key\": 32", "\"n_key\": 16777216", "product keys with n_key 16777216 have"},
        {"\"d_key\": 32", "\"d_key\": 33", "memories[0].d_key is 33, but product keys halve"},
        {"\"n_slot\": 1024", "\"n_slot\": 2147483648", "memories[0].n_slot is 2147483648, outside"},
        {"\"n_slot\": 300", "\"n_slot\": 301", "flat keys with n_key 300 have 300"},
        {"\"query_bias\": false", "\"query_bias\": 0", "memories[0].query_bias must be true"},
        {",\n   \"query_bias\": false", "", "memories[0].query_bias is missing"},
        {IN, IN ", \"query\": \"conv\"", "memories[0].query is \"conv\"; served are"},
        {IN, IN ", \"query_hidden\": 3", "query_hidden must be an array of at most 8 widths"},
        {IN, IN ", \"query_hidden\": [1, 2, 3, 4, 5, 6, 7, 8, 9]", "at most 8 widths"},
        {IN, IN ", \"query_hidden\": [0]", "memories[0].query_hidden[] is 0, outside 1 .. 65536"},
        {IN, IN ", \"query_hidden\": [2.5]", "memories[0].query_hidden[] must be an integer"},
        {IN, IN ", \"query\": \"per_half\"", "\"per_half\" needs query_hidden and an even d_key"},
        {IN, IN ", \"query\": \"identity\"", "needs d_key = d_model = 64 (d_key is 32)"},
        {"\"n_head\": 4, \"k_top\": 16,\n   \"n_key\": 32, \"d_key\": 32, \"n_slot\": 1024, "
         "\"query_batch_norm\": true",
         "\"n_head\": 7, \"k_top\": 16, \"n_key\": 32, \"d_key\": 64, \"n_slot\": 1024, "
         "\"query_batch_norm\": false, \"query\": \"shuffled\"",
         "\"shuffled\" cuts d_model 64 into 2^n_head pieces: it must be a multiple of that"},
        {IN, "\"place\": \"beside\"", "only models of the memory_llama family have"},
        {IN, IN ", \"modulo\": true", "and modulo makes it fewer than these"},
        {IN, IN ", \"modulo\": 1", "memories[0].modulo must be true or false"},
        {IN, IN ", \"temperature\": 0", "memories[0].temperature is 0, outside 1e-6 .. 1e6"},
        {IN, IN ", \"temperature\": -1", "memories[0].temperature is -1, outside"},
        {IN, IN ", \"temperature\": 1.1e6", "memories[0].temperature is 1.1e+06, outside"},
        {IN, IN ", \"temperature\": 1e300", "memories[0].temperature is inf, outside"},
        {IN, IN ", \"subtract\": \"max\"", "memories[0].subtract is \"max\"; served are"},
        {IN, IN ", \"normalize\": true", "normalize after a softmax needs subtract"},
        {"\"k_top\": 16", "\"k_top\": 1, \"subtract\": \"min\", \"normalize\": true",
         "memories[0].k_top is 1: subtract leaves 0 of a single score, and normalize divides"},
        {IN, IN ", \"values_of\": 1", "values_of is 1, not the index of an earlier memory"},
        {AFTER, AFTER ", \"values_of\": 0", "but the table of memories[0] has 1024 rows"},
        {AFTER, AFTER ", \"values_of\": 64", "memories[1].values_of is 64, outside 0 .. 63"},
    };
    (void)state;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        char *const text = replace(rows[i].old, rows[i].new);
        refuse_text(text, rows[i].new, rows[i].message);
        free(text);
    }
}

/* What the scores of a memory go through, and what it does without. */
static void test_reads_memory_options(void **state)
{
    static struct config c;
    struct err err;
    (void)state;
    assert_int_equal(parse(VALID, &c, &err), ERR_OK);
    for (int m = 0; m < 2; m++) { /* plain memories stay on the plain path */
        const struct config_memory *const plain = &c.memory[m];
        assert_true(!plain->info.shape.scores && !plain->query_normalize && !plain->shared_keys);
        assert_true(!plain->slot_map && !plain->modulo && plain->info.values_of == m);
        assert_int_equal(plain->info.query, QUERY_MLP);
        assert_int_equal(plain->info.n_hidden, 0);
    }
    char *text = replace(IN, IN ", \"query\": \"per_half\", \"query_hidden\": [20, 10], "
                                "\"query_normalize\": true, \"shared_keys\": true, "
                                "\"slot_map\": true, \"temperature\": 0.5, \"softmax\": false, "
                                "\"subtract\": \"median\", \"normalize\": true");
    assert_int_equal(parse(text, &c, &err), ERR_OK);
    const struct config_memory *const in = &c.memory[0];
    assert_true(in->query_normalize && in->shared_keys && in->slot_map && !in->modulo);
    assert_int_equal(in->info.query, QUERY_PER_HALF);
    assert_int_equal(in->info.n_hidden, 2);
    assert_int_equal(in->info.hidden[0], 20);
    assert_int_equal(in->info.hidden[1], 10);
    const struct pkm_rescore *const rescore = &in->info.rescore;
    assert_true(in->info.shape.scores && !rescore->softmax && rescore->normalize);
    assert_true(rescore->temperature == 0.5f);
    assert_int_equal(rescore->subtract, PKM_SUBTRACT_MEDIAN);
    assert_int_equal(rescore->n_head, 4);
    assert_int_equal(rescore->k_top, 16);
    assert_int_equal(rescore->n_slot, 1024);
    free(text);
    text = replace("\"n_slot\": 1024", "\"n_slot\": 1000, \"modulo\": true");
    assert_int_equal(parse(text, &c, &err), ERR_OK);
    assert_true(in->info.shape.scores && rescore->softmax);
    assert_int_equal(rescore->n_slot, 1000);
    free(text);
}

static void test_refuses_what_is_no_object(void **state)
{
    (void)state;
    refuse_text("", "empty", "not valid JSON");
    refuse_text("[]", "an array", "object is expected");
    refuse_text("3", "a number", "not valid JSON");
    refuse_text("{} {}", "two objects", "not valid JSON");
    refuse_text("{\"model_type\": \"pkm_transformer\\u0000\"}", "a NUL", "not valid JSON");
    refuse_text("{\"model_type\": \"\xff\"}", "no UTF-8", "not valid JSON");
}

static void test_refuses_too_many_memories(void **state)
{
    static char text[1 << 14];
    size_t used = (size_t)snprintf(text, sizeof text, "{\"memories\": [");
    (void)state;
    for (int i = 0; i <= MODEL_PKM_MAX; i++) {
        used += (size_t)snprintf(text + used, sizeof text - used, "%s{}", i > 0 ? "," : "");
    }
    char *const whole = replace("\"memories\": [", text + 1);
    char *const end = strstr(whole, "\n  {\"layer\": 6");
    assert_non_null(end);
    (void)snprintf(end, strlen(end) + 1, "]}");
    refuse_text(whole, "65 memories", "memories must be an array of at most 64 objects");
    free(whole);
}

static void test_memory_llama(void **state)
{
    static const char *const valid =
        "{\"model_type\": \"memory_llama\", \"vocab_size\": 40, \"d_model\": 16, \"n_layer\": 4, "
        "\"n_head\": 4, \"n_kv_head\": 2, \"d_head\": 4, \"d_ff\": 24, \"max_position\": 64, "
        "\"rope_theta\": 500, \"rope_scaling\": {\"rope_type\": \"llama3\", \"factor\": 8, "
        "\"low_freq_factor\": %s, \"high_freq_factor\": %s, "
        "\"original_max_position_embeddings\": 16}, \"norm_eps\": 1e-5, \"tie_output\": true, "
        "\"memories\": [{\"layer\": 1, " MEMORY "%s}, {\"layer\": 2, " MEMORY
        ", \"values_of\": 0%s}]}";
    static const struct {
        const char *low, *high, *first, *second, *message; /* NULL: taken */
    } rows[] = {
        {"1", "4", "", "", NULL},
        {"4", "4.001", "", "", NULL},
        {"4", "4", "", "", "high_freq_factor is 4, not above low_freq_factor 4"},
        {"1", "4", EXPERTS, EXPERTS, NULL},
        {"1", "4", EXPERTS, "",
         "memories[1].d_value is 16, but the table of memories[0] has 16 columns of experts"},
        {"1", "4", "", EXPERTS,
         "memories[1].d_value is 16 of experts, but the table of memories[0] has 16 columns"},
    };
    (void)state;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        static struct config config;
        struct err err;
        char text[1024];
        (void)snprintf(text, sizeof text, valid, rows[i].low, rows[i].high, rows[i].first,
                       rows[i].second);
        if (rows[i].message != NULL) {
            refuse_text(text, rows[i].message, rows[i].message);
        } else if (parse(text, &config, &err) != ERR_OK) {
            fail_msg("%s: %s", text, err.message);
        }
    }
}

static void test_all_attention(void **state)
{
    static struct config c;
    struct err err;
    const char *const valid =
        "{\"model_type\": \"all_attention\", \"vocab_size\": 28, \"d_model\": 64, \"n_layer\": 4, "
        "\"n_head\": 4, \"d_ff\": %d, \"n_persistent\": %d, \"max_span\": 48, %s"
        "\"norm_eps\": 1e-5, \"tie_output\": false}";
    static const struct {
        int d_ff, n_persistent;
        const char *more, *message;
    } bad[] = {
        {0, 0, "", "d_ff is 0 and n_persistent 0"},
        {160, 8, "", "d_ff is 160 and n_persistent 8"},
        {0, 8, "\"span_ramp\": 0, ", "span_ramp is 0, outside 1 .. 1048576"},
        {0, -1, "", "n_persistent is -1, outside 0 .. 1048576"},
        {0, 8, "\"max_position\": 512, ", "unknown key \"max_position\""},
        {0, 8, "\"memories\": [], ", "unknown key \"memories\""},
    };
    char text[512];
    (void)state;
    (void)snprintf(text, sizeof text, valid, 0, 8, "\"span_ramp\": 32, ");
    assert_int_equal(parse(text, &c, &err), ERR_OK);
    assert_string_equal(c.family->name, "all_attention");
    assert_int_equal(c.context, 0);
    assert_int_equal(c.max_span, 48);
    assert_int_equal(c.n_persistent, 8);
    assert_int_equal(c.span_ramp, 32);
    assert_int_equal(c.act, ACT_RELU);
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        (void)snprintf(text, sizeof text, valid, bad[i].d_ff, bad[i].n_persistent, bad[i].more);
        refuse_text(text, bad[i].message, bad[i].message);
    }
}

/* The message of a key from outside stays one printable line. */
static void test_message_is_one_line(void **state)
{
    static struct config config;
    struct err err;
    char *const text = replace("\"dtype\"", "\"a\\nb\\u001bc\"");
    (void)state;
    assert_int_equal(parse(text, &config, &err), ERR_FORMAT);
    assert_null(strchr(err.message, '\n'));
    assert_null(strchr(err.message, 0x1b));
    free(text);
}

static void test_file_limits(void **state)
{
    static struct config config;
    struct err err = {0};
    char dir[] = "/tmp/test_config.XXXXXX";
    char path[64];
    (void)state;
    assert_non_null(mkdtemp(dir));
    assert_int_equal(config_read(&config, dir, &err), ERR_IO);
    assert_non_null(strstr(err.message, "/config.json: cannot open"));
    (void)snprintf(path, sizeof path, "%s/config.json", dir);
    FILE *const file = fopen(path, "w");
    assert_non_null(file);
    (void)fprintf(file, "%s", VALID);
    (void)fflush(file);
    assert_int_equal(config_read(&config, dir, &err), ERR_OK);
    for (int i = 0; i < CONFIG_BYTES_MAX; i++) {
        (void)fputc(' ', file);
    }
    (void)fclose(file);
    assert_int_equal(config_read(&config, dir, &err), ERR_FORMAT);
    assert_non_null(strstr(err.message, "longer than the limit of 1048576 bytes"));
    (void)remove(path);
    assert_int_equal(mkfifo(path, 0600), 0); /* which is not waited for */
    assert_int_equal(config_read(&config, dir, &err), ERR_IO);
    assert_non_null(strstr(err.message, "/config.json: not a regular file"));
    (void)remove(path);
    (void)remove(dir);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_reads_every_field),
        cmocka_unit_test(test_optional_keys_have_defaults),
        cmocka_unit_test(test_refuses),
        cmocka_unit_test(test_reads_memory_options),
        cmocka_unit_test(test_refuses_what_is_no_object),
        cmocka_unit_test(test_refuses_too_many_memories),
        cmocka_unit_test(test_memory_llama),
        cmocka_unit_test(test_all_attention),
        cmocka_unit_test(test_message_is_one_line),
        cmocka_unit_test(test_file_limits),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
