"""sparse-memory-lm: from the published set of files, or the trainer's model.pt, to config and tensors.

convert.py calls read() with an opened TorchFile: `rest.pt`, beside which the table stands in files of
its own, or `model.pt`, which holds everything. The model is one of memory layers at scale in its
"Memory+" form; what differs is told here and nowhere else:

  - attention's and the network's matrices are packed, and positions turn column j of a head with
    column j + width/2: the rows of queries and keys are put side by side, as the server turns them
  - batch norms of queries are folded into the queries' layer, in float64; their eps is PyTorch's
  - a learned scale of a head's scores is multiplied into its keys: it is positive, so that the same
    slots are chosen
  - embedding and output are one matrix, which rest.pt holds twice: both must be the same to the bit

The table of the published set has 4 bits a value: two codes a byte, and a scale for each row.
"""

import hashlib
import os
from types import SimpleNamespace

import numpy as np

import json_file
import memory_layers
import sparse_memory_lm_config
import text_files
from fault import Refused, show
from safetensors_file import Coded
from torch_file import Brain, Tensor, check_shapes

REST, WHOLE = "rest.pt", "model.pt"
Q4, SCALES, BF16, META = "values_q4.bin", "scales_q4.bin", "values_bf16.bin", "meta.json"
META_BYTES_MAX = 1 << 20
SETTABLE = ["eos_token_id"]
ADDON = "addon_cfg"
# The vocabulary of all models published or described: GPT-2's, padded.
GPT2_IDS = {50304: {"eos_token_id": 50256}, 50257: {"eos_token_id": 50256}}
BATCH_NORM_EPS = 1e-5  # PyTorch's default, whatever norm_eps is
HASH_CHUNK = 1 << 24
IGNORED = ".query_norm.num_batches_tracked"


def looks_like(root):
    """Whether a checkpoint's top level is the author's. That of his add-on to another model is his too, and
    read refuses it."""
    return isinstance(root, dict) and "state_dict" in root and ("model_config" in root or ADDON in root)


def source_in(folder):
    """The file of a folder that is opened, or None."""
    found = [name for name in (REST, WHOLE) if os.path.isfile(os.path.join(folder, name))]
    if len(found) > 1:
        raise Refused("holds both %s and %s: name the one to convert" % tuple(found))
    return os.path.join(folder, found[0]) if found else None


# ---- tensors ------------------------------------------------------------------------------------


