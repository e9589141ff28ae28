/* Overlays: what is read from a file, each thing that is refused by name, and SHA-256, by which an
 * overlay knows its base. */
#include "models/overlay.h"
#include "models/sha256_inside.h"
#include "tests/models/writer.h"

#include <math.h>

#define HASH "00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff"
#define META(mode)                                                                                 \
    "\"__metadata__\":{\"format\":\"pkmserve-overlay-1\",\"mode\":\"" mode "\",\"base\":\"" HASH   \
    "\"}"
#define SLOTS(n) "\"memories.0.slots\":{\"dtype\":\"I32\",\"shape\":[" n "],\"data_offsets\":[0,8]}"
#define ROWS(name, dtype, shape, last)                                                             \
    "\"memories." name "\":{\"dtype\":\"" dtype "\",\"shape\":" shape ",\"data_offsets\":[8," last \
    "]}"
#define PLAIN "{" META("replace") "," SLOTS("2") "," ROWS("0.rows", "F32", "[2,2]", "24") "}"

static const struct model_info two_memories = {
    .d_model = 2,
    .n_memory = 2,
    .memory = {{.n_slot = 16, .d_value = 2},
               {.n_slot = 16, .d_value = 2, .values_of = 1, .experts = true}}};
static const char two_hashes[2][SHA256_HEX] = {HASH, ""};

/* Parses header and data, whose first two words are slots, and checks the result against the model.
 * Owner of the result: the caller. */
static unsigned char *image_of(const char *header, const int32_t slot[2], const float row[4],
                               size_t data_bytes, size_t *bytes)
{
    char padded[1024];
    const int n = (int)strlen(header);
    (void)snprintf(padded, sizeof padded, "%-*s", (n + 7) / 8 * 8, header);
    unsigned char *const image = writer_image(bytes, padded, strlen(padded), data_bytes);
    unsigned char *const data = image + 8 + strlen(padded);
    memcpy(data, slot, 8);
    memcpy(data + 8, row, data_bytes - 8 < 16 ? data_bytes - 8 : 16);
    return image;
}

static void test_reads_rows(void **state)
{
    (void)state;
    const int32_t slot[2] = {3, 15};
    const float row[4] = {1, 2, 3, 4};
    struct overlay overlay;
    struct err err = {0};
    size_t bytes = 0;
    unsigned char *const image = image_of(PLAIN, slot, row, 24, &bytes);
    if (overlay_parse(&overlay, image, bytes, "x.safetensors", &err) != ERR_OK) {
        fail_msg("%s", err.message);
    }
    assert_int_equal(overlay_check(&overlay, &two_memories, two_hashes, &err), ERR_OK);
    assert_true(!overlay.add && overlay.n_memory == 1);
    const struct overlay_memory *const memory = &overlay.memory[0];
    assert_true(memory->memory == 0 && memory->n == 2 && memory->slot[1] == 15);
    assert_true(memory->values.rows.rows == 2 && row_f32(memory->values.rows, 1)[1] == 4);
    assert_null(memory->experts.rows.data);
    assert_string_equal(memory->base, HASH);
    overlay_free(&overlay);
    free(image);
}

