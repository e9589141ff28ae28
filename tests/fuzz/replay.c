/* Runs a fuzz target over files, or over all files of folders: the corpus as a regression test,
 * with any compiler. Linked with each tests/fuzz/fuzz_*.c in ordinary builds; libFuzzer's main
 * replaces it in `make fuzz`. Exit 0 if the target survived them all; a target that finds a bug
 * aborts. */
#include <dirent.h>
#include <limits.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

static int replay_file(const char *path, size_t bytes)
{
    FILE *const file = fopen(path, "rb");
    /* Exactly as long as the input, so that a sanitizer sees the first byte read behind it. */
    uint8_t *const data = malloc(bytes ? bytes : 1);
    const int ok = file && data && fread(data, 1, bytes, file) == bytes;
    if (ok) {
        printf("%s\n", path);
        fflush(stdout);
        LLVMFuzzerTestOneInput(data, bytes);
    } else {
        fprintf(stderr, "%s: cannot be read\n", path);
    }
    free(data);
    if (file) {
        fclose(file);
    }
    return ok ? 0 : 1;
}

static int replay(const char *path)
{
    struct stat status;
    if (stat(path, &status) != 0) {
        fprintf(stderr, "%s: not there\n", path);
        return 1;
    }
    if (!S_ISDIR(status.st_mode)) {
        return replay_file(path, (size_t)status.st_size);
    }
    DIR *const folder = opendir(path);
    int failed = folder ? 0 : 1;
    for (struct dirent *entry = folder ? readdir(folder) : NULL; entry; entry = readdir(folder)) {
        char inner[PATH_MAX];
        if (entry->d_name[0] != '.' &&
            (size_t)snprintf(inner, sizeof inner, "%s/%s", path, entry->d_name) < sizeof inner) {
            failed |= replay(inner);
        }
    }
    if (folder) {
        closedir(folder);
    }
    return failed;
}

int main(int argc, char **argv)
{
    int failed = argc < 2;
    for (int i = 1; i < argc; i++) {
        failed |= replay(argv[i]);
    }
    return failed;
}
