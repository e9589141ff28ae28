/* What a request's head says: see head.h. */
#include "server/net/head.h"

#include <stdio.h>
#include <string.h>
#include <sys/random.h>

static void make_id(char *id)
{
    unsigned char random[12];
    CHECK(getrandom(random, sizeof random, 0) == sizeof random);
    for (size_t i = 0; i < sizeof random; i++) {
        (void)snprintf(id + 2 * i, 3, "%02x", random[i]);
    }
}

void head_id(char id[EXCHANGE_ID_MAX], const char *given)
{
    size_t n = given != NULL ? strlen(given) : 0;
    if (n >= EXCHANGE_ID_MAX) {
        n = 0;
    }
    for (size_t i = 0; i < n; i++) {
        if (given[i] <= 0x20 || given[i] >= 0x7f) {
            n = 0;
        }
    }
    if (n > 0) {
        memcpy(id, given, n);
        id[n] = '\0';
    } else {
        make_id(id);
    }
}

const char *head_path(const char *url)
{
    const size_t scheme = strncasecmp(url, "http://", 7) == 0    ? 7
                          : strncasecmp(url, "https://", 8) == 0 ? 8
                                                                 : 0;
    const char *const path = scheme > 0 ? strchr(url + scheme, '/') : url;
    return path != NULL ? path : "/";
}

static int hex_value(char c)
{
    return c >= '0' && c <= '9'   ? c - '0'
           : c >= 'a' && c <= 'f' ? c - 'a' + 10
           : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                  : -1;
}

size_t head_unescape(char *text)
{
    char *out = text;
    for (const char *in = text; *in != '\0'; out++) {
        const int high = in[0] == '%' ? hex_value(in[1]) : -1;
        const int low = high >= 0 ? hex_value(in[2]) : -1;
        if (low >= 0 && high + low > 0) {
            *out = (char)(high * 16 + low);
            in += 3;
        } else {
            *out = *in++;
        }
    }
    *out = '\0';
    return (size_t)(out - text);
}
