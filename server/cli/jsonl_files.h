/* The files of `score --jsonl` and `generate --jsonl`: lines in, results and faults out.
 *
 * The output records what is finished: results are in the order of their lines, and the fault of a
 * line is in OUTPUT.errors before any result of a later line is written. So after a kill at any
 * moment the two files together tell at which line to go on (jsonl_out_resume). */
#ifndef SERVER_JSONL_FILES_H
#define SERVER_JSONL_FILES_H

#include "server/io/codec.h"
#include "server/json/text.h"

#include <stdio.h>

/* ---- lines in -------------------------------------------------------------------------------- */

/* Takes those lines that are not blank whose number, from 0, leaves `index` when divided by
 * `of`. */
struct jsonl_shard {
    int64_t index, of;
};

struct jsonl_in {
    const char *const *path; /* Borrowed: [n]; "-" = standard input */
    int n;
    struct jsonl_shard shard;
    size_t line_max; /* bytes; what a longer line has beyond it is skipped */

    /* The line that jsonl_in_next found. */
    struct text line; /* Owner: this. The user may exchange it for another text */
    bool too_long;
    int file;       /* path[file] it is in */
    int64_t number; /* its, from 1 in its file */
    int64_t taken;  /* bytes of all files that had been read by then, as they are on the disk */
    int64_t total;  /* bytes of all files; 0 = unknown */

    bool again;                  /* the next call returns this line once more */
    int next;                    /* file to open */
    int fd;                      /* of the open file */
    struct codec_reader *reader; /* Owner: this; NULL = none is open */
    int64_t taken_before;        /* bytes of the files before */
    int64_t n_line;              /* lines that are not blank, of all shards */
    char *buffer;                /* Owner: this */
    size_t at, filled;
};

/* Opens the first file, so that a wrong name is reported before a model is loaded. */
enum err_code jsonl_in_open(struct jsonl_in *in, const char *const *path, int n,
                            struct jsonl_shard shard, size_t line_max, struct err *err);
/* The next line of the shard that is not blank. *more is false after the last one. */
enum err_code jsonl_in_next(struct jsonl_in *in, bool *more, struct err *err);
void jsonl_in_close(struct jsonl_in *in); /* zeroed is fine */
/* The name of path[file] in messages. */
const char *jsonl_in_name(const struct jsonl_in *in, int file);

/* ---- results out ----------------------------------------------------------------------------- */

struct jsonl_out {
    const char *path;  /* Borrowed; "-" = standard output */
    char *errors_path; /* Owner: this; NULL: faults go to standard error */
    int fd, errors_fd;
    struct codec_writer *writer; /* Owner: this */
    struct text results, errors; /* Owner: this. Not written yet */
    int64_t n_result, n_bad;     /* lines in the files, those of an earlier run included */
    int64_t n_raw;               /* bytes of results in the open member */
    int64_t written_us, ended_us;
    bool failed; /* a write failed: nothing more is written */
};

/* Opens the output for writing; in is needed to refuse overwriting an input. What the file holds
 * stays until jsonl_out_resume or jsonl_out_begin decides. */
enum err_code jsonl_out_open(struct jsonl_out *out, const char *path, const struct jsonl_in *in,
                             struct err *err);
/* Empties both files. */
enum err_code jsonl_out_begin(struct jsonl_out *out, struct err *err);
/* Cuts off what a kill left half written, and moves in past the finished lines. */
enum err_code jsonl_out_resume(struct jsonl_out *out, struct jsonl_in *in, struct err *err);
/* Adds the result, a line without its line feed; takes it over. */
enum err_code jsonl_out_add(struct jsonl_out *out, const struct text *result, struct err *err);
/* Adds the fault of line `number` of the file called name. */
enum err_code jsonl_out_add_bad(struct jsonl_out *out, const char *name, int64_t number,
                                const char *message, struct err *err);
/* Writes results that have waited too long; end: writes everything and closes the compressed
 * member. */
enum err_code jsonl_out_flush(struct jsonl_out *out, bool end, struct err *err);
void jsonl_out_close(struct jsonl_out *out); /* writes nothing; zeroed is fine */

#endif
