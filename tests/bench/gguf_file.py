"""A dense model directory as a GGUF file (version 3) that llama.cpp runs, for compare.py.

A model of the family memory_llama is a `llama`: the same function, whose rotary positions turn neighbouring columns too.
Of a pkm_transformer no architecture of llama.cpp computes the function: those that norm behind the sum, as XLM does, look both ways and
have no output layer. `gpt2` has the same parts in another order (learned positions, biases, GELU, tied output): the same
matrices, hence the same bytes and multiply-adds, but norms before each part and no bias behind the vocabulary. It
stands in for SPEED ALONE; its results mean nothing. llama.cpp's GELU is the tanh form, by a table."""

import json
import mmap
import struct
from pathlib import Path

ALIGN = 32
TYPES = {"F32": 0, "F16": 1, "BF16": 30}  # ggml's numbers

# Ours (%d: the layer) -> theirs. Each of theirs is ours laid end to end, in its type.
WHOLE = [(["embeddings.weight"], "token_embd.weight"),
         (["position_embeddings.weight"], "position_embd.weight"),
         (["layer_norm_emb.weight"], "output_norm.weight"),
         (["layer_norm_emb.bias"], "output_norm.bias")]
LAYER = [(["attentions.%%d.%s_lin.%s" % (part, kind) for part in "qkv"], "blk.%%d.attn_qkv.%s" % kind)
         for kind in ("weight", "bias")]
for ours, theirs in (("attentions.%d.out_lin", "attn_output"), ("ffns.%d.lin1", "ffn_up"),
                     ("ffns.%d.lin2", "ffn_down"), ("layer_norm1.%d", "attn_norm"), ("layer_norm2.%d", "ffn_norm")):
    LAYER += [(["%s.%s" % (ours, kind)], "blk.%%d.%s.%s" % (theirs, kind)) for kind in ("weight", "bias")]


class Safetensors:
    """The tensors of a file, as (type, shape, bytes)."""

    def __init__(self, path):
        with open(path, "rb") as file:
            data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        size, = struct.unpack("<Q", data[:8])
        self.header, self.data = json.loads(bytes(data[8:8 + size])), data[8 + size:]

    def __getitem__(self, name):
        entry = self.header[name]
        begin, end = entry["data_offsets"]
        return entry["dtype"], entry["shape"], self.data[begin:end]


def text(value):
    return struct.pack("<Q", len(value.encode())) + value.encode()


def typed(value):
    """(ggml's number of the type, the bytes): text, whole numbers as uint32, in lists as int32, others as float32."""
    if isinstance(value, list):
        kind = 5 if isinstance(value[0], int) else typed(value[0])[0]
        return 9, struct.pack("<IQ", kind, len(value)) + b"".join(typed(item)[1] for item in value)
    if isinstance(value, str):
        return 8, text(value)
    return (4, struct.pack("<I", value)) if isinstance(value, int) else (6, struct.pack("<f", value))


def entry(key, value):
    number, data = typed(value)
    return text(key) + struct.pack("<I", number) + data


def write(path, values, tensors):
    """values: {key: text, number or list}. tensors: [(name, type, shape, [bytes ...])], outermost dimension first."""
    head = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(values))
    head += b"".join(entry(*item) for item in values.items())
    offset = 0
    for name, kind, shape, parts in tensors:
        head += text(name) + struct.pack("<I%dQIQ" % len(shape), len(shape), *reversed(shape), TYPES[kind], offset)
        offset += sum(map(len, parts))
        offset += -offset % ALIGN
    with open(path, "wb") as file:
        file.write(head + b"\0" * (-len(head) % ALIGN))
        for _, _, _, parts in tensors:
            file.writelines(parts)
            file.write(b"\0" * (-sum(map(len, parts)) % ALIGN))


LLAMA_WHOLE = [(["embeddings.weight"], "token_embd.weight"), (["norm.weight"], "output_norm.weight")]
LLAMA_LAYER = [(["layers.%%d.%s.weight" % ours], "blk.%%d.%s.weight" % theirs) for ours, theirs in (
    ("attention_norm", "attn_norm"), ("attention.query", "attn_q"), ("attention.key", "attn_k"),
    ("attention.value", "attn_v"), ("attention.out", "attn_output"), ("ffn_norm", "ffn_norm"),
    ("ffn.gate", "ffn_gate"), ("ffn.up", "ffn_up"), ("ffn.down", "ffn_down"))]


def write_llama(path, model):
    """A model of memory_llama without memories."""
    config = json.loads((Path(model) / "config.json").read_text())
    if config.get("memories"):
        raise ValueError("%s: a model with memories has no counterpart in llama.cpp" % model)
    whole = LLAMA_WHOLE + ([] if config["tie_output"] else [(["output.weight"], "output.weight")])
    values = {"attention.head_count": config["n_head"],
              "attention.head_count_kv": config.get("n_kv_head", config["n_head"]),
              "attention.layer_norm_rms_epsilon": float(config["norm_eps"]),
              "rope.freq_base": float(config["rope_theta"]),
              "rope.dimension_count": config.get("d_head", config["d_model"] // config["n_head"])}
    write_tensors(path, model, config, whole, LLAMA_LAYER, "llama", values)


def write_dense(path, model):
    """The stand-in for a model directory without memories; of memory_llama the model itself."""
    config = json.loads((Path(model) / "config.json").read_text())
    if config["model_type"] == "memory_llama":
        write_llama(path, model)
        return
    if config.get("memories") or not config["tie_output"]:
        raise ValueError("%s: a model with memories, or with an output of its own, has no counterpart in llama.cpp; "
                         "make one with make_model --memory-layer -1" % model)
    values = {"attention.head_count": config["n_head"], "attention.layer_norm_epsilon": 1e-5}
    write_tensors(path, model, config, WHOLE, LAYER, "gpt2", values)


def vocabulary(n):
    """Words that stand for the tokens' ids: llama-server wants to print what it has drawn."""
    return {"tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>"] + ["\u2581%d" % i for i in range(3, n)],
            "tokenizer.ggml.scores": [float(-i) for i in range(n)],
            "tokenizer.ggml.token_type": [2, 3, 3] + [1] * (n - 3),  # unknown, control, control, words
            "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2}


def write_tensors(path, model, config, whole, layer, architecture, values):
    """whole, layer: which of our tensors make which of theirs."""
    ours = Safetensors(Path(model) / "model.safetensors")
    names = whole + [([name % i for name in names], theirs % i) for i in range(config["n_layer"])
                     for names, theirs in layer]
    tensors = []
    for sources, theirs in names:
        kinds, shapes, parts = zip(*(ours[name] for name in sources))
        rows = sum(shape[0] for shape in shapes)
        tensors.append((theirs, kinds[0], [rows, *shapes[0][1:]], parts))
    values = {"context_length": config["max_position"], "embedding_length": config["d_model"],
              "feed_forward_length": config["d_ff"], "block_count": config["n_layer"],
              "vocab_size": config["vocab_size"], **values}
    write(path, {"general.architecture": architecture, "general.name": "random weights, for speed alone",
                 **{"%s.%s" % (architecture, key): value for key, value in values.items()},
                 **vocabulary(config["vocab_size"])}, tensors)
