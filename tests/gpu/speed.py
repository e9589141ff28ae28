"""The benchmark: which programs measure what, one after the other on a quiet GPU.

bench_device measures the engine's backend, baseline.py the same model in PyTorch; both print JSON lines, which
all end up in run.records. The report puts them beside one another.
"""

import json

import machine
from run import APART, EAGER, FAST, NO_DRAWN, NO_MMA, NO_OVERLAP, NO_SPLIT

SMALL = ["--layers", "3", "--width", "64", "--heads", "4", "--ff", "256", "--vocab", "500",
         "--positions", "64", "--memory-layer", "1", "--k", "8", "--key-width", "32", "--keys", "32"]
KEYS = [128, 256, 1024, 2048]  # per half; 512 is model A's own
FLAT_KEYS = [128 ** 2, 256 ** 2, 512 ** 2]
DEEP = ["--layers", "24", "--memory-layer", "-1"]
WIDE = ["--width", "1600", "--ff", "6400"]
MEMORY_ROWS = "memory:1,32,256,1024"
PROMPTS = "512,1024,2048,4096,8192,16384"

# tag, flags, parts, environment. The tag tells runs of one shape apart in the report. Most telling first:
# what the time does not suffice for is at the end.
RUNS = [
    ("", [], ["rates", "decode:1,8,32,128,256", "prefill:" + PROMPTS, "score:" + PROMPTS,
              MEMORY_ROWS], {}),
    ("no overlap", [], ["decode:1,8,32"], NO_OVERLAP),
    ("ahead", ["--ahead", "on"], ["decode:1,8,32,256"], {}),
    ("apart", [], ["decode:1,8"], APART),
    ("no split", [], [MEMORY_ROWS], NO_SPLIT),
    ("no mma", [], ["prefill:1024,4096,16384", "score:4096"], NO_MMA),
    ("no drawn", [], ["decode:1,32,256"], NO_DRAWN),
    ("", DEEP, ["decode:1,32", "prefill:4096"], {}),
    ("long", ["--positions", "16384"], ["decode:1,8"], {}),
    ("host", ["--placement", "host"], ["decode:1,8,32", "memory:1,32,256"], {}),
    *[("", ["--keys", str(n)], ["decode:1,32", "prefill:4096", "memory:1,32,1024"], {})
      for n in KEYS],
    ("fast", ["--deterministic", "off"], ["decode:1,32,256", "prefill:512,4096,16384"], {}),
    ("eager", [], ["decode:1,8,32"], EAGER),
    ("top_p", ["--top-p", "0.9"], ["decode:1,32"], {}),
    ("", WIDE, ["decode:1,32", "prefill:4096"], {}),
    ("", WIDE + DEEP, ["decode:1,32", "prefill:4096"], {}),
    ("f32", ["--dtype", "f32"], ["decode:1,32", "prefill:512,4096"], {}),
    ("f32 fast", ["--dtype", "f32", "--deterministic", "off"], ["decode:1,32", "prefill:512,4096"], {}),
    ("ops", [], ["ops:1,32,256,2048"], {}),
    *[("", ["--kind", "flat", "--keys", str(n)], ["decode:1", "memory:1,32"], {})
      for n in FLAT_KEYS],
]
SMALL_RUNS = [
    ("", [], ["rates", "decode:1,2", "prefill:64", "score:64", "memory:1,2"], {}),
    ("no overlap", [], ["decode:1,2"], NO_OVERLAP),
    ("ahead", ["--ahead", "on"], ["decode:1,2"], {}),
    ("apart", [], ["decode:1,2"], APART),
    ("no split", [], ["memory:1,2"], NO_SPLIT),
    ("no mma", [], ["prefill:64"], NO_MMA),
    ("no drawn", [], ["decode:1,2"], NO_DRAWN),
    ("", ["--memory-layer", "-1", "--layers", "4"], ["decode:1"], {}),
    ("long", ["--positions", "128"], ["decode:1"], {}),
    ("host", ["--placement", "host"], ["decode:1"], {}),
    ("top_p", ["--top-p", "0.9"], ["decode:1"], {}),
    ("", ["--kind", "flat", "--keys", "64"], ["memory:1"], {}),
    ("ops", [], ["ops:1"], {}),
]


def eager_steps(records):
    """Row counts of the decode steps that should have become graphs and did not."""
    return [r["rows"] for r in records if r.get("part") == "prepared" and r["steps"] == 0]


def graph_line(text):
    """What the backend said of it."""
    return next((line for line in text.splitlines() if "cannot become a graph" in line),
                "the backend does not say why")


def bench(run, seconds, *arguments):
    """A command of bench_device; arguments overrule the rehearsal's sizes."""
    small = [*SMALL, "--seconds", "0.001", "--cold-mb", "0"]
    return [run.program("tests/bench/bench_device"), "--device", run.device,
            *(small if run.small else ["--seconds", seconds]), *arguments]


