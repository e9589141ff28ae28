"""Conversion of sparse-memory-lm: what is written, and each thing that must be refused by name.

The golden cases themselves are computed by tests/golden/test_sparse_memory_http.py. Rerun one:
/usr/bin/python3 -m pytest tests/convert/test_sparse_memory_lm.py -k NAME
"""

import hashlib
import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import sparse_memory_lm
import sparse_memory_lm_config
import torch_writer as tw
from convert_harness import ROOT, convert
from fault import Refused
from numpy_model import stored_tensors
from torch_file import TorchFile

GOLDEN = ROOT / "tests" / "golden"
SET = GOLDEN / "sparse-memory-lm" / "shared-q4"
WHOLE = GOLDEN / "sparse-memory-lm" / "odd-scale" / "model.pt"
TOKENIZER = GOLDEN / "byte-bpe" / "gpt2" / "tokenizer.json"


def weights_of(path):
    """The arrays of a file by name. What torch_file.py reads other tests hold to other readers."""
    file = TorchFile(path)
    return {name: np.array(file.array(tensor)) for name, tensor in file.root["state_dict"].items()}


def config_of(directory):
    return json.loads((directory / "config.json").read_text())


def stored(directory):
    return stored_tensors(directory / "model.safetensors")


def made(source, output, *args):
    got = convert(source, "--output", output, *args)
    assert (got.status, got.err) == (0, ""), got.err
    return got.out


def refused(source, output, *args):
    got = convert(source, "--output", output, *args)
    assert got.status == 1 and got.out == "" and not output.exists(), got.err
    assert got.err.count("\n") == 1
    return got.err


@pytest.fixture
def folder(tmp_path):
    """A copy of the published form, to be damaged."""
    return shutil.copytree(SET, tmp_path / "set", ignore=shutil.ignore_patterns("expected.json"))


# ---- what is written ----------------------------------------------------------------------------


def test_a_folder_tells_what_it_is(tmp_path):
    for source in (SET, SET / "rest.pt", WHOLE.parent, WHOLE):
        made(source, tmp_path / "model", "--tokenizer", TOKENIZER)
        assert config_of(tmp_path / "model")["model_type"] == "memory_llama"
        assert config_of(tmp_path / "model")["eos_token_id"] == 1000
        assert (tmp_path / "model" / "tokenizer.json").read_bytes() == TOKENIZER.read_bytes()


def test_one_table_and_one_matrix_are_written(tmp_path):
    """rest.pt holds the tied matrix twice, model.pt a shared table under each of its layers."""
    for source, layers in ((SET, [1, 3, 5]), (WHOLE, [1, 2])):
        made(source, tmp_path / "model", "--from", "sparse-memory-lm")
        config, tensors = config_of(tmp_path / "model"), stored(tmp_path / "model")
        assert config["tie_output"] is True and "output.weight" not in tensors
        assert [m["layer"] for m in config["memories"]] == layers
        assert [m.get("values_of") for m in config["memories"]] == [None] + [0] * (len(layers) - 1)
        assert sum(name.endswith("values.weight") for name in tensors) == 1
        assert tensors["memories.%d_in.values.weight" % layers[0]].dtype == (np.uint8 if source == SET else np.float32)


def test_positions_turn_neighbours(tmp_path):
    """Row 2j of a head is the file's row j, row 2j+1 its row j + width/2; values stay as they are."""
    made(WHOLE, tmp_path / "model")
    arrays, tensors = weights_of(WHOLE), stored(tmp_path / "model")
    packed = np.asarray(arrays["layers.0.attn.wqkv.weight"]).reshape(3, 5, 12, 60)
    for part, name in enumerate(("query", "key")):
        got = tensors["layers.0.attention.%s.weight" % name].reshape(5, 12, 60)
        assert np.array_equal(got[:, 0::2], packed[part, :, :6])
        assert np.array_equal(got[:, 1::2], packed[part, :, 6:])
    assert np.array_equal(tensors["layers.0.attention.value.weight"], packed[2].reshape(60, 60))


