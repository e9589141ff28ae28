/* Fuzz target: model.sha256 from any bytes. What is accepted must be within the bounds that
 * comparing relies on. Run by `make fuzz`; tests/fuzz/corpus/identity holds the seeds. */
#include "models/identity.h"

#include <math.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    struct identity *it = NULL;
    struct err err = {0};
    const enum err_code code = identity_parse(&it, (const char *)data, bytes, "fuzz", &err);
    if (code != ERR_OK) {
        CHECK(it == NULL && err.code == code && strchr(err.message, '\n') == NULL);
        return 0;
    }
    CHECK(it->n_file >= 0 && it->n_file <= IDENTITY_FILE_MAX);
    for (int i = 0; i < it->n_file; i++) {
        CHECK(strlen(it->file[i].sha256) == SHA256_HEX - 1);
        CHECK(it->file[i].name[0] != '\0' && it->file[i].name[0] != '.');
        CHECK(strchr(it->file[i].name, '/') == NULL);
    }
    CHECK(it->n_token == 0 || (it->n_token >= 2 && it->n_token <= IDENTITY_TOKEN_MAX));
    for (int i = 0; i < it->n_token; i++) {
        CHECK(it->token[i] >= 0 && isfinite(it->logprob[i]) && it->logprob[i] <= 0);
    }
    for (int d = 0; d < DTYPE_N; d++) {
        CHECK(it->tolerance[d] == 0 || (it->tolerance[d] > 0 && isfinite(it->tolerance[d])));
    }
    identity_free(it);
    return 0;
}
