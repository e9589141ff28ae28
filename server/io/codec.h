/* Files that are plain or compressed by gzip or Zstandard: reading and writing front to back.
 *
 * A compressed file is a sequence of members (gzip) or frames (zstd), each of which can be read
 * alone. A writer that may be killed ends members where a reader can go on (codec_end). The formats
 * are those of RFC 1952 and RFC 8878. */
#ifndef SERVER_IO_CODEC_H
#define SERVER_IO_CODEC_H

#include "kernels/err.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum codec { CODEC_PLAIN, CODEC_GZIP, CODEC_ZSTD, CODEC_DETECT };

/* What a file of this name holds: .gz, .zst, or neither. */
enum codec codec_of_name(const char *path);

struct codec_reader;

/* Reads the descriptor, which stays the caller's, from where it stands. CODEC_DETECT looks at the
 * first bytes. path is borrowed, for errors. ERR_MEMORY; ERR_UNSUPPORTED without the libraries. */
enum err_code codec_reader_open(struct codec_reader **reader, int fd, enum codec codec,
                                const char *path, struct err *err);
/* At least one byte, or *got == 0 at the end. Never reads over the end of a member. ERR_IO;
 * ERR_FORMAT: damaged, or cut off in a member, which codec_is_torn tells. */
enum err_code codec_read(struct codec_reader *reader, char *data, size_t n, size_t *got,
                         struct err *err);
bool codec_is_torn(const struct codec_reader *reader);
/* Bytes of the file that have been decoded. */
int64_t codec_taken(const struct codec_reader *reader);
/* Where the last whole member ended, 0 if none has: bytes of the file, and bytes that were read. */
struct codec_mark {
    int64_t taken, made;
};
struct codec_mark codec_last_end(const struct codec_reader *reader);
void codec_reader_close(struct codec_reader *reader); /* NULL is fine */

struct codec_writer;

enum err_code codec_writer_open(struct codec_writer **writer, int fd, enum codec codec,
                                const char *path, struct err *err);
enum err_code codec_write(struct codec_writer *writer, const char *data, size_t n, struct err *err);
/* Ends the member, if one is open, and writes it out. always: if none is, an empty one. */
enum err_code codec_end(struct codec_writer *writer, bool always, struct err *err);
void codec_writer_close(struct codec_writer *writer); /* writes nothing. NULL is fine */

/* All of data to the descriptor. */
enum err_code codec_put(int fd, const char *data, size_t n, const char *path, struct err *err);

#endif
