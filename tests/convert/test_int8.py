"""convert.py --dtype int8: integers, the scales of their rows, what stays fp32, what is refused.

Rerun one: /usr/bin/python3 -m pytest tests/convert/test_int8.py -k golden
"""

import json
import re

import numpy as np
import pytest
import test_all_attention as all_attention
import torch_writer as tw
from convert_harness import GOLDEN, ROOT, convert
from numpy_model import Model, read_safetensors

INT8 = ("--dtype", "int8")
BOUND = 0.03
OUTLIER = "layers.0.ffn.lin2.weight"
# Of tiny(): what has two dimensions and decides no slot.
ROUNDED = sorted(name for name, array in tw.tiny_weights().items()
                 if array.ndim == 2 and ".query_proj." not in name)


def converted(directory, source, *args):
    got = convert(source, "--output", directory, *INT8, *args)
    assert (got.status, got.err) == (0, ""), got.err
    return got.out


def raw(directory):
    """name -> (dtype, array as it is stored, its first byte)"""
    data = (directory / "model.safetensors").read_bytes()
    base = 8 + int.from_bytes(data[:8], "little")
    kinds = {"F32": "<f4", "I32": "<i4", "I8": "<i1", "U8": "<u1", "F16": "<f2"}
    tensors = {}
    for name, entry in json.loads(data[8:base]).items():
        begin, end = entry["data_offsets"]
        array = np.frombuffer(data[base + begin:base + end], kinds[entry["dtype"]])
        tensors[name] = entry["dtype"], array.reshape(entry["shape"]), base + begin
    return tensors


def row_by_row(array):
    """The format's definition, one number at a time."""
    q, scales = np.zeros(array.shape, int), np.zeros(len(array), np.float32)
    for r, row in enumerate(array):
        most = max(np.abs(w) for w in row)
        if most < np.float32(1e-30):
            continue
        scales[r] = most / np.float32(127)
        for c, w in enumerate(row):
            q[r, c] = round(float(w * (np.float32(127) / most)))  # ties to even
    return q, scales


@pytest.fixture
def tiny(tmp_path):
    return tw.write_zip(tmp_path / "c.pth", tw.tiny())


def test_matrices_and_tables_are_integers_with_a_scale_per_row(tiny, tmp_path):
    converted(tmp_path / "m", tiny)
    stored, weights = raw(tmp_path / "m"), tw.tiny_weights()
    assert sorted(name for name, (dtype, _, _) in stored.items() if dtype == "I8") == ROUNDED
    assert {"embeddings.weight", "position_embeddings.weight", "ffns.0.lin1.weight",
            "attentions.1.out_lin.weight", "memories.1_in.values.weight"} <= set(ROUNDED)
    for name in ROUNDED:
        q, scales = row_by_row(weights[name])
        np.testing.assert_array_equal(stored[name][1], q, err_msg=name)
        assert stored[name + ".scale"][0] == "F32"
        np.testing.assert_array_equal(stored[name + ".scale"][1], scales, err_msg=name)
        assert np.abs(stored[name][1]).max(axis=1).min() == 127


def test_what_decides_about_slots_and_what_is_small_stays_as_it_is(tiny, tmp_path):
    converted(tmp_path / "m", tiny)
    stored, weights = raw(tmp_path / "m"), tw.tiny_weights()
    kept = {name for name in weights if "num_batches" not in name} - set(ROUNDED)
    assert {"memories.1_in.keys", "memories.1_in.query_proj.query_mlps.0.weight",
            "layer_norm1.0.weight", "pred_layer.proj.bias"} <= kept
    assert set(stored) == kept | set(ROUNDED) | {name + ".scale" for name in ROUNDED}
    for name in kept:
        assert stored[name][0] == "F32", name
        np.testing.assert_array_equal(stored[name][1], weights[name], err_msg=name)


