/* The safetensors reader and the mapped files of a model directory: what is read, and each lie that
 * a file or an index can tell. */
#include "models/mapped.h"
#include "models/tensors.h"
#include "tests/models/writer.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

/* ---- one file's bytes ----------------------------------------------------------------------- */

static enum err_code parse(const char *header, size_t data_bytes, struct safetensors *st,
                           unsigned char **image, struct err *err)
{
    size_t bytes = 0;
    *image = writer_image(&bytes, header, strlen(header), data_bytes);
    *err = (struct err){0};
    return safetensors_parse(st, *image, bytes, "dir/x.safetensors", err);
}

static void test_reads_entries(void **state)
{
    struct safetensors st;
    struct err err;
    unsigned char *image = NULL;
    const char *const header =
        "{\"__metadata__\":{\"format\":\"pt\"},"
        "\"b\":{\"dtype\":\"BF16\",\"shape\":[3],\"data_offsets\":[28,34]},"
        "\"empty\":{\"dtype\":\"F32\",\"shape\":[0,7],\"data_offsets\":[28,28]},"
        "\"scalar\":{\"dtype\":\"F32\",\"shape\":[],\"data_offsets\":[0,4]},"
        "\"a\":{\"dtype\":\"F32\",\"shape\":[2,3],\"data_offsets\":[4,28]}}  ";
    (void)state;
    if (parse(header, 34, &st, &image, &err) != ERR_OK) {
        fail_msg("%s", err.message);
    }
    assert_int_equal(st.n_entry, 4); /* in the order of their data */
    assert_string_equal(st.entry[0].name, "scalar");
    assert_true(st.entry[0].n_dim == 0 && st.entry[0].n_elem == 1);
    assert_string_equal(st.entry[1].name, "a");
    assert_true(st.entry[1].n_dim == 2 && st.entry[1].dim[1] == 3 && st.entry[1].bytes == 24);
    assert_string_equal(st.entry[2].name, "empty");
    assert_true(st.entry[2].n_elem == 0 && st.entry[2].bytes == 0);
    assert_true(st.entry[3].dtype == SAFETENSORS_BF16);
    assert_ptr_equal(st.entry[3].data, image + 8 + strlen(header) + 28);
    safetensors_free(&st);
    free(image);
}

#define A(offsets) "\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":" offsets "}"
#define B(offsets) "\"b\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":" offsets "}"
#define SHAPE(shape) "{\"a\":{\"dtype\":\"F32\",\"shape\":" shape ",\"data_offsets\":[0,8]}}"

