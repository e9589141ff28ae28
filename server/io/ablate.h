/* The field "ablate" of requests, and the option --ablate: which memories, heads and slots are
 * switched off or scaled. */
#ifndef SERVER_ABLATE_H
#define SERVER_ABLATE_H

#include "server/io/input.h"

/* Reads and checks it, against the memories of the model. *ablate is empty if the field is absent,
 * or asks for nothing; request_ablate_free ends it, until a request takes it. */
void ablate_read(struct fields *fields, const struct api_limits *limits,
                 struct request_ablate *ablate);
/* Moves what was read into the request. */
void ablate_give(struct request *request, struct request_ablate *ablate);

#endif
