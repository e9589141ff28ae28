"""The programs that compare.py measures against each other, each behind start(), round() and close().

A round gives the seconds of one step of every kind, {(step, rows): seconds}, and whatever else the program says.
pkmserve and PyTorch stay loaded between rounds and run one for each line that they read; llama.cpp's tool is started for
each round, and does not count the time of loading."""

import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
DECODE_STEPS = 8  # as in server/cli/cmd_bench.c


class Missing(Exception):
    """The program is not there, or cannot do this: says why and what to do."""


def cpu_seconds(pid):
    """Processor time of all threads of a process so far."""
    field = Path("/proc/%d/stat" % pid).read_text().rpartition(")")[2].split()
    return (int(field[11]) + int(field[12])) / os.sysconf("SC_CLK_TCK")


class Kept:
    """A program that prints an empty line when it is ready, and a line of JSON for each line that it reads."""

    def __init__(self, name, command, env=None):
        self.name, self.command, self.env = name, [str(word) for word in command], env
        self.errors = tempfile.TemporaryFile("w+")
        self.process = None

    def start(self):
        self.process = subprocess.Popen(self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors,
                                        text=True, env={**os.environ, **(self.env or {})})
        self.read()

    def read(self):
        line = self.process.stdout.readline()
        if not line:
            self.process.wait()
            self.errors.seek(0)
            why = self.errors.read().strip().splitlines() or ["exit status %d" % self.process.returncode]
            raise Missing("%s: %s" % (self.name, why[-1]))
        return line

    def round(self):
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        result = json.loads(self.read())
        result["seconds"] = {(step["step"], step["rows"]): step["seconds"] for step in result["steps"]}
        return result

    def close(self):
        if self.process is not None:
            self.process.stdin.close()
            self.process.wait()
            self.process.stdout.close()
        self.errors.close()

    def cpu_seconds(self):
        return cpu_seconds(self.process.pid)


def pkmserve_flags(args, model, dtype, placement=None):
    """Of any command. int8 is made of what the file has, value tables too, so they cannot be read in place."""
    return ["--model", model, "--device", "cpu", "--threads", str(args.threads), "--dtype", dtype,
            "--memory-placement", placement or ("device" if dtype == "int8" else "auto")]


def pkmserve(args, model, dtype, isa=None, placement=None):
    env = {"PKMSERVE_ISA": isa} if isa else None
    return Kept("pkmserve", [args.build / "pkmserve", "bench", *pkmserve_flags(args, model, dtype, placement), "--rounds", 0,
                             "--rows", args.rows, "--positions", args.positions, "--max-batch", max(args.batches)], env)


def pkmserve_dtypes(args):
    """What --dtype takes, but auto, and f16, which a CPU does not compute in."""
    text = subprocess.run([args.build / "pkmserve", "help", "bench"], capture_output=True, text=True, check=True).stdout
    line = next(line for line in text.splitlines() if line.split()[:1] == ["--dtype"])
    return [dtype for dtype in line.split()[1].split("|") if dtype not in ("auto", "f16")]


# ---- PyTorch --------------------------------------------------------------------------------------


TORCH_DTYPES = ("f32", "bf16")


def has_torch(python):
    try:
        return subprocess.run([python, "-c", "import torch, numpy"], capture_output=True).returncode == 0
    except OSError:
        return False


def torch_python(args):
    """A Python that has PyTorch: the one that was named, else this one, else the first on the path."""
    for python in [args.torch] if args.torch else [sys.executable, shutil.which("python3"), shutil.which("python")]:
        if python and has_torch(python):
            return python
    raise Missing("PyTorch: %s; pip install torch numpy, and name that Python with BENCH_TORCH or --torch"
                  % ("%s cannot import it" % args.torch if args.torch else "no Python here has it"))


def torch(args, model, dtype):
    if dtype not in TORCH_DTYPES:
        raise Missing("PyTorch: the model of models/train/decode.py has no %s" % dtype)
    return Kept("PyTorch", [torch_python(args), HERE / "torch_worker.py", model, "--dtype", dtype, "--threads",
                            args.threads, "--rows", args.rows, "--positions", args.positions,
                            "--max-batch", max(args.batches)])


# ---- llama.cpp ------------------------------------------------------------------------------------


LLAMA_DTYPES = {"f32": None, "bf16": None, "int8": "Q8_0"}  # what llama-quantize makes of a BF16 file, if it must


