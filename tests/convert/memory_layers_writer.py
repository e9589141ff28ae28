"""Small checkpoints of the memory-layers family with random weights, of any options.

tiny() writes consolidated.pth and params.json into a folder. The shapes are those of the format's
description, written down a second time, so that the converter is not compared with itself.
"""

import json

import numpy as np
import torch_writer as tw

PK = "model.productkey_args."
MEMORY = "layers.%d.feed_forward."


def params(changes=()):
    """A configuration by names with dots; a value of ... removes the field."""
    flat = {
        "name": "tiny", "seed": 1, "data.seq_len": 16, "data.tokenizer.name": "bytes",
        "data.tokenizer.path": None, "model.dim": 8, "model.n_layers": 4, "model.head_dim": None,
        "model.n_heads": 2, "model.n_kv_heads": 1, "model.ffn_dim_multiplier": None,
        "model.multiple_of": 8, "model.norm_eps": 1e-6, "model.rope_theta": 20000,
        "model.max_seqlen": 16, "model.vocab_size": 258, "model.weight_tying": False,
        PK + "is_enabled": True, PK + "layers": "1,3", PK + "mem_n_keys": 5, PK + "mem_heads": 3,
        PK + "mem_knn": 2, PK + "mem_k_dim": 4, PK + "mem_v_dim": -1,
        PK + "mem_share_values": True, PK + "swilu_projection": True, PK + "mem_gated": False,
        PK + "peer_variant": False, "distributed.model_dtype": "fp32", **dict(changes)}
    root = {}
    for name, value in flat.items():
        *parts, key = name.split(".")
        section = root
        for part in parts:
            section = section.setdefault(part, {})
        if value is not ...:
            section[key] = value
    return root


def bf16(array):
    """fp32 as the bits of bfloat16, cut off."""
    return (np.ascontiguousarray(array, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def widened(bits):
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def weights(layers=(1, 3), v=8, swilu=True, projection=True, gated=False, peer=False, own=False,
            copies=True, n_vocab=258, table=bf16):
    """name -> array. copies: of a shared table, also under the later memories."""
    rng = np.random.default_rng(3)
    shapes = {"tok_embeddings.weight": (n_vocab, 8), "norm.weight": (8,),
              "output.weight": (n_vocab, 8)}
    for i in range(4):
        layer = "layers.%d." % i
        shapes[layer + "attention_norm.weight"] = shapes[layer + "ffn_norm.weight"] = (8,)
        shapes[layer + "attention.wq.weight"] = shapes[layer + "attention.wo.weight"] = (8, 8)
        shapes[layer + "attention.wk.weight"] = shapes[layer + "attention.wv.weight"] = (4, 8)
        if i not in layers:
            shapes[layer + "feed_forward.w1.weight"] = (24, 8)
            shapes[layer + "feed_forward.w2.weight"] = (8, 24)
            shapes[layer + "feed_forward.w3.weight"] = (24, 8)
            continue
        name = MEMORY % i
        shapes[name + "keys"] = (2 * 3 * 5, 2)
        shapes[name + "query_proj.query_mlps.0.weight"] = (3 * 4, 8)
        shapes[name + "query_proj.query_mlps.0.bias"] = (3 * 4,)
        if swilu:
            shapes[name + "swilu_projection.weight"] = (v, 8)
            shapes[name + "swilu_projection.bias"] = (v,)
        if projection:
            shapes[name + "value_proj.weight"], shapes[name + "value_proj.bias"] = (8, v), (8,)
        if gated:
            shapes[name + "gating.weight"], shapes[name + "gating.bias"] = (1, 8), (1,)
    arrays = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    for kind in ("values_u.", "values_v.") if peer else ("values.",):
        shared = rng.normal(size=(25, v)).astype(np.float32)
        for i in layers if own or copies else layers[:1]:
            array = rng.normal(size=(25, v)).astype(np.float32) if own else shared
            arrays[(MEMORY % i) + kind + "weight"] = table(array)
    return arrays


def tiny(folder, changes=(), arrays=None, root=None, **more):
    """The path of consolidated.pth. root: params.json as bytes."""
    arrays = weights() if arrays is None else arrays
    model = {name: array if isinstance(array, tw.Tensor) else tw.Tensor(array)
             for name, array in arrays.items()}
    (folder / "params.json").write_bytes(json.dumps(params(changes)).encode()
                                         if root is None else root)
    return tw.write_zip(folder / "consolidated.pth", {"model": model, **more})
