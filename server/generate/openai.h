/* OpenAI's completions, with what vLLM adds to them, as a dialect of generate.h.
 *
 * Clients compare and index what they get, so the layout is exact. logprobs are four parallel
 * arrays over the tokens (with echo the prompt's first; a BOS that the server put in front only
 * with echo_bos, as an empty text): text, log-probability, alternatives, and where the token begins
 * in the text, in code points. Nothing predicts the first token of a prompt: its log-probability
 * and alternatives are null. Alternatives are an object from text to log-probability: the k best,
 * and the chosen token if it is not among them. Two tokens may have the same text (bytes that are
 * no character are U+FFFD): the chosen token keeps it, else the better one, and the others are
 * spelled token_id:N, so that no entry is lost and the largest value is that of the best token.
 * Minus infinity is -9999.0. */
#ifndef SERVER_OPENAI_H
#define SERVER_OPENAI_H

#include "server/generate/generate.h"

extern const struct generate_dialect openai_dialect;

/* Its parts, in openai_write.c. */
extern generate_part *const openai_choice_parts[];
extern generate_part *const openai_event_parts[];

#endif
