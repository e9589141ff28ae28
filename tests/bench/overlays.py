"""What overlays and --memory-counts cost: time of the engine's thread per decode step of 32 sequences,
without and with each.

    python3 tests/bench/overlays.py [--model DIR] [--rows 10000] [--rounds 15] [--against PROGRAM]

The kinds take turns within a round, and what is compared is the CPU time that Linux accounts to the one
thread which computes: so a busy machine disturbs all alike, and little. --against: another build, which
knows no overlays, as the measure of what rows without any may cost."""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request

import numpy as np

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(ROOT, "tests"))
from free_port import free_port  # noqa: E402
from overlay_files import Base, widened  # noqa: E402

BATCH, TOKENS = 32, 24


class Served:
    """A server whose one compute thread is watched."""

    def __init__(self, program, model, *flags):
        self.log = tempfile.NamedTemporaryFile("r")
        self.process = subprocess.Popen(
            [program, "serve", "--model", model, "--port", "0", "--host", "127.0.0.1", "--threads", "1", "--max-seqs",
             str(BATCH), "--prefix-cache", "off", "--drain-delay-s", "0", *flags], stderr=open(self.log.name, "w"))
        while not (ready := re.search(r"event=ready port=(\d+)", open(self.log.name).read())):
            assert self.process.poll() is None, open(self.log.name).read()
            time.sleep(0.05)
        self.url = "http://127.0.0.1:" + ready[1]
        tasks = "/proc/%d/task" % self.process.pid
        self.thread = next(tasks + "/" + task for task in os.listdir(tasks)
                           if open("%s/%s/comm" % (tasks, task)).read().strip() == "engine")

    def cpu_ns(self):
        return int(open(self.thread + "/schedstat").read().split()[0])

    def generate(self, n, **fields):
        body = {"prompt": [[5 + i, 17, 33, 99, 150, 7] for i in range(n)], "max_tokens": TOKENS, "temperature": 1,
                "seed": 1, "ignore_eos": True, **fields}
        request = urllib.request.Request(self.url + "/generate", json.dumps(body).encode())
        return urllib.request.urlopen(request).read()

    def step_us(self, **fields):
        """CPU time per step, its one prefill included."""
        before = self.cpu_ns()
        self.generate(BATCH, **fields)
        return (self.cpu_ns() - before) / TOKENS / 1000

    def stop(self):
        self.process.terminate()
        self.process.wait()


def rows_of(base, slots):
    """-> the table's rows in its own type, as Base.overlay takes them, and in f32"""
    rows, dtype = base.table(0)[slots], base.dtype(0)
    if dtype == "BF16":
        return rows, widened(rows)
    if dtype != "I8":
        return rows, rows.astype("<f4")
    begin, end = base.place(base.name(0) + ".scale")
    scale = np.frombuffer(base.data[begin:end], "<f4")[slots]
    return (rows, scale), rows * scale[:, None]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--model", default=os.path.join(ROOT, "models", "demo"))
    parser.add_argument("--program", default=os.path.join(ROOT, "build", "pkmserve"))
    parser.add_argument("--rows", type=int, default=10000)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--against")
    asked = parser.parse_args()
    base = Base(asked.model)
    table = base.table(0)
    slots = np.sort(np.random.default_rng(1).choice(len(table), min(asked.rows, len(table)), replace=False))
    with tempfile.TemporaryDirectory() as folder:
        for name, dtype, rows in zip(("x", "f32"), (base.dtype(0), "F32"), rows_of(base, slots)):
            with open(os.path.join(folder, name + ".safetensors"), "wb") as file:
                file.write(base.overlay({0: (slots, dtype, rows)}))
        ours = Served(asked.program, asked.model, "--overlay-dir", folder)
    kinds = {"without": (ours, {}), "with %d rows" % len(slots): (ours, {"overlay": "x"}),
             "the same in f32": (ours, {"overlay": "f32"}),
             "--memory-counts on": (Served(asked.program, asked.model, "--memory-counts", "on",
                                         "--admin-port", str(free_port())), {})}
    if asked.against:
        kinds = {"the other build": (Served(asked.against, asked.model), {}), **kinds}
    times = {kind: [] for kind in kinds}
    for served, fields in kinds.values():
        served.step_us(**fields)
    for _ in range(asked.rounds):
        for kind, (served, fields) in kinds.items():
            times[kind].append(served.step_us(**fields))
    first = next(iter(times))
    print("%d slots, %d rounds; CPU time of a step of %d sequences" % (len(table), asked.rounds, BATCH))
    for kind, each in times.items():
        ratio = statistics.median(a / b for a, b in zip(each, times[first]))
        print("%-22s median %8.1f us, best %8.1f us, %.3f of \"%s\" (median of the rounds)"
              % (kind, statistics.median(each), min(each), ratio, first))
    for served in {served for served, _ in kinds.values()}:
        served.stop()


if __name__ == "__main__":
    main()
