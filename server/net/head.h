/* Parts of a request's head, without the library that reads it. Used by http.c. */
#ifndef SERVER_HEAD_H
#define SERVER_HEAD_H

#include "server/net/exchange.h"

#include <sys/socket.h>

/* The id that the client gave, or NULL, if it fits and is printable without blanks; else a new one.
 */
void head_id(char id[EXCHANGE_ID_MAX], const char *given);

/* A number for the client's address, without its port; 0 for one that is neither IPv4 nor IPv6. */
uint64_t head_client(const struct sockaddr *address);

/* The path of a target: proxies may send it behind scheme and authority (RFC 9112, 3.2.2). */
const char *head_path(const char *url);

/* Decodes %XX in paths and queries, in place, but leaves %00 as it is: a path that ends early would
 * be another path. Returns the length. */
size_t head_unescape(char *text);

#endif
