/* model.sha256: see identity.h. */
#include "models/identity.h"
#include "models/file.h"

#include <errno.h>
#include <limits.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* What to do about a difference, whatever differs. */
#define ADVICE                                                                                     \
    "get the model's files again; if they were changed on purpose, write " IDENTITY_NAME           \
    " anew with models/convert/identity.py, or remove it"

/* Between what is being read and its end. */
struct reader {
    struct identity *identity;
    const char *path;
    const char *at, *end; /* of the line, without its line feed */
    int line;
    int n_logprob;
};

/* ---- words and numbers of a line ----------------------------------------------------------- */

static enum err_code refuse(const struct reader *r, const char *what, struct err *err)
{
    return err_set(err, ERR_FORMAT, "%s: line %d: %s", r->path, r->line, what);
}

/* The next word; "?" if it is too long. false at the end of the line. */
static bool next_word(struct reader *r, char *word, size_t word_max)
{
    while (r->at < r->end && *r->at == ' ') {
        r->at++;
    }
    const char *const begin = r->at;
    while (r->at < r->end && *r->at != ' ') {
        r->at++;
    }
    const size_t bytes = (size_t)(r->at - begin);
    const bool fits = bytes < word_max && memchr(begin, '\0', bytes) == NULL;
    memcpy(word, fits ? begin : "?", fits ? bytes : 1);
    word[fits ? bytes : 1] = '\0';
    return bytes > 0;
}

/* A decimal number: strtod also takes nan, inf and hexadecimal. */
static bool read_real(const char *word, double *number)
{
    char *end = NULL;
    *number = strtod(word, &end);
    return strspn(word, "0123456789.eE+-") == strlen(word) && *end == '\0' && isfinite(*number);
}

/* ---- the lines ----------------------------------------------------------------------------- */

static enum err_code read_tokens(struct reader *r, struct err *err)
{
    struct identity *const identity = r->identity;
    char word[32];
    if (identity->n_token > 0) {
        return refuse(r, "a second list of tokens", err);
    }
    while (next_word(r, word, sizeof word)) {
        double id = -1;
        if (identity->n_token == IDENTITY_TOKEN_MAX) {
            return err_set(err, ERR_FORMAT, "%s: line %d: more tokens than the limit of %d",
                           r->path, r->line, IDENTITY_TOKEN_MAX);
        }
        if (!read_real(word, &id) || id < 0 || id > INT32_MAX || id != floor(id)) {
            return err_set(err, ERR_FORMAT, "%s: line %d: '%s' is not a token's id", r->path,
                           r->line, word);
        }
        identity->token[identity->n_token++] = (int32_t)id;
    }
    return identity->n_token >= 2 ? ERR_OK : refuse(r, "a probe has two tokens at least", err);
}

static enum err_code read_logprobs(struct reader *r, struct err *err)
{
    char word[32];
    if (r->n_logprob > 0) {
        return refuse(r, "a second list of log-probabilities", err);
    }
    while (next_word(r, word, sizeof word)) {
        double logprob = 1;
        if (r->n_logprob == IDENTITY_TOKEN_MAX) {
            return err_set(err, ERR_FORMAT, "%s: line %d: more log-probabilities than the limit %d",
                           r->path, r->line, IDENTITY_TOKEN_MAX);
        }
        if (!read_real(word, &logprob) || logprob > 0 || logprob < -1e6) {
            return err_set(err, ERR_FORMAT,
                           "%s: line %d: '%s' is not a log-probability in [-1000000, 0]", r->path,
                           r->line, word);
        }
        r->identity->logprob[r->n_logprob++] = (float)logprob;
    }
    return ERR_OK;
}

static enum err_code read_tolerance(struct reader *r, struct err *err)
{
    static const enum dtype dtypes[] = {DTYPE_F32, DTYPE_BF16, DTYPE_I8};
    static const char *const names[] = {"f32", "bf16", "int8"};
    char name[32];
    char word[32];
    char more[2];
    double tolerance = 0;
    (void)next_word(r, name, sizeof name);
    if (!next_word(r, word, sizeof word) || !read_real(word, &tolerance) || tolerance < 1e-6 ||
        tolerance > 1e6 || next_word(r, more, sizeof more)) {
        return refuse(r, "a tolerance is a dtype and a number in [0.000001, 1000000]", err);
    }
    for (size_t i = 0; i < sizeof dtypes / sizeof dtypes[0]; i++) {
        if (strcmp(name, names[i]) == 0) {
            r->identity->tolerance[dtypes[i]] = (float)tolerance;
            return ERR_OK;
        }
    }
    return err_set(err, ERR_FORMAT,
                   "%s: line %d: a tolerance for '%s', which is not f32, bf16 or int8", r->path,
                   r->line, name);
}

