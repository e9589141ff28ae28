/* Fuzz target: the reader of overlays on any bytes, and its check against a small model. It must
 * refuse or return slots in order and rows of numbers. Run by `make fuzz`;
 * tests/fuzz/corpus/overlay holds the seeds. */
#include "models/overlay.h"

#include <math.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

static void check_rows(const struct overlay_rows *rows, int64_t n)
{
    CHECK(rows->rows.rows == n && rows->rows.cols > 0);
    CHECK((rows->rows.dtype == DTYPE_I8) == (rows->scale != NULL));
    for (int64_t r = 0; rows->rows.dtype == DTYPE_F32 && r < n; r++) {
        for (int64_t c = 0; c < rows->rows.cols; c++) {
            CHECK(isfinite(row_f32(rows->rows, r)[c]));
        }
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    static const struct model_info info = {
        .d_model = 3,
        .n_memory = 3,
        .memory = {{.n_slot = 16, .d_value = 2},
                   {.n_slot = 16, .d_value = 2},
                   {.n_slot = 16, .d_value = 3, .values_of = 2, .experts = true}}};
    struct overlay overlay;
    struct err err = {0};
    enum err_code code = overlay_parse(&overlay, data, bytes, "fuzz", &err);
    if (code != ERR_OK) {
        CHECK(err.code == code && err.message[0] != '\0' && strchr(err.message, '\n') == NULL);
        CHECK(overlay.n_memory == 0 && overlay.tensor.entry == NULL);
        return 0;
    }
    CHECK(overlay.n_memory > 0 && strlen(overlay.sha256) == SHA256_HEX - 1);
    code = overlay_check(&overlay, &info, NULL, &err);
    for (int i = 0; i < overlay.n_memory; i++) {
        const struct overlay_memory *const memory = &overlay.memory[i];
        for (int64_t j = 1; j < memory->n; j++) {
            CHECK(memory->slot[j - 1] >= 0 && memory->slot[j - 1] < memory->slot[j]);
        }
        CHECK(code != ERR_OK || (memory->memory != 1 && memory->slot[memory->n - 1] < 16));
        check_rows(&memory->values, memory->n);
        if (memory->experts.rows.data != NULL) {
            check_rows(&memory->experts, memory->n);
        }
    }
    overlay_free(&overlay);
    return 0;
}
