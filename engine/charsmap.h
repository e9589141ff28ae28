/* The map of characters by which a SentencePiece model normalizes a text (NFKC and the like), as
 * its file holds it. The library follows it without looking at its bounds: it is checked before. */
#ifndef ENGINE_CHARSMAP_H
#define ENGINE_CHARSMAP_H

#include "kernels/err.h"

#include <stddef.h>

/* ERR_FORMAT: some text would lead out of the map; ERR_MEMORY. None (n 0) is fine. Messages begin
 * with path. */
enum err_code charsmap_check(const char *bytes, size_t n, const char *path, struct err *err);

#endif
