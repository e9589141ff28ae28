/* The bound on the memory that reading a JSON text may take: see json_file.c. */
#include "models/json_file.h"
#include "tests/models/writer.h"

#include <stdlib.h>

/* A JSON text with one string of n letters. Owner: the caller. */
static char *long_string(size_t n)
{
    char *const text = malloc(n + 16);
    assert_non_null(text);
    memcpy(text, "{\"a\":\"", 6);
    memset(text + 6, 'x', n);
    memcpy(text + 6 + n, "\"}", 3);
    return text;
}

/* jansson doubles its buffer while it reads a string, and then copies it: a text of 129 MiB makes
 * it take 512 MiB in buffers of 16 bytes to 256 MiB, and 129 MiB more. No malloc fails. */
static void test_a_text_that_takes_more_than_512_mib_is_refused(void **state)
{
    (void)state;
    char *const text = long_string((size_t)129 << 20);
    json_t *root = NULL;
    struct err err = {0};
    assert_int_equal(json_file_parse(&root, text, strlen(text), "dir/config.json", &err),
                     ERR_MEMORY);
    assert_null(root);
    assert_string_equal(err.message, "dir/config.json: no memory to read it");
    free(text);
}

/* What one reading took does not count for the next. */
static void test_texts_below_it_are_read_one_after_the_other(void **state)
{
    (void)state;
    const size_t n = (size_t)40 << 20;
    char *const text = long_string(n);
    for (int i = 0; i < 4; i++) {
        json_t *root = NULL;
        assert_int_equal(json_file_parse(&root, text, strlen(text), "config.json", NULL), ERR_OK);
        assert_int_equal(json_string_length(json_object_get(root, "a")), n);
        json_decref(root);
    }
    free(text);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_a_text_that_takes_more_than_512_mib_is_refused),
        cmocka_unit_test(test_texts_below_it_are_read_one_after_the_other),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
