"""Programs under test take no huge pages. A server's self-test touches the key/value cache in each layer; with huge pages
the system clears 2 MiB at each of these places, which is much of a start, and there are some thousand starts."""

import ctypes

PR_SET_THP_DISABLE = 41  # of linux/prctl.h; what is started from here has it too
ctypes.CDLL(None).prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0)
