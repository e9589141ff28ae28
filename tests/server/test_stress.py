"""A few seconds of make soak: everything at once, with clients that leave. No error, no growth."""

import os
import subprocess
import sys

import pytest

from server_harness import PROGRAM, ROOT


@pytest.mark.skipif(bool({"asan", "tsan"} & set(PROGRAM.split("/"))),
                    reason="a sanitizer keeps memory")
def test_a_short_soak():
    run = subprocess.run([sys.executable, os.path.join(ROOT, "tests", "bench", "stress.py"), "soak",
                          "--seconds", "4"], capture_output=True, text=True)
    assert run.returncode == 0 and "FAILED" not in run.stdout, run.stdout + run.stderr
    assert "generate" in run.stdout
