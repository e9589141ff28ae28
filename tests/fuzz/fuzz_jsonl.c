/* Fuzz target: the files of `score --jsonl`. Lines are read from any bytes, plain or compressed; a
 * run goes on after any output, errors and record; reading must end, and what is kept must be whole
 * and kept again. Run by `make fuzz`; tests/fuzz/corpus/jsonl holds the seeds.
 *
 * An input: a byte (output plain, gzip or zstd; shard), the lengths of input, output and errors in
 * 16 bits each, lowest byte first, these three, and the record. In the errors a byte 1 stands for
 * the input's path, which differs from run to run. */
#include "server/cli/jsonl_record.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

enum { HEAD_BYTES = 7, LINE_BYTES_MAX = 64 };

static char folder[] = "/tmp/fuzz_jsonl_XXXXXX";

static void remove_folder(void)
{
    static const char *const name[] = {
        "in", "out", "out.errors", "out.gz", "out.gz.errors", "out.zst", "out.zst.errors"};
    for (size_t i = 0; i < sizeof name / sizeof name[0]; i++) {
        char path[64];
        (void)snprintf(path, sizeof path, "%s/%s", folder, name[i]);
        (void)unlink(path);
    }
    (void)rmdir(folder);
}

static void put(const char *name, const char *ending, const uint8_t *data, size_t bytes,
                char path[64])
{
    (void)snprintf(path, 64, "%s/%s%s", folder, name, ending);
    const int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    struct err err;
    CHECK(fd >= 0 && codec_put(fd, (const char *)data, bytes, path, &err) == ERR_OK);
    (void)close(fd);
}

/* The errors with the path of the input in them. */
static struct text name_input(const uint8_t *data, size_t bytes, const char *path)
{
    struct text errors = {0};
    for (size_t i = 0; i < bytes; i++) {
        if (data[i] == 1) {
            text_puts(&errors, path);
        } else {
            text_add(&errors, (const char *)data + i, 1);
        }
    }
    CHECK(!errors.failed);
    return errors;
}

/* Bytes of the next part, at most those that are left. */
static size_t part(const uint8_t *head, size_t left)
{
    const size_t wanted = head[0] + ((size_t)head[1] << 8);
    return wanted < left ? wanted : left;
}

/* All lines of the shard; -1 = the input is damaged. */
static int64_t read_lines(const char *path, struct jsonl_shard shard)
{
    struct jsonl_in in;
    struct err err = {0};
    const char *const paths[] = {path, path};
    int64_t n = 0;
    int64_t taken = 0;
    bool more = true;
    enum err_code code = jsonl_in_open(&in, paths, 2, shard, LINE_BYTES_MAX, &err);
    while (code == ERR_OK && more) {
        code = jsonl_in_next(&in, &more, &err);
        if (code == ERR_OK && more) {
            CHECK(in.line.n > 0 && in.line.n <= LINE_BYTES_MAX && in.number > 0);
            CHECK(memchr(in.line.data, '\n', in.line.n) == NULL);
            CHECK(in.taken >= taken && in.taken <= in.total);
            taken = in.taken;
            n++;
        }
    }
    CHECK(code == ERR_OK || (err.code == code && err.message[0] != '\0'));
    jsonl_in_close(&in);
    return code == ERR_OK ? n : -1;
}

struct resumed {
    enum err_code code;
    int64_t n_result, n_bad, file_bytes, errors_bytes;
};

static struct resumed resume(const char *out_path, const char *in_path, struct jsonl_shard shard)
{
    struct jsonl_in in;
    struct jsonl_out out = {0};
    struct err err = {0};
    struct resumed is = {0};
    const char *const paths[] = {in_path, in_path};
    is.code = jsonl_in_open(&in, paths, 2, shard, LINE_BYTES_MAX, &err);
    if (is.code == ERR_OK) {
        is.code = jsonl_out_open(&out, out_path, &in, &err);
    }
    if (is.code == ERR_OK) {
        is.code = jsonl_out_resume(&out, &in, &err);
    }
    CHECK(is.code == ERR_OK || (err.code == is.code && err.message[0] != '\0'));
    if (is.code == ERR_OK) {
        is.n_result = out.n_result;
        is.n_bad = out.n_bad;
        is.file_bytes = lseek(out.fd, 0, SEEK_END);
        is.errors_bytes = lseek(out.errors_fd, 0, SEEK_END);
    }
    jsonl_out_close(&out);
    jsonl_in_close(&in);
    return is;
}

static void compare_record(const uint8_t *data, size_t bytes)
{
    static const char own[] = "pkmserve scoring\nmodel ab\noptions {}\ninput a\nshard 0/2\n";
    struct text record = {0};
    text_puts(&record, own);
    for (int is_own = 0; is_own < 2; is_own++) {
        struct err err = {0};
        const enum err_code code =
            jsonl_record_compare(&record, (const char *)data, bytes, is_own != 0, "x.run", &err);
        CHECK(code == ERR_OK || strchr(err.message, '\n') == NULL);
        CHECK(code == ERR_OK || bytes != sizeof own - 1 || memcmp(data, own, bytes) != 0);
    }
    text_free(&record);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    static const char *const endings[] = {"", ".gz", ".zst"};
    static bool made;
    if (bytes < HEAD_BYTES) {
        return 0;
    }
    if (!made) {
        made = mkdtemp(folder) != NULL && atexit(remove_folder) == 0;
        CHECK(made);
    }
    const char *const ending = endings[data[0] % 3];
    const struct jsonl_shard shard = {data[0] / 3 % 2, 1 + data[0] / 3 % 2};
    const uint8_t *at = data + HEAD_BYTES;
    size_t left = bytes - HEAD_BYTES;
    size_t n[3];
    const uint8_t *begin[3];
    for (int i = 0; i < 3; i++) {
        n[i] = part(data + 1 + 2 * i, left);
        begin[i] = at;
        at += n[i];
        left -= n[i];
    }
    char in_path[64];
    char out_path[64];
    char errors_path[64];
    put("in", "", begin[0], n[0], in_path);
    put("out", ending, begin[1], n[1], out_path);
    char errors_name[16];
    (void)snprintf(errors_name, sizeof errors_name, "out%s", ending);
    struct text errors = name_input(begin[2], n[2], in_path);
    put(errors_name, ".errors", (const uint8_t *)errors.data, errors.n, errors_path);
    const int64_t n_errors = (int64_t)errors.n;
    text_free(&errors);
    const int64_t n_line = read_lines(in_path, shard);
    const struct resumed first = resume(out_path, in_path, shard);
    if (first.code == ERR_OK) {
        CHECK(n_line < 0 || first.n_result + first.n_bad <= n_line);
        CHECK(first.file_bytes <= (int64_t)n[1] && first.errors_bytes <= n_errors);
        const struct resumed again = resume(out_path, in_path, shard);
        CHECK(again.code == ERR_OK && again.n_result == first.n_result);
        CHECK(again.n_bad == first.n_bad && again.file_bytes == first.file_bytes);
        CHECK(again.errors_bytes == first.errors_bytes);
    }
    compare_record(at, left);
    return 0;
}
