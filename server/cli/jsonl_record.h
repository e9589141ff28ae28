/* OUT.run beside the output of `score --jsonl` and `generate --jsonl`: what its lines were computed
 * with.
 *
 * Several processes may work on one corpus: those that go on after a kill (--resume) and those of
 * other shards (--shard), often on other machines. Each writes its record before its first line,
 * and compares it with the record that is already there and with those of the other shards in the
 * same folder. So results of two models or of different options never get into one set unnoticed.
 *
 * A record has a line for each of: the command, the hash of the model, the options, the inputs'
 * names, the shard. */
#ifndef SERVER_JSONL_RECORD_H
#define SERVER_JSONL_RECORD_H

#include "server/cli/jsonl_files.h"
#include "server/options/options.h"

enum { RECORD_BYTES_MAX = 1 << 16 };

/* The record of this run; doing: "scoring" or "generating"; defaults: what the options say about
 * every request. ERR_IO names a file of the model that cannot be read. The sum is of the names and
 * sizes of the model's files and of their bytes, of a file above 64 MiB of samples: there two
 * models may differ in a few rows unseen, unless each has a model.sha256. */
enum err_code jsonl_record_make(struct text *record, const char *doing,
                                const struct options *options, const struct text *defaults,
                                const struct jsonl_in *in, struct err *err);
/* Compares the record of this run with another one, whose bytes may be anything; path is the other
 * one's. is_own: it belongs to the same output; otherwise it is ignored unless it is of another
 * shard of the same corpus. ERR_FORMAT says how they differ. */
enum err_code jsonl_record_compare(const struct text *record, const char *other, size_t bytes,
                                   bool is_own, const char *path, struct err *err);
/* Compares with the records that are there: of the output, if it is resumed, and of other shards.
 * This and the next do nothing for an output that is no regular file. */
enum err_code jsonl_record_check(const struct text *record, const struct jsonl_out *out,
                                 bool resume, struct err *err);
/* Writes the record. */
enum err_code jsonl_record_put(const struct text *record, const struct jsonl_out *out,
                               struct err *err);

#endif
