"""How the CPU backend scales with threads: decode, prefill and scoring, beside a plain read and the peak of products.

A run of bench_device measures the machine's rates and then steps, with one number of threads. Rounds go through
all numbers, every other one backwards, since machines drift; shares and ratios are taken within a run or a round,
and their medians are printed.
"""

import os
import time
from statistics import median

from speed import SMALL

PROGRAM = "tests/bench/bench_device"
ROUNDS = 5
# Part, rows, what bounds it: bytes (a plain read) or flops (the peak of products).
STEPS = [("decode", 1, "bytes"), ("decode", 8, "bytes"), ("prefill", 512, "flops"), ("score", 512, "flops")]
SMALL_STEPS = [("decode", 1, "bytes"), ("prefill", 32, "flops")]


def thread_counts(n_core):
    """1, 2, 4, ... and all of them."""
    counts = [1]
    while counts[-1] * 2 <= n_core:
        counts.append(counts[-1] * 2)
    return counts if counts[-1] == n_core else [*counts, n_core]


def peak(rates):
    """Of products in BF16, which are F32's where there is no instruction for them."""
    return rates["flops_bf16_per_s"] or rates["flops_f32_per_s"]


def measure(run, n_thread, steps):
    """{"rates": ..., (part, rows): ...} of a run, or None."""
    flags = ["--device", "cpu", "--threads", n_thread]
    flags += [*SMALL, "--seconds", "0.001"] if run.small else ["--seconds", "0.3"]
    parts = ["rates"] + ["%s:%d" % (part, rows) for part, rows, _ in steps]
    done = run.command([run.program(PROGRAM), *flags, *parts])
    if not done.good:
        run.lose("bench_device with %d threads" % n_thread, done)
        return None
    found = {}
    for record in done.records():
        if record["part"] == "rates":
            found["rates"] = record
        elif record.get("op") == "step":
            found[record["part"], record["rows"]] = record
    return found


def share(result, key, limit):
    """Per cent of the run's own rate that a step reached."""
    rate = result["rates"]["read_bytes_per_s"] if limit == "bytes" else peak(result["rates"])
    return 100 * result[key][limit] / (1e-6 * result[key]["us"]) / rate


def rows_of_table(rounds, counts, steps):
    def middle(of, n):
        return median(of(results, results[n]) for results in rounds if n in results)
    for n in counts:
        if any(n in results for results in rounds):
            yield "| %d | plain read | | %.1f GB/s | %.2f | |" % (
                n, middle(lambda _, r: r["rates"]["read_bytes_per_s"] / 1e9, n),
                middle(lambda all, r: r["rates"]["read_bytes_per_s"] / all[1]["rates"]["read_bytes_per_s"], n))
            yield "| %d | peak of products | | %.0f GFLOP/s | %.2f | |" % (
                n, middle(lambda _, r: peak(r["rates"]) / 1e9, n),
                middle(lambda all, r: peak(r["rates"]) / peak(all[1]["rates"]), n))
    for part, rows, limit in steps:
        key = part, rows
        for n in counts:
            if any(n in results for results in rounds):
                yield "| %d | %s of %d | %.2f | %.0f tokens/s | %.2f | %.0f %% |" % (
                    n, part, rows, middle(lambda _, r: r[key]["us"] / 1e3, n),
                    middle(lambda _, r: 1e6 * rows / r[key]["us"], n),
                    middle(lambda all, r: all[1][key]["us"] / r[key]["us"], n),
                    middle(lambda _, r: share(r, key, limit), n))


def check_cores(run):
    counts = [1, 2] if run.small else thread_counts(len(os.sched_getaffinity(0)))
    steps = SMALL_STEPS if run.small else STEPS
    rounds, longest = [], 0.0
    while len(rounds) < (1 if run.small else ROUNDS) and run.left() > 1.2 * longest:
        begun = time.monotonic()
        results = {}
        for n in counts if len(rounds) % 2 == 0 else reversed(counts):
            result = measure(run, n, steps)
            if result:
                results[n] = result
        if 1 not in results:  # what the ratios are taken to
            break
        rounds.append(results)
        longest = max(longest, time.monotonic() - begun)
    run.tables["cores"] = list(rows_of_table(rounds, counts, steps))
    if rounds:
        run.note("medians of %d rounds" % len(rounds))
