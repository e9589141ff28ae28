/* Stands in for io/codec.c in pkmserve-engine where zlib or libzstd is missing (`make engine`). */
#include "server/io/codec.h"

static enum err_code missing(struct err *err)
{
    return err_set(err, ERR_UNSUPPORTED,
                   "this program was built without zlib and libzstd, which --jsonl needs: install "
                   "zlib1g-dev and libzstd-dev and build again");
}

enum codec codec_of_name(const char *path)
{
    (void)path;
    return CODEC_PLAIN;
}

enum err_code codec_reader_open(struct codec_reader **reader, int fd, enum codec codec,
                                const char *path, struct err *err)
{
    (void)fd, (void)codec, (void)path;
    *reader = NULL;
    return missing(err);
}

enum err_code codec_read(struct codec_reader *reader, char *data, size_t n, size_t *got,
                         struct err *err)
{
    (void)reader, (void)data, (void)n;
    *got = 0;
    return missing(err);
}

bool codec_is_torn(const struct codec_reader *reader)
{
    (void)reader;
    return false;
}

int64_t codec_taken(const struct codec_reader *reader)
{
    (void)reader;
    return 0;
}

struct codec_mark codec_last_end(const struct codec_reader *reader)
{
    (void)reader;
    return (struct codec_mark){0};
}

void codec_reader_close(struct codec_reader *reader)
{
    (void)reader;
}

enum err_code codec_writer_open(struct codec_writer **writer, int fd, enum codec codec,
                                const char *path, struct err *err)
{
    (void)fd, (void)codec, (void)path;
    *writer = NULL;
    return missing(err);
}

enum err_code codec_write(struct codec_writer *writer, const char *data, size_t n, struct err *err)
{
    (void)writer, (void)data, (void)n;
    return missing(err);
}

enum err_code codec_end(struct codec_writer *writer, bool always, struct err *err)
{
    (void)writer, (void)always;
    return missing(err);
}

void codec_writer_close(struct codec_writer *writer)
{
    (void)writer;
}

enum err_code codec_put(int fd, const char *data, size_t n, const char *path, struct err *err)
{
    (void)fd, (void)data, (void)n, (void)path;
    return missing(err);
}
