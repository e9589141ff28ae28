"""POST /score: one context with many endings, pairs, ranking, target_ids."""

import json
import math
import os
import re

import numpy as np
import pytest

from server_harness import ROOT, error_of

CONTEXT = "The old man went down to the river, and"
ENDINGS = [" he caught a fish.", " the", " slept until the next morning came, \u00e9t\u00e9 or not."]
LONG = "In the morning the sun rose over the quiet hills, and the river ran on. " * 60


def tokenise(server, text):
    return server.ok("/tokenize", {"prompt": text, "add_special_tokens": False})["tokens"]


def score(server, **body):
    return server.ok("/score", body)


def values(result):
    return [(t["id"], t["logprob"]) for t in result["tokens"]]


def total(result):
    """What sum_logprob is by its definition: 9 digits tell a float apart, so it is exact."""
    return float(sum(float(np.float32(t["logprob"])) for t in result["tokens"]))


def encode_pair(server, context, continuation):
    """lm-evaluation-harness' rule, in its own words."""
    n_spaces = len(context) - len(context.rstrip())
    if n_spaces > 0:
        continuation = context[-n_spaces:] + continuation
        context = context[:-n_spaces]
    whole = tokenise(server, context + continuation)
    begin = tokenise(server, context) if context else []
    return begin, whole[len(begin):]


PAIRS = [(CONTEXT, ENDINGS[0]), (CONTEXT + " ", "he slept"), (CONTEXT + " \u3000\n", " he"),
         ("The riv", "er ran on and on"), ("", "Once"), ("  ", "Once upon"), ("a", ".")]


@pytest.mark.parametrize("context, continuation", PAIRS, ids=[json.dumps(p)[:40] for p in PAIRS])
def test_joint_boundary_is_the_rule_of_lm_eval(server, context, continuation):
    begin, end = encode_pair(server, context, continuation)
    got = score(server, context=context, continuations=[continuation], logprobs=0)["results"][0]
    ids = score(server, tokens=[1] + begin + end, logprobs=0)["results"][0]
    assert values(got) == values(ids)[1 + len(begin):]
    assert got["n_tokens"] == got["n_scored"] == len(end)
    assert got["sum_logprob"] == total(got)
    assert (got["n_chars"], got["n_bytes"]) == (len(continuation), len(continuation.encode()))


def test_separate_boundary_tokenises_apart(server):
    begin, end = tokenise(server, CONTEXT + " "), tokenise(server, "er ran")
    got = score(server, context=CONTEXT + " ", continuations=["er ran"], boundary="separate",
                logprobs=0)["results"][0]
    ids = score(server, tokens=[1] + begin + end, logprobs=0)["results"][0]
    assert values(got) == values(ids)[1 + len(begin):]
    assert [t["offset"] for t in got["tokens"]][:1] == [len(CONTEXT) + 1]


def test_all_forms_and_echo_give_the_same_bits(server):
    text = CONTEXT + ENDINGS[0]
    document = score(server, text=text, logprobs=3, ranks=True, entropy=True)["results"][0]
    ranking = score(server, context=CONTEXT, continuations=ENDINGS, logprobs=3, ranks=True,
                    entropy=True)["results"]
    n = ranking[0]["n_tokens"]
    assert ranking[0]["tokens"] == document["tokens"][-n:]  # offsets too
    pairs = score(server, pairs=[{"context": CONTEXT, "continuation": e} for e in ENDINGS],
                  logprobs=3, ranks=True, entropy=True)["results"]
    for a, b in zip(pairs, ranking):
        a.pop("windows"), b.pop("windows")  # what a shared context saves may differ
    assert pairs == ranking
    begin, end = encode_pair(server, CONTEXT, ENDINGS[0])
    ids = score(server, context=[1] + begin, continuations=[end], logprobs=3, ranks=True,
                entropy=True)["results"][0]
    assert ids["tokens"] == ranking[0]["tokens"] and ids["n_bytes"] == ranking[0]["n_bytes"]
    assert ids["sum_logprob"] == ranking[0]["sum_logprob"]
    mixed = score(server, context=CONTEXT, continuations=[end])["results"][0]
    assert mixed["sum_logprob"] == ids["sum_logprob"]
    echo = server.ok("/generate", {"prompt": text, "max_tokens": 0, "echo": True, "logprobs": 0})
    assert [(t["id"], t["logprob"]) for t in echo["choices"][0]["logprobs"]] == values(document)


