"""What commands print for people, beside what they print as JSON; small models of the authors' code show what the
shipped one does not have."""

import json
import os
import pty
import re
import subprocess
import sys

import pytest

from cli_harness import LIMIT_S, MODEL, PROGRAM, ROOT, ok, run

sys.path.insert(0, str(ROOT / "tests"))
from broken_model import with_output_bias  # noqa: E402

GOLDEN = ROOT / os.environ.get("B", "build") / "golden"
TEXT = "The cat sat on the mat, and the dog looked on. It was dark, and the wind blew.\n"


@pytest.mark.parametrize("model, lines", [
    ("flat", ["memory      layer 1, in place of its feed-forward: 300 slots (flat keys), heads 4, k 16"]),
    ("share-values", ["language    0 en", "language    1 fr", "queries mlp", "queries mlp, values of memory 0"]),
    ("pkm12-2mem", ["output      its own matrix"]),
    ("pkm-added", ["added after it"]),
    ("e-allattn-adaptive-io", ["output      adaptive: a head of frequent words and 2 of rarer ones",
                               "no limit; a layer sees at most 128 positions back"]),
])
def test_inspect_prints_what_a_model_has(model, lines):
    text = ok("inspect", GOLDEN / model)
    for line in lines:
        assert re.search(re.escape(line) + "$" if line.startswith("queries") else re.escape(line), text, re.M), text


def test_inspect_tells_whose_values_a_memory_reads():
    told = json.loads(ok("inspect", GOLDEN / "share-values", "--json", "--hash"))
    assert [m["values_of"] for m in told["memories"]] == [0, 0]
    assert told["hashes"][1] == {"memory": 1, "values_of": 0}
    assert "memory 1  reads the values of memory 0" in ok("inspect", GOLDEN / "share-values", "--hash")


@pytest.mark.parametrize("arguments, wanted", [
    (["lm-eval", "--max-context", "0"], "lm-eval: word_perplexity {word_perplexity:.10g}, "
     "byte_perplexity {byte_perplexity:.10g}, bits_per_byte {bits_per_byte:.10g}"),
    (["xlm", "--bptt", "16"], "XLM: ppl {perplexity:.10g}, acc {accuracy:.10g} %, {n_scored} predicted"),
    (["adaptive-span", "--bptt", "8", "--batch-size", "2"],
     "adaptive-span: loss {mean_nll:.10g}, ppl {perplexity:.10g}, bpc {bits_per_token:.10g}, {n_scored} predicted"),
    (["sparse-memory-lm", "--bptt", "16"], "sparse-memory-lm: loss {mean_nll:.10g}, ppl {perplexity:.10g}, word ppl "
     "{word_perplexity:.10g}, nll {nll:.10g}, {n_scored} predicted"),
])
def test_score_prints_the_figures_of_the_evaluator(arguments, wanted):
    told = json.loads(ok("score", "--json", "--windows", *arguments, stdin=TEXT))["results"][0]
    told["nll"] = -told["sum_logprob"]
    told["accuracy"] = 100 * (told.get("accuracy") or 0)
    assert wanted.format(**told) in ok("score", "--windows", *arguments, stdin=TEXT).splitlines()


def test_an_impossible_token_makes_figures_infinite(tmp_path):
    """As the evaluators print them; nor is a model far from itself where both are infinite."""
    model = with_output_bias(300, float("-inf"), MODEL, tmp_path / "model")  # " saw"
    (tmp_path / "a").write_text("A boy saw a cat. He was happy.")
    (tmp_path / "b").write_text("She ran home.")
    a, b, both = ok("score", "--model", model, tmp_path / "a", tmp_path / "b").splitlines()[1:]
    assert a.split()[4:8] == both.split()[4:8] == ["inf"] * 4 and "inf" not in b
    for windows, told in (("lm-eval", "word_perplexity inf, byte_perplexity inf, bits_per_byte inf"),
                          ("sparse-memory-lm", "loss inf, ppl inf, word ppl inf, nll inf, 9 predicted")):
        assert ok("score", "--model", model, "--windows", windows, tmp_path / "a").endswith(told + "\n")
    assert "perplexity  inf, reference inf: +0.0000 %" in ok("compare", "--model", model, tmp_path / "a")
    one_is = run("compare", "--model", model, "--against", MODEL, tmp_path / "a")
    assert one_is.returncode == 1 and "a mean KL of inf nats per token" in one_is.stderr


def test_generate_tells_a_terminal_how_fast_it_was():
    ours, theirs = pty.openpty()
    done = subprocess.run([PROGRAM, "generate", "--model", MODEL, "--max-tokens", "3", "--seed", "5", "Once upon"],
                          stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=theirs, timeout=LIMIT_S, check=True)
    os.close(theirs)
    told = b""
    while True:
        try:
            told += os.read(ours, 4096)
        except OSError:  # all of it has been read
            break
    os.close(ours)
    assert re.search(rb"\[tokens 3, \d+\.\d tokens/s, seed 5\]\r\n$", told), told
    assert done.stdout.startswith(b" ") and b"tokens/s" not in done.stdout


def test_rank_prints_a_line_for_each_table(tmp_path):
    """Memories that share a table are one."""
    model = GOLDEN / "share-values"
    for name, ids in (("task", "5 9 14 23 40 61 87 118"), ("all", "5 9 14 23 40 61 87 118 30 31 32 33 34 35 36 37")):
        (tmp_path / name).write_text(ids)
        ok("memory", "count", "--model", model, "--ids", tmp_path / name, "-o", tmp_path / (name + ".counts"))
    command = ["memory", "rank", tmp_path / "task.counts", "--background", tmp_path / "all.counts", "--top", "9",
               "--by", "kl", "-o", tmp_path / "slots"]
    text, told = ok(*command), json.loads(ok(*command, "--json"))["memories"]
    assert [m["memory"] for m in told] == [0]
    assert text.splitlines() == [
        "memory 0: slots: %d, with %.2f %% of the reads of the task and %.2f %% of those of the background"
        % (told[0]["slots"], 100 * told[0]["task_share"], 100 * told[0]["background_share"])]


def test_examples_need_a_memory():
    done = run("memory", "examples", "--model", ROOT / "models" / "demo-dense", "--slots", "3", stdin="a text")
    assert done.returncode == 1 and "demo-dense: the model has no memories" in done.stderr
