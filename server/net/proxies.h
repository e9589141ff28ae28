/* Which addresses are proxies of ours (--trusted-proxies), and whom they name as the client. */
#ifndef SERVER_PROXIES_H
#define SERVER_PROXIES_H

#include "kernels/err.h"

#include <stdbool.h>
#include <stdint.h>
#include <sys/socket.h>

enum { PROXIES_MAX = 32 };

/* An address as 16 bytes; one of IPv4 is ::ffff:a.b.c.d. */
struct proxies_address {
    uint8_t byte[16];
};

struct proxies {
    struct {
        struct proxies_address address;
        int bits; /* of the 128 */
    } range[PROXIES_MAX];
    int n; /* 0 = no proxy is trusted */
};

/* Reads "10.0.0.0/8,fd00::/8,192.0.2.7"; "" is none. ERR_ARGUMENT names the part that is no
 * range. */
enum err_code proxies_parse(struct proxies *proxies, const char *list, struct err *err);

/* The client's address: going back from the peer through X-Forwarded-For (NULL = none), the first
 * address that is no trusted proxy, or the last one if all are. Anything that the client wrote
 * there itself comes before the address that our proxy saw, and is not reached. false: the peer has
 * no IP address. */
bool proxies_client(const struct proxies *proxies, const struct sockaddr *peer,
                    const char *forwarded, struct proxies_address *client);

#endif