def test_ranking_follows_from_the_logprobs(server):
    got = score(server, context=CONTEXT, continuations=ENDINGS, logprobs=1, ranks=True,
                unconditional=True)
    results = got["results"]
    sums = [total(r) for r in results]
    alone = []
    for r in results:
        ids = [t["id"] for t in r["tokens"]]
        after_bos = score(server, tokens=[1] + ids)["results"][0]
        assert r["unconditional_sum_logprob"] == after_bos["sum_logprob"]
        alone.append(after_bos["sum_logprob"])
    best = lambda v: int(np.argmax(v))
    assert got["ranking"] == {
        "sum": best(sums),
        "per_token": best([s / len(r["tokens"]) for s, r in zip(sums, results)]),
        "per_char": best([s / len(e) for s, e in zip(sums, ENDINGS)]),
        "per_byte": best([s / len(e.encode()) for s, e in zip(sums, ENDINGS)]),
        "mutual_information": best([s - a for s, a in zip(sums, alone)]),
    }
    for r in results:
        assert r["is_greedy"] == all(t["rank"] == 1 for t in r["tokens"])
    assert got["aggregate"]["n_scored"] == sum(len(r["tokens"]) for r in results)
    n_alone = sum(1 + len(r["tokens"]) for r in results)
    n_context = 1 + len(tokenise(server, CONTEXT))
    assert got["usage"]["prompt_tokens"] == 3 * n_context + n_alone - 3 + n_alone


def test_equal_endings_rank_the_first(server):
    got = score(server, context=CONTEXT, continuations=[" the", " the"])
    assert got["ranking"] == {"sum": 0, "per_token": 0, "per_char": 0, "per_byte": 0}
    assert "ranking" not in score(server, text="a")


def test_characters_of_several_bytes_rank_by_character_and_by_byte(server):
    """Dashes are unlikely, but three bytes long each."""
    got = score(server, context=CONTEXT, continuations=[" xylo", " " + "\u2014" * 12])
    assert (got["ranking"]["per_char"], got["ranking"]["per_byte"]) == (0, 1)


def test_a_greedy_ending_is_said_to_be(server):
    ids = [1] + tokenise(server, CONTEXT)
    greedy = server.ok("/generate", {"prompt": ids, "max_tokens": 4, "temperature": 0,
                                     "ignore_eos": True})["choices"][0]["token_ids"]
    results = score(server, context=ids, continuations=[greedy, greedy[:-1] + [5]])["results"]
    assert [r["is_greedy"] for r in results] == [True, False]


def test_options_hold_for_each_form(server):
    plain = score(server, context=CONTEXT, continuations=ENDINGS[:2], logprobs=0)["results"]
    ended = score(server, context=CONTEXT, continuations=ENDINGS[:2], append_eos=True, logprobs=0,
                  units=[{"words": 3}, {"bytes": 5}])["results"]
    for a, b in zip(plain, ended):
        assert b["n_scored"] == a["n_scored"] + 1 and b["tokens"][:-1] == a["tokens"]
        assert b["tokens"][-1]["piece"] == "</s>"
    assert ended[0]["n_words"] == 3 and ended[1]["n_bytes"] == 5
    bare = score(server, context=CONTEXT, continuations=[ENDINGS[0]], add_bos=False)["results"][0]
    begin, end = encode_pair(server, CONTEXT, ENDINGS[0])
    ids = score(server, tokens=begin + end, logprobs=0)["results"][0]
    assert math.isclose(bare["sum_logprob"], sum(v for _, v in values(ids)[len(begin):]),
                        rel_tol=1e-6)
    assert score(server, context=begin, continuations=[end], add_bos=True)["results"][0][
        "sum_logprob"] == plain[0]["sum_logprob"]
    trace = score(server, pairs=[{"context": CONTEXT, "continuation": " the"}], memory="tokens",
                  id="mine", priority="bulk")
    assert trace["id"] == "mine"
    layer = trace["results"][0]["memory"]["layers"][0]
    assert len(layer["tokens"]) == 1 + len(tokenise(server, CONTEXT + " the"))


