/* Lines of several files, compressed or not, front to back in bounded memory: see jsonl_files.h. */
#include "server/cli/cmd.h"
#include "server/cli/jsonl_files.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { BUFFER_BYTES = 1 << 17 };

static bool is_standard(const char *path)
{
    return strcmp(path, "-") == 0;
}

const char *jsonl_in_name(const struct jsonl_in *in, int file)
{
    return cmd_shown_path(in->path[file]);
}

static enum err_code open_next(struct jsonl_in *in, struct err *err)
{
    in->file = in->next++;
    in->number = 0;
    in->at = in->filled = 0;
    const char *const path = in->path[in->file];
    if (is_standard(path)) {
        cmd_tell_terminal();
    }
    in->fd = is_standard(path) ? STDIN_FILENO : open(path, O_RDONLY | O_CLOEXEC);
    if (in->fd < 0) {
        return err_set(err, ERR_IO, "%s: cannot be opened: %s", path, strerror(errno));
    }
    return codec_reader_open(&in->reader, in->fd, CODEC_DETECT, jsonl_in_name(in, in->file), err);
}

static void close_file(struct jsonl_in *in)
{
    in->taken_before += in->reader != NULL ? codec_taken(in->reader) : 0;
    codec_reader_close(in->reader);
    in->reader = NULL;
    if (in->fd > STDIN_FILENO) {
        (void)close(in->fd);
    }
    in->fd = -1;
}

/* Faults name a file and are one line each. */
static enum err_code check_name(const char *path, struct err *err)
{
    for (const char *c = path; *c != '\0'; c++) {
        if ((unsigned char)*c < ' ') {
            return err_set(err, ERR_ARGUMENT,
                           "%s: the name has a control character: give the file another one", path);
        }
    }
    return ERR_OK;
}

enum err_code jsonl_in_open(struct jsonl_in *in, const char *const *path, int n,
                            struct jsonl_shard shard, size_t line_max, struct err *err)
{
    *in = (struct jsonl_in){.path = path, .n = n, .shard = shard, .line_max = line_max, .fd = -1};
    in->buffer = malloc(BUFFER_BYTES);
    if (in->buffer == NULL) {
        return err_set(err, ERR_MEMORY, "no memory to read the input");
    }
    bool known = true;
    for (int i = 0; i < n; i++) {
        struct stat status;
        if (check_name(path[i], err) != ERR_OK) {
            return err->code;
        }
        if (!is_standard(path[i]) && stat(path[i], &status) != 0) {
            return err_set(err, ERR_IO, "%s: cannot be opened: %s", path[i], strerror(errno));
        }
        known = known && !is_standard(path[i]) && S_ISREG(status.st_mode);
        in->total += known ? status.st_size : 0;
    }
    in->total = known ? in->total : 0;
    return open_next(in, err);
}

void jsonl_in_close(struct jsonl_in *in)
{
    if (in->path != NULL) {
        close_file(in);
        text_free(&in->line);
        free(in->buffer);
        in->path = NULL;
    }
}

/* Adds a part of a line, up to the limit. */
static void add_part(struct jsonl_in *in, const char *data, size_t n)
{
    const size_t room = in->line_max - in->line.n;
    in->too_long = in->too_long || n > room;
    text_add(&in->line, data, n < room ? n : room);
}

/* Reads one line of the open file. *more is false at its end. */
static enum err_code read_line(struct jsonl_in *in, bool *more, struct err *err)
{
    bool some = false;
    text_clear(&in->line);
    in->too_long = false;
    for (*more = true; *more;) {
        if (in->at == in->filled) {
            in->at = 0;
            if (codec_read(in->reader, in->buffer, BUFFER_BYTES, &in->filled, err) != ERR_OK) {
                return err->code;
            }
            in->taken = in->taken_before + codec_taken(in->reader);
            if (in->filled == 0) { /* a last line without a line feed is a line */
                *more = some;
                break;
            }
        }
        const char *const data = in->buffer + in->at;
        const char *const feed = memchr(data, '\n', in->filled - in->at);
        const size_t n = feed != NULL ? (size_t)(feed - data) : in->filled - in->at;
        add_part(in, data, n);
        in->at += n + (feed != NULL);
        some = true;
        if (feed != NULL) {
            break;
        }
    }
    in->number += *more;
    return in->line.failed ? err_set(err, ERR_MEMORY, "%s: no memory for line %lld",
                                     jsonl_in_name(in, in->file), (long long)in->number)
                           : ERR_OK;
}

/* Removes a byte order mark and the blanks at the end of the line. Returns whether anything is
 * left. */
static bool strip(struct jsonl_in *in)
{
    static const char mark[] = "\xef\xbb\xbf";
    static const char blanks[] = " \t\r";
    struct text *const line = &in->line;
    if (in->number == 1 && line->n >= 3 && memcmp(line->data, mark, 3) == 0) {
        memcpy(line->data, "   ", 3);
    }
    while (line->n > 0 && memchr(blanks, line->data[line->n - 1], sizeof blanks - 1) != NULL) {
        line->n--;
    }
    return line->n > 0;
}

enum err_code jsonl_in_next(struct jsonl_in *in, bool *more, struct err *err)
{
    *more = true;
    if (in->again) {
        in->again = false;
        return ERR_OK;
    }
    for (;;) {
        bool in_file = false;
        if (read_line(in, &in_file, err) != ERR_OK) {
            return err->code;
        }
        if (!in_file && in->next == in->n) {
            *more = false;
            return ERR_OK;
        }
        if (!in_file) {
            close_file(in);
            if (open_next(in, err) != ERR_OK) {
                return err->code;
            }
        } else if (strip(in) && in->n_line++ % in->shard.of == in->shard.index) {
            return ERR_OK;
        }
    }
}
