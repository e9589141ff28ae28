/* Parses by the option table: see options.h. */
#include "server/options/options_table.h"

#include "kernels/utf8.h"

#include <ctype.h>
#include <errno.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { ENV_NAME_MAX = 64, FLAG_MAX = 64 };

unsigned options_command(const char *name)
{
    for (int i = 0; i < option_n_command; i++) {
        if (strcmp(option_commands[i].name, name) == 0) {
            return option_commands[i].command;
        }
    }
    return 0;
}

static const struct option_command *command_of(unsigned command)
{
    for (int i = 0; i < option_n_command; i++) {
        if (option_commands[i].command == command) {
            return &option_commands[i];
        }
    }
    check_failed(__FILE__, __LINE__, "command");
}

/* "max-queue" → "PKMSERVE_MAX_QUEUE" */
static void env_name(char name[ENV_NAME_MAX], const char *flag)
{
    const int n = snprintf(name, ENV_NAME_MAX, "PKMSERVE_%s", flag);
    CHECK(n > 0 && n < ENV_NAME_MAX);
    for (char *c = name; *c; c++) {
        *c = *c == '-' ? '_' : (char)toupper((unsigned char)*c);
    }
}

static const struct option_row *row_find(const char *flag, size_t bytes)
{
    for (int i = 0; i < option_n_row; i++) {
        if (strlen(option_rows[i].flag) == bytes && memcmp(option_rows[i].flag, flag, bytes) == 0) {
            return &option_rows[i];
        }
    }
    return NULL;
}

/* The row of a name that is written with underscores, as fields of requests and of structs are. */
static const struct option_row *row_of_name(const char *name, size_t bytes)
{
    char flag[FLAG_MAX];
    if (bytes >= sizeof flag) {
        return NULL;
    }
    for (size_t i = 0; i < bytes; i++) {
        flag[i] = name[i];
        if (name[i] == '_') {
            flag[i] = '-';
        }
    }
    return row_find(flag, bytes);
}

const char *options_flag(const char *name)
{
    const struct option_row *const row = row_of_name(name, strlen(name));
    return row != NULL ? row->flag : NULL;
}

/* ---- values -------------------------------------------------------------------------------- */

/* where is "--port" or "PKMSERVE_PORT". */
static enum err_code bad_number(const struct option_row *row, const char *where, const char *value,
                                struct err *err)
{
    const bool real = row->type == OPTION_REAL;
    return err_set(err, ERR_ARGUMENT, "%s: '%s' is not %s in %s%.15g, %.15g%s", where, value,
                   real ? "a number" : "a whole number", row->open & OPEN_MIN ? "(" : "[", row->min,
                   row->max, row->open & OPEN_MAX ? ")" : "]");
}

static enum err_code set_integer(struct options *options, const struct option_row *row,
                                 const char *where, const char *value, struct err *err)
{
    char *end = NULL;
    errno = 0;
    const long long number = strtoll(value, &end, 10);
    const bool digits = isdigit((unsigned char)value[0]) || value[0] == '-';
    if (!digits || *end != '\0' || errno != 0 || (double)number < row->min ||
        (double)number > row->max) {
        return bad_number(row, where, value, err);
    }
    void *const field = (char *)options + row->offset;
    if (row->type == OPTION_INT) {
        *(int *)field = (int)number;
    } else {
        *(int64_t *)field = number;
    }
    return ERR_OK;
}

static enum err_code set_real(struct options *options, const struct option_row *row,
                              const char *where, const char *value, struct err *err)
{
    char *end = NULL;
    const double number = strtod(value, &end);
    /* strtod also takes nan, inf, hexadecimal and leading blanks: numbers here are decimal. */
    const bool decimal = value[0] != '\0' && strspn(value, "0123456789.eE+-") == strlen(value);
    const bool above = row->open & OPEN_MIN ? number > row->min : number >= row->min;
    const bool below = row->open & OPEN_MAX ? number < row->max : number <= row->max;
    if (!decimal || *end != '\0' || !above || !below) {
        return bad_number(row, where, value, err);
    }
    *(double *)((char *)options + row->offset) = number;
    return ERR_OK;
}

