/* Stands in for serve.c in pkmserve-engine, the program without an HTTP library (`make engine`). */
#include "server/serve.h"

#include <stdio.h>

const bool serve_is_here = false;

int serve_run(const struct options *options)
{
    (void)options;
    fprintf(stderr, "pkmserve: this program was built without HTTP (make engine) and has every "
                    "command but serve: build pkmserve with make\n");
    return 1;
}
