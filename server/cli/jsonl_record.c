/* Makes, compares and writes the records of runs: see jsonl_record.h. */
#include "server/cli/jsonl_record.h"

#include "models/file_out.h"
#include "models/sha256.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum {
    PIECE_BYTES = 1 << 12,
    WHOLE_BYTES = 64 << 20, /* a larger file is sampled: */
    N_PIECE = 512,
    FILE_MAX = 4096,
    PATH_BYTES = OPTIONS_PATH_MAX + 512,
};

/* ---- the sum of a model
 * ------------------------------------------------------------------------ */

static bool ends_in(const char *name, const char *ending)
{
    const size_t n = strlen(name);
    const size_t n_ending = strlen(ending);
    return n > n_ending && strcmp(name + n - n_ending, ending) == 0;
}

static bool is_of_model(const char *name)
{
    static const char *const endings[] = {".json", ".safetensors", ".model", ".txt", ".sha256"};
    bool is = false;
    for (size_t i = 0; i < sizeof endings / sizeof endings[0]; i++) {
        is = is || ends_in(name, endings[i]);
    }
    return is && name[0] != '.';
}

/* Adds name, size and either all pieces or some that are spread evenly, the first and the last
 * among them. */
static enum err_code add_file(struct sha256 *sum, const char *path, const char *name,
                              struct err *err)
{
    struct stat status = {0};
    const int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    bool ok = fd >= 0 && fstat(fd, &status) == 0 && S_ISREG(status.st_mode);
    char text[PIECE_BYTES];
    const int64_t bytes = ok ? status.st_size : 0;
    const int n = snprintf(text, sizeof text, "%.255s %lld\n", name, (long long)bytes);
    sha256_add(sum, text, (size_t)n);
    const int64_t n_piece = (bytes + PIECE_BYTES - 1) / PIECE_BYTES;
    const int64_t n_taken = bytes <= WHOLE_BYTES ? n_piece : N_PIECE;
    for (int64_t i = 0; ok && i < n_taken; i++) {
        const int64_t piece = n_taken > 1 ? (n_piece - 1) * i / (n_taken - 1) : 0;
        const int64_t left = bytes - piece * PIECE_BYTES;
        const ssize_t got = pread(fd, text, sizeof text, piece * PIECE_BYTES);
        ok = got == (left < PIECE_BYTES ? left : PIECE_BYTES);
        errno = got >= 0 ? EIO : errno; /* fewer bytes than the file has */
        sha256_add(sum, text, ok ? (size_t)got : 0);
    }
    const int why = errno;
    if (fd >= 0) {
        (void)close(fd);
    }
    return ok ? ERR_OK
              : err_set(err, ERR_IO, "%.400s: cannot be read: %s", path,
                        fd >= 0 && !S_ISREG(status.st_mode) ? "it is no file" : strerror(why));
}

static int by_name(const struct dirent **a, const struct dirent **b)
{
    return strcmp((*a)->d_name, (*b)->d_name);
}

static int of_model(const struct dirent *entry)
{
    return is_of_model(entry->d_name);
}

static int of_run(const struct dirent *entry)
{
    return ends_in(entry->d_name, ".run");
}

static void free_names(struct dirent **name, int n)
{
    for (int i = 0; i < n; i++) {
        free(name[i]);
    }
    free(name);
}

static enum err_code sum_model(char hex[SHA256_HEX], const struct options *options, struct err *err)
{
    struct dirent **name = NULL;
    const int n = scandir(options->model, &name, of_model, by_name);
    if (n < 0) {
        return err_set(err, ERR_IO, "%.400s: cannot be read: %s", options->model, strerror(errno));
    }
    struct sha256 sum;
    enum err_code code = ERR_OK;
    sha256_begin(&sum);
    for (int i = 0; i < n && i < FILE_MAX && code == ERR_OK; i++) {
        char path[PATH_BYTES];
        (void)snprintf(path, sizeof path, "%s/%s", options->model, name[i]->d_name);
        code = add_file(&sum, path, name[i]->d_name, err);
    }
    free_names(name, n);
    const char *const more[] = {options->tokenizer, options->overlay};
    for (size_t i = 0; i < 2 && code == ERR_OK; i++) {
        code = more[i][0] != '\0' ? add_file(&sum, more[i], i == 0 ? "tokenizer" : "overlay", err)
                                  : ERR_OK;
    }
    sha256_end_hex(&sum, hex);
    return code;
}

