"""What `model_config` in a file of sparse-memory-lm says, checked field by field.

sparse_memory_lm.py asks for a struct of plain numbers (read). What an older file lacks has the default of
the author's code; a key that is in none of his versions is refused, as his loader does, and so is
what the server cannot serve. Keys that say how training computed a result, not which, are not looked at.
"""

from types import SimpleNamespace

from fault import Refused, show
from json_file import Fields
from memory_layers_params import (COUNT_MAX, FF_MAX, KEY_MAX, MEMORY_MAX, POSITION_MAX, THETA_MAX,
                                  VOCAB_MAX, WIDTH_MAX)

NAME = "model_config"
DEFAULTS = {
    "vocab_size": 50304, "d_model": 384, "n_layers": 12, "n_heads": 6, "ffn_hidden": 1024,
    "max_seq_len": 1024, "rope_theta": 10000.0, "norm_eps": 1e-5, "mem_layers": [],
    "mem_n_keys": 512, "mem_heads": 4, "mem_knn": 32, "mem_k_dim": 256, "mem_v_dim": -1,
    "mem_query_norm": "batchnorm", "mem_swilu": True, "mem_score_scale": "none",
    "mem_share_values": False, "eng_layers": [],
}
OF_TRAINING = {"init_std", "mem_score_scale_init", "mem_value_impl", "mem_value_grad", "mem_impl",
               "mem_keys_weight_decay", "eng_orders", "eng_heads", "eng_head_dim", "eng_rows",
               "eng_conv_kernel", "eng_hash_seed", "eng_impl", "eng_value_grad"}
K_MAX = 1024


def _layers(f, n_layer):
    layers = f.get("mem_layers")
    if not isinstance(layers, (list, tuple)) or len(layers) > MEMORY_MAX or not all(
            isinstance(i, int) and not isinstance(i, bool) and 0 <= i < n_layer for i in layers) \
            or len(set(layers)) != len(layers):
        f.refuse("mem_layers", "distinct numbers 0..%d expected, at most %d (a layer beyond the last has"
                 " no memory), got %s" % (n_layer - 1, MEMORY_MAX, show(layers)))
    return sorted(layers)


def _memory(f, p):
    m = SimpleNamespace(layers=p.layers)
    m.n_key = f.count("mem_n_keys", 1, KEY_MAX)
    m.n_head = f.count("mem_heads", 1, COUNT_MAX)
    m.k_top = f.count("mem_knn", 1, min(m.n_key, K_MAX), " (of mem_n_keys)")
    m.d_key = f.even("mem_k_dim", WIDTH_MAX)
    m.is_plus, m.is_shared = f.flag("mem_swilu"), f.flag("mem_share_values")
    width = f.get("mem_v_dim")
    own = isinstance(width, int) and not isinstance(width, bool) and width <= 0
    m.d_value = p.d_model if own else f.count("mem_v_dim", 1, WIDTH_MAX)
    if m.d_value != p.d_model and not m.is_plus:
        f.refuse("mem_v_dim", "%d columns under a width of %d need mem_swilu, whose projection turns"
                 " one into the other" % (m.d_value, p.d_model))
    m.has_norm = f.choice("mem_query_norm", ("batchnorm", "none")) == "batchnorm"
    m.has_scale = f.choice("mem_score_scale", ("none", "learned")) == "learned"
    return m


def read(root):
    """root: the file's model_config. .n_vocab .d_model .n_layer .n_head .d_ff .n_position .rope_theta
    .norm_eps .memory (None without one)"""
    if not isinstance(root, dict):
        raise Refused("%s: a dictionary expected, got %s" % (NAME, show(root)))
    f = Fields(root, NAME, DEFAULTS)
    if f.get("eng_layers") not in ([], ()):
        f.refuse("eng_layers", "[] expected: n-gram (Engram) modules before attention are not served,"
                 " got %s" % show(f.get("eng_layers")))
    for key in root:
        if key not in DEFAULTS and key not in OF_TRAINING:
            raise Refused("%s: the key %s is not one that the author's code knows" % (NAME, show(key)))
    p = SimpleNamespace()
    p.n_vocab, p.d_model = f.count("vocab_size", 1, VOCAB_MAX), f.count("d_model", 1, WIDTH_MAX)
    p.n_layer, p.n_head = f.count("n_layers", 1, COUNT_MAX), f.count("n_heads", 1, COUNT_MAX)
    if p.d_model % p.n_head or p.d_model // p.n_head % 2:
        f.refuse("n_heads", "heads of an even width expected, got %d of d_model %d"
                 % (p.n_head, p.d_model))
    p.d_ff, p.n_position = f.count("ffn_hidden", 1, FF_MAX), f.count("max_seq_len", 1, POSITION_MAX)
    p.rope_theta = f.number("rope_theta", lambda v: 1 <= v <= THETA_MAX, "a number 1..%g" % THETA_MAX)
    p.norm_eps = f.epsilon("norm_eps")
    p.layers = _layers(f, p.n_layer)
    p.memory = _memory(f, p) if p.layers else None
    return p
