"""/score with `windows`: whose settings these are, what is refused beside them, and unknown tokens.

Figures against the evaluators themselves: tests/golden/test_evaluators.py, tests/clients.
"""

import json
import os
import subprocess

import pytest

from server_harness import PROGRAM, ROOT, Server, error_of

TEXT = open(os.path.join(ROOT, "LICENSE")).read()


@pytest.fixture(scope="module")
def server():
    with Server() as s:
        yield s


@pytest.fixture(scope="module")
def words():
    """A server on a model of XLM that knows split text alone, and its directory."""
    build = os.path.join(ROOT, os.environ.get("B", "build"))
    subprocess.run([os.path.join(ROOT, "tests", "golden", "convert_all.sh")], check=True)
    model = os.path.join(build, "golden", "trained")
    with Server("--model", model) as s:
        yield s, model


def result(server, body):
    return server.ok("/score", body)["results"][0]


# ---- lm-eval ----

def test_lm_eval_leaves_two_positions_unused(server):
    got = result(server, {"text": TEXT[:5000], "windows": "lm-eval"})
    by_hand = result(server, {"text": TEXT[:5000], "max_context": 510})
    assert got["sum_logprob"] == by_hand["sum_logprob"]
    assert got["windows"]["max_context"] == 510 and got["windows"]["bptt"] == 512
    assert got["sum_logprob"] != result(server, {"text": TEXT[:5000]})["sum_logprob"]
    short = result(server, {"text": TEXT[:5000], "windows": "lm-eval", "bptt": 100})
    assert short["sum_logprob"] == result(server, {"text": TEXT[:5000], "max_context": 98})["sum_logprob"]


def test_lm_eval_scores_endings_without_bos(server):
    pair = {"context": "It was a dark night,", "continuation": " and the rain fell"}
    got = result(server, {"pairs": [pair], "windows": "lm-eval"})
    assert got["sum_logprob"] == result(server, {"pairs": [pair], "add_bos": False})["sum_logprob"]
    assert got["sum_logprob"] != result(server, {"pairs": [pair]})["sum_logprob"]
    ranked = server.ok("/score", {"context": pair["context"], "windows": "lm-eval",
                                  "continuations": [pair["continuation"], " xylophone"]})
    assert ranked["results"][0]["sum_logprob"] == got["sum_logprob"]


def test_lm_eval_puts_its_prefix_before_ids_too(server):
    ids = server.ok("/tokenize", {"prompt": TEXT[:3000], "add_special_tokens": False})["tokens"]
    by_ids = result(server, {"tokens": ids, "windows": "lm-eval"})
    assert by_ids["sum_logprob"] == result(server, {"text": TEXT[:3000],
                                                    "windows": "lm-eval"})["sum_logprob"]
    assert by_ids["n_scored"] == len(ids)


# ---- sparse-memory-lm ----

def test_sparse_memory_lm_reads_each_window_anew(server):
    ids = list(range(300, 335))
    got = result(server, {"tokens": ids, "windows": "sparse-memory-lm", "bptt": 8, "memory": "summary",
                          "logprobs": 0})
    parts = [result(server, {"tokens": ids[at:at + 9]}) for at in range(0, 34, 8)]
    assert [p["n_scored"] for p in parts] == [8, 8, 8, 8, 2] and got["n_scored"] == 34
    assert abs(got["sum_logprob"] - sum(p["sum_logprob"] for p in parts)) < 1e-4
    assert [t["logprob"] is None for t in got["tokens"]] == [True] + 34 * [False]
    assert got["windows"]["scheme"] == "sparse-memory-lm" and got["windows"]["count"] == 5
    assert got["memory"]["layers"][0]["lookups"] == 35 * got["memory"]["layers"][0]["heads"] \
        * got["memory"]["layers"][0]["knn"]
    own = result(server, {"tokens": ids, "max_context": 8})  # whose last window is as long as the others
    assert own["sum_logprob"] != got["sum_logprob"]
    short = result(server, {"text": "It was a dark night.", "windows": "sparse-memory-lm"})
    assert short["n_scored"] == short["n_tokens"] - 1 and short["n_words"] == 5 and short["n_bytes"] is None


# ---- blocks ----

def test_what_no_block_predicts_is_listed_without_a_logprob(server):
    ids = list(range(300, 323))
    got = result(server, {"tokens": ids, "windows": "xlm", "bptt": 8, "logprobs": 0})
    assert [t["id"] for t in got["tokens"]] == ids
    # 23 tokens, one end token to fill up to 24, one more in front: blocks begin at -2, 6, 14, and
    # the last token is in none.
    unscored = [i for i, t in enumerate(got["tokens"]) if t["logprob"] is None]
    assert unscored == [6, 14, 22]
    listed = sum(t["logprob"] for t in got["tokens"] if t["logprob"] is not None)
    assert got["n_tokens"] == 23 and got["n_scored"] == 3 * 7
    assert got["n_bytes"] is None and got["word_perplexity"] is None
    end = json.load(open(os.path.join(ROOT, "models", "demo", "config.json")))["eos_token_id"]
    fill = result(server, {"tokens": [end, end] + ids[:6], "logprobs": 0})
    assert abs(listed + fill["tokens"][1]["logprob"] - got["sum_logprob"]) < 1e-4


def test_a_stream_tells_each_block(server):
    body = {"tokens": list(range(300, 332)), "windows": "xlm", "bptt": 8, "stream": True}
    lines = [json.loads(line) for line in server.post("/score", body).text.splitlines()]
    blocks = [line["window"] for line in lines if "window" in line]
    assert [b["index"] for b in blocks] == [0, 1, 2, 3] and all(b["n_scored"] == 7 for b in blocks)
    whole = next(line for line in lines if "n_tokens" in line)
    assert abs(sum(b["sum_logprob"] for b in blocks) - whole["sum_logprob"]) < 1e-4


