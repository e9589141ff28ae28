"""XLM causal language models with product-key memories: from a checkpoint to config and tensors.

convert.py calls read() with an opened TorchFile and gets what the model directory holds. The
names and shapes that a file must have are derived from its params (xlm_params.py) before a single
weight is looked at, and the two are compared by name: nothing is guessed from what happens to be
there, except the sizes the original itself takes from a tensor (positions, number of keys).
"""

from types import SimpleNamespace

import numpy as np

import xlm_params
from fault import Refused, show
from torch_file import Tensor

LAYER_LINEARS = ("q_lin", "k_lin", "v_lin", "out_lin")
POSITION_MAX = 1 << 20
CHUNK_ROWS = 4096


def looks_like(root):
    """Whether a checkpoint's top level is XLM's, of any kind of model."""
    return isinstance(root, dict) and ("params" in root or "dico_id2word" in root)


def _state_dict(root):
    """The weights by name, without the prefix of data-parallel training."""
    for name in ("encoder", "decoder"):
        if name in root and "model" not in root:
            raise Refused("'%s' instead of 'model': a translation model, not a language model"
                          % name)
    weights = root.get("model")
    if not isinstance(weights, dict):
        raise Refused("'model': a state dict expected, got %s" % show(weights))
    for name, tensor in weights.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise Refused("model: tensors by name expected, got %s = %s"
                          % (show(name), show(tensor)))
    if weights and all(name.startswith("module.") for name in weights):
        return {name[len("module."):]: tensor for name, tensor in weights.items()}
    return dict(weights)


def _size(weights, name):
    """The claimed size of a tensor from which a dimension is taken."""
    if name not in weights:
        raise Refused("tensor '%s' is missing" % name)
    return weights[name].size


def _linear(shapes, name, n_out, n_in, bias=True):
    shapes[name + ".weight"] = (n_out, n_in)
    if bias:
        shapes[name + ".bias"] = (n_out,)


def _norm(shapes, name, n):
    shapes[name + ".weight"] = shapes[name + ".bias"] = (n,)


def _check_keys(m, name, size):
    """n_key and n_slot of a memory, from the shape of its keys and what params repeat of it."""
    dims = 3 if m.flat else 4
    if len(size) != dims:
        raise Refused("tensor '%s': %d dimensions expected, got shape %s"
                      % (name, dims, show(list(size))))
    n_key = size[-2]
    if not isinstance(n_key, int) or not 1 <= n_key <= 1 << 24:
        raise Refused("tensor '%s': shape %s" % (name, show(list(size))))
    n_slot = n_key if m.flat else n_key * n_key
    for field, due in (("mem_n_keys", n_key), ("n_indices", n_slot), ("mem_size", n_slot)):
        if m.sizes[field] is not None and m.sizes[field] != due:
            raise Refused("params.%s: %s, but tensor '%s' has %d keys (%d expected)"
                          % (field, show(m.sizes[field]), name, n_key, due))
    if m.k_top > n_key:
        raise Refused("params.mem_knn: %d is more than the %d keys of tensor '%s'"
                      % (m.k_top, n_key, name))
    return n_key, n_slot