/* A line of the probe; any other line with a # is a remark. */
static enum err_code read_remark(struct reader *r, struct err *err)
{
    char word[16];
    r->at++;
    (void)next_word(r, word, sizeof word);
    if (strcmp(word, "probe") != 0) {
        return ERR_OK;
    }
    (void)next_word(r, word, sizeof word);
    return strcmp(word, "tokens") == 0      ? read_tokens(r, err)
           : strcmp(word, "logprobs") == 0  ? read_logprobs(r, err)
           : strcmp(word, "tolerance") == 0 ? read_tolerance(r, err)
                                            : refuse(r,
                                                     "a probe has tokens, logprobs and "
                                                     "tolerance, nothing else",
                                                     err);
}

/* Where the name begins in a line as sha256sum writes it; 0 = this is not such a line. */
static size_t name_begin(const char *line, size_t bytes)
{
    const size_t n_digit = SHA256_HEX - 1;
    if (bytes <= n_digit + 2 || line[n_digit] != ' ' ||
        (line[n_digit + 1] != ' ' && line[n_digit + 1] != '*')) {
        return 0;
    }
    for (size_t i = 0; i < n_digit; i++) {
        if (line[i] == '\0' || strchr("0123456789abcdef", line[i]) == NULL) {
            return 0;
        }
    }
    return n_digit + 2;
}

static bool is_plain_name(const char *name, size_t bytes)
{
    for (size_t i = 0; i < bytes; i++) {
        if (name[i] == '/' || (unsigned char)name[i] < ' ') {
            return false;
        }
    }
    return bytes < IDENTITY_FILE_NAME_MAX && name[0] != '.';
}

static enum err_code read_file_line(struct reader *r, struct err *err)
{
    struct identity *const identity = r->identity;
    struct identity_file *const file = &identity->file[identity->n_file];
    const size_t bytes = (size_t)(r->end - r->at);
    const size_t name_at = name_begin(r->at, bytes);
    if (name_at == 0) {
        return refuse(r, "expected is a line as sha256sum writes it: 64 digits, two spaces, a name",
                      err);
    }
    const size_t name_bytes = bytes - name_at;
    const char *const name = r->at + name_at;
    if (!is_plain_name(name, name_bytes)) {
        return err_set(
            err, ERR_FORMAT,
            "%s: line %d: the name must be of a file in the directory itself, not hidden, "
            "printable and shorter than %d bytes",
            r->path, r->line, IDENTITY_FILE_NAME_MAX);
    }
    memcpy(file->sha256, r->at, SHA256_HEX - 1);
    memcpy(file->name, name, name_bytes);
    for (int i = 0; i < identity->n_file; i++) {
        if (strcmp(identity->file[i].name, file->name) == 0) {
            return err_set(err, ERR_FORMAT, "%s: line %d: a second sum of %.100s", r->path, r->line,
                           file->name);
        }
    }
    identity->n_file++;
    return ERR_OK;
}

/* ---- the whole ----------------------------------------------------------------------------- */

static enum err_code read_lines(struct reader *r, const char *text, const char *end,
                                struct err *err)
{
    enum err_code code = ERR_OK;
    while (code == ERR_OK && text < end) {
        const char *const feed = memchr(text, '\n', (size_t)(end - text));
        r->at = text;
        r->end = feed != NULL ? feed : end;
        r->line++;
        text = feed != NULL ? feed + 1 : end;
        if (r->at == r->end) {
            continue;
        }
        if (*r->at == '#') {
            code = read_remark(r, err);
        } else if (r->identity->n_file == IDENTITY_FILE_MAX) {
            code = err_set(err, ERR_FORMAT, "%s: line %d: more files than the limit of %d", r->path,
                           r->line, IDENTITY_FILE_MAX);
        } else {
            code = read_file_line(r, err);
        }
    }
    const int n_due = r->identity->n_token > 0 ? r->identity->n_token - 1 : 0;
    if (code == ERR_OK && r->n_logprob != n_due) {
        code = err_set(err, ERR_FORMAT,
                       "%s: the probe's tokens: %d, its log-probabilities: %d; expected are %d, of "
                       "each token but the first",
                       r->path, r->identity->n_token, r->n_logprob, n_due);
    }
    return code;
}