class Llama:
    """llama-batched-bench on a GGUF file. Its prompt is as long as the cache is at our decode steps."""

    def __init__(self, name, program, file, args):
        self.name = name
        batches = [1, 1, *args.batches[1:]]  # the first one warms up: it reads the file
        context = max(batches) * (args.positions + DECODE_STEPS + 64)
        self.rows, self.n_line = args.positions, len(batches)
        self.command = [program, "-m", str(file), "-t", str(args.threads), "-tb", str(args.threads), "-c", str(context),
                        "-pps", "-npp", str(self.rows), "-ntg", str(DECODE_STEPS), "-npl", ",".join(map(str, batches)),
                        "--output-format", "jsonl"]

    def start(self):
        self.run()

    def run(self):
        """The lines of a run; a thread of its own prints them, and the end of the process may be quicker."""
        for _ in range(5):
            done = subprocess.run(self.command, capture_output=True, text=True)
            lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
            if done.returncode != 0:
                why = done.stderr.strip().splitlines() or ["no error message"]
                raise Missing("llama.cpp: %s: exit status %d: %s" % (shlex.join(self.command), done.returncode, why[-1]))
            if len(lines) == self.n_line:
                return lines[1:]
        raise Missing("llama.cpp: %s printed %d lines of figures, not %d" % (self.command[0], len(lines), self.n_line))

    def round(self):
        lines = self.run()
        seconds = {("decode", line["pl"]): line["t_tg"] / line["tg"] for line in lines}
        seconds["prefill", self.rows] = lines[0]["t_pp"]
        return {"seconds": seconds}

    def close(self):
        pass

    def cpu_seconds(self):
        return 0  # of a child that has ended: os.times() counts it


def llama_program(args):
    program = shutil.which(args.llama or "llama-batched-bench")
    if program is None:
        raise Missing("llama.cpp: llama-batched-bench is not %s; build it (cmake -B build && cmake --build build --target "
                      "llama-batched-bench llama-quantize llama-server) and name it with BENCH_LLAMA or --llama"
                      % (args.llama or "on the path"))
    return program


def llama_neighbour(args, name, wanted):
    """A program beside llama-batched-bench."""
    program = Path(llama_program(args)).with_name(name)
    if not program.exists():
        raise Missing("llama.cpp: %s is needed for %s; build it (cmake --build build --target %s)" % (program, wanted, name))
    return program


def replace(file, write):
    """A file that is whole or not there."""
    write(file.with_suffix(".part"))
    file.with_suffix(".part").rename(file)


def gguf(args, model, dtype):
    """The model's file for llama.cpp, written once."""
    import gguf_file
    if dtype not in LLAMA_DTYPES:
        raise Missing("llama.cpp: peers.py names no type of GGUF for %s" % dtype)
    file = Path(model).with_suffix(".gguf")
    if not file.exists():
        replace(file, lambda path: gguf_file.write_dense(path, model))
    kind = LLAMA_DTYPES[dtype]
    if kind is not None:
        plain, file = file, file.with_suffix(".%s.gguf" % kind)
        if not file.exists():
            quantize = llama_neighbour(args, "llama-quantize", dtype)
            replace(file, lambda path: subprocess.run([quantize, plain, path, kind], check=True, capture_output=True))
    return file


def llama(args, model, dtype):
    program = llama_program(args)
    return Llama("llama.cpp", program, gguf(args, model, dtype), args)


# ---- rounds ---------------------------------------------------------------------------------------


class Load:
    """What the machine did besides: cores busy with other processes, and cores that the host withheld."""

    def __init__(self, engines):
        self.engines = engines
        self.begin = self.now()

    def now(self):
        field = [int(x) for x in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
        tick = os.sysconf("SC_CLK_TCK")
        idle, steal = field[3] + field[4], field[7]
        ours = sum(os.times()[:4]) + sum(engine.cpu_seconds() for engine in self.engines)
        return sum(field[:8]) / tick, (sum(field[:8]) - idle - steal) / tick, steal / tick, ours

    def text(self):
        total, busy, steal, ours = (b - a for a, b in zip(self.begin, self.now()))
        cores = os.cpu_count() / max(total, 1e-9)
        return "of %d cores %.2f were busy with other work, the host withheld %.2f" % (
            os.cpu_count(), max(0, busy - ours) * cores, steal * cores)


def run_rounds(engines, n, say):
    """Each engine once a round, in rotating order. -> ({engine: [results]}, what else the machine did)"""
    results = {engine: [] for engine in engines}
    load = Load(engines)
    for i in range(n):
        for k in range(len(engines)):
            engine = engines[(i + k) % len(engines)]
            results[engine].append(engine.round())
        say("round %d of %d" % (i + 1, n))
    return results, load.text()
