"""POST /score: figures by their definitions, windows, forms, limits."""

import json
import math
import re

import pytest

from server_harness import Server, error_of

TEXT = "The old man went home.  He was  tired\nand slept. \u00c9t\u00e9 \U0001f600"
AT_LIMIT = " ".join("a" * 39)  # 40 tokens with BOS
LONG = ("In the morning the sun rose over the quiet hills, and the river ran on. " * 60)


def near(a, b, rel=1e-12):
    return abs(a - b) <= rel * max(1.0, abs(a), abs(b))


def check_figures(r, text):
    """Every figure by the formula of the contract, from the tokens and the text alone."""
    logprobs = [t["logprob"] for t in r["tokens"] if t["logprob"] is not None]
    total = sum(logprobs)
    assert r["n_scored"] == len(logprobs) and r["n_tokens"] == len(r["tokens"])
    assert near(r["sum_logprob"], total, 1e-7)
    L, n = r["sum_logprob"], r["n_scored"]
    n_bytes, n_words = len(text.encode()), len(re.split(r"\s+", text))
    assert r["n_bytes"] == n_bytes and r["n_chars"] == len(text) and r["n_words"] == n_words
    assert near(r["mean_nll"], -L / n) and near(r["perplexity"], math.exp(-L / n))
    assert near(r["bits_per_token"], -L / n / math.log(2))
    assert near(r["bits_per_byte"], -L / (n_bytes * math.log(2)))
    assert near(r["bits_per_char"], -L / (len(text) * math.log(2)))
    assert near(r["byte_perplexity"], math.exp(-L / n_bytes))
    assert near(r["word_perplexity"], math.exp(-L / n_words))
    assert r["min_logprob"] == min(logprobs)  # the same float, printed the same way
    assert r["is_greedy"] == all(t["rank"] == 1 for t in r["tokens"] if t["rank"] is not None)


@pytest.mark.parametrize("text", [TEXT, " a\tb ", "x", "\u2003wide\u3000blank\x1c"])
def test_figures_follow_their_definitions(server, text):
    got = server.ok("/score", {"text": text, "logprobs": 0, "ranks": True})
    assert set(got) == {"id", "object", "created", "model", "results", "aggregate", "usage",
                        "timings"}
    check_figures(got["results"][0], text)
    assert got["usage"]["prompt_tokens"] == got["results"][0]["n_tokens"] + 1
    assert got["usage"]["completion_tokens"] == 0


def test_aggregate_pools_sums(server):
    texts = [TEXT, "Second one.", "And a third, longer than the second."]
    got = server.ok("/score", {"text": texts})
    results, pool = got["results"], got["aggregate"]
    assert [r["index"] for r in results] == [0, 1, 2]
    for name in ("n_tokens", "n_scored", "n_bytes", "n_words"):
        assert pool[name] == sum(r[name] for r in results)
    assert pool["n_items"] == 3
    L = sum(r["sum_logprob"] for r in results)
    assert near(pool["sum_logprob"], L)
    assert near(pool["perplexity"], math.exp(-L / pool["n_scored"]))
    assert near(pool["bits_per_byte"], -L / pool["n_bytes"] / math.log(2))
    n_chars = sum(r["n_chars"] for r in results)
    assert near(pool["bits_per_char"], -L / n_chars / math.log(2))
    assert near(pool["word_perplexity"], math.exp(-L / pool["n_words"]))


def test_units_override_the_normalisers(server):
    plain = server.ok("/score", {"text": TEXT})["results"][0]
    got = server.ok("/score", {"text": TEXT, "units": {"words": 7, "bytes": 11}})["results"][0]
    assert (got["n_words"], got["n_bytes"]) == (7, 11)
    assert near(got["word_perplexity"], math.exp(-plain["sum_logprob"] / 7))
    several = server.ok("/score", {"text": [TEXT, TEXT], "units": [None, {"words": 3}]})["results"]
    assert several[0] == plain and several[1]["n_words"] == 3
    assert several[1]["n_bytes"] == plain["n_bytes"]


