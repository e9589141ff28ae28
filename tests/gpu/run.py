"""Runs the commands of the check on a GPU, each within its time, and keeps what they said.

A part of the check has a budget of its own, and what earlier parts left of theirs. A command that outlasts its
time is killed with all its children; what it printed until then is kept. Nothing in here raises on a failing
command: a failure is a line of the report.
"""

import json
import os
import shlex
import signal
import subprocess
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
EAGER = {"PKMSERVE_CUDA_GRAPHS": "0"}
OVERLAP = {"PKMSERVE_CUDA_OVERLAP": "1"}
SPLIT = {"PKMSERVE_CUDA_SPLIT": "1"}
MMA = {"PKMSERVE_CUDA_ATTENTION": "1"}
OWN = {"PKMSERVE_CUDA_LT": "0"}
GEMV = {"PKMSERVE_CUDA_GEMM": "0"}
APART = {"PKMSERVE_CUDA_FUSE": "0"}
# Of all commands but where they say otherwise: the fast paths that bits are compared with doing without.
PLAIN = {"PKMSERVE_CUDA_OVERLAP": "0", "PKMSERVE_CUDA_SPLIT": "0", "PKMSERVE_CUDA_ATTENTION": "0"}
# As serve runs, but without its self-test: what speed is measured with.
FAST = {**OVERLAP, **SPLIT, **MMA}
NO_OVERLAP = {"PKMSERVE_CUDA_OVERLAP": "0"}
NO_SPLIT = {"PKMSERVE_CUDA_SPLIT": "0"}
NO_MMA = {"PKMSERVE_CUDA_ATTENTION": "0"}
NO_DRAWN = {"PKMSERVE_CUDA_DRAWN": "0"}
LATE_MAX = 40  # names in one line of the report
LOG_MAX = 200000  # characters of one stream in the log; its middle is left out