def _memory_shapes(p):
    m = p.memory
    n_query = m.n_head * m.d_key
    yield "keys", (m.n_head, 2, m.n_key, m.d_key // 2)
    yield "query_proj.weight", (n_query, p.d_model)
    yield "query_proj.bias", (n_query,)
    for name in ("weight", "bias", "running_mean", "running_var") if m.has_norm else ():
        yield "query_norm." + name, (n_query,)
    if m.has_scale:
        yield "log_score_scale", (m.n_head,)
    if m.is_plus:
        yield "swilu_proj.weight", (m.d_value, p.d_model)
        yield "swilu_proj.bias", (m.d_value,)
        yield "value_proj.weight", (p.d_model, m.d_value)
        yield "value_proj.bias", (p.d_model,)


def _shapes(p):
    """{name in the checkpoint: shape} of all but tables."""
    d = p.d_model
    shapes = {"tok_emb.weight": (p.n_vocab, d), "lm_head.weight": (p.n_vocab, d), "norm.weight": (d,)}
    for i in range(p.n_layer):
        layer = "layers.%d." % i
        shapes.update({layer + "attn_norm.weight": (d,), layer + "ffn_norm.weight": (d,),
                       layer + "attn.wqkv.weight": (3 * d, d), layer + "attn.wo.weight": (d, d)})
        if i in p.layers:
            shapes.update((layer + "ffn." + name, shape) for name, shape in _memory_shapes(p))
        else:
            shapes.update({layer + "ffn.w13.weight": (2 * p.d_ff, d), layer + "ffn.w2.weight": (d, p.d_ff)})
    return shapes


def _table_names(p):
    return ["layers.%d.ffn.values.weight" % i for i in p.layers]


def _check_names(weights, shapes):
    for name, tensor in weights.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise Refused("state_dict: tensors by name expected, got %s = %s" % (show(name), show(tensor)))
        if name not in shapes and not name.endswith(IGNORED):
            raise Refused("tensor '%s' is not one that model_config calls for" % name)
    check_shapes(weights, shapes)


def _arrays(file, weights, shapes, copies):
    """{name: view of the file}; copies: {name: that of the original}, the same to the bit. No other two
    may share what the file holds."""
    arrays = memory_layers.arrays(file, shapes, weights, copies)
    for name, of in copies.items():
        if not memory_layers.is_same(weights[name], weights[of]):
            memory_layers.check_copy(arrays, name, of, "the model has one of both")
    return arrays


# ---- the table ----------------------------------------------------------------------------------


def _mapped(folder, name, dtype, n, why):
    path = os.path.join(folder, name)
    size, due = os.path.getsize(path), n * np.dtype(dtype).itemsize
    if size != due:
        raise Refused("%s has %d bytes, expected are %d: %s" % (name, size, due, why))
    return np.memmap(path, dtype, "r", shape=(n,))


def _check_sums(folder, read):
    """meta.json has the sums of files, of those that are read too. What else it says was noted when they were made:
    table_shape, and the sizes of the files, are what counts."""
    if not os.path.isfile(os.path.join(folder, META)):
        return
    sums = json_file.load(os.path.join(folder, META), META_BYTES_MAX).get("sha256", {})
    if not isinstance(sums, dict):
        raise Refused("%s: sha256: an object expected, got %s" % (META, show(sums)))
    for name in read:
        if name not in sums:
            continue
        found = hashlib.sha256()
        with open(os.path.join(folder, name), "rb") as file:
            for piece in iter(lambda: file.read(HASH_CHUNK), b""):
                found.update(piece)
        if found.hexdigest() != sums[name]:
            raise Refused("%s: its SHA-256 is %s, %s says %s (damaged, or of another model)"
                          % (name, found.hexdigest(), META, show(sums[name])))


def _published_table(root, p, folder):
    """The table beside rest.pt. It belongs to one memory, or to several that share it."""
    names, m = _table_names(p), p.memory
    if not isinstance(root.get("table_keys"), list) or sorted(map(str, root["table_keys"])) != sorted(names):
        raise Refused("table_keys: %s expected by mem_layers, got %s"
                      % (show(names), show(root.get("table_keys"))))
    if len(names) > 1 and not m.is_shared:
        raise Refused("mem_share_values is false, but one table stands beside %s for %d memories"
                      % (REST, len(names)))
    rows, dim = m.n_key ** 2, m.d_value
    shape = root.get("table_shape")
    if not isinstance(shape, (list, tuple)) or list(shape) != [rows, dim]:
        raise Refused("table_shape: [%d, %d] expected by model_config, got %s" % (rows, dim, show(shape)))
    why = "%d rows of %d columns" % (rows, dim)
    there = [name for name in (Q4, SCALES, BF16) if os.path.isfile(os.path.join(folder, name))]
    if Q4 not in there and BF16 in there:
        _check_sums(folder, [REST, BF16])
        return Brain(_mapped(folder, BF16, "<u2", rows * dim, why).reshape(rows, dim))
    for name in (Q4, SCALES):
        if name not in there:
            raise Refused("%s is not beside %s: the table is %s with %s, or %s"
                          % (name, REST, Q4, SCALES, BF16))
    if dim % 2:
        raise Refused("%s: rows of %d columns have no two halves" % (Q4, dim))
    codes = _mapped(folder, Q4, np.uint8, rows * dim // 2, why).reshape(rows, dim // 2)
    scales = _mapped(folder, SCALES, "<f2", rows, why)
    bad = ~np.isfinite(scales)
    if bad.any():
        raise Refused("%s: the scale of row %d is %s" % (SCALES, int(np.argmax(bad)), scales[bad][0]))
    _check_sums(folder, [REST, Q4, SCALES])
    return Coded(codes, scales)


# ---- what the server has ------------------------------------------------------------------------


def _double(array):
    return np.asarray(array[:], np.float64)


def _turned(rows, n_head):
    """Rows of queries or keys, of which the server turns neighbours: j and j + width/2 side by side."""
    width = rows.shape[0] // n_head
    order = np.arange(width).reshape(2, width // 2).T.ravel()
    return rows[:].reshape(n_head, width, -1)[:, order].reshape(rows.shape)


def _queries(arrays, theirs, m):
    """Weight and bias of the queries' layer, the batch norm folded in."""
    weight, bias = _double(arrays[theirs + "query_proj.weight"]), _double(arrays[theirs + "query_proj.bias"])
    if m.has_norm:
        gain, shift, mean, variance = (_double(arrays[theirs + "query_norm." + name])
                                       for name in ("weight", "bias", "running_mean", "running_var"))
        if not (variance >= 0).all():
            raise Refused("tensor '%squery_norm.running_var' holds %g; a variance cannot be negative"
                          % (theirs, variance.min()))
        gain = gain / np.sqrt(variance + BATCH_NORM_EPS)
        weight, bias = weight * gain[:, None], (bias - mean) * gain + shift
    with np.errstate(all="ignore"):  # what overflows is found when it is written
        return weight.astype(np.float32), bias.astype(np.float32)


def _keys(arrays, theirs, m):
    keys = arrays[theirs + "keys"]
    if not m.has_scale:
        return keys
    with np.errstate(all="ignore"):
        scale = np.exp(_double(arrays[theirs + "log_score_scale"]))
        return (_double(keys) * scale[:, None, None, None]).astype(np.float32)


def _tensors(p, arrays):
    """(name in our file, array) of all but tables."""
    d, ff = p.d_model, p.d_ff
    yield "embeddings.weight", arrays["tok_emb.weight"]
    for i in range(p.n_layer):
        layer, theirs, memory = "layers.%d." % i, "layers.%d.ffn." % i, "memories.%d_in." % i
        packed = arrays[layer + "attn.wqkv.weight"]
        yield layer + "attention_norm.weight", arrays[layer + "attn_norm.weight"]
        yield layer + "attention.query.weight", _turned(packed[:d], p.n_head)
        yield layer + "attention.key.weight", _turned(packed[d:2 * d], p.n_head)
        yield layer + "attention.value.weight", packed[2 * d:]
        yield layer + "attention.out.weight", arrays[layer + "attn.wo.weight"]
        yield layer + "ffn_norm.weight", arrays[layer + "ffn_norm.weight"]
        if i not in p.layers:
            yield layer + "ffn.gate.weight", arrays[theirs + "w13.weight"][:ff]
            yield layer + "ffn.up.weight", arrays[theirs + "w13.weight"][ff:]
            yield layer + "ffn.down.weight", arrays[theirs + "w2.weight"]
            continue
        weight, bias = _queries(arrays, theirs, p.memory)
        yield memory + "keys", _keys(arrays, theirs, p.memory)
        yield memory + "query_proj.query_mlps.0.weight", weight
        yield memory + "query_proj.query_mlps.0.bias", bias
        for name, ours in (("swilu_proj", "value_gate"), ("value_proj", "value_proj")):
            if p.memory.is_plus:
                yield memory + ours + ".weight", arrays[theirs + name + ".weight"]
                yield memory + ours + ".bias", arrays[theirs + name + ".bias"]
    yield "norm.weight", arrays["norm.weight"]


def _entries(p):
    """The memories in config.json."""
    m = p.memory
    for index, layer in enumerate(p.layers):
        entry = {"layer": layer, "n_head": m.n_head, "k_top": m.k_top, "n_key": m.n_key,
                 "d_key": m.d_key, "n_slot": m.n_key ** 2, "d_value": m.d_value}
        if m.is_plus:
            entry.update(value_gate=True, value_projection=True)
        if m.is_shared and index > 0:
            entry["values_of"] = 0
        yield entry


def read(file, settings, dtype):  # settings are read_text's
    """.config (config.json), .tensors [(name, array)], .own {name: dtype} of those that have one other
    than config's, .params. dtype: None for that of the files."""
    root = file.root
    if not looks_like(root) or not isinstance(root["state_dict"], dict):
        raise Refused("not a file of sparse-memory-lm: a dictionary with 'model_config' and 'state_dict'"
                      " expected, got %s" % show(root))
    if "model_config" not in root:
        raise Refused("'model_config' is missing: with '%s' this is an add-on to another model, which is"
                      " not served" % ADDON)
    p = sparse_memory_lm_config.read(root["model_config"])
    weights, shapes = root["state_dict"], _shapes(p)
    tables, copies = _table_names(p), {"lm_head.weight": "tok_emb.weight"}
    is_set = "table_shape" in root or "table_keys" in root
    if not is_set:
        shapes.update((name, (p.memory.n_key ** 2, p.memory.d_value)) for name in tables)
        if p.memory and p.memory.is_shared:
            copies.update((name, tables[0]) for name in tables[1:])
    _check_names(weights, shapes)
    arrays = _arrays(file, weights, shapes, copies)
    tensors = list(_tensors(p, arrays))
    owners = [] if p.memory is None else p.layers[:1] if p.memory.is_shared else p.layers
    for layer, table in zip(owners, tables):
        found = _published_table(root, p, os.path.dirname(file.path) or ".") if is_set else arrays[table]
        tensors.append(("memories.%d_in.values.weight" % layer, found))
    own = {name: kind for name, array in tensors if dtype is None
           for kind in [array.own_dtype if isinstance(array, Coded) else
                        "bf16" if isinstance(array, Brain) else None] if kind}
    config = {"model_type": "memory_llama", "vocab_size": p.n_vocab, "d_model": p.d_model,
              "n_layer": p.n_layer, "n_head": p.n_head, "n_kv_head": p.n_head,
              "d_head": p.d_model // p.n_head, "d_ff": p.d_ff, "max_position": p.n_position,
              "rope_theta": p.rope_theta, "norm_eps": p.norm_eps, "tie_output": True,
              "dtype": dtype or "f32", "memories": list(_entries(p))}
    return SimpleNamespace(config=config, tensors=tensors, own=own, params=p)


def read_text(model, tokenizer, settings):
    """Completes config with what ends a text: nothing begins one. tokenizer: that of --tokenizer or None.
    Returns (text_files.read_tokenizer's or None, why there is none)."""
    config = model.config
    read = None if tokenizer is None else text_files.read_tokenizer(tokenizer, config["vocab_size"])
    known = read.ids if read else GPT2_IDS.get(config["vocab_size"], {})
    known = {key: known[key] for key in SETTABLE if key in known}
    memory_layers.name_tokens(config, known, settings, SETTABLE)
    return read, None if read else "--tokenizer gives GPT-2's vocab.json or tokenizer.json"
