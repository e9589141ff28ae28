"""models/python as users install it: pip, from a checkout, and typed for mypy --strict."""

import pathlib
import shutil
import subprocess
import sys

from server_harness import ROOT

USER = """
import numpy as np
from pkmserve import Client
from typing import Union
client = Client({url!r})
total: np.float64 = client.score(["It was.", "a"]).sum_logprob.sum()
text: str = client.generate("It was", max_tokens=2)[0].text
first: int = client.memory("It was").top(1)[0][0]
print(total, text, first)
"""


def run(*command, **keywords):
    done = subprocess.run([sys.executable, "-m", *map(str, command)], capture_output=True, text=True,
                          **keywords)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_pip_installs_it_and_mypy_knows_its_types(server, tmp_path):
    source = tmp_path / "source"  # pip builds in the folder that it is given
    shutil.copytree(pathlib.Path(ROOT) / "models" / "python", source,
                    ignore=shutil.ignore_patterns("__pycache__"))
    run("venv", "--system-site-packages", tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "-q", source], check=True)
    (tmp_path / "user.py").write_text(USER.format(url=server.url))
    shown = subprocess.run([python, "user.py"], cwd=tmp_path, capture_output=True, text=True)
    assert shown.returncode == 0 and float(shown.stdout.split()[0]) < 0, shown.stderr
    assert "no issues" in run("mypy", "--strict", source / "pkmserve", cwd=source)
    run("mypy", "--strict", "--python-executable", python, "user.py", cwd=tmp_path)
