/* Whose request it is behind proxies: server/net/proxies.c. */
#include "server/net/proxies.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

/* The client's address as text. */
static const char *client(const char *trusted, const char *peer, const char *forwarded)
{
    static char text[INET6_ADDRSTRLEN];
    struct proxies proxies;
    struct err err;
    struct proxies_address address;
    struct sockaddr_in v4 = {.sin_family = AF_INET};
    struct sockaddr_in6 v6 = {.sin6_family = AF_INET6};
    const bool is_v4 = inet_pton(AF_INET, peer, &v4.sin_addr) == 1;
    assert_true(is_v4 || inet_pton(AF_INET6, peer, &v6.sin6_addr) == 1);
    assert_int_equal(proxies_parse(&proxies, trusted, &err), ERR_OK);
    assert_true(proxies_client(&proxies, is_v4 ? (struct sockaddr *)&v4 : (struct sockaddr *)&v6,
                               forwarded, &address));
    (void)inet_ntop(AF_INET6, address.byte, text, sizeof text);
    return strncmp(text, "::ffff:", 7) == 0 ? text + 7 : text;
}

static void the_last_address_that_no_proxy_of_ours_has_counts(void **state)
{
    (void)state;
    assert_string_equal(client("", "10.0.0.1", "1.2.3.4"), "10.0.0.1");
    assert_string_equal(client("10.0.0.0/8", "10.0.0.1", NULL), "10.0.0.1");
    assert_string_equal(client("10.0.0.0/8", "10.0.0.1", "1.2.3.4"), "1.2.3.4");
    assert_string_equal(client("10.0.0.0/8", "10.0.0.1", "1.2.3.4 , 10.9.9.9"), "1.2.3.4");
    assert_string_equal(client("10.0.0.0/8", "10.0.0.1", "10.7.7.7,10.9.9.9"), "10.7.7.7");
    assert_string_equal(client("10.0.0.0/9", "10.128.0.1", "1.2.3.4"), "10.128.0.1");
    assert_string_equal(client("192.0.2.7,fd00::/8", "fd00::1", "[2001:db8::1]:443"),
                        "2001:db8::1");
    assert_string_equal(client("192.0.2.7", "::ffff:192.0.2.7", "1.2.3.4:5"), "1.2.3.4");
}

static void what_a_client_writes_itself_is_not_believed(void **state)
{
    (void)state;
    assert_string_equal(client("10.0.0.0/8", "6.6.6.6", "1.2.3.4"), "6.6.6.6");
    assert_string_equal(client("10.0.0.0/8", "10.0.0.1", "1.2.3.4, 6.6.6.6"), "6.6.6.6");
    assert_string_equal(client("10.0.0.0/8", "10.0.0.1", "1.2.3.4, nonsense"), "10.0.0.1");
    assert_string_equal(client("10.0.0.0/8", "10.0.0.1", ",,"), "10.0.0.1");
}

static void what_is_no_range_is_named(void **state)
{
    (void)state;
    const char *const wrong[] = {"10.0.0.0/33", "10.0.0.0/", "10.0.0.0/8x",
                                 "host",        "::/129",    "10.0.0.0/-1"};
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        struct proxies proxies;
        struct err err = {0};
        assert_int_equal(proxies_parse(&proxies, wrong[i], &err), ERR_ARGUMENT);
        assert_non_null(strstr(err.message, wrong[i]));
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_last_address_that_no_proxy_of_ours_has_counts),
        cmocka_unit_test(what_a_client_writes_itself_is_not_believed),
        cmocka_unit_test(what_is_no_range_is_named),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
