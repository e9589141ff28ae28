/* Results in the order of their lines, faults beside them, and going on after a kill: see
 * jsonl_files.h. */
#include "server/cli/jsonl_files.h"

#include "engine/clock.h"
#include "models/file_out.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

enum {
    BUFFER_BYTES = 1 << 16,
    MEMBER_BYTES = 1 << 20, /* bytes of results in one compressed member */
    WRITE_US = 200000,      /* time after which a result is written to a plain file */
    MEMBER_US = 5000000,    /* time after which a member is ended: at most this much is lost by a
                             * kill */
    PREFIX_MAX = 4200,
};

/* ---- opening --------------------------------------------------------------------------------- */

/* Refuses to write over what is read: by the output, its faults or its record. */
static enum err_code check_outputs(const struct jsonl_out *out, const struct jsonl_in *in,
                                   struct err *err)
{
    static const char *const endings[] = {"", ".errors", ".run"};
    char path[PREFIX_MAX + 8];
    for (size_t i = 0; i < sizeof endings / sizeof endings[0]; i++) {
        (void)snprintf(path, sizeof path, "%.4200s%s", out->path, endings[i]);
        if (file_out_check_apart("--output", path, in->path, in->n, err) != ERR_OK) {
            return err->code;
        }
    }
    return ERR_OK;
}

