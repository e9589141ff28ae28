/* pkmserve: finds the sub-command, parses its options, runs it.
 *
 * Exit status: 0 done, 1 failed, 2 wrong usage; errors are one line on standard error. */
#include "engine/log.h"
#include "server/cli/cmd.h"
#include "server/serve.h"
#include "server/version.h"

#include <fcntl.h>
#include <signal.h>
#include <string.h>
#include <unistd.h>

enum { EXIT_USAGE = 2, NAME_BYTES = 128 /* of a command; more is cut off */ };

/* A full disk behind a redirection must not look like success. */
static int check_output(int status)
{
    if (fflush(stdout) != 0 || ferror(stdout)) {
        return cmd_fail(
            &(struct err){.code = ERR_IO, .message = "standard output cannot be written"});
    }
    return status;
}

static int no_command(const char *name)
{
    if (strcmp(name, "memory") == 0) {
        fprintf(stderr, "pkmserve: memory needs a second word; see 'pkmserve help memory'\n");
        return EXIT_USAGE;
    }
    const char *const near = options_command_near(name);
    fprintf(stderr, "pkmserve: no command '%.60s'%s%s; see 'pkmserve help'\n", name,
            near ? "; did you mean " : "", near ? near : "");
    return EXIT_USAGE;
}

static int unexpected(const char *word)
{
    fprintf(stderr, "pkmserve: unexpected argument '%.60s'; see 'pkmserve help'\n", word);
    return EXIT_USAGE;
}

/* `pkmserve help [command]`, `pkmserve --help`, and `pkmserve help man`, which prints a
 * document. What `help` and `version` do stands in the list of commands. */
static int print_help(const char *name)
{
    if (name && (strcmp(name, "help") == 0 || strcmp(name, "version") == 0)) {
        name = NULL;
    }
    const unsigned missing = serve_is_here ? 0 : COMMAND_SERVE;
    if (name && options_document(stdout, name, missing)) {
        return check_output(0);
    }
    if (name && options_help_group(stdout, name)) {
        return check_output(0);
    }
    const unsigned command = name ? options_command(name) : 0;
    if (name && command == 0) {
        return no_command(name);
    }
    options_help(stdout, command, missing);
    return check_output(0);
}

static bool wants_help(int argc, char **argv)
{
    for (int i = 0; i < argc && strcmp(argv[i], "--") != 0; i++) {
        if (strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0) {
            return true;
        }
    }
    return false;
}

static int run(enum command command, const struct options *options)
{
    switch (command) {
    case COMMAND_SERVE: return serve_run(options);
    case COMMAND_SCORE: return cmd_score(options);
    case COMMAND_COMPARE: return cmd_compare(options);
    case COMMAND_GENERATE: return cmd_generate(options);
    case COMMAND_INSPECT: return cmd_inspect(options);
    case COMMAND_BENCH: return cmd_bench(options);
    case COMMAND_HEALTH: return cmd_health(options);
    case COMMAND_MEMORY_COUNT: return cmd_memory_count(options);
    case COMMAND_MEMORY_ADD: return cmd_memory_add(options);
    case COMMAND_MEMORY_RANK: return cmd_memory_rank(options);
    case COMMAND_MEMORY_HOT: return cmd_memory_hot(options);
    case COMMAND_MEMORY_DIFF: return cmd_memory_diff(options);
    case COMMAND_MEMORY_APPLY: return cmd_memory_apply(options);
    case COMMAND_MEMORY_EXAMPLES: return cmd_memory_examples(options);
    case COMMAND_MEMORY_INSPECT: return cmd_memory_inspect(options);
    }
    check_failed(__FILE__, __LINE__, "command");
}

static int run_command(const char *name, int argc, char **argv)
{
    const unsigned command = options_command(name);
    if (wants_help(argc, argv)) {
        return print_help(name);
    }
    if (command == 0) {
        return no_command(name);
    }
    struct options options;
    struct err err;
    if (options_parse(&options, (enum command)command, argc, argv, &err) != ERR_OK) {
        cmd_fail(&err);
        return EXIT_USAGE;
    }
    options_warn_environment(stderr);
    /* A health check asks a server, wherever its model is; the other commands name their models or
     * need none. */
    const unsigned without = COMMAND_HEALTH | COMMAND_MEMORY_ADD | COMMAND_MEMORY_RANK |
                             COMMAND_MEMORY_HOT | COMMAND_MEMORY_DIFF | COMMAND_MEMORY_APPLY;
    if ((command & without) == 0 && options_resolve(&options, &err) != ERR_OK) {
        return cmd_fail(&err);
    }
    if (command != COMMAND_SERVE) {
        log_begin(LEVEL_WARN, false); /* a tool's output is its result */
    }
    return check_output(run((enum command)command, &options));
}

/* Opens the descriptors 0 to 2 where they are closed. Otherwise a socket would get one of their
 * numbers, and a line for standard error would go to a client. */
static void open_standard_files(void)
{
    int fd = 0;
    while (fd >= 0 && fd <= STDERR_FILENO) {
        fd = open("/dev/null", O_RDWR | O_CLOEXEC);
    }
    if (fd > STDERR_FILENO) {
        (void)close(fd);
    }
}

/* The command that the first words name, `score` or `memory count`, and how many words that are. */
static int command_name(char name[NAME_BYTES], int argc, char **argv)
{
    const bool two = argc > 1 && strcmp(argv[0], "memory") == 0 && argv[1][0] != '-';
    (void)snprintf(name, NAME_BYTES, "%s%s%s", argc > 0 ? argv[0] : "", two ? " " : "",
                   two ? argv[1] : "");
    return two ? 2 : 1;
}

int main(int argc, char **argv)
{
    open_standard_files();
    (void)signal(SIGXFSZ,
                 SIG_IGN); /* a write beyond the limit of a file's size is an error of that write */
    if (argc < 2) {
        fprintf(stderr, "pkmserve: no command given; see 'pkmserve help'\n");
        return EXIT_USAGE;
    }
    if (strcmp(argv[1], "--version") == 0 || strcmp(argv[1], "version") == 0 ||
        strcmp(argv[1], "-V") == 0 || strcmp(argv[1], "-v") == 0) {
        if (argc > 2) {
            return unexpected(argv[2]);
        }
        printf("pkmserve %s\n", PKMSERVE_VERSION);
        return check_output(0);
    }
    char name[NAME_BYTES];
    if (strcmp(argv[1], "help") == 0 || strcmp(argv[1], "--help") == 0 ||
        strcmp(argv[1], "-h") == 0) {
        const int n_word = command_name(name, argc - 2, argv + 2);
        if (argc - 2 > n_word) {
            return unexpected(argv[2 + n_word]);
        }
        return print_help(argc > 2 ? name : NULL);
    }
    const int n_word = command_name(name, argc - 1, argv + 1);
    return run_command(name, argc - 1 - n_word, argv + 1 + n_word);
}
