"""Memory layers at scale: from consolidated.pth and params.json to config and tensors.

convert.py calls read() with an opened TorchFile beside which params.json lies, then read_text().
Names and shapes that the file must have follow from params.json (memory_layers_params.py) and are
compared by name, but for the width of the feed-forward networks, which is that of the first one. All
memories usually read one table; the file may have it under the first one alone, or a copy under each:
the copies must be equal to the bit, and one is written.
"""

import os
from types import SimpleNamespace

import numpy as np

import bpe_files
import memory_layers_params
import safetensors_file
import text_files
from fault import Refused, show
from memory_layers_params import FF_MAX, VOCAB_MAX
from torch_file import Brain, Tensor, check_shapes

WEIGHTS = "consolidated.pth"
SETTABLE = ["bos_token_id", "eos_token_id"]
CHUNK = 1 << 20  # elements of two copies compared at a time
N_BYTE = 258  # the words of the bytes tokenizer: 256 bytes and what begins and ends a text
BYTE_IDS = {"bos_token_id": 256, "eos_token_id": 257}
# The ids of Llama 3, whose tokens are those of the authors' larger models.
RANK_IDS = {128256: {"bos_token_id": 128000, "eos_token_id": 128001}}
ATTENTION = (("wq", "query"), ("wk", "key"), ("wv", "value"), ("wo", "out"))
NETWORK = (("w1", "gate"), ("w2", "down"), ("w3", "up"))


def looks_like(root):
    """Whether a checkpoint's top level holds the weights of such a model."""
    weights = root.get("model") if isinstance(root, dict) else None
    return isinstance(weights, dict) and "tok_embeddings.weight" in weights


def is_place(path):
    """Whether path is that of weights which have their params.json beside them."""
    return os.path.basename(path) == WEIGHTS and \
        os.path.isfile(os.path.join(os.path.dirname(path), memory_layers_params.NAME))


# ---- tensors ------------------------------------------------------------------------------------


def _weights(root):
    """The weights by name. What stands beside them, the optimizer's state, is not looked at."""
    if not looks_like(root):
        raise Refused("not a checkpoint of memory layers: a dictionary with 'model' and in it"
                      " 'tok_embeddings.weight' expected, got %s" % show(root))
    weights = root["model"]
    for name, tensor in weights.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise Refused("model: tensors by name expected, got %s = %s"
                          % (show(name), show(tensor)))
    return weights


def _rows(weights, name, high, width):
    """Of a matrix whose number of rows nothing else tells."""
    if name not in weights:
        raise Refused("tensor '%s' is missing" % name)
    size = weights[name].size
    if len(size) != 2 or not 1 <= size[0] <= high:
        raise Refused("tensor '%s': shape [1..%d, %d] expected, got %s"
                      % (name, high, width, show(list(size))))
    return size[0]


def _ff_width(p, weights):
    ordinary = [i for i in range(p.n_layer) if p.memory is None or i not in p.memory.layers]
    if not ordinary:
        return memory_layers_params.ff_width(p.fields, p.d_model)
    return _rows(weights, "layers.%d.feed_forward.w1.weight" % ordinary[0], FF_MAX, p.d_model)


def _linear(theirs, ours, n_out, n_in):
    yield theirs + ".weight", (n_out, n_in), ours and ours + ".weight"
    yield theirs + ".bias", (n_out,), ours and ours + ".bias"