static void test_refuses_by_name(void **state)
{
    static const struct {
        const char *header;
        int32_t slot[2];
        float row;
        size_t data_bytes;
        const char *message;
    } rows[] = {
        {PLAIN, {3, 3}, 1, 24, "memories.0.slots: slot 3 at index 1"},
        {PLAIN, {4, 3}, 1, 24, "memories.0.slots: slot 3 at index 1"},
        {PLAIN, {-1, 3}, 1, 24, "memories.0.slots: slot -1 at index 0"},
        {PLAIN, {3, 16}, 1, 24, "slot 16 does not exist: memory 0 has 16"},
        {PLAIN, {3, 4}, NAN, 24, "memories.0.rows is NaN at index 0"},
        {PLAIN, {3, 4}, INFINITY, 24, "memories.0.rows is infinite at index 0"},
        {"{" META("add") "," SLOTS("2") "," ROWS("0.rows.scale", "F32", "[2]",
                                                 "16") ","
                                                       "\"memories.0.rows\":{\"dtype\":\"I8\","
                                                       "\"shape\":[2,2],\"data_offsets\":[16,20]}}",
         {3, 4},
         3e38f,
         20,
         "memories.0.rows.scale is 3e+38 at index 0: 128 times that is infinite"},
        {PLAIN, {3, 4}, 1, 20, "truncated or damaged"},
        {"{" META("mix") "," SLOTS("2") "," ROWS("0.rows", "F32", "[2,2]", "24") "}",
         {3, 4},
         1,
         24,
         "mode is \"mix\""},
        {"{" SLOTS("2") "," ROWS("0.rows", "F32", "[2,2]", "24") "}",
         {3, 4},
         1,
         24,
         "no overlay: the metadata's format is \"\""},
        {"{" META("add") "," SLOTS("2") "," ROWS("0.rows", "F32", "[4,1]", "24") "}",
         {3, 4},
         1,
         24,
         "memories.0.rows must have two dimensions and 2 rows"},
        {"{" META("add") "," SLOTS("2") "," ROWS("0.rows", "F32", "[2,3]", "32") "}",
         {3, 4},
         1,
         32,
         "memories.0.rows has 3 columns: memory 0 has 2"},
        {"{" META("add") "," SLOTS("2") "," ROWS("0.rows", "F64", "[2,1]", "24") "}",
         {3, 4},
         1,
         24,
         "memories.0.rows has dtype F64"},
        {"{" META("add") "," SLOTS("2") "," ROWS("0.rows", "I8", "[2,2]", "12") "}",
         {3, 4},
         1,
         12,
         "memories.0.rows has dtype I8 and needs memories.0.rows.scale"},
        {"{" META("add") "," SLOTS("2") "," ROWS("0.keys", "F32", "[2,2]", "24") "}",
         {3, 4},
         1,
         24,
         "memories.0.keys is no part of an overlay"},
        {"{" META("add") "," SLOTS("2") "," ROWS("64.rows", "F32", "[2,2]", "24") "}",
         {3, 4},
         1,
         24,
         "memories.64.rows is no part of an overlay"},
        {"{" META("add") "," SLOTS("2") "," ROWS("1.rows", "F32", "[2,2]", "24") "}",
         {3, 4},
         1,
         24,
         "memories.0.rows is missing"},
        {"{" META("add") "}", {3, 4}, 1, 8, "belong to no tensor"},
        {"{" META("add") ",\"memories.0.slots\":{\"dtype\":\"F32\",\"shape\":[2],"
                         "\"data_offsets\":[0,8]}," ROWS("0.rows", "F32", "[2,2]", "24") "}",
         {3, 4},
         1,
         24,
         "memories.0.slots must be I32 [n]"},
        {"{" META("add") ",\"memories.0.slots\":{\"dtype\":\"I32\",\"shape\":[2,1],"
                         "\"data_offsets\":[0,8]}," ROWS("0.rows", "F32", "[2,2]", "24") "}",
         {3, 4},
         1,
         24,
         "memories.0.slots must be I32 [n]"},
        {"{" META("add") ",\"memories.0.slots\":{\"dtype\":\"I32\",\"shape\":[0],"
                         "\"data_offsets\":[0,0]},\"memories.0.rows\":{\"dtype\":\"F32\","
                         "\"shape\":[0,2],\"data_offsets\":[0,0]},"
                         "\"memories.0.rows.scale\":{\"dtype\":\"F32\",\"shape\":[2],"
                         "\"data_offsets\":[0,8]}}",
         {3, 4},
         1,
         8,
         "memories.0.slots must be I32 [n], and name a slot"},
        {"{" META("add") ",\"memories.0.rows\":{\"dtype\":\"F16\",\"shape\":[1,1],"
                         "\"data_offsets\":[0,2]},\"memories.0.slots\":{\"dtype\":\"I32\","
                         "\"shape\":[1],\"data_offsets\":[2,6]},\"memories.1.rows\":{\"dtype\":"
                         "\"F16\",\"shape\":[1,1],\"data_offsets\":[6,8]}}",
         {3, 4},
         1,
         8,
         "memories.0.slots does not start at a multiple of its element size"},
        {"{" META("add") "," SLOTS("2") "," ROWS("0.rows.scale", "F32", "[1]",
                                                 "12") ","
                                                       "\"memories.0.rows\":{\"dtype\":\"I8\","
                                                       "\"shape\":[2,2],\"data_offsets\":[12,16]}}",
         {3, 4},
         1,
         16,
         "memories.0.rows.scale must be F32 [2]"},
        {"{" META("add") "," SLOTS("2") "," ROWS("0.rows", "F32", "[2,2]",
                                                 "24") ","
                                                       "\"memories.0.experts.scale\":{\"dtype\":"
                                                       "\"F32\",\"shape\":[2],\"data_offsets\":"
                                                       "[24,32]}}",
         {3, 4},
         1,
         32,
         "memories.0.experts is missing"},
        {"{\"__metadata__\":{\"format\":\"pkmserve-overlay-1\",\"mode\":\"add\",\"base\":\"0123\"},"
         "" SLOTS("2") "," ROWS("0.rows", "F32", "[2,2]", "24") "}",
         {3, 4},
         1,
         24,
         "base must be the SHA-256 of memory 0's values in 64 digits"},
        {"{" META("add") ",\"memories.1.slots\":{\"dtype\":\"I32\",\"shape\":[2],\"data_offsets\":"
                         "[0,8]}," ROWS("1.rows", "F32", "[2,2]",
                                        "24") ",\"memories.1.experts\":{\"dtype\":\"F32\","
                                              "\"shape\":[2,1],\"data_offsets\":[24,32]}}",
         {3, 4},
         1,
         32,
         "memories.1.experts has 1 columns: the model's width is 2"},
    };
    (void)state;
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        const float row[4] = {rows[i].row, 2, 3, 4};
        struct overlay overlay;
        struct err err = {0};
        size_t bytes = 0;
        unsigned char *const image =
            image_of(rows[i].header, rows[i].slot, row, rows[i].data_bytes, &bytes);
        enum err_code code = overlay_parse(&overlay, image, bytes, "x.safetensors", &err);
        if (code == ERR_OK) {
            code = overlay_check(&overlay, &two_memories, two_hashes, &err);
            overlay_free(&overlay);
        }
        if (code == ERR_OK || strstr(err.message, rows[i].message) == NULL ||
            strstr(err.message, "x.safetensors") == NULL) {
            fail_msg("row %zu: expected \"%s\", got \"%s\"", i, rows[i].message, err.message);
        }
        free(image);
    }
}