/* ---- making
 * ------------------------------------------------------------------------------------ */

enum err_code jsonl_record_make(struct text *record, const char *doing,
                                const struct options *options, const struct text *defaults,
                                const struct jsonl_in *in, struct err *err)
{
    char hex[SHA256_HEX];
    if (sum_model(hex, options, err) != ERR_OK) {
        return err->code;
    }
    text_printf(record, "pkmserve %s\n", doing);
    text_printf(record, "model %s\n", hex);
    text_printf(record,
                "options dtype=%s kv-cache-dtype=%s max-model-len=%d text-field=%s fields=%s ",
                options->dtype, options->kv_cache_dtype, options->max_model_len,
                options->text_field, options->fields);
    text_add(record, defaults->data, defaults->n);
    text_puts(record, "\ninput");
    for (int i = 0; i < in->n; i++) {
        text_printf(record, " %s", basename(in->path[i]));
    }
    text_printf(record, "\nshard %lld/%lld\n", (long long)in->shard.index, (long long)in->shard.of);
    return record->failed ? err_set(err, ERR_MEMORY, "no memory for the record of the run")
                          : ERR_OK;
}

/* ---- comparing
 * --------------------------------------------------------------------------------- */

enum line { LINE_COMMAND, LINE_MODEL, LINE_OPTIONS, LINE_INPUT, LINE_SHARD, N_LINE };

struct lines {
    const char *at[N_LINE];
    size_t n[N_LINE];
};

/* false: it is not a complete record. */
static bool split(struct lines *lines, const char *text, size_t bytes)
{
    static const char *const begin[N_LINE] = {"pkmserve ", "model ", "options ", "input", "shard "};
    const char *const end = text + bytes;
    for (int i = 0; i < N_LINE; i++) {
        const char *const feed = memchr(text, '\n', (size_t)(end - text));
        const size_t n_begin = strlen(begin[i]);
        if (feed == NULL || (size_t)(feed - text) < n_begin ||
            memcmp(text, begin[i], n_begin) != 0) {
            return false;
        }
        lines->at[i] = text;
        lines->n[i] = (size_t)(feed - text);
        text = feed + 1;
    }
    return text == end;
}

static bool same(const struct lines *a, const struct lines *b, enum line line)
{
    return a->n[line] == b->n[line] && memcmp(a->at[line], b->at[line], a->n[line]) == 0;
}

/* The part after the slash of "shard I/N", and whether both have the same. */
static bool same_count(const struct lines *a, const struct lines *b)
{
    const char *const slash_a = memchr(a->at[LINE_SHARD], '/', a->n[LINE_SHARD]);
    const char *const slash_b = memchr(b->at[LINE_SHARD], '/', b->n[LINE_SHARD]);
    if (slash_a == NULL || slash_b == NULL) {
        return false;
    }
    const size_t n_a = (size_t)(a->at[LINE_SHARD] + a->n[LINE_SHARD] - slash_a);
    const size_t n_b = (size_t)(b->at[LINE_SHARD] + b->n[LINE_SHARD] - slash_b);
    return n_a == n_b && memcmp(slash_a, slash_b, n_a) == 0;
}

static enum err_code differ(const char *path, bool is_own, const char *what, struct err *err)
{
    return is_own ? err_set(err, ERR_FORMAT,
                            "%.300s: the output was begun with %s: go on with the same, or give "
                            "another --output",
                            path, what)
                  : err_set(err, ERR_FORMAT,
                            "%.300s: another shard of this corpus was scored with %s: give all "
                            "shards the same, or remove that shard's output and this file",
                            path, what);
}