static enum err_code open_file(int *fd, const char *path, struct err *err)
{
    *fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    /* Two runs into one file would mix their lines. The lock goes with its process. */
    if (*fd >= 0 && flock(*fd, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
        return err_set(err, ERR_IO, "%s: another run is writing it", path);
    }
    return *fd >= 0 ? ERR_OK
                    : err_set(err, ERR_IO, "%s: cannot be opened for writing: %s", path,
                              strerror(errno));
}

enum err_code jsonl_out_open(struct jsonl_out *out, const char *path, const struct jsonl_in *in,
                             struct err *err)
{
    *out = (struct jsonl_out){.path = path, .fd = STDOUT_FILENO, .errors_fd = STDERR_FILENO};
    const bool standard = strcmp(path, "-") == 0;
    if (!standard) {
        const size_t bytes = strlen(path) + sizeof ".errors";
        out->errors_path = malloc(bytes);
        if (out->errors_path == NULL) {
            return err_set(err, ERR_MEMORY, "no memory for a file's name");
        }
        (void)snprintf(out->errors_path, bytes, "%s.errors", path);
        out->errors_fd = -1;
        if (check_outputs(out, in, err) != ERR_OK || open_file(&out->fd, path, err) != ERR_OK ||
            open_file(&out->errors_fd, out->errors_path, err) != ERR_OK) {
            return err->code;
        }
    }
    out->written_us = out->ended_us = clock_now_us();
    return codec_writer_open(&out->writer, out->fd, codec_of_name(path),
                             standard ? "standard output" : path, err);
}

void jsonl_out_close(struct jsonl_out *out)
{
    codec_writer_close(out->writer);
    if (out->errors_path != NULL) {
        (void)(out->fd >= 0 && close(out->fd));
        (void)(out->errors_fd >= 0 && close(out->errors_fd));
    }
    free(out->errors_path);
    text_free(&out->results);
    text_free(&out->errors);
    *out = (struct jsonl_out){0};
}

static enum err_code cut(int fd, int64_t bytes, const char *path, struct err *err)
{
    struct stat status;
    if (fstat(fd, &status) == 0 && !S_ISREG(status.st_mode)) {
        return ERR_OK; /* a device or a pipe begins empty */
    }
    if (ftruncate(fd, bytes) != 0 || lseek(fd, bytes, SEEK_SET) != bytes) {
        return err_set(err, ERR_IO, "%s: cannot be cut to %lld bytes: %s", path, (long long)bytes,
                       strerror(errno));
    }
    return ERR_OK;
}

enum err_code jsonl_out_begin(struct jsonl_out *out, struct err *err)
{
    if (out->errors_path == NULL) {
        return ERR_OK;
    }
    return cut(out->fd, 0, out->path, err) == ERR_OK ? cut(out->errors_fd, 0, out->errors_path, err)
                                                     : err->code;
}

/* ---- going on -------------------------------------------------------------------------------- */

static int64_t count_feeds(const char *data, size_t n, size_t *behind_last)
{
    int64_t count = 0;
    const char *const end = data + n;
    for (const char *at = data; (at = memchr(at, '\n', (size_t)(end - at))) != NULL;) {
        count++;
        *behind_last = (size_t)(++at - data);
    }
    return count;
}

/* The part of the output that is complete. */
struct whole {
    int64_t bytes;  /* of the file */
    int64_t n_line; /* in them */
};

/* Reads on and moves *whole. The unit is a line in a plain file, and a member in a compressed
 * one. */
static enum err_code read_results(struct jsonl_out *out, struct codec_reader *reader, char *data,
                                  struct whole *whole, struct err *err)
{
    const bool plain = codec_of_name(out->path) == CODEC_PLAIN;
    int64_t n_line = 0;
    int64_t n_byte = 0;
    bool ends_line = true;
    for (size_t got = 1; got > 0;) {
        const enum err_code code = codec_read(reader, data, BUFFER_BYTES, &got, err);
        if (code != ERR_OK && !codec_is_torn(reader)) {
            return code;
        }
        size_t behind = 0;
        const int64_t n_new = count_feeds(data, got, &behind);
        const struct codec_mark end = codec_last_end(reader);
        if (plain && behind > 0) {
            *whole = (struct whole){n_byte + (int64_t)behind, n_line + n_new};
        } else if (!plain && end.made == n_byte && end.taken > whole->bytes && ends_line) {
            *whole = (struct whole){end.taken, n_line}; /* the file ended before this data */
        }
        n_line += n_new;
        n_byte += (int64_t)got;
        ends_line = got > 0 ? behind == got : ends_line;
        if (!plain && end.made == n_byte && end.taken > whole->bytes && ends_line) {
            *whole = (struct whole){end.taken, n_line};
        }
        got = codec_is_torn(reader) ? 0 : got;
    }
    return ERR_OK;
}

/* Counts the complete results and cuts off what follows them. */
static enum err_code count_results(struct jsonl_out *out, struct err *err)
{
    struct codec_reader *reader = NULL;
    struct whole whole = {0};
    char *const data = malloc(BUFFER_BYTES);
    enum err_code code =
        data != NULL ? codec_reader_open(&reader, out->fd, codec_of_name(out->path), out->path, err)
                     : err_set(err, ERR_MEMORY, "no memory to resume");
    if (code == ERR_OK) {
        code = read_results(out, reader, data, &whole, err);
    }
    codec_reader_close(reader);
    free(data);
    out->n_result = whole.n_line;
    return code == ERR_OK ? cut(out->fd, whole.bytes, out->path, err) : code;
}

/* The faults of an earlier run, one after another. */
struct faults {
    FILE *file;
    char *line; /* Owner: this */
    size_t capacity;
    ssize_t n;    /* bytes of line; -1 = there are no more complete lines */
    int why;      /* errno of a line that could not be read, 0 = none */
    int64_t keep; /* bytes of the file before line */
};

static void next_fault(struct faults *faults)
{
    errno = 0;
    faults->n = getline(&faults->line, &faults->capacity, faults->file);
    faults->why = faults->n < 0 && !feof(faults->file) ? errno : 0;
    if (faults->n > 0 && faults->line[faults->n - 1] != '\n') {
        faults->n = -1;
    }
}

/* "FILE:LINE: ", which each fault begins with. */
static size_t put_place(char place[PREFIX_MAX], const char *name, int64_t number)
{
    const int n = snprintf(place, PREFIX_MAX, "%.4096s:%lld: ", name, (long long)number);
    return (size_t)n;
}

/* Bytes of FILE in a fault's "FILE:LINE: ", and the line; -1: it does not begin so. */
static int64_t place_of(const struct faults *faults, int64_t *number)
{
    for (ssize_t i = 1; i < faults->n && i < PREFIX_MAX; i++) {
        char *end = NULL;
        if (faults->line[i] == ':' && faults->line[i + 1] >= '0' && faults->line[i + 1] <= '9') {
            *number = strtoll(faults->line + i + 1, &end, 10);
            if (end[0] == ':' && end[1] == ' ') {
                return i;
            }
        }
    }
    return -1;
}

/* Whether the next fault is about line number of that file, of any line if 0. Its directory may be
 * spelled in another way if no other input has the same last part. */
static bool is_about(const struct faults *faults, const struct jsonl_in *in, int file,
                     int64_t number)
{
    const char *const name = jsonl_in_name(in, file);
    char place[PREFIX_MAX];
    const size_t n = put_place(place, name, number);
    if (number != 0 && faults->n >= (ssize_t)n && memcmp(faults->line, place, n) == 0) {
        return true;
    }
    int64_t line = 0;
    const int64_t n_file = faults->n > 0 ? place_of(faults, &line) : -1;
    if (n_file < 0 || (number != 0 && line != number)) {
        return false;
    }
    if ((size_t)n_file == strlen(name) && memcmp(faults->line, name, (size_t)n_file) == 0) {
        return true;
    }
    int n_same = 0;
    for (int i = 0; i < in->n; i++) {
        n_same += strcmp(basename(jsonl_in_name(in, i)), basename(name)) == 0;
    }
    (void)snprintf(place, sizeof place, "%.*s", (int)n_file, faults->line);
    return n_same == 1 && strcmp(basename(place), basename(name)) == 0;
}

/* Whether the next fault is about the line that was just read; if so, moves on to the next
 * fault. */
static bool take_fault(struct faults *faults, const struct jsonl_in *in)
{
    if (!is_about(faults, in, in->file, in->number)) {
        return false;
    }
    faults->keep += faults->n;
    next_fault(faults);
    return true;
}

/* A fault that is left is of a line that will be read again, or of no input. */
static enum err_code check_left(const struct jsonl_out *out, const struct faults *faults,
                                const struct jsonl_in *in, struct err *err)
{
    for (int i = 0; i < in->n && faults->n > 0; i++) {
        if (is_about(faults, in, i, 0)) {
            return ERR_OK;
        }
    }
    const int n_shown = faults->n > 80 ? 80 : (int)faults->n - 1;
    return faults->n <= 0
               ? ERR_OK
               : err_set(err, ERR_ARGUMENT,
                         "--resume: %s has a fault of another input, \"%.*s\": give the inputs "
                         "under the names of the first run",
                         out->errors_path, n_shown, faults->line);
}

/* Moves in past all lines that have a result or a fault. Every line before the last result has one
 * or the other; of the faults after it, those are kept that follow without a missing line. */
static enum err_code skip_done(struct jsonl_out *out, struct jsonl_in *in, struct faults *faults,
                               struct err *err)
{
    int64_t left = out->n_result;
    next_fault(faults);
    while (faults->why == 0 && (left > 0 || faults->n > 0)) {
        bool more = false;
        if (jsonl_in_next(in, &more, err) != ERR_OK) {
            return err->code;
        }
        if (!more && left > 0) {
            return err_set(err, ERR_FORMAT,
                           "%s: has more results than the input has lines, %lld to %lld: it is not "
                           "of this input",
                           out->path, (long long)out->n_result, (long long)(out->n_result - left));
        }
        if (!more) {
            break;
        }
        if (take_fault(faults, in)) {
            out->n_bad++;
        } else if (left > 0) {
            left--;
        } else {
            in->again = true;
            break;
        }
    }
    if (faults->why != 0) {
        return err_set(err, ERR_IO, "%s: cannot be read: %s", out->errors_path,
                       strerror(faults->why));
    }
    return check_left(out, faults, in, err) == ERR_OK
               ? cut(out->errors_fd, faults->keep, out->errors_path, err)
               : err->code;
}

enum err_code jsonl_out_resume(struct jsonl_out *out, struct jsonl_in *in, struct err *err)
{
    struct stat status;
    CHECK(out->errors_path != NULL);
    if (fstat(out->fd, &status) != 0 || !S_ISREG(status.st_mode)) {
        return err_set(err, ERR_ARGUMENT, "--resume: %s is no file", out->path);
    }
    if (count_results(out, err) != ERR_OK) {
        return err->code;
    }
    struct faults faults = {.file = fopen(out->errors_path, "rb")};
    if (faults.file == NULL) {
        return err_set(err, ERR_IO, "%s: cannot be read: %s", out->errors_path, strerror(errno));
    }
    const enum err_code code = skip_done(out, in, &faults, err);
    free(faults.line);
    (void)fclose(faults.file);
    return code;
}

/* ---- writing --------------------------------------------------------------------------------- */

/* Writes all that is not written yet. */
static enum err_code write_all(struct jsonl_out *out, bool end, int64_t now_us, struct err *err)
{
    if (out->results.failed || out->errors.failed) {
        return err_set(err, ERR_MEMORY, "no memory for the results");
    }
    /* Faults are written first: jsonl_out_resume relies on it. */
    const char *const errors_path = out->errors_path != NULL ? out->errors_path : "standard error";
    if (codec_put(out->errors_fd, out->errors.data, out->errors.n, errors_path, err) != ERR_OK ||
        codec_write(out->writer, out->results.data, out->results.n, err) != ERR_OK) {
        return err->code;
    }
    out->n_raw += (int64_t)out->results.n;
    out->written_us = now_us;
    text_clear(&out->errors);
    if (out->results.capacity > 4 * BUFFER_BYTES) {
        text_free(&out->results);
    }
    text_clear(&out->results);
    if (end || out->n_raw >= MEMBER_BYTES || now_us - out->ended_us > MEMBER_US) {
        out->n_raw = 0;
        out->ended_us = now_us;
        /* Readers of gzip and zstd take a file of no bytes for one that was cut off. */
        const bool always = end && out->n_result == 0 && lseek(out->fd, 0, SEEK_CUR) <= 0;
        return codec_end(out->writer, always, err);
    }
    return ERR_OK;
}

enum err_code jsonl_out_flush(struct jsonl_out *out, bool end, struct err *err)
{
    const int64_t now_us = clock_now_us();
    const bool late = now_us - out->written_us > WRITE_US;
    if (out->failed) { /* a part may be in the files: what follows it would not */
        return err_set(err, ERR_IO, "%s: could not be written", out->path);
    }
    if (!end && !late && out->results.n < BUFFER_BYTES) {
        return ERR_OK;
    }
    const enum err_code code = write_all(out, end, now_us, err);
    out->failed = code != ERR_OK;
    return code;
}

enum err_code jsonl_out_add(struct jsonl_out *out, const struct text *result, struct err *err)
{
    text_add(&out->results, result->data, result->n);
    text_puts(&out->results, "\n");
    out->results.failed = out->results.failed || result->failed;
    out->n_result++;
    return jsonl_out_flush(out, false, err);
}

enum err_code jsonl_out_add_bad(struct jsonl_out *out, const char *name, int64_t number,
                                const char *message, struct err *err)
{
    char place[PREFIX_MAX];
    const size_t n = put_place(place, name, number);
    text_puts(&out->errors, out->errors_path != NULL ? "" : "pkmserve: ");
    text_add(&out->errors, place, n);
    text_puts(&out->errors, message);
    text_puts(&out->errors, "\n");
    out->n_bad++;
    return jsonl_out_flush(out, false, err);
}
