"""A model in Hugging Face form, with memories beside it or without: from config.json and safetensors to our config and tensors.

convert.py calls read() with an opened HfDirectory, then read_text(). Names and shapes that the weights must
have follow from config.json (hf_params.py) and are compared by name. These models turn column j of a head
together with column j + d_head/2 by a token's position, pkmserve the neighbours 2j and 2j + 1: so the
columns of queries and keys change places here, and with them the biases and norms of these.
"""

import os
from types import SimpleNamespace

import numpy as np

import bpe_files
import hf_memory
import hf_params
import memory_layers
import text_files
from fault import Refused, show
from safetensors_source import SafetensorsSource

CONFIG = hf_params.NAME
SETTABLE = ["bos_token_id", "eos_token_id"]
CHUNK = 1 << 20  # elements of two matrices compared at a time
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")  # of byte-level BPE; the first is taken


class HfDirectory:
    """An opened directory: .path, .params, .weights, .memory: hf_memory.Memories or None"""

    def __init__(self, path, memory=None):
        """memory: file, configuration and scheme of names of the memories beside it"""
        if not is_place(path):
            raise Refused("a directory without %s" % CONFIG)
        self.path = path
        self.params = hf_params.read(path)
        self.weights = SafetensorsSource(path)
        self.memory = hf_memory.Memories(*memory, self.params) if memory else None


def is_place(path):
    return os.path.isfile(os.path.join(path, CONFIG))


def looks_like(root):
    """Whether a pickled checkpoint is one of these: they are directories."""
    return False


# ---- tensors ------------------------------------------------------------------------------------


class Reordered:
    """The rows of an array in another order, as safetensors_file.write takes arrays: only the slices that
    it asks for are ever made."""

    def __init__(self, array, order):
        self.array, self.order = array, order

    dtype = property(lambda self: self.array.dtype)
    shape = property(lambda self: self.array.shape)
    ndim = property(lambda self: self.array.ndim)
    size = property(lambda self: self.array.size)

    def __getitem__(self, rows):
        return self.array[self.order[rows]]


