/* POST /v1/score: the probabilities of labels behind texts, as SGLang's clients ask for them.
 *
 * For each item the prompt is query + item (or item + query); nothing of it is scored, and the
 * distribution behind it is read at label_token_ids: what /score calls target_ids. The job is one
 * of score.h, so that waiting, freeing and counting are the same. */
#ifndef SERVER_SCORE_LABELS_H
#define SERVER_SCORE_LABELS_H

#include "server/score/score.h"

/* Like score_parse. */
bool score_labels_parse(struct score_job *job, const char *body, size_t bytes,
                        const struct api_limits *limits, struct api_error *error);
/* Like score_write_piece: {"scores": [[one for each label] for each item], ...}. */
bool score_labels_write_piece(struct score_writer *writer, struct text *out, size_t enough,
                              const struct answer_meta *meta, bool *done, struct api_error *error);

#endif