def test_batch_norm_and_scale_are_folded_in(tmp_path):
    made(WHOLE, tmp_path / "model")
    arrays, tensors = weights_of(WHOLE), stored(tmp_path / "model")
    norm = {name: np.asarray(arrays["layers.1.ffn.query_norm." + name], np.float64)
            for name in ("weight", "bias", "running_mean", "running_var")}
    gain = norm["weight"] / np.sqrt(norm["running_var"] + 1e-5)  # not norm_eps, which is 1e-6
    weight = np.asarray(arrays["layers.1.ffn.query_proj.weight"], np.float64) * gain[:, None]
    query = "memories.1_in.query_proj.query_mlps.0.weight"
    assert np.array_equal(tensors[query], weight.astype(np.float32))
    bias = np.asarray(arrays["layers.1.ffn.query_proj.bias"], np.float64) - norm["running_mean"]
    assert np.array_equal(tensors[query.replace("weight", "bias")],
                          (bias * gain + norm["bias"]).astype(np.float32))
    scale = np.exp(np.asarray(arrays["layers.1.ffn.log_score_scale"], np.float64))
    keys = np.asarray(arrays["layers.1.ffn.keys"], np.float64) * scale[:, None, None, None]
    assert np.array_equal(tensors["memories.1_in.keys"], keys.astype(np.float32))


def test_codes_with_scales_of_both_signs_become_int8(tmp_path, folder):
    (folder / "meta.json").unlink()  # its sums
    scales = np.fromfile(SET / "scales_q4.bin", "<f2") * np.where(np.arange(4096) % 2, 1, -1).astype("<f2")
    scales.tofile(folder / "scales_q4.bin")
    made(folder, tmp_path / "model", "--dtype", "int8")
    codes = np.fromfile(SET / "values_q4.bin", np.uint8).reshape(4096, 32)
    due = (np.concatenate([codes & 15, codes >> 4], 1) - np.float32(8)) * scales.astype(np.float32)[:, None]
    tensors = stored(tmp_path / "model")
    name, = (name for name in tensors if name.endswith(".values.weight"))
    assert tensors[name].dtype == np.int8 and np.array_equal(tensors[name] * tensors[name + ".scale"][:, None], due)


@pytest.mark.parametrize("args", [(), ("--dtype", "int8")])
def test_codes_in_pieces_join_without_a_seam(tmp_path, monkeypatch, args):
    import safetensors_file
    made(SET, tmp_path / "whole", *args)
    monkeypatch.setattr(safetensors_file, "CHUNK", 32000)
    made(SET, tmp_path / "pieces", *args)
    assert (tmp_path / "whole" / "model.safetensors").read_bytes() \
        == (tmp_path / "pieces" / "model.safetensors").read_bytes()


