#!/usr/bin/env python3
"""The cost side of "Large Memory Layers with Product Keys" (arXiv 1907.05242) measured on whatever device is
there, the paper's figure beside ours wherever we know it. One command per table:

    papers.py [--build build] [--device auto] [--rounds 3] ... table4|figure4|figure6|counts|chart...

    table4   table 4 and figure 7: speed against memory size, product keys against flat keys
    figure4  12, 16 and 24 layers, widths 1024 and 1600, 0 to 3 memories
    figure6  heads and k
    counts   multiply-adds of section 3.2 beside the measured searches
    chart    papers.svg from the results that are there

Each case is a run of bench_device: random weights of the right shape, other tokens in every run, so that value
rows come from memory and not from a cache. Other work on a machine only ever adds time, so a run counts by its
fastest repetition; on a busy CPU --threads 1 --clock cpu leaves out what others took. Machines drift, so rounds go
through all cases, every other one backwards, ratios are taken within a round, and their median is printed.
Results are JSON files below --out.
"""

import argparse
import datetime
import json
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from statistics import median

import papers_chart

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).resolve().parent / "results"
GIB = 1 << 30

# What the paper says in words, see FIGURES; its tables' own numbers are not at hand.
PAPER_SIZE, PAPER_DEPTH = 1.0, 2.0

MEANING = ("score N: a text of N tokens, each through the vocabulary; decode 1: the next token of one text",
           "search N: the searches of all heads for N queries at a time")

FULL = {"small": {"layers": 6, "width": 512, "heads": 8, "ff": 2048},
        "common": {"vocab": 60000, "positions": 256, "key_width": 256, "memory_heads": 4, "k": 32},
        "keys": [128, 256, 384, 512, 768, 1024], "flat": [128, 256, 384, 512], "default_keys": 512,
        "layers": [12, 16, 24], "widths": {1024: 16, 1600: 16}, "memories": [0, 1, 2, 3],
        "figure6_heads": [1, 2, 4, 8], "figure6_k": [8, 16, 32, 64, 128]}
QUICK = {"small": {"layers": 3, "width": 32, "heads": 2, "ff": 64},
         "common": {"vocab": 64, "positions": 32, "key_width": 16, "memory_heads": 2, "k": 4},
         "keys": [8, 16], "flat": [8, 16], "default_keys": 16,
         "layers": [3, 4, 6], "widths": {32: 2}, "memories": [0, 1, 2, 3],
         "figure6_heads": [1, 2], "figure6_k": [2, 4]}


def flat_count(keys, width):
    """Multiply-adds of one head's search among keys² flat keys (section 3.2): |K|·d_q."""
    return keys * keys * width


def product_count(keys, width, k):
    """The same among as many product keys: (sqrt|K| + k²)·d_q; the k² candidates are scored anew."""
    return (keys + k * k) * width


# ---- the cases of each figure --------------------------------------------------------------------


class Case:
    """One shape. base: the case whose speed its own is divided by; paper: what the paper has for that ratio."""

    def __init__(self, name, shape, base=None, paper=None, **labels):
        self.name, self.shape, self.base, self.paper, self.labels = name, shape, base, paper, labels
        self.rounds = []  # per round: {metric: tokens (or searches) a second}
        self.error = None


def shape_of(size, memories, base=None, **more):
    """memories: how many. They sit in the first layers: a memory costs the same anywhere, but the hidden states of
    random weights grow alike with depth, and a deep memory would read few slots again and again."""
    shape = {**size["common"], **(base or size["small"]), "keys": size["default_keys"], **more}
    return {**shape, "memory_layer": ",".join(map(str, range(memories))) or "-1"}


def table4(size):
    cases = [Case("no memory", shape_of(size, 0), "no memory", kind="none", slots=0)]
    for kind in ("product", "flat"):
        for keys in size["keys" if kind == "product" else "flat"]:
            shape = shape_of(size, 1, kind=kind, keys=keys if kind == "product" else keys * keys)
            cases.append(Case("%s %d²" % (kind, keys), shape, "no memory", kind=kind, slots=keys * keys))
    smallest, largest = size["keys"][0], size["keys"][-1]
    pairs = [("product %d²" % largest, "product %d²" % smallest, PAPER_SIZE)]
    pairs += [("product %d²" % n, "flat %d²" % n, None) for n in size["flat"]]
    return cases, pairs


