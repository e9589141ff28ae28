/* Fuzz target: bodies of POST /tokenize and /detokenize. The first byte chooses the route, the rest
 * is the body; every answer must be JSON. Needs models/demo/tokenizer.model, from the repository
 * root; does nothing without. Run by `make fuzz`; tests/fuzz/corpus/tokens holds the seeds. */
#include "engine/tokenizer.h"
#include "server/api/routes.h"
#include "tests/fuzz/fuzz_json.h"

#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

enum { VOCAB = 4096 };

/* The whole answer, put together from its pieces. */
static void collect(struct exchange *x, struct text *answer)
{
    enum exchange_next next = EXCHANGE_ANSWER;
    do {
        if (x->work != NULL) {
            text_clear(&x->out);
            next = x->work->next(x, x->work_data);
            CHECK(next != EXCHANGE_WAIT);
        }
        CHECK(!x->out.failed);
        text_add(answer, x->out.data, x->out.n);
    } while (next == EXCHANGE_STREAM);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    static struct tokenizer *tokenizer;
    static struct model_info info = {
        .n_vocab = VOCAB, .context = 64, .bos_id = 1, .eos_id = 1, .add_bos = true};
    static struct server server;
    if (server.limits.info == NULL) {
        (void)tokenizer_open(&tokenizer, "models/demo", NULL, NULL, VOCAB, NULL);
        server.limits =
            (struct api_limits){.info = &info, .model_name = "m", .context = info.context};
    }
    if (bytes == 0 || tokenizer == NULL) {
        return 0;
    }
    server.limits.tokenizer = tokenizer;
    server.limits.strict = (data[0] & 2) != 0;
    struct exchange *const x = calloc(1, sizeof *x);
    CHECK(x != NULL);
    x->is_post = true;
    text_add(&x->body, (const char *)data + 1, bytes - 1);
    CHECK(!x->body.failed);
    if ((data[0] & 1) == 0) {
        api_tokenize(&server, x);
    } else {
        api_detokenize(&server, x);
    }
    struct text answer = {0};
    collect(x, &answer);
    CHECK(x->status == 200 || (x->status >= 400 && x->code != NULL));
    fuzz_json(&answer);
    text_free(&answer);
    exchange_free(x);
    return 0;
}
