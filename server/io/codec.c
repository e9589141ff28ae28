/* Reading and writing compressed files: see codec.h. The only file that sees zlib and libzstd. */
#include "server/io/codec.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <zlib.h>
#include <zstd.h>

enum {
    IN_BYTES = 1 << 16,
    OUT_BYTES = 1 << 16,
    MAGIC_BYTES = 4,
    /* zlib: the largest window, with gzip's header and check sum. */
    GZIP_WINDOW = 15 + 16,
    GZIP_MEMORY = 8,
    ZSTD_LEVEL = 3,
};

enum codec codec_of_name(const char *path)
{
    static const struct {
        const char *ending;
        enum codec codec;
    } endings[] = {{".gz", CODEC_GZIP}, {".zst", CODEC_ZSTD}};
    const size_t n = strlen(path);
    for (size_t i = 0; i < sizeof endings / sizeof endings[0]; i++) {
        const size_t n_ending = strlen(endings[i].ending);
        if (n >= n_ending && strcmp(path + n - n_ending, endings[i].ending) == 0) {
            return endings[i].codec;
        }
    }
    return CODEC_PLAIN;
}

/* ---- reading -------------------------------------------------------------------------------- */

struct codec_reader {
    int fd;
    const char *path; /* Borrowed */
    enum codec codec;
    z_stream gzip;
    bool gzip_open;
    ZSTD_DStream *zstd; /* Owner: this */
    unsigned char in[IN_BYTES];
    size_t at, n;   /* in[at .. n - 1] is not decoded yet */
    int64_t n_read; /* bytes of the file */
    bool over;      /* the file has no more */
    bool inside;    /* of a member */
    bool torn;
    int64_t n_made; /* bytes that were handed out */
    struct codec_mark end;
};

/* Reads until wanted bytes are there, or the file is over. */
static enum err_code refill(struct codec_reader *r, size_t wanted, struct err *err)
{
    if (r->at > 0) {
        memmove(r->in, r->in + r->at, r->n - r->at);
        r->n -= r->at;
        r->at = 0;
    }
    while (r->n < wanted && !r->over) {
        const ssize_t n = read(r->fd, r->in + r->n, sizeof r->in - r->n);
        if (n < 0 && errno != EINTR) {
            return err_set(err, ERR_IO, "%s: cannot be read: %s", r->path, strerror(errno));
        }
        r->over = n == 0;
        r->n += n > 0 ? (size_t)n : 0;
        r->n_read += n > 0 ? n : 0;
    }
    return ERR_OK;
}

static enum codec detect(const unsigned char *data, size_t n)
{
    static const unsigned char gzip[] = {0x1f, 0x8b};
    static const unsigned char zstd[] = {0x28, 0xb5, 0x2f, 0xfd};
    if (n >= sizeof gzip && memcmp(data, gzip, sizeof gzip) == 0) {
        return CODEC_GZIP;
    }
    return n >= sizeof zstd && memcmp(data, zstd, sizeof zstd) == 0 ? CODEC_ZSTD : CODEC_PLAIN;
}

static enum err_code no_memory(const char *path, struct err *err)
{
    return err_set(err, ERR_MEMORY, "%s: no memory for its compression", path);
}

enum err_code codec_reader_open(struct codec_reader **reader, int fd, enum codec codec,
                                const char *path, struct err *err)
{
    struct codec_reader *const r = calloc(1, sizeof *r);
    *reader = r;
    if (r == NULL) {
        return no_memory(path, err);
    }
    r->fd = fd;
    r->path = path;
    if (refill(r, MAGIC_BYTES, err) != ERR_OK) {
        return err->code;
    }
    r->codec = codec == CODEC_DETECT ? detect(r->in, r->n) : codec;
    if (r->codec == CODEC_GZIP) {
        r->gzip_open = inflateInit2(&r->gzip, GZIP_WINDOW) == Z_OK;
    } else if (r->codec == CODEC_ZSTD) {
        r->zstd = ZSTD_createDStream();
    }
    return (r->codec == CODEC_GZIP && !r->gzip_open) || (r->codec == CODEC_ZSTD && r->zstd == NULL)
               ? no_memory(path, err)
               : ERR_OK;
}