def figure4(size):
    cases = []
    deepest, shallowest = size["layers"][-1], size["layers"][0]
    for width, heads in size["widths"].items():
        for layers in size["layers"]:
            for memories in size["memories"]:
                base = {"layers": layers, "width": width, "heads": heads, "ff": 4 * width}
                paper = PAPER_DEPTH if (layers, memories) == (shallowest, 1) else None
                name = "width %d, %d layers, %s" % (width, layers, memories_text(memories))
                cases.append(Case(name, shape_of(size, memories, base),
                                  "width %d, %d layers, dense" % (width, deepest), paper,
                                  width=width, layers=layers, memories=memories))
    return cases, []


def memories_text(n):
    return "dense" if n == 0 else "%d memor%s" % (n, "y" if n == 1 else "ies")


def figure6(size):
    cases = [Case("no memory", shape_of(size, 0), "no memory", heads=0, k=0)]
    for heads in size["figure6_heads"]:
        for k in size["figure6_k"]:
            cases.append(Case("%d head%s, k %d" % (heads, "s"[:heads > 1], k),
                              shape_of(size, 1, memory_heads=heads, k=k), "no memory", heads=heads, k=k))
    return cases, []


def counts(size):
    """Width and depth do not matter to a search: a narrow layer keeps the value table small."""
    cases = []
    for keys in size["keys"]:
        base = {**size["small"], "layers": 1, "width": 64, "heads": 1}
        for kind in ("flat", "product"):
            if kind == "product" or keys in size["flat"]:
                shape = shape_of(size, 1, base, kind=kind, keys=keys if kind == "product" else keys * keys)
                width, k = shape["key_width"], shape["k"]
                flat = flat_count(keys, width)
                product = product_count(keys, width, k)
                cases.append(Case("%s %d²" % (kind, keys), shape, "flat %d²" % keys,
                                  flat / product if kind == "product" else None, kind=kind, slots=keys * keys,
                                  count=product if kind == "product" else flat))
    return cases, []


FIGURES = {
    "table4": (table4, "Table 4, figure 7: speed against memory size, product keys against flat keys",
               "~1 is the abstract's \"negligible computational overhead\" of up to a billion parameters"),
    "figure4": (figure4, "Figure 4: depth, width, memories; ratios to the deepest dense model of the width",
                "~2 is the abstract's \"twice faster at inference time\", 12 layers with a memory against 24 without"),
    "figure6": (figure6, "Figure 6, the cost side: heads and k", ""),
    "counts": (counts, "Section 3.2: multiply-adds per head and query; ratios: product keys over flat keys",
               "counts |K|·d_q and (sqrt|K| + k²)·d_q are the paper's; ours does not score the k² candidates anew"),
}


# ---- running ------------------------------------------------------------------------------------


def metrics_of(figure, args):
    if figure == "counts":
        return [("search", 1), ("search", args.search_rows)]
    return [("score", args.rows), ("decode", 1)]


def metric_name(metric):
    return "%s %d" % metric


def bytes_needed(shape, args):
    """Of a model of this shape, all of it copied: what a CPU's memory has to hold."""
    elem = 4 if args.dtype == "f32" else 2
    n_memory = 0 if shape["memory_layer"] == "-1" else shape["memory_layer"].count(",") + 1
    d, keys = shape["width"], shape["keys"]
    slots = keys if shape.get("kind") == "flat" else keys * keys
    weights = shape["layers"] * (4 * d * d + 2 * d * shape["ff"]) + (shape["vocab"] + slots * n_memory) * d
    memory = shape["memory_heads"] * shape["key_width"] * (keys + d) * n_memory
    return elem * weights + 4 * memory + 8 * args.rows * shape["vocab"] + GIB // 4


def bytes_available():
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return 1024 * int(line.split()[1])
    return 1 << 62


def bench_device(args, shape, parts):
    """The JSON lines of one run; a MemoryError if it does not fit, else a RuntimeError that says why not."""
    command = [str(args.build / "tests/bench/bench_device"), "--device", args.device, "--dtype", args.dtype,
               "--threads", str(args.threads), "--clock", args.clock, "--seconds", str(args.seconds)]
    for name, value in shape.items():
        command += ["--" + name.replace("_", "-"), str(value)]
    library = args.build.absolute() / "libpkmserve_cuda.so"  # not beside the program, where it would be found
    env = {"PKMSERVE_CUDA_LIBRARY": str(library), **os.environ} if library.exists() else None
    done = subprocess.run(command + parts, capture_output=True, text=True, env=env)
    if done.returncode != 0:
        why = (done.stderr.strip().splitlines() or ["exit status %d" % done.returncode])[-1]
        full = done.returncode == -signal.SIGKILL or re.search("(no|of|enough|host|device) memory", why)
        raise (MemoryError if full else RuntimeError)("%s: %s" % (shlex.join(command + parts), why))
    return [json.loads(line) for line in done.stdout.splitlines()]