def test_tensors_begin_at_multiples_of_their_elements(tmp_path):
    """Also behind rows of 37 integers of 8 bits."""
    made(WHOLE, tmp_path / "model", "--dtype", "int8", "--force")
    data = (tmp_path / "model" / "model.safetensors").read_bytes()
    n = int.from_bytes(data[:8], "little")
    for name, entry in json.loads(data[8:8 + n]).items():
        begin, end = entry["data_offsets"]
        assert (8 + n + begin) % ((end - begin) // int(np.prod(entry["shape"]))) == 0, name


def test_a_bf16_table_is_taken_where_there_is_no_other(tmp_path, folder):
    rng = np.random.default_rng(2)
    table = rng.integers(0x3c00, 0x3d00, 4096 * 64).astype("<u2")
    for name in ("values_q4.bin", "scales_q4.bin", "meta.json"):
        (folder / name).unlink()
    (folder / "values_bf16.bin").write_bytes(table.tobytes() + b"\0")
    assert "values_bf16.bin has 524289 bytes, expected are 524288" in refused(folder, tmp_path / "model")
    (folder / "values_bf16.bin").write_bytes(table.tobytes())
    made(folder, tmp_path / "model")
    assert np.array_equal(stored(tmp_path / "model")["memories.1_in.values.weight"].ravel(), table)
    for name in ("rest.pt", "values_bf16.bin"):
        (folder / "meta.json").write_text(json.dumps({"sha256": {name: "0" * 64}}))
        assert name + ": its SHA-256 is" in refused(folder, tmp_path / "other")


def with_networks(layers, **values):
    """A change that puts networks where layers have memories."""
    def change(root):
        left = [i for i in (1, 3, 5) if i not in layers]
        root["model_config"].update(mem_layers=left, **values)
        root["table_keys"] = ["layers.%d.ffn.values.weight" % i for i in left]
        weights = root["state_dict"]
        for name in [name for name in weights if name.startswith(tuple("layers.%d.ffn." % i for i in layers))]:
            del weights[name]
        weights.update(("layers.%d.ffn.%s.weight" % (i, name), weights["layers.0.ffn.%s.weight" % name])
                       for i in layers for name in ("w13", "w2"))
        if not left:
            del root["table_keys"], root["table_shape"]
    return change


def test_a_model_without_memories(tmp_path, folder):
    rewrite(folder, with_networks((1, 3, 5)))
    made(folder, tmp_path / "model")
    assert config_of(tmp_path / "model")["memories"] == []
    assert not any(name.startswith("memories.") for name in stored(tmp_path / "model"))


def test_one_memory_needs_no_sharing_and_queries_no_norm(tmp_path, folder):
    def change(root):
        with_networks((3, 5), mem_share_values=False, mem_query_norm="none")(root)
        weights = root["state_dict"]
        for name in [name for name in weights if name.startswith("layers.1.ffn.query_norm")]:
            del weights[name]
        weights["layers.1.ffn.query_norm.num_batches_tracked"] = np.array(3)

    rewrite(folder, change)
    made(folder, tmp_path / "model")
    entry, = config_of(tmp_path / "model")["memories"]
    assert entry["layer"] == 1 and "values_of" not in entry
    query = weights_of(SET / "rest.pt")["layers.1.ffn.query_proj.weight"]
    assert np.array_equal(stored(tmp_path / "model")["memories.1_in.query_proj.query_mlps.0.weight"], query)


def test_memories_may_have_tables_of_their_own(tmp_path):
    root, arrays = TorchFile(WHOLE).root, weights_of(WHOLE)
    root["model_config"]["mem_share_values"] = False
    tables = ["layers.%d.ffn.values.weight" % i for i in (1, 2)]
    arrays[tables[1]] = arrays[tables[0]] + np.float32(1)
    source = tw.write_zip(tmp_path / "model.pt", {
        **root, "state_dict": {name: tw.Tensor(array) for name, array in arrays.items()}})
    made(source, tmp_path / "model")
    for i, table in zip((1, 2), tables):
        assert np.array_equal(stored(tmp_path / "model")["memories.%d_in.values.weight" % i], arrays[table])
    assert not any("values_of" in entry for entry in config_of(tmp_path / "model")["memories"])


def test_the_end_of_text_can_be_given(tmp_path):
    made(SET, tmp_path / "model", "--set", "eos_token_id=7")
    assert config_of(tmp_path / "model")["eos_token_id"] == 7
    assert "the tokenizer says 1000" in refused(SET, tmp_path / "other", "--tokenizer", TOKENIZER,
                                                "--set", "eos_token_id=7")


@pytest.mark.parametrize("n_vocab, due", [(50304, 50256), (50257, 50256), (50305, None)])
def test_the_vocabulary_of_gpt2_tells_its_end_of_text(n_vocab, due):
    model = SimpleNamespace(config={"vocab_size": n_vocab})
    sparse_memory_lm.read_text(model, None, {})
    assert model.config.get("eos_token_id") == due


# ---- what is refused ----------------------------------------------------------------------------


def rewrite(folder, change):
    """rest.pt with what change does to its root, as a file that the reader takes."""
    root = {**TorchFile(SET / "rest.pt").root, "state_dict": weights_of(SET / "rest.pt")}
    change(root)
    root["state_dict"] = {name: tw.Tensor(array) if isinstance(array, np.ndarray) else array
                          for name, array in root["state_dict"].items()}
    tw.write_zip(folder / "rest.pt", root)
    if (folder / "meta.json").exists():
        meta = json.loads((folder / "meta.json").read_text())
        meta["sha256"]["rest.pt"] = hashlib.sha256((folder / "rest.pt").read_bytes()).hexdigest()
        (folder / "meta.json").write_text(json.dumps(meta))


def configure(**values):
    return lambda root: root["model_config"].update(values)


REFUSED = {
    "engram": (configure(eng_layers=[1]), "eng_layers: [] expected: n-gram (Engram) modules"),
    "unknown key": (configure(mem_new=1), "the key 'mem_new' is not one that the author's code knows"),
    "layer beyond": (configure(mem_layers=[1, 6]), "mem_layers: distinct numbers 0..5 expected"),
    "layer twice": (configure(mem_layers=[1, 1]), "mem_layers: distinct numbers"),
    "odd heads": (configure(n_heads=64), "n_heads: heads of an even width expected"),
    "knn": (configure(mem_knn=65), "mem_knn: an integer 1..64 expected"),
    "norm": (configure(mem_query_norm="layernorm"), "mem_query_norm: one of batchnorm none expected"),
    "scale": (configure(mem_score_scale="learned"), "tensor 'layers.1.ffn.log_score_scale' is missing"),
    "width": (configure(mem_v_dim=32, mem_swilu=False), "mem_v_dim: 32 columns under a width of 64"),
    "width of table": (configure(mem_v_dim=32), "shape [32, 64] expected"),
    "own tables": (configure(mem_share_values=False), "mem_share_values is false, but one table"),
    "no gate": (configure(mem_swilu=False), "'layers.1.ffn.swilu_proj.weight' is not one that"),
    "not tied": (lambda root: root["state_dict"].update(
        {"lm_head.weight": root["state_dict"]["lm_head.weight"] + np.float32(0.5)}),
        "'lm_head.weight' differs from 'tok_emb.weight' at row 0, but the model has one"),
    "missing": (lambda root: root["state_dict"].pop("layers.2.ffn.w2.weight"),
                "tensor 'layers.2.ffn.w2.weight' is missing"),
    "extra": (lambda root: root["state_dict"].update(other=np.zeros(3, np.float32)),
              "tensor 'other' is not one that model_config calls for"),
    "shape": (lambda root: root["state_dict"].update({"norm.weight": np.ones(63, np.float32)}),
              "tensor 'norm.weight': shape [64] expected, got [63]"),
    "variance": (lambda root: root["state_dict"].update(
        {"layers.3.ffn.query_norm.running_var": np.full(128, -1, np.float32)}),
        "running_var' holds -1; a variance cannot be negative"),
    "table_keys": (lambda root: root.update(table_keys=["layers.1.ffn.values.weight"]), "table_keys: "),
    "table_shape": (lambda root: root.update(table_shape=[4096, 32]), "table_shape: [4096, 64] expected"),
    "no table_keys": (lambda root: root.pop("table_keys"), "table_keys: "),
    "no table_shape": (lambda root: root.pop("table_shape"), "table_shape: [4096, 64] expected"),
    "no config": (lambda root: root.update(model_config=None), "model_config: a dictionary expected"),
    "no tensor": (lambda root: root["state_dict"].update(other=3), "tensors by name expected, got 'other' = 3"),
    "no name": (lambda root: root["state_dict"].update({3: np.zeros(3, np.float32)}),
                "tensors by name expected, got 3 = "),
    "an add-on": (lambda root: root.update(addon_cfg=root.pop("model_config")), "'model_config' is missing"),
}


WRONG = [{name: 0} for name in ("vocab_size", "d_model", "n_layers", "n_heads", "ffn_hidden", "max_seq_len",
                                "norm_eps", "mem_n_keys", "mem_heads", "mem_knn", "mem_k_dim")] + [
    {"rope_theta": 0.5}, {"norm_eps": 1.5}, {"norm_eps": 9.9e-31}, {"n_heads": 5}, {"mem_layers": 3}, {"mem_layers": [True]},
    {"mem_layers": ["1"]}, {"mem_layers": [-1]}, {"mem_layers": list(range(65)), "n_layers": 65},
    {"mem_knn": 1025, "mem_n_keys": 2048}, {"mem_v_dim": False}, {"mem_v_dim": -1.0}, {"mem_v_dim": None}]


@pytest.mark.parametrize("values", WRONG, ids=str)
def test_each_number_is_checked(values):
    with pytest.raises(Refused, match="model_config: %s: " % next(iter(values))):
        sparse_memory_lm_config.read({"mem_layers": [0], **values})


def test_what_older_files_lack_has_the_authors_default():
    p = sparse_memory_lm_config.read({"mem_layers": [2, 1]})
    assert (p.n_vocab, p.d_model, p.n_layer, p.n_head, p.d_ff) == (50304, 384, 12, 6, 1024)
    assert (p.n_position, p.rope_theta, p.norm_eps, p.layers) == (1024, 10000, 1e-5, [1, 2])
    m = p.memory
    assert (m.n_key, m.n_head, m.k_top, m.d_key, m.d_value) == (512, 4, 32, 256, 384)
    assert (m.has_norm, m.is_plus, m.has_scale, m.is_shared) == (True, True, False, False)
    assert sparse_memory_lm_config.read({}).memory is None
    for width, due in ((0, 384), (-7, 384), (1, 1)):
        assert sparse_memory_lm_config.read({"mem_layers": [0], "mem_v_dim": width}).memory.d_value == due


@pytest.mark.parametrize("name", REFUSED)
def test_what_contradicts_itself_is_refused(tmp_path, folder, name):
    change, found = REFUSED[name]
    rewrite(folder, change)
    assert found in refused(folder, tmp_path / "model")


def test_files_that_do_not_belong_together(tmp_path, folder):
    (folder / "values_q4.bin").write_bytes((SET / "values_q4.bin").read_bytes()[:-1])
    assert "values_q4.bin has 131071 bytes, expected are 131072: 4096 rows of 64 columns" in \
        refused(folder, tmp_path / "model")
    (folder / "values_q4.bin").write_bytes((SET / "values_q4.bin").read_bytes() + b"\0")
    assert "values_q4.bin has 131073 bytes" in refused(folder, tmp_path / "model")
    (folder / "values_q4.bin").write_bytes(bytes(131072))
    assert "values_q4.bin: its SHA-256 is" in refused(folder, tmp_path / "model")
    (folder / "values_q4.bin").unlink()
    assert "values_q4.bin is not beside rest.pt" in refused(folder, tmp_path / "model")


def test_the_file_of_a_folder_is_named(tmp_path, folder):
    """What is wrong inside it, and a file that is none."""
    rewrite(folder, configure(mem_knn=65))
    assert "%s: model_config: mem_knn" % (folder / "rest.pt") in refused(folder, tmp_path / "model")
    (folder / "rest.pt").write_bytes(b"PK")
    assert "convert: %s: " % (folder / "rest.pt") in refused(folder, tmp_path / "model")


def test_scales_are_numbers(tmp_path, folder):
    scales = np.fromfile(SET / "scales_q4.bin", "<f2")
    scales[77] = np.inf
    scales.tofile(folder / "scales_q4.bin")
    assert "scales_q4.bin: the scale of row 77 is inf" in refused(folder, tmp_path / "model")


@pytest.mark.parametrize("key, value", [("rows", 4095), ("dim", None), ("table_keys", [])])
def test_table_shape_counts_more_than_meta_json(tmp_path, folder, key, value):
    meta = json.loads((SET / "meta.json").read_text())
    (folder / "meta.json").write_text(json.dumps({**meta, key: value}))
    made(folder, tmp_path / "model")
    made(SET, tmp_path / "due")
    written = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("model", "due")]
    assert written[0] == written[1]


