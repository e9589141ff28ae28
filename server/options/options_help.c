/* Help, printed from the option table: see options.h. */
#include "server/options/options_table.h"

#include <string.h>

enum { HELP_FLAG_MAX = 128 };

static void help_row(FILE *out, const struct option_row *row)
{
    char flag[HELP_FLAG_MAX];
    const char *const value = row->choices != NULL         ? row->choices
                              : row->type == OPTION_SWITCH ? "on|off"
                              : row->type == OPTION_TEXT   ? "TEXT"
                              : row->type == OPTION_REAL   ? "X"
                                                           : "N";
    snprintf(flag, sizeof flag, "--%s%s%s", row->flag, row->type == OPTION_FLAG ? "" : " ",
             row->type == OPTION_FLAG ? "" : value);
    fprintf(out, "  %-34s %s", flag, row->help);
    if (row->type != OPTION_FLAG && row->fallback[0] != '\0') {
        fprintf(out, " [%s]", row->fallback);
    }
    fputc('\n', out);
}

/* The command's own options, or those that it shares with the server (of serve: with the tools). */
static void help_rows(FILE *out, unsigned command, bool own)
{
    const unsigned others =
        command == COMMAND_SERVE ? ~(unsigned)(COMMAND_SERVE | COMMAND_HEALTH) : COMMAND_SERVE;
    bool begun = false;
    for (int i = 0; command != 0 && i < option_n_row; i++) {
        const struct option_row *const row = &option_rows[i];
        if ((row->commands & command) == 0 || own != ((row->commands & others) == 0)) {
            continue;
        }
        if (!begun && !own) {
            fputs(command == COMMAND_HEALTH ? "\nThe server:\n" : "\nModel and engine:\n", out);
        }
        begun = true;
        help_row(out, row);
    }
}

void options_help(FILE *out, unsigned command, unsigned missing)
{
    if (command == 0) {
        fputs("pkmserve COMMAND [options]\n\nCommands:\n", out);
    }
    for (int i = 0; i < option_n_command; i++) {
        if (option_commands[i].command == command) {
            fprintf(out, "%s\n%s\n\nOptions, with their defaults:\n", option_commands[i].usage,
                    option_commands[i].help);
        } else if (command == 0 && (option_commands[i].command & missing) == 0) {
            fprintf(out, "  %-16s %s\n", option_commands[i].name, option_commands[i].help);
        }
    }
    help_rows(out, command, true);
    help_rows(out, command, false);
    if (command == 0) {
        fputs("  --version        print the version\n  help             options of a command: "
              "pkmserve "
              "help score;\n                   "
              "man prints the manual page, bash, zsh or fish the completions of that shell\n",
              out);
    } else {
        fputs("\nEach option is also read from the environment: --max-queue from "
              "PKMSERVE_MAX_QUEUE.\nFlags without a value take on or off there.\n",
              out);
    }
}

bool options_help_group(FILE *out, const char *word)
{
    const size_t bytes = strlen(word);
    bool any = false;
    for (int i = 0; i < option_n_command; i++) {
        const struct option_command *const command = &option_commands[i];
        if (strncmp(command->name, word, bytes) == 0 && command->name[bytes] == ' ') {
            fprintf(out, "%s  %-16s %s\n", any ? "" : "Commands:\n", command->name, command->help);
            any = true;
        }
    }
    return any;
}
