/* Parts of a request's head, without the library that reads it. Used by http.c. */
#ifndef SERVER_HEAD_H
#define SERVER_HEAD_H

#include "server/net/exchange.h"

/* The id that the client gave, or NULL, if it fits and is printable without blanks; else a new one.
 */
void head_id(char id[EXCHANGE_ID_MAX], const char *given);

/* The path of a target: proxies may send it behind scheme and authority (RFC 9112, 3.2.2). */
const char *head_path(const char *url);

/* Decodes %XX in paths and queries, in place, but leaves %00 as it is: a path that ends early would
 * be another path. Returns the length. */
size_t head_unescape(char *text);

#endif
