"""sparse-memory-lm: the author's model code against the converter and the server, from his files to text.

The tolerances are those of tests/golden/sparse-memory-lm/README.md.
"""

import json
import re
import subprocess
import sys

import golden_harness as gh
import numpy as np
import pytest

sys.path.insert(0, str(gh.ROOT / "tests" / "convert"))
from numpy_model import stored_tensors  # noqa: E402

GOLDEN = gh.ROOT / "tests" / "golden"
CASES = ["shared-q4", "odd-scale"]
LOGPROB, WEIGHT, LOSS = 2e-4, 2e-5, 1e-4


def convert(case, output, *args):
    subprocess.run([sys.executable, str(gh.ROOT / "models" / "convert" / "convert.py"),
                    str(GOLDEN / "sparse-memory-lm" / case), "--output", str(output), "--tokenizer",
                    str(GOLDEN / "byte-bpe" / "gpt2" / "tokenizer.json"), *args],
                   check=True, stdout=subprocess.DEVNULL, timeout=120)


@pytest.fixture(scope="module", params=[(case, device) for case in CASES
                                        for device in ("cpu", "ref", "cuda")], ids="-".join)
def served(request, tmp_path_factory):
    """(server, expected.json, directory of the case)"""
    case, device = request.param
    model = tmp_path_factory.mktemp(case)
    convert(case, model / "model")
    server = gh.Server(model / "model", "--device", device, "--dtype", "f32", "--max-seqs", "4")
    due = json.loads((GOLDEN / "sparse-memory-lm" / case / "expected.json").read_text())
    yield server, due, GOLDEN / "sparse-memory-lm" / case
    server.stop()


def score(server, ids, **more):
    return server.post("/score", {"tokens": ids, "logprobs": 0, **more})["results"]


def test_sequences(served):
    server, due, _ = served
    for item in due["sequences"]:
        tokens = score(server, item["ids"])[0]["tokens"]
        got = np.array([token["logprob"] for token in tokens[1:]])
        np.testing.assert_allclose(got, item["logprobs"], rtol=0, atol=LOGPROB)


def test_slots_and_weights(served):
    server, due, _ = served
    for item in due["sequences"]:
        layers = score(server, item["ids"], memory="tokens")[0]["memory"]["layers"]
        assert [str(layer["layer"]) for layer in layers] == list(item["memory"])
        for layer, expected in zip(layers, item["memory"].values(), strict=True):
            for position, slots, weights in zip(expected["positions"], expected["slots"],
                                                expected["weights"], strict=True):
                for head, slot, weight in zip(layer["tokens"][position], slots, weights, strict=True):
                    got, of = np.argsort(head["slots"]), np.argsort(slot)
                    assert np.array_equal(np.take(head["slots"], got), np.take(slot, of))
                    np.testing.assert_allclose(np.take(head["weights"], got), np.take(weight, of),
                                               rtol=0, atol=WEIGHT)


def test_greedy_text(served):
    server, due, _ = served
    greedy = due["greedy"]
    got = server.post("/generate", {"prompt": greedy["prompt"], "max_tokens": len(greedy["ids"]),
                                    "temperature": 0, "ignore_eos": True})["choices"][0]
    assert got["token_ids"] == greedy["ids"]
    assert server.post("/tokenize", {"prompt": greedy["prompt"]})["tokens"] == greedy["prompt_ids"]


def test_his_evaluation(served):
    """Windows of the context's length, each read anew, the next one from the last one's target on."""
    server, due, folder = served
    ids = np.fromfile(folder / "validation.bin", "<u2").tolist()
    width, evaluation = due["evaluation"]["window"], due["evaluation"]
    windows = [ids[at:at + width + 1] for at in range(0, len(ids) - 1, width)]
    results = score(server, windows)
    assert [n for n, _ in evaluation["windows_tokens_nll"]] == [len(w) - 1 for w in windows]
    nll = [-sum(token["logprob"] for token in result["tokens"][1:]) for result in results]
    for got, (n, expected) in zip(nll, evaluation["windows_tokens_nll"], strict=True):
        assert abs(got - expected) <= LOSS * n
    assert abs(sum(nll) / evaluation["n_tokens"] - evaluation["loss"]) <= LOSS


@pytest.mark.parametrize("form", ["ids", "text"])
@pytest.mark.parametrize("case", CASES)
def test_his_evaluation_by_one_command(case, tmp_path, form):
    """His loss, perplexities and number of predictions, from ids and from the documents."""
    folder, model = GOLDEN / "sparse-memory-lm" / case, tmp_path / "model"
    convert(case, model)
    evaluation = json.loads((folder / "expected.json").read_text())["evaluation"]
    ids = np.fromfile(folder / "validation.bin", "<u2").tolist()
    documents = ["%(title)s\n\n%(text)s<|endoftext|>" % document for document in evaluation["documents"]]
    file = tmp_path / "valid"
    file.write_text(" ".join(map(str, ids)) if form == "ids" else "".join(documents))
    status, out, error = gh.run_program(
        "score", "--model", model, "--dtype", "f32", "--windows", "sparse-memory-lm", "--bptt",
        evaluation["window"], *(["--ids"] if form == "ids" else []), file)
    assert status == 0, error
    line = next(line for line in out.splitlines() if line.startswith("sparse-memory-lm:"))
    loss, ppl, word_ppl, nll, n = re.fullmatch(
        r"sparse-memory-lm: loss (\S+), ppl (\S+), word ppl (\S+), nll (\S+), (\d+) predicted", line).groups()
    assert int(n) == evaluation["n_tokens"] == len(ids) - 1
    assert abs(float(loss) - evaluation["loss"]) <= LOSS and abs(float(nll) - evaluation["nll"]) <= LOSS * int(n)
    assert abs(float(ppl) / evaluation["ppl"] - 1) <= 2 * LOSS
    assert abs(float(word_ppl) / evaluation["word_ppl"] - 1) <= 2 * LOSS * int(n) / evaluation["n_words"]


def test_dequantised_rows_are_right_to_the_bit(tmp_path):
    """Of the table as it is stored, and as it is written in f32."""
    convert("shared-q4", tmp_path / "kept")
    convert("shared-q4", tmp_path / "f32", "--dtype", "f32")
    due = json.loads((GOLDEN / "sparse-memory-lm" / "shared-q4" / "expected.json").read_text())["table"]
    expected = np.array(due["values"], np.float32)
    name = "memories.1_in.values.weight"
    kept, plain = (stored_tensors(tmp_path / each / "model.safetensors") for each in ("kept", "f32"))
    rows = due["picked_rows"]
    for values in (table_of(kept, name)[rows], plain[name][rows]):
        assert np.array_equal(values.view(np.uint32) & 0x7fffffff, expected.view(np.uint32) & 0x7fffffff)
        assert np.array_equal(values, expected)  # but for the sign of zeros


def table_of(tensors, name):
    codes, scale = tensors[name], tensors[name + ".scale"].astype(np.float32)
    return (np.concatenate([codes & 15, codes >> 4], 1).astype(np.float32) - 8) * scale[:, None]
