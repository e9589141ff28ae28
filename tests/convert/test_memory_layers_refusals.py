"""What convert.py refuses of the memory-layers family, by the name of the field or tensor: options and
sizes that are not served, damaged configurations, weights that contradict them.

Rerun one: /usr/bin/python3 -m pytest tests/convert/test_memory_layers_refusals.py -k mem_knn
"""

import json

import memory_layers_writer as mw
import numpy as np
import pytest
import torch_writer as tw
from convert_harness import convert

PK = mw.PK
HUGE = 10**20

# Changes of params.json, the field that is named, and words of the reason.
FIELDS = [
    ({"model.dim": 0}, "model.dim", "1..65536", "got 0"),
    ({"model.dim": 65537}, "model.dim", "1..65536", "65537"),
    ({"model.dim": 8.0}, "model.dim", "8.0"),
    ({"model.dim": "8"}, "model.dim", "'8'"),
    ({"model.dim": None}, "model.dim", "None"),
    ({"model.dim": ...}, "tok_embeddings.weight", "[258, 512]", "[258, 8]"),
    ({"model.n_layers": 1025}, "model.n_layers", "1..1024", "1025"),
    ({"model.n_layers": True}, "model.n_layers", "true"),
    ({"model.n_heads": None}, "model.n_heads", "model.head_dim"),
    ({"model.n_heads": ..., "model.head_dim": ...}, "model.n_heads", "model.head_dim"),
    ({"model.n_heads": 3}, "model.n_heads", "not divisible by 3"),
    ({"model.n_heads": 3, "model.head_dim": 4}, "model.n_heads", "not divisible by 3"),
    ({"model.n_heads": 8}, "model.n_heads", "8 / 8 = 1", "even"),
    ({"model.dim": 24, "model.n_heads": 8}, "model.n_heads", "24 / 8 = 3"),
    ({"model.n_heads": 1025}, "model.n_heads", "1..1024"),
    ({"model.head_dim": 3}, "model.head_dim", "even", "3"),
    ({"model.head_dim": 65538}, "model.head_dim", "2..65536", "65538"),
    ({"model.n_heads": None, "model.head_dim": 6}, "model.head_dim", "not divisible by 6"),
    ({"model.dim": 4096, "model.n_heads": None, "model.head_dim": 2}, "model.head_dim",
     "2048 heads", "1024"),
    ({"model.n_kv_heads": 3}, "model.n_kv_heads", "1..2", "got 3"),
    ({"model.n_kv_heads": 0}, "model.n_kv_heads", "got 0"),
    ({"model.dim": 24, "model.n_heads": 6, "model.n_kv_heads": 4}, "model.n_kv_heads", "4 does not divide the 6 heads"),
    ({"model.n_heads": 2, "model.head_dim": 32770}, "model.head_dim", "2 heads of 32770", "65536"),
    ({"model.norm_eps": 0}, "model.norm_eps", "a number 1e-30..1", "got 0"),
    ({"model.norm_eps": 9.9e-31}, "model.norm_eps", "9.9e-31"),
    ({"model.norm_eps": 1.5}, "model.norm_eps", "1.5"),
    ({"model.norm_eps": "1e-5"}, "model.norm_eps", "'1e-5'"),
    ({"model.rope_theta": 0.5}, "model.rope_theta", "1..1e+12", "0.5"),
    ({"model.rope_theta": HUGE}, "model.rope_theta", "1..1e+12", str(HUGE)),
    ({"model.rope_theta": True}, "model.rope_theta", "true"),
    ({"model.max_seqlen": 2**20 + 1}, "model.max_seqlen", "1..1048576", "1048577"),
    ({"model.vocab_size": 0}, "model.vocab_size", "1..16777216", "-1", "got 0"),
    ({"model.vocab_size": -2}, "model.vocab_size", "1..16777216", "got -2"),
    ({"model.vocab_size": -1.0}, "model.vocab_size", "got -1.0"),
    ({"model.vocab_size": None}, "model.vocab_size", "got None"),
    ({"model.vocab_size": 259}, "tok_embeddings.weight", "[259, 8]", "[258, 8]"),
    ({"model.vocab_size": 2**24 + 1}, "model.vocab_size", "16777217"),
    ({"model.weight_tying": True}, "model.weight_tying", "true"),
    ({"model.weight_tying": 0}, "model.weight_tying", "true or false", "got 0"),
    ({PK + "is_enabled": "yes"}, PK + "is_enabled", "'yes'"),
    ({PK + "layers": [1, 3]}, PK + "layers", "[1, 3]"),
    ({PK + "layers": "1,4"}, PK + "layers", "0..3", "'1,4'"),
    ({PK + "layers": "1,,3"}, PK + "layers", "'1,,3'"),
    ({PK + "layers": "-1"}, PK + "layers", "'-1'"),
    ({PK + "layers": "\u00b2"}, PK + "layers", "0..3"),
    ({PK + "layers": "0000001"}, PK + "layers", "0..3"),
    ({PK + "layers": "0" * 5000}, PK + "layers", "0..3"),
    ({PK + "layers": "1,3,01"}, PK + "layers", "twice"),
    ({"model.n_layers": 70, PK + "layers": ",".join(map(str, range(65)))}, PK + "layers",
     "65 memories", "64"),
    ({PK + "mem_n_keys": 46341}, PK + "mem_n_keys", "1..46340", "46341"),
    ({PK + "mem_heads": 1}, PK + "mem_heads", "2..1024", "got 1"),
    ({PK + "mem_heads": 1025}, PK + "mem_heads", "1025"),
    ({PK + "mem_knn": 6}, PK + "mem_knn", "1..5", "mem_n_keys", "got 6"),
    ({PK + "mem_n_keys": 2000, PK + "mem_knn": 1025}, PK + "mem_knn", "1..1024", "1025"),
    ({PK + "mem_k_dim": 5}, PK + "mem_k_dim", "even", "5"),
    ({PK + "mem_k_dim": 65538}, PK + "mem_k_dim", "2..65536"),
    ({PK + "mem_v_dim": None}, PK + "mem_v_dim", "got None"),
    ({PK + "mem_v_dim": 65537}, PK + "mem_v_dim", "..65536", "got 65537"),
    ({PK + "mem_v_dim": 8, PK + "peer_variant": True}, PK + "mem_v_dim", "peer_variant"),
    ({PK + "mem_share_values": 1}, PK + "mem_share_values", "got 1"),
    ({PK + "swilu_projection": "on"}, PK + "swilu_projection", "'on'"),
    ({PK + "mem_gated": None}, PK + "mem_gated", "None"),
    ({PK + "peer_variant": 0}, PK + "peer_variant", "got 0"),
    ({"distributed.model_dtype": "fp8"}, "distributed.model_dtype", "fp32 bf16 fp16", "'fp8'"),
    ({"distributed.model_dtype": ["fp32"]}, "distributed.model_dtype", "['fp32']"),
    ({"data.tokenizer.name": "words"}, "data.tokenizer.name", "bytes sp tiktoken", "'words'"),
    ({"data.tokenizer.name": 7}, "data.tokenizer.name", "got 7"),
    ({"data.tokenizer.name": "sp", "data.tokenizer.path": 7}, "data.tokenizer.path", "got 7"),
]


