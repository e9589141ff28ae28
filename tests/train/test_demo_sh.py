"""models/train/demo.sh: where one twin fails, the other does not go on alone."""

import subprocess
import time

from conftest import TRAIN

PYTHON = """#!/bin/sh
case "$*" in
*--dense*) until [ -f "$RUN/begun" ]; do sleep 0.1; done; exit 3 ;;
*train.py*) trap 'touch "$RUN/ended"; exit 0' TERM; touch "$RUN/begun"
            for i in 1 2 3 4 5 6 7 8 9 10; do sleep 1 & wait $!; done ;;
*) touch "$RUN/went-on" ;;
esac
"""


def test_a_twin_that_fails_ends_the_other(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "meta.json").touch()
    python = tmp_path / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    begin = time.monotonic()
    done = subprocess.run([TRAIN / "demo.sh", tmp_path, tmp_path], capture_output=True, text=True,
                          env={"PYTHON": str(python), "RUN": str(tmp_path), "PATH": "/usr/bin:/bin"})
    assert done.returncode != 0 and (tmp_path / "ended").exists(), done.stderr
    assert not (tmp_path / "went-on").exists() and time.monotonic() - begin < 9
