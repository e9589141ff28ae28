/* The one clock: monotonic, never set back, shared by the engine and all who wait for it. */
#ifndef ENGINE_CLOCK_H
#define ENGINE_CLOCK_H

#include <stdint.h>

/* Microseconds since a fixed point in the past. */
int64_t clock_now_us(void);

#endif
