"""Memories beside Hugging Face directories, converted and served, against PyTorch in float64.

tests/golden/hf-memory holds memories and what they give on top of the models of tests/golden/hf
(tests/hf/memory_truth.py made them; make check-hf draws others).

Rerun one: /usr/bin/python3 -m pytest tests/golden/test_hf_memory.py -k peer
"""

import functools
import json

import golden_harness as gh
import numpy as np
import pytest
from test_hf import FOLDER as BASES
from test_hf import LOGIT, MemoryLlama, converted, log_softmax, logits, read_safetensors

FOLDER = gh.ROOT / "tests" / "golden" / "hf-memory"
CASES = sorted(path.name for path in FOLDER.iterdir())


def memory_of(folder):
    return next(folder / name for name in ("memory.pt", "memory.safetensors") if (folder / name).is_file())


def convert_case(folder, output, *args):
    expected = json.loads((folder / "expected.json").read_text())
    return converted(BASES / expected["base"], output, "--memory", memory_of(folder), "--memory-config",
                     folder / "memory.json", "--memory-names", expected["names"], *args)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """model(case): its directory, made once."""
    folder = tmp_path_factory.mktemp("hf-memory")
    return functools.cache(lambda case: convert_case(FOLDER / case, folder / case))


def due(case):
    expected = json.loads((FOLDER / case / "expected.json").read_text())
    expected["logits"] = read_safetensors(FOLDER / case / "expected.safetensors")["logits"]
    return expected


@pytest.mark.parametrize("case", CASES)
def test_the_formulas_give_what_pytorch_computes(case, model):
    expected = due(case)
    logprobs, _ = MemoryLlama(model(case)).forward(expected["ids"])
    np.testing.assert_allclose(logprobs, log_softmax(expected["logits"].astype(np.float64)), atol=LOGIT)


@pytest.mark.parametrize("device", ["ref", "cpu", "cuda"])
@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_pytorch(case, device, model, tmp_path):
    expected = due(case)
    got = logits(model(case), expected["ids"], tmp_path, device, "--rows", "5")
    np.testing.assert_allclose(got, expected["logits"], atol=LOGIT)


@pytest.mark.parametrize("case", ["all-places", "peer"])
def test_text_is_that_of_pytorch_and_places_are_told(case, model):
    expected = due(case)
    listed = json.loads((FOLDER / case / "memory.json").read_text())["memories"]
    server = gh.Server(model(case), "--dtype", "f32")
    got = server.post("/generate", {"prompt": expected["ids"][:expected["n_prompt"]], "temperature": 0,
                                    "max_tokens": len(expected["greedy"]), "ignore_eos": True})
    named = server.get("/info")["model"]["memories"]
    score = server.post("/score", {"tokens": expected["ids"], "memory": "summary"})["results"][0]
    server.stop()
    assert got["choices"][0]["token_ids"] == expected["greedy"]
    places = [(m["layer"], {"replace": "in"}.get(m["place"], m["place"])) for m in listed]
    assert [(m["layer"], m["place"]) for m in named] == places
    assert [(m["layer"], m["place"]) for m in score["memory"]["layers"]] == places


@pytest.mark.parametrize("args", [("--values", "q4"), ("--dtype", "bf16"), ("--dtype", "int8")])
def test_other_types_are_served(args, tmp_path):
    """What that costs is more than rounding of fp32, and is bounded."""
    expected = due("all-places")
    made = convert_case(FOLDER / "all-places", tmp_path / "model", *args)
    got = logits(made, expected["ids"], tmp_path, "cpu")
    assert LOGIT < np.abs(got - expected["logits"]).mean() < 0.15 * np.abs(expected["logits"]).mean()