def _memory(shapes, weights, p, layer, after):
    """Adds the tensors of one memory to shapes and returns its entry of config.json."""
    m = p.memory
    name = "memories.%d_%s" % (layer, "after" if after else "in")
    n_key, n_slot = _check_keys(m, name + ".keys", _size(weights, name + ".keys"))
    shapes[name + ".keys"] = (m.n_head, n_key, m.d_key) if m.flat \
        else (m.n_head, 2, n_key, m.d_key // 2)
    shapes[name + ".values.weight"] = (n_slot, p.d_model)
    query = name + ".query_proj.query_mlps."
    n_out = m.n_head * m.d_key
    _linear(shapes, query + "0", n_out, p.d_model, m.query_bias)
    if m.batch_norm:
        _norm(shapes, query + "1", n_out)
        shapes[query + "1.running_mean"] = shapes[query + "1.running_var"] = (n_out,)
    return {"layer": layer, "place": "after" if after else "in",
            "kind": "flat" if m.flat else "product", "n_head": m.n_head, "k_top": m.k_top,
            "n_key": n_key, "d_key": m.d_key, "n_slot": n_slot,
            "query_batch_norm": m.batch_norm, "query_bias": m.query_bias}


def _expect(p, weights):
    """Every tensor a file with these params has, with its shape; and the memories' config."""
    shapes = {"embeddings.weight": (p.n_vocab, p.d_model)}
    position = _size(weights, "position_embeddings.weight")
    n_position = position[0] if len(position) == 2 else 0
    if not isinstance(n_position, int) or not 1 <= n_position <= POSITION_MAX:
        raise Refused("tensor 'position_embeddings.weight': shape [1..%d, %d] expected, got %s"
                      % (POSITION_MAX, p.d_model, show(list(position))))
    shapes["position_embeddings.weight"] = (n_position, p.d_model)
    if p.languages:
        shapes["lang_embeddings.weight"] = (len(p.languages), p.d_model)
    _norm(shapes, "layer_norm_emb", p.d_model)
    places = p.memory.places if p.memory else []
    for i in range(p.n_layer):
        for part in LAYER_LINEARS:
            _linear(shapes, "attentions.%d.%s" % (i, part), p.d_model, p.d_model)
        _norm(shapes, "layer_norm1.%d" % i, p.d_model)
        if (i, False) not in places:
            _linear(shapes, "ffns.%d.lin1" % i, 4 * p.d_model, p.d_model)
            _linear(shapes, "ffns.%d.lin2" % i, p.d_model, 4 * p.d_model)
        _norm(shapes, "layer_norm2.%d" % i, p.d_model)
    memories = [_memory(shapes, weights, p, layer, after) for layer, after in places]
    _linear(shapes, "pred_layer.proj", p.n_vocab, p.d_model)
    return shapes, memories


def _compare(shapes, weights):
    for name, shape in shapes.items():
        if name not in weights:
            raise Refused("tensor '%s' is missing (shape %s expected)" % (name, show(list(shape))))
        if weights[name].size != shape:
            raise Refused("tensor '%s': shape %s expected, got %s"
                          % (name, show(list(shape)), show(list(weights[name].size))))
    for name in weights:
        counter = name.endswith(".num_batches_tracked") and \
            name[:-len("num_batches_tracked")] + "running_mean" in shapes
        if name not in shapes and not counter:  # BatchNorm counts its batches: no use for that
            raise Refused("tensor '%s' is not one that params call for" % name)


def _arrays(file, shapes, weights):
    """name -> view of the file. No storage may be asked for more than it holds."""
    arrays, taken = {}, {}
    for name in shapes:
        tensor = weights[name]
        try:
            array = file.array(tensor)
        except Refused as fault:
            raise Refused("tensor '%s': %s" % (name, fault))
        if array.dtype.kind != "f":
            raise Refused("tensor '%s': floating point expected, got %s" % (name, array.dtype.name))
        taken[tensor.storage.key] = taken.get(tensor.storage.key, 0) + array.size
        tied = name == "pred_layer.proj.weight" \
            and tensor.storage.key == weights["embeddings.weight"].storage.key
        if taken[tensor.storage.key] > tensor.storage.root_numel and not tied:
            raise Refused("tensor '%s' shares its storage with another one; only the output and"
                          " the embeddings may" % name)
        arrays[name] = array
    return arrays


def _drop_tied_output(arrays):
    """With share_inout_emb the file repeats the embeddings as output weights; the copy goes."""
    output, embeddings = arrays.pop("pred_layer.proj.weight"), arrays["embeddings.weight"]
    for i in range(0, len(embeddings), CHUNK_ROWS):
        same = output[i:i + CHUNK_ROWS] == embeddings[i:i + CHUNK_ROWS]
        if not np.all(same | np.isnan(embeddings[i:i + CHUNK_ROWS])):  # NaN has its own message
            raise Refused("tensor 'pred_layer.proj.weight' differs from 'embeddings.weight' at row"
                          " %d, but params.share_inout_emb is true" % (i + np.argmin(same.all(1))))


def read(file, settings, dtype):
    """.config (config.json), .tensors [(name, array)], .words (or None) of the model."""
    root = file.root
    if not looks_like(root):
        raise Refused("not an XLM checkpoint: a dictionary with 'model', 'params', 'dico_id2word'"
                      " expected, got %s" % show(root))
    weights = _state_dict(root)
    if "params" not in root:
        raise Refused("'params' is missing")
    p = xlm_params.read(root["params"], settings)
    words = xlm_params.read_words(root, p.n_vocab)
    shapes, memories = _expect(p, weights)
    _compare(shapes, weights)
    arrays = _arrays(file, shapes, weights)
    if p.tie_output:
        _drop_tied_output(arrays)
    config = {
        "model_type": "pkm_transformer", "vocab_size": p.n_vocab, "d_model": p.d_model,
        "n_layer": p.n_layer, "n_head": p.n_head, "d_ff": 4 * p.d_model,
        "max_position": shapes["position_embeddings.weight"][0],
        "activation": "gelu" if p.gelu else "relu", "norm_eps": 1e-12, "tie_output": p.tie_output,
        "bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 2, "unk_token_id": 3,
        "add_bos": True, "dtype": dtype,
    }
    if p.languages:
        config["languages"] = p.languages
    config["memories"] = memories
    return SimpleNamespace(config=config, tensors=list(arrays.items()), words=words)
