/* Fuzz target: the safetensors reader on any bytes. It must refuse or return entries that keep
 * their promises; the sanitizers watch the rest. Needs models/safetensors.c, models/json_file.c,
 * kernels/err.c and jansson. Run by `make fuzz`; tests/fuzz/corpus/safetensors holds the seeds. */
#include "models/safetensors.h"

#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    struct safetensors st;
    struct err err = {0};
    const enum err_code code = safetensors_parse(&st, data, bytes, "fuzz", &err);
    if (code != ERR_OK) {
        CHECK(err.code == code && err.message[0] != '\0' && strchr(err.message, '\n') == NULL);
        CHECK(st.entry == NULL && st.n_entry == 0);
        return 0;
    }
    const uint8_t *end = NULL;
    for (int i = 0; i < st.n_entry; i++) {
        const struct safetensors_entry *const entry = &st.entry[i];
        CHECK(entry->n_dim >= 0 && entry->n_dim <= SAFETENSORS_RANK_MAX && entry->name[0] != '\0');
        CHECK(entry->bytes == (size_t)entry->n_elem * safetensors_dtype_bytes(entry->dtype));
        CHECK(entry->data >= data + 8 && entry->data + entry->bytes <= data + bytes);
        CHECK(end == NULL || entry->data == end);
        end = entry->data + entry->bytes;
    }
    CHECK(end == NULL || end == data + bytes);
    safetensors_free(&st);
    return 0;
}
