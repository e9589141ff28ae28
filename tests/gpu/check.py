"""make check-gpu: builds the engine on a machine with a GPU, checks it there, measures it, writes a report.

    check.py [--build build/gpu-check] [--part right|fast|rest|serve|cores] [--only PART,...]
             [--budget SECONDS] [--report FILE] [--no-build]
    check.py --rehearse DEVICE --build BUILD [...]     the same with tiny sizes on any backend

Needs nvcc, a GPU, a C compiler, make, Python; NumPy for golden and bits, PyTorch for the comparison; no network.
--part cores, which measures the CPU backend by threads, needs no GPU and no nvcc; --part serve, the server over
HTTP, needs libmicrohttpd, which build/gpu-kit has. Neither is part of what runs without --part.
The parts run one after the other, each within a budget, all of them within eight minutes, or those of one --part,
with twice the budgets, within nine. The report is written after each, so a part that fails, hangs or is cut
costs the others nothing; it goes to the folder that the environment's OUT names, if there is one, else to
tests/bench/results. Beside it, as FILE with the suffix .log, stands all that each command said. Exit status:
0 all is well, 1 something failed, 2 the check could not start (then there is neither).
"""

import argparse
import os
import shlex
import signal
import sys
import time
import traceback
from pathlib import Path

import cores
import machine
import ops
import report
import serve
import speed
from run import ROOT, Run, say

# part -> its budget in seconds, in the order of running; what one leaves, the later ones may use. The sum of all
# but those apart is below eight minutes.
BUDGETS = {"machine": 10, "build": 120, "prepare": 10, "ops": 55, "bits": 35, "golden": 40,
           "sanitizers": 45, "speed": 90, "optimes": 15, "torch": 60, "serve": 190, "cores": 190}
APART = {"serve", "cores"}  # only with --part or --only
# The same as three commands, for a machine that lends ten minutes at a time; each builds what is not built.
GROUPS = {"right": ["build", "prepare", "ops", "bits"],
          "fast": ["build", "speed", "optimes"],
          "rest": ["build", "prepare", "golden", "sanitizers", "torch"],
          "serve": ["build", "serve"],
          "cores": ["build", "cores"]}
BUDGET, GROUP_BUDGET, GROUP_PATIENCE = 480, 520, 2
PROGRAMS = ["pkmserve-engine", "tests/kernels/run_check", "tests/gpu/forward",
            "tests/bench/bench_device"]


def needs_gpu(run):
    return not set(run.wanted) <= {"build", "cores"}


def programs(run):
    if not needs_gpu(run):
        return [cores.PROGRAM]
    return [*(PROGRAMS if set(run.wanted) - {"build", "serve"} else []), *(serve.PROGRAMS if "serve" in run.wanted else [])]


def make(run, *arguments):
    # Other compilers have other warnings: they are for the development machine.
    return run.command(["make", "-k", "-j%d" % (os.cpu_count() or 1), "B=%s" % run.build, "WARN=-Wall", *arguments])


def build(run):
    """Everything that is needed, in one make: what fails to build does not hold up the rest."""
    if not needs_gpu(run):
        fail_on_errors(run, make(run, "CUDA=0", *(str(run.build / name) for name in programs(run))))
        return
    libraries = run.command(["sh", ".ci/engine-libs"], 20)
    if not libraries.good:
        run.fail(libraries.why())
    targets = [str(run.build / name) for name in ["libpkmserve_cuda.so", *programs(run)]]
    fail_on_errors(run, make(run, "NVCC_WARN=", "CUDA=1", "CUDA_ARCH=" + run.machine["arch"], *libraries.out.split(), *targets))


def fail_on_errors(run, done):
    """What the compilers say, if anything is wrong."""
    if not done.good:
        wrong = [line for line in (done.err + done.out).splitlines()
                 if "rror" in line or "undefined" in line]
        run.fail(" / ".join(wrong[:4])[:600] or done.why())


def require(run):
    """Notes programs that are missing; the parts that use them will fail by name."""
    for name in programs(run):
        if not (run.build / name).exists():
            run.fail("%s is not there" % (run.build / name))


