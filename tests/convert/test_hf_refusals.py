"""What convert.py refuses of Hugging Face directories, by the name of the field, file or tensor: models and
options that are not served, damaged files, files that contradict each other.

Rerun one: /usr/bin/python3 -m pytest tests/convert/test_hf_refusals.py -k sliding_window
"""

import json
import struct

import hf_writer as hw
import numpy as np
import pytest
from convert_harness import convert
from test_memory_layers import spm

ROPE = {"rope_theta": 500.0, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 16}


def rope(**changes):
    return {"rope_theta": ..., "rope_parameters": {**ROPE, **changes}}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "source").mkdir()
    return tmp_path / "source"


# Kind, changes of config.json, the field that is named, and words of the reason.
FIELDS = [
    ("llama", {"model_type": "gpt2"}, "model_type", "llama mistral qwen2 qwen3", "'gpt2'"),
    ("llama", {"model_type": ...}, "model_type", "None"),
    ("llama", {"model_type": ["llama"]}, "model_type", "['llama']"),
    ("llama", {"architectures": ["LlamaForSequenceClassification"]}, "architectures", "LlamaForCausalLM"),
    ("llama", {"architectures": "LlamaForCausalLM"}, "architectures", "LlamaForCausalLM"),
    ("llama", {"hidden_size": 0}, "hidden_size", "1..65536", "got 0"),
    ("llama", {"hidden_size": 8.0}, "hidden_size", "8.0"),
    ("llama", {"hidden_size": 10}, "model.embed_tokens.weight", "[20, 10]", "[20, 8]"),
    ("llama", {"num_hidden_layers": 1025}, "num_hidden_layers", "1..1024"),
    ("llama", {"num_hidden_layers": 1}, "model.layers.1.", "config.json"),
    ("llama", {"num_hidden_layers": 3}, "model.layers.2.", "is missing"),
    ("llama", {"intermediate_size": None}, "intermediate_size", "None"),
    ("llama", {"vocab_size": 2**24 + 1}, "vocab_size", "16777217"),
    ("llama", {"vocab_size": 21}, "model.embed_tokens.weight", "[21, 8]"),
    ("llama", {"max_position_embeddings": 2**20 + 1}, "max_position_embeddings", "1..1048576"),
    ("llama", {"rms_norm_eps": 0}, "rms_norm_eps", "a number 1e-30..1"),
    ("llama", {"rms_norm_eps": 9.9e-31}, "rms_norm_eps", "9.9e-31"),
    ("llama", {"hidden_act": "gelu"}, "hidden_act", "silu", "'gelu'"),
    ("llama", {"num_attention_heads": 3, "num_key_value_heads": 2}, "num_key_value_heads", "3 heads"),
    ("llama", {"num_key_value_heads": 4}, "num_key_value_heads", "1..2"),
    ("llama", {"head_dim": 5}, "head_dim", "even"),
    ("llama", {"head_dim": None, "num_attention_heads": 3, "num_key_value_heads": 3}, "num_attention_heads",
     "hidden_size 8", "3 heads"),
    ("llama", {"head_dim": 65536}, "head_dim", "2 heads of 65536", "65536"),
    ("llama", {"attention_bias": True}, "model.layers.0.self_attn.q_proj.bias", "missing", "[12]"),
    ("llama", {"attention_bias": 1}, "attention_bias", "true or false"),
    ("llama", {"tie_word_embeddings": "yes"}, "tie_word_embeddings", "'yes'"),
    ("llama", {"tie_word_embeddings": True}, "lm_head.weight", "row 0", "tie_word_embeddings"),
    ("llama", {"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantization_config", "'gptq'"),
    ("llama", {"rope_theta": 0.5}, "rope_theta", "1..1e+12"),
    ("llama", {"rope_theta": 400.0, "rope_parameters": ROPE}, "rope_theta", "400.0", "500.0"),
    ("llama", {"rope_scaling": {"rope_type": "default"}, "rope_parameters": ROPE}, "rope_scaling",
     "rope_parameters"),
    ("llama", {"rope_scaling": [1]}, "rope_scaling", "[1]"),
    ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling.type", "'dynamic'", "llama3"),
    ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling.rope_type", "'yarn'"),
    ("llama", {"rope_scaling": {"rope_type": []}}, "rope_scaling.rope_type", "[]"),
    ("llama", {"rope_scaling": {"type": "linear"}}, "rope_scaling.factor", "None"),
    ("llama", {"rope_scaling": {"type": "linear", "factor": 0.5}}, "rope_scaling.factor", "1..1e+06"),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor", "0.5"),
    ("llama", rope(partial_rotary_factor=0.25), "rope_parameters.partial_rotary_factor", "0.25"),
    ("llama", rope(factor="8"), "rope_parameters.factor", "'8'"),
    ("llama", rope(high_freq_factor=1.0), "high_freq_factor", "not above low_freq_factor 1"),
    ("llama", rope(low_freq_factor=None), "low_freq_factor", "None"),
    ("llama", rope(original_max_position_embeddings=0), "original_max_position_embeddings", "1..1048576"),
    ("llama", {"original_max_position_embeddings": 8, **rope()}, "original_max_position_embeddings", "8", "16"),
    ("llama", {"bos_token_id": "x"}, "bos_token_id", "'x'"),
    ("llama", {"bos_token_id": [1]}, "bos_token_id", "[1]"),
    ("llama", {"eos_token_id": [1, None]}, "eos_token_id", "a list of ids"),
    ("llama", {"eos_token_id": -2}, "eos_token_id", "-2"),
    ("llama", {"eos_token_id": list(range(17))}, "eos_token_id", "17 ids", "16"),
    ("mistral", {"sliding_window": 4}, "sliding_window", "4", "max_position_embeddings 32"),
    ("mistral", {"sliding_window": ..., "max_position_embeddings": 8192}, "sliding_window", "4096"),
    ("mistral", {"sliding_window": "4"}, "sliding_window", "'4'"),
    ("qwen2", {"use_sliding_window": True}, "sliding_window", "16", "32"),
    ("qwen2", {"use_sliding_window": 1}, "use_sliding_window", "true or false"),
    ("qwen2", {"use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention"]},
     "sliding_window", "16"),
    ("qwen3", {"layer_types": ["full_attention"]}, "layer_types", "2 names"),
    ("qwen3", {"layer_types": ["full_attention", "linear_attention"]}, "layer_types", "'linear_attention'"),
    ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types", "use_sliding_window"),
    ("qwen3", {"head_dim": ...}, "q_proj.weight", "[256, 8]", "[12, 8]"),
]


