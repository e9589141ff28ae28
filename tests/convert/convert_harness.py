"""Lets the tests run the converter, in this process (fast) or as a program."""

import contextlib
import io
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "models" / "convert" / "convert.py"
GOLDEN = ROOT / "tests" / "golden" / "xlm"
sys.path.insert(0, str(PROGRAM.parent))
sys.path.insert(0, str(Path(__file__).parent))


def convert_program(*args, env=None):
    """convert.py as a user runs it."""
    done = subprocess.run([sys.executable, str(PROGRAM), *map(str, args)], capture_output=True,
                          text=True, timeout=120, env={**os.environ, **(env or {})})
    return SimpleNamespace(status=done.returncode, out=done.stdout, err=done.stderr)


def convert(*args):
    """The same without starting a process, and unless told without a probe: for the many small cases."""
    import convert as program
    args = args if "--program" in args else (*args, "--program", "none")
    handler = signal.getsignal(signal.SIGTERM)
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = program.main([str(arg) for arg in args])
        except SystemExit as end:
            status = end.code
    signal.signal(signal.SIGTERM, handler)
    return SimpleNamespace(status=status, out=out.getvalue(), err=err.getvalue())
