/* How the commands end and print: see cmd.h. */
#include "server/cli/cmd.h"

#include <string.h>
#include <unistd.h>

int cmd_fail(const struct err *err)
{
    fprintf(stderr, "pkmserve: %s\n", err->message);
    return err->code == ERR_ARGUMENT ? 2 : 1;
}

const char *cmd_shown_path(const char *path)
{
    return strcmp(path, "-") == 0 ? "standard input" : path;
}

void cmd_tell_terminal(void)
{
    if (isatty(STDIN_FILENO) == 1) {
        fprintf(stderr, "pkmserve: reading the terminal; end the text with control-D\n");
    }
}

enum err_code cmd_print(const struct text *text, struct err *err)
{
    if (text->failed) {
        return err_set(err, ERR_MEMORY, "no memory to print the result");
    }
    fwrite(text->data, 1, text->n, stdout);
    fputc('\n', stdout);
    return ERR_OK;
}
