"""One server with the shipped model for all tests that do not change it."""

import pytest

from server_harness import Server


@pytest.fixture(scope="session")
def server():
    with Server() as s:
        yield s
