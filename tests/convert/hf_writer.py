"""Small directories in Hugging Face form with random weights: config.json, safetensors in any number of
files, and damage of either.

tiny() writes one. Names and shapes are those of the format's description, written down a second time, so
that the converter is not compared with itself.
"""

import json
import struct

import numpy as np

D, HEADS, KV, HEAD, FF, VOCAB, LAYERS = 8, 2, 1, 6, 12, 20, 2
KINDS = {np.dtype("<f4"): "F32", np.dtype("<f2"): "F16", np.dtype("<u2"): "BF16", np.dtype("<f8"): "F64",
         np.dtype("i1"): "I8"}
BASE = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCAB,
        "hidden_size": D, "intermediate_size": FF, "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS, "num_key_value_heads": KV, "head_dim": HEAD, "hidden_act": "silu",
        "max_position_embeddings": 32, "rms_norm_eps": 1e-5, "rope_theta": 500.0, "rope_scaling": None,
        "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.02,
        "torch_dtype": "float32", "use_cache": True, "transformers_version": "4.50.0"}
KIND = {"llama": {}, "mistral": {"sliding_window": None},
        "qwen2": {"sliding_window": 16, "use_sliding_window": False, "max_window_layers": 1},
        "qwen3": {"layer_types": ["full_attention"] * LAYERS}}


def config(kind="llama", changes=()):
    """A value of ... removes the field."""
    whole = {**BASE, "model_type": kind, "architectures": [kind.capitalize() + "ForCausalLM"],
             **KIND[kind], **dict(changes)}
    return {name: value for name, value in whole.items() if value is not ...}


def weights(kind="llama", qkv=False, out=False, ff=False, tied=False, dtype=np.float32):
    """name -> array"""
    shapes = {"model.embed_tokens.weight": (VOCAB, D), "model.norm.weight": (D,)}
    if not tied:
        shapes["lm_head.weight"] = (VOCAB, D)
    for i in range(LAYERS):
        layer = "model.layers.%d." % i
        shapes[layer + "input_layernorm.weight"] = shapes[layer + "post_attention_layernorm.weight"] = (D,)
        if kind == "qwen3":
            shapes[layer + "self_attn.q_norm.weight"] = shapes[layer + "self_attn.k_norm.weight"] = (HEAD,)
        for name, rows, cols, bias in (
                ("self_attn.q_proj", HEADS * HEAD, D, qkv), ("self_attn.k_proj", KV * HEAD, D, qkv),
                ("self_attn.v_proj", KV * HEAD, D, qkv), ("self_attn.o_proj", D, HEADS * HEAD, out),
                ("mlp.gate_proj", FF, D, ff), ("mlp.up_proj", FF, D, ff), ("mlp.down_proj", D, FF, ff)):
            shapes[layer + name + ".weight"] = (rows, cols)
            if bias:
                shapes[layer + name + ".bias"] = (rows,)
    rng = np.random.default_rng(4)
    arrays = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    if dtype == "bf16":
        return {name: (a.view(np.uint32) >> 16).astype(np.uint16) for name, a in arrays.items()}
    return {name: a.astype(dtype) for name, a in arrays.items()}


def safetensors(arrays, header=None):
    """The bytes of a file. header: its bytes, instead of the right ones."""
    entries, at = {"__metadata__": {"format": "pt"}}, 0
    for name, array in arrays.items():
        entries[name] = {"dtype": KINDS[array.dtype], "shape": list(array.shape),
                         "data_offsets": [at, at + array.nbytes]}
        at += array.nbytes
    text = json.dumps(entries).encode() if header is None else header
    return struct.pack("<Q", len(text)) + text + b"".join(a.tobytes() for a in arrays.values())


def tiny(folder, kind="llama", changes=(), arrays=None, n_shard=1, generation=None):
    """The folder."""
    arrays = weights(kind, qkv=kind == "qwen2") if arrays is None else arrays
    (folder / "config.json").write_text(json.dumps(config(kind, changes)))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    if n_shard == 1:
        (folder / "model.safetensors").write_bytes(safetensors(arrays))
        return folder
    index, names = {}, list(arrays)
    for i in range(n_shard):
        file = "model-%05d-of-%05d.safetensors" % (i + 1, n_shard)
        part = {name: arrays[name] for name in names[i::n_shard]}
        (folder / file).write_bytes(safetensors(part))
        index.update(dict.fromkeys(part, file))
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": 1}, "weight_map": index}))
    return folder
