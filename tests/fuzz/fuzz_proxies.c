/* Fuzz target: what an address may be taken from, of any bytes. The first line is a list for
 * --trusted-proxies, the second a value of X-Forwarded-For, the third a path, and also the id that
 * a client gives its request. Run by `make fuzz`; tests/fuzz/corpus/proxies holds the seeds. */
#include "server/net/head.h"
#include "server/net/proxies.h"

#include <netinet/in.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

static bool is_same(const struct proxies_address *a, const struct proxies_address *b)
{
    return memcmp(a->byte, b->byte, sizeof a->byte) == 0;
}

/* Who the client is, behind a peer with this address. */
static void check_client(const struct proxies *proxies, const char *forwarded, uint32_t v4)
{
    const struct sockaddr_in peer = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(v4)};
    const struct sockaddr *const address = (const struct sockaddr *)(const void *)&peer;
    const struct proxies none = {0};
    struct proxies_address itself;
    struct proxies_address client;
    struct proxies_address again;
    CHECK(proxies_client(proxies, address, NULL, &itself));
    CHECK(proxies_client(&none, address, forwarded, &client) && is_same(&client, &itself));
    CHECK(proxies_client(proxies, address, forwarded, &client));
    /* What the client wrote itself stands in front, and changes nothing once somebody is found who
     * is no proxy of ours. */
    const size_t n = strlen(forwarded);
    char *const longer = malloc(n + 16);
    CHECK(longer != NULL);
    memcpy(longer, "192.0.2.250,", 12);
    memcpy(longer + 12, forwarded, n + 1);
    CHECK(proxies_client(proxies, address, longer, &again));
    const struct proxies_address added = {{0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 255, 255, 192, 0, 2, 250}};
    CHECK(is_same(&again, &client) || is_same(&again, &added));
    free(longer);
}

static void check_proxies(const char *list, const char *forwarded)
{
    struct proxies proxies;
    struct err err = {0};
    const enum err_code code = proxies_parse(&proxies, list, &err);
    if (code != ERR_OK) {
        CHECK(err.code == code && err.message[0] != '\0' && strchr(err.message, '\n') == NULL);
        return;
    }
    CHECK(proxies.n >= 0 && proxies.n <= PROXIES_MAX);
    for (int i = 0; i < proxies.n; i++) {
        CHECK(proxies.range[i].bits >= 0 && proxies.range[i].bits <= 128);
    }
    check_client(&proxies, forwarded, 0x7f000001);
    check_client(&proxies, forwarded, 0x0a000001);
}

static void check_head(char *text)
{
    char id[EXCHANGE_ID_MAX];
    head_id(id, text);
    CHECK(id[0] != '\0' && strlen(id) < sizeof id);
    for (const char *c = id; *c != '\0'; c++) {
        CHECK(*c > 0x20 && *c < 0x7f);
    }
    const char *const path = head_path(text);
    CHECK(path[0] == '/' || path == text);
    const size_t before = strlen(text);
    const size_t n = head_unescape(text);
    CHECK(n <= before && strlen(text) == n);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    char *const text = malloc(bytes + 1);
    CHECK(text != NULL);
    memcpy(text, data, bytes);
    text[bytes] = '\0';
    char *line[3] = {text, "", ""};
    for (int i = 1; i < 3; i++) {
        char *const end = strchr(line[i - 1], '\n');
        if (end == NULL) {
            break;
        }
        *end = '\0';
        line[i] = end + 1;
    }
    check_proxies(line[0], line[1]);
    if (line[2][0] != '\0') {
        check_head(line[2]);
    }
    free(text);
    return 0;
}
