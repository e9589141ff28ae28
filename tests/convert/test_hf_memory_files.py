"""What convert.py refuses of memories beside Hugging Face directories, by key, file or tensor; and what it
takes that the cases of tests/golden/hf-memory leave out.

Rerun one: /usr/bin/python3 -m pytest tests/convert/test_hf_memory_files.py -k gate
"""

import json

import hf_writer as hw
import numpy as np
import pytest
import torch_writer as tw
from convert_harness import convert
from numpy_model import stored_tensors

H, N, K, V = 2, 4, 6, 5  # heads, keys of a half, width of a query, columns of a projected table
MEMORY = {"layer": 1, "place": "beside", "n_head": H, "k_top": 3}
PLUS = {"value_gate": True, "value_projection": True}
SHAPES = {"keys": (H, 2, N, K // 2), "query.weight": (H * K, hw.D), "query.bias": (H * K,),
          "values.weight": (N * N, hw.D)}
PLUS_SHAPES = {**SHAPES, "values.weight": (N * N, V), "value_gate.weight": (V, hw.D), "value_gate.bias": (V,),
               "value_proj.weight": (hw.D, V), "value_proj.bias": (hw.D,)}


def arrays(shapes, prefix="memories.0."):
    rng = np.random.default_rng(8)
    return {prefix + name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def kinds(folder):
    """name -> type of the tensors of a model directory"""
    data = (folder / "model.safetensors").read_bytes()
    header = json.loads(data[8:8 + int.from_bytes(data[:8], "little")])
    return {name: entry["dtype"] for name, entry in header.items()}


class Case:
    def __init__(self, folder):
        self.source, self.output = folder / "source", folder / "model"
        self.source.mkdir()
        hw.tiny(self.source)
        self.memory, self.config = folder / "memory.safetensors", folder / "memory.json"

    def run(self, memories, tensors, *args):
        root = memories if isinstance(memories, dict) and "memories" in memories \
            else {"memories": memories if isinstance(memories, list) else [memories]}
        self.config.write_text(json.dumps(root))
        self.memory.write_bytes(tensors if isinstance(tensors, bytes) else hw.safetensors(tensors))
        return convert(self.source, "-o", self.output, "--memory", self.memory, "--memory-config",
                       self.config, *args)


@pytest.fixture
def case(tmp_path):
    return Case(tmp_path)


# Changes of the entry, of the shapes, and words of the message. A value of ... removes.
REFUSED = [
    ({"layer": 2}, {}, ["memory.json: memories[0]: layer", "0..1", "num_hidden_layers is 2"]),
    ({"place": "in"}, {}, ["place", "replace beside after", "'in'"]),
    ({"place": ...}, {}, ["place", "None"]), ({"n_head": ...}, {}, ["n_head", "1..1024", "None"]),
    ({"k_top": 5}, {}, ["k_top", "5", "4 keys", "memories.0.keys"]),
    ({"heads": 2}, {}, ["heads", "not a key"]), ({"prefix": 3}, {}, ["prefix"]),
    ({"n_key": 5}, {}, ["memories.0.keys", "[2, 2, 5, any]", "[2, 2, 4, 3]"]),
    ({"d_key": 8}, {}, ["memories.0.keys", "[2, 2, any, 4]"]),
    ({"n_head": 3}, {}, ["memories.0.keys", "[3, 2, any, any]"]),
    ({"d_value": 7}, {}, ["d_value", "7", "hidden_size 8"]),
    ({}, {"keys": ...}, ["memories.0.keys", "missing"]), ({}, {"query.weight": ...}, ["query.weight", "missing"]),
    ({}, {"keys": (16, K // 2)}, ["memories.0.keys", "[2, 2, any, any]", "[16, 3]"]),
    ({}, {"query.weight": (H * K, hw.D, 1)}, ["query.weight", "[12, 8]", "[12, 8, 1]"]),
    ({}, {"query.bias": (3,)}, ["query.bias", "[12]", "[3]"]),
    ({}, {"values.weight": (15, hw.D)}, ["values.weight", "[16, 8]", "[15, 8]"]),
    ({}, {"extra": (2,)}, ["memories.0.extra", "configuration"]),
    ({"prefix": "layers.1."}, {}, ["layers.1.keys", "missing"]),
    ({"query_norm": "group"}, {}, ["query_norm", "none batch layer rms l2", "group"]),
    ({"query_norm": "rms"}, {}, ["memories.0.query_norm.weight", "[6]", "missing"]),
    ({"query_norm": "layer"}, {"query_norm.weight": (6,)}, ["memories.0.query_norm.bias", "missing"]),
    ({"query_norm": "layer", "query_norm_of": "all"}, {"query_norm.weight": (6,)}, ["[12]", "[6]"]),
    ({"query_norm": "batch"}, {"query_norm.weight": (12,), "query_norm.bias": (12,)}, ["running_mean", "missing"]),
    ({"query_norm_of": "half"}, {}, ["query_norm_of", "query_norm layer, rms or l2"]),
    ({"query_norm": "rms", "query_norm_eps": 0}, {}, ["query_norm_eps", "1e-30..1"]),
    ({"temperature": 0}, {}, ["temperature", "1e-06"]),
    ({"temperature": 1.5}, {"temperature": (1,)}, ["temperature", "1.5", "memories.0.temperature"]),
    ({}, {"temperature": (3,)}, ["memories.0.temperature", "2 heads", "[3]"]),
    ({"place": "after"}, {}, ["memories.0.norm.weight", "missing"]),
    ({"input_norm": "batch"}, {}, ["input_norm", "none, rms or layer", "batch"]),
    ({"input_norm_eps": 1e-5}, {}, ["input_norm_eps", "input_norm rms or layer"]),
    ({"gate": "tanh"}, {}, ["gate", "none scalar linear mlp", "tanh"]),
    ({"gate": "scalar"}, {}, ["memories.0.gate", "missing"]), ({"gate": "scalar"}, {"gate": (2,)}, ["[1]", "[2]"]),
    ({"gate": "linear"}, {}, ["memories.0.gate.weight", "[1, 8]", "missing"]),
    ({"gate": "linear"}, {"gate.weight": (8, 8)}, ["memories.0.gate.weight", "[1, 8]", "[8, 8]"]),
    ({"gate": "mlp"}, {"gate.0.weight": (3, 8)}, ["memories.0.gate.2.weight", "[1, 3]", "missing"]),
    ({"gate_activation": "gelu"}, {}, ["gate_activation", "gate mlp"]),
    ({"gate": "mlp", "gate_activation": "silu"}, {}, ["gate_activation", "relu gelu", "silu"]),
    ({"value_gate": True}, {}, ["tensor 'memories.0.value_gate.weight' is missing", "[8, 8] expected"]),
    ({"value_projection": True}, {}, ["memories.0.value_proj.weight", "missing"]),
    ({"experts": True, "value_projection": True}, {}, ["value_projection", "not with experts"]),
    ({"experts": True}, {}, ["memories.0.experts.weight", "missing"]),
    ({"scores": "sigmoid"}, {}, ["scores", "softmax relu", "sigmoid"]),
    ({"product_key_topk": 2}, {}, ["product_key_topk", "k_top is 3"]),
    ({"values_of": 0}, {}, ["values_of", "earlier"]),
    ({**PLUS, "d_value": 6}, PLUS_SHAPES, ["values.weight", "[16, 6]", "[16, 5]"]),
]


@pytest.mark.parametrize("changes, shapes, words", REFUSED,
                         ids=["-".join([*c, *s, *w[:1]])[:60] for c, s, w in REFUSED])
def test_what_does_not_fit_is_refused_by_name(case, changes, shapes, words):
    entry = {key: value for key, value in {**MEMORY, **changes}.items() if value is not ...}
    tensors = {name: shape for name, shape in {**SHAPES, **shapes}.items() if shape is not ...}
    done = case.run(entry, arrays(tensors))
    assert done.status == 1 and all(word in done.err for word in words), done.err
    assert done.err.count("\n") == 1 and not case.output.exists()


FLAT = {"query_proj.query_mlps.0.weight": (H * K, hw.D), "values.weight": (N * N, hw.D)}


@pytest.mark.parametrize("changes, shape, words", [
    ({}, (16, 3), []), ({"n_key": N, "d_key": K}, (16, 3), []), ({}, (H, 2, N, 3), []),
    ({"n_key": 5}, (16, 3), ["[20, any]", "[16, 3]"]), ({"d_key": 8}, (16, 3), ["[any, 4]", "[16, 3]"]),
    ({}, (18, 3), ["18 rows are not two halves of 2 heads"])])
def test_flat_keys_are_held_against_the_sizes(case, changes, shape, words):
    tensors = arrays({**FLAT, "keys": shape})
    done = case.run({**MEMORY, **changes}, tensors, "--memory-names", "hashing-memory")
    assert done.status == (1 if words else 0) and all(word in done.err for word in words), done.err
    if not words:
        np.testing.assert_array_equal(stored_tensors(case.output / "model.safetensors")["memories.1_beside.keys"],
                                      tensors["memories.0.keys"].reshape(H, 2, N, K // 2))


@pytest.mark.parametrize("n_key, half", [(46341, 1), (N, 32769), (N, 0)])
def test_keys_beyond_the_limits_are_refused(case, n_key, half):
    shapes = {**SHAPES, "keys": (1, 2, n_key, half)}
    tensors = {name: array.astype(np.float16) for name, array in arrays(shapes).items()}
    done = case.run({**MEMORY, "n_head": 1}, tensors)
    assert done.status == 1 and "%d keys of %d columns are beyond the limits" % (n_key, half) in done.err


def test_tensors_may_have_the_names_of_model_directories(case):
    assert case.run({**MEMORY, "gate": "linear"}, arrays({**SHAPES, "gate.weight": (1, hw.D)})).status == 0
    due = (case.output / "model.safetensors").read_bytes()
    names = {"query.weight": "query_proj.query_mlps.0.weight", "query.bias": "query_proj.query_mlps.0.bias",
             "gate.weight": "output_gate.weight"}
    shapes = {**SHAPES, "gate.weight": (1, hw.D)}
    assert case.run({**MEMORY, "gate": "linear"}, arrays({names.get(name, name): shape for name, shape
                                                          in shapes.items()})).status == 0
    assert (case.output / "model.safetensors").read_bytes() == due


@pytest.mark.parametrize("n", [0, 65537])
def test_widths_beyond_the_limits_are_refused(case, n):
    tables = {"values.weight": (N * N, n), "value_gate.weight": (n, hw.D), "value_proj.weight": (hw.D, n)}
    gates = {"gate.0.weight": (n, hw.D), "gate.2.weight": (1, n)}
    for entry, shapes, name in ((PLUS, tables, "values.weight"), ({"gate": "mlp"}, gates, "gate.0.weight")):
        tensors = {name: array.astype(np.float16) for name, array in arrays({**SHAPES, **shapes}).items()}
        done = case.run({**MEMORY, **entry}, tensors)
        assert done.status == 1, done.out
        assert "'memories.0.%s' has a width of %d, 1..65536 are served" % (name, n) in done.err, done.err


def test_widths_of_gates_and_tables_of_their_own(case):
    gate = {"gate.0.weight": (3, hw.D), "gate.2.weight": (1, 3)}
    done = case.run({**MEMORY, **PLUS, "d_value": V, "gate": "mlp"}, arrays({**PLUS_SHAPES, **gate}))
    assert done.status == 0, done.err
    entry, = json.loads((case.output / "config.json").read_text())["memories"]
    assert (entry["gate_hidden"], entry["d_value"]) == (3, V)


def test_a_single_head(case):
    shapes = {**SHAPES, "keys": (1, 2, N, K // 2), "query.weight": (K, hw.D), "query.bias": (K,)}
    assert case.run({**MEMORY, "n_head": 1, "k_top": N}, arrays(shapes)).status == 0


@pytest.mark.parametrize("temperature", [0.5, [0.5], [0.5, 0.25], [[[0.5]], [[0.25]]]])
def test_temperatures_of_the_file_divide_the_keys(case, temperature):
    tensors = {**arrays(SHAPES), "memories.0.temperature": np.array(temperature, np.float32)}
    assert case.run(MEMORY, tensors).status == 0
    each = np.broadcast_to(np.ravel(temperature), (H,)).reshape(H, 1, 1, 1)
    np.testing.assert_array_equal(stored_tensors(case.output / "model.safetensors")["memories.1_beside.keys"],
                                  (tensors["memories.0.keys"] / each).astype(np.float32))
    for wrong in (0, -1, np.nan):
        tensors["memories.0.temperature"].flat[0] = wrong
        done = case.run(MEMORY, tensors)
        assert done.status == 1 and "a temperature is above 0" in done.err, done.err


def test_short_keys_get_unit_length_and_those_of_length_zero_stay(case):
    tensors = arrays(SHAPES)
    keys = tensors["memories.0.keys"]
    keys[0, 1, 2], keys[1, 0, 3] = 0, keys[1, 0, 3] * np.float32(2**-20)
    assert case.run({**MEMORY, "keys_norm": "l2"}, tensors).status == 0
    stored = stored_tensors(case.output / "model.safetensors")["memories.1_beside.keys"]
    due = np.ones((H, 2, N))
    due[0, 1, 2] = 0
    np.testing.assert_allclose((stored.astype(np.float64) ** 2).sum(-1), due, atol=1e-6)


def test_a_batch_norm_is_folded_in_with_its_eps(case):
    parts = ("weight", "bias", "running_mean", "running_var")
    tensors = arrays({**SHAPES, **{"query_norm." + part: (H * K,) for part in parts}})
    gain, shift, mean, variance = (tensors["memories.0.query_norm." + part] for part in parts)
    np.abs(variance, out=variance)
    variance[3] = 0
    assert case.run({**MEMORY, "query_norm": "batch", "query_norm_eps": 0.5}, tensors).status == 0
    stored = stored_tensors(case.output / "model.safetensors")
    gain = gain.astype(np.float64) / np.sqrt(variance.astype(np.float64) + 0.5)
    query = "memories.1_beside.query_proj.query_mlps.0."
    np.testing.assert_allclose(stored[query + "weight"], tensors["memories.0.query.weight"] * gain[:, None], 1e-6)
    np.testing.assert_allclose(stored[query + "bias"], (tensors["memories.0.query.bias"] - mean) * gain + shift, 1e-5)
    variance[3] = -1e-3
    done = case.run({**MEMORY, "query_norm": "batch"}, tensors)
    assert done.status == 1 and "running_var' holds -0.001; a variance cannot be negative" in done.err


def test_norms_without_weights_are_ones_and_zeros(case):
    entry = {norm + part: value for norm in ("query_norm", "input_norm")
             for part, value in (("", "layer"), ("_weight", False), ("_bias", False))}
    assert case.run({**MEMORY, **entry}, arrays(SHAPES)).status == 0
    stored = stored_tensors(case.output / "model.safetensors")
    for name, n in (("query_norm", K), ("input_norm", hw.D)):
        for part, value in (("weight", 1), ("bias", 0)):
            np.testing.assert_array_equal(stored["memories.1_beside.%s.%s" % (name, part)], [value] * n)


def test_the_norm_of_peer_divides_by_the_length(case):
    shapes = {"keys": (H, N, 2, K // 2), "to_queries.0.weight": (H * K, hw.D), "norm.gamma": (hw.D,),
              "weight_up_embed.weight": (N * N, hw.D), "weight_down_embed.weight": (N * N, hw.D)}
    done = case.run({**MEMORY, "input_norm": "rms"}, arrays(shapes), "--memory-names", "peer")
    assert done.status == 0, done.err
    entry, = json.loads((case.output / "config.json").read_text())["memories"]
    assert entry["input_norm_eps"] == 1e-24
    for changes, word in (({}, "'memories.0.norm.gamma' is not one that"),
                          ({"query_norm": "l2", "query_norm_of": "all"}, "query_norm_of: all, which modules")):
        done = case.run({**MEMORY, **changes}, arrays(shapes), "--memory-names", "peer")
        assert done.status == 1 and word in done.err, done.err
    shapes["norm.weight"] = shapes.pop("norm.gamma")
    assert case.run({**MEMORY, "input_norm": "rms"}, arrays(shapes), "--memory-names", "peer").status == 0


@pytest.mark.parametrize("root, words", [
    ({"memories": []}, ["1..64 objects"]), ({"memories": {}}, ["1..64 objects"]),
    ({"memories": [MEMORY] * 65}, ["1..64 objects"]), ({"memories": [3]}, ["memories[0]", "an object"]),
    ({"memories": [MEMORY], "names": "plain"}, ["names", "only"]),
    ([MEMORY, MEMORY], ["memories[1]", "at its place"]),
    ([MEMORY, {**MEMORY, "layer": 0}], ["memories[1] runs before memories[0]"]),
    ([{**MEMORY, "place": "replace"}, MEMORY], ["memories[1] runs before memories[0]"])])
def test_lists_of_memories_are_checked(case, root, words):
    done = case.run(root, arrays(SHAPES))
    assert done.status == 1 and all(word in done.err for word in words), done.err


def test_one_norm_for_all_heads_is_as_wide_as_the_server_takes(case):
    for width, status in ((32768, 0), (32770, 1)):
        shapes = {"keys": (H, 2, N, width // 2), "query.weight": (H * width, hw.D), "query.bias": (H * width,),
                  "values.weight": (N * N, hw.D), "query_norm.weight": (H * width,)}
        done = case.run({**MEMORY, "query_norm": "rms", "query_norm_of": "all"}, arrays(shapes))
        assert done.status == status, done.err
    assert "memories[0]: query_norm_of: all, 2 heads of 32770 are wider than the limit of 65536" in done.err


def test_modules_that_compute_something_else_are_refused(case):
    halves = {"keys": (H, N, 2, K // 2), "to_queries.weight": (H * K, hw.D), "norm.weight": (K // 2,),
              "norm.bias": (K // 2,)}
    for name, option in (("values.0.weight", "concat_values_and_combine"), ("output_norm.weight", "norm_output"),
                         ("maybe_concat_combine.2.weight", "concat_values_and_combine")):
        done = case.run({**MEMORY, "query_norm": "layer"}, arrays({**halves, name: (16, 3)}),
                        "--memory-names", "product-key-memory")
        assert done.status == 1 and name in done.err and option in done.err
    peer = {"keys": (H, N, 2, K // 2), "to_queries.0.weight": (H * K, hw.D),
            "weight_up_embed.weight": (H * N * N, hw.D), "weight_down_embed.weight": (H * N * N, hw.D)}
    done = case.run(MEMORY, arrays(peer), "--memory-names", "peer")
    assert done.status == 1 and "weight_up_embed" in done.err and "separate_embed_per_head" in done.err


def test_tables_that_should_be_one_are_compared(case):
    two = [MEMORY, {**MEMORY, "place": "after", "input_norm": "none", "values_of": 0}]
    tensors = {**arrays(SHAPES), **arrays(SHAPES, "memories.1.")}
    assert case.run(two, tensors).status == 0  # a copy, the same to the bit
    assert "memories.1_after.values.weight" not in kinds(case.output)
    tensors["memories.1.values.weight"][3, 2] += 1
    done = case.run(two, tensors)
    assert done.status == 1 and "memories.1.values.weight" in done.err and "row 3" in done.err
    as_torch = {name: tw.Tensor(array) for name, array in tensors.items()}
    tw.write_zip(case.source.parent / "memory.pt", as_torch)
    done = case.run(two, (case.source.parent / "memory.pt").read_bytes())
    assert done.status == 1 and "memories.1.values.weight" in done.err and "row 3" in done.err
    del tensors["memories.1.values.weight"]
    assert case.run(two, tensors).status == 0
    tensors["memories.1.keys"] = np.ones((H, 2, 5, K // 2), np.float32)
    done = case.run(two, tensors)
    assert done.status == 1 and "values_of" in done.err and "4 keys, this one 5" in done.err
    two[1]["experts"] = True
    done = case.run(two, {**arrays(SHAPES), **arrays(SHAPES, "memories.1.")})
    assert done.status == 1 and "4 keys, this one 4 and experts" in done.err


def test_a_table_of_a_table_is_that_of_its_owner(case):
    three = [{**MEMORY, "layer": 0}, {**MEMORY, "values_of": 0}, {**MEMORY, "place": "after", "values_of": 1,
                                                                  "input_norm": "none"}]
    tensors = {name: array for i in range(3) for name, array in arrays(SHAPES, "memories.%d." % i).items()
               if i == 0 or "values" not in name}
    assert case.run(three, tensors).status == 0
    entries = json.loads((case.output / "config.json").read_text())["memories"]
    assert [entry.get("values_of") for entry in entries] == [None, 0, 0]


@pytest.mark.parametrize("damage, words", [
    (lambda data: data[:20], ["memory.safetensors", "header"]),
    (lambda data: data[:-4], ["memory.safetensors", "truncated"]),
    (lambda data: b"PK\x03\x04" + data, ["--memory", "memory.safetensors"]),
    (lambda data: b"", ["memory.safetensors"])])
def test_damaged_files_are_refused(case, damage, words):
    done = case.run(MEMORY, damage(hw.safetensors(arrays(SHAPES))))
    assert done.status == 1 and all(word in done.err for word in words), done.err


def test_a_torch_file_gives_the_same_model_and_runs_nothing(case):
    tensors = arrays(PLUS_SHAPES)
    assert case.run({**MEMORY, **PLUS}, tensors).status == 0
    whole = (case.output / "model.safetensors").read_bytes()
    as_torch = tw.OrderedDict((name, tw.Tensor(array)) for name, array in tensors.items())
    for root in (as_torch, {"state_dict": as_torch}):
        tw.write_zip(case.source.parent / "memory.pt", root)
        assert case.run({**MEMORY, **PLUS}, (case.source.parent / "memory.pt").read_bytes()).status == 0
        assert (case.output / "model.safetensors").read_bytes() == whole
    brain = {name: (array.view(np.uint32) >> 16).astype(np.uint16) for name, array in tensors.items()}
    tw.write_zip(case.source.parent / "memory.pt", {name: tw.Tensor(array) for name, array in brain.items()})
    assert case.run({**MEMORY, **PLUS}, (case.source.parent / "memory.pt").read_bytes()).status == 0
    assert kinds(case.output)["memories.1_beside.values.weight"] == "BF16"
    np.testing.assert_array_equal(stored_tensors(case.output / "model.safetensors")["memories.1_beside.values.weight"],
                                  brain["memories.0.values.weight"])
    evil = tw.Raw(tw.global_("os", "system") + b"(X\x04\x00\x00\x00truetR")
    for root, word in ((evil, "os.system"), ({"a": 3}, "tensors by name"), ([], "tensors by name"),
                       ({"model": {}}, "tensors by name"),
                       ({**as_torch, "memories.0.keys": tw.Tensor(np.ones((H, 2, N, 3), np.int64))},
                        "tensor 'memories.0.keys': floating point expected, got int64")):
        tw.write_zip(case.source.parent / "memory.pt", root)
        done = case.run(MEMORY, (case.source.parent / "memory.pt").read_bytes())
        assert done.status == 1 and word in done.err, done.err


def test_tables_keep_the_type_of_their_file(case):
    """And so do the other matrices of a memory; vectors, keys and queries are fp32 in any case."""
    tensors = {name: array.astype(np.float16) for name, array in arrays(PLUS_SHAPES).items()}
    assert case.run({**MEMORY, **PLUS}, tensors).status == 0
    assert json.loads((case.output / "config.json").read_text())["dtype"] == "f32"
    assert {name: kind for name, kind in kinds(case.output).items() if kind != "F32"} == {
        "memories.1_beside.%s.weight" % name: "F16" for name in ("values", "value_gate", "value_proj")}
    assert case.run({**MEMORY, **PLUS}, tensors, "--dtype", "bf16").status == 0
    assert kinds(case.output)["memories.1_beside.values.weight"] == "BF16"


def test_a_replaced_network_may_be_missing_from_the_base(case):
    entry = {**MEMORY, "place": "replace"}
    assert case.run(entry, arrays(SHAPES)).status == 0
    whole = (case.output / "model.safetensors").read_bytes()
    assert not any("layers.1.ffn." in name for name in kinds(case.output))
    hw.tiny(case.source, arrays={name: array for name, array in hw.weights().items()
                                 if "layers.1.mlp" not in name})
    assert case.run(entry, arrays(SHAPES)).status == 0
    assert (case.output / "model.safetensors").read_bytes() == whole
    done = case.run(MEMORY, arrays(SHAPES))
    assert done.status == 1 and "model.layers.1.mlp" in done.err and "missing" in done.err


def test_the_summary_tells_of_the_memory(case):
    done = case.run({**MEMORY, **PLUS, "gate": "linear"},
                    arrays({**PLUS_SHAPES, "gate.weight": (1, hw.D), "gate.bias": (1,)}), "--values", "q4")
    assert done.status == 1 and "--values q4: tensor 'memories.1_beside.values.weight' has rows of 5 columns" in done.err
    done = case.run({**MEMORY, **PLUS, "gate": "linear"},
                    arrays({**PLUS_SHAPES, "gate.weight": (1, hw.D), "gate.bias": (1,)}))
    assert "memory beside layer 1: 4 x 4 keys (16 slots of 5)" in done.out and "gated output" in done.out


def test_options_go_together(case, tmp_path):
    for args, words in ((("--memory", "x"), "--memory-config"), (("--memory-config", "x"), "--memory FILE"),
                        (("--memory-names", "peer"), "--memory FILE"),
                        (("--memory-names", "other", "--memory", "x"), "product-key-memory")):
        done = convert(case.source, "-o", case.output, *args)
        assert done.status == 2 and words in done.err
    file = tmp_path / "model.pt"
    tw.write_zip(file, {"a": 1})
    case.run(MEMORY, arrays(SHAPES))
    done = convert(file, "--from", "xlm", "-o", tmp_path / "x", "--memory", case.memory, "--memory-config",
                   case.config)
    assert done.status == 1 and "Hugging Face" in done.err
