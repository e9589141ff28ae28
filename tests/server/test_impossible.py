"""What every route says of a token that the model holds for impossible: its logit, and so its log-probability, is minus
infinity."""

import itertools
import json
import os
import shutil
import sys

import pytest
from server_harness import DEMO, ROOT, Server

sys.path.insert(0, os.path.join(ROOT, "tests"))
from broken_model import set_output_bias, with_output_bias  # noqa: E402

WORD, TOKEN = " saw", 300
NULL = ("sum_logprob", "mean_nll", "perplexity", "bits_per_token", "bits_per_byte", "min_logprob")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    model = with_output_bias(TOKEN, float("-inf"), DEMO, tmp_path_factory.mktemp("impossible") / "model")
    with Server(model=str(model)) as s:
        assert s.ok("/tokenize", {"prompt": "A boy" + WORD})["tokens"][-1] == TOKEN
        yield s


def expect_impossible(result):
    assert result["impossible"] is True and result["n_scored"] == 2
    assert [name for name in NULL if result[name] is not None] == []
    assert (result["tokens"][1]["logprob"], result["tokens"][1]["impossible"]) == (None, True)
    assert result["tokens"][2]["logprob"] < 0 and "impossible" not in result["tokens"][2]


def test_a_model_of_three_tokens(tmp_path):
    """It starts, as its self-test meets impossible tokens; and no way to draw finds another one."""
    model, kept = shutil.copytree(DEMO, tmp_path / "model"), (261, 262, TOKEN)
    set_output_bias(model, set(range(4096)) - set(kept), float("-inf"))
    os.remove(os.path.join(model, "model.sha256"))
    with Server(model=str(model)) as s:
        for temperature, top_k, top_p, typical_p in itertools.product((0, 0.01, 2), (0, 2, 50), (1, 0.5), (1, 0.5)):
            body = {"prompt": [261], "max_tokens": 10, "temperature": temperature, "top_k": top_k, "top_p": top_p,
                    "typical_p": typical_p, "logprobs": 4, "seed": 1}
            choice = s.ok("/generate", body)["choices"][0]
            assert set(choice["token_ids"]) <= set(kept), body
            for token in choice["logprobs"]:
                assert token["logprob"] <= 0
                assert [top.get("impossible", False) for top in token["top"]] == [False] * 3 + [True], token
        scored = s.ok("/score", {"tokens": [261, 262, TOKEN], "entropy": True, "logprobs": 0})["results"][0]
        first, second = scored["tokens"][1:]
        assert 0 < first["entropy"] < 1.1 and 0 < second["entropy"] < 1.1  # of three tokens at most ln 3


@pytest.mark.parametrize("stream", [False, True])
def test_scores(server, stream):
    body = {"tokens": [[5, TOKEN, 7], [5, 6, 7]], "logprobs": 1, "ranks": True}
    if stream:
        text = server.post("/score", {**body, "stream": True}).text
        lines = [json.loads(line) for line in text.splitlines() if line]
        answer = {"results": lines[:2], **lines[2]}
    else:
        answer = server.ok("/score", body)
    first, second = answer["results"]
    expect_impossible(first)
    assert first["tokens"][1]["rank"] == 4096  # of as many tokens
    assert second["sum_logprob"] < 0 and "impossible" not in second
    assert answer["aggregate"]["sum_logprob"] is None and answer["aggregate"]["perplexity"] is None


def test_a_continuation_that_is_impossible_is_never_the_best(server):
    answer = server.ok("/score", {"context": "A boy", "continuations": [WORD, " zzzz"]})
    assert answer["results"][0]["impossible"] and answer["ranking"]["sum"] == answer["ranking"]["per_token"] == 1


def test_labels(server):
    body = {"query": [5], "items": [[7]], "label_token_ids": [TOKEN, 7, 8]}
    for softmax in (True, False):
        (scores,) = server.ok("/v1/score", {**body, "apply_softmax": softmax})["scores"]
        assert scores[0] == 0 and scores[1] > 0 and scores[2] > 0
        assert not softmax or sum(scores) == pytest.approx(1)


def test_prompts_of_generations(server):
    prompt = {"prompt": [5, TOKEN, 7], "echo": True, "max_tokens": 0}
    native = server.ok("/generate", {**prompt, "logprobs": 1})["choices"][0]["logprobs"]
    assert (native[1]["logprob"], native[1]["impossible"]) == (None, True)
    openai = server.ok("/v1/completions", {**prompt, "logprobs": 1})["choices"][0]["logprobs"]
    assert openai["token_logprobs"][:2] == [None, -9999] and openai["token_logprobs"][2] < 0
    assert openai["top_logprobs"][1][WORD] == -9999 and len(openai["top_logprobs"][1]) == 2


def test_drawn_where_nothing_else_may_be(server):
    body = {"prompt": [5, 7], "max_tokens": 3, "logprobs": 1, "allowed_token_ids": [TOKEN]}
    native = server.ok("/generate", body)["choices"][0]
    assert native["token_ids"] == [TOKEN] * 3
    assert all(token["logprob"] is None and token["impossible"] for token in native["logprobs"])
    openai = server.ok("/v1/completions", body)["choices"][0]
    assert openai["logprobs"]["token_logprobs"] == [-9999] * 3
    free = server.ok("/generate", {"prompt": [5, 7], "max_tokens": 50, "logit_bias": {str(TOKEN): 100}, "logprobs": 1})
    assert TOKEN not in free["choices"][0]["token_ids"]


def test_tgi(server):
    parameters = {"max_new_tokens": 1, "details": True, "decoder_input_details": True}
    prefill = server.ok("/generate", {"inputs": "A boy" + WORD, "parameters": parameters})["details"]["prefill"]
    assert prefill[-1]["id"] == TOKEN and prefill[-1]["logprob"] is None
