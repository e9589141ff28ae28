"""POST /v1/score: SGLang's label scoring."""

import json
import math

import numpy as np
import pytest

from server_harness import error_of

QUERY = "The old man went"
ITEMS = [" home.", " to sea", ""]
LABELS = [267, 263, 5, 300]


def behind(server, **form):
    """The log-probabilities of the labels behind a text, by /score."""
    result = server.ok("/score", {**form, "target_ids": LABELS})["results"][0]
    # 9 digits tell a float apart: back to its exact value.
    return [float(np.float32(t["logprob"])) for t in result["target_logprobs"]]


@pytest.mark.parametrize("item_first", [False, True])
def test_scores_are_probabilities_behind_each_prompt(server, item_first):
    got = server.ok("/v1/score", {"query": QUERY, "items": ITEMS, "label_token_ids": LABELS,
                                  "item_first": item_first, "model": "demo"})
    assert set(got) == {"id", "object", "created", "model", "scores", "usage", "timings"}
    assert got["object"] == "scoring" and got["model"] == "demo"
    n = 0
    for item, scores in zip(ITEMS, got["scores"]):
        text = item + QUERY if item_first else QUERY + item
        expected = [math.exp(x) for x in behind(server, text=text)]
        assert scores == pytest.approx(expected, rel=1e-12)
        n += 1 + server.ok("/tokenize", {"prompt": text, "add_special_tokens": False})["count"]
    assert got["usage"] == {"prompt_tokens": n, "completion_tokens": 0, "total_tokens": n,
                            "prompt_tokens_details": {"cached_tokens": 0}}


def test_softmax_is_over_the_labels(server):
    got = server.ok("/v1/score", {"query": QUERY, "items": ITEMS[0], "label_token_ids": LABELS,
                                  "apply_softmax": True})
    p = [math.exp(x) for x in behind(server, text=QUERY + ITEMS[0])]
    assert got["scores"] == [pytest.approx([x / sum(p) for x in p], rel=1e-9)]
    assert sum(got["scores"][0]) == pytest.approx(1, rel=1e-12)


def test_ids_get_nothing_added(server):
    got = server.ok("/v1/score", {"query": [20, 30], "items": [[40], []], "label_token_ids": LABELS,
                                  "id": "mine", "item_first": True})
    assert got["id"] == "mine" and got["usage"]["prompt_tokens"] == 5
    for item, scores in zip([[40, 20, 30], [20, 30]], got["scores"]):
        expected = [math.exp(x) for x in behind(server, tokens=item)]
        assert scores == pytest.approx(expected, rel=1e-12)


def test_an_empty_prompt_starts_from_bos(server):
    got = server.ok("/v1/score", {"query": "", "items": "", "label_token_ids": LABELS})
    assert got["scores"][0] == pytest.approx([math.exp(x) for x in behind(server, text="")])
    assert got["usage"]["prompt_tokens"] == 1


def test_a_prompt_may_fill_the_context(server):
    context = server.get("/v1/models").json()["data"][0]["max_model_len"]
    body = {"query": [20] * (context - 1), "items": [[30]], "label_token_ids": LABELS}
    assert server.ok("/v1/score", body)["usage"]["prompt_tokens"] == context
    error_of(server.post("/v1/score", {**body, "items": [[30], [30, 40]]}), 400, "context_length_exceeded", "items")


GOOD = {"query": "a", "items": ["b"], "label_token_ids": [5]}
WRONG = [
    ({k: v for k, v in GOOD.items() if k != "query"}, "missing_field", "query"),
    ({k: v for k, v in GOOD.items() if k != "items"}, "missing_field", "items"),
    ({k: v for k, v in GOOD.items() if k != "label_token_ids"}, "missing_field",
     "label_token_ids"),
    ({**GOOD, "query": 5}, "invalid_value", "query"),
    ({**GOOD, "items": []}, "invalid_value", "items"),
    ({**GOOD, "items": [[5]]}, "invalid_value", "items"),
    ({**GOOD, "query": [5]}, "invalid_value", "items"),
    ({**GOOD, "query": [5], "items": [5]}, "invalid_value", "items"),
    ({**GOOD, "query": [5], "items": [[4096]]}, "token_out_of_range", "items"),
    ({**GOOD, "query": [], "items": [[]]}, "invalid_value", "items"),
    ({**GOOD, "items": ["b"] * 257}, "too_many_items", "items"),
    ({**GOOD, "query": "word " * 600}, "context_length_exceeded", "items"),
    ({**GOOD, "label_token_ids": []}, "invalid_value", "label_token_ids"),
    ({**GOOD, "label_token_ids": [5] * 101}, "invalid_value", "label_token_ids"),
    ({**GOOD, "label_token_ids": [4096]}, "token_out_of_range", "label_token_ids"),
    ({**GOOD, "apply_softmax": 1}, "invalid_value", "apply_softmax"),
    ({**GOOD, "item_first": "no"}, "invalid_value", "item_first"),
    ({**GOOD, "timeout_ms": 0}, "invalid_value", "timeout_ms"),
    ({"text": "a"}, "wrong_dialect", "text"),
    ({"context": "a", "continuations": ["b"]}, "wrong_dialect", "context"),
    ({"text_1": "a", "text_2": "b"}, "wrong_dialect", "text_1"),
]


@pytest.mark.parametrize("body, code, param", WRONG, ids=[json.dumps(w[0])[:60] for w in WRONG])
def test_wrong_field_is_named(server, body, code, param):
    message = error_of(server.post("/v1/score", body), 400, code, param)
    assert code != "context_length_exceeded" or "max_length=512" in message


def test_only_post(server):
    answer = server.get("/v1/score")
    assert answer.status_code == 405 and answer.headers["Allow"] == "POST"
