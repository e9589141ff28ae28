/* Stands in for serve.c in pkmserve-engine, the program without an HTTP library (`make engine`). */
#include "server/serve.h"

#include <stdio.h>

int serve_run(const struct options *options)
{
    (void)options;
    fprintf(stderr, "pkmserve: this program was built without HTTP (make engine): use score, "
                    "compare, generate, inspect or bench, or build pkmserve with make\n");
    return 1;
}