static enum err_code set_seed(struct options *options, const char *where, const char *value,
                              struct err *err)
{
    if (value[0] == '\0') { /* the default: not given */
        return ERR_OK;
    }
    char *end = NULL;
    errno = 0;
    const unsigned long long number = strtoull(value, &end, 10);
    if (!isdigit((unsigned char)value[0]) || *end != '\0' || errno != 0) {
        return err_set(err, ERR_ARGUMENT, "%s: '%s' is not a whole number in [0, %llu]", where,
                       value, ULLONG_MAX);
    }
    options->seed = number;
    options->has_seed = true;
    return ERR_OK;
}

static enum err_code set_bool(struct options *options, const struct option_row *row,
                              const char *where, const char *value, struct err *err)
{
    const bool on = strcmp(value, "on") == 0 || strcmp(value, "1") == 0;
    const bool off = strcmp(value, "off") == 0 || strcmp(value, "0") == 0;
    if (!on && !off) {
        return err_set(err, ERR_ARGUMENT, "%s: '%s' is not on or off", where, value);
    }
    *(bool *)((char *)options + row->offset) = on;
    return ERR_OK;
}

/* Types of numbers under the names that PyTorch and vLLM have for them. */
static const char *plain_name(const struct option_row *row, const char *value)
{
    static const char *const names[][2] = {
        {"float32", "f32"}, {"bfloat16", "bf16"}, {"float16", "f16"}};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        if (strcmp(value, names[i][0]) == 0 && strstr(row->choices, names[i][1]) != NULL) {
            return names[i][1];
        }
    }
    return value;
}

/* Whether value is one of choices, "a|b|c". */
static bool is_choice(const char *choices, const char *value)
{
    const size_t bytes = strlen(value);
    const char *choice = choices;
    while (choice && (strcspn(choice, "|") != bytes || memcmp(choice, value, bytes) != 0)) {
        choice = strchr(choice, '|');
        choice = choice != NULL ? choice + 1 : NULL;
    }
    return choice != NULL;
}

static enum err_code set_text(struct options *options, const struct option_row *row,
                              const char *where, const char *value, struct err *err)
{
    if (row->type == OPTION_LEVEL) { /* what was set by a flag once */
        value = strcmp(value, "1") == 0 ? "on" : strcmp(value, "0") == 0 ? "off" : value;
    }
    if (row->choices != NULL) {
        value = plain_name(row, value);
        if (!is_choice(row->choices, value)) {
            return err_set(err, ERR_ARGUMENT, "%s: '%s' is not one of %s", where, value,
                           row->choices);
        }
    }
    *(const char **)((char *)options + row->offset) = value;
    return ERR_OK;
}

static enum err_code row_set(struct options *options, const struct option_row *row,
                             const char *where, const char *value, struct err *err)
{
    switch (row->type) {
    case OPTION_TEXT:
    case OPTION_CHOICE:
    case OPTION_LEVEL: return set_text(options, row, where, value, err);
    case OPTION_INT:
    case OPTION_LONG: return set_integer(options, row, where, value, err);
    case OPTION_SEED: return set_seed(options, where, value, err);
    case OPTION_REAL: return set_real(options, row, where, value, err);
    case OPTION_SWITCH:
    case OPTION_FLAG: return set_bool(options, row, where, value, err);
    }
    check_failed(__FILE__, __LINE__, "option type");
}

/* ---- the command line ---------------------------------------------------------------------- */

