/* The field "overlay" of requests: which overlays' rows are read instead of the base's. */
#ifndef SERVER_OVERLAY_H
#define SERVER_OVERLAY_H

#include "server/io/input.h"
#include "server/json/text.h"

/* Takes the newest versions of what the request asks for: a name or a list of names in "overlay",
 * the name behind the colon in "model", and what limits->binding adds to each request of its key.
 * *taken is empty where there is none; overlays_drop ends it, until a request takes it. */
void overlay_read(struct fields *fields, const struct api_limits *limits,
                  struct request_overlays *taken);
/* Moves what was taken into the request. */
void overlay_give(struct request *request, struct request_overlays *taken);

/* "name", "version" and "sha256" of an object that is open. */
void overlay_put_info(struct text *out, const struct overlay_info *info);
/* "overlay": [...] for a request that has overlays; otherwise nothing. */
void overlay_put(struct text *out, const struct request_overlays *taken);

#endif
