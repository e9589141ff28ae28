/* Stands in for tokenizer_spm.cc where SentencePiece is not installed (`make engine` decides): such
 * a program takes and returns token ids only. A tokenizer that is asked for by name is refused, one
 * that merely lies beside the model is passed over with a warning. */
#include "engine/log.h"
#include "engine/tokenizer.h"

#include <stdio.h>
#include <unistd.h>

enum { PATH_BYTES = 4096 };

enum err_code tokenizer_open(struct tokenizer **tokenizer, const char *dir, const char *path,
                             int n_vocab, struct err *err)
{
    (void)n_vocab;
    *tokenizer = NULL;
    if (path != NULL) {
        return err_set(
            err, ERR_UNSUPPORTED,
            "%s: this program was built without SentencePiece; leave --tokenizer out and "
            "give token ids, with --ids",
            path);
    }
    char file[PATH_BYTES];
    (void)snprintf(file, sizeof file, "%s/tokenizer.model", dir);
    if (access(file, F_OK) == 0) {
        char quoted[PATH_BYTES];
        log_event(LEVEL_WARN, "tokenizer_unused", "path=%s reason=\"built without SentencePiece\"",
                  log_quote(quoted, sizeof quoted, file));
    }
    return ERR_OK;
}

void tokenizer_close(struct tokenizer *tokenizer)
{
    CHECK(tokenizer == NULL);
}

/* No tokenizer ever exists here, so nobody can hold one to ask the following. */

static _Noreturn void impossible(const struct tokenizer *tokenizer)
{
    (void)tokenizer;
    check_failed(__FILE__, __LINE__, "a tokenizer without SentencePiece");
}

const char *tokenizer_kind(const struct tokenizer *tokenizer)
{
    impossible(tokenizer);
}

enum err_code tokenizer_encode(const struct tokenizer *tokenizer, const char *text,
                               size_t text_bytes, bool allow_control, int32_t **ids, size_t *n_ids,
                               size_t **offsets, struct err *err)
{
    (void)text, (void)text_bytes, (void)allow_control;
    (void)ids, (void)n_ids, (void)offsets, (void)err;
    impossible(tokenizer);
}

const char *tokenizer_piece(const struct tokenizer *tokenizer, int32_t id)
{
    (void)id;
    impossible(tokenizer);
}

bool tokenizer_is_control(const struct tokenizer *tokenizer, int32_t id)
{
    (void)id;
    impossible(tokenizer);
}

size_t tokenizer_bytes(const struct tokenizer *tokenizer, int32_t id, char *bytes, size_t bytes_max)
{
    (void)id, (void)bytes, (void)bytes_max;
    impossible(tokenizer);
}

size_t tokenizer_bytes_max(const struct tokenizer *tokenizer)
{
    impossible(tokenizer);
}

bool tokenizer_dummy_prefix(const struct tokenizer *tokenizer)
{
    impossible(tokenizer);
}