static void test_refuses_another_model(void **state)
{
    (void)state;
    const int32_t slot[2] = {3, 15};
    const float row[4] = {1, 2, 3, 4};
    struct overlay overlay;
    struct err err = {0};
    size_t bytes = 0;
    unsigned char *const image = image_of(PLAIN, slot, row, 24, &bytes);
    assert_int_equal(overlay_parse(&overlay, image, bytes, "x.safetensors", &err), ERR_OK);
    const char other[2][SHA256_HEX] = {"abc", ""};
    assert_int_not_equal(overlay_check(&overlay, &two_memories, other, &err), ERR_OK);
    assert_non_null(strstr(err.message, "made for another base"));
    struct model_info info = two_memories;
    info.memory[0].values_of = 1;
    assert_int_not_equal(overlay_check(&overlay, &info, two_hashes, &err), ERR_OK);
    assert_non_null(strstr(err.message, "reads the table of memory 1"));
    info = two_memories;
    info.memory[0].experts = true;
    assert_int_not_equal(overlay_check(&overlay, &info, two_hashes, &err), ERR_OK);
    assert_non_null(strstr(err.message, "memories.0.experts is missing"));
    info.n_memory = 0;
    assert_int_not_equal(overlay_check(&overlay, &info, two_hashes, &err), ERR_OK);
    assert_non_null(strstr(err.message, "memory 0 does not exist: the model has 0"));
    overlay_free(&overlay);
    free(image);
}

/* The examples of FIPS 180-4 and its lengths around a block, added in one piece and byte by
 * byte. */
static void test_sha256(void **state)
{
    static const struct {
        const char *text;
        const char *hex;
    } rows[] = {
        {"", "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"},
        {"abc", "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"},
        {"abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq",
         "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1"},
        {"0123456789012345678901234567890123456789012345678901234567890123456789",
         "57445fa40b08c60cdcba7ca39c756de614d11482e3f15a925f548688c19e58f4"},
    };
    (void)state;
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        for (size_t piece = 1; piece <= 128; piece += 127) {
            struct sha256 sum;
            char hex[SHA256_HEX];
            const size_t n = strlen(rows[i].text);
            sha256_begin(&sum);
            for (size_t at = 0; at < n; at += piece) {
                sha256_add(&sum, rows[i].text + at, n - at < piece ? n - at : piece);
            }
            sha256_end_hex(&sum, hex);
            assert_string_equal(hex, rows[i].hex);
        }
    }
}

/* With the processor's instructions and without. */
static void test_sha256_blocks(void **state)
{
    (void)state;
    enum { N = 9 };
    unsigned char data[N * SHA256_BLOCK + 1];
    uint32_t seed = 1;
    for (size_t i = 0; i < sizeof data; i++) {
        seed = seed * 1664525 + 1013904223;
        data[i] = (unsigned char)(seed >> 24);
    }
    for (size_t n = 0; n <= N; n++) {
        struct sha256 fast;
        struct sha256 plain;
        sha256_begin(&fast);
        sha256_begin(&plain);
        sha256_blocks(fast.state, data + 1, n); /* not aligned */
        sha256_blocks_plain(plain.state, data + 1, n);
        assert_memory_equal(fast.state, plain.state, sizeof fast.state);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_reads_rows),
        cmocka_unit_test(test_refuses_by_name),
        cmocka_unit_test(test_refuses_another_model),
        cmocka_unit_test(test_sha256),
        cmocka_unit_test(test_sha256_blocks),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
