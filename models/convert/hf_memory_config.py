"""What memory.json says of the memories that stand beside a model in Hugging Face form.

hf_memory.py asks for a list of plain structs (read). Each entry of "memories" is checked key by key
against the table below; a key that is not in it, or one that goes with another's value and stands
alone, is refused by its name.
"""

import os
from types import SimpleNamespace

from fault import Refused, show
from json_file import Fields, load

BYTES_MAX = 1 << 20
MEMORY_MAX, COUNT_MAX, WIDTH_MAX, TOP_MAX = 64, 1024, 1 << 16, 1024
KEY_MAX = 46340  # its square, the number of slots, is below 2^31
PREFIX_MAX = 200
PLACES = {"replace": "in", "beside": "beside", "after": "after"}
ORDER = {"beside": 0, "in": 1, "after": 2}  # of memories in one layer
SCOPES = ("half", "head", "all")
DEFAULTS = {
    "layer": None, "place": None, "prefix": None, "n_head": None, "k_top": None,
    "n_key": None, "d_key": None, "d_value": None,
    "input_norm": None, "input_norm_eps": None, "input_norm_weight": True, "input_norm_bias": True,
    "query_norm": "none", "query_norm_of": None, "query_norm_eps": None, "query_norm_weight": True,
    "query_norm_bias": True, "keys_norm": "none", "temperature": None, "scores": "softmax",
    "product_key_topk": None, "value_gate": False, "value_projection": False, "experts": False,
    "values_of": None, "gate": "none", "gate_activation": None,
}


def _needs(f, key, has, why):
    """A key that means something only beside another's value."""
    if f.get(key) != f.defaults[key] and not has:
        f.refuse(key, "%s, which goes with %s" % (show(f.get(key)), why))


def _optional(f, key, high):
    return None if f.get(key) is None else f.count(key, 1, high)


def _read_norms(f, m, names, model_eps):
    """m.input_norm and m.query_norm: .kind, .eps, .weight, .bias; of the latter .scope"""
    kind = f.get("input_norm")
    if kind is None:
        kind = "rms" if m.place == "after" else "none"
    elif kind not in ("none", "rms", "layer"):
        f.refuse("input_norm", "none, rms or layer expected, got %s" % show(kind))
    eps = model_eps if f.get("input_norm_eps") is None \
        else f.epsilon("input_norm_eps")
    m.input_norm = SimpleNamespace(kind=kind, eps=eps, weight=f.flag("input_norm_weight"),
                                   bias=f.flag("input_norm_bias") and kind == "layer")
    for key in ("input_norm_eps", "input_norm_weight"):
        _needs(f, key, kind != "none", "input_norm rms or layer")
    _needs(f, "input_norm_bias", kind == "layer", "input_norm layer")
    kind = f.choice("query_norm", ("none", "batch", "layer", "rms", "l2"))
    has_weight = kind in ("layer", "rms")
    scope = f.choice("query_norm_of", SCOPES) if f.get("query_norm_of") is not None else names.norm_of
    eps = {"l2": 1e-24}.get(kind, 1e-5) if f.get("query_norm_eps") is None \
        else f.epsilon("query_norm_eps")
    m.query_norm = SimpleNamespace(kind=kind, eps=eps, scope=scope,
                                   weight=has_weight and f.flag("query_norm_weight"),
                                   bias=kind == "layer" and f.flag("query_norm_bias"))
    _needs(f, "query_norm_of", kind in ("layer", "rms", "l2"), "query_norm layer, rms or l2")
    _needs(f, "query_norm_eps", kind in ("batch", "layer", "rms"), "query_norm batch, layer or rms")
    _needs(f, "query_norm_weight", has_weight, "query_norm layer or rms")
    _needs(f, "query_norm_bias", kind == "layer", "query_norm layer")


