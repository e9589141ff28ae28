"""Conversion of Hugging Face directories: kinds of models, types, shards, ids, sampling, text.

What the converted models compute is compared with the transformers package in tests/golden/test_hf.py.
Rerun one: /usr/bin/python3 -m pytest tests/convert/test_hf_directories.py -k shards
"""

import json

import hf_writer as hw
import numpy as np
import pytest
from convert_harness import ROOT, convert
from test_memory_layers import made, spm

NAMES = [("self_attn.q_proj", "attention.query"), ("self_attn.k_proj", "attention.key"),
         ("self_attn.v_proj", "attention.value"), ("self_attn.o_proj", "attention.out"),
         ("self_attn.q_norm", "attention.query_norm"), ("self_attn.k_norm", "attention.key_norm"),
         ("mlp.gate_proj", "ffn.gate"), ("mlp.up_proj", "ffn.up"), ("mlp.down_proj", "ffn.down"),
         ("input_layernorm", "attention_norm"), ("post_attention_layernorm", "ffn_norm"),
         ("model.embed_tokens", "embeddings"), ("lm_head", "output"), ("model.", "")]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "source").mkdir()
    return tmp_path / "source"


def our_name(name):
    for theirs, ours in NAMES:
        name = name.replace(theirs, ours)
    return name


