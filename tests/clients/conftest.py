"""The clients talk to one server; nothing leaves the machine."""

import os
import sys

import pytest

os.environ.update(HF_HUB_DISABLE_TELEMETRY="1", DO_NOT_TRACK="1")
sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))),
                                "server"))
from server_harness import Server  # noqa: E402


@pytest.fixture(scope="session")
def server():
    with Server() as s:
        yield s
