"""The all-attention golden cases through the server, by ids: streams, greedy text, no context limit.

Rerun one: B=build PKMSERVE=build/pkmserve /usr/bin/python3 -m pytest \
           tests/golden/test_all_attention_http.py -k 'd-allattn and stream'
"""

import json
from types import SimpleNamespace

import golden_harness as gh
import pytest

NAMES = ["a-fixed-ffn", "c-allattn-fixed", "d-allattn-adaptive", "e-allattn-adaptive-io",
         "g-span-epsilon"]
BATCH = 64  # tokens of a step: a ring then holds the window and so many


@pytest.fixture(scope="module", params=NAMES)
def case(request):
    """A server on the case, and what the original computed."""
    gh.convert_all()
    due = json.loads((gh.ROOT / "tests" / "golden" / "allattention" / request.param
                      / "expected.json").read_text())
    server = gh.Server(request.param, "--max-batch-tokens", str(BATCH), "--max-seqs", "4")
    yield SimpleNamespace(server=server, due=due, tolerance=due["tolerance"])
    server.stop()


def score(case, ids, **fields):
    return case.server.post("/score", {"tokens": ids, "logprobs": 0, **fields})["results"][0]


def logprobs(result):
    first, *rest = result["tokens"]
    assert first["logprob"] is None, "the first token of a stream is not scored"
    return [token["logprob"] for token in rest]


def test_a_text_is_scored_as_one_stream(case):
    got = score(case, case.due["ids"])
    for t, (ours, theirs) in enumerate(zip(logprobs(got), case.due["logprobs"])):
        assert abs(ours - theirs) <= case.tolerance["logprob_abs"], (t, ours, theirs)
    assert abs(got["mean_nll"] - case.due["nll"]) <= case.tolerance["nll_abs"]
    assert got["windows"] == {"count": 1, "max_context": None, "stride": None,
                              "positions_computed": len(case.due["ids"]) - 1}


def test_greedy_continuations(case):
    for greedy in case.due["greedy"]:
        got = case.server.post("/generate", {"prompt": case.due["ids"][:greedy["prefix_len"]],
                                             "max_tokens": len(greedy["tokens"]),
                                             "temperature": 0})
        assert got["choices"][0]["token_ids"] == greedy["tokens"], greedy["prefix_len"]


def test_what_was_generated_scores_as_a_stream(case):
    """Past the ring's end, token by token and in steps of BATCH: the same bits, and none shared."""
    prompt = case.due["ids"][:20]
    got = case.server.post("/generate", {"prompt": prompt, "max_tokens": 600, "seed": 1,
                                         "logprobs": 0})["choices"][0]
    assert len(got["token_ids"]) == 600 and got["finish_reason"] == "length"
    again = logprobs(score(case, prompt + got["token_ids"]))[len(prompt) - 1:]
    ours = [token["logprob"] for token in got["logprobs"]]
    assert ours == again


def test_windows_are_refused(case):
    for field in ("max_context", "stride"):
        got = case.server.post("/score", {"tokens": [1, 2, 3], field: 2}, 400)["error"]
        assert (got["code"], got["param"]) == ("conflicting_fields", field)


def test_info_says_that_there_is_no_limit(case):
    info = case.server.get("/info")
    assert info["model"]["family"] == "all_attention" and info["model"]["context"] is None
    assert info["limits"]["max_model_len"] == 1 << 28 and info["defaults"]["max_context"] is None
    assert info["defaults"]["prefix_cache"] == "off"


def test_a_limit_can_be_set():
    server = gh.Server("c-allattn-fixed", "--max-model-len", "100")
    try:
        got = server.post("/score", {"tokens": [1] * 150, "max_context": 80})["results"][0]
        assert got["windows"]["max_context"] == 80 and got["windows"]["count"] == 2
        body = {"prompt": [1] * 90, "max_tokens": 20}
        assert server.post("/generate", body, 400)["error"]["code"] == "context_length_exceeded"
    finally:
        server.stop()