/* Levenshtein's distance of two short strings. */
static int edit_distance(const char *a, const char *b)
{
    int line[FLAG_MAX + 1];
    const int n = (int)strnlen(b, FLAG_MAX);
    for (int j = 0; j <= n; j++) {
        line[j] = j;
    }
    for (int i = 1; a[i - 1] != '\0'; i++) {
        int diagonal = line[0];
        line[0] = i;
        for (int j = 1; j <= n; j++) {
            const int replace = diagonal + (a[i - 1] != b[j - 1]);
            const int insert = 1 + (line[j] < line[j - 1] ? line[j] : line[j - 1]);
            diagonal = line[j];
            line[j] = replace < insert ? replace : insert;
        }
    }
    return line[n];
}

const char *options_command_near(const char *typed)
{
    const char *best = NULL;
    int best_distance = 3;
    for (int i = 0; i < option_n_command; i++) {
        const int distance = edit_distance(typed, option_commands[i].name);
        if (distance < best_distance) {
            best = option_commands[i].name;
            best_distance = distance;
        }
    }
    return best;
}

/* The command's flag that was most likely meant: one that begins so, or else the nearest, of which
 * at least half is right; NULL if there is none. */
static const char *flag_near(const char *typed, unsigned command)
{
    const size_t bytes = strlen(typed);
    const char *best = NULL;
    int best_distance = bytes < 6 ? (int)bytes / 2 + 1 : 4;
    for (int i = 0; i < option_n_row; i++) {
        const char *const flag = option_rows[i].flag;
        const int distance = strncmp(typed, flag, bytes) == 0 ? 0 : edit_distance(typed, flag);
        if ((option_rows[i].commands & command) && distance < best_distance) {
            best = flag;
            best_distance = distance;
        }
    }
    return best;
}

static enum err_code unknown_flag(const char *typed, const struct option_row *row, unsigned command,
                                  struct err *err)
{
    const char *const name = command_of(command)->name;
    if (row) {
        return err_set(err, ERR_ARGUMENT, "--%s is not an option of %s; see 'pkmserve help %s'",
                       row->flag, name, name);
    }
    const char *const near = flag_near(typed, command);
    return err_set(err, ERR_ARGUMENT, "unknown option --%.60s%s%s; see 'pkmserve help %s'", typed,
                   near ? "; did you mean --" : "", near ? near : "", name);
}

/* Takes the flag at argv[*i] and its value, moving *i to the last argument it used. */
static enum err_code parse_flag(struct options *options, unsigned command, int argc, char **argv,
                                int *i, struct err *err)
{
    char typed[FLAG_MAX];
    const char *const text = argv[*i] + 2;
    const size_t bytes = strcspn(text, "=");
    snprintf(typed, sizeof typed, "%.*s", (int)(bytes < FLAG_MAX ? bytes : FLAG_MAX), text);
    const struct option_row *const row = row_find(text, bytes);
    if (!row || !(row->commands & command)) {
        return unknown_flag(typed, row, command, err);
    }
    char where[FLAG_MAX + 2];
    snprintf(where, sizeof where, "--%s", row->flag);
    const char *value = text[bytes] == '=' ? text + bytes + 1 : NULL;
    if (row->type == OPTION_FLAG) {
        if (value) {
            return err_set(err, ERR_ARGUMENT, "%s takes no value", where);
        }
        value = "on";
    } else if (!value && row->type == OPTION_LEVEL) {
        const bool given = *i + 1 < argc && is_choice(row->choices, argv[*i + 1]);
        value = given ? argv[++*i] : "on";
    } else if (!value) {
        if (*i + 1 >= argc) {
            return err_set(err, ERR_ARGUMENT, "%s needs a value", where);
        }
        value = argv[++*i];
    }
    /* An empty text means that the option is not given; as a stop string it would end all texts. */
    if (row->offset == offsetof(struct options, stop) && value[0] == '\0') {
        return err_set(err, ERR_ARGUMENT, "%s has 0 bytes, but must have 1 ... %d", where,
                       STOP_BYTES_MAX);
    }
    return row_set(options, row, where, value, err);
}

/* Whether -o, which is --output, is known here. */
static bool takes_output(unsigned command)
{
    const struct option_row *const row = row_find("output", strlen("output"));
    return (row->commands & command) != 0;
}

