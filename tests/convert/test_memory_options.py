"""The options of XLM's memories that no golden case has, or not alone: what the converter makes of
their tensors, and what it refuses.

Rerun one: /usr/bin/python3 -m pytest tests/convert/test_memory_options.py -k grouped
"""

import json

import numpy as np
import pytest
import torch_writer as tw
from convert_harness import convert
from numpy_model import Model, read_safetensors

MEMORY = "memories.1_in."
QUERY = MEMORY + "query_proj.query_mlps."


def arrays_of(shapes, seed=3):
    """Random arrays; a variance is positive."""
    rng = np.random.default_rng(seed)
    arrays = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    return {name: np.abs(array) + np.float32(0.1) if name.endswith("running_var") else array
            for name, array in arrays.items()}


def checkpoint(tmp_path, params, query=None, **other):
    """tiny() with another query network (shapes by name) and other tensors of its memory; those of
    an array that is None are left out."""
    weights = tw.tiny_weights()
    if query is not None:
        weights = {name: array for name, array in weights.items() if not name.startswith(QUERY)}
        weights.update(arrays_of({QUERY + name: shape for name, shape in query.items()}))
    for name, array in other.items():
        weights[MEMORY + name.replace("__", ".")] = array
    value = tw.tiny(params=tw.tiny_params(**params), weights=weights)
    return tw.write_zip(tmp_path / "c.pth", value), weights


def made(tmp_path, source):
    got = convert(source, "--output", tmp_path / "model")
    assert (got.status, got.err) == (0, ""), got.err
    directory = tmp_path / "model"
    entry = json.loads((directory / "config.json").read_text())["memories"][0]
    logprobs = Model(directory).forward([1, 14, 15, 3])[0]
    assert np.isfinite(logprobs).all()
    return entry, read_safetensors(directory / "model.safetensors")


def test_plain_memories_are_told_in_the_old_words(tmp_path):
    entry, _ = made(tmp_path, checkpoint(tmp_path, {})[0])
    assert sorted(entry) == ["d_key", "k_top", "kind", "layer", "n_head", "n_key", "n_slot",
                             "place", "query_batch_norm", "query_bias"]


def test_grouped_convolutions_with_batch_norm_are_layers(tmp_path):
    query = {"0.weight": (24, 8), "0.bias": (24,), "3.layer.weight": (20, 6, 1),
             "3.layer.bias": (20,), "6.layer.weight": (8, 5, 1), "6.layer.bias": (8,)}
    for name, n in (("1", 24), ("4", 20), ("7", 8)):
        query.update({"%s.%s" % (name, part): (n,)
                      for part in ("weight", "bias", "running_mean", "running_var")})
    params = {"mem_query_layer_sizes": [0, 6, 5, 0], "mem_multi_query_net": True,
              "mem_grouped_conv": True}
    source, weights = checkpoint(tmp_path, params, query)
    entry, got = made(tmp_path, source)
    assert (entry["query"], entry["query_hidden"]) == ("per_half", [6, 5])
    np.testing.assert_array_equal(got[QUERY + "3.weight"],
                                  weights[QUERY + "3.layer.weight"][:, :, 0])
    np.testing.assert_array_equal(got[QUERY + "6.bias"], weights[QUERY + "6.layer.bias"])


def test_networks_of_each_half_are_joined_in_their_order(tmp_path):
    query = {}
    for g in range(4):
        query.update({"%d.0.weight" % g: (6, 8), "%d.0.bias" % g: (6,),
                      "%d.2.weight" % g: (2, 6), "%d.2.bias" % g: (2,)})
    params = {"mem_query_layer_sizes": [0, 6, 0], "mem_multi_query_net": True,
              "mem_query_batchnorm": False}
    source, weights = checkpoint(tmp_path, params, query)
    entry, got = made(tmp_path, source)
    assert entry["query"] == "per_half"
    for part in ("0.weight", "0.bias", "2.weight", "2.bias"):
        due = np.concatenate([weights["%s%d.%s" % (QUERY, g, part)] for g in range(4)])
        np.testing.assert_array_equal(got[QUERY + part], due)


@pytest.mark.parametrize("shuffled", [False, True])
def test_identity_queries_need_no_tensors(shuffled, tmp_path):
    params = {"mem_query_layer_sizes": "", "mem_k_dim": 8, "mem_shuffle_query": shuffled}
    keys = arrays_of({"keys": (2, 2, 4, 4)})["keys"]
    entry, got = made(tmp_path, checkpoint(tmp_path, params, {}, keys=keys)[0])
    assert entry["query"] == ("shuffled" if shuffled else "identity")
    assert not [name for name in got if name.startswith(QUERY)]


def test_scores_lose_their_median(tmp_path):
    params = {"mem_score_softmax": False, "mem_score_subtract": "median", "mem_temperature": 2}
    entry, _ = made(tmp_path, checkpoint(tmp_path, params)[0])
    assert (entry["softmax"], entry["subtract"], entry["temperature"]) == (False, "median", 2)
    assert "normalize" not in entry


def test_flat_keys_may_be_shared(tmp_path):
    keys = arrays_of({"keys": (4, 4)})["keys"]
    params = {"mem_implementation": "flat", "mem_use_different_keys": False, "n_indices": 4,
              "mem_size": 4}
    values = arrays_of({"values": (4, 8)})["values"]
    entry, got = made(tmp_path, checkpoint(tmp_path, params, keys=keys, values__weight=values)[0])
    assert (entry["kind"], entry["shared_keys"], entry["n_slot"]) == ("flat", True, 4)
    assert got[MEMORY + "keys"].shape == (4, 4)