enum err_code jsonl_record_compare(const struct text *record, const char *other, size_t bytes,
                                   bool is_own, const char *path, struct err *err)
{
    struct lines mine;
    struct lines theirs;
    CHECK(split(&mine, record->data, record->n));
    if (!split(&theirs, other, bytes)) {
        return is_own ? err_set(err, ERR_FORMAT,
                                "%.300s: is not the record of a run: remove it if the output is of "
                                "the same model and options",
                                path)
                      : ERR_OK;
    }
    if (!is_own && (!same(&mine, &theirs, LINE_COMMAND) || !same(&mine, &theirs, LINE_INPUT) ||
                    !same_count(&mine, &theirs) || same(&mine, &theirs, LINE_SHARD))) {
        return ERR_OK;
    }
    if (!same(&mine, &theirs, LINE_MODEL)) {
        return differ(path, is_own, "another model, whose files have other sums", err);
    }
    if (!same(&mine, &theirs, LINE_OPTIONS)) {
        return differ(path, is_own, "other options", err);
    }
    return same(&mine, &theirs, LINE_COMMAND) && same(&mine, &theirs, LINE_SHARD)
               ? ERR_OK
               : (is_own ? differ(path, true, "another command or shard", err) : ERR_OK);
}

/* ---- files
 * ------------------------------------------------------------------------------------- */

/* Reads the record that is there and compares it; a missing or empty file is accepted. */
static enum err_code compare_file(const struct text *record, const char *path, bool is_own,
                                  struct err *err)
{
    const int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    char *const data = malloc(RECORD_BYTES_MAX);
    ssize_t n = fd >= 0 && data != NULL ? read(fd, data, RECORD_BYTES_MAX) : 0;
    const enum err_code code =
        n > 0 ? jsonl_record_compare(record, data, (size_t)n, is_own, path, err) : ERR_OK;
    free(data);
    if (fd >= 0) {
        (void)close(fd);
    }
    return code;
}

static enum err_code compare_shards(const struct text *record, const char *own, struct err *err)
{
    const char *const slash = strrchr(own, '/');
    const int n_folder =
        slash != NULL ? (int)(slash + 1 - own) : 0; /* bytes, the slash among them */
    char folder[PATH_BYTES];
    (void)snprintf(folder, sizeof folder, "%.*s", n_folder > 0 ? n_folder : 2,
                   n_folder > 0 ? own : "./");
    struct dirent **name = NULL;
    const int n = scandir(folder, &name, of_run, by_name);
    enum err_code code = ERR_OK;
    for (int i = 0; i < n && code == ERR_OK; i++) {
        char path[PATH_BYTES];
        (void)snprintf(path, sizeof path, "%.*s%s", n_folder, own, name[i]->d_name);
        if (strcmp(name[i]->d_name, own + n_folder) != 0) {
            code = compare_file(record, path, false, err);
        }
    }
    free_names(name, n);
    return code;
}

/* Completely or not at all, so that a kill leaves no half of it. */
static enum err_code write_file(const struct text *record, const char *path, struct err *err)
{
    struct file_out out;
    const enum err_code code = file_out_open(&out, path, err);
    if (code == ERR_OK) {
        (void)fwrite(record->data, 1, record->n, out.file); /* file_out_close reports failures */
    }
    return file_out_close(&out, code, err);
}

/* The name of the output's record; false: it has none. */
static bool record_path(char path[PATH_BYTES], const struct jsonl_out *out)
{
    struct stat status;
    (void)snprintf(path, PATH_BYTES, "%.*s.run", OPTIONS_PATH_MAX, out->path);
    return out->errors_path != NULL && fstat(out->fd, &status) == 0 && S_ISREG(status.st_mode) &&
           strlen(out->path) <= OPTIONS_PATH_MAX;
}

enum err_code jsonl_record_check(const struct text *record, const struct jsonl_out *out,
                                 bool resume, struct err *err)
{
    char path[PATH_BYTES];
    if (!record_path(path, out)) {
        return ERR_OK;
    }
    const enum err_code code = resume ? compare_file(record, path, true, err) : ERR_OK;
    return code == ERR_OK ? compare_shards(record, path, err) : code;
}

enum err_code jsonl_record_put(const struct text *record, const struct jsonl_out *out,
                               struct err *err)
{
    char path[PATH_BYTES];
    return record_path(path, out) ? write_file(record, path, err) : ERR_OK;
}
