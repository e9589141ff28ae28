/* What `score`, `generate` and `compare` share: an engine without a server, and request bodies like
 * those that the routes take. */
#ifndef SERVER_CMD_ENGINE_H
#define SERVER_CMD_ENGINE_H

#include "server/cli/cmd.h"
#include "server/io/answer.h"
#include "server/score/score.h"

#include <semaphore.h>

/* Requests that may wait. */
enum { CMD_QUEUE = 4096 };

struct cmd_engine {
    struct engine *engine; /* Owner: this */
    struct api_limits limits;
    sem_t wake;                   /* the engine published something */
    struct overlay_names overlay; /* of --overlay: applies to every request */
};

/* Raises the limits that protect a server, which a tool does not need. */
void cmd_lift_limits(struct api_limits *limits);
/* Text needs a tokenizer: without one, options must say that ids are given. */
enum err_code cmd_check_tokenizer(const struct options *options, const struct tokenizer *tokenizer,
                                  struct err *err);

/* Refuses --overlay with a model without memories. */
enum err_code cmd_no_overlay(const struct options *options, struct err *err);

/* Opens the engine that options describe, with the limits that protect a server raised. A progress
 * bar shows the loading. */
enum err_code cmd_engine_open(struct cmd_engine *ce, const struct options *options,
                              struct err *err);
void cmd_engine_close(struct cmd_engine *ce); /* zeroed is fine */

/* Submits request and waits until all of its items are over, calling look whenever results were
 * published, and at least ten times a second. */
enum err_code cmd_engine_run(struct cmd_engine *ce, struct request *request,
                             void (*look)(void *ctx), void *ctx, struct err *err);

/* Waits until results were published, but no longer than a tenth of a second. */
void cmd_engine_wait(struct cmd_engine *ce);

/* What a printed answer says besides its results. */
struct answer_meta cmd_meta(const struct options *options, int64_t begin_us);
/* An error of a parser or writer as err: about the options (ERR_ARGUMENT) or about the input. */
enum err_code cmd_refused(const struct api_error *error, struct err *err);
/* Whether the request, which is over, has all results. path: [n], the names of its texts, of which
 * the one whose numbers are none is told where there are several. */
enum err_code cmd_answered(const struct request *request, const char *const *path, int n,
                           struct err *err);
/* Prints out; or, if there is an error, returns that instead. Frees out. */
enum err_code cmd_print_answer(struct text *out, const struct api_error *error, struct err *err);

/* Appends the file (or with "-" standard input) to text. */
enum err_code cmd_read_file(struct text *text, const char *path, struct err *err);

/* Writes the contents of a file as the JSON value of a prompt or document: a string, or with ids a
 * list of the token ids below n_vocab that it holds, separated by blanks. path is named in errors.
 */
enum err_code cmd_put_input(struct text *body, const struct text *input, bool ids, int n_vocab,
                            const char *path, struct err *err);
/* Writes the fields that say how texts are cut, and whatever else the options say about every
 * /score request. */
void cmd_put_score_options(struct text *body, const struct options *options);
/* "language", if options name one. */
void cmd_put_language(struct text *body, const struct options *options);

/* "ablate" as the last field, if options have one: it must be JSON. */
enum err_code cmd_put_ablate(struct text *body, const struct options *options, struct err *err);

/* The files that options name, [*n]; none is standard input, "-". */
const char *const *cmd_paths(const struct options *options, int *n);
/* Before work that takes long: whether the file of an option can be written and is none of
 * cmd_paths. */
enum err_code cmd_check_output(const char *option, const char *path, const struct options *options,
                               struct err *err);
/* Makes the n files the documents of a /score request, in windows as options say. score_free ends
 * the job, also after an error. */
enum err_code cmd_read_score(struct score_job *job, const struct options *options,
                             const struct api_limits *limits, const char *const *path, int n,
                             struct err *err);

/* Warns on standard error if more than one token in a hundred is unknown to the vocabulary, and
 * says what to do: such figures look good and mean little. */
void cmd_warn_unknown(int64_t n_unk, int64_t n_tokens, const struct tokenizer *tokenizer);

#endif