/* Kubernetes tells each pod where the services of its namespace are. Of one that is called pkmserve
 * it says PKMSERVE_PORT=tcp://10.0.0.7:80, which is not meant for --port. */
static bool is_service_link(const char *value)
{
    return strncmp(value, "tcp://", 6) == 0;
}

static void set_default(struct options *options, const struct option_row *row, struct err *err)
{
    const bool given = row->fallback[0] != '\0';
    void *const field = (char *)options + row->offset;
    if (!given && row->type == OPTION_REAL) {
        *(double *)field = OPTION_NOT_GIVEN;
    } else if (!given && row->type == OPTION_INT) {
        *(int *)field = OPTION_INT_NOT_GIVEN;
    } else {
        CHECK(row_set(options, row, row->flag, row->fallback, err) == ERR_OK);
    }
}

static enum err_code set_defaults(struct options *options, unsigned command, struct err *err)
{
    for (int i = 0; i < option_n_row; i++) {
        set_default(options, &option_rows[i], err);
        if (!(option_rows[i].commands & command)) {
            continue;
        }
        char name[ENV_NAME_MAX];
        env_name(name, option_rows[i].flag);
        const char *const value = getenv(name);
        if (value && is_service_link(value)) {
            continue;
        }
        if (value && row_set(options, &option_rows[i], name, value, err) != ERR_OK) {
            return err->code;
        }
    }
    return ERR_OK;
}

/* ---- conditions that no single row can express ---------------------------------------------
 * Options of other commands have their defaults, which fulfil them. */

/* Options and operands without which a command of memory could do nothing. */
static enum err_code check_memory(const struct options *options, enum command command,
                                  struct err *err)
{
    const unsigned two = COMMAND_MEMORY_DIFF | COMMAND_MEMORY_APPLY;
    const unsigned writes = COMMAND_MEMORY_COUNT | COMMAND_MEMORY_ADD | COMMAND_MEMORY_RANK | two;
    const unsigned reads =
        COMMAND_MEMORY_ADD | COMMAND_MEMORY_RANK | COMMAND_MEMORY_HOT | COMMAND_MEMORY_INSPECT;
    if ((command & writes) != 0 && options->output[0] == '\0') {
        return err_set(err, ERR_ARGUMENT, "--output is missing: name the file to write");
    }
    if ((command & reads) != 0 && options->n_operand == 0) {
        return err_set(err, ERR_ARGUMENT, "no file is given; see 'pkmserve help %s'",
                       command_of(command)->name);
    }
    if ((command & two) != 0 && options->n_operand < 2) {
        return err_set(err, ERR_ARGUMENT, "two paths are needed; see 'pkmserve help %s'",
                       command_of(command)->name);
    }
    if (command == COMMAND_MEMORY_EXAMPLES && options->slots[0] == '\0') {
        return err_set(err, ERR_ARGUMENT, "--slots is missing: name the slots, as 17,99");
    }
    if (command == COMMAND_MEMORY_RANK && options->background[0] == '\0') {
        return err_set(err, ERR_ARGUMENT,
                       "--background is missing: name a counts file of texts of any kind");
    }
    return ERR_OK;
}

static enum err_code check_order(const struct options *options, struct err *err)
{
    if (options->timeout_ms > options->max_timeout_ms) {
        return err_set(err, ERR_ARGUMENT, "--timeout-ms %d is larger than --max-timeout-ms %d",
                       options->timeout_ms, options->max_timeout_ms);
    }
    if (options->max_context > 0 && options->stride > options->max_context) {
        return err_set(err, ERR_ARGUMENT, "--stride %d is larger than --max-context %d",
                       options->stride, options->max_context);
    }
    if (options->max_tokens != OPTION_INT_NOT_GIVEN && options->min_tokens > options->max_tokens) {
        return err_set(err, ERR_ARGUMENT, "--min-tokens %d is larger than --max-tokens %d",
                       options->min_tokens, options->max_tokens);
    }
    return ERR_OK;
}

