/* The manual page and the completions of shells, printed from the option table: see options.h. */
#include "server/options/options_table.h"
#include "server/version.h"

#include <ctype.h>
#include <string.h>

static bool takes_value(const struct option_row *row)
{
    return row->type != OPTION_FLAG;
}

/* The values to choose from, "a|b"; NULL: any. */
static const char *choices_of(const struct option_row *row)
{
    return row->type == OPTION_SWITCH ? "on|off" : row->choices;
}

/* Whether the value is a name of a file or directory, as far as the table tells. */
static bool takes_any_text(const struct option_row *row)
{
    return row->type == OPTION_TEXT;
}

/* Prints text with each character that `special` holds behind `before`, and bars as `bar`. */
static void put_escaped(FILE *out, const char *text, const char *special, const char *before,
                        char bar)
{
    for (; *text != '\0'; text++) {
        if (strchr(special, *text) != NULL) {
            fputs(before, out);
        }
        fputc(*text == '|' && bar != '\0' ? bar : *text, out);
    }
}

/* ---- man(7) ---------------------------------------------------------------------------------- */

static void put_roff(FILE *out, const char *text)
{
    put_escaped(out, text, "-\\", "\\", '\0');
}

static void put_option(FILE *out, const struct option_row *row)
{
    fputs(".TP\n.B \\-\\-", out);
    put_roff(out, row->flag);
    if (takes_value(row)) {
        const char *const choices = choices_of(row);
        fputs(" \\fI", out);
        put_roff(out, choices != NULL ? choices : takes_any_text(row) ? "TEXT" : "N");
        fputs("\\fR", out);
    }
    fputs("\n\\&", out);
    put_roff(out, row->help);
    if (takes_value(row) && row->fallback[0] != '\0') {
        fputs(" Default: ", out);
        put_roff(out, row->fallback);
        fputc('.', out);
    }
    fputc('\n', out);
}

static void put_man(FILE *out)
{
    fputs(".TH PKMSERVE 1 \"\" \"pkmserve " PKMSERVE_VERSION "\" \"User Commands\"\n.SH NAME\n"
          "pkmserve \\- serve, score and generate with memory-augmented transformers\n"
          ".SH SYNOPSIS\n",
          out);
    for (int i = 0; i < option_n_command; i++) {
        fputs(i > 0 ? ".br\n" : "", out);
        put_roff(out, option_commands[i].usage);
        fputc('\n', out);
    }
    fputs(".SH DESCRIPTION\nEach option is also read from the environment: \\-\\-max\\-queue from "
          "PKMSERVE_MAX_QUEUE. A flag on the command line overrules it. Flags without a value take "
          "on or off there.\n",
          out);
    for (int i = 0; i < option_n_command; i++) {
        const struct option_command *const command = &option_commands[i];
        fputs(".SH OPTIONS OF ", out);
        for (const char *c = command->name; *c != '\0'; c++) {
            fputc(toupper((unsigned char)*c), out);
        }
        fputs("\n\\&", out);
        put_roff(out, command->help);
        fputs(".\n", out);
        for (int j = 0; j < option_n_row; j++) {
            if ((option_rows[j].commands & command->command) != 0) {
                put_option(out, &option_rows[j]);
            }
        }
    }
    fputs(".SH EXIT STATUS\n0 for success, 1 for a failure, 2 for wrong usage.\n", out);
}

/* ---- shells ---------------------------------------------------------------------------------- */

static void put_commands(FILE *out)
{
    for (int i = 0; i < option_n_command; i++) {
        fprintf(out, "%s ", option_commands[i].name);
    }
    fputs("help version", out);
}

static void put_bash(FILE *out)
{
    fputs("# bash completion of pkmserve, made by `pkmserve help bash`\n_pkmserve() {\n"
          "    local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]} list=\n"
          "    if [ \"$COMP_CWORD\" -eq 1 ] || { [ \"$COMP_CWORD\" -eq 2 ] && [ \"$before\" = help "
          "]; }; then\n        list='",
          out);
    put_commands(out);
    fputs("'\n    else\n        case $before in\n", out);
    for (int i = 0; i < option_n_row; i++) {
        const char *const choices = choices_of(&option_rows[i]);
        if (choices != NULL) {
            fprintf(out, "        --%s) list='", option_rows[i].flag);
            put_escaped(out, choices, "", "", ' ');
            fputs("' ;;\n", out);
        }
    }
    fputs("        *) case $word in -*) case ${COMP_WORDS[1]} in\n", out);
    for (int i = 0; i < option_n_command; i++) {
        fprintf(out, "        %s) list='", option_commands[i].name);
        for (int j = 0; j < option_n_row; j++) {
            if ((option_rows[j].commands & option_commands[i].command) != 0) {
                fprintf(out, "--%s ", option_rows[j].flag);
            }
        }
        fputs("' ;;\n", out);
    }
    fputs("        esac ;; esac ;;\n        esac\n    fi\n"
          "    if [ -n \"$list\" ]; then\n"
          "        mapfile -t COMPREPLY < <(compgen -W \"$list\" -- \"$word\")\n"
          "    else\n"
          "        mapfile -t COMPREPLY < <(compgen -f -- \"$word\")\n"
          "    fi\n}\ncomplete -o filenames -F _pkmserve pkmserve\n",
          out);
}