def test_bos_and_eos(server):
    def tokens(**kw):
        return server.ok("/score", {"text": TEXT, "logprobs": 0, **kw})["results"][0]

    plain, bare, ended = tokens(), tokens(add_bos=False), tokens(append_eos=True)
    assert plain["n_scored"] == plain["n_tokens"]
    assert bare["n_tokens"] == plain["n_tokens"] and bare["n_scored"] == plain["n_tokens"] - 1
    assert bare["tokens"][0]["logprob"] is None
    assert ended["n_tokens"] == plain["n_tokens"] + 1
    assert ended["tokens"][-1]["piece"] == "</s>"
    assert ended["tokens"][:-1] == plain["tokens"] and ended["n_bytes"] == plain["n_bytes"]
    assert tokens(add_bos=None) == plain


def test_ids_equal_text(server):
    ids = server.ok("/tokenize", {"prompt": TEXT})["tokens"]
    text = server.ok("/score", {"text": TEXT, "logprobs": 1})["results"][0]
    by_id = server.ok("/score", {"tokens": ids, "logprobs": 1})["results"][0]
    assert by_id["n_tokens"] == text["n_tokens"] + 1  # the BOS is the client's own here
    assert by_id["tokens"][0]["logprob"] is None
    assert [(t["id"], t["logprob"], t["top"]) for t in by_id["tokens"][1:]] == \
           [(t["id"], t["logprob"], t["top"]) for t in text["tokens"]]
    assert by_id["sum_logprob"] == text["sum_logprob"] and by_id["n_bytes"] == text["n_bytes"]
    added = server.ok("/score", {"tokens": [ids[1:]], "add_bos": True})["results"][0]
    assert added["sum_logprob"] == text["sum_logprob"]


def test_alternatives_ranks_entropy(server):
    got = server.ok("/score", {"text": TEXT, "logprobs": 5, "ranks": True, "entropy": True})
    for token in got["results"][0]["tokens"]:
        top = token["top"]
        assert len(top) == 5 and len({t["id"] for t in top}) == 5
        assert [t["logprob"] for t in top] == sorted((t["logprob"] for t in top), reverse=True)
        inside = [t for t in top if t["id"] == token["id"]]
        assert bool(inside) == (token["rank"] <= 5)
        if inside:
            assert inside[0]["logprob"] == token["logprob"]
        assert 0 < token["entropy"] <= math.log(4096)
    assert "tokens" not in server.ok("/score", {"text": TEXT})["results"][0]


def test_windows_cover_each_token_once(server):
    whole = server.ok("/score", {"text": LONG, "logprobs": 0})["results"][0]
    assert whole["n_tokens"] > 600 and whole["windows"]["count"] == math.ceil(whole["n_tokens"] / 512)
    w = server.ok("/score", {"text": LONG, "max_context": 100, "stride": 75,
                             "logprobs": 0})["results"][0]
    n = w["n_tokens"]
    count = 1 + math.ceil((n - 100) / 75)
    assert w["windows"] == {"count": count, "max_context": 100, "stride": 75,
                            "positions_computed": 100 * count}
    assert w["n_scored"] == n == len(w["tokens"])


def test_windows_equal_scoring_their_tokens_alone(server):
    """stride = max_context is the rolling scheme: window k sees only its own tokens."""
    ids = server.ok("/tokenize", {"prompt": LONG})["tokens"]
    got = server.ok("/score", {"tokens": ids, "max_context": 64, "logprobs": 0})["results"][0]
    second = server.ok("/score", {"tokens": ids[64:129], "logprobs": 0})["results"][0]
    assert [t["logprob"] for t in got["tokens"][65:129]] == \
           [t["logprob"] for t in second["tokens"][1:]]


def test_long_text_is_windowed_or_refused(server):
    message = error_of(server.post("/score", {"text": LONG, "on_long": "error"}), 400,
                       "context_length_exceeded", "on_long")
    assert "max_length=512" in message
    server.ok("/score", {"text": TEXT, "on_long": "error"})