def test_four_bits_of_zeros_and_of_both_ends(tmp_path, refused):
    """There is no code 8: of equal magnitudes the first is exact. Zeros lose nothing."""
    name, values = "memories.1_in.values.weight", np.zeros((16, 8), np.float32)
    for row, due in (([0] * 8, [0] * 8), ([1, -1] * 4, [1, -0.875] * 4), ([-1, 1] * 4, [-1, 0.875] * 4)):
        values[5] = row
        source = tw.write_zip(tmp_path / "c.pth", tw.tiny(memories__1_in__values__weight=tw.Tensor(values)))
        got = convert(source, "--output", tmp_path / "m", "--values", "q4")
        assert (got.status, got.err) == (0, ""), got.err
        codes, scales = (raw(tmp_path / "m")[each][1] for each in (name, name + ".scale"))
        assert codes.shape == (16, 4)
        numbers = np.concatenate([codes & 15, codes >> 4], 1).astype(int) - 8
        assert (numbers[5] * scales[5]).tolist() == due and not (numbers[4] * scales[4]).any()
    values[5] = 1e6
    source = tw.write_zip(tmp_path / "c.pth", tw.tiny(memories__1_in__values__weight=tw.Tensor(values)))
    refused(source, name, "holds 1e+06, too large for a scale in fp16", args=("--values", "q4"))


def test_shared_keys_have_two_dimensions_and_stay(tmp_path):
    weights = tw.tiny_weights()
    weights["memories.1_in.keys"] = np.ones((4, 2), np.float32)
    params = tw.tiny_params(mem_use_different_keys=False)
    source = tw.write_zip(tmp_path / "c.pth", tw.tiny(params=params, weights=weights))
    converted(tmp_path / "m", source)
    assert raw(tmp_path / "m")["memories.1_in.keys"][0] == "F32"


def test_slot_maps_stay_integers_of_32_bits(tmp_path):
    weights = tw.tiny_weights()
    weights["memories.1_in.head_permutations"] = np.stack([np.arange(16), np.arange(16)[::-1]])
    source = tw.write_zip(tmp_path / "c.pth", tw.tiny(
        params=tw.tiny_params(mem_shuffle_indices=True), weights=weights))
    converted(tmp_path / "m", source)
    assert raw(tmp_path / "m")["memories.1_in.slot_map"][0] == "I32"


def test_ties_and_rows_of_next_to_nothing(tmp_path):
    weights = tw.tiny_weights()
    rows = weights["ffns.0.lin1.weight"]
    rows[0] = [127, 0.5, 1.5, -0.5, -2.5, 2.5, -127, 126.5]
    rows[1] = 0
    rows[2] = np.float32(9e-31)
    rows[3] = [2e-30, -1e-30, 0, 0, 0, 0, 0, 0]
    rows[4] = [3e38, -3e38, 1e38, 0, 0, 0, 0, 0]
    source = tw.write_zip(tmp_path / "c.pth", tw.tiny(weights=weights))
    converted(tmp_path / "m", source)
    _, q, _ = raw(tmp_path / "m")["ffns.0.lin1.weight"]
    _, scales, _ = raw(tmp_path / "m")["ffns.0.lin1.weight.scale"]
    assert q[0].tolist() == [127, 0, 2, 0, -2, 2, -127, 126] and scales[0] == 1
    assert not q[1:3].any() and scales[1:3].tolist() == [0, 0]
    assert q[3, 0] == 127 and q[3, 1] in (-63, -64) and scales[3] > 0
    assert q[4].tolist() == [127, -127, 42, 0, 0, 0, 0, 0] and np.isfinite(scales[4])


def test_tensors_are_aligned_and_follow_without_a_gap(tiny, tmp_path):
    converted(tmp_path / "m", tiny)
    stored = raw(tmp_path / "m")
    spans = sorted((at, at + array.nbytes) for _, array, at in stored.values())
    assert all(a[1] == b[0] for a, b in zip(spans, spans[1:]))
    assert spans[0][0] % 64 == 0
    assert spans[-1][1] == (tmp_path / "m" / "model.safetensors").stat().st_size
    for name, (dtype, array, at) in stored.items():
        assert at % array.itemsize == 0, (name, dtype)


@pytest.mark.parametrize("args", [(), ("--values", "q4")])
def test_pieces_join_without_a_seam(args, tiny, tmp_path, monkeypatch):
    import safetensors_file
    converted(tmp_path / "whole", tiny, *args)
    monkeypatch.setattr(safetensors_file, "CHUNK", 24)
    converted(tmp_path / "pieces", tiny, *args)
    whole, pieces = ((tmp_path / name / "model.safetensors").read_bytes()
                     for name in ("whole", "pieces"))
    assert whole == pieces


def test_the_config_says_int8(tiny, tmp_path):
    out = converted(tmp_path / "m", tiny)
    assert json.loads((tmp_path / "m" / "config.json").read_text())["dtype"] == "int8"
    assert " in int8, " in out