/* In single quotes; a quote itself ends them, stands escaped, and begins them anew. */
static void put_quoted(FILE *out, const char *text, const char *special)
{
    for (; *text != '\0'; text++) {
        if (*text == '\'') {
            fputs("'\\''", out);
            continue;
        }
        if (strchr(special, *text) != NULL) {
            fputc('\\', out);
        }
        fputc(*text, out);
    }
}

static void put_zsh(FILE *out)
{
    fputs("#compdef pkmserve\n# zsh completion of pkmserve, made by `pkmserve help zsh`\n"
          "_pkmserve() {\n    local -a commands=(\n",
          out);
    for (int i = 0; i < option_n_command; i++) {
        fprintf(out, "        '%s:", option_commands[i].name);
        put_quoted(out, option_commands[i].help, ":\\");
        fputs("'\n", out);
    }
    fputs("        'help:options of a command'\n        'version:print the version'\n    )\n"
          "    if (( CURRENT == 2 )); then\n        _describe command commands\n        return\n"
          "    fi\n    shift words\n    (( CURRENT-- ))\n    case $words[1] in\n",
          out);
    for (int i = 0; i < option_n_command; i++) {
        fprintf(out, "    %s) _arguments \\\n", option_commands[i].name);
        for (int j = 0; j < option_n_row; j++) {
            const struct option_row *const row = &option_rows[j];
            if ((row->commands & option_commands[i].command) == 0) {
                continue;
            }
            fprintf(out, "        '--%s[", row->flag);
            put_quoted(out, row->help, "[]:\\");
            fputc(']', out);
            if (choices_of(row) != NULL) {
                fputs(":value:(", out);
                put_escaped(out, choices_of(row), "", "", ' ');
                fputc(')', out);
            } else if (takes_value(row)) {
                fputs(takes_any_text(row) ? ":text:_files" : ":number:", out);
            }
            fputs("' \\\n", out);
        }
        fputs("        '*:file:_files' ;;\n", out);
    }
    fputs("    help) _describe command commands ;;\n    esac\n}\n_pkmserve \"$@\"\n", out);
}

static void put_fish(FILE *out)
{
    fputs("# fish completion of pkmserve, made by `pkmserve help fish`\n", out);
    for (int i = 0; i < option_n_command; i++) {
        fprintf(out, "complete -c pkmserve -n __fish_use_subcommand -f -a %s -d '",
                option_commands[i].name);
        put_escaped(out, option_commands[i].help, "'\\", "\\", '\0');
        fputs("'\n", out);
    }
    fputs("complete -c pkmserve -n __fish_use_subcommand -f -a 'help version'\n", out);
    for (int j = 0; j < option_n_row; j++) {
        const struct option_row *const row = &option_rows[j];
        fputs("complete -c pkmserve -n '__fish_seen_subcommand_from", out);
        for (int i = 0; i < option_n_command; i++) {
            if ((row->commands & option_commands[i].command) != 0) {
                fprintf(out, " %s", option_commands[i].name);
            }
        }
        fprintf(out, "' -l %s", row->flag);
        if (choices_of(row) != NULL) {
            fputs(" -xa '", out);
            put_escaped(out, choices_of(row), "", "", ' ');
            fputc('\'', out);
        } else if (takes_value(row)) {
            fputs(takes_any_text(row) ? " -r" : " -x", out);
        }
        fputs(" -d '", out);
        put_escaped(out, row->help, "'\\", "\\", '\0');
        fputs("'\n", out);
    }
}

bool options_document(FILE *out, const char *kind)
{
    static const struct {
        const char *kind;
        void (*put)(FILE *out);
    } documents[] = {{"man", put_man}, {"bash", put_bash}, {"zsh", put_zsh}, {"fish", put_fish}};
    for (size_t i = 0; i < sizeof documents / sizeof documents[0]; i++) {
        if (strcmp(kind, documents[i].kind) == 0) {
            documents[i].put(out);
            return true;
        }
    }
    return false;
}
