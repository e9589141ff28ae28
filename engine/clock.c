/* The one clock: see clock.h. */
#include "engine/clock.h"

#include "kernels/err.h"

#include <time.h>

int64_t clock_now_us(void)
{
    struct timespec now;
    CHECK(clock_gettime(CLOCK_MONOTONIC, &now) == 0);
    return (int64_t)now.tv_sec * 1000000 + now.tv_nsec / 1000;
}
