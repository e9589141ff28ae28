"""One browser and one server for all tests of the page. After each test: the page has asked nobody but the
server, and its console holds no error but those that the test has caused."""

import os
import subprocess
import sys

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(ROOT, "tests", "server"))
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from browser import WIDE, Browser  # noqa: E402
from server_harness import Server  # noqa: E402


@pytest.fixture(scope="session")
def server():
    with Server() as s:
        yield s


@pytest.fixture(scope="session")
def window():
    with Browser() as b:
        yield b


@pytest.fixture
def browser(window):
    """Its attribute refusals: parts of lines that the console may hold, such as "429"."""
    window.size(*WIDE)
    window.scheme("light")
    window.refusals = []
    window.console()
    window.requests()
    yield window
    bad = [line for line in window.console() if not any(part in line for part in window.refusals)]
    assert bad == []
    foreign = [url for url in window.requests() if not url.startswith(("http://127.0.0.1:", "about:"))]
    assert foreign == []
    window.driver.get("about:blank")


@pytest.fixture(scope="session")
def golden(tmp_path_factory):
    """golden("xlm/pkm12-2mem"): a model directory made from that case's checkpoint."""
    made = {}

    def convert(case):
        if case not in made:
            folder = os.path.join(ROOT, "tests", "golden", case)
            source = next(os.path.join(folder, name) for name in ("checkpoint.pth", "consolidated.pth")
                          if os.path.exists(os.path.join(folder, name)))
            made[case] = str(tmp_path_factory.mktemp("model") / "model")
            subprocess.run(["/usr/bin/python3", os.path.join(ROOT, "models", "convert", "convert.py"), source,
                            "--output", made[case]], check=True, stdout=subprocess.DEVNULL)
        return made[case]

    return convert