def test_memory_telemetry(server):
    got = server.ok("/score", {"text": TEXT, "memory": "tokens"})["results"][0]
    layer = got["memory"]["layers"][0]
    n = got["n_tokens"] + 1  # BOS and the last position too
    assert len(layer["tokens"]) == n and layer["lookups"] == n * layer["heads"] * layer["knn"]
    used = {s for position in layer["tokens"] for head in position for s in head["slots"]}
    assert near(layer["mem_used"], len(used) / layer["slots"])
    weight = {}
    for position in layer["tokens"]:
        for h in position:
            for slot, share in zip(h["slots"], h["weights"]):
                weight[slot] = weight.get(slot, 0.0) + share
    total = sum(weight.values())
    kl = math.log(layer["slots"]) + sum(v / total * math.log(v / total) for v in weight.values()
                                        if v > 0)
    assert near(layer["mem_kl_w"], kl, 1e-6)
    message = error_of(server.post("/score", {"text": LONG, "memory": "tokens"}), 400,
                       "invalid_value", "memory")
    assert "512" in message
    long = server.ok("/score", {"text": LONG, "memory": "summary"})["results"][0]
    assert long["memory"]["layers"][0]["lookups"] > 0


def test_empty_text(server):
    got = server.ok("/score", {"text": "", "logprobs": 0})["results"][0]
    assert got["n_tokens"] == got["n_scored"] == got["n_bytes"] == 0 and got["n_words"] == 1
    assert got["perplexity"] is None and got["mean_nll"] is None and got["tokens"] == []
    assert got["is_greedy"] is False


def test_empty_text_without_bos_has_nothing_to_score_its_end_from(server):
    body = {"text": "", "append_eos": True, "logprobs": 0}
    assert server.ok("/score", body)["results"][0]["n_scored"] == 1
    got = server.ok("/score", {**body, "add_bos": False})["results"][0]
    assert (got["n_tokens"], got["n_scored"]) == (1, 0)
    assert [(t["id"], t["logprob"]) for t in got["tokens"]] == [(1, None)]


WRONG = [
    ({}, "missing_field", "text"),
    ({"text": "a", "tokens": [1]}, "conflicting_fields", "tokens"),
    ({"text": [1]}, "invalid_value", "text"),
    ({"text": 1}, "invalid_value", "text"),
    ({"tokens": "a"}, "invalid_value", "tokens"),
    ({"tokens": ["a"]}, "invalid_value", "tokens"),
    ({"tokens": [[]]}, "invalid_value", "tokens"),
    ({"tokens": [1, None]}, "invalid_value", "tokens"),
    ({"tokens": [1, 4096]}, "token_out_of_range", "tokens"),
    ({"text": ["a"] * 257}, "too_many_items", "text"),
    ({"text": "a", "add_bos": 1}, "invalid_value", "add_bos"),
    ({"text": "a", "append_eos": "no"}, "invalid_value", "append_eos"),
    ({"text": "a", "max_context": 0}, "invalid_value", "max_context"),
    ({"text": "a", "max_context": 513}, "invalid_value", "max_context"),
    ({"text": "a", "stride": 0}, "invalid_value", "stride"),
    ({"text": "a", "max_context": 10, "stride": 11}, "invalid_value", "stride"),
    ({"text": "a", "on_long": "truncate"}, "invalid_value", "on_long"),
    ({"text": "a", "logprobs": -1}, "invalid_value", "logprobs"),
    ({"text": "a", "ranks": 1}, "invalid_value", "ranks"),
    ({"text": "a", "entropy": 1}, "invalid_value", "entropy"),
    ({"text": "a", "units": 5}, "invalid_value", "units"),
    ({"text": "a", "units": {"words": 0}}, "invalid_value", "units"),
    ({"text": "a", "units": {"pages": 1}}, "invalid_value", "units"),
    ({"text": ["a", "b"], "units": {"words": 1}}, "invalid_value", "units"),
    ({"text": ["a", "b"], "units": [{"words": 1}]}, "invalid_value", "units"),
    ({"text": "a", "memory": 1}, "invalid_value", "memory"),
    ({"text": "a", "memory": {}}, "invalid_value", "memory"),
    ({"text": "a", "priority": "x"}, "invalid_value", "priority"),
    ({"text": "a", "language": 0}, "unsupported_parameter", "language"),
    ({"text": "a", "stream": 1}, "invalid_value", "stream"),
    ({"text": "a", "target_ids": 1}, "invalid_value", "target_ids"),
    ({"text": "a", "target_ids": []}, "invalid_value", "target_ids"),
    ({"text": "a", "target_ids": [5] * 101}, "invalid_value", "target_ids"),
    ({"text": "a", "target_ids": [4096]}, "token_out_of_range", "target_ids"),
    ({"text_1": "a", "text_2": "b"}, "wrong_dialect", "text_1"),
    ({"queries": "a", "documents": "b"}, "wrong_dialect", "queries"),
    ({"query": "a", "items": ["b"]}, "wrong_dialect", "query"),
]


