/* Fuzz target: model.safetensors.index.json from any bytes, beside two shards. It must be refused,
 * or name every tensor of the shards that it names, each in its own file. Run by `make fuzz`;
 * tests/fuzz/corpus/shards holds the seeds. */
#include "models/file.h"
#include "models/tensors.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

static char folder[] = "/tmp/pkmserve-fuzz-shards-XXXXXX";

enum { N_FILE = 3, INDEX = 0 };
static const char *const names[N_FILE] = {"model.safetensors.index.json", "one.safetensors",
                                          "two.safetensors"};
static const char *const headers[N_FILE] = {
    "",
    /* In parentheses: one string in two lines. */
    ("{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]},"
     "\"b\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,8]}}"),
    "{\"c\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}"};

static void path_of(char path[64], int file)
{
    (void)snprintf(path, 64, "%s/%s", folder, names[file]);
}

static void remove_folder(void)
{
    for (int i = 0; i < N_FILE; i++) {
        char path[64];
        path_of(path, i);
        (void)unlink(path);
    }
    (void)rmdir(folder);
}

static void write_file(int name, const void *data, size_t bytes)
{
    char path[64];
    path_of(path, name);
    FILE *const file = fopen(path, "wb");
    CHECK(file != NULL && fwrite(data, 1, bytes, file) == bytes && fclose(file) == 0);
}

static void write_shard(int name)
{
    char shard[256] = {0};
    const size_t n = strlen(headers[name]);
    shard[0] = (char)n; /* the length of the header in 8 bytes, the least of them first */
    memcpy(shard + 8, headers[name], n);
    CHECK(n < 128);
    write_file(name, shard, 8 + n + 8);
}

static void open_once(void)
{
    static bool is_made;
    if (!is_made) {
        is_made = mkdtemp(folder) != NULL && atexit(remove_folder) == 0;
        CHECK(is_made);
        write_shard(1);
        write_shard(2);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    struct tensors *tensors = NULL;
    struct err err = {0};
    open_once();
    write_file(INDEX, data, bytes);
    const enum err_code code = tensors_open(&tensors, folder, &err);
    if (code != ERR_OK) {
        CHECK(tensors == NULL && err.code == code && strchr(err.message, '\n') == NULL);
        return 0;
    }
    const bool one = tensors_find(tensors, "a") >= 0;
    const bool two = tensors_find(tensors, "c") >= 0;
    CHECK(one == (tensors_find(tensors, "b") >= 0));
    CHECK(tensors_n(tensors) == 2 * (int)one + (int)two && tensors_n(tensors) > 0);
    for (int i = 0; i < tensors_n(tensors); i++) {
        const struct safetensors_entry *const entry = tensors_at(tensors, i);
        CHECK(tensors_find(tensors, entry->name) == i);
        CHECK(strcmp(strrchr(entry->path, '/') + 1, names[entry->name[0] == 'c' ? 2 : 1]) == 0);
    }
    tensors_close(tensors);
    return 0;
}
