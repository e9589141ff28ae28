/* Runs texts through a model as `score` does, for the commands that look at the slots that the
 * texts read. A text is a file, or with --jsonl a line, which is a request of /score. */
#ifndef SERVER_TEXTS_H
#define SERVER_TEXTS_H

#include "server/cli/cmd_engine.h"

/* One text that is over. */
struct texts_item {
    const struct request *request;
    const struct item *item;
    const char *path; /* "-" = standard input */
    int64_t line;     /* from 1; 0 = the whole file */
};

struct texts {
    const char *doing;   /* for the progress bar */
    int64_t group_bytes; /* files that run together, so that short ones share steps */
    /* Called once the model is open. May be NULL. */
    enum err_code (*begin)(void *ctx, const struct cmd_engine *ce, struct err *err);
    /* Called for each text, in order. Texts of which no position was traced are left out. */
    enum err_code (*take)(void *ctx, const struct texts_item *item, struct err *err);
    void *ctx;
};

/* Opens the engine and runs all texts. options must ask for a trace (memory or slots). *status: the
 * command's exit status if messages were printed; -1: all went well, or the returned code says what
 * is wrong. */
enum err_code texts_run(const struct texts *texts, const struct options *options, int *status,
                        struct err *err);

#endif