@pytest.mark.parametrize("case", FIELDS, ids=lambda case: "%s-%s" % (case[1], case[-1][:12]))
def test_fields(case, tmp_path, refused):
    changes, *words = case
    words[0] = "params.json: %s: " % words[0] if words[0][:4] != "tok_" else words[0]
    refused(mw.tiny(tmp_path, changes), *words)


@pytest.mark.parametrize("changes, word", [
    ({"model.multiple_of": 0}, "model.multiple_of"), ({"model.multiple_of": "8"}, "multiple_of"),
    ({"model.ffn_dim_multiplier": -1}, "0 < number"), ({"model.ffn_dim_multiplier": 0}, "0 < number"),
    ({"model.ffn_dim_multiplier": 0.01, "model.multiple_of": 1}, "model.ffn_dim_multiplier: a feed-forward width of 0"),
    ({"model.ffn_dim_multiplier": "x"}, "'x'"),
    ({"model.ffn_dim_multiplier": 1e6}, "1..1048576 are served")])
def test_the_formula_for_models_without_networks(changes, word, tmp_path, refused):
    arrays = mw.weights((0, 1, 2, 3))
    refused(mw.tiny(tmp_path, {PK + "layers": "0,1,2,3", **changes}, arrays), word)


@pytest.mark.parametrize("root, words", [
    (b"", ["not JSON"]), (b"[]", ["an object expected", "[]"]), (b"null", ["an object", "None"]),
    (b"{", ["not JSON"]), (b"{}", ["model.n_heads"]), (b"{'a': 1}", ["not JSON"]),
    (b'{"model": []}', ["model: an object expected", "[]"]),
    (b'{"model": {"productkey_args": 1, "n_heads": 2, "vocab_size": 9}}',
     ["model.productkey_args: an object"]),
    (b'{"a": NaN}', ["NaN"]), (b'{"a": -Infinity}', ["Infinity"]), (b'{"a": 1, "a": 1}', ["twice"]),
    (b'{"model": {"n_heads": 2, "rope_theta": 1e999}}', ["model.rope_theta", "inf"]),
    (b'{"a": %s}' % (b"9" * 100000), ["100000 digits", "limit"]), (b'{"a": 1} x', ["not JSON"]),
    (b"[" * 200000, ["not JSON"]), (b'{"a":' * 100000, ["not JSON"]), (b'"\xff"', ["not JSON"]),
    (b"\xef\xbb\xbf{}", ["not JSON"]), (b" " * (1 << 20) + b"{}", ["limit of 1048576 bytes"])],
    ids=lambda value: repr(value[:24]) if isinstance(value, bytes) else "")