def with_numpy(part):
    """A part of golden.py: not run where this Python has no NumPy."""
    def call(run):
        try:
            import golden
        except ModuleNotFoundError as e:
            if e.name != "numpy":
                raise
            run.note("not run: %s has no NumPy; PYTHON names another Python" % run.python)
            return
        getattr(golden, part)(run)
    return call


def parts(options):
    table = {"build": build, "prepare": with_numpy("prepare"), "ops": ops.check_ops,
             "bits": with_numpy("check_bits"), "golden": with_numpy("check_golden"),
             "sanitizers": ops.check_sanitizers, "speed": speed.check_speed,
             "optimes": speed.check_optimes, "torch": speed.check_torch,
             "serve": serve.check_serve, "cores": cores.check_cores}
    wanted = options.only.split(",") if options.only else GROUPS.get(options.part, [p for p in table if p not in APART])
    for name in set(wanted) - set(table):
        sys.exit("check-gpu: no part %s; there are %s" % (name, ", ".join(table)))
    return [(name, table[name]) for name in table
            if name in wanted and not (name == "build" and options.no_build)]


def run_parts(run, options, table, path):
    for name, part in table:
        if name != "build" and needs_gpu(run):
            run.hold()
        run.begin(name, BUDGETS[name] * patience(options))
        try:
            part(run)
            if name == "build":
                require(run)
        except Exception as e:  # a bug of the check itself must not cost the other parts
            traceback.print_exc()
            run.fail("the check itself: %s: %s" % (type(e).__name__, e))
        run.end()
        report.write(run, path)
    run.release()


def summary(run, path):
    say("%s, %s; %d failures, %d notes" % (path, run.log.name, len(run.failures), len(run.notes)))
    for part, text in run.failures:
        say("FAILED %s: %s" % (part, text))


def parse(argv):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--build", type=Path, default=Path("build/gpu-check"))
    parser.add_argument("--part", choices=GROUPS)
    parser.add_argument("--budget", type=float)
    parser.add_argument("--report", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--no-build", action="store_true")
    parser.add_argument("--rehearse", metavar="DEVICE")
    parser.add_argument("--patience", type=float, default=10, help="rehearsal: budgets times this")
    return parser.parse_args(argv)


def patience(options):
    """What budgets are multiplied with."""
    return (GROUP_PATIENCE if options.part else 1) * (options.patience if options.rehearse else 1)


def report_path(options):
    """A part has a report of its own."""
    out = os.environ.get("OUT", "")
    folder = Path(out) if os.path.isdir(out) else Path("tests/bench/results")
    name = "gpu-" + time.strftime("%Y-%m-%d") + ("-" + options.part if options.part else "")
    return options.report or folder / (name + ".md")


def start(options, wanted):
    """A Run of the wanted parts on this machine, or None after one line that says why not."""
    device, small = options.rehearse or "cuda", options.rehearse is not None
    budget = options.budget or (GROUP_BUDGET if options.part else BUDGET)
    budget *= options.patience if small else 1
    run = Run(options.build, device, small, sys.executable, time.monotonic() + budget)
    run.wanted = wanted
    run.begin("machine", BUDGETS["machine"], quiet=True)
    missing = machine.query(run)
    if missing is not None and not small and needs_gpu(run):
        print("check-gpu: " + missing, file=sys.stderr)
        return None
    run.gpu = missing is None and not small
    run.machine["command"] = shlex.join(["tests/gpu/check.py", *sys.argv[1:]])
    if run.gpu:
        os.environ.update(machine.library_environment(run))
        library = (options.build / "libpkmserve_cuda.so").absolute()
        os.environ["PKMSERVE_CUDA_LIBRARY"] = str(library)
    run.end()
    return run


def main(argv):
    os.chdir(ROOT)
    options = parse(argv)
    table = parts(options)
    run = start(options, [name for name, _ in table])
    if run is None:
        return 2
    path = report_path(options)
    run.log_to(path.with_suffix(".log"))

    def cut(number, frame):
        run.stop()
        run.fail("cut from outside by signal %d" % number)
        report.write(run, path)
        os._exit(1)
    signal.signal(signal.SIGTERM, cut)
    signal.signal(signal.SIGINT, cut)
    run_parts(run, options, table, path)
    summary(run, path)
    return 1 if run.failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
