"""Starts pkmserve on a converted golden case and talks to it; what the original computed, as data.

PKMSERVE names the program (default build/pkmserve), B the build folder whose golden/<case>/ holds
the converted models (default build; tests/golden/convert_all.sh makes them).
"""

import json
import os
import re
import signal
import struct
import subprocess
import threading
import time
from pathlib import Path

import numpy as np
import requests

from golden_data import (GINI, KL, LOGPROB, LOGPROB_ROW, NAMES, NLL, PPL_RELATIVE,  # noqa: F401
                         ROOT, TOP, WEIGHT, by_slot, expected, expected_arrays)

BUILD = Path(os.environ.get("B", "build"))
# Cases on the CUDA double need not try each of its fast paths at the start: other tests compare these.
for path in ("OVERLAP", "FUSE", "SPLIT", "ATTENTION", "AHEAD"):
    os.environ.setdefault("PKMSERVE_CUDA_" + path, "0")
PROGRAM = Path(os.environ.get("PKMSERVE", BUILD / "pkmserve"))
START_S = 120  # under a sanitizer, on a busy machine


def absolute(path):
    return path if path.is_absolute() else ROOT / path


def model_directory(case):
    return absolute(BUILD) / "golden" / case


# What `--device cuda` opens: the kernels of kernels/cuda on the CPU.
DOUBLE = {"PKMSERVE_CUDA_LIBRARY": str(absolute(BUILD) / "libpkmserve_cudahost.so")}


def convert_all():
    """Makes the model directories that are missing or older than their source."""
    subprocess.run([str(ROOT / "tests" / "golden" / "convert_all.sh")], check=True, timeout=120)


def write_model(directory, tensors, config):
    """A model directory of F32 tensors."""
    header, offset = {}, 0
    for name, t in tensors.items():
        header[name] = {"dtype": "F32", "shape": t.shape, "data_offsets": [offset, offset + t.nbytes]}
        offset += t.nbytes
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)  # tensors are aligned
    (directory / "model.safetensors").write_bytes(
        struct.pack("<Q", len(head)) + head + b"".join(t.tobytes() for t in tensors.values()))
    (directory / "config.json").write_text(json.dumps(config))


class Server:
    """`pkmserve serve` on a free port; stop() ends it and checks that it ended well."""

    def __init__(self, case, *flags):
        if not absolute(PROGRAM).exists():
            raise RuntimeError("%s is missing: run make first, or set PKMSERVE" % PROGRAM)
        self.command = [str(absolute(PROGRAM)), "serve", "--model", str(model_directory(case)),
                        "--host", "127.0.0.1", "--port", "0", "--drain-delay-s", "0", *flags]
        env = {**os.environ, **(DOUBLE if "cuda" in flags else {})}
        self.process = subprocess.Popen(self.command, stderr=subprocess.PIPE, text=True,
                                        stdout=subprocess.DEVNULL, cwd=ROOT, env=env)
        self.log, self.port = [], None
        self.ready = threading.Event()
        self.reader = threading.Thread(target=self.read_log, daemon=True)
        self.reader.start()
        if not self.ready.wait(START_S) or self.port is None:
            self.process.kill()
            raise RuntimeError("no ready line with port= from %s:\n%s"
                               % (self.command, self.tail()))
        self.url = "http://127.0.0.1:%d" % self.port
        self.session = requests.Session()

    def read_log(self):
        for line in self.process.stderr:
            self.log.append(line)
            found = re.search(r"\bready\b.*\bport=(\d+)", line)
            if found:
                self.port = int(found.group(1))
                self.ready.set()
        self.ready.set()  # ended: do not wait any longer

    def tail(self):
        return "".join(self.log[-40:])

    def post(self, route, body, status=200):
        got = self.session.post(self.url + route, json=body, timeout=START_S)
        assert got.status_code == status, "POST %s %s: %d expected, got %d %s" % (
            route, json.dumps(body)[:300], status, got.status_code, got.text[:1000])
        return got.json()

    def get(self, route):
        got = self.session.get(self.url + route, timeout=START_S)
        assert got.status_code == 200, "GET %s: %d %s" % (route, got.status_code, got.text[:1000])
        return got.json()

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        begun = time.monotonic()
        try:
            status = self.process.wait(START_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise RuntimeError("still running %d s after SIGTERM:\n%s"
                               % (time.monotonic() - begun, self.tail())) from None
        self.reader.join(10)
        assert status == 0, "status 0 expected after SIGTERM, got %d:\n%s" % (status, self.tail())


def run_program(*args, text=""):
    """A sub-command of pkmserve: (status, standard output, standard error)."""
    done = subprocess.run([str(absolute(PROGRAM)), *map(str, args)], input=text, text=True,
                          capture_output=True, cwd=ROOT, timeout=START_S)
    return done.returncode, done.stdout, done.stderr


def distribution(z):
    """KL to uniform, gini and the slots that cover 50, 90 and 99 %, as engine/pkm_stats.h defines."""
    z = np.asarray(z, np.float64)
    if (z < 0).any():  # no distribution
        return dict.fromkeys(("kl", "gini", "top50", "top90", "top99"))
    z = z / z.sum()
    sums = np.cumsum(np.sort(z))
    used = z[z > 0]
    return {"kl": np.log(len(z)) + float((used * np.log(used)).sum()),
            "gini": 1 - 2 * float(sums.mean()),
            **{"top%d" % p: len(z) - int(np.argmax(sums >= 1 - p / 100)) for p in (50, 90, 99)}}


def usage(n_slot, slots, weights):
    """What a memory was used for, from all its lookups: the evaluator's and the paper's numbers."""
    by_weight, by_count = np.zeros(n_slot), np.zeros(n_slot)
    np.add.at(by_weight, np.ravel(slots), np.ravel(weights))
    np.add.at(by_count, np.ravel(slots), 1)
    return {"used": int((by_weight != 0).sum()), "w": distribution(by_weight),
            "u": distribution(by_count)}
