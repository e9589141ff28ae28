/* POST /v1/completions. */
#include "server/api/routes.h"
#include "server/generate/openai.h"

void api_completions(struct server *server, struct exchange *x)
{
    api_generate_as(server, x, &openai_dialect);
}
