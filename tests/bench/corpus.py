#!/usr/bin/env python3
"""How fast `pkmserve score --jsonl` is against the scoring step of `pkmserve bench`, in one run.

    python3 tests/bench/corpus.py [--model DIR] [--tokens N]

Texts are short documents (about 20 tokens each) and long ones (about 4,000). Each is scored between two
measurements of bench, and the time of a run without lines, which loads the model, is taken off. Prints for
each the median of tokens per second, of ids and of text, divided by bench's."""

import argparse
import json
import os
import random
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / os.environ.get("PKMSERVE", "build/pkmserve")
ROUNDS = 3


def bench(model):
    """Tokens per second of the scoring step."""
    out = subprocess.run([PROGRAM, "bench", *model, "--json", "--rounds", "3", "--max-batch", "1", "--rows", "512"],
                         check=True, stdout=subprocess.PIPE).stdout
    return next(s["tokens_per_s"] for s in json.loads(out)["steps"] if s["step"] == "score")


def seconds(model, path):
    begin = time.monotonic()
    out = subprocess.run([PROGRAM, "score", *model, "--jsonl", path, "--fields", "n_tokens,perplexity"], check=True,
                         stdout=subprocess.PIPE).stdout
    took = time.monotonic() - begin
    return took, sum(r["n_tokens"] for line in out.splitlines() for r in json.loads(line)["results"])


def write(path, words, n_token, field, lines):
    """Lines of about n_token tokens each: words of a text of ours, or ids."""
    rng = random.Random(1)
    with open(path, "w") as file:
        for _ in range(lines):
            begin = rng.randrange(len(words) - n_token)
            value = " ".join(words[begin:begin + n_token * 3 // 4]) if field == "text" else [
                rng.randrange(10, 4000) for _ in range(n_token)]
            file.write(json.dumps({field: value}) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--tokens", type=int, default=120000)
    options = parser.parse_args()
    model = ["--model", options.model] if options.model else []
    words = " ".join((ROOT / name).read_text() for name in (
        "README.md", "server/README.md", "server/SCORING.md", "server/EVALUATORS.md", "server/API.md")).split()
    words = words * (1 + 4000 // len(words))
    with tempfile.TemporaryDirectory() as folder:
        empty = Path(folder) / "empty"
        empty.write_text("")
        for field in ("tokens", "text"):
            for name, n_token in (("short", 20), ("long", 4000)):
                path = Path(folder) / name
                write(path, words, n_token, field, max(1, options.tokens // n_token))
                ratios = []
                for _ in range(ROUNDS):
                    before = bench(model)
                    load = seconds(model, empty)[0]
                    took, n = seconds(model, path)
                    rate = n / (took - load)
                    ratios.append(rate / statistics.mean([before, bench(model)]))
                print("%-6s %-5s %6d tokens: %.2f of bench's scoring speed (%s)" % (
                    field, name, n, statistics.median(ratios), " ".join("%.2f" % r for r in ratios)), flush=True)


if __name__ == "__main__":
    main()