def _memory_tensors(p, i):
    """Those of the memory in block i but its tables."""
    m, theirs, ours = p.memory, "layers.%d.feed_forward." % i, "memories.%d_in." % i
    yield theirs + "keys", (2 * m.n_head * m.n_key, m.d_key // 2), ours + "keys"
    query = "query_proj.query_mlps.0"
    yield from _linear(theirs + query, ours + query, m.n_head * m.d_key, p.d_model)
    # With experts the original makes and stores these two, but computes nothing with them.
    gate, projection = (None, None) if m.has_experts else (ours + "value_gate", ours + "value_proj")
    if m.has_gate:
        yield from _linear(theirs + "swilu_projection", gate, m.d_value, p.d_model)
    if m.has_projection:
        yield from _linear(theirs + "value_proj", projection, p.d_model, m.d_value)
    if m.has_output_gate:
        yield from _linear(theirs + "gating", ours + "output_gate", 1, p.d_model)


def _tensors(p):
    """(name in the checkpoint, shape there, name in our file or None) of all but tables."""
    d, n_query, n_kv = p.d_model, p.n_head * p.d_head, p.n_kv_head * p.d_head
    shapes = {"wq": (n_query, d), "wk": (n_kv, d), "wv": (n_kv, d), "wo": (d, n_query),
              "w1": (p.d_ff, d), "w2": (d, p.d_ff), "w3": (p.d_ff, d)}
    yield "tok_embeddings.weight", (p.n_vocab, d), "embeddings.weight"
    for i in range(p.n_layer):
        layer = "layers.%d." % i
        for norm in ("attention_norm", "ffn_norm"):
            yield layer + norm + ".weight", (d,), layer + norm + ".weight"
        for theirs, ours in ATTENTION:
            yield layer + "attention.%s.weight" % theirs, shapes[theirs], \
                layer + "attention.%s.weight" % ours
        if p.memory is not None and i in p.memory.layers:
            yield from _memory_tensors(p, i)
            continue
        for theirs, ours in NETWORK:
            yield layer + "feed_forward.%s.weight" % theirs, shapes[theirs], \
                layer + "ffn.%s.weight" % ours
    yield "norm.weight", (d,), "norm.weight"
    yield "output.weight", (p.n_vocab, d), "output.weight"


def _table_names(m):
    """(name in the checkpoint, name in our file) after those of the memory."""
    return (("values_v.weight", "values.weight"), ("values_u.weight", "experts.weight")) \
        if m.has_experts else (("values.weight", "values.weight"),)


def _tables(p, weights):
    """(name in the checkpoint, name in our file, None), or, of a copy that the checkpoint has too,
    (its name, None, that of the original)."""
    m = p.memory
    for theirs, ours in _table_names(m) if m else ():
        names = ["layers.%d.feed_forward.%s" % (i, theirs) for i in m.layers]
        n_owner = 1 if m.is_shared else len(names)
        for i, name in zip(m.layers[:n_owner], names):
            yield name, "memories.%d_in.%s" % (i, ours), None
        copies = [name for name in names[n_owner:] if name in weights]
        for name in names[n_owner:] if copies else ():
            if name not in weights:
                raise Refused("tensor '%s' is missing, though '%s' is there: a shared table is"
                              " expected under the first memory alone or under each"
                              % (name, copies[0]))
            yield name, None, names[0]


def _compare(shapes, weights):
    check_shapes(weights, shapes)
    for name in weights:
        if name not in shapes:
            raise Refused("tensor '%s' is not one that params.json calls for" % name)


def is_same(a, b):
    return a.storage.key == b.storage.key \
        and (a.offset, a.size, a.stride) == (b.offset, b.size, b.stride) \
        and (a.storage.begin, a.storage.numel) == (b.storage.begin, b.storage.numel)


def arrays(file, shapes, weights, copies):
    """name -> view of the file. None may share what the file holds, but a copy with its original.
    copies: {name: that of the original}"""
    found, taken = {}, {}
    for name in shapes:
        tensor = weights[name]
        try:
            array = file.array(tensor, brain=True)
        except Refused as fault:
            raise Refused("tensor '%s': %s" % (name, fault))
        if array.dtype.kind != "f":
            raise Refused("tensor '%s': floating point expected, got %s" % (name, array.dtype.name))
        if not (name in copies and is_same(tensor, weights[copies[name]])):
            key = tensor.storage.key
            taken[key] = taken.get(key, 0) + array.size
            if taken[key] > tensor.storage.root_numel:
                raise Refused("tensor '%s' shares its storage with another one" % name)
        found[name] = array
    return found


def _type_name(array):
    return "bfloat16" if isinstance(array, Brain) else array.dtype.name


def _bits(array, rows):
    if isinstance(array, Brain):
        return array.bits[rows]
    return np.ascontiguousarray(array[rows]).view("<u%d" % array.dtype.itemsize)


def check_copy(arrays, name, of, why="with mem_share_values they are one"):
    copy, kept = arrays[name], arrays[of]
    if _type_name(copy) != _type_name(kept):
        raise Refused("tensor '%s' is of %s, but '%s' of %s, and %s"
                      % (name, _type_name(copy), of, _type_name(kept), why))
    step = max(1, CHUNK // kept.shape[1])
    for i in range(0, kept.shape[0], step):
        rows = slice(i, i + step)
        same = (_bits(copy, rows) == _bits(kept, rows)).all(1)
        if not same.all():
            raise Refused("tensor '%s' differs from '%s' at row %d, but %s"
                          % (name, of, i + int(np.argmin(same)), why))


def _collect(file, p, weights):
    """[(name in our file, array)] and the names of the tables among them."""
    plan, tables = list(_tensors(p)), list(_tables(p, weights))
    shapes = {theirs: shape for theirs, shape, _ in plan}
    if p.memory is not None:
        table = (p.memory.n_key ** 2, p.memory.d_value)
        shapes.update((theirs, table) for theirs, _, _ in tables)
    _compare(shapes, weights)
    copies = {theirs: of for theirs, _, of in tables if of is not None}
    views = arrays(file, shapes, weights, copies)
    for theirs, of in copies.items():
        if not is_same(weights[theirs], weights[of]):
            check_copy(views, theirs, of)
    tensors = [(ours, views[theirs]) for theirs, _, ours in plan if ours is not None]
    for at, (name, array) in enumerate(tensors):
        if name.endswith(".keys"):
            m = p.memory
            tensors[at] = name, array.reshape((m.n_head, 2, m.n_key, m.d_key // 2))
    owned = [(ours, views[theirs]) for theirs, ours, _ in tables if ours is not None]
    return tensors + owned, [name for name, _ in owned]


# ---- config.json --------------------------------------------------------------------------------


def _entries(m):
    """The memories in config.json."""
    entries = []
    for index, layer in enumerate(m.layers if m else ()):
        entry = {"layer": layer, "n_head": m.n_head, "k_top": m.k_top, "n_key": m.n_key,
                 "d_key": m.d_key, "n_slot": m.n_key ** 2, "d_value": m.d_value}
        options = {"value_gate": m.has_gate and not m.has_experts,
                   "value_projection": m.has_projection and not m.has_experts,
                   "output_gate": m.has_output_gate, "experts": m.has_experts}
        entry.update((key, True) for key, value in options.items() if value)
        if m.is_shared and index > 0:
            entry["values_of"] = 0
        entries.append(entry)
    return entries


def _own_types(tables, arrays, dtype):
    """{name: dtype} of the tables that stay in the 16 bits of the file: the authors' have fp32 weights
    and bf16 tables, which would double for nothing."""
    own = {}
    for name in tables:
        kept = "bf16" if isinstance(arrays[name], Brain) \
            else "f16" if arrays[name].dtype.itemsize == 2 else dtype
        if kept != dtype:
            own[name] = kept
    return own


def _cast_vectors(tensors, dtype):
    """Vectors with the values that they have in dtype, to which the authors' loader casts all."""
    for name, array in tensors:
        if array.ndim == 1:
            with np.errstate(all="ignore"):  # what overflows is found when it is written
                coded, _ = safetensors_file.encode(np.ascontiguousarray(array[:], np.float32),
                                                   safetensors_file.NAMES[dtype])
            array = Brain(coded)[:] if dtype == "bf16" else coded.astype(np.float32)
        yield name, array


def read(file, settings, dtype):  # settings are read_text's
    """.config (config.json), .tensors [(name, array)], .own {name: dtype} of those that have one other
    than config's, .params. dtype: None for what the checkpoint computes with."""
    weights = _weights(file.root)
    folder = os.path.dirname(file.path)
    p = memory_layers_params.read(os.path.join(folder, memory_layers_params.NAME))
    p.folder = folder
    if p.n_vocab is None:
        p.n_vocab = _rows(weights, "tok_embeddings.weight", VOCAB_MAX, p.d_model)
    p.d_ff = _ff_width(p, weights)
    tensors, tables = _collect(file, p, weights)
    own = _own_types(tables, dict(tensors), p.dtype) if dtype is None else {}
    if dtype is None and p.dtype != "f32":
        tensors = list(_cast_vectors(tensors, p.dtype))
    config = {"model_type": "memory_llama", "vocab_size": p.n_vocab, "d_model": p.d_model,
              "n_layer": p.n_layer, "n_head": p.n_head, "n_kv_head": p.n_kv_head,
              "d_head": p.d_head, "d_ff": p.d_ff, "max_position": p.n_position,
              "rope_theta": p.rope_theta, "norm_eps": p.norm_eps, "tie_output": False,
              "dtype": dtype or p.dtype, "memories": _entries(p.memory)}
    return SimpleNamespace(config=config, tensors=tensors, own=own, params=p)


# ---- text ---------------------------------------------------------------------------------------


def _tokenizer(p, given):
    """(path, how messages call it) of the SentencePiece model or the rank file, or None. given:
    --tokenizer"""
    if given is not None:
        is_ranks = bpe_files.kind(given) is not None
        if p.tokenizer is not None and p.tokenizer != ("tiktoken" if is_ranks else "sp"):
            raise Refused("--tokenizer %s: %s, but data.tokenizer.name of params.json is %s" % (
                given, "byte-level BPE" if is_ranks else "a SentencePiece model", show(p.tokenizer)))
        return given, "--tokenizer"
    # Of its path only the name: the folders are those of the machine that trained.
    path = os.path.join(p.folder, os.path.basename(p.tokenizer_path or ""))
    is_there = p.tokenizer in ("sp", "tiktoken") and os.path.isfile(path)
    return (path, "data.tokenizer.path:") if is_there else None


def name_tokens(config, known, settings, settable):
    """The ids that begin and end a text; --set gives those that nothing tells."""
    config.update(known)
    for key in settable:
        if key not in settings:
            continue
        value = settings[key]
        if not isinstance(value, int) or isinstance(value, bool) \
                or not 0 <= value < config["vocab_size"]:
            raise Refused("--set %s: an integer 0..%d expected, got %s"
                          % (key, config["vocab_size"] - 1, show(value)))
        if config.setdefault(key, value) != value:
            raise Refused("--set %s=%d: the tokenizer says %d; --set gives only what a file lacks"
                          % (key, value, config[key]))
    if "bos_token_id" in config:
        config["add_bos"] = True


def read_text(model, tokenizer, settings):
    """Completes config with what text is read with. tokenizer: that of --tokenizer or None. Returns
    (bytes of vocab.txt or None, text_files.read_tokenizer's or None, why there is neither)."""
    p, config = model.params, model.config
    found = _tokenizer(p, tokenizer)
    if found is not None:
        read = text_files.read_tokenizer(found[0], p.n_vocab, found[1])
        name_tokens(config, read.ids, settings, SETTABLE)
        return None, read, None
    if p.tokenizer in (None, "bytes") and p.n_vocab == N_BYTE:
        name_tokens(config, BYTE_IDS, settings, SETTABLE)
        config["tokenizer"] = "byte"
        return "".join("%s\n" % word for word in [*range(256), "<s>", "</s>"]).encode(), None, None
    known = RANK_IDS.get(p.n_vocab, {}) if p.tokenizer == "tiktoken" else {}
    name_tokens(config, known, settings, SETTABLE)
    why = "--tokenizer gives its rank file" if p.tokenizer == "tiktoken" \
        else "--tokenizer gives its SentencePiece model" if p.tokenizer == "sp" \
        else "a bytes tokenizer has %d ids" % N_BYTE
    return None, None, why


def summary(config):
    c = config
    lines = ["memory layers, layers %d of %d, heads %d of %d (%d for keys and values), vocabulary %d,"
             " context %d, feed-forward networks of %d" % (
                 c["n_layer"], c["d_model"], c["n_head"], c["d_head"], c["n_kv_head"],
                 c["vocab_size"], c["max_position"], c["d_ff"])]
    return lines + memory_lines(c)


def memory_lines(config):
    lines, memories = [], config.get("memories", [])
    for m in memories:
        place = m.get("place", "in")
        parts = ["memory %slayer %d: %d x %d keys (%d slots of %d), heads %d, k = %d, queries of %d" % (
            "" if place == "in" else place + " ", m["layer"], m["n_key"], m["n_key"], m["n_slot"], m["d_value"], m["n_head"], m["k_top"],
            m["d_key"])]
        parts += [text for key, text in (
            ("experts", "slots are experts"), ("value_gate", "gated values"),
            ("value_projection", "projected values"), ("output_gate", "gated output"),
            ("input_norm", "normed input"), ("query_norm", "normed queries"),
            ("relu", "scores through ReLU")) if key in m]
        if "values_of" in m:
            parts.append("table of layer %d" % memories[m["values_of"]]["layer"])
        lines.append(", ".join(parts))
    return lines
