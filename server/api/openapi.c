/* GET /openapi.json: the file of that name beside this one, as it was when the program was built.
 * tests/server/test_openapi.py holds it to the routes and to the parsers. */
#include "server/api/embed.h"
#include "server/api/routes.h"

EMBED(openapi, EMBED_FILE("server/api/openapi.json"));

void api_openapi(struct server *server, struct exchange *x)
{
    (void)server;
    text_add(&x->out, openapi_begin, (size_t)openapi_bytes);
    exchange_json(x, 200);
}
