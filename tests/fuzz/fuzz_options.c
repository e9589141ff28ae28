/* Fuzz target: a command line of any bytes. The first byte chooses the command, each line of the
 * rest is an argument: they are refused with one line, or every option has a value. Run by
 * `make fuzz`; tests/fuzz/corpus/options holds the seeds. */
#include "server/options/options.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

enum { N_COMMAND = 15, ARGUMENTS_MAX = 16 };

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    if (bytes == 0) {
        return 0;
    }
    char *const text = malloc(bytes);
    CHECK(text != NULL);
    memcpy(text, data + 1, bytes - 1);
    text[bytes - 1] = '\0';
    char *arguments[ARGUMENTS_MAX];
    int n = 0;
    for (char *line = text; line != NULL && n < ARGUMENTS_MAX;) {
        arguments[n++] = strsep(&line, "\n");
    }
    struct options options;
    struct err err = {0};
    const enum command command = 1U << data[0] % N_COMMAND;
    const enum err_code code = options_parse(&options, command, n, arguments, &err);
    if (code != ERR_OK) {
        CHECK(err.code == code && err.message[0] != '\0' && strchr(err.message, '\n') == NULL);
    } else {
        CHECK(options.n_operand >= 0 && options.n_operand <= n && options.timeout_s >= 1);
        CHECK(options.model != NULL && options.dtype != NULL && options.host != NULL);
    }
    free(text);
    return 0;
}
