/* The paths of the TGI dialect: POST /generate_stream and POST /. The third, POST /generate, is
 * shared: api_generate.c takes a body with "inputs" as this dialect. */
#include "server/api/routes.h"
#include "server/generate/tgi.h"

void api_tgi_stream(struct server *server, struct exchange *x)
{
    api_generate_as(server, x, &tgi_stream_dialect);
}

void api_tgi_root(struct server *server, struct exchange *x)
{
    if (x->is_post) {
        api_generate_as(server, x, &tgi_root_dialect);
    } else {
        api_root(server, x);
    }
}
