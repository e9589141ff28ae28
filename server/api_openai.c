/* POST /v1/completions. */
#include "server/openai.h"
#include "server/routes.h"

void api_completions(struct server *server, struct exchange *x)
{
    api_generate_as(server, x, &openai_dialect);
}
