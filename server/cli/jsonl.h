/* `score --jsonl` and `generate --jsonl`: each line of the input is one request in the form of the
 * route, and gets one line of output, in the same order.
 *
 * Threads read lines, parse them and hand them to the engine, whose steps mix rows of all lines;
 * the main thread writes the finished ones. The memory of unfinished lines is bounded. */
#ifndef SERVER_JSONL_H
#define SERVER_JSONL_H

#include "server/cli/cmd_engine.h"
#include "server/generate/generate.h"

union jsonl_job {
    struct score_job score;
    struct generate_job generate;
};

/* What differs between the commands. */
struct jsonl_kind {
    const char *doing;      /* for the progress bar */
    const char *text_field; /* where the route takes its text */
    /* Adds what options say about every request to the open object. */
    void (*put_defaults)(struct text *body, const struct options *options);
    bool (*parse)(union jsonl_job *job, const char *body, size_t bytes,
                  const struct api_limits *limits, struct api_error *error);
    struct request *(*request)(const union jsonl_job *job);
    /* Fills in the id, if the line has one. */
    void (*id)(const union jsonl_job *job, struct answer_meta *meta);
    bool (*write)(struct text *out, const union jsonl_job *job, uint64_t fields,
                  const struct api_limits *limits, const struct answer_meta *meta,
                  struct api_error *error);
    /* Replaces write in a command whose lines have no output: takes what it needs from a request
     * that is over, in the order of the lines; number is the line's number in the file. Any error
     * ends the run. ctx belongs to this struct. */
    enum err_code (*take)(void *ctx, const union jsonl_job *job, const char *path, int64_t number,
                          struct err *err);
    /* Called once the engine is open. May be NULL. */
    enum err_code (*begin)(void *ctx, const struct cmd_engine *ce, struct err *err);
    void *ctx;
    int64_t (*n_token)(const union jsonl_job *job); /* of a request that is over */
    /* Of such a request's texts, as score_count_unknown. May be NULL. */
    int64_t (*n_unk)(const union jsonl_job *job, const struct model_info *info, int64_t *n_tokens);
    void (*free)(union jsonl_job *job);
};

/* Does all of it, and returns the exit status. */
int jsonl_run(const struct options *options, const struct jsonl_kind *kind);

#endif