@dataclass
class Done:
    """A command that has ended."""
    args: list
    status: int        # as the shell has it; 124: its time was over
    out: str
    err: str
    seconds: float

    @property
    def good(self):
        return self.status == 0

    @property
    def late(self):
        """Cut or never started since its time was over: that is no failure of what it checks."""
        return self.status == 124

    def why(self):
        """The end of what it said, for a line of the report."""
        lines = [line for line in (self.err + "\n" + self.out).splitlines() if line.strip()]
        said = (self.err.strip().splitlines() or lines or ["it said nothing"])[-1]
        how = "its time (%.0f s) was over" % self.seconds if self.late else (
            "exit status %d" % self.status)
        return "%s: %s" % (how, said[:300])

    def log_entry(self, part, env):
        """All of it, for the log."""
        settings = ["%s=%s" % item for item in sorted((env or {}).items())]
        command = shlex.join([*(["env"] if env else []), *settings, *self.args])
        lines = ["==== %s: %s" % (part, command),
                 "exit status %d after %.1f s" % (self.status, self.seconds)]
        for name, text in (("stdout", self.out), ("stderr", self.err)):
            if len(text) > LOG_MAX:
                text = text[:LOG_MAX // 2] + "\n[...]\n" + text[-LOG_MAX // 2:]
            lines += ["---- " + name, text.rstrip("\n")] if text else []
        return "\n".join(lines) + "\n\n"

    def records(self):
        """The JSON lines among its output."""
        found = []
        for line in self.out.splitlines():
            try:
                found.append(json.loads(line)) if line.startswith("{") else None
            except ValueError:
                pass  # the last line of a program that was cut
        return found


@dataclass
class Run:
    """The state of the whole check: what is run how, what failed, what was found."""
    build: Path
    device: str                     # cuda; a rehearsal may name another
    small: bool                     # sizes for a rehearsal
    python: str
    deadline: float                 # time.monotonic()
    gpu: bool = False               # a real one
    wanted: list = field(default_factory=list)    # the names of all parts
    machine: dict = field(default_factory=dict)
    failures: list = field(default_factory=list)  # (part, text)
    notes: list = field(default_factory=list)     # (part, text): not run, or worth knowing
    tables: dict = field(default_factory=dict)    # part -> list of Markdown rows of its own
    records: list = field(default_factory=list)   # JSON lines of the benchmarks
    seconds: dict = field(default_factory=dict)   # part -> time taken
    late: list = field(default_factory=list)      # what the time of the running part did not suffice for
    log: Path = None                # where all that commands say is kept; before it is known, in early
    early: list = field(default_factory=list)
    part: str = ""
    part_end: float = field(default_factory=time.monotonic)
    holder: subprocess.Popen = None
    running: set = field(default_factory=set)
    lock: threading.Lock = field(default_factory=threading.Lock)

    # ---- parts -------------------------------------------------------------------------------

    def begin(self, part, seconds, quiet=False):
        now = time.monotonic()
        self.part = part
        self.part_end = min(self.part_end + seconds, self.deadline)
        self.seconds[part] = -now
        if not quiet:
            say("%s (at most %.0f s)" % (part, max(0, self.part_end - now)))

    def end(self):
        self.seconds[self.part] += time.monotonic()
        if self.late:
            more = ["and %d more" % (len(self.late) - LATE_MAX)] if len(self.late) > LATE_MAX else []
            self.note("not run, the part's time was over: " + "; ".join(self.late[:LATE_MAX] + more))
        self.late = []

    def left(self):
        return self.part_end - time.monotonic()

    def fail(self, text):
        with self.lock:
            self.failures.append((self.part, text))
        say("  FAILED: " + text)

    def note(self, text):
        with self.lock:
            self.notes.append((self.part, text))
        say("  " + text)

    def lose(self, what, done, said=""):
        """A command that did not end well has failed; but what its time did not suffice for is not run."""
        if not done.late:
            self.fail("%s: %s" % (what, said or done.why()))
            return
        with self.lock:
            self.late.append(what + (" (cut after %.0f s)" % done.seconds if done.seconds > 0 else ""))

    # ---- the log -----------------------------------------------------------------------------

    def log_to(self, path):
        """From now on; begins with what commands have said so far."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with self.lock:
            path.write_text("".join(self.early))
            self.log = path

    def keep(self, entry):
        with self.lock:
            if self.log is None:
                self.early.append(entry)
            else:
                with self.log.open("a") as file:
                    file.write(entry)

    # ---- commands ----------------------------------------------------------------------------

    def program(self, name):
        return str(self.build / name)

    def command(self, args, seconds=None, env=None):
        """Runs it in the repository's root, for at most so long and no longer than the part."""
        done = self.run_command(args, seconds, env)
        self.keep(done.log_entry(self.part, env))
        return done

    def run_command(self, args, seconds, env):
        limit = self.left() if seconds is None else min(seconds, self.left())
        args = [str(a) for a in args]
        begun = time.monotonic()
        if limit <= 0.2:
            return Done(args, 124, "", "not started: no time was left for it", 0.0)
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            try:
                process = subprocess.Popen(args, stdout=out, stderr=err, stdin=subprocess.DEVNULL,
                                           cwd=ROOT, env={**os.environ, **PLAIN, **(env or {})},
                                           start_new_session=True)
            except OSError as e:
                return Done(args, 127, "", str(e), 0.0)
            with self.lock:
                self.running.add(process.pid)
            try:
                status = process.wait(limit)
            except subprocess.TimeoutExpired:
                status = 124
            kill_group(process)  # it may have left children behind
            with self.lock:
                self.running.discard(process.pid)
            out.seek(0)
            err.seek(0)
            return Done(args, status if status >= 0 else 128 - status,
                        out.read().decode(errors="replace"), err.read().decode(errors="replace"),
                        time.monotonic() - begun)

    def hold(self):
        """Keeps a process with a context on the device until release: without a persistence daemon the driver starts
        anew, for seconds, for each process that finds no other. Not where the device takes one process alone."""
        if self.holder is None and not self.is_exclusive and os.access(self.program("tests/gpu/forward"), os.X_OK):
            self.holder = subprocess.Popen([self.program("tests/gpu/forward"), "--hold", self.device], cwd=ROOT,
                                           stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
                                           stderr=subprocess.DEVNULL)  # why it fails, the commands will say

    def release(self):
        if self.holder is not None:
            self.holder.stdin.close()
            try:
                self.holder.wait(10)
            except subprocess.TimeoutExpired:
                self.holder.kill()
                self.holder.wait()
            self.holder = None

    @property
    def is_exclusive(self):
        """Whether the device takes one process at a time."""
        return self.machine.get("compute mode", "").startswith("Exclusive")

    def parallel(self, jobs, n_at_once):
        """Calls job() of each (key, job), some at once; (key, result) in the order of the jobs."""
        with ThreadPoolExecutor(1 if self.is_exclusive else n_at_once) as pool:
            futures = [(key, pool.submit(job)) for key, job in jobs]
            return [(key, future.result()) for key, future in futures]

    def stop(self):
        """Ends what still runs."""
        with self.lock:
            for pid in self.running:
                try:
                    os.killpg(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass


def kill_group(process):
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def say(text):
    print("check-gpu: " + text, flush=True)