static void test_refuses_lies(void **state)
{
    static const struct {
        const char *header;
        size_t data_bytes;
        const char *message;
    } rows[] = {
        {"", 0, "not valid JSON"},
        {"[1]", 0, "object is expected"},
        {"{\"a\":", 0, "not valid JSON"},
        {"{\"a\":3}", 0, "tensor a must have dtype, shape and data_offsets"},
        {"{\"\":{}}", 0, "name is 0 bytes long"},
        {"{" A("[0,8]") "}", 7, "tensor a: bytes 0 .. 8 are not within the data of 7"},
        {"{" A("[8,0]") "}", 8, "tensor a: bytes 8 .. 0"},
        {"{" A("[-8,0]") "}", 8, "tensor a: bytes -8 .. 0"},
        {"{" A("[9223372036854775800,9223372036854775807]") "}", 8, "are not within"},
        {"{" A("[0,18446744073709551615]") "}", 8, "not valid JSON"},
        {"{" A("[0.0,8]") "}", 8, "data_offsets must be two integers"},
        {"{" A("[0]") "}", 8, "data_offsets must be two integers"},
        {"{" A("[0,8,8]") "}", 8, "data_offsets must be two integers"},
        {"{" A("null") "}", 8, "data_offsets must be two integers"},
        {"{" A("[0,4]") "}", 4, "tensor a: 2 x F32 do not fill data of length 4"},
        {"{" A("[0,12]") "}", 12, "tensor a: 2 x F32 do not fill data of length 12"},
        {"{" A("[0,8]") "," B("[4,12]") "}", 12, "tensors a and b overlap"},
        {"{" A("[0,8]") "," B("[0,8]") "}", 8, "tensors a and b overlap"},
        {"{" A("[0,8]") "," B("[12,20]") "}", 20,
         "data before tensor b, of length 4, belong to no tensor"},
        {"{" A("[4,12]") "}", 12, "data before tensor a, of length 4, belong to no tensor"},
        {"{" A("[0,8]") "}", 9, "data after the last tensor, of length 1, belong to no tensor"},
        {"{}", 1, "data after the last tensor, of length 1, belong to no tensor"},
        {"{" A("[0,8]") "," A("[8,16]") "}", 16, "duplicate"},
        {SHAPE("[-2]"), 8, "tensor a: shape[0] is not a size"},
        {SHAPE("[2.0]"), 8, "tensor a: shape[0] is not a size"},
        {SHAPE("2"), 8, "tensor a: shape must be an array of at most 8"},
        {SHAPE("[1,1,1,1,1,1,1,1,2]"), 8, "tensor a: shape must be an array of at most 8"},
        {SHAPE("[4294967296,4294967296,2]"), 8, "tensor a: the product of its shape overflows"},
        {SHAPE("[4611686018427387906]"), 8,
         "do not fill data of length 8"}, /* · 4 = 8 modulo 2^64 */
        {"{\"a\":{\"dtype\":\"F33\",\"shape\":[2],\"data_offsets\":[0,8]}}", 8, "dtype \"F33\""},
        {"{\"a\":{\"dtype\":7,\"shape\":[2],\"data_offsets\":[0,8]}}", 8, "tensor a has dtype"},
        {"{\"a\":{\"dtype\":\"F32\",\"data_offsets\":[0,8],\"x\":1}}", 8, "shape must be an"},
        {"{\"__metadata__\":3}", 0, "__metadata__ must be an object of strings"},
        {"{\"__metadata__\":{\"a\":3}}", 0, "__metadata__ must be an object of strings"},
    };
    (void)state;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        struct safetensors st;
        struct err err;
        unsigned char *image = NULL;
        const enum err_code code = parse(rows[i].header, rows[i].data_bytes, &st, &image, &err);
        if (code != ERR_FORMAT || strstr(err.message, rows[i].message) == NULL ||
            strstr(err.message, "dir/x.safetensors: ") != err.message) {
            fail_msg("%s with %zu bytes of data: expected ERR_FORMAT and \"%s\", got %s and \"%s\"",
                     rows[i].header, rows[i].data_bytes, rows[i].message, err_code_name(code),
                     err.message);
        }
        free(image);
    }
}

static void test_refuses_long_names(void **state)
{
    char header[512];
    struct safetensors st;
    struct err err;
    unsigned char *image = NULL;
    (void)state;
    (void)snprintf(header, sizeof header, "{\"%0256d\":{}}", 1);
    assert_int_equal(parse(header, 0, &st, &image, &err), ERR_FORMAT);
    assert_non_null(strstr(err.message, "name is 256 bytes long, outside 1 .. 255"));
    free(image);
}

/* Every shorter file than the whole one is refused, and nothing behind its end is read. */
static void test_refuses_truncated(void **state)
{
    const char *const header = "{" A("[0,8]") "}";
    size_t whole = 0;
    unsigned char *const image = writer_image(&whole, header, strlen(header), 8);
    (void)state;
    for (size_t bytes = 0; bytes < whole; bytes++) {
        struct safetensors st;
        struct err err = {0};
        unsigned char *const part = malloc(bytes + (bytes == 0));
        assert_non_null(part);
        memcpy(part, image, bytes);
        if (safetensors_parse(&st, part, bytes, "x", &err) != ERR_FORMAT) {
            fail_msg("the first %zu of %zu bytes were accepted", bytes, whole);
        }
        free(part);
    }
    free(image);
}