def test_long_contexts_are_refused_or_cut_on_the_left(server):
    ending = " he slept."
    body = {"context": LONG, "continuations": [ending], "logprobs": 0}
    message = error_of(server.post("/score", body), 400, "context_length_exceeded", "on_long")
    assert "max_length=512" in message
    cut = score(server, **body, on_long="window")["results"][0]
    begin, end = encode_pair(server, LONG, ending)
    ids = ([1] + begin + end)[-513:]
    assert values(cut) == values(score(server, tokens=ids, logprobs=0)["results"][0])[-len(end):]
    assert cut["windows"]["count"] == 1
    # An ending of several windows goes on as a document does, a token of context each.
    long = score(server, context="He said:", continuations=[" " + LONG], on_long="window",
                 max_context=100, logprobs=0)["results"][0]
    n = long["n_tokens"]
    assert long["windows"]["count"] == math.ceil(n / 100) and n == long["n_scored"]
    ids = [1] + tokenise(server, "He said: " + LONG)
    second = score(server, tokens=ids[-n:][99:200], logprobs=0)["results"][0]
    assert values(long)[100:200] == values(second)[1:]


def test_targets_are_the_distribution_behind_the_text(server):
    choice = server.ok("/generate", {"prompt": CONTEXT, "max_tokens": 1, "temperature": 0,
                                     "logprobs": 20, "ignore_eos": True})["choices"][0]
    top = choice["logprobs"][0]["top"]
    ids = [t["id"] for t in top]
    got = score(server, text=[CONTEXT, "", LONG], target_ids=ids, logprobs=0)["results"]
    assert got[0]["target_logprobs"] == top
    plain = score(server, text=[CONTEXT, "", LONG], logprobs=0)["results"]
    for a, b in zip(got, plain):
        a.pop("target_logprobs"), a.pop("windows"), b.pop("windows")
    assert got == plain  # nothing else changes
    begin, end = encode_pair(server, "The old man went", " down to the river, and")
    forms = [{"context": [1] + begin, "continuations": [end]},
             {"pairs": [{"context": "The old man went", "continuation": " down to the river, and"}]}]
    for form in forms:
        assert score(server, **form, target_ids=ids)["results"][0]["target_logprobs"] == top
    one = score(server, tokens=[1], target_ids=[ids[0]])["results"][0]
    assert one["n_scored"] == 0 and one["perplexity"] is None
    assert one["target_logprobs"][0]["logprob"] < 0
    # A full window has no room for what follows it.
    full = {"tokens": [5] * 513, "target_ids": [5], "on_long": "error"}
    error_of(server.post("/score", full), 400, "context_length_exceeded")
    score(server, **{**full, "tokens": [5] * 512})


def test_each_form_has_its_counters(server):
    def counters(form):
        return [server.metric('score_%s_total{form="%s"}' % (name, form))
                for name in ("items", "tokens", "positions", "nll_nats")]

    bodies = {"text": {"text": [CONTEXT, "a"]}, "ids": {"tokens": [1, 5, 6]},
              "ranking": {"context": CONTEXT, "continuations": ENDINGS, "unconditional": True},
              "pairs": {"pairs": [{"context": "a", "continuation": " b"}], "stream": True}}
    for form, body in bodies.items():
        before = counters(form)
        answer = server.post("/score", body)
        assert answer.status_code == 200
        pool = json.loads(answer.text.splitlines()[-1])["aggregate"]
        items, tokens, positions, nll = [b - a for a, b in zip(before, counters(form))]
        assert (items, tokens) == (pool["n_items"], pool["n_scored"])
        assert positions >= tokens and abs(nll + pool["sum_logprob"]) < 1e-3


