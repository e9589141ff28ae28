"""Runs pkmserve and checks what every command promises: exit status 0, 1 or 2, and errors that are
one line on standard error.

PKMSERVE names the program (default build/pkmserve). Tests use the model that the project ships.
"""

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / os.environ.get("PKMSERVE", "build/pkmserve")
MODEL = ROOT / "models" / "demo"
LIMIT_S = 120  # under a sanitizer, on a busy machine


def run(*arguments, stdin="", env=None, stdout=subprocess.PIPE):
    """Runs it with no PKMSERVE_ variables but those in env. stdin: text or bytes."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("PKMSERVE_")}
    data = stdin if isinstance(stdin, bytes) else stdin.encode()
    done = subprocess.run([str(PROGRAM), *map(str, arguments)], input=data, stdout=stdout,
                          stderr=subprocess.PIPE, timeout=LIMIT_S, env={**clean, **(env or {})})
    done.stdout = (done.stdout or b"").decode()
    done.stderr = done.stderr.decode()
    return done


def ok(*arguments, **keywords):
    """What a run that must succeed prints."""
    done = run(*arguments, **keywords)
    assert done.returncode == 0, "expected exit 0, got %d from pkmserve %s: %s" % (
        done.returncode, " ".join(map(str, arguments)), done.stderr)
    return done.stdout


def fails(status, *arguments, **keywords):
    """The one line of a run that must fail."""
    done = run(*arguments, **keywords)
    assert done.returncode == status, "expected exit %d, got %d: %s" % (
        status, done.returncode, done.stderr)
    assert done.stdout == "", "expected nothing on standard output, got %r" % done.stdout
    lines = done.stderr.splitlines()
    assert len(lines) == 1 and lines[0].startswith("pkmserve: "), (
        "expected one line that begins with 'pkmserve: ', got %r" % done.stderr)
    return lines[0]
