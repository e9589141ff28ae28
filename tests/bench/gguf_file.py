"""A dense model directory as a GGUF file (version 3) that llama.cpp runs, for compare.py.

No architecture of llama.cpp computes our function: those that norm behind the sum, as XLM does, look both ways and
have no output layer. `gpt2` has the same parts in another order (learned positions, biases, GELU, tied output): the same
matrices, hence the same bytes and multiply-adds, but norms before each part and no bias behind the vocabulary. It
stands in for SPEED ALONE; its results mean nothing. llama.cpp's GELU is the tanh form, by a table."""

import json
import mmap
import struct
from pathlib import Path

ALIGN = 32
TYPES = {"F32": 0, "F16": 1, "BF16": 30}  # ggml's numbers
ELEMENT_BYTES = {"F32": 4, "F16": 2, "BF16": 2}

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


def entry(key, value):
    """A key and its value: text, whole numbers as uint32, others as float32."""
    if isinstance(value, str):
        return text(key) + struct.pack("<I", 8) + text(value)
    if isinstance(value, int):
        return text(key) + struct.pack("<II", 4, value)
    return text(key) + struct.pack("<If", 6, value)


def write(path, values, tensors):
    """values: {key: text or number}. tensors: [(name, type, shape, [bytes ...])], outermost dimension first."""
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


def write_dense(path, model):
    """The stand-in for a model directory without memories."""
    config = json.loads((Path(model) / "config.json").read_text())
    if config.get("memories") or not config["tie_output"]:
        raise ValueError("%s: a model with memories, or with an output of its own, has no counterpart in llama.cpp; "
                         "make one with make_model --memory-layer -1" % model)
    ours = Safetensors(Path(model) / "model.safetensors")
    names = WHOLE + [([name % i for name in names], theirs % i) for i in range(config["n_layer"])
                     for names, theirs in LAYER]
    tensors = []
    for sources, theirs in names:
        kinds, shapes, parts = zip(*(ours[name] for name in sources))
        rows = sum(shape[0] for shape in shapes)
        tensors.append((theirs, kinds[0], [rows, *shapes[0][1:]], parts))
    write(path, {"general.architecture": "gpt2", "general.name": "stand-in for speed alone",
                 "gpt2.context_length": config["max_position"], "gpt2.embedding_length": config["d_model"],
                 "gpt2.feed_forward_length": config["d_ff"], "gpt2.block_count": config["n_layer"],
                 "gpt2.attention.head_count": config["n_head"], "gpt2.attention.layer_norm_epsilon": 1e-5,
                 "gpt2.vocab_size": config["vocab_size"], "tokenizer.ggml.model": "no_vocab"}, tensors)