def test_binary_keys_count_themselves(tmp_path):
    """Their number is 2^(mem_k_dim / 2); rows of the table that no pair of them reaches are cut."""
    values = arrays_of({"values": (25, 8)})["values"]
    params = {"mem_keys_type": "binary", "mem_n_keys": 5, "n_indices": 25, "mem_size": 25}
    entry, got = made(tmp_path, checkpoint(tmp_path, params, values__weight=values)[0])
    assert (entry["n_key"], entry["n_slot"]) == (4, 16)
    np.testing.assert_array_equal(got[MEMORY + "values.weight"], values[:16])


@pytest.mark.parametrize("modulo, n_slot", [(10, 10), (20, 16)])
def test_slots_of_binary_keys_may_be_taken_modulo(modulo, n_slot, tmp_path):
    """The original bounds the modulo by n_indices; one that no slot reaches changes nothing."""
    values = arrays_of({"values": (modulo, 8)})["values"]
    params = {"mem_keys_type": "binary", "mem_n_keys": 5, "n_indices": 25, "mem_size": modulo,
              "mem_modulo_size": modulo}
    entry, got = made(tmp_path, checkpoint(tmp_path, params, values__weight=values)[0])
    assert (entry["n_slot"], entry.get("modulo", False)) == (n_slot, modulo < 16)
    np.testing.assert_array_equal(got[MEMORY + "values.weight"], values[:n_slot])


def test_slots_taken_modulo_are_less_than_the_server_counts(tmp_path, refused):
    """The table is small; the pairs of keys are not."""
    n = 46341
    params = {"mem_n_keys": n, "n_indices": n * n, "mem_size": 16, "mem_modulo_size": 16}
    source, _ = checkpoint(tmp_path, params, keys=np.ones((2, 2, n, 2), np.float16))
    refused(source, "memories.1_in.keys", "46341 keys make 2147488281 slots", "2^31")
    keys = tw.Tensor(np.zeros(1, np.float32), size=(2, 2**24 + 1, 4), stride=(0, 0, 0))  # of a flat memory
    value = tw.tiny(params=tw.tiny_params(mem_implementation="flat"), memories__1_in__keys=keys)
    refused(tw.write_zip(tmp_path / "c.pth", value), "memories.1_in.keys", "shape [2, 16777217, 4]")


def test_slot_maps_are_permutations(tmp_path, refused):
    rng = np.random.default_rng(5)
    permutations = np.stack([rng.permutation(16) for _ in range(2)])
    params = {"mem_shuffle_indices": True}
    source, _ = checkpoint(tmp_path, params, head_permutations=permutations)
    entry, got = made(tmp_path, source)
    assert entry["slot_map"] is True and got[MEMORY + "slot_map"].dtype == np.int32
    np.testing.assert_array_equal(got[MEMORY + "slot_map"], permutations)
    refused(checkpoint(tmp_path, params)[0], "head_permutations", "missing")
    for slot in (16, -1, permutations[1, 4]):
        wrong = permutations.copy()
        wrong[1, 3] = slot
        refused(checkpoint(tmp_path, params, head_permutations=wrong)[0], "head_permutations",
                "head 1", "0..15")
    floats = permutations.astype(np.float32)
    refused(checkpoint(tmp_path, params, head_permutations=floats)[0], "integers")


def two_memories(change=None, table=None, **params):
    """tiny() with a memory in both layers; the second's table is the first's, or a changed copy."""
    weights = {name: array for name, array in tw.tiny_weights().items() if "ffns.0" not in name}
    if table is not None:
        weights[MEMORY + "values.weight"] = table
    for name in [name for name in weights if name.startswith(MEMORY)]:
        weights[name.replace("1_in", "0_in")] = weights[name]
    if change is not None:
        weights[MEMORY + "values.weight"] = weights[MEMORY + "values.weight"] + np.float32(change)
    params = tw.tiny_params(mem_enc_positions=[(0, "in"), (1, "in")], **params)
    value = tw.tiny(params=params, weights=weights)
    if change is None:
        value["model"][MEMORY + "values.weight"] = value["model"]["memories.0_in.values.weight"]
    return value


def test_shared_tables_are_written_once(tmp_path, refused):
    for change in (None, 0.0):  # one storage, or two with the same numbers
        source = tw.write_zip(tmp_path / "c.pth", two_memories(change, mem_share_values=True))
        entry, got = made(tmp_path, source)
        assert "values_of" not in entry
        config = json.loads((tmp_path / "model" / "config.json").read_text())
        assert config["memories"][1]["values_of"] == 0
        assert "memories.0_in.values.weight" in got and MEMORY + "values.weight" not in got
    source = tw.write_zip(tmp_path / "c.pth", two_memories(1.0, mem_share_values=True))
    refused(source, "values.weight", "mem_share_values")
    refused(tw.write_zip(tmp_path / "c.pth", two_memories()), "values.weight", "storage")


@pytest.mark.parametrize("change", [None, 0.0])
def test_rows_behind_a_shared_table_are_cut(change, tmp_path):
    table = arrays_of({"values": (25, 8)})["values"]
    params = {"mem_keys_type": "binary", "mem_n_keys": 5, "n_indices": 25, "mem_size": 25}
    value = two_memories(change, table, mem_share_values=True, **params)
    _, got = made(tmp_path, tw.write_zip(tmp_path / "c.pth", value))
    np.testing.assert_array_equal(got["memories.0_in.values.weight"], table[:16])
    assert MEMORY + "values.weight" not in got