def run_case(args, case, metrics, on_host):
    """{metric: speed} of one round, and the spread over the slots if it was measured."""
    if on_host and bytes_needed(case.shape, args) > bytes_available():
        case.error = "does not fit: needs %.1f GiB" % (bytes_needed(case.shape, args) / GIB)
        return None
    if metrics[0][0] == "search":
        parts = ["memory:" + ",".join(str(rows) for _, rows in metrics)]
    else:
        parts = [("%s:%d" % metric) for metric in metrics]
    try:
        lines = bench_device(args, case.shape, parts)
    except MemoryError:
        case.error = "does not fit: needs %.1f GiB" % (bytes_needed(case.shape, args) / GIB)
        return None
    speed = {}
    for line in lines:
        metric = (line.get("op") if line["part"] == "memory" else line["part"], line.get("rows"))
        if metric in metrics:
            speed[metric_name(metric)] = 1e6 * line["rows"] / line["us_min"]
            if line["part"] == "memory":
                case.labels["counted"] = round(line["flops"] / line["rows"] / 2 / case.shape["memory_heads"])
        elif line["part"] == "spread":
            spread = significant(line["distinct"] / line["even"])
            case.labels["spread"] = min(spread, case.labels.get("spread", spread))
    case.rounds.append(speed)
    return speed


