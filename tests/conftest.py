"""Programs under test take no huge pages. A server's self-test touches the key/value cache in each layer; with huge pages
the system clears 2 MiB at each of these places, which is much of a start, and there are some thousand starts."""

import ctypes

import pytest

PR_SET_THP_DISABLE = 41  # of linux/prctl.h


def refuse_huge_pages(refuse):
    """What is started from here refuses them, too."""
    ctypes.CDLL(None).prctl(PR_SET_THP_DISABLE, int(refuse), 0, 0, 0)


@pytest.fixture
def huge_pages():
    """What a test starts may take them, as it may where it is deployed."""
    refuse_huge_pages(False)
    yield
    refuse_huge_pages(True)


refuse_huge_pages(True)