enum err_code identity_parse(struct identity **identity, const char *text, size_t bytes,
                             const char *path, struct err *err)
{
    *identity = NULL;
    struct identity *const made = calloc(1, sizeof *made);
    if (made == NULL || (made->path = strdup(path)) == NULL ||
        (made->file = calloc(IDENTITY_FILE_MAX, sizeof *made->file)) == NULL) {
        identity_free(made);
        return err_set(err, ERR_MEMORY, "%s: no memory to read it", path);
    }
    struct reader reader = {.identity = made, .path = path};
    const enum err_code code = read_lines(&reader, text, text + bytes, err);
    if (code != ERR_OK) {
        identity_free(made);
        return code;
    }
    *identity = made;
    return ERR_OK;
}

void identity_free(struct identity *identity)
{
    if (identity != NULL) {
        free(identity->path);
        free(identity->file);
        free(identity);
    }
}

enum err_code identity_read(struct identity **identity, const char *dir, struct err *err)
{
    *identity = NULL;
    char path[PATH_MAX];
    char *text = NULL;
    size_t bytes = 0;
    enum err_code code = file_path(path, dir, IDENTITY_NAME, err);
    if (code == ERR_OK) {
        code = file_read(&text, &bytes, path, IDENTITY_BYTES_MAX, true, err);
    }
    if (text != NULL) {
        code = identity_parse(identity, text, bytes, path, err);
    }
    free(text);
    return code;
}

/* ---- comparing ----------------------------------------------------------------------------- */

static enum err_code check_file(const struct identity_file *file, const char *dir, char *buffer,
                                size_t buffer_bytes, struct err *err)
{
    char path[PATH_MAX];
    char hex[SHA256_HEX];
    FILE *opened = NULL;
    struct sha256 sum;
    enum err_code code = file_path(path, dir, file->name, err);
    if (code == ERR_OK) {
        code = file_open(&opened, path, false, err);
    }
    if (code != ERR_OK) {
        return code;
    }
    sha256_begin(&sum);
    for (size_t n = buffer_bytes; n == buffer_bytes;) {
        n = fread(buffer, 1, buffer_bytes, opened);
        sha256_add(&sum, buffer, n);
    }
    sha256_end_hex(&sum, hex);
    if (ferror(opened)) {
        code = err_set(err, ERR_IO, "%s: cannot read: %s", path, strerror(errno));
    } else if (strcmp(hex, file->sha256) != 0) {
        code = err_set(err, ERR_FORMAT,
                       "%s: its SHA-256 is %.16s..., but " IDENTITY_NAME " has %.16s...: " ADVICE,
                       path, hex, file->sha256);
    }
    (void)fclose(opened);
    return code;
}

enum err_code identity_check_files(const struct identity *identity, const char *dir,
                                   const struct model_options *options, struct err *err)
{
    const size_t bytes = 1 << 20;
    char *const buffer = malloc(bytes);
    if (buffer == NULL) {
        return err_set(err, ERR_MEMORY, "%s: no memory to compare files", identity->path);
    }
    enum err_code code = ERR_OK;
    for (int i = 0; i < identity->n_file && code == ERR_OK; i++) {
        code = check_file(&identity->file[i], dir, buffer, bytes, err);
        if (options->progress != NULL) {
            options->progress(options->progress_ctx, "check", (i + 1.0) / identity->n_file);
        }
    }
    free(buffer);
    return code;
}

float identity_tolerance(const struct identity *identity, const struct model_info *info,
                         bool fast_math)
{
    /* F16 rounds less than BF16 */
    const enum dtype like = info->dtype == DTYPE_F16 ? DTYPE_BF16 : info->dtype;
    const float own = identity->n_token > 0 ? identity->tolerance[like] : 0;
    const float rounded = identity->tolerance[DTYPE_BF16];
    const bool mixed = fast_math || info->cache_dtype == DTYPE_BF16;
    if (own == 0 || !mixed) {
        return own;
    }
    return rounded == 0 ? 0 : fmaxf(own, rounded);
}

enum err_code identity_compare(const struct identity *identity, const float *logprob, int n,
                               float tolerance, float *difference, struct err *err)
{
    *difference = 0;
    for (int i = 0; i < n; i++) {
        const float off = fabsf(logprob[i] - identity->logprob[i]);
        if (!(off <= tolerance)) { /* also NaN */
            return err_set(
                err, ERR_FORMAT,
                "%s: the log-probability at position %d of the probe is %.6g, but %.6g is "
                "stored, and they may differ by %.3g: the weights are not the ones "
                "that the file was written for, or this device computes wrongly. "
                "--check full tells which file differs: " ADVICE,
                identity->path, i + 1, (double)logprob[i], (double)identity->logprob[i],
                (double)tolerance);
        }
        *difference = fmaxf(*difference, off);
    }
    return ERR_OK;
}