@pytest.mark.parametrize("scheme", ["lm-eval", "xlm", "adaptive-span", "sparse-memory-lm"])
def test_an_empty_text_has_nothing_to_score(server, scheme):
    got = result(server, {"text": "", "windows": scheme, "bptt": 8})
    assert got["n_scored"] == 0 and got["perplexity"] is None and got["accuracy"] is None


@pytest.mark.parametrize("body, code, param", [
    ({"windows": "xml"}, "invalid_value", "windows"),
    ({"windows": "xlm"}, "missing_field", "bptt"),
    ({"windows": "adaptive-span"}, "missing_field", "bptt"),
    ({"windows": "xlm", "bptt": 1}, "invalid_value", "bptt"),
    ({"windows": "xlm", "bptt": 513}, "invalid_value", "bptt"),
    ({"windows": "lm-eval", "bptt": 2}, "invalid_value", "bptt"),
    ({"bptt": 8}, "conflicting_fields", "bptt"),
    ({"windows": "lm-eval", "stride": 8}, "conflicting_fields", "stride"),
    ({"windows": "lm-eval", "max_context": 8}, "conflicting_fields", "max_context"),
    ({"windows": "xlm", "bptt": 8, "add_bos": False}, "conflicting_fields", "add_bos"),
    ({"windows": "xlm", "bptt": 8, "append_eos": True}, "conflicting_fields", "append_eos"),
    ({"windows": "xlm", "bptt": 8, "on_long": "error"}, "conflicting_fields", "on_long"),
    ({"windows": "xlm", "bptt": 8, "target_ids": [5]}, "conflicting_fields", "target_ids"),
    ({"windows": "xlm", "bptt": 8, "memory": "tokens"}, "conflicting_fields", "memory"),
    ({"windows": "xlm", "bptt": 8, "batch_size": 2}, "conflicting_fields", "batch_size"),
    ({"windows": "adaptive-span", "bptt": 3, "batch_size": 2, "memory": "summary"},
     "conflicting_fields", "memory"),
    ({"windows": "adaptive-span", "bptt": 100}, "invalid_value", "bptt"),
    ({"windows": "sparse-memory-lm", "add_bos": True}, "conflicting_fields", "add_bos"),
    ({"windows": "sparse-memory-lm", "bptt": 1}, "invalid_value", "bptt"),
    ({"text": None, "pairs": [{"context": "a", "continuation": "b"}], "windows": "sparse-memory-lm"},
     "conflicting_fields", "windows"),
    ({"text": TEXT, "windows": "adaptive-span", "bptt": 8}, "context_length_exceeded", "windows"),
    ({"text": None, "pairs": [{"context": "a", "continuation": "b"}], "windows": "xlm", "bptt": 8},
     "conflicting_fields", "windows")])
def test_what_does_not_go_together_is_refused(server, body, code, param):
    answer = server.post("/score", {"text": "It was a dark night, and nobody came.", **body})
    error_of(answer, 400, code, param)


# ---- unknown tokens ----

def test_unknown_tokens_are_counted_in_results_totals_and_metrics(words):
    server, _ = words
    before = server.metric('score_unknown_tokens_total{form="text"}')
    got = server.ok("/score", {"text": [TEXT[:500], "do fo gac"]})
    ids = server.ok("/tokenize", {"prompt": TEXT[:500], "add_special_tokens": False})["tokens"]
    assert got["results"][0]["n_unk"] == ids.count(3) > 50
    assert got["results"][1]["n_unk"] == 0
    assert got["aggregate"]["n_unk"] == ids.count(3)
    server.counted('score_items_total{form="text"}', 2)
    assert server.metric('score_unknown_tokens_total{form="text"}') == before + ids.count(3)


def test_unknown_tokens_of_an_ending_are_its_own(words):
    server, _ = words
    got = server.ok("/score", {"context": "qqq zzz", "continuations": ["do fo", "yyy"],
                               "boundary": "separate"})
    assert [r["n_unk"] for r in got["results"]] == [0, 1]


def run(*arguments, text=""):
    done = subprocess.run([PROGRAM, *map(str, arguments)], input=text, capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("command", ["score", "compare"])
def test_the_command_line_warns_of_unknown_tokens(words, command):
    _, model = words
    status, out, err = run(command, "--model", model, os.path.join(ROOT, "LICENSE"))
    assert status == 0 and "unknown" in out
    assert "warning" in err and "tokens unknown to the vocabulary: " in err and "--codes" in err, err
    status, _, err = run(command, "--model", model, "-", text="do fo gac to\n" * 20)
    assert status == 0 and "warning" not in err, err
    assert "warning" in run(command, "--json", "--model", model, os.path.join(ROOT, "LICENSE"))[2]


def test_a_corpus_is_warned_of_as_a_whole(words):
    """Also where --fields leaves the numbers of unknown tokens out."""
    _, model = words
    lines = '{"text": "do fo gac to"}\n' * 20
    common = ["score", "--model", model, "--jsonl", "--fields", "perplexity", "-"]
    status, _, err = run(*common, text=lines)
    assert status == 0 and "warning" not in err, err
    lines += '{"text": "qqq zzz"}\n'
    lines += '{"context": "yyy", "continuations": ["do"], "boundary": "separate"}\n'
    status, _, err = run(*common, text=lines)
    assert status == 0 and "warning" in err and "unknown to the vocabulary: 2 of 83" in err, err
