"""What params.json beside a memory-layers checkpoint says, checked field by field.

memory_layers.py asks for a struct of plain numbers (read). The file is the authors' whole training
configuration; of it only what inference needs is looked at, and what an old one lacks has the
authors' default. Whatever the model cannot be served with is refused by the field's name: what the
original rejects, and what is beyond the server's limits.
"""

import os
from types import SimpleNamespace

from fault import Refused, show
from json_file import Fields, load

NAME = "params.json"
BYTES_MAX = 1 << 20
WIDTH_MAX, COUNT_MAX, FF_MAX, POSITION_MAX, VOCAB_MAX = 1 << 16, 1024, 1 << 20, 1 << 20, 1 << 24
KEY_MAX = 46340  # its square, the number of slots, is below 2^31
MEMORY_MAX = 64
THETA_MAX = 1e12
DTYPES = {"fp32": "f32", "bf16": "bf16", "fp16": "f16"}
TOKENIZERS = ("bytes", "sp", "tiktoken")

MEMORY = "model.productkey_args."
DEFAULTS = {
    "model.dim": 512, "model.n_layers": 8, "model.n_heads": None, "model.head_dim": None,
    "model.n_kv_heads": None, "model.ffn_dim_multiplier": None, "model.multiple_of": 256,
    "model.norm_eps": 1e-5, "model.rope_theta": 10000.0, "model.max_seqlen": 1024,
    "model.vocab_size": -1, "model.weight_tying": False,
    MEMORY + "is_enabled": False, MEMORY + "layers": "", MEMORY + "mem_n_keys": 1024,
    MEMORY + "mem_heads": 4, MEMORY + "mem_knn": 32, MEMORY + "mem_k_dim": 512,
    MEMORY + "mem_v_dim": -1, MEMORY + "mem_share_values": True,
    MEMORY + "swilu_projection": True, MEMORY + "mem_gated": False, MEMORY + "peer_variant": False,
    "distributed.model_dtype": "bf16", "data.tokenizer.name": None, "data.tokenizer.path": None,
}


class Params(Fields):
    """params.json, with the authors' defaults."""

    def __init__(self, path):
        if not os.path.isfile(path):
            raise Refused("%s, the configuration that belongs to it, is not beside the checkpoint"
                          % NAME)
        Fields.__init__(self, load(path, BYTES_MAX), NAME, DEFAULTS)

    def vocabulary(self):
        """None where the file leaves it to the tokenizer, as the authors' default does: the first
        table of the weights tells it then."""
        value = self.get("model.vocab_size")
        if isinstance(value, int) and value == DEFAULTS["model.vocab_size"]:
            return None
        return self.count("model.vocab_size", 1, VOCAB_MAX, " (or -1, as many as the weights have)")


# ---- what it says -------------------------------------------------------------------------------


def _read_heads(f, p):
    n_head, d_head = f.get("model.n_heads"), f.get("model.head_dim")
    if n_head is None and d_head is None:
        f.refuse("model.n_heads", "null, and so is model.head_dim; one of them is needed")
    if n_head is not None:  # the original divides by it also where the width of a head is given
        p.n_head = f.count("model.n_heads", 1, COUNT_MAX)
        if p.d_model % p.n_head:
            f.refuse("model.n_heads", "model.dim = %d is not divisible by %d" % (p.d_model, p.n_head))
    if d_head is not None:
        p.d_head = f.even("model.head_dim", WIDTH_MAX)
    else:
        p.d_head = p.d_model // p.n_head
        if p.d_head % 2:
            f.refuse("model.n_heads", "heads of model.dim / n_heads = %d / %d = %d elements, an even"
                   " number expected" % (p.d_model, p.n_head, p.d_head))
    if n_head is None:
        if p.d_model % p.d_head:
            f.refuse("model.head_dim", "model.dim = %d is not divisible by %d"
                   % (p.d_model, p.d_head))
        p.n_head = p.d_model // p.d_head
        if p.n_head > COUNT_MAX:
            f.refuse("model.head_dim", "%d makes %d heads, at most %d are served"
                   % (p.d_head, p.n_head, COUNT_MAX))
    if p.n_head * p.d_head > WIDTH_MAX:
        f.refuse("model.head_dim", "%d heads of %d are wider than the limit of %d"
                 % (p.n_head, p.d_head, WIDTH_MAX))
    p.n_kv_head = p.n_head
    if f.get("model.n_kv_heads") is not None:
        p.n_kv_head = f.count("model.n_kv_heads", 1, p.n_head)
        if p.n_head % p.n_kv_head:
            f.refuse("model.n_kv_heads", "%d does not divide the %d heads" % (p.n_kv_head, p.n_head))