def test_damaged_configurations(root, words, tmp_path, refused):
    refused(mw.tiny(tmp_path, root=root), "params.json", *words)


def test_a_configuration_cut_anywhere(tmp_path, refused):
    root = json.dumps(mw.params()).encode()
    for n in range(0, len(root), 37):
        refused(mw.tiny(tmp_path, root=root[:n]), "params.json: not JSON")


# ---- tensors ------------------------------------------------------------------------------------


def test_every_missing_or_changed_tensor_is_named(tmp_path, refused):
    arrays = mw.weights(gated=True)
    table = "feed_forward.values"
    for name, array in arrays.items():
        if table in name or name == "tok_embeddings.weight":
            continue
        others = {key: value for key, value in arrays.items() if key != name}
        refused(mw.tiny(tmp_path, {PK + "mem_gated": True}, others), "'%s'" % name, "missing")
        for changed in (np.zeros(array.shape + (1,), np.float32), np.concatenate([array, array])):
            # A network wider by half is one by itself: the next tensor does not fit to it.
            word = name if "0.feed_forward.w1" not in name or changed.ndim == 3 else "feed_forward.w"
            refused(mw.tiny(tmp_path, {PK + "mem_gated": True}, {**others, name: changed}), word,
                    "shape", "expected")


@pytest.mark.parametrize("shape", [(0, 8), (258,), (258, 8, 1), (258, 9)])
def test_an_embedding_that_tells_no_vocabulary(shape, tmp_path, refused):
    arrays = {**mw.weights(), "tok_embeddings.weight": np.zeros(shape, np.float32)}
    refused(mw.tiny(tmp_path, {"model.vocab_size": -1}, arrays), "tok_embeddings.weight", "8] expected")


@pytest.mark.parametrize("name", [
    "layers.1.feed_forward.query_norm.weight", "layers.1.feed_forward.keys_norm.weight",
    "layers.1.feed_forward.w1.weight", "layers.0.feed_forward.keys", "rope.freqs_cis",
    "layers.0.attention.wq.bias", "layers.4.attention_norm.weight", "norm.bias",
    "layers.1.feed_forward.gating.weight", "layers.1.feed_forward.values_u.weight",
    "layers.1.feed_forward.query_proj.query_mlps.1.weight", "evil\nname"])
def test_tensors_of_other_models(name, tmp_path, refused):
    arrays = {**mw.weights(), name: np.ones(8, np.float32)}
    refused(mw.tiny(tmp_path, (), arrays), name.replace("\n", "?"), "params.json calls for")


@pytest.mark.parametrize("changes, word", [
    ({PK + "swilu_projection": False}, "swilu_projection"),
    ({PK + "is_enabled": False}, "layers.1.feed_forward.w1"),
    ({PK + "peer_variant": True}, "values_v"), ({PK + "mem_gated": True}, "gating"),
    ({PK + "mem_n_keys": 6}, "keys"), ({PK + "mem_v_dim": 6}, "swilu_projection"),
    ({PK + "layers": "1"}, "layers.3.feed_forward.w1"), ({"model.n_layers": 3}, PK + "layers"),
    ({"model.n_layers": 5}, "layers.4"), ({"model.n_kv_heads": None}, "wk")])
