/* Trusted proxies: see proxies.h. */
#include "server/net/proxies.h"

#include <arpa/inet.h>
#include <ctype.h>
#include <netinet/in.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

enum { V4_BITS = 96 }; /* in front of an IPv4 address */

static void from_v4(struct proxies_address *address, const void *four)
{
    memset(address, 0, sizeof *address);
    address->byte[10] = address->byte[11] = 0xff;
    memcpy(address->byte + 12, four, 4);
}

/* *is_v4: it was written as one. */
static bool from_text(struct proxies_address *address, const char *text, bool *is_v4)
{
    struct in_addr v4;
    *is_v4 = inet_pton(AF_INET, text, &v4) == 1;
    if (*is_v4) {
        from_v4(address, &v4);
        return true;
    }
    return inet_pton(AF_INET6, text, address->byte) == 1;
}

static bool is_trusted(const struct proxies *proxies, const struct proxies_address *address)
{
    for (int i = 0; i < proxies->n; i++) {
        const uint8_t *const range = proxies->range[i].address.byte;
        const int whole = proxies->range[i].bits / 8;
        const int rest = proxies->range[i].bits % 8;
        const bool same = memcmp(range, address->byte, (size_t)whole) == 0;
        if (same && (rest == 0 || (range[whole] ^ address->byte[whole]) >> (8 - rest) == 0)) {
            return true;
        }
    }
    return false;
}

enum err_code proxies_parse(struct proxies *proxies, const char *list, struct err *err)
{
    *proxies = (struct proxies){0};
    while (*list != '\0') {
        char part[64];
        const size_t bytes = strcspn(list, ",");
        const size_t digits = bytes < sizeof part ? bytes : sizeof part - 1;
        memcpy(part, list, digits);
        part[digits] = '\0';
        char *const slash = strchr(part, '/');
        char *end = "";
        long bits = -1;
        if (slash != NULL) {
            *slash = '\0';
            bits = isdigit((unsigned char)slash[1]) ? strtol(slash + 1, &end, 10) : -2;
        }
        bool is_v4 = false;
        struct proxies_address address;
        const bool ok = bytes < sizeof part && from_text(&address, part, &is_v4);
        const int most = is_v4 ? 32 : 128;
        if (!ok || *end != '\0' || bits < -1 || bits > most) {
            return err_set(err, ERR_ARGUMENT,
                           "--trusted-proxies: '%.*s' is no address and no range like 10.0.0.0/8",
                           (int)digits, list);
        }
        if (proxies->n == PROXIES_MAX) {
            return err_set(err, ERR_ARGUMENT, "--trusted-proxies: more than %d ranges",
                           PROXIES_MAX);
        }
        proxies->range[proxies->n].address = address;
        proxies->range[proxies->n].bits = (bits < 0 ? most : (int)bits) + (is_v4 ? V4_BITS : 0);
        proxies->n++;
        list += bytes + (list[bytes] == ',');
    }
    return ERR_OK;
}

/* One entry of the header: blanks around it, a port behind it, brackets around IPv6. */
static bool from_entry(struct proxies_address *address, const char *begin, const char *end)
{
    char text[64];
    while (begin < end && (*begin == ' ' || *begin == '\t')) {
        begin++;
    }
    while (end > begin && (end[-1] == ' ' || end[-1] == '\t')) {
        end--;
    }
    if (end - begin >= (ptrdiff_t)sizeof text) {
        return false;
    }
    memcpy(text, begin, (size_t)(end - begin));
    text[end - begin] = '\0';
    bool is_v4 = false;
    if (text[0] == '[') {
        char *const close = strchr(text, ']');
        if (close == NULL) {
            return false;
        }
        *close = '\0';
        return from_text(address, text + 1, &is_v4);
    }
    char *const colon = strchr(text, ':');
    if (colon != NULL && strchr(colon + 1, ':') == NULL) {
        *colon = '\0'; /* a port: an IPv6 address has two colons at least */
    }
    return from_text(address, text, &is_v4);
}

bool proxies_client(const struct proxies *proxies, const struct sockaddr *peer,
                    const char *forwarded, struct proxies_address *client)
{
    if (peer != NULL && peer->sa_family == AF_INET) {
        from_v4(client, &((const struct sockaddr_in *)(const void *)peer)->sin_addr);
    } else if (peer != NULL && peer->sa_family == AF_INET6) {
        memcpy(client->byte, &((const struct sockaddr_in6 *)(const void *)peer)->sin6_addr, 16);
    } else {
        return false;
    }
    const char *end = forwarded != NULL ? forwarded + strlen(forwarded) : NULL;
    while (end != NULL && end > forwarded && is_trusted(proxies, client)) {
        const char *begin = end;
        while (begin > forwarded && begin[-1] != ',') {
            begin--;
        }
        struct proxies_address before;
        if (!from_entry(&before, begin, end)) {
            break; /* nobody can tell who that was: the proxy that wrote it counts as the client */
        }
        *client = before;
        end = begin > forwarded ? begin - 1 : begin;
    }
    return true;
}
