"""hey, a load generator: everything it sends is answered, and it says how fast."""

import re
import shutil
import subprocess

import pytest

BODY = '{"prompt": "The old man", "max_tokens": 16, "ignore_eos": true}'


@pytest.mark.skipif(shutil.which("hey") is None, reason="hey is not installed: apt-get install hey")
@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
def test_all_requests_are_answered(server, path):
    run = subprocess.run(["hey", "-n", "192", "-c", "16", "-m", "POST", "-T", "application/json",
                          "-d", BODY, server.url + path], capture_output=True, text=True)
    print(run.stdout)
    assert run.returncode == 0, run.stderr
    assert re.findall(r"\[(\d+)\]\s+(\d+) responses", run.stdout) == [("200", "192")], run.stdout
    assert "Error distribution" not in run.stdout