def turned(array):
    """Row 2j of a head is its row j, row 2j + 1 the row j of its second half; written as loops."""
    done = array.copy()
    for first in range(0, len(array), hw.HEAD):
        for j in range(hw.HEAD // 2):
            done[first + 2 * j] = array[first + j]
            done[first + 2 * j + 1] = array[first + j + hw.HEAD // 2]
    return done


def compare(stored, arrays):
    """Every tensor is there once, to the bit, queries and keys in the other order."""
    assert sorted(stored) == sorted(map(our_name, arrays))
    for name, array in arrays.items():
        turns = any(part in name for part in ("q_proj", "k_proj", "q_norm", "k_norm"))
        if array.ndim == 1:  # vectors are F32
            array = (array.astype(np.uint32) << 16).view(np.float32) if array.dtype == np.uint16 \
                else array.astype(np.float32)
        np.testing.assert_array_equal(stored[our_name(name)][1], turned(array) if turns else array,
                                      err_msg=name)


BIASES = {"attention_bias": True, "mlp_bias": True}


@pytest.mark.parametrize("n_shard", [1, 3])
@pytest.mark.parametrize("kind, changes, has, due", [
    ("llama", {}, {}, {}),
    ("llama", BIASES, {"qkv": True, "out": True, "ff": True},
     {"attention_bias": True, "attention_out_bias": True, "ffn_bias": True}),
    ("mistral", BIASES, {}, {}),  # which reads neither field
    ("qwen2", {"tie_word_embeddings": True}, {"qkv": True, "tied": True},
     {"attention_bias": True, "tie_output": True}),
    ("qwen3", {}, {}, {"query_key_norm": True}),
    ("qwen3", {"attention_bias": True}, {"qkv": True, "out": True},
     {"attention_bias": True, "attention_out_bias": True, "query_key_norm": True})])
def test_kinds_and_shards(kind, changes, has, due, n_shard, folder, tmp_path):
    arrays = hw.weights(kind, **has)
    config, stored, out = made(tmp_path, hw.tiny(folder, kind, changes, arrays, n_shard))
    compare(stored, arrays)
    assert config == {
        "model_type": "memory_llama", "vocab_size": hw.VOCAB, "d_model": hw.D, "n_layer": hw.LAYERS,
        "n_head": hw.HEADS, "n_kv_head": hw.KV, "d_head": hw.HEAD, "d_ff": hw.FF, "max_position": 32,
        "rope_theta": 500.0, "norm_eps": 1e-5, "tie_output": False, "dtype": "f32", "bos_token_id": 1,
        "eos_token_id": 2, **due}
    assert out.startswith("%s: %s, layers 2 of 8, heads 2 of 6" % (tmp_path / "model", kind))
    assert "token ids in and out" in out


@pytest.mark.parametrize("dtype, due", [("bf16", "bf16"), (np.float16, "f16"), (np.float64, "f32")])
def test_files_keep_their_type(dtype, due, folder, tmp_path):
    arrays = hw.weights(dtype=dtype)
    config, stored, _ = made(tmp_path, hw.tiny(folder, arrays=arrays))
    assert config["dtype"] == due
    assert {kind for kind, _ in stored.values()} == {"F32"} | ({"BF16", "F16"} & {due.upper()})
    compare(stored, arrays if due != "f32" else {n: a.astype("<f4") for n, a in arrays.items()})
    config, stored, _ = made(tmp_path, folder, "--dtype", "int8", "--force")
    assert config["dtype"] == "int8" and stored["layers.0.attention.query.weight"][0] == "I8"


def test_matrices_of_several_types_are_written_as_what_holds_all(folder, tmp_path):
    arrays = {**hw.weights(dtype="bf16"), "lm_head.weight": hw.weights()["lm_head.weight"]}
    config, stored, _ = made(tmp_path, hw.tiny(folder, arrays=arrays))
    assert config["dtype"] == "f32" and {kind for kind, _ in stored.values()} == {"F32"}
    np.testing.assert_array_equal(stored["output.weight"][1], arrays["lm_head.weight"])
    arrays = {**hw.weights(dtype="bf16"), "model.norm.weight": hw.weights()["model.norm.weight"]}
    assert made(tmp_path, hw.tiny(folder, arrays=arrays))[0]["dtype"] == "bf16"  # vectors do not count


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 16}


@pytest.mark.parametrize("changes, theta, due", [
    ({"rope_theta": ...}, 10000.0, None),
    ({"rope_theta": ..., "rope_parameters": {"rope_theta": 77, "rope_type": "default"}}, 77.0, None),
    ({"rope_theta": ..., "rope_parameters": {"rope_type": "linear", "factor": 4}}, 10000.0,
     {"rope_type": "linear", "factor": 4.0}),
    ({"rope_scaling": {"type": "linear", "factor": 2.5}}, 500.0, {"rope_type": "linear", "factor": 2.5}),
    ({"rope_scaling": {"rope_type": "llama3", **LLAMA3}}, 500.0, {"rope_type": "llama3", **LLAMA3}),
    ({"rope_scaling": {"rope_type": "llama3", **LLAMA3, "original_max_position_embeddings": None}}, 500.0,
     {"rope_type": "llama3", **LLAMA3, "original_max_position_embeddings": 32}),
    ({"rope_scaling": {"rope_type": "default"}, "partial_rotary_factor": 1.0}, 500.0, None)])
def test_rotary_positions_in_new_and_old_form(changes, theta, due, folder, tmp_path):
    config = made(tmp_path, hw.tiny(folder, changes=changes))[0]
    assert (config["rope_theta"], config.get("rope_scaling")) == (theta, due)


@pytest.mark.parametrize("kind, changes", [
    ("mistral", {"sliding_window": 32}), ("llama", {"sliding_window": 4}),
    ("qwen2", {"use_sliding_window": True, "max_window_layers": 2}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": None}),
    ("qwen3", {"use_sliding_window": True, "layer_types": ["full_attention"] * 2}),
    ("qwen3", {"use_sliding_window": True, "layer_types": ["sliding_attention"] * 2,
               "sliding_window": 32})])
def test_windows_that_hide_nothing(kind, changes, folder, tmp_path):
    made(tmp_path, hw.tiny(folder, kind, changes))


@pytest.mark.parametrize("kind, gone, due", [
    ("llama", ["num_key_value_heads", "head_dim", "rms_norm_eps", "max_position_embeddings", "architectures",
               "hidden_act", "tie_word_embeddings", "bos_token_id", "eos_token_id"],
     {"n_kv_head": 2, "d_head": 4, "norm_eps": 1e-6, "max_position": 2048, "bos_token_id": 1,
      "eos_token_id": 2}),
    ("qwen2", ["bos_token_id", "eos_token_id", "max_position_embeddings"], {"max_position": 32768})])
def test_fields_that_are_absent_have_the_packages_defaults(kind, gone, due, folder, tmp_path, monkeypatch):
    if "head_dim" in gone:
        monkeypatch.setattr(hw, "HEAD", 4)
        monkeypatch.setattr(hw, "KV", 2)
    config = made(tmp_path, hw.tiny(folder, kind, dict.fromkeys(gone, ...)))[0]
    assert {key: config[key] for key in due} == due
    assert kind == "llama" or not {"bos_token_id", "eos_token_id"} & set(config)


def test_what_old_versions_stored_beside_is_left_out(folder, tmp_path):
    arrays = hw.weights()
    beside = {"model.layers.%d.self_attn.rotary_emb.inv_freq" % i: np.ones(3, np.float32) for i in range(2)}
    compare(made(tmp_path, hw.tiny(folder, arrays={**arrays, **beside}))[1], arrays)


def test_a_tied_matrix_may_stand_there_twice(folder, tmp_path):
    arrays = hw.weights(tied=True)
    twice = {**arrays, "lm_head.weight": arrays["model.embed_tokens.weight"]}
    config, stored, _ = made(tmp_path, hw.tiny(folder, changes={"tie_word_embeddings": True}, arrays=twice))
    assert config["tie_output"] is True
    compare(stored, arrays)


# ---- ids, sampling, text ------------------------------------------------------------------------


@pytest.mark.parametrize("changes, generation, due", [
    ({}, None, (1, 2, None)),
    ({"bos_token_id": None, "eos_token_id": None, "pad_token_id": -1}, None, (None, None, None)),
    ({"eos_token_id": [5, 6, 5]}, {"bos_token_id": 3}, (3, [5, 6], None)),
    ({"eos_token_id": [5, 6]}, {"eos_token_id": 7, "pad_token_id": 0}, (1, 7, 0)),
    ({"eos_token_id": 5}, {"eos_token_id": [7, 8]}, (1, [7, 8], None)),
    ({"eos_token_id": list(range(16))}, None, (1, list(range(16)), None)),
    ({"eos_token_id": [20, 4], "bos_token_id": 151643}, None, (None, 4, None))])
def test_ids_that_begin_and_end_a_text(changes, generation, due, folder, tmp_path):
    config, _, out = made(tmp_path, hw.tiny(folder, changes=changes, generation=generation))
    assert tuple(config.get(key + "_token_id") for key in ("bos", "eos", "pad")) == due
    assert "add_bos" not in config  # no tokenizer says so
    assert ("151643 of config.json is beyond the vocabulary" in out) == ("151643" in str(changes))


@pytest.mark.parametrize("generation, due", [
    ({}, None),
    ({"do_sample": True, "temperature": 0.6, "top_p": 0.9}, {"temperature": 0.6, "top_p": 0.9}),
    ({"temperature": 0.7, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.05, "max_length": 20},
     {"temperature": 0.7, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.05}),
    ({"top_k": 0, "top_p": 1.0}, {"top_p": 1.0}), ({"top_k": 50}, None),
    ({"top_k": hw.VOCAB}, None), ({"top_k": hw.VOCAB - 1}, {"top_k": hw.VOCAB - 1}),
    ({"temperature": 2, "min_p": 0, "repetition_penalty": 10}, {"temperature": 2, "min_p": 0, "repetition_penalty": 10}),
    ({"do_sample": False, "temperature": 0.6, "repetition_penalty": 1.1},
     {"temperature": 0.0, "repetition_penalty": 1.1})])
def test_sampling_by_default(generation, due, folder, tmp_path):
    config, _, out = made(tmp_path, hw.tiny(folder, generation=generation))
    path = tmp_path / "model" / "generation_config.json"
    assert (json.loads(path.read_text()) if path.exists() else None) == due and "sampling" not in config
    assert ("drawn by default" in out) == bool(due)


def test_what_of_sampling_is_not_served_is_said(folder, tmp_path):
    out = made(tmp_path, hw.tiny(folder, generation={"num_beams": 4, "typical_p": 1.0,
                                                     "suppress_tokens": []}))[2]
    assert "num_beams is not served" in out and "typical_p" not in out and "suppress" not in out
    for penalty in (0.0, 0.5):
        out = made(tmp_path, hw.tiny(folder, generation={"diversity_penalty": penalty}))[2]
        assert ("diversity_penalty is not served" in out) == (penalty > 0)


def test_text_by_sentencepiece_beside_the_weights(folder, tmp_path):
    hw.tiny(folder, changes={"bos_token_id": 1, "eos_token_id": None})
    (folder / "tokenizer.model").write_bytes(spm(n=hw.VOCAB))
    for settings, adds in ((None, True), ({"add_bos_token": None}, True), ({"add_bos_token": False}, None),
                           ({"add_bos_token": True}, True)):
        if settings is not None:
            (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        config, _, out = made(tmp_path, folder)
        assert [config.get(key) for key in ("bos_token_id", "eos_token_id", "unk_token_id", "add_bos")] \
            == [1, 2, 0, adds]
        assert "text by SentencePiece" in out
        assert (tmp_path / "model" / "tokenizer.model").read_bytes() == spm(n=hw.VOCAB)
    (folder / "tokenizer.json").write_text("{}")  # a translation of it, which is not looked at
    assert "text by SentencePiece" in made(tmp_path, folder)[2]


BPE = ROOT / "tests" / "golden" / "byte-bpe"


@pytest.mark.parametrize("case, n_token, settings, due", [
    ("llama3", 1305, None, [1299, 2, True]), ("llama3", 1305, {"add_bos_token": False}, [1299, 2, None]),
    ("qwen2", 1607, None, [1, 2, None]), ("qwen2", 1607, {"add_bos_token": True}, [1, 2, True])])
def test_text_by_byte_level_bpe_beside_the_weights(case, n_token, settings, due, folder, tmp_path,
                                                   monkeypatch):
    data = (BPE / case / "tokenizer.json").read_bytes()
    for n_vocab in (n_token, n_token + 16):  # a matrix may be padded
        monkeypatch.setattr(hw, "VOCAB", n_vocab)
        hw.tiny(folder, changes={"vocab_size": n_vocab})
        (folder / "tokenizer.json").write_bytes(data)
        (folder / "vocab.json").write_text("{}")
        if settings is not None:
            (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        config, _, out = made(tmp_path, folder)
        assert [config.get(key) for key in ("bos_token_id", "eos_token_id", "add_bos")] == due
        assert "text by byte-level BPE" in out
        assert (tmp_path / "model" / "tokenizer.json").read_bytes() == data
        assert not (tmp_path / "model" / "vocab.json").exists()


@pytest.mark.parametrize("kind, settings", [
    ("llama", None), ("llama", {"add_prefix_space": False}), ("qwen2", {"tokenizer_class": "GPT2TokenizerFast"})])
def test_text_by_gpt2s_vocabulary_and_merges(kind, settings, folder, tmp_path):
    hw.tiny(folder, kind, {})
    for name, data in (("vocab.json", json.dumps({chr(33 + i): i for i in range(hw.VOCAB)})),
                       ("merges.txt", "#version: 0.2\n"), ("added_tokens.json", '{"<|endoftext|>": 2}'),
                       ("tokenizer_config.json", json.dumps(settings))):
        if data != "null":
            (folder / name).write_text(data)
    assert "text by byte-level BPE" in made(tmp_path, folder)[2]
    assert (tmp_path / "model" / "merges.txt").is_file()


def test_set_gives_ids_that_are_not_there(folder, tmp_path):
    hw.tiny(folder, "qwen2", {"bos_token_id": None, "eos_token_id": None})
    config = made(tmp_path, folder, "--set", "bos_token_id=4", "--set", "eos_token_id=5")[0]
    assert (config["bos_token_id"], config["eos_token_id"]) == (4, 5)
    config = made(tmp_path, folder, "--set", "bos_token_id=0", "--set", "eos_token_id=%d" % (hw.VOCAB - 1))[0]
    assert (config["bos_token_id"], config["eos_token_id"]) == (0, hw.VOCAB - 1)
    assert made(tmp_path, hw.tiny(folder), "--set", "eos_token_id=2")[0]["eos_token_id"] == 2  # as it is there


def test_the_family_is_found_and_runs_repeat(folder, tmp_path):
    hw.tiny(folder, n_shard=2)
    outputs = [tmp_path / name for name in "ab"]
    for output, family in zip(outputs, ("auto", "hf")):
        got = convert(folder, "--output", output, "--from", family)
        assert (got.status, got.err) == (0, "")
    for name in ("config.json", "model.safetensors"):
        assert (outputs[0] / name).read_bytes() == (outputs[1] / name).read_bytes()


def test_neither_the_source_nor_another_model_is_replaced(tmp_path):
    """Their files have the names that a conversion writes."""
    source, other = tmp_path / "source", tmp_path / "other"
    for folder in (source, other):
        folder.mkdir()
        hw.tiny(folder)
    before = {path: path.read_bytes() for path in tmp_path.glob("*/*")}
    for output, words in ((source, "holds the source"), (tmp_path, "holds the source"),
                          (other, "no earlier conversion (config.json)")):
        got = convert(source, "--output", output, "--dtype", "int8", "--force")
        assert got.status == 1 and words in got.err, got.err
    assert {path: path.read_bytes() for path in tmp_path.glob("*/*")} == before and len(before) >= 4