static enum err_code damaged(const struct codec_reader *r, const char *kind, const char *why,
                             struct err *err)
{
    return err_set(err, ERR_FORMAT, "%s: damaged %s near byte %lld: %s", r->path, kind,
                   (long long)codec_taken(r), why);
}

static enum err_code inflate_some(struct codec_reader *r, char *data, size_t n, size_t *got,
                                  struct err *err)
{
    if (!r->inside && inflateReset(&r->gzip) != Z_OK) {
        return no_memory(r->path, err);
    }
    r->gzip.next_in = r->in + r->at;
    r->gzip.avail_in = (uInt)(r->n - r->at);
    r->gzip.next_out = (Bytef *)data;
    r->gzip.avail_out = n < OUT_BYTES ? (uInt)n : OUT_BYTES;
    const uInt room = r->gzip.avail_out;
    const int status = inflate(&r->gzip, Z_NO_FLUSH);
    *got = room - r->gzip.avail_out;
    r->at = r->n - r->gzip.avail_in;
    r->inside = status != Z_STREAM_END;
    if (status == Z_MEM_ERROR) {
        return no_memory(r->path, err);
    }
    if (status != Z_OK && status != Z_STREAM_END && status != Z_BUF_ERROR) {
        return damaged(r, "gzip", r->gzip.msg != NULL ? r->gzip.msg : "a dictionary is needed",
                       err);
    }
    return ERR_OK;
}

static enum err_code unzstd_some(struct codec_reader *r, char *data, size_t n, size_t *got,
                                 struct err *err)
{
    ZSTD_inBuffer in = {r->in, r->n, r->at};
    ZSTD_outBuffer out = {data, n, 0};
    const size_t status = ZSTD_decompressStream(r->zstd, &out, &in);
    if (ZSTD_isError(status)) {
        return damaged(r, "zstd", ZSTD_getErrorName(status), err);
    }
    r->at = in.pos;
    *got = out.pos;
    r->inside = status != 0;
    return ERR_OK;
}

enum err_code codec_read(struct codec_reader *r, char *data, size_t n, size_t *got, struct err *err)
{
    for (*got = 0; *got == 0;) {
        if (r->at == r->n && !r->over && refill(r, 1, err) != ERR_OK) {
            return err->code;
        }
        const size_t left = r->n - r->at;
        if (left == 0 && (r->codec == CODEC_PLAIN || !r->inside)) {
            break;
        }
        if (r->codec == CODEC_PLAIN) {
            *got = left < n ? left : n;
            memcpy(data, r->in + r->at, *got);
            r->at += *got;
            break;
        }
        const enum err_code code = r->codec == CODEC_GZIP ? inflate_some(r, data, n, got, err)
                                                          : unzstd_some(r, data, n, got, err);
        if (code != ERR_OK) {
            return code;
        }
        if (!r->inside) {
            r->end = (struct codec_mark){codec_taken(r), r->n_made + (int64_t)*got};
        }
        if (*got == 0 && left == 0 && r->inside) {
            r->torn = true;
            return err_set(err, ERR_FORMAT,
                           "%s: cut off after %lld bytes, within compressed data: is it whole?",
                           r->path, (long long)r->n_read);
        }
    }
    r->n_made += (int64_t)*got;
    return ERR_OK;
}

bool codec_is_torn(const struct codec_reader *reader)
{
    return reader->torn;
}

int64_t codec_taken(const struct codec_reader *reader)
{
    return reader->n_read - (int64_t)(reader->n - reader->at);
}

struct codec_mark codec_last_end(const struct codec_reader *reader)
{
    return reader->end;
}

void codec_reader_close(struct codec_reader *reader)
{
    if (reader != NULL) {
        if (reader->gzip_open) {
            (void)inflateEnd(&reader->gzip);
        }
        (void)ZSTD_freeDStream(reader->zstd);
        free(reader);
    }
}

/* ---- writing -------------------------------------------------------------------------------- */

struct codec_writer {
    int fd;
    const char *path; /* Borrowed */
    enum codec codec;
    z_stream gzip;
    bool gzip_open;
    ZSTD_CStream *zstd; /* Owner: this */
    bool inside;        /* of a member */
    unsigned char out[OUT_BYTES];
};

