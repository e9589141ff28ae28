/* What becomes of a step's memory look-ups, which the model keeps until the next step: the traces of
 * requests that want them, the counts and the sample of all traffic, and the share that overlays have
 * answered. Part of the engine thread's loop. */
#ifndef ENGINE_LOOKUPS_H
#define ENGINE_LOOKUPS_H

#include "engine/loop.h"

/* After the step's finish, before its results are taken. */
void lookups_take(struct engine *engine);

#endif