@pytest.mark.parametrize("case", FIELDS, ids=lambda case: "%s-%s-%s" % (case[0], case[2], case[-1][:12]))
def test_fields(case, folder, refused):
    kind, changes, *words = case
    refused(hw.tiny(folder, kind, changes), *words)


@pytest.mark.parametrize("generation, words", [
    ({"temperature": -1}, ["temperature", "0 <= number <= 2", "-1"]),
    ({"temperature": "1"}, ["temperature", "'1'"]), ({"top_p": 0}, ["top_p", "0 < number <= 1", "got 0"]),
    ({"top_p": 1.5}, ["top_p", "1.5"]), ({"top_k": -2}, ["top_k", "-1.."]), ({"top_k": 1.5}, ["top_k"]),
    ({"temperature": 2.1}, ["temperature", "2.1"]), ({"repetition_penalty": 10.1}, ["repetition_penalty", "10.1"]),
    ({"eos_token_id": list(range(17))}, ["eos_token_id", "17 ids", "16"]),
    ({"min_p": 1}, ["min_p", "0 <= number < 1"]), ({"repetition_penalty": 0}, ["repetition_penalty"]),
    ({"min_p": 0.99999999}, ["min_p", "in fp32"]), ({"top_p": 1e-46}, ["top_p", "in fp32"]),
    ({"do_sample": 1}, ["do_sample", "true or false"]), ({"eos_token_id": "a"}, ["eos_token_id", "'a'"])])