def look_at_load(run):
    """The device's clocks, and what holds them back, while it has work of two seconds."""
    machine.watch(run, lambda: run.command(bench(run, "2", "decode:1" if run.small else "prefill:4096")))


def check_speed(run):
    for tag, flags, parts, env in SMALL_RUNS if run.small else RUNS:
        name = "bench_device " + " ".join(flags + parts)
        done = run.command(bench(run, "0.15", *flags, *parts), env={**FAST, **env})
        if "does not run ahead" in done.err and not run.small:
            run.note("%s: %s" % (name, done.why()))
            continue
        run.records += [{**record, "tag": tag} for record in done.records()]
        for rows in eager_steps(done.records()):
            run.fail("%s: no decode step of %d rows ran as a graph: %s" % (name, rows, graph_line(done.err)))
        if not done.good:
            run.lose(name, done)
        elif "fast math" in done.err:  # there is no cuBLASLt: what was measured is not it
            run.note("%s: %s" % (name, done.why()))
        if "rates" in parts:  # the first run
            look_at_load(run)


# ---- the time of each op ------------------------------------------------------------------------

# Steps whose ops the device times one by one: part, rows, flags.
TRACED = [("decode", 1, []), ("decode", 32, []), ("prefill", 1024, []), ("decode", 256, []), ("prefill", 4096, WIDE)]
SMALL_TRACED = [("decode", 2, []), ("prefill", 64, [])]


def trace_lines(records, part, rows, flags=()):
    """Rows of the report: the ops of a step of so many rows of a model by such flags, the longest first; [] without a
    step. Decode has filled the cache before, in steps of other rows. What two events take with nothing between them is
    no op's time."""
    ops = [r for r in records if r["op"] != "nothing" and (part == "prefill" or r["rows"] == rows)]
    steps = sum(r["n"] for r in ops if r["op"].startswith("embed") and r["rows"] == rows)
    nothing = next((r["us"] for r in records if r["op"] == "nothing"), 0)
    found = [(round(r["n"] / steps), max(0, r["us"] - nothing), r) for r in ops] if steps else []
    total = sum(n * us for n, us, _ in found)
    step, lines = " ".join(["%s of %d" % (part, rows), *flags]), []
    for n, us, r in sorted(found, key=lambda f: -f[0] * f[1]):
        shape = "%d x %d" % (r["rows"], r["cols"]) + (" of %d %s" % (r["inner"], r["dtype"]) if r["inner"] else "")
        share = "%.0f %%" % (100 * n * us / total) if total else ""
        lines.append("| %s | %s | %s | %d | %.2f | %.1f | %s |" % (step, r["op"], shape, n, us, n * us, share))
    return lines + ["| %s | all | | %d | | %.1f | |" % (step, sum(f[0] for f in found), total)] if found else []


def check_optimes(run):
    """kernels/cuda/trace.cu writes the times when the backend is closed; steps are eager then."""
    for part, rows, flags in SMALL_TRACED if run.small else TRACED:
        path = run.build.absolute() / "gpu-out" / ("trace.%s.%d" % (part, rows))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        done = run.command(bench(run, "0.3", *flags, "%s:%d" % (part, rows)), env={**FAST, "PKMSERVE_CUDA_TRACE": str(path)})
        if not done.good:
            run.lose("times of ops, %s of %d" % (part, rows), done)
            continue
        records = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        lines = trace_lines(records, part, rows, flags)
        if not lines:
            run.note("times of ops, %s of %d: the backend gave none" % (part, rows))
        run.tables.setdefault("optimes", []).extend(lines)


def check_torch(run):
    """PyTorch on the same GPU; its absence is no failure of ours."""
    small = ["--small", "--seconds", "0.001"] if run.small else []
    done = run.command([run.python, "tests/gpu/baseline.py", "--device",
                        "cuda" if run.gpu else "cpu", "--budget", "%.0f" % max(1, run.left() - 15),
                        "--verify", "tests/golden/xlm/pkm12", run.build / "golden" / "pkm12",
                        *small])
    if "No module named 'torch'" in done.err:
        run.note("no PyTorch in %s: nothing to compare with (PYTHON names another)" % run.python)
        return
    found = [{**record, "tag": "torch"} for record in done.records()]
    run.records += found
    for record in found:
        if record["part"] == "verify":
            run.note("the PyTorch model computes golden case %s to %.1e per token: %s" % (
                record["case"], record["error"], "another model" if done.status == 3 else "the same"))
        elif record["part"] == "error":
            run.note("%s, %s of %s rows: %s" % (record["backend"], record["op"], record["rows"],
                                                record["error"]))
        elif record["part"] == "cut":
            run.note("PyTorch's figures are cut: its time was over")
    if not done.good:
        run.note("PyTorch: " + done.why())
