/* Stands in for tokenizer_spm.cc where SentencePiece is not installed (`make engine` decides): such
 * a program knows vocabularies that are lists of words only. A SentencePiece model that is asked
 * for by name is refused, one that merely lies beside the model is passed over with a warning. */
#include "engine/log.h"
#include "engine/tokenizer_impl.h"

#include <unistd.h>

enum { QUOTED_BYTES = 4096 };

enum err_code tokenizer_spm_open(struct tokenizer **tokenizer, const char *path, bool must_exist,
                                 int n_vocab, struct err *err)
{
    (void)n_vocab;
    *tokenizer = NULL;
    if (must_exist) {
        return err_set(
            err, ERR_UNSUPPORTED,
            "%s: this program was built without SentencePiece; leave --tokenizer out and "
            "give token ids, with --ids",
            path);
    }
    if (access(path, F_OK) == 0) {
        char quoted[QUOTED_BYTES];
        log_event(LEVEL_WARN, "tokenizer_unused", "path=%s reason=\"built without SentencePiece\"",
                  log_quote(quoted, sizeof quoted, path));
    }
    return ERR_OK;
}