def test_sums_are_of_whole_files(tmp_path, monkeypatch):
    monkeypatch.setattr(sparse_memory_lm, "HASH_CHUNK", 1000)
    made(SET, tmp_path / "model")


def test_sums_are_an_object(tmp_path, folder):
    meta = json.loads((SET / "meta.json").read_text())
    (folder / "meta.json").write_text(json.dumps({**meta, "sha256": 1}))
    assert "meta.json: sha256: an object expected, got 1" in refused(folder, tmp_path / "model")


def test_what_is_not_there_is_named(tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "a directory without rest.pt or model.pt" in refused(empty, tmp_path / "model", "--from",
                                                                "sparse-memory-lm")
    shutil.copy(SET / "rest.pt", empty)
    shutil.copy(WHOLE, empty)
    assert "holds both rest.pt and model.pt" in refused(empty, tmp_path / "model")


def test_a_tokenizer_of_another_size_is_refused(tmp_path):
    other = GOLDEN / "byte-bpe" / "qwen2" / "tokenizer.json"
    assert "1607 tokens, but the vocabulary has 1024 words" in refused(SET, tmp_path / "model",
                                                                       "--tokenizer", other)
    vocab = tmp_path / "vocab.json"
    (tmp_path / "merges.txt").touch()
    vocab.write_text(json.dumps({chr(33 + i): i for i in range(90)}))
    assert "90 tokens, but the vocabulary has 1024 words, of which at most 256 may be without" in \
        refused(SET, tmp_path / "model", "--tokenizer", vocab)
    (tmp_path / "merges.txt").unlink()
    assert "merges.txt must stand beside it" in refused(SET, tmp_path / "model", "--tokenizer", vocab)