def test_generation_config(generation, words, folder, refused):
    refused(hw.tiny(folder, generation=generation), "generation_config.json", *words)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json"])
@pytest.mark.parametrize("data, words", [
    (b"", ["not JSON"]), (b"[]", ["an object expected", "[]"]), (b'{"a": NaN}', ["NaN"]),
    (b'{"a": 1, "a": 1}', ["twice"]), (b'{"a": %s}' % (b"9" * 100000), ["100000 digits"]),
    (b"[" * 200000, ["not JSON"]), (b'"\xff"', ["not JSON"]), (b" " * (17 << 20), ["limit"])],
    ids=lambda value: repr(value[:16]) if isinstance(value, bytes) else "")
def test_damaged_configurations(name, data, words, folder, refused):
    hw.tiny(folder)
    (folder / "tokenizer.model").write_bytes(spm(n=hw.VOCAB))
    (folder / name).write_bytes(data)
    refused(folder, name, *words)


# ---- weights ------------------------------------------------------------------------------------


def entry(name="lm_head.weight", **changes):
    """The header of a file, one entry of which is changed."""
    data = hw.safetensors(hw.weights())
    header = json.loads(data[8:8 + int.from_bytes(data[:8], "little")])
    header[name] = {**header[name], **changes}
    return json.dumps(header).encode()


@pytest.mark.parametrize("header, words", [
    (b"", ["not JSON"]), (b"[]", ["no object"]), (b"{}", ["take 0 bytes"]), (b'{"a": 1, "a": 1}', ["twice"]),
    (b'{"a": 1}', ["'a'", "shape", "None"]), (b"[" * 100000, ["not JSON"]),
    (b'{"__metadata__": {"a": 1}}', ["__metadata__ is no object of texts"]),
    (b'{"a": {"dtype": "F32", "dtype": "F32"}}', ["twice"]),
    (entry(dtype="F31"), ["lm_head.weight", "'F31'"]), (entry(dtype=3), ["lm_head.weight", "3 is no type"]),
    (entry(dtype=["F32"]), ["lm_head.weight", "['F32'] is no type"]),
    (entry(dtype="F16"), ["lm_head.weight", "320 bytes"]), (entry(shape=[20, 9]), ["lm_head.weight", "720"]),
    (entry(shape=[20, -8]), ["lm_head.weight", "counts"]), (entry(shape=160), ["shape", "160"]),
    (entry(shape=[20, True]), ["shape"]), (entry(shape=[1] * 9), ["shape", "at most 8 counts"]),
    *((entry(shape=["#"] * n_dim).replace(b'"#"', b"9" * n), ["lm_head.weight", "shape", "counts below 2^63"])
      for n in (19, 2000, 5000) for n_dim in (1, 8)),  # Python neither reads nor shows more than 4300 digits
    (entry(data_offsets=["#", 0]).replace(b'"#"', b"9" * 5000), ["lm_head.weight", "data_offsets", "below 2^63"]),
    (entry(shape=[8, 20]), ["lm_head.weight", "[20, 8]", "[8, 20]"]),
    (entry(shape=[160]), ["lm_head.weight", "[160]"]),
    (entry(data_offsets=[0, 640]), ["begins at byte 0", "ends at 640"]),
    (entry(data_offsets=[640, 0]), ["data_offsets"]), (entry(data_offsets=[0]), ["data_offsets"]),
    (entry(data_offsets=[10**9, 10**9 + 640]), ["begins at byte"]),
    (entry(data_offsets=[10**18, 10**18 + 640]), ["begins at byte", "ends at"]),
    ], ids=lambda value: repr(value[-24:]) if isinstance(value, bytes) else "")
def test_headers_that_lie(header, words, folder, refused):
    hw.tiny(folder)
    (folder / "model.safetensors").write_bytes(hw.safetensors(hw.weights(), header))
    refused(folder, *words)