@pytest.mark.parametrize("case", ["trained", "pkm12-2mem", "asm"])
def test_a_golden_case_computes_nearly_what_the_original_does(case, tmp_path):
    converted(tmp_path / "m", GOLDEN / case / "checkpoint.pth")
    ids = json.loads((GOLDEN / case / "expected.json").read_text())["sequences"][0]
    due = read_safetensors(GOLDEN / case / "expected.safetensors")["logprobs_full_f64"]
    got, _, _ = Model(tmp_path / "m").forward(ids["ids"], ids["lang"])
    divergence = (np.exp(due) * (due - got)).sum(axis=-1)
    assert 0 < divergence.mean() < 0.01, divergence


def test_of_all_attention_positions_persistent_vectors_and_spans_stay(tmp_path):
    case = ROOT / "tests" / "golden" / "allattention" / "e-allattn-adaptive-io"
    converted(tmp_path / "m", case / "checkpoint.pt", "--vocab", case / "vocab.txt")
    stored = raw(tmp_path / "m")
    kinds = {}
    for name, (dtype, _, _) in stored.items():
        kinds.setdefault(re.sub(r"(?<=\.)\d+(?=\.)", "N", name), set()).add(dtype)
    assert {name for name, dtypes in kinds.items() if dtypes == {"I8"}} == {
        "embeddings.weight", "layers.N.query.weight", "layers.N.key.weight",
        "layers.N.value.weight", "layers.N.out.weight", "output.head.weight",
        "output.tail.N.N.weight"}
    for name in ("positions", "layers.N.persistent.keys", "layers.N.persistent.values",
                 "layers.N.spans", "layers.N.norm1.weight", "output.tail.N.N.bias"):
        assert kinds[name] == {"F32"}, name


# ---- the bound ----------------------------------------------------------------------------------

def with_outlier(tmp_path, height, scale=1):
    """A checkpoint of the all-attention family, whose networks may be wide, in which one weight is so
    many times the others of its row, all of them times scale; the tensor and convert's arguments."""
    array = np.random.default_rng(2).standard_normal((all_attention.D, 400)).astype(np.float32)
    array[:, 0] = height
    array *= np.float32(scale)
    w = all_attention.weights(adaptive=False, persistent=False)
    w["layers.0.ff.fc1.weight"] = tw.Tensor(np.ones((400, all_attention.D), np.float32))
    w["layers.0.ff.fc1.bias"] = tw.Tensor(np.zeros(400, np.float32))
    w["layers.0.ff.fc2.weight"] = tw.Tensor(array)
    source = all_attention.checkpoint(tmp_path, w)
    return array, (source, "--vocab", tmp_path / "vocab.txt")


def relative_error(array):
    q, scales = row_by_row(array)
    exact = array.astype(np.float64)
    return np.linalg.norm(exact - q * scales[:, None].astype(np.float64)) / np.linalg.norm(exact)


@pytest.mark.parametrize("scale", [1, 2**-20])
def test_a_tensor_that_loses_too_much_is_refused_unless_forced(scale, tmp_path, refused):
    array, args = with_outlier(tmp_path, 150, scale)
    error = relative_error(array)
    assert error > BOUND
    line = refused(args[0], OUTLIER, "%g" % BOUND, "--dtype bf16", "--force",
                   args=(*args[1:], *INT8))
    assert "%.4f" % error in line
    out = converted(tmp_path / "m", *args, "--force")
    assert "relative error at most %.4f (%s)" % (error, OUTLIER) in out
    np.testing.assert_array_equal(raw(tmp_path / "m")[OUTLIER][1], row_by_row(array)[0])


def test_the_largest_error_and_its_tensor_are_printed(tmp_path):
    array, args = with_outlier(tmp_path, 8)
    error = relative_error(array)
    assert 0.01 < error < BOUND, "expected to be larger than any other and yet allowed"
    assert "relative error at most %.4f (%s)" % (error, OUTLIER) \
        in converted(tmp_path / "m", *args)


def test_force_is_for_int8_alone(tiny, tmp_path):
    got = convert(tiny, "--output", tmp_path / "m", "--dtype", "bf16", "--force")
    assert got.status == 2 and "--force" in got.err and "int8" in got.err


def test_nan_is_refused_before_anything_is_rounded(tmp_path, refused):
    weights = tw.tiny_weights()
    weights["ffns.0.lin2.weight"][2, 3] = np.nan
    source = tw.write_zip(tmp_path / "c.pth", tw.tiny(weights=weights))
    refused(source, "ffns.0.lin2.weight", "nan", "finite", args=(*INT8, "--force"))
