/* The web page: server/page/, embedded when the program is built. It is served at both ports and
 * needs no key, but its requests to the server do. --ui off removes it. */
#ifndef SERVER_PAGE_H
#define SERVER_PAGE_H

#include "server/api/routes.h"

/* Whether a GET of / is answered with the page: its sender prefers HTML, as browsers do. */
bool page_is_wanted(const struct server *server, const struct exchange *x);
/* Answers with the page itself. */
void page_write(struct exchange *x);

#endif