enum err_code codec_put(int fd, const char *data, size_t n, const char *path, struct err *err)
{
    for (size_t at = 0; at < n;) {
        const ssize_t written = write(fd, data + at, n - at);
        if (written < 0 && errno != EINTR) {
            return err_set(err, ERR_IO, "%s: cannot be written: %s", path, strerror(errno));
        }
        at += written > 0 ? (size_t)written : 0;
    }
    return ERR_OK;
}

enum err_code codec_writer_open(struct codec_writer **writer, int fd, enum codec codec,
                                const char *path, struct err *err)
{
    struct codec_writer *const w = calloc(1, sizeof *w);
    *writer = w;
    if (w == NULL) {
        return no_memory(path, err);
    }
    w->fd = fd;
    w->path = path;
    w->codec = codec;
    if (codec == CODEC_GZIP) {
        w->gzip_open = deflateInit2(&w->gzip, Z_DEFAULT_COMPRESSION, Z_DEFLATED, GZIP_WINDOW,
                                    GZIP_MEMORY, Z_DEFAULT_STRATEGY) == Z_OK;
    } else if (codec == CODEC_ZSTD) {
        w->zstd = ZSTD_createCStream();
    }
    const bool ok = (codec != CODEC_GZIP || w->gzip_open) &&
                    (codec != CODEC_ZSTD ||
                     (w->zstd != NULL && !ZSTD_isError(ZSTD_initCStream(w->zstd, ZSTD_LEVEL))));
    return ok ? ERR_OK : no_memory(path, err);
}

/* Compresses data; end: also ends the member. */
static enum err_code deflate_all(struct codec_writer *w, const char *data, size_t n, bool end,
                                 struct err *err)
{
    w->gzip.next_in = (z_const Bytef *)data;
    int status = Z_OK;
    do {
        const size_t part = n < OUT_BYTES ? n : OUT_BYTES;
        w->gzip.avail_in = (uInt)part;
        n -= part;
        do {
            w->gzip.next_out = w->out;
            w->gzip.avail_out = sizeof w->out;
            status = deflate(&w->gzip, end && n == 0 ? Z_FINISH : Z_NO_FLUSH);
            CHECK(status != Z_STREAM_ERROR);
            if (codec_put(w->fd, (const char *)w->out, sizeof w->out - w->gzip.avail_out, w->path,
                          err) != ERR_OK) {
                return err->code;
            }
        } while (w->gzip.avail_out == 0);
    } while (n > 0);
    return end && deflateReset(&w->gzip) != Z_OK ? no_memory(w->path, err) : ERR_OK;
}

static enum err_code zstd_all(struct codec_writer *w, const char *data, size_t n, bool end,
                              struct err *err)
{
    ZSTD_inBuffer in = {data, n, 0};
    size_t left = 0;
    do {
        ZSTD_outBuffer out = {w->out, sizeof w->out, 0};
        left = ZSTD_compressStream2(w->zstd, &out, &in, end ? ZSTD_e_end : ZSTD_e_continue);
        if (ZSTD_isError(left)) {
            return err_set(err, ERR_IO, "%s: cannot be compressed: %s", w->path,
                           ZSTD_getErrorName(left));
        }
        if (codec_put(w->fd, (const char *)w->out, out.pos, w->path, err) != ERR_OK) {
            return err->code;
        }
    } while (in.pos < in.size || (end && left > 0));
    return ERR_OK;
}

static enum err_code compress_all(struct codec_writer *w, const char *data, size_t n, bool end,
                                  struct err *err)
{
    w->inside = !end;
    return w->codec == CODEC_GZIP ? deflate_all(w, data, n, end, err)
                                  : zstd_all(w, data, n, end, err);
}

enum err_code codec_write(struct codec_writer *w, const char *data, size_t n, struct err *err)
{
    return n == 0                    ? ERR_OK
           : w->codec == CODEC_PLAIN ? codec_put(w->fd, data, n, w->path, err)
                                     : compress_all(w, data, n, false, err);
}

enum err_code codec_end(struct codec_writer *w, bool always, struct err *err)
{
    always = always && w->codec != CODEC_PLAIN;
    return w->inside || always ? compress_all(w, "", 0, true, err) : ERR_OK;
}

void codec_writer_close(struct codec_writer *writer)
{
    if (writer != NULL) {
        if (writer->gzip_open) {
            (void)deflateEnd(&writer->gzip);
        }
        (void)ZSTD_freeCStream(writer->zstd);
        free(writer);
    }
}
