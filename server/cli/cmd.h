/* The sub-commands that run without a server; main.c calls them with checked options. Each prints
 * its result on standard output and returns the exit status: 0 done, 1 failed, 2 an option's value
 * is at fault (both after one line on standard error). */
#ifndef SERVER_CMD_H
#define SERVER_CMD_H

#include "server/json/text.h"
#include "server/options/options.h"

int cmd_score(const struct options *options);
int cmd_compare(const struct options *options);
int cmd_generate(const struct options *options);
int cmd_inspect(const struct options *options);
int cmd_bench(const struct options *options);
int cmd_health(const struct options *options);
int cmd_memory_count(const struct options *options);
int cmd_memory_add(const struct options *options);
int cmd_memory_rank(const struct options *options);
int cmd_memory_hot(const struct options *options);
int cmd_memory_diff(const struct options *options);
int cmd_memory_apply(const struct options *options);
int cmd_memory_examples(const struct options *options);
int cmd_memory_inspect(const struct options *options);

/* Prints "pkmserve: <message>" and returns the exit status: 2 for ERR_ARGUMENT,
 * else 1. */
int cmd_fail(const struct err *err);
/* How messages name an input: "-" is "standard input". */
const char *cmd_shown_path(const char *path);
/* Before standard input is read: tells who sits at a terminal that it is read. */
void cmd_tell_terminal(void);
/* Prints text and a newline on standard output. ERR_MEMORY: the text is not whole. */
enum err_code cmd_print(const struct text *text, struct err *err);

#endif