def test_files_cut_anywhere(folder, refused):
    hw.tiny(folder)
    data = (folder / "model.safetensors").read_bytes()
    for n in (0, 7, 8, 100, 2000, len(data) // 2, len(data) - 1):
        (folder / "model.safetensors").write_bytes(data[:n])
        refused(folder, "model.safetensors")
    (folder / "model.safetensors").write_bytes(data + b"\0")
    refused(folder, "model.safetensors", "bytes")
    for n in (2**64 - 1, 2**63, len(data), 101 << 20):
        (folder / "model.safetensors").write_bytes(struct.pack("<Q", n) + data[8:])
        refused(folder, "model.safetensors", "header of %d bytes" % n)


@pytest.mark.parametrize("change, words", [
    (lambda a: a.pop("model.norm.weight"), ["model.norm.weight", "missing", "[8]"]),
    (lambda a: a.update({"model.layers.0.mlp.gate_proj.bias": np.ones(12, np.float32)}),
     ["model.layers.0.mlp.gate_proj.bias", "config.json"]),
    (lambda a: a.update({"model.layers.0.self_attn.q_norm.weight": np.ones(6, np.float32)}), ["q_norm"]),
    (lambda a: a["lm_head.weight"].__setitem__((3, 1), np.nan), ["output.weight", "nan"]),
    (lambda a: a.update({"lm_head.weight": np.zeros((20, 8), "i1")}), ["lm_head.weight", "I8", "BF16"]),
    (lambda a: a.update({"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}),
     ["inv_freq", "[3]", "[4]"])])
def test_tensors_that_do_not_fit(change, words, folder, refused):
    arrays = hw.weights()
    change(arrays)
    refused(hw.tiny(folder, arrays=arrays), *words)


@pytest.mark.parametrize("chunk, row", [(1 << 20, 17), (5 * hw.D, 17), (5 * hw.D, 0)])
def test_a_tied_matrix_that_differs(chunk, row, folder, refused, monkeypatch):
    monkeypatch.setattr("hf.CHUNK", chunk)
    arrays = hw.weights(tied=True)
    arrays["lm_head.weight"] = arrays["model.embed_tokens.weight"].copy()
    arrays["lm_head.weight"][row, 2] += 1
    refused(hw.tiny(folder, changes={"tie_word_embeddings": True}, arrays=arrays), "lm_head.weight",
            "model.embed_tokens.weight", "row %d," % row)


@pytest.mark.parametrize("change, words", [
    (lambda m: m.clear(), ["weight_map"]), (lambda m: m.update(x="/etc/passwd"), ["'x'", "/etc/passwd"]),
    (lambda m: m.update(x="../a.safetensors"), ["'x'", "../a.safetensors"]), (lambda m: m.update(x=3), ["3"]),
    (lambda m: m.update(x="gone.safetensors"), ["gone.safetensors", "missing"]),
    (lambda m: m.update(x="a\0.safetensors"), ["'x'"]),
    (lambda m: m.update(x="model-00001-of-00002.safetensors"), ["'x'", "missing", "00001"]),
    (lambda m: m.pop("lm_head.weight"), ["lm_head.weight", "not what"]),
    (lambda m: m.update({"lm_head.weight": "model-00001-of-00002.safetensors",
                         "model.norm.weight": "model-00001-of-00002.safetensors"}), ["00001"])])
def test_an_index_that_contradicts_the_files(change, words, folder, refused):
    hw.tiny(folder, n_shard=2)
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))
    refused(folder, *words)


def test_sources_that_are_none(folder, tmp_path, refused):
    hw.tiny(folder)
    data = (folder / "model.safetensors").read_bytes()
    refused(folder / "config.json", "a file", "directories", args=("--from", "hf"))
    refused(folder, "a directory", "xlm", args=("--from", "xlm"))
    refused(folder, "consolidated.pth", args=("--from", "memory-layers"))
    (folder / "model.safetensors.index.json").write_text("{}")
    refused(folder, "both are there")
    (folder / "model.safetensors").unlink()
    refused(folder, "weight_map")
    (folder / "model.safetensors.index.json").unlink()
    (folder / "pytorch_model.bin").write_bytes(data)
    refused(folder, "model.safetensors", "save_pretrained")
    (folder / "config.json").unlink()
    refused(folder, "config.json")
    refused(folder, "without config.json", args=("--from", "hf"))


def test_text_that_does_not_fit(folder, tmp_path, refused):
    hw.tiny(folder)
    for name, n in (("words", hw.VOCAB), ("short", 19)):
        (tmp_path / name).write_bytes(spm(n=n))
    refused(folder, "--vocab", "not words", args=("--vocab", tmp_path / "words"))
    refused(folder, "--codes", "XLM models alone", args=("--codes", tmp_path / "words"))
    refused(folder, "--tokenizer", "19 pieces", "20 words", args=("--tokenizer", tmp_path / "short"))
    refused(folder, "--values q4: the model has no memory", args=("--values", "q4"))
    refused(folder, "--set n_heads", "hf", args=("--set", "n_heads=2"))
    refused(folder, "bos_token_id=3", "says 1", args=("--set", "bos_token_id=3"))
    for value in ("20", "-1", "true", "1.0", "x"):
        got = convert(folder, "--output", tmp_path / "o", "--set", "eos_token_id=" + value)
        assert got.status == 1 and "0..19" in got.err, got.err
    (folder / "tokenizer.model").write_bytes(spm(n=19))
    refused(folder, "tokenizer.model", "19 pieces", "20 words")
    (folder / "tokenizer.model").write_bytes(b"IQ== 0\nIg== 1\n")
    for name, data, words in (("tokenizer.model", b"IQ== 0\n" * 21, ["21 tokens", "20 words"]),
                              ("tokenizer.json", b'{"a": ', ["tokenizer.json", "not JSON"]),
                              ("tokenizer.json", b'{"model": {"type": "Unigram"}}', ["Unigram"]),
                              ("tokenizer.json", b'{"model": {"type": "BPE", "vocab": {}, "byte_fallback": true}}',
                               ["tokenizer.json", "byte_fallback", "tokenizer.model"]),
                              ("tokenizer.json", b'{"model": {"type": "BPE", "vocab": {}}, "pre_tokenizer":'
                               b' {"type": "Sequence", "pretokenizers": [{"type": "Metaspace"}]}}', ["Metaspace"])):
        (folder / "tokenizer.model").unlink(missing_ok=True)
        (folder / name).write_bytes(data)
        refused(folder, *words)
    (folder / "tokenizer.model").write_bytes(spm(n=hw.VOCAB))
    (folder / "tokenizer_config.json").write_text('{"add_bos_token": 1}')
    refused(folder, "tokenizer_config.json", "add_bos_token", "got 1")


@pytest.mark.parametrize("kind, beside, words", [
    ("qwen2", {}, ["vocab.json", "qwen2", "Qwen2Tokenizer", "tokenizer.json is needed"]),
    ("qwen3", {"tokenizer_config.json": {"add_bos_token": False}}, ["qwen3", "Qwen2Tokenizer"]),
    ("llama", {"tokenizer_config.json": {"tokenizer_class": "Qwen2TokenizerFast"}},
     ["tokenizer_config.json: tokenizer_class", "GPT2Tokenizer expected", "'Qwen2TokenizerFast'"]),
    ("llama", {"tokenizer_config.json": {"add_prefix_space": True}}, ["add_prefix_space: true"]),
    ("llama", {"added_tokens.json": {"<|endoftext|>": 2, "<|im_end|>": 3, "<think>": 4}},
     ["added_tokens.json", "'<think>' and 1 others", "tokenizer.json"])])
def test_another_tokenizers_vocabulary_and_merges(kind, beside, words, folder, refused):
    """These two files are GPT-2's, unless something says that they are cut or completed otherwise."""
    hw.tiny(folder, kind, {})
    (folder / "vocab.json").write_text(json.dumps({chr(33 + i): i for i in range(20)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    for name, content in beside.items():
        (folder / name).write_text(json.dumps(content))
    refused(folder, *words)
    refused(folder, *words, args=("--tokenizer", folder / "vocab.json"))