static void test_refuses_lying_header_length(void **state)
{
    static const struct {
        uint64_t length;
        const char *message;
    } rows[] = {{16777217, "more than the limit of 16777216"},
                {UINT64_MAX, "more than the limit"},
                {UINT64_MAX - 7, "more than the limit"}, /* 8 + length wraps to 0 */
                {16777216, "it is truncated"},
                {100, "it is truncated"},
                {0, "not valid JSON"}};
    (void)state;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        size_t bytes = 0;
        struct safetensors st;
        struct err err = {0};
        unsigned char *const image = writer_image(&bytes, "{}", 2, 0);
        for (int b = 0; b < 8; b++) {
            image[b] = (unsigned char)(rows[i].length >> (8 * b));
        }
        assert_int_equal(safetensors_parse(&st, image, bytes, "x", &err), ERR_FORMAT);
        if (strstr(err.message, rows[i].message) == NULL) {
            fail_msg("header length %llu: expected \"%s\", got \"%s\"",
                     (unsigned long long)rows[i].length, rows[i].message, err.message);
        }
        free(image);
    }
}

/* ---- a directory ---------------------------------------------------------------------------- */

static void fill(struct writer *w)
{
    static const char *const names[] = {"d", "b", "a", "c"};
    *w = (struct writer){.n = 0};
    for (int i = 0; i < 4; i++) {
        const int64_t dim[2] = {i + 1, 4};
        (void)writer_add(w, names[i], 2, dim);
    }
}

static void refuse(const char *dir, enum err_code wanted, const char *message)
{
    struct tensors *tensors = NULL;
    struct err err = {0};
    const enum err_code code = tensors_open(&tensors, dir, &err);
    assert_null(tensors);
    if (code != wanted || strstr(err.message, message) == NULL) {
        fail_msg("expected %s and \"%s\", got %s and \"%s\"", err_code_name(wanted), message,
                 err_code_name(code), err.message);
    }
}

static void check_values(const struct tensors *tensors, struct writer *w)
{
    float value[64];
    assert_int_equal(tensors_n(tensors), w->n);
    for (int i = 0; i < w->n; i++) {
        const int index = tensors_find(tensors, w->tensor[i].name);
        assert_true(index >= 0);
        const struct safetensors_entry *const entry = tensors_at(tensors, index);
        assert_int_equal(entry->n_elem, w->tensor[i].n_elem);
        tensors_widen(value, entry);
        assert_memory_equal(value, w->tensor[i].value, (size_t)entry->n_elem * sizeof(float));
        assert_int_equal(tensors_dtype(entry), w->tensor[i].dtype);
    }
    assert_int_equal(tensors_find(tensors, "e"), -1);
    assert_int_equal(tensors_find(tensors, ""), -1);
}

static void test_opens_single(void **state)
{
    char dir[WRITER_PATH_MAX];
    struct writer w;
    struct tensors *tensors = NULL;
    struct err err = {0};
    (void)state;
    writer_folder(dir);
    fill(&w);
    w.tensor[0].dtype = DTYPE_F16;
    w.tensor[1].dtype = DTYPE_BF16;
    w.tensor[3].dtype = DTYPE_BF16;
    writer_save(&w, 0, w.n, dir, "model.safetensors");
    assert_int_equal(tensors_open(&tensors, dir, &err), ERR_OK);
    check_values(tensors, &w);
    assert_int_equal(tensors_main_dtype(tensors), DTYPE_F32); /* 8 + 16 + 48 + 32 bytes */
    assert_string_equal(tensors_at(tensors, 0)->name, "a");
    tensors_release(tensors_at(tensors, 0)); /* the pages come back when they are read */
    check_values(tensors, &w);
    tensors_close(tensors);
    writer_free(&w);
    writer_remove(dir);
}

static const char *const INDEX = "{\"metadata\":{\"total_size\":160},\"weight_map\":{"
                                 "\"a\":\"m-2.safetensors\",\"b\":\"m-1.safetensors\","
                                 "\"c\":\"m-2.safetensors\",\"d\":\"m-1.safetensors\"}}";

