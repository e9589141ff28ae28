"""Models as conversion does not make them, but as FORMAT.md allows them."""

import base64
import json
import os
import shutil
import sys

import pytest

from cli_harness import ROOT, fails, ok, run

np = pytest.importorskip("numpy")
sys.path.insert(0, str(ROOT / "tests"))
from overlay_files import NUMPY, Base, bf16, pack, widened  # noqa: E402

GOLDEN = ROOT / os.environ.get("B", "build") / "golden"
IDS = " ".join(str(3 + i * i % 190) for i in range(60))


def tensors_of(model):
    base = Base(model)
    return {name: (entry["dtype"], np.frombuffer(base.data[slice(*base.place(name))], NUMPY[entry["dtype"]]).reshape(
        entry["shape"])) for name, entry in base.header.items() if name != "__metadata__"}


def copy_of(model, folder, tensors=None, **memory):
    """With other tensors; memory: changes of the last memory's configuration."""
    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("model.sha256", "parity.json"))
    config = json.loads((folder / "config.json").read_text())
    if memory:
        config["memories"][-1].update(memory)
    (folder / "config.json").write_text(json.dumps(config))
    if tensors:
        (folder / "model.safetensors").write_bytes(pack(tensors, {}))
    return folder


@pytest.mark.parametrize("place", ["q_lin", "k_lin", "v_lin"])
def test_parts_of_one_matrix_may_have_different_types(tmp_path, place):
    """Queries, keys and values are multiplied as one matrix, in f32 if one of them has that type."""
    tensors, same = tensors_of(GOLDEN / "pkm12"), {}
    for name in list(tensors):
        if name.endswith(place + ".weight"):
            bits = bf16(tensors[name][1])
            tensors[name], same[name] = ("BF16", bits), ("F32", widened(bits))
    assert same
    scored = [json.loads(ok("score", "--json", "--ids", "--dtype", "f32", "--model", model, stdin=IDS))["results"]
              for model in (copy_of(GOLDEN / "pkm12", tmp_path / "mixed", tensors),
                            copy_of(GOLDEN / "pkm12", tmp_path / "f32", {**tensors, **same}), GOLDEN / "pkm12")]
    assert scored[0] == scored[1] != scored[2]


def test_slots_of_memories_of_different_shapes_are_apart(tmp_path):
    model = copy_of(GOLDEN / "pkm12-2mem", tmp_path / "model", k_top=4)
    texts = [tmp_path / "a", tmp_path / "b"]
    for n, text in zip((60, 20), texts):
        text.write_text(" ".join(IDS.split()[:n]))
    for given in (texts[:1], texts):
        ok("score", "--model", model, "--ids", "--slots", tmp_path / "s.npz", *given)
        slots = np.load(tmp_path / "s.npz")
        for i, n in enumerate((60, 20)[:len(given)]):
            of_text = "_%d" % i if len(given) > 1 else ""
            for m, k in ((0, 8), (1, 4)):
                ending = "%s_m%d" % (of_text, m)
                assert slots["indices" + ending].shape == slots["weights" + ending].shape == (n, 1, 4, k)
                assert slots["memories" + ending].tolist() == [m]
    line = json.dumps({"tokens": list(map(int, IDS.split()[:20])), "memory": "slots"})
    blocks = json.loads(ok("score", "--model", model, "--jsonl", stdin=line))["results"][0]["memory"]["slots"]
    assert [(block["memories"], block["knn"]) for block in blocks] == [([0], 8), ([1], 4)]
    for m, block in enumerate(blocks):
        for name, kind in (("indices", "<i4"), ("weights", "<f4")):
            assert base64.b64decode(block[name]) == slots["%s_1_m%d" % (name, m)].astype(kind).tobytes()


def test_without_a_first_token_a_context_needs_a_word(tmp_path):
    model = copy_of(ROOT / "models" / "demo", tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "bos_token_id": -1, "add_bos": False}))
    lines = "\n".join(json.dumps({"context": context, "continuations": [" was", " is"]}) for context in ("", "It"))
    done = run("score", "--model", model, "--jsonl", stdin=lines)
    assert len(done.stdout.splitlines()) == 1 and "standard input:1: context is empty, and the model has no" in done.stderr


@pytest.mark.parametrize("windows, words", [("lm-eval", "give lm-eval's max_length as bptt"),
                                            ("sparse-memory-lm", "give the evaluation's max_seq_len as bptt")])
def test_an_evaluators_window_has_a_length_where_the_model_has_no_limit(windows, words):
    model = GOLDEN / "c-allattn-fixed"
    assert words in fails(2, "score", "--model", model, "--ids", "--windows", windows, stdin="3 4 7")