def _read_values(f, m, names, entries, index):
    m.has_experts = f.flag("experts") or names.has_experts
    m.has_gate, m.has_projection = f.flag("value_gate"), f.flag("value_projection")
    for key in ("value_gate", "value_projection"):
        _needs(f, key, not m.has_experts, "values, not with experts")
    m.values_of = None
    if f.get("values_of") is not None:
        m.values_of = f.count("values_of", 0, MEMORY_MAX - 1)
        if m.values_of >= index:
            f.refuse("values_of", "%d, not the index of an earlier memory" % m.values_of)
        m.values_of = entries[m.values_of].values_of if entries[m.values_of].values_of is not None \
            else m.values_of
    m.gate = f.choice("gate", ("none", "scalar", "linear", "mlp"))
    m.gate_activation = "relu"
    if f.get("gate_activation") is not None:
        m.gate_activation = f.choice("gate_activation", ("relu", "gelu"))
    _needs(f, "gate_activation", m.gate == "mlp", "gate mlp")


def _read_memory(entry, index, name, entries, names, base):
    if not isinstance(entry, dict):
        raise Refused("%s: memories[%d]: an object expected, got %s" % (name, index, show(entry)))
    f = Fields(entry, "%s: memories[%d]" % (name, index), DEFAULTS)
    for key in entry:
        if key not in DEFAULTS:
            f.refuse(key, "not a key of a memory; these are %s" % " ".join(DEFAULTS))
    m = SimpleNamespace(label=f.name)
    m.layer = f.count("layer", 0, base.n_layer - 1, " (num_hidden_layers is %d)" % base.n_layer)
    m.place = PLACES[f.choice("place", tuple(PLACES))]
    m.prefix = "memories.%d." % index if f.get("prefix") is None else f.get("prefix")
    if not isinstance(m.prefix, str) or len(m.prefix) > PREFIX_MAX:
        f.refuse("prefix", "a text of at most %d characters expected, got %s" % (PREFIX_MAX, show(m.prefix)))
    m.n_head = f.count("n_head", 1, COUNT_MAX)
    m.k_top = f.count("k_top", 1, TOP_MAX)
    m.n_key, m.d_key, m.d_value = (_optional(f, key, high) for key, high in (
        ("n_key", KEY_MAX), ("d_key", WIDTH_MAX), ("d_value", WIDTH_MAX)))
    _read_norms(f, m, names, base.norm_eps)
    m.has_unit_keys = f.choice("keys_norm", ("none", "l2")) == "l2"
    m.temperature = None if f.get("temperature") is None \
        else f.number("temperature", lambda x: 1e-6 <= x <= 1e6, "a number 1e-06..1e+06")
    m.has_relu = f.choice("scores", ("softmax", "relu")) == "relu"
    if f.get("product_key_topk") is not None:
        f.count("product_key_topk", m.k_top, TOP_MAX, " (k_top is %d; fewer are not served)" % m.k_top)
    _read_values(f, m, names, entries, index)
    return m


def read(path, names, base):
    """The memories, in order of execution. names: hf_memory's scheme of names; base: the model's
    hf_params."""
    name = os.path.basename(path)
    root = load(path, BYTES_MAX)
    for key in root:
        if key != "memories":
            raise Refused("%s: %s: not a key; \"memories\" is the only one" % (name, key))
    listed = root.get("memories")
    if not isinstance(listed, list) or not 1 <= len(listed) <= MEMORY_MAX:
        raise Refused("%s: memories: a list of 1..%d objects expected, got %s"
                      % (name, MEMORY_MAX, show(listed)))
    entries = []
    for index, entry in enumerate(listed):
        m = _read_memory(entry, index, name, entries, names, base)
        if entries and (m.layer, ORDER[m.place]) <= (entries[-1].layer, ORDER[entries[-1].place]):
            raise Refused("%s: memories[%d] runs before memories[%d], or is another one at its place: list"
                          " them by layer, beside before replace before after" % (name, index, index - 1))
        entries.append(m)
    return entries