static enum err_code check_lines(const struct options *options, enum command command,
                                 struct err *err)
{
    const bool output_of_lines = (command & (COMMAND_SCORE | COMMAND_GENERATE)) != 0;
    const bool of_lines = (output_of_lines && options->output[0] != '\0') || options->resume ||
                          options->text_field[0] != '\0' || options->fields[0] != '\0' ||
                          options->shard[0] != '\0';
    if (of_lines && !options->jsonl) {
        return err_set(err, ERR_ARGUMENT,
                       "--output, --resume, --text-field, --fields and --shard go with --jsonl");
    }
    if (options->jsonl && (options->json || options->ids)) {
        return err_set(err, ERR_ARGUMENT,
                       "--jsonl: its answers are JSON, and ids stand in a line's field \"tokens\" "
                       "or \"prompt\": leave out --json and --ids");
    }
    return ERR_OK;
}

static enum err_code check_model_name(const char *name, struct err *err)
{
    const size_t bytes = strlen(name);
    const size_t valid = utf8_valid_prefix(name, bytes);
    if (bytes > OPTIONS_MODEL_NAME_MAX) {
        return err_set(err, ERR_ARGUMENT, "--served-model-name has %zu bytes, but %d are the limit",
                       bytes, OPTIONS_MODEL_NAME_MAX);
    }
    if (valid < bytes) {
        return err_set(err, ERR_ARGUMENT, "--served-model-name is not valid UTF-8 at byte %zu",
                       valid);
    }
    return ERR_OK;
}

/* It goes into a header as it is. */
static enum err_code check_cors(const char *cors, struct err *err)
{
    static const char host_letters[] =
        "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.-:[]";
    const bool is_origin = strncmp(cors, "http://", 7) == 0 || strncmp(cors, "https://", 8) == 0;
    const char *const host = is_origin ? strstr(cors, "://") + 3 : "";
    if (cors[0] != '\0' && strcmp(cors, "*") != 0 &&
        (host[0] == '\0' || host[strspn(host, host_letters)] != '\0')) {
        return err_set(err, ERR_ARGUMENT,
                       "--cors: '%.100s' is no origin: give one as https://example.org:8443, "
                       "without a path, or * for all",
                       cors);
    }
    return ERR_OK;
}

static enum err_code check_ports(const struct options *options, struct err *err)
{
    if (options->metrics_auth && options->api_key_file[0] == '\0') {
        return err_set(err, ERR_ARGUMENT,
                       "--metrics-auth asks for keys, but there are none: give --api-key-file too");
    }
    if (options->metrics_auth && options->admin_port != 0) {
        return err_set(err, ERR_ARGUMENT,
                       "--metrics-auth and --admin-port %d: the metrics are at that port alone, "
                       "which asks for no key: give one of the two",
                       options->admin_port);
    }
    if (options->admin_port != 0 && options->admin_port == options->port) {
        return err_set(err, ERR_ARGUMENT, "--port and --admin-port are both %d: give two ports",
                       options->port);
    }
    if (options->memory_counts && options->admin_port == 0) {
        return err_set(
            err, ERR_ARGUMENT,
            "--memory-counts on needs --admin-port, where GET /memory/counts returns them");
    }
    return ERR_OK;
}

static enum err_code check_together(const struct options *options, enum command command,
                                    struct err *err)
{
    enum err_code code = check_order(options, err);
    if (code == ERR_OK) {
        code = check_lines(options, command, err);
    }
    if (code == ERR_OK) {
        code = check_model_name(options->served_model_name, err);
    }
    if (code == ERR_OK) {
        code = check_cors(options->cors, err);
    }
    if (code == ERR_OK) {
        code = check_ports(options, err);
    }
    return code == ERR_OK ? check_memory(options, command, err) : code;
}

/* If a command takes one model, its operand is the model's directory. before: the model that the
 * environment names, which an operand overrules as a flag does. */