def machine_of(args):
    rates = bench_device(args, {}, ["rates"])[0]
    cpu = [line.split(":", 1)[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines()
           if line.startswith("model name")]
    return {"backend": rates["backend"], "device": rates["description"], "cpu": cpu[0] if cpu else platform.machine(),
            "cores": os.cpu_count(), "read_gb_per_s": round(rates["read_bytes_per_s"] / 1e9, 1)}


def measure(args, figure):
    """The result of one figure, as it is written to its file."""
    size = QUICK if args.quick else FULL
    make, title, source = FIGURES[figure]
    cases, pairs = make(size)
    metrics = metrics_of(figure, args)
    machine = machine_of(args)
    on_host = not machine["backend"].startswith("cuda")
    if args.clock == "cpu" and not on_host:
        raise RuntimeError("--clock cpu cannot time %s: it counts the processor time of a CPU" % machine["backend"])
    for r in range(args.rounds):
        for case in cases if r % 2 == 0 else reversed(cases):
            speed = None if case.error else run_case(args, case, metrics, on_host)
            if args.verbose:
                print("round %d: %-36s %s" % (r + 1, case.name, speed or case.error), file=sys.stderr, flush=True)
    by_name = {case.name: case for case in cases}
    names = [metric_name(metric) for metric in metrics]
    return {
        "figure": figure, "title": title, "source": source, "date": datetime.date.today().isoformat(), "machine": machine,
        "command": shlex.join(["tests/bench/papers.py", *args.options, figure]), "dtype": args.dtype,
        "clock": args.clock, "rounds": args.rounds, "metrics": names,
        "cases": [record(case, by_name, names) for case in cases],
        "pairs": [{"of": a, "to": b, "paper": paper, "ratio": ratio(by_name[a], by_name[b], names)}
                  for a, b, paper in pairs],
    }


def record(case, by_name, names):
    out = {"name": case.name, **case.labels, "paper": case.paper, "shape": case.shape}
    if case.error:
        return {**out, "error": case.error}
    speed = {name: significant(median(r[name] for r in case.rounds)) for name in names}
    return {**out, "base": case.base, "speed": speed, "ratio": ratio(case, by_name.get(case.base), names)}


def ratio(case, base, names):
    """Speed over the base's, the median over the rounds; {} if either was not measured."""
    if base is None or not (case.rounds and base.rounds):
        return {}
    return {name: significant(median(a[name] / b[name] for a, b in zip(case.rounds, base.rounds))) for name in names}


def write_result(result, path):
    """JSON with a line per case, so that two results can be compared."""
    def text(value):
        if isinstance(value, list) and value and isinstance(value[0], dict):
            return "[\n  %s]" % ",\n  ".join(text(item) for item in value)
        return json.dumps(value, ensure_ascii=False)
    path.write_text("{%s}\n" % ",\n ".join('"%s": %s' % (name, text(value)) for name, value in result.items()))


def significant(x):
    return float("%.4g" % x)


# ---- printing -----------------------------------------------------------------------------------


def cell(x, digits=2):
    return "-" if x is None else "%.*f" % (digits, x) if x < 1000 else "%.0f" % x


def spoken(x):
    return "-" if x is None else "~%g" % x


def print_rows(rows):
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        print("  ".join([row[0].ljust(widths[0])] + [c.rjust(w) for c, w in zip(row[1:], widths[1:])]).rstrip())


def print_result(result):
    machine, names = result["machine"], result["metrics"]
    unit = "queries/s" if result["figure"] == "counts" else "tokens/s"
    print("\n" + result["title"])
    print("%s; %s, read %.1f GB/s; %s, %s clock, medians of %d rounds, %s\n" %
          (machine["cpu"], machine["device"], machine["read_gb_per_s"], result["dtype"], result["clock"],
           result["rounds"], result["date"]))
    counted = "count" in result["cases"][0]
    rows = [["case"] + ["multiply-adds", "ours"] * counted + ["%s, %s" % (name, unit) for name in names] +
            ["ratio"] * len(names) + ["paper's"]]
    for case in result["cases"]:
        row = [case["name"]] + [str(case.get("count")), str(case.get("counted", "-"))] * counted
        if "error" in case:
            row[0] += " (%s)" % case["error"]
        for name in names:
            row.append(cell(case.get("speed", {}).get(name), 1))
        rows.append(row + [cell(case.get("ratio", {}).get(name)) for name in names] +
                    [cell(case["paper"]) if counted else spoken(case["paper"])])
    print_rows(rows)
    if result["pairs"]:
        print()
        print_rows([["speed of"] + names + ["paper's"]] +
                   [["%s over %s" % (pair["of"], pair["to"])] + [cell(pair["ratio"].get(name)) for name in names] +
                    [spoken(pair["paper"])] for pair in result["pairs"]])
    spread = [case["spread"] for case in result["cases"] if "spread" in case]
    if spread:
        print("\nreads: %.0f to %.0f %% of the distinct slots that as many even draws would give" %
              (100 * min(spread), 100 * max(spread)))
    print("\n" + MEANING[result["figure"] == "counts"])
    print("-: not measured, or the paper has a figure that is not at hand" + ("; " + result["source"]).rstrip("; "))


# ---- arguments ----------------------------------------------------------------------------------


def arguments(words):
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("figures", nargs="+", choices=[*FIGURES, "chart"], metavar="FIGURE",
                        help=", ".join([*FIGURES, "chart"]))
    parser.add_argument("--build", type=Path, default=ROOT / "build", help="the build folder (build)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda (auto)")
    parser.add_argument("--threads", type=int, default=0, help="of the CPU backend; 0: one per core (0)")
    parser.add_argument("--dtype", default="bf16", choices=["f32", "bf16"])
    parser.add_argument("--clock", default="wall", choices=["wall", "cpu"], help="wall or processor time (wall)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=64, help="of a scored text (64)")
    parser.add_argument("--search-rows", type=int, default=16, help="queries of a batch of searches (16)")
    parser.add_argument("--seconds", type=float, default=0.3, help="of each measurement (0.3)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results (tests/bench/results)")
    parser.add_argument("--quick", action="store_true", help="tiny shapes, one round: does the tool work?")
    parser.add_argument("--verbose", action="store_true", help="say each run on standard error")
    args = parser.parse_args(words)
    if args.clock == "cpu" and args.threads != 1:
        parser.error("--clock cpu needs --threads 1: threads that wait for each other spend processor time too")
    if args.quick:
        args.rounds, args.rows, args.seconds = 1, 8, 0.001
    names = ("device", "dtype", "threads", "clock", "rounds", "rows", "search_rows", "seconds")
    args.options = [word for name in names if getattr(args, name) != parser.get_default(name)
                    for word in ("--" + name.replace("_", "-"), str(getattr(args, name)))]
    return args


def main(words):
    args = arguments(words)
    args.out.mkdir(parents=True, exist_ok=True)
    for figure in args.figures:
        if figure == "chart":
            papers_chart.write(args.out)
            continue
        try:
            result = measure(args, figure)
        except (RuntimeError, OSError) as e:
            sys.exit("papers.py: %s" % e)
        write_result(result, args.out / ("papers-%s.json" % figure))
        print_result(result)


if __name__ == "__main__":
    main(sys.argv[1:])
