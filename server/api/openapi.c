/* GET /openapi.json: the file of that name beside this one, as it was when the program was built.
 * tests/server/test_openapi.py holds it to the routes and to the parsers. */
#include "server/api/routes.h"

/* In assembler, since C11 has no way to embed a file. */
__asm__(".section .rodata\n"
        ".global openapi_begin\n"
        ".global openapi_bytes\n"
        "openapi_begin:\n"
        ".incbin \"server/api/openapi.json\"\n"
        "openapi_end:\n"
        ".balign 8\n"
        "openapi_bytes:\n"
        ".quad openapi_end - openapi_begin\n"
        ".previous\n");

extern const char openapi_begin[];
extern const uint64_t openapi_bytes;

void api_openapi(struct server *server, struct exchange *x)
{
    (void)server;
    text_add(&x->out, openapi_begin, (size_t)openapi_bytes);
    exchange_json(x, 200);
}
