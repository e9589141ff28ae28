/* The value of --cors, of any bytes: it is refused with one line, or it is what may stand in a
 * header of each answer, "*" or an origin without blanks and control characters. Run by
 * `make fuzz`; tests/fuzz/corpus/cors holds the seeds. */
#include "server/options/options.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    char *const text = malloc(bytes + 1);
    CHECK(text != NULL);
    memcpy(text, data, bytes);
    text[bytes] = '\0';
    char flag[] = "--cors";
    char *arguments[] = {flag, text};
    struct options options;
    struct err err = {0};
    const enum err_code code = options_parse(&options, COMMAND_SERVE, 2, arguments, &err);
    if (code != ERR_OK) {
        CHECK(err.code == code && err.message[0] != '\0' && strchr(err.message, '\n') == NULL);
    } else {
        CHECK(strcmp(options.cors, text) == 0);
        CHECK(text[0] == '\0' || strcmp(text, "*") == 0 || strncmp(text, "http://", 7) == 0 ||
              strncmp(text, "https://", 8) == 0);
        for (const char *c = text; *c != '\0'; c++) {
            CHECK(*c > 0x20 && *c < 0x7f && strchr("\"',;<>\\", *c) == NULL);
        }
    }
    free(text);
    return 0;
}
