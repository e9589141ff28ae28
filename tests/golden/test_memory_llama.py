"""What of Memory Layers at Scale the authors' golden cases leave out, against its definition in float64.

Gated outputs, values of another width, experts (PEER), tables of each layer's own, heads that share
keys and values, heads that are no part of the model's width: random models are computed by
tests/convert/numpy_memory_layers.py, which the golden cases show to be right in what they have.
"""

import json
import sys

import golden_harness as gh
import numpy as np
import pytest

sys.path.insert(0, str(gh.ROOT / "tests" / "convert"))
from numpy_memory_layers import MemoryLlama, memory_name  # noqa: E402

VOCAB, WIDTH, LAYERS, HEADS, HIDDEN, CONTEXT, EPS = 37, 24, 4, 4, 40, 64, 1e-5
TOLERANCE = 1e-4
BASE = {"model_type": "memory_llama", "vocab_size": VOCAB, "d_model": WIDTH, "n_layer": LAYERS,
        "n_head": HEADS, "d_ff": HIDDEN, "max_position": CONTEXT, "rope_theta": 1000.5,
        "norm_eps": EPS, "tie_output": False, "bos_token_id": 0, "add_bos": False}
MEMORY = {"n_head": 2, "k_top": 3, "n_key": 5, "d_key": 6, "n_slot": 25, "d_value": WIDTH}
PLUS = {"value_gate": True, "value_projection": True}


def memories(*layers, **options):
    return {"memories": [{"layer": layer, **MEMORY, **options} for layer in layers]}


def shared(config):
    for memory in config["memories"][1:]:
        memory["values_of"] = 0
    return config


CASES = {
    "no memory": {},
    "plain": memories(1),
    "every layer": memories(0, 1, 2, 3, **PLUS),
    "shared values": shared(memories(0, 2, 3, **PLUS)),
    "their own values": memories(1, 3, d_value=10, **PLUS),
    "projected": memories(2, d_value=7, value_projection=True),
    "gated output": shared(memories(1, 2, output_gate=True, **PLUS)),
    "gated plain output": memories(1, output_gate=True),
    "experts": memories(1, experts=True),
    "shared experts": shared(memories(0, 3, experts=True, output_gate=True)),
    "shared heads": {"n_kv_head": 2, **memories(2, **PLUS)},
    "one head of keys": {"n_kv_head": 1},
    "narrow heads": {"d_head": 2, **memories(1)},
    "wide heads": {"d_head": 10, "n_kv_head": 2},
    "tied": {"tie_output": True},
    "beside": memories(0, 2, place="beside", **PLUS),
    "after": memories(1, 3, place="after", input_norm="rms", input_norm_eps=1e-6, output_gate="scalar"),
    "all places": shared({"memories": [{"layer": layer, **MEMORY, "place": place} for layer, place in (
        (1, "beside"), (1, "in"), (1, "after"), (3, "after"))]}),
    "gate of two layers": memories(1, place="beside", output_gate="mlp", gate_hidden=7),
    "gate of two layers with gelu": shared(memories(0, 3, output_gate="mlp", gate_hidden=8,
                                                    gate_activation="gelu", **PLUS)),
    "layer norms": memories(1, place="after", input_norm="layer", query_norm="layer", query_norm_width=3,
                            query_norm_eps=1e-3),
    "normed heads": memories(2, query_norm="layer"),
    "normed queries": memories(2, query_norm="rms", query_norm_width=12),
    "RMS of halves": memories(1, 2, query_norm="rms", query_norm_width=3, query_norm_eps=1e-2),
    "shares without softmax": memories(1, softmax=False),
    "experts with ReLU": memories(1, experts=True, softmax=False, relu=True, input_norm="rms",
                                  input_norm_eps=1e-24),
}


