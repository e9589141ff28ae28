/* What the engine does with requests besides running them: checking, publishing, letting go. The
 * front end's half is in engine.h. */
#ifndef ENGINE_REQUEST_H
#define ENGINE_REQUEST_H

#include "engine/engine.h"

/* Checks everything that the engine relies on: lengths against the context (options'
 * max_model_len), ids against the vocabulary, sampling against its bounds. *n_token becomes what
 * the request counts in the queue. ERR_ARGUMENT, the message naming field, limit and value. */
enum err_code request_check(const struct request *request, const struct model_info *info,
                            const struct engine_options *limits, bool has_tokenizer,
                            int64_t *n_token, struct err *err);

/* Engine thread: calls wake unless the front end has left. */
void request_wake(struct request *request);
/* Drops the engine's reference. */
void request_drop(struct request *request);

/* Positions that an item may run through: prompt and max_tokens, or the text. */
int64_t item_position_max(const struct request *request, const struct item *item);

#endif