static void test_opens_shards(void **state)
{
    char dir[WRITER_PATH_MAX];
    struct writer w;
    struct tensors *tensors = NULL;
    struct err err = {0};
    (void)state;
    writer_folder(dir);
    fill(&w);
    writer_save(&w, 0, 2, dir, "m-1.safetensors");
    writer_save(&w, 2, 4, dir, "m-2.safetensors");
    writer_text(dir, "model.safetensors.index.json", INDEX);
    if (tensors_open(&tensors, dir, &err) != ERR_OK) {
        fail_msg("%s", err.message);
    }
    check_values(tensors, &w);
    tensors_close(tensors);
    writer_save(&w, 0, w.n, dir, "model.safetensors");
    refuse(dir, ERR_FORMAT, "remove the one that is not meant");
    writer_free(&w);
    writer_remove(dir);
}

static void test_refuses_shards(void **state)
{
    char dir[WRITER_PATH_MAX];
    struct writer w;
    const char *const index = "model.safetensors.index.json";
    (void)state;
    writer_folder(dir);
    fill(&w);
    writer_text(dir, index, INDEX);
    refuse(dir, ERR_IO, "m-2.safetensors: cannot open");
    writer_save(&w, 0, 2, dir, "m-1.safetensors");
    writer_save(&w, 2, 3, dir, "m-2.safetensors");
    refuse(dir, ERR_FORMAT, "tensor c is missing from shard m-2.safetensors");
    writer_save(&w, 1, 4, dir, "m-2.safetensors");
    refuse(dir, ERR_FORMAT, "tensor b is also in");
    writer_save(&w, 0, 1, dir, "m-1.safetensors");
    refuse(dir, ERR_FORMAT, "tensor b is in this file, but");
    writer_save(&w, 0, 2, dir, "m-1.safetensors");
    writer_save(&w, 2, 4, dir, "m-2.safetensors");
    writer_text(dir, index, "{\"weight_map\":{\"a\":\"m-2.safetensors\"}}");
    refuse(dir, ERR_FORMAT, "says \"nowhere\"");
    static const char *const names[] = {"../m-1.safetensors",
                                        "/etc/passwd.safetensors",
                                        "sub/m-1.safetensors",
                                        ".safetensors",
                                        "",
                                        "m-1.bin",
                                        ".."};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        char text[128];
        (void)snprintf(text, sizeof text, "{\"weight_map\":{\"a\":\"%s\"}}", names[i]);
        writer_text(dir, index, text);
        refuse(dir, ERR_FORMAT, "is not the name of a .safetensors file in this directory");
    }
    writer_text(dir, index, "{\"weight_map\":{\"a\":3}}");
    refuse(dir, ERR_FORMAT, "tensor a is said to be in \"(not a string)\"");
    writer_text(dir, index, "{\"weight_map\":{}}");
    refuse(dir, ERR_FORMAT, "weight_map must be an object and name a tensor");
    writer_text(dir, index, "{}");
    refuse(dir, ERR_FORMAT, "weight_map must be an object and name a tensor");
    writer_text(dir, index, "[");
    refuse(dir, ERR_FORMAT, "not valid JSON");
    writer_free(&w);
    writer_remove(dir);
}

static void save_header(const char *dir, const char *header, size_t data_bytes)
{
    size_t bytes = 0;
    unsigned char *const image = writer_image(&bytes, header, strlen(header), data_bytes);
    writer_file(dir, "model.safetensors", image, bytes);
    free(image);
}