def make_tensors(config):
    rng = np.random.default_rng(5)
    d_head = config.get("d_head", WIDTH // HEADS)
    d_kv = config.get("n_kv_head", HEADS) * d_head
    shapes = {"embeddings.weight": (VOCAB, WIDTH), "norm.weight": (WIDTH,)}
    if not config["tie_output"]:
        shapes["output.weight"] = (VOCAB, WIDTH)
    replaced = {m["layer"] for m in config.get("memories", []) if m.get("place", "in") == "in"}
    for i in range(LAYERS):
        layer = "layers.%d." % i
        shapes.update({layer + "attention_norm.weight": (WIDTH,), layer + "ffn_norm.weight": (WIDTH,),
                       layer + "attention.query.weight": (HEADS * d_head, WIDTH),
                       layer + "attention.key.weight": (d_kv, WIDTH),
                       layer + "attention.value.weight": (d_kv, WIDTH),
                       layer + "attention.out.weight": (WIDTH, HEADS * d_head)})
        if i not in replaced:
            shapes.update({layer + "ffn.gate.weight": (HIDDEN, WIDTH),
                           layer + "ffn.up.weight": (HIDDEN, WIDTH),
                           layer + "ffn.down.weight": (WIDTH, HIDDEN)})
    for m in config.get("memories", []):
        memory = memory_name(m)
        shapes.update({memory + "keys": (m["n_head"], 2, m["n_key"], m["d_key"] // 2),
                       memory + "query_proj.query_mlps.0.weight": (m["n_head"] * m["d_key"], WIDTH),
                       memory + "query_proj.query_mlps.0.bias": (m["n_head"] * m["d_key"],)})
        if "values_of" not in m:
            shapes[memory + "values.weight"] = (m["n_slot"], m["d_value"])
            if m.get("experts"):
                shapes[memory + "experts.weight"] = (m["n_slot"], WIDTH)
        for name, n_out, n_in in (("value_gate", m["d_value"], WIDTH),
                                  ("value_projection", WIDTH, m["d_value"]),
                                  ("output_gate", 1, m.get("gate_hidden", WIDTH)),
                                  ("output_gate.hidden", m.get("gate_hidden"), WIDTH)):
            if m.get(name) not in (None, "scalar") or name.endswith("hidden") and "gate_hidden" in m:
                tensor = memory + name.replace("projection", "proj")
                shapes[tensor + ".weight"], shapes[tensor + ".bias"] = (n_out, n_in), (n_out,)
        if m.get("output_gate") == "scalar":
            shapes[memory + "output_gate.factor"] = (1,)
        for name, width in (("input_norm", WIDTH), ("query_norm", m.get("query_norm_width", m["d_key"]))):
            for part in {"rms": ["weight"], "layer": ["weight", "bias"]}.get(m.get(name), []):
                shapes["%s%s.%s" % (memory, name, part)] = (width,)
    return {name: rng.normal(1 if name.endswith("norm.weight") else 0, 0.4, shape).astype(np.float32)
            for name, shape in shapes.items()}


@pytest.mark.parametrize("device", ["ref", "cpu", "cuda"])
@pytest.mark.parametrize("case", CASES)
def test_a_model_follows_its_definition(tmp_path, case, device):
    config = {**BASE, **CASES[case]}
    gh.write_model(tmp_path, make_tensors(config), config)
    ids = np.random.default_rng(3).integers(0, VOCAB, CONTEXT)
    due = MemoryLlama(tmp_path).forward(ids)[0][np.arange(CONTEXT - 1), ids[1:]]
    server = gh.Server(tmp_path, "--device", device, "--dtype", "f32", "--max-batch-tokens", "32",
                       "--max-seqs", "2")
    got = server.post("/score", {"tokens": ids.tolist(), "logprobs": 0})["results"][0]["tokens"]
    server.stop()
    assert max(abs(t["logprob"] - d) for t, d in zip(got[1:], due, strict=True)) <= TOLERANCE


def test_each_case_is_another_model(tmp_path):
    ids = np.random.default_rng(3).integers(0, VOCAB, CONTEXT)
    seen = []
    for case in CASES.values():
        config = {**BASE, **case}
        gh.write_model(tmp_path, make_tensors(config), config)
        seen.append(MemoryLlama(tmp_path).forward(ids)[0])
    for i, a in enumerate(seen):
        assert all(abs(a - b).max() > 0.01 for b in seen[:i])


@pytest.mark.parametrize("case", ["plain-pk", "swilu-shared"])
def test_text_is_served_as_the_authors_compute_it(case):
    gh.convert_all()
    due = json.loads((gh.ROOT / "tests/golden/memory-layers" / case / "expected.json").read_text())
    memory = json.loads((gh.model_directory(case) / "config.json").read_text())["memories"]
    server = gh.Server(case)
    body = {"prompt": due["greedy"]["prompt"], "temperature": 0, "max_tokens": 24, "ignore_eos": True}
    assert server.post("/generate", body)["choices"][0]["token_ids"] == due["greedy"]["ids"]
    texts = [s["text"] for s in due["sequences"]]
    got = server.post("/score", {"text": texts, "memory": "summary"})["results"]
    served = server.get("/info")["model"]["memories"]
    server.stop()
    for result, sequence in zip(got, due["sequences"], strict=True):
        assert abs(result["sum_logprob"] - sequence["sum_logprob"]) <= TOLERANCE * len(sequence["ids"])
        layers = result["memory"]["layers"]
        assert [(m["layer"], m["slots"]) for m in layers] == [(m["layer"], m["n_slot"]) for m in memory]
        assert all(m["lookups"] == len(sequence["ids"]) * m["heads"] * m["knn"] for m in layers)
    assert [m["value_gate"] for m in served] == [m.get("value_gate", False) for m in memory]


@pytest.mark.parametrize("config, words", [
    ({"n_kv_head": 3}, ["n_head 4", "n_kv_head 3"]),
    ({"d_head": 5}, ["d_head is 5", "even"]),
    ({"rope_theta": 0}, ["rope_theta is 0", "1 .. 1e12"]),
    ({"rope_theta": "10000"}, ["rope_theta", "a number"]),
    ({"activation": "gelu"}, ["unknown key", "activation"]),
    ({"adaptive_cutoffs": [3]}, ["unknown key", "adaptive_cutoffs"]),
    (memories(1, experts=True, value_projection=True), ["memories[0].experts", "value_projection"]),
    (memories(1, d_value=7), ["memories[0].d_value is 7", "d_model 24", "value_projection"]),
    (memories(1, kind="flat"), ["unknown key", "memories[0].kind"]),
    (memories(1, place="before"), ["memories[0].place", "before", "beside"]),
    ({"memories": [{"layer": 1, **MEMORY}, {"layer": 1, **MEMORY, "place": "beside"}]},
     ["memories[1] runs before memories[0]"]),
    (memories(1, output_gate="tanh"), ["memories[0].output_gate", "tanh", "scalar"]),
    (memories(1, output_gate="mlp"), ["memories[0].gate_hidden", "missing"]),
    (memories(1, output_gate=True, gate_hidden=3), ["memories[0].gate_hidden", "mlp"]),
    (memories(1, query_norm="rms", query_norm_width=4), ["query_norm_width is 4", "d_key = 6", "12"]),
    (memories(1, query_norm="batch"), ["memories[0].query_norm", "batch", "layer"]),
    (memories(1, input_norm="rms", input_norm_eps=0), ["input_norm_eps is 0"]),
    (memories(1, relu=True), ["memories[0].relu", "softmax false"]),
    (memories(1, n_slot=24), ["memories[0].n_slot is 24", "25"]),
    (memories(1, values_of=1), ["memories[0].values_of is 1", "earlier"]),
    (memories(4), ["memories[0].layer is 4", "is 3"]),
    ({"memories": [{"layer": 0, **MEMORY}, {"layer": 1, **MEMORY, "experts": True, "values_of": 0}]},
     ["memories[1]", "experts", "memories[0]"]),
    ({"memories": [{"layer": 0, **MEMORY}, {"layer": 1, **MEMORY, **PLUS, "d_value": 9, "values_of": 0}]},
     ["memories[1].d_value is 9", "24 columns"])])
def test_what_does_not_fit_is_refused(tmp_path, config, words):
    gh.write_model(tmp_path, make_tensors(BASE), {**BASE, **config})
    status, _, error = gh.run_program("inspect", "--model", tmp_path)
    assert status == 1 and all(word in error for word in words), error


@pytest.mark.parametrize("name", ["layers.0.attention.query_norm.weight", "memories.1_in.query_norm.weight"])
def test_a_tensor_of_another_model_is_refused(tmp_path, name):
    config = {**BASE, **memories(1)}
    tensors = make_tensors(config)
    gh.write_model(tmp_path, {**tensors, name: np.ones(6, np.float32)}, config)
    status, _, error = gh.run_program("inspect", "--model", tmp_path)
    assert status == 1 and name in error and "not part of the model" in error
