"""Random models of the transformers package, and memories beside such, that no one has seen before, converted
and served: make check-hf.

Each run draws other models. HF_SEED=N repeats the ones that a failure names, HF_COUNT=N draws so many.
"""

import json
import os
import secrets
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "golden"), str(ROOT / "tests" / "hf")]
import golden_harness as gh  # noqa: E402
import memory_truth  # noqa: E402
import test_hf as served  # noqa: E402
import test_hf_memory as with_memory  # noqa: E402
import truth  # noqa: E402

SEED = int(os.environ.get("HF_SEED") or secrets.randbelow(10**6))
COUNT = int(os.environ.get("HF_COUNT") or 24)


@pytest.fixture(scope="module", params=range(COUNT), ids=lambda i: "HF_SEED=%d-%d" % (SEED, i))
def case(request, tmp_path_factory):
    """(model directory, what transformers computes with its source)"""
    folder = tmp_path_factory.mktemp("case")
    drawn = truth.random_case(np.random.default_rng([SEED, request.param]))
    print("%s: %s" % (request.node.name, drawn))
    truth.make(folder / "source", drawn, SEED + request.param)
    expected = json.loads((folder / "source" / "expected.json").read_text())
    expected["logits"] = served.read_safetensors(folder / "source" / "expected.safetensors")["logits"]
    return served.converted(folder / "source", folder / "model"), expected


@pytest.mark.parametrize("device", ["ref", "cpu"])
def test_logits(case, device, tmp_path):
    model, expected = case
    got = served.logits(model, expected["ids"], tmp_path, device)
    scale = max(1, abs(expected["logits"]).max() / 10)
    np.testing.assert_allclose(got, expected["logits"], atol=served.LOGIT * scale)


def test_greedy_text_and_scores(case):
    model, expected = case
    server = gh.Server(model, "--dtype", "f32")
    got = server.post("/generate", {"prompt": expected["ids"][:expected["n_prompt"]], "temperature": 0,
                                    "max_tokens": len(expected["greedy"]), "ignore_eos": True})
    score = server.post("/score", {"tokens": expected["ids"], "add_bos": False, "logprobs": 0})["results"][0]
    server.stop()
    assert got["choices"][0]["token_ids"] == expected["greedy"]
    due = served.log_softmax(expected["logits"].astype(np.float64))
    due = due[np.arange(len(expected["ids"]) - 1), expected["ids"][1:]]
    logprobs = [token["logprob"] for token in score["tokens"][1:]]
    np.testing.assert_allclose(logprobs, due, atol=10 * served.LOGIT)


@pytest.mark.parametrize("number", range(COUNT), ids=lambda i: "HF_SEED=%d-%d" % (SEED, i))
def test_memories(number, tmp_path):
    drawn = memory_truth.random_case(np.random.default_rng([SEED, number, 1]))
    print(drawn)
    memory_truth.make(tmp_path / "case", drawn, SEED + number, least=0)
    model = with_memory.convert_case(tmp_path / "case", tmp_path / "model")
    expected = json.loads((tmp_path / "case" / "expected.json").read_text())
    due = served.read_safetensors(tmp_path / "case" / "expected.safetensors")["logits"]
    for device in ("ref", "cpu"):
        got = served.logits(model, expected["ids"], tmp_path, device)
        np.testing.assert_allclose(got, due, atol=served.LOGIT * max(1, abs(due).max() / 10))