static void test_refuses_files(void **state)
{
    char dir[WRITER_PATH_MAX];
    (void)state;
    writer_folder(dir);
    refuse(dir, ERR_IO, "/model.safetensors: cannot open: No such file");
    char path[WRITER_PATH_MAX + 32];
    (void)snprintf(path, sizeof path, "%s/model.safetensors", dir);
    assert_int_equal(mkfifo(path, 0600), 0);
    refuse(dir, ERR_IO, "/model.safetensors: not a regular file");
    assert_int_equal(remove(path), 0);
    (void)snprintf(path, sizeof path, "%s/model.safetensors.index.json", dir);
    assert_int_equal(mkfifo(path, 0600), 0);
    refuse(dir, ERR_IO, "/model.safetensors.index.json: not a regular file");
    assert_int_equal(remove(path), 0);
    writer_text(dir, "model.safetensors", "");
    refuse(dir, ERR_FORMAT, "not a safetensors file of at least 8 bytes");
    save_header(dir, "{\"a\":{\"dtype\":\"I64\",\"shape\":[1],\"data_offsets\":[0,8]}}", 8);
    refuse(dir, ERR_UNSUPPORTED, "tensor a has dtype I64; weights must be F32, F16, BF16 or I8");
    /* 63 bytes stand before the data */
    save_header(dir, "{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}} ", 8);
    refuse(dir, ERR_UNSUPPORTED, "tensor a does not start at a multiple of its element size");
    writer_remove(dir);
    refuse("/dev/null", ERR_IO, "/dev/null/model.safetensors: cannot open");
}

/* ---- a file that changes under its mapping --------------------------------------------------- */

/* A file of three pages of ones, mapped; its name is gone already. */
static int map_ones(struct mapped *mapped, size_t page)
{
    char path[] = "/tmp/pkmserve-mapped-XXXXXX";
    struct err err = {0};
    const int fd = mkstemp(path);
    assert_true(fd >= 0);
    char *const ones = malloc(3 * page);
    assert_non_null(ones);
    memset(ones, 1, 3 * page);
    assert_int_equal(write(fd, ones, 3 * page), (ssize_t)(3 * page));
    free(ones);
    if (mapped_open(mapped, path, page, &err) != ERR_OK) {
        fail_msg("%s", err.message);
    }
    assert_int_equal(unlink(path), 0);
    mapped->path = "x.safetensors";
    assert_int_equal(mapped_check(mapped, &err), ERR_OK);
    return fd;
}

static void test_a_read_past_a_cut_gives_zeros_and_is_told(void **state)
{
    struct mapped mapped;
    struct err err = {0};
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    (void)state;
    const int fd = map_ones(&mapped, page);
    assert_int_equal(ftruncate(fd, (off_t)page), 0);
    const volatile char *const data = mapped.data;
    assert_int_equal(data[page - 1], 1);
    assert_int_equal(mapped_check_reads(&mapped, &err),
                     ERR_OK); /* nothing was read behind the end */
    assert_int_equal(data[2 * page], 0);
    assert_int_equal(data[page - 1], 1);
    assert_int_equal(mapped_check_reads(&mapped, &err), ERR_IO);
    assert_non_null(strstr(err.message, "x.safetensors: the file was cut short"));
    mapped_close(&mapped);
    (void)close(fd);
}

static void test_a_file_written_to_is_told(void **state)
{
    struct mapped mapped;
    struct err err = {0};
    (void)state;
    const int fd = map_ones(&mapped, (size_t)sysconf(_SC_PAGESIZE));
    const struct timespec times[2] = {{.tv_nsec = UTIME_OMIT}, {.tv_sec = 1}};
    assert_int_equal(futimens(fd, times), 0); /* what a write does, whatever the clock's grain */
    assert_int_equal(mapped_check_reads(&mapped, &err), ERR_OK);
    assert_int_equal(mapped_check(&mapped, &err), ERR_IO);
    assert_non_null(strstr(err.message, "x.safetensors: the file was changed"));
    mapped_close(&mapped);
    (void)close(fd);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_a_read_past_a_cut_gives_zeros_and_is_told),
        cmocka_unit_test(test_a_file_written_to_is_told),
        cmocka_unit_test(test_reads_entries),
        cmocka_unit_test(test_refuses_lies),
        cmocka_unit_test(test_refuses_long_names),
        cmocka_unit_test(test_refuses_truncated),
        cmocka_unit_test(test_refuses_lying_header_length),
        cmocka_unit_test(test_opens_single),
        cmocka_unit_test(test_opens_shards),
        cmocka_unit_test(test_refuses_shards),
        cmocka_unit_test(test_refuses_files),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
