/* What a model is, as JSON: for /info and for `inspect --json`. */
#ifndef SERVER_IO_MODEL_JSON_H
#define SERVER_IO_MODEL_JSON_H

#include "models/model.h"
#include "server/json/text.h"

/* Some fields have one name in /info and another in inspect. Clients read both, so both stay. */
enum model_json_form { MODEL_JSON_INFO, MODEL_JSON_INSPECT };

/* Writes the fields that both have into the open object: family, sizes, tokenizer (its kind, NULL =
 * none), languages and memories. */
void model_json_write(struct text *out, enum model_json_form form, const struct model_info *info,
                      const char *tokenizer);

#endif