PAIR = {"context": "a", "continuation": " b"}
WRONG = [
    ({"text": "a", "context": "a", "continuations": ["b"]}, "conflicting_fields", "context"),
    ({"tokens": [1], "pairs": [PAIR]}, "conflicting_fields", "pairs"),
    ({"continuations": ["b"], "pairs": [PAIR]}, "conflicting_fields", "pairs"),
    ({"context": "a"}, "missing_field", "continuations"),
    ({"continuations": ["a"]}, "missing_field", "context"),
    ({"context": 1, "continuations": ["a"]}, "invalid_value", "context"),
    ({"context": ["a"], "continuations": ["a"]}, "invalid_value", "context"),
    ({"context": [4096], "continuations": ["a"]}, "token_out_of_range", "context"),
    ({"context": [], "continuations": [[5]]}, "invalid_value", "context"),
    ({"context": "a", "continuations": "b"}, "invalid_value", "continuations"),
    ({"context": "a", "continuations": []}, "invalid_value", "continuations"),
    ({"context": "a", "continuations": [5]}, "invalid_value", "continuations"),
    ({"context": "a", "continuations": [""]}, "invalid_value", "continuations"),
    ({"context": "a", "continuations": [" b", []]}, "invalid_value", "continuations"),
    ({"context": "a", "continuations": [[5, "b"]]}, "invalid_value", "continuations"),
    ({"context": "a", "continuations": [[5, -1]]}, "token_out_of_range", "continuations"),
    ({"context": "a", "continuations": ["b"] * 257}, "too_many_items", "continuations"),
    ({"context": "a", "continuations": ["b"], "boundary": "cut"}, "invalid_value", "boundary"),
    ({"context": "a", "continuations": [[5]], "boundary": "joint"}, "conflicting_fields",
     "boundary"),
    ({"text": "a", "boundary": "joint"}, "conflicting_fields", "boundary"),
    ({"text": "a", "unconditional": True}, "conflicting_fields", "unconditional"),
    ({"pairs": [PAIR], "unconditional": True}, "conflicting_fields", "unconditional"),
    ({"context": "a", "continuations": [" b"], "units": [{}, {}]}, "invalid_value", "units"),
    ({"pairs": []}, "invalid_value", "pairs"),
    ({"pairs": PAIR}, "invalid_value", "pairs"),
    ({"pairs": ["a"]}, "invalid_value", "pairs"),
    ({"pairs": [{"context": "a"}]}, "invalid_value", "pairs"),
    ({"pairs": [{**PAIR, "weight": 1}]}, "invalid_value", "pairs"),
    ({"pairs": [PAIR, {"context": "a", "continuation": ""}]}, "invalid_value", "pairs"),
    ({"pairs": [{"context": None, "continuation": "a"}]}, "invalid_value", "pairs"),
]


@pytest.mark.parametrize("body, code, param", WRONG, ids=[json.dumps(w[0])[:60] for w in WRONG])
def test_wrong_field_is_named(server, body, code, param):
    error_of(server.post("/score", body), 400, code, param)


def test_errors_say_which_and_what_to_do(server):
    message = error_of(server.post("/score", {"text": "a", "pairs": [PAIR]}), 400,
                       "conflicting_fields")
    assert "text" in message and "pairs" in message
    message = error_of(server.post("/score", {"pairs": [PAIR, {**PAIR, "continuation": ""}]}), 400,
                       "invalid_value")
    assert "pairs[1].continuation" in message
    # "s" and " s" together with their context are tokens of it: nothing is left to score.
    swallowed = [c for c in ("rive", "morn", "hou", "ha") for e in ("r", "ing", "se", "d")
                 if not encode_pair(server, c, e)[1]]
    for context in swallowed:
        for ending in ("r", "ing", "se", "d"):
            if encode_pair(server, context, ending)[1]:
                continue
            message = error_of(server.post("/score", {"context": context,
                                                      "continuations": [ending]}), 400,
                               "invalid_value", "continuations")
            assert "separate" in message
            score(server, context=context, continuations=[ending], boundary="separate")
    assert swallowed


def test_documented_errors_are_the_real_ones(server):
    """The rows of SCORING.md whose example is a whole body."""
    table = open(os.path.join(ROOT, "server", "SCORING.md")).read()
    rows = re.findall(r"^\| `(\w+)` \| `(\{[^`\u2026]*\})`( at /v1/score)?[^|]*\| (.*) \|$", table, re.M)
    assert len(rows) >= 11
    for code, body, labels, message in rows:
        path = "/v1/score" if labels else "/score"
        assert error_of(server.post(path, body), 400, code) == message, body
