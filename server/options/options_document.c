/* The manual page and the completions of shells, printed from the option table: see options.h. */
#include "server/options/options_table.h"
#include "server/version.h"

#include <ctype.h>
#include <string.h>

enum { WORD_BYTES = 32 };

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

/* Whether this program has command i. */
static bool is_here(int i, unsigned missing)
{
    return (option_commands[i].command & missing) == 0;
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

static void put_man(FILE *out, unsigned missing)
{
    fputs(".TH PKMSERVE 1 \"\" \"pkmserve " PKMSERVE_VERSION "\" \"User Commands\"\n.SH NAME\n"
          "pkmserve \\- ",
          out);
    fputs((missing & COMMAND_SERVE) == 0 ? "serve, " : "", out);
    fputs("score and generate with memory-augmented transformers\n.SH SYNOPSIS\n", out);
    for (int i = 0, n = 0; i < option_n_command; i++) {
        if (is_here(i, missing)) {
            fputs(n++ > 0 ? ".br\n" : "", out);
            put_roff(out, option_commands[i].usage);
            fputc('\n', out);
        }
    }
    fputs(".SH DESCRIPTION\nEach option is also read from the environment: \\-\\-max\\-queue from "
          "PKMSERVE_MAX_QUEUE. A flag on the command line overrules it. Flags without a value take "
          "on or off there.\n",
          out);
    for (int i = 0; i < option_n_command; i++) {
        const struct option_command *const command = &option_commands[i];
        if (!is_here(i, missing)) {
            continue;
        }
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

/* The length of a command's first word, which is all of it or followed by a second one. */
static int first_word(const char *name)
{
    return (int)strcspn(name, " ");
}

/* The second word, "" if there is none. */
static const char *second_word(const char *name)
{
    return name[first_word(name)] == ' ' ? name + first_word(name) + 1 : "";
}

/* Whether command i is the first of those with its first word. */
static bool is_first(int i)
{
    const int n = first_word(option_commands[i].name) + 1;
    return i == 0 || strncmp(option_commands[i].name, option_commands[i - 1].name, (size_t)n) != 0;
}

/* First words, each once; of word alone its second ones. */
static void put_commands(FILE *out, const char *word, unsigned missing)
{
    for (int i = 0; i < option_n_command; i++) {
        const char *const name = option_commands[i].name;
        const int n = first_word(name);
        if (word == NULL && is_first(i) && is_here(i, missing)) {
            fprintf(out, "%.*s ", n, name);
        } else if (word != NULL && strncmp(name, word, (size_t)n) == 0 && word[n] == '\0') {
            fprintf(out, "%s ", second_word(name));
        }
    }
    fputs(word == NULL ? "help version" : "", out);
}

static void put_bash(FILE *out, unsigned missing)
{
    fputs("# bash completion of pkmserve, made by `pkmserve help bash`\n_pkmserve() {\n"
          "    local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]} list=\n"
          "    if [ \"$COMP_CWORD\" -eq 1 ] || { [ \"$COMP_CWORD\" -eq 2 ] && [ \"$before\" = help "
          "]; }; then\n        list='",
          out);
    put_commands(out, NULL, missing);
    fputs("'\n", out);
    for (int i = 0; i < option_n_command; i++) {
        const char *const name = option_commands[i].name;
        if (second_word(name)[0] != '\0' && is_first(i)) {
            char word[WORD_BYTES];
            (void)snprintf(word, sizeof word, "%.*s", first_word(name), name);
            fprintf(
                out,
                "    elif [ \"$COMP_CWORD\" -eq 2 ] && [ \"$before\" = %s ]; then\n        list='",
                word);
            put_commands(out, word, missing);
            fputs("'\n", out);
        }
    }
    fputs("    else\n        case $before in\n", out);
    for (int i = 0; i < option_n_row; i++) {
        const char *const choices = choices_of(&option_rows[i]);
        if (choices != NULL && (option_rows[i].commands & ~missing) != 0) {
            fprintf(out, "        --%s) list='", option_rows[i].flag);
            put_escaped(out, choices, "", "", ' ');
            fputs("' ;;\n", out);
        }
    }
    fputs("        *) case $word in -*) case \"${COMP_WORDS[1]} ${COMP_WORDS[2]}\" in\n", out);
    for (int i = 0; i < option_n_command; i++) {
        const char *const second = second_word(option_commands[i].name);
        if (!is_here(i, missing)) {
            continue;
        }
        fprintf(out, "        \"%.*s \"%s) list='", first_word(option_commands[i].name),
                option_commands[i].name, second[0] != '\0' ? second : "*");
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

static void put_zsh(FILE *out, unsigned missing)
{
    fputs("#compdef pkmserve\n# zsh completion of pkmserve, made by `pkmserve help zsh`\n"
          "_pkmserve() {\n    local -a commands=(\n",
          out);
    for (int i = 0; i < option_n_command; i++) {
        if (is_first(i) && is_here(i, missing)) {
            const char *const name = option_commands[i].name;
            fprintf(out, "        '%.*s:", first_word(name), name);
            put_quoted(out,
                       second_word(name)[0] != '\0' ? "commands of two words"
                                                    : option_commands[i].help,
                       ":\\");
            fputs("'\n", out);
        }
    }
    fputs("        'help:options of a command'\n        'version:print the version'\n    )\n"
          "    if (( CURRENT == 2 )); then\n        _describe command commands\n        return\n"
          "    fi\n    shift words\n    (( CURRENT-- ))\n",
          out);
    for (int i = 0; i < option_n_command; i++) {
        const char *const name = option_commands[i].name;
        if (second_word(name)[0] != '\0' && is_first(i)) {
            char word[WORD_BYTES];
            (void)snprintf(word, sizeof word, "%.*s", first_word(name), name);
            fprintf(out,
                    "    if [[ $words[1] == %s ]] && (( CURRENT == 2 )); then\n        compadd ",
                    word);
            put_commands(out, word, missing);
            fputs("\n        return\n    fi\n", out);
        }
    }
    fputs("    case \"$words[1] $words[2]\" in\n", out);
    for (int i = 0; i < option_n_command; i++) {
        const char *const second = second_word(option_commands[i].name);
        if (!is_here(i, missing)) {
            continue;
        }
        fprintf(out, "    \"%.*s \"%s) _arguments \\\n", first_word(option_commands[i].name),
                option_commands[i].name, second[0] != '\0' ? second : "*");
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
    fputs("    \"help \"*) _describe command commands ;;\n    esac\n}\n_pkmserve \"$@\"\n", out);
}

static void put_fish(FILE *out, unsigned missing)
{
    /* _on: the command is one of these. _after: these are the words so far. */
    fputs("# fish completion of pkmserve, made by `pkmserve help fish`\n"
          "function __pkmserve_on\n    set -l words (commandline -opc)\n"
          "    contains -- \"$words[2]\" $argv; or contains -- \"$words[2] $words[3]\" $argv\nend\n"
          "function __pkmserve_after\n    set -l words (commandline -opc)\n    set -e words[1]\n"
          "    test \"$words\" = \"$argv\"\nend\n",
          out);
    for (int i = 0; i < option_n_command; i++) {
        const char *const name = option_commands[i].name;
        const char *const second = second_word(name);
        if (!is_here(i, missing)) {
            continue;
        }
        if (second[0] == '\0') {
            fprintf(out, "complete -c pkmserve -n __pkmserve_after -f -a %s -d '", name);
        } else {
            if (is_first(i)) {
                fprintf(out, "complete -c pkmserve -n __pkmserve_after -f -a %.*s\n",
                        first_word(name), name);
            }
            fprintf(out,
                    "complete -c pkmserve -n '__pkmserve_after %.*s; or __pkmserve_after help "
                    "%.*s' -f -a %s -d '",
                    first_word(name), name, first_word(name), name, second);
        }
        put_escaped(out, option_commands[i].help, "'\\", "\\", '\0');
        fputs("'\n", out);
    }
    fputs("complete -c pkmserve -n __pkmserve_after -f -a 'help version'\n"
          "complete -c pkmserve -n '__pkmserve_after help' -f -a '",
          out);
    put_commands(out, NULL, missing);
    fputs("'\n", out);
    for (int j = 0; j < option_n_row; j++) {
        const struct option_row *const row = &option_rows[j];
        const unsigned commands = row->commands & ~missing;
        if (commands == 0) {
            continue;
        }
        fputs("complete -c pkmserve -n '__pkmserve_on", out);
        for (int i = 0; i < option_n_command; i++) {
            if ((commands & option_commands[i].command) != 0) {
                fprintf(out, " \"%s\"", option_commands[i].name);
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

bool options_document(FILE *out, const char *kind, unsigned missing)
{
    static const struct {
        const char *kind;
        void (*put)(FILE *out, unsigned missing);
    } documents[] = {{"man", put_man}, {"bash", put_bash}, {"zsh", put_zsh}, {"fish", put_fish}};
    for (size_t i = 0; i < sizeof documents / sizeof documents[0]; i++) {
        if (strcmp(kind, documents[i].kind) == 0) {
            documents[i].put(out, missing);
            return true;
        }
    }
    return false;
}