@pytest.mark.parametrize("body, code, param", WRONG, ids=[json.dumps(w[0])[:50] for w in WRONG])
def test_wrong_field_is_named(server, body, code, param):
    error_of(server.post("/score", body), 400, code, param)


def test_wrong_model_is_404(server):
    error_of(server.post("/score", {"text": "a", "model": "x"}), 404, "model_not_found", "model")


def check_limits_of_forms(s):
    """At most 40 tokens and 2 items, the context counted with each of its endings."""
    def refused(body, code, param, path="/score"):
        return error_of(s.post(path, body), 400, code, param)

    pair = {"context": [5], "continuation": [6]}
    refused({"context": [5], "continuations": [[6]] * 3}, "too_many_items", "continuations")
    refused({"pairs": [pair] * 3}, "too_many_items", "pairs")
    within = [("/score", {"tokens": [5] * 40}), ("/score", {"tokens": [[5] * 20, [5] * 20]}),
              ("/score", {"text": AT_LIMIT}), ("/score", {"context": [5] * 18, "continuations": [[6, 7]] * 2}),
              ("/score", {"tokens": [5] * 39, "windows": "xlm", "bptt": 8}),
              ("/v1/score", {"query": [5] * 19, "items": [[6]] * 2, "label_token_ids": [5]})]
    for path, body in within:
        s.ok(path, body)
    refused({"tokens": [[5] * 20, [5] * 21]}, "too_many_tokens", "tokens")
    refused({"text": AT_LIMIT + " a"}, "too_many_tokens", "text")
    refused({"context": [5] * 18, "continuations": [[6, 7], [6, 7, 8]]}, "too_many_tokens", "continuations")
    refused({"tokens": [5] * 40, "windows": "xlm", "bptt": 41}, "too_many_tokens", "bptt")
    refused({"query": [5] * 19, "items": [[6], [6, 7]], "label_token_ids": [5]}, "too_many_tokens", "items", "/v1/score")
    assert "--max-score-tokens" in refused({"context": [5] * 18, "continuations": [[6, 7]] * 2,
                                            "unconditional": True}, "too_many_tokens",
                                           "continuations")
    refused({"context": [5] * 19, "continuations": [[6, 7]] * 2}, "too_many_tokens",
            "continuations")
    refused({"context": [5] * 41, "continuations": [[6]]}, "too_many_tokens", "context")
    refused({"pairs": [{"context": LONG, "continuation": "a"}]}, "too_many_tokens", "pairs")
    # White space has no tokens, but what is put together of it is bounded too: 64 bytes a token.
    refused({"context": " " * 1300, "continuations": ["a", "b"]}, "too_many_tokens",
            "continuations")
    labels = {"label_token_ids": [5]}
    refused({"query": [5], "items": [[6]] * 3, **labels}, "too_many_items", "items", "/v1/score")
    refused({"query": [5] * 20, "items": [[6]] * 2, **labels}, "too_many_tokens", "items",
            "/v1/score")
    refused({"query": LONG, "items": "a", **labels}, "too_many_tokens", "items", "/v1/score")


def test_limits_are_named():
    with Server("--max-score-tokens", "40", "--max-score-items", "2") as s:
        message = error_of(s.post("/score", {"text": LONG}), 400, "too_many_tokens", "text")
        assert "40" in message
        assert "--max-score-tokens" in message
        message = error_of(s.post("/score", {"text": ["a"] * 3}), 400, "too_many_items", "text")
        assert "--max-score-items" in message and "3" in message and "2" in message
        error_of(s.post("/score", {"tokens": [5] * 41}), 400, "too_many_tokens", "tokens")
        check_limits_of_forms(s)
        # 30 tokens with 20 alternatives each exceed 4 * 40 reported log-probabilities
        error_of(s.post("/score", {"tokens": [5] * 30, "logprobs": 20}), 400, "too_many_tokens",
                 "logprobs")
        s.ok("/score", {"tokens": [5] * 30, "logprobs": 2})