def test_weights_of_another_configuration(changes, word, tmp_path, refused):
    refused(mw.tiny(tmp_path, changes), word)


@pytest.mark.parametrize("name", ["norm.weight", "layers.1.feed_forward.values.weight"])
def test_tensors_that_are_not_floating_point(name, tmp_path, refused):
    arrays = mw.weights()
    arrays[name] = np.ones(arrays[name].shape, np.int64)
    refused(mw.tiny(tmp_path, (), arrays), name, "floating point expected, got int64")


@pytest.mark.parametrize("bits", [0x7F80, 0x7FC0, 0xFF80])
def test_tables_that_are_not_finite(bits, tmp_path, refused):
    arrays = mw.weights(copies=False)
    arrays["layers.1.feed_forward.values.weight"][24, 7] = bits
    refused(mw.tiny(tmp_path, (), arrays), "memories.1_in.values.weight", "finite")


def test_shared_storages(tmp_path, refused):
    arrays = mw.weights()
    arrays["output.weight"] = arrays["tok_embeddings.weight"] = tw.Tensor(arrays["output.weight"])
    refused(mw.tiny(tmp_path, (), arrays), "output.weight", "shares its storage")
    arrays = mw.weights()
    both = tw.Storage(np.ones(15, np.float32))  # one element less than the two vectors have
    arrays["layers.0.ffn_norm.weight"], arrays["norm.weight"] = (tw.Tensor(np.ones(8, np.float32), both, at)
                                                                for at in (0, 7))
    refused(mw.tiny(tmp_path, (), arrays), "tensor 'norm.weight' shares its storage")
    arrays = mw.weights(own=True)  # memories that have tables of their own
    name = "layers.%d.feed_forward.values.weight"
    arrays[name % 3] = arrays[name % 1] = tw.Tensor(arrays[name % 1])
    source = mw.tiny(tmp_path, {PK + "mem_share_values": False}, arrays)
    refused(source, name % 3, "shares its storage")


def test_views_of_one_storage_are_the_same_where_they_begin_alike():
    from memory_layers import is_same
    from torch_file import Storage, Tensor
    views = [Tensor(Storage("0", np.dtype("<f4"), 400, at, n), 0, (25, 8), (8, 1))
             for at, n in ((0, 200), (200, 200), (0, 400))]
    assert is_same(views[0], views[0]) and not is_same(*views[:2]) and not is_same(*views[::2])


EMPTY = tw.Tensor(np.zeros(2, np.float32))


@pytest.mark.parametrize("model, got", [
    ({"tok_embeddings.weight": 1}, "'tok_embeddings.weight' = 1"), ({1: 2, "tok_embeddings.weight": 1}, "1 = 2"),
    ({3: EMPTY, "tok_embeddings.weight": EMPTY}, "3 = <tensor [2]>")])
def test_state_dicts_that_are_none(model, got, tmp_path, refused):
    source = mw.tiny(tmp_path)
    tw.write_zip(source, {"model": model})
    refused(source, "model: tensors by name expected, got " + got)


def test_views_that_leave_their_storage(tmp_path, refused):
    arrays = mw.weights()
    table = "layers.1.feed_forward.values.weight"
    arrays[table] = tw.Tensor(arrays[table], offset=1)
    refused(mw.tiny(tmp_path, (), arrays), "tensor '%s': size" % table, "do not fit a storage of 200 elements")
    arrays[table] = tw.Tensor(arrays[table].storage.data.reshape(25, 8), stride=(0, 1),
                              storage=tw.Storage(np.zeros(8, np.uint16)))
    refused(mw.tiny(tmp_path, (), arrays), table, "do not fit a storage of 8 elements")


def test_a_file_beside_params_that_is_another_one(tmp_path, refused):
    mw.tiny(tmp_path)
    refused(tw.write_zip(tmp_path / "other.pth", {"model": {"x": 1}}), "not an XLM checkpoint, nor one of")


def test_a_damaged_table(tmp_path, refused):
    source = mw.tiny(tmp_path)
    data = bytearray(source.read_bytes())
    at = data.index(mw.weights()["layers.1.feed_forward.values.weight"].tobytes())
    data[at + 5] ^= 255
    source.write_bytes(data)
    refused(source, "layers.1.feed_forward.values.weight", "checksum")
    assert convert(tmp_path, "--output", tmp_path / "o").status == 1