def ff_width(f, d_model):
    """The width of a feed-forward network by the original's formula, for a model that has none in
    its file since every block has a memory."""
    width = int(2 * (4 * d_model) / 3)
    if f.get("model.ffn_dim_multiplier") is not None:
        width = int(width * f.number("model.ffn_dim_multiplier", lambda x: 0 < x <= FF_MAX,
                                     "null or 0 < number <= %d" % FF_MAX))
    multiple = f.count("model.multiple_of", 1, FF_MAX)
    width = -(-width // multiple) * multiple
    if not 1 <= width <= FF_MAX:
        f.refuse("model.ffn_dim_multiplier", "a feed-forward width of %d, 1..%d are served"
               % (width, FF_MAX))
    return width


def _layers(f, n_layer):
    """The numbers of the blocks with a memory, ascending."""
    field = MEMORY + "layers"
    text = f.get(field)
    if not isinstance(text, str):
        f.refuse(field, "numbers with commas between as a string expected, got %s" % show(text))
    layers = []
    for part in text.split(",") if text.strip() else ():
        part = part.strip()
        if not (part.isascii() and part.isdigit() and len(part) <= 6 and int(part) < n_layer):
            f.refuse(field, "numbers of blocks 0..%d expected, got %s" % (n_layer - 1, show(text)))
        layers.append(int(part))
    if len(set(layers)) != len(layers):
        f.refuse(field, "the same block twice in %s" % show(text))
    if len(layers) > MEMORY_MAX:
        f.refuse(field, "%d memories, at most %d are served" % (len(layers), MEMORY_MAX))
    return sorted(layers)


def _read_memory(f, p, layers):
    m = SimpleNamespace(layers=layers)
    m.n_key = f.count(MEMORY + "mem_n_keys", 1, KEY_MAX)
    m.n_head = f.count(MEMORY + "mem_heads", 2, COUNT_MAX)  # the original refuses a single one
    m.k_top = f.count(MEMORY + "mem_knn", 1, min(m.n_key, COUNT_MAX),
                      " (at most mem_n_keys)" if m.n_key < COUNT_MAX else "")
    m.d_key = f.even(MEMORY + "mem_k_dim", WIDTH_MAX)
    width = f.count(MEMORY + "mem_v_dim", -WIDTH_MAX, WIDTH_MAX)
    has_width = width > 0  # the original takes model.dim instead of any that is not
    m.d_value = width if has_width else p.d_model
    m.is_shared = f.flag(MEMORY + "mem_share_values")
    m.has_gate = f.flag(MEMORY + "swilu_projection")
    m.has_projection = m.has_gate or has_width
    m.has_output_gate = f.flag(MEMORY + "mem_gated")
    m.has_experts = f.flag(MEMORY + "peer_variant")
    if m.has_experts and has_width:
        f.refuse(MEMORY + "mem_v_dim", "-1 expected with peer_variant, got %d" % m.d_value)
    return m


def _tokenizer(f):
    """(name or None, path or None)"""
    name, path = f.get("data.tokenizer.name"), f.get("data.tokenizer.path")
    if name is not None:
        f.choice("data.tokenizer.name", TOKENIZERS)
    if path is not None and not isinstance(path, str):
        f.refuse("data.tokenizer.path", "null or a string expected, got %s" % show(path))
    return name, path


def read(path):
    """The checked sizes and options; .memory is None for a model without, .n_vocab where the weights
    are to tell it. .fields: for ff_width."""
    f = Params(path)
    p = SimpleNamespace(fields=f)
    p.d_model = f.count("model.dim", 1, WIDTH_MAX)
    p.n_layer = f.count("model.n_layers", 1, COUNT_MAX)
    _read_heads(f, p)
    p.norm_eps = f.epsilon("model.norm_eps")
    p.rope_theta = f.number("model.rope_theta", lambda x: 1 <= x <= THETA_MAX,
                            "a number 1..%g" % THETA_MAX)
    p.n_position = f.count("model.max_seqlen", 1, POSITION_MAX)
    p.n_vocab = f.vocabulary()
    if f.flag("model.weight_tying"):
        f.refuse("model.weight_tying", "true: the original cannot make such a model; false expected")
    p.dtype = DTYPES[f.choice("distributed.model_dtype", DTYPES)]
    p.tokenizer, p.tokenizer_path = _tokenizer(f)
    p.memory = None
    if f.flag(MEMORY + "is_enabled"):
        layers = _layers(f, p.n_layer)
        p.memory = _read_memory(f, p, layers) if layers else None
    return p
