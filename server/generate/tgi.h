/* The dialect of Hugging Face's text-generation-inference, over generate.h: "inputs" and
 * "parameters".
 *
 * Its rules where they differ from ours: without "parameters" tokens are drawn, with them only if
 * do_sample is true or one of temperature, top_k, top_p and typical_p says how, else the likeliest
 * is taken; a stop string stays at the end of the text; streams have no [DONE]; errors are
 * {"error", "error_type"}. truncate keeps the last tokens of a prompt. What would be marked or
 * adapted is refused by name. */
#ifndef SERVER_TGI_H
#define SERVER_TGI_H

#include "server/generate/generate.h"

extern const struct generate_dialect tgi_dialect;        /* POST /generate with "inputs" */
extern const struct generate_dialect tgi_stream_dialect; /* POST /generate_stream */
extern const struct generate_dialect tgi_root_dialect;   /* POST /: whole as a list, or stream */

extern const struct exchange_errors tgi_errors; /* in tgi_write.c */

/* Their parts, in tgi_write.c. */
extern generate_part *const tgi_choice_parts[];
extern generate_part *const tgi_event_parts[];

#endif
