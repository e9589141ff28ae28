/* The fields that the requests of several dialects share: one reader each.
 *
 * Called by the read functions of the dialects (generate.h). Errors go to fields->error, which
 * keeps the first one; only functions that use what was read return whether there was one. */
#ifndef SERVER_GENERATE_READ_H
#define SERVER_GENERATE_READ_H

#include "server/generate/generate.h"

/* temperature, top_p, top_k, min_p, the penalties, ignore_eos. What the request leaves out is taken
 * from defaults: other servers' dialects have their own. */
void generate_read_numbers(struct fields *fields, struct sampling *sampling,
                           const struct model_info *info, const struct model_sampling *defaults);
/* seed, drawn if not given. OpenAI's seeds are signed, and for its clients -1 means none, as for
 * vLLM; the others below 0 are seeds like any. */
void generate_read_seed(struct fields *fields, struct sampling *sampling, bool is_signed);
/* stop: a string or a list of strings. */
void generate_read_stop(struct fields *fields, struct sampling *sampling,
                        const struct api_limits *limits);
/* stop_token_ids, allowed_token_ids, logit_bias. */
void generate_read_ids(struct fields *fields, struct sampling *sampling,
                       const struct api_limits *limits);
/* n, which with temperature 0 must be 1. After generate_read_numbers. */
void generate_read_n(struct fields *fields, struct generate_job *job,
                     const struct sampling *sampling);

/* best_of, which must equal n: drawing more samples than are shown would require choosing among
 * them. After n. */
void generate_read_best_of(struct fields *fields, const struct generate_job *job);

/* The prompts in field name, tokenised, with a BOS if the model has one and bos is set. false:
 * there is an error, perhaps an earlier one: tokenising is expensive, and wrong requests are not
 * worth it. */
bool generate_read_prompt(struct fields *fields, struct generate_job *job, const char *name,
                          bool bos, const struct api_limits *limits);
/* max_tokens: the number given in field name, or if asked is -1 the fallback; or, if that is less,
 * what the context leaves after the shortest prompt. Items with longer prompts get less. min_tokens
 * must have been read. */
bool generate_fit(struct fields *fields, struct generate_job *job, struct sampling *sampling,
                  const struct api_limits *limits, const char *name, int asked, int fallback);

#endif