static enum err_code take_model(struct options *options, enum command command, const char *before,
                                struct err *err)
{
    if ((command & (COMMAND_SERVE | COMMAND_INSPECT | COMMAND_BENCH)) == 0 ||
        options->n_operand == 0) {
        return ERR_OK;
    }
    if (options->model != before) {
        return err_set(err, ERR_ARGUMENT, "two models, '%.100s' and --model '%.100s': give one",
                       options->operand[0], options->model);
    }
    options->model = options->operand[0];
    return ERR_OK;
}

enum err_code options_parse(struct options *options, enum command command, int argc, char **argv,
                            struct err *err)
{
    struct err local;
    err = err ? err : &local;
    *options = (struct options){0};
    if (set_defaults(options, command, err) != ERR_OK) {
        return err->code;
    }
    static char output[] = "--output";
    const char *const model = options->model; /* of the environment, "" = not given */
    bool flags = true;
    for (int i = 0; i < argc; i++) {
        char *const argument = argv[i];
        if (flags && strcmp(argument, "--") == 0) {
            flags = false;
        } else if (flags && argument[0] == '-' && argument[1] == '-') {
            if (parse_flag(options, command, argc, argv, &i, err) != ERR_OK) {
                return err->code;
            }
        } else if (flags && strcmp(argument, "-o") == 0 && takes_output(command)) {
            argv[i] = output;
            if (parse_flag(options, command, argc, argv, &i, err) != ERR_OK) {
                return err->code;
            }
        } else if (flags && argument[0] == '-' && argument[1] != '\0') {
            return err_set(err, ERR_ARGUMENT, "unknown option %.60s: options begin with two dashes",
                           argument);
        } else {
            argv[options->n_operand++] = argument;
        }
    }
    options->operand = (const char *const *)argv;
    const bool one_prompt = command == COMMAND_GENERATE && !options->jsonl;
    const int n_operand_max = one_prompt ? 1 : command_of(command)->n_operand_max;
    if (options->n_operand > n_operand_max) {
        return err_set(err, ERR_ARGUMENT, "unexpected argument '%.100s'; see 'pkmserve help %s'",
                       options->operand[n_operand_max], command_of(command)->name);
    }
    return take_model(options, command, model, err) == ERR_OK
               ? check_together(options, command, err)
               : err->code;
}

void options_warn_environment(FILE *out)
{
    static const char prefix[] = "PKMSERVE_";
    /* Read by kernels/. */
    static const char *const others[] = {
        "PKMSERVE_ISA",          "PKMSERVE_CUDA_LIBRARY", "PKMSERVE_CUDA_GRAPHS",
        "PKMSERVE_CUDA_OVERLAP", "PKMSERVE_CUDA_LT",      "PKMSERVE_CUDA_SPLIT",
        "PKMSERVE_CUDA_TRACE",   "PKMSERVE_CUDA_FUSE",    "PKMSERVE_CUDA_ATTENTION",
        "PKMSERVE_CUDA_AHEAD",   "PKMSERVE_CUDA_GEMM",    "PKMSERVE_CUDA_DRAWN",
        "PKMSERVE_CUDA_FLAT"};
    for (char **variable = environ; variable && *variable; variable++) {
        const size_t bytes = strcspn(*variable, "=");
        bool known = strncmp(*variable, prefix, sizeof prefix - 1) != 0;
        for (size_t i = 0; i < sizeof others / sizeof others[0] && !known; i++) {
            known = strlen(others[i]) == bytes && memcmp(others[i], *variable, bytes) == 0;
        }
        for (int i = 0; i < option_n_row && !known; i++) {
            char name[ENV_NAME_MAX];
            env_name(name, option_rows[i].flag);
            known = strlen(name) == bytes && memcmp(name, *variable, bytes) == 0;
        }
        if (!known) {
            fprintf(out, "pkmserve: warning: no option reads the variable %.*s\n",
                    (int)(bytes < 100 ? bytes : 100), *variable);
        }
    }
}
