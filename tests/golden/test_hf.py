"""Hugging Face directories through convert.py and the server, against the transformers package.

tests/golden/hf holds small random models and the logits and greedy texts that the package computed with
them in fp32 (tests/hf/truth.py made them; make check-hf makes others and compares them likewise).

Rerun one: /usr/bin/python3 -m pytest tests/golden/test_hf.py -k llama3-rope
"""

import functools
import json
import os
import shutil
import subprocess
import sys

import golden_harness as gh
import numpy as np
import pytest

sys.path.insert(0, str(gh.ROOT / "tests" / "convert"))
from numpy_memory_layers import MemoryLlama  # noqa: E402
from numpy_model import log_softmax, read_safetensors  # noqa: E402

FOLDER = gh.ROOT / "tests" / "golden" / "hf"
CASES = sorted(path.name for path in FOLDER.iterdir())
LOGIT = 1e-4  # what two ways of summing in fp32 may differ by; logits are of the order of 3


def converted(source, output, *args):
    done = subprocess.run(["/usr/bin/python3", gh.ROOT / "models/convert/convert.py", source, "--from", "hf",
                           "--output", output, *args], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return output


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """model(case): its directory, made once."""
    folder = tmp_path_factory.mktemp("hf")
    return functools.cache(lambda case: converted(FOLDER / case, folder / case))


def due(case):
    expected = json.loads((FOLDER / case / "expected.json").read_text())
    expected["logits"] = read_safetensors(FOLDER / case / "expected.safetensors")["logits"]
    return expected


@pytest.mark.parametrize("case", CASES)
def test_the_formulas_give_what_transformers_computes(case, model):
    expected = due(case)
    logprobs, _ = MemoryLlama(model(case)).forward(expected["ids"])
    np.testing.assert_allclose(logprobs, log_softmax(expected["logits"].astype(np.float64)), atol=LOGIT)


def read_arrays(path):
    """name -> array, of what tests/gpu/forward wrote."""
    found = {}
    with open(path, "rb") as file:
        while header := file.readline():
            name, dtype, rows, cols = header.decode().split()
            data = file.read(4 * int(rows) * int(cols))
            found[name] = np.frombuffer(data, {"f32": "<f4", "i32": "<i4"}[dtype]).reshape(int(rows), -1)
    return found


def logits(model, ids, tmp_path, device, *flags):
    """[n, n_vocab] of all rows, by the forward that the server runs."""
    (tmp_path / "ids").write_text("0 %s\n" % " ".join(map(str, ids)))
    done = subprocess.run([gh.absolute(gh.BUILD) / "tests/gpu/forward", model, tmp_path / "ids",
                           tmp_path / "out", "--device", device, "--dtype", "f32", "--logits", *flags],
                          capture_output=True, text=True, env={**os.environ, **gh.DOUBLE}, timeout=gh.START_S)
    assert done.returncode == 0, done.stderr
    return read_arrays(tmp_path / "out")["0.logits"]


@pytest.mark.parametrize("device", ["ref", "cpu", "cuda"])
@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(case, device, model, tmp_path):
    expected = due(case)
    for rows in ("0", "5"):  # all at once, and in pieces that follow one another
        got = logits(model(case), expected["ids"], tmp_path, device, "--rows", rows)
        np.testing.assert_allclose(got, expected["logits"], atol=LOGIT)


@pytest.mark.parametrize("case", CASES)
def test_greedy_text_is_that_of_transformers(case, model):
    expected = due(case)
    server = gh.Server(model(case), "--dtype", "f32")
    got = server.post("/generate", {"prompt": expected["ids"][:expected["n_prompt"]], "temperature": 0,
                                    "max_tokens": len(expected["greedy"]), "ignore_eos": True,
                                    "repetition_penalty": 1})
    server.stop()
    assert got["choices"][0]["token_ids"] == expected["greedy"]


def test_each_of_several_end_tokens_ends_a_text(tmp_path):
    """The first generated word, wherever it stands in the list of those that end a text."""
    expected = due("llama")
    prompt, first = expected["ids"][:expected["n_prompt"]], expected["greedy"][0]
    source = tmp_path / "source"
    shutil.copytree(FOLDER / "llama", source)
    others = [i for i in range(40) if i not in expected["greedy"]]
    for ends in (first, [others[0], first], [first, others[0]], others[:2]):
        (source / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
        server = gh.Server(converted(source, tmp_path / "model"), "--dtype", "f32")
        body = {"prompt": prompt, "temperature": 0, "max_tokens": 3}
        choice = server.post("/generate", body)["choices"][0]
        rest = server.post("/generate", {**body, "ignore_eos": True})["choices"][0]
        least = server.post("/generate", {**body, "min_tokens": 2})["choices"][0]
        named = server.get("/info")["model"]
        server.stop()
        stops = ends != others[:2]
        assert (choice["finish_reason"], len(choice["token_ids"])) == (("stop", 1) if stops else ("length", 3))
        assert (rest["finish_reason"], rest["token_ids"]) == ("length", expected["greedy"][:3])
        assert (least["token_ids"][0] == first) == (not stops)
        listed = ends if isinstance(ends, list) else [ends]
        assert (named["eos_token_id"], named["eos_token_ids"]) == (listed[0], listed)


def test_sampling_by_default_is_what_the_authors_advise(model):
    """Of qwen2's generation_config.json; the same numbers sent with a request draw the same text."""
    advice = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05}
    server = gh.Server(model("qwen2"), "--dtype", "f32")
    defaults = server.get("/info")["defaults"]
    assert {name: round(defaults[name], 6) for name in (*advice, "min_p")} == {**advice, "min_p": 0}
    plain = {"temperature": 1, "top_p": 1, "top_k": 0, "repetition_penalty": 1}
    body = {"prompt": [3, 1, 4, 15], "max_tokens": 40, "seed": 5, "ignore_eos": True}
    said, unsaid, other = (server.post("/generate", {**body, **more})["choices"][0]["token_ids"]
                           for more in (advice, {}, plain))
    server.stop()
    assert said == unsaid != other
    ids = ("generate", "--model", model("qwen2"), "--dtype", "f32", "--ids", "--max-tokens", 40, "--seed", 5,
           "--ignore-eos", "3 1 4 15")
    unsaid, said, other = (gh.run_program(*ids[:-1], *more, ids[-1]) for more in (
        (), ("--temperature", 0.7, "--top-p", 0.8, "--top-k", 20, "--repetition-penalty", 1.05),
        ("--temperature", 1, "--top-p", 1, "--top-k", 0, "--repetition-penalty", 1)))
    assert unsaid[0] == 0 and said[:2] == unsaid[:2] and other[1] != said[1], unsaid


@pytest.mark.parametrize("key, value, words", [
    ("eos_token_id", [], ["eos_token_id", "1 to 16"]), ("eos_token_id", list(range(17)), ["1 to 16"]),
    ("eos_token_id", [1, 40], ["eos_token_id is 40", "vocab_size is 40"]),
    ("eos_token_id", [1, "2"], ["eos_token_id[1]", "integer 0 .."]), ("eos_token_id", -2, ["-1 .."]),
    ("rope_scaling", [], ["rope_scaling must be an object"]),
    ("rope_scaling", {"factor": 2}, ["rope_scaling.rope_type is missing"]),
    ("rope_scaling", {"rope_type": "yarn", "factor": 2}, ["rope_scaling.rope_type", "yarn", "llama3"]),
    ("rope_scaling", {"rope_type": "linear"}, ["rope_scaling.factor is missing"]),
    ("rope_scaling", {"rope_type": "linear", "factor": 0.5}, ["rope_scaling.factor is 0.5", "1 .. 1e+06"]),
    ("rope_scaling", {"rope_type": "linear", "factor": 2, "low_freq_factor": 1}, ["low_freq_factor"]),
    ("rope_scaling", {"rope_type": "llama3", "factor": 2, "low_freq_factor": 4, "high_freq_factor": 4,
                      "original_max_position_embeddings": 8}, ["high_freq_factor is 4", "low_freq_factor 4"]),
    ("attention_bias", True, ["layers.0.attention.query.bias", "missing"]),
    ("attention_out_bias", True, ["layers.0.attention.out.bias"]), ("ffn_bias", True, ["ffn.gate.bias"]),
    ("query_key_norm", True, ["layers.0.attention.query_norm.weight"]), ("query_key_norm", 1, ["true or false"])])
def test_what_does_not_fit_is_refused(key, value, words, model, tmp_path):
    shutil.copytree(model("llama"), tmp_path / "m")
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    (tmp_path / "m" / "config.json").write_text(json.dumps({**config, key: value}))
    status, _, error = gh.run_program("inspect", "--model", tmp_path / "m")
    assert status == 1 and all(word in error for word in words), error
