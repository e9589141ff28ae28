/* Fuzz target: generation_config.json from any bytes. What is accepted must be within the bounds
 * that sampling relies on. Run by `make fuzz`; tests/fuzz/corpus/generation_config holds the
 * seeds. */
#include "models/config.h"
#include "models/generation_config.h"

#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    struct model_sampling s;
    struct err err = {0};
    const enum err_code code = generation_config_parse(&s, (const char *)data, bytes, "fuzz", &err);
    if (code != ERR_OK) {
        CHECK(err.code == code && err.message[0] != '\0' && strchr(err.message, '\n') == NULL);
        return 0;
    }
    CHECK(s.temperature >= 0 && s.temperature <= 2);
    CHECK(s.top_p > 0 && s.top_p <= 1);
    CHECK(s.min_p >= 0 && s.min_p < 1);
    CHECK(s.repetition > 0 && s.repetition <= 10);
    CHECK(s.top_k >= 0 && s.top_k <= CONFIG_VOCAB_MAX);
    return 0;
}
