/* How the commands end and print: see cmd.h. */
#include "server/cli/cmd.h"

#include <string.h>

int cmd_fail(const struct err *err)
{
    fprintf(stderr, "pkmserve: %s\n", err->message);
    return err->code == ERR_ARGUMENT ? 2 : 1;
}

const char *cmd_shown_path(const char *path)
{
    return strcmp(path, "-") == 0 ? "standard input" : path;
}

void cmd_print(struct text *text)
{
    if (text->failed) {
        fprintf(stderr, "pkmserve: no memory to print the result\n");
    } else {
        fwrite(text->data, 1, text->n, stdout);
        fputc('\n', stdout);
    }
}