def _neighbours(n_head, d_head):
    """[n_head·d_head] Which rows stand where the halves of each head have become neighbours."""
    halves = np.arange(n_head * d_head).reshape(n_head, 2, d_head // 2)
    return halves.swapaxes(1, 2).reshape(-1)


def _layer(p, i):
    d, n_query, n_kv = p.d_model, p.n_head * p.d_head, p.n_kv_head * p.d_head
    theirs, ours = "model.layers.%d." % i, "layers.%d." % i
    for their_part, our_part, n_out, n_in, has_bias, n_turned in (
            ("self_attn.q_proj", "attention.query", n_query, d, p.qkv_bias, p.n_head),
            ("self_attn.k_proj", "attention.key", n_kv, d, p.qkv_bias, p.n_kv_head),
            ("self_attn.v_proj", "attention.value", n_kv, d, p.qkv_bias, 0),
            ("self_attn.o_proj", "attention.out", d, n_query, p.out_bias, 0),
            ("mlp.gate_proj", "ffn.gate", p.d_ff, d, p.ffn_bias, 0),
            ("mlp.up_proj", "ffn.up", p.d_ff, d, p.ffn_bias, 0),
            ("mlp.down_proj", "ffn.down", d, p.d_ff, p.ffn_bias, 0)):
        yield theirs + their_part + ".weight", (n_out, n_in), ours + our_part + ".weight", n_turned
        if has_bias:
            yield theirs + their_part + ".bias", (n_out,), ours + our_part + ".bias", n_turned
    for their_part, our_part in (("q_norm", "query_norm"), ("k_norm", "key_norm")) if p.norms else ():
        yield theirs + "self_attn.%s.weight" % their_part, (p.d_head,), \
            ours + "attention.%s.weight" % our_part, 1
    for their_part, our_part in (("input_layernorm", "attention_norm"),
                                 ("post_attention_layernorm", "ffn_norm")):
        yield theirs + their_part + ".weight", (d,), ours + our_part + ".weight", 0


def _tensors(p):
    """(name in the files, shape, name in ours, number of heads whose halves become neighbours)"""
    yield "model.embed_tokens.weight", (p.n_vocab, p.d_model), "embeddings.weight", 0
    for i in range(p.n_layer):
        yield from _layer(p, i)
    yield "model.norm.weight", (p.d_model,), "norm.weight", 0
    if not p.tie_output:
        yield "lm_head.weight", (p.n_vocab, p.d_model), "output.weight", 0


def _left_out(p, weights):
    """(name, shape) of what files may have beside: the tied matrix once more, and what old versions of
    transformers computed the rotary positions with."""
    if p.tie_output and "lm_head.weight" in weights.entries:
        yield "lm_head.weight", (p.n_vocab, p.d_model)
    for i in range(p.n_layer):
        name = "model.layers.%d.self_attn.rotary_emb.inv_freq" % i
        if name in weights.entries:
            yield name, (p.d_head // 2,)


def _compare(shapes, entries, optional):
    for name, shape in shapes.items():
        if name not in entries and name in optional:
            continue
        if name not in entries:
            raise Refused("tensor '%s' is missing (shape %s expected)" % (name, show(list(shape))))
        if entries[name].shape != shape:
            raise Refused("tensor '%s': shape %s expected, got %s"
                          % (name, show(list(shape)), show(list(entries[name].shape))))
    for name in entries:
        if name not in shapes:
            raise Refused("tensor '%s' is not one that config.json calls for" % name)


def _check_tied(weights):
    """The output matrix that stands in the files beside the embeddings it is tied to must equal them."""
    kept, copy = (weights.array(name) for name in ("model.embed_tokens.weight", "lm_head.weight"))
    step = max(1, CHUNK // kept.shape[1])
    for i in range(0, kept.shape[0], step):
        same = (kept[i:i + step] == copy[i:i + step]).all(1)
        if not same.all():
            raise Refused("tensor 'lm_head.weight' differs from 'model.embed_tokens.weight' at row %d,"
                          " but with tie_word_embeddings they are one" % (i + int(np.argmin(same))))


def _dtype(weights, names):
    """The type of the matrices, or, of several, that which holds all."""
    found = {weights.entries[name].dtype for name in names if len(weights.entries[name].shape) > 1}
    return {frozenset(["BF16"]): "bf16", frozenset(["F16"]): "f16"}.get(frozenset(found), "f32")


def read(file, settings, dtype):  # settings are read_text's
    """.config (config.json), .tensors [(name, array)], .own {name: dtype} of those that have one other
    than config's, .params, .advice: for the summary, .generation (generation_config.json). dtype: None for that of the files."""
    p, weights = file.params, file.weights
    p.folder = file.path
    plan = list(_tensors(p))
    shapes = {theirs: shape for theirs, shape, _, _ in plan}
    beside = dict(_left_out(p, weights))
    replaced = ["layers.%d.ffn." % i for i in (file.memory.replaced() if file.memory else ())]
    unused = {theirs for theirs, _, ours, _ in plan if ours.startswith(tuple(replaced)) and replaced}
    _compare({**shapes, **beside}, weights.entries, unused)
    if "lm_head.weight" in beside:
        _check_tied(weights)
    tensors = []
    for theirs, shape, ours, n_turned in plan:
        if theirs in unused:
            continue
        array = weights.array(theirs)
        if n_turned:
            array = Reordered(array, _neighbours(n_turned, shape[0] // n_turned))
        tensors.append((ours, array))
    config = {"model_type": "memory_llama", "vocab_size": p.n_vocab, "d_model": p.d_model,
              "n_layer": p.n_layer, "n_head": p.n_head, "n_kv_head": p.n_kv_head,
              "d_head": p.d_head, "d_ff": p.d_ff, "max_position": p.n_position,
              "rope_theta": p.rope_theta, "norm_eps": p.norm_eps, "tie_output": p.tie_output}
    config.update((key, True) for key, value in (
        ("attention_bias", p.qkv_bias), ("attention_out_bias", p.out_bias), ("ffn_bias", p.ffn_bias),
        ("query_key_norm", p.norms)) if value)
    if p.rope_scaling is not None:
        config["rope_scaling"] = p.rope_scaling
    config["dtype"] = dtype or _dtype(weights, shapes.keys() - unused)
    own = {}
    if file.memory is not None:
        added = file.memory.tensors()
        tensors += added
        config["memories"] = list(file.memory.entries())
        own = hf_memory.own_types(added, config["dtype"]) if dtype is None else {}
    return SimpleNamespace(config=config, tensors=tensors, own=own, params=p, advice=p.notes,
                           generation=p.sampling)


# ---- text ---------------------------------------------------------------------------------------


def _name_tokens(p, config, known, settings):
    """The ids that begin and end a text. A text begins with what the tokenizer puts there; it ends as the
    configuration says, else as the tokenizer; --set gives what none of them tells."""
    ends = p.eos_token_id or [known[key] for key in ("eos_token_id",) if key in known]
    found = {"bos_token_id": known.get("bos_token_id", p.bos_token_id),
             "eos_token_id": None if not ends else ends[0] if len(ends) == 1 else ends,
             "pad_token_id": p.pad_token_id, "unk_token_id": known.get("unk_token_id")}
    for key in SETTABLE:
        value = settings.get(key)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < p.n_vocab:
            raise Refused("--set %s: an integer 0..%d expected, got %s"
                          % (key, p.n_vocab - 1, show(value)))
        if found[key] is not None and found[key] != value:
            raise Refused("--set %s=%d: the directory says %s; --set gives only what it lacks"
                          % (key, value, show(found[key])))
        found[key] = value
    config.update((key, value) for key, value in found.items() if value is not None)


def _tokenizer(folder):
    """The path of the tokenizer that stands beside the weights, or None: SentencePiece's before others,
    which are translations of it."""
    paths = [os.path.join(folder, name) for name in TOKENIZERS]
    paths = [path for path in paths if os.path.isfile(path)]
    first = [path for path in paths if path.endswith(".model") and bpe_files.kind(path) is None]
    return (first + paths + [None])[0]


def read_text(model, tokenizer, settings):
    """Completes config with what text is read with. tokenizer: that of --tokenizer or None. Returns
    (text_files.read_tokenizer's or None, why there is none)."""
    p, config = model.params, model.config
    path, source = (tokenizer, "--tokenizer") if tokenizer is not None \
        else (_tokenizer(p.folder), "tokenizer:")
    if path is None:
        _name_tokens(p, config, {}, settings)
        return None, "no tokenizer beside the weights"
    read = text_files.read_tokenizer(path, p.n_vocab, source)
    if "merges.txt" in [name for _, name in read.files]:
        hf_params.check_pair(os.path.dirname(path), p.kind)
    _name_tokens(p, config, read.ids, settings)
    begins = hf_params.begins_texts(p.folder)
    if "bos_token_id" in config and ("bos_token_id" in read.ids if begins is None else begins):
        config["add_bos"] = True
    return read, None


def summary(model):
    c, p = model.config, model.params
    options = [text for text, has in (
        ("biases of attention", p.qkv_bias), ("of its output", p.out_bias), ("of networks", p.ffn_bias),
        ("normed queries and keys", p.norms), ("tied output", p.tie_output)) if has]
    if p.rope_scaling is not None:
        options.append("positions scaled by %g (%s)" % (p.rope_scaling["factor"],
                                                        p.rope_scaling["rope_type"]))
    lines = ["%s, layers %d of %d, heads %d of %d (%d for keys and values), vocabulary %d, context %d,"
             " feed-forward networks of %d" % (
                 p.kind, c["n_layer"], c["d_model"], c["n_head"], c["d_head"], c["n_kv_head"],
                 c["vocab_size"], c["max_position"], c["d_ff"])]
    if options:
        lines[0] += "; " + ", ".join(options)
    if p.sampling:
        lines.append("drawn by default with %s" % ", ".join(
            "%s %g" % item for item in sorted(p.sampling.items())))
    return lines + memory_layers.memory_lines(c)
