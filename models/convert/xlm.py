"""XLM causal language models with product-key memories: from a checkpoint to config and tensors.

convert.py calls read() with an opened TorchFile and gets what the model directory holds. The
names and shapes that a file must have are derived from its params (xlm_params.py) before a single
weight is looked at, and the two are compared by name: nothing is guessed from what happens to be
there, except the sizes the original itself takes from a tensor (positions, number of keys).
"""

from types import SimpleNamespace

import xlm_memory
import xlm_params
from fault import Refused, show
from torch_file import Tensor, check_shapes

LAYER_LINEARS = ("q_lin", "k_lin", "v_lin", "out_lin")
POSITION_MAX = 1 << 20


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


def _linear(shapes, name, n_out, n_in, bias=True):
    shapes[name + ".weight"] = (n_out, n_in)
    if bias:
        shapes[name + ".bias"] = (n_out,)


def _norm(shapes, name, n):
    shapes[name + ".weight"] = shapes[name + ".bias"] = (n,)


def _expect(p, weights):
    """Every tensor a file with these params has, with its shape; and the memories' config."""
    shapes = {"embeddings.weight": (p.n_vocab, p.d_model)}
    position = xlm_memory.size_of(weights, "position_embeddings.weight")
    n_position = position[0] if len(position) == 2 else 0
    if not 1 <= n_position <= POSITION_MAX:
        raise Refused("tensor 'position_embeddings.weight': shape [1..%d, %d] expected, got %s"
                      % (POSITION_MAX, p.d_model, show(list(position))))
    shapes["position_embeddings.weight"] = (n_position, p.d_model)
    if p.languages:
        shapes["lang_embeddings.weight"] = (len(p.languages), p.d_model)
    _norm(shapes, "layer_norm_emb", p.d_model)
    places = p.memory.places if p.memory else []
    left_over = [name for name in weights if name.startswith("memories.")]
    if left_over and not places:
        raise Refused("tensor '%s' is of a memory, but params.use_memory is false or"
                      " params.mem_enc_positions empty" % left_over[0])
    for i in range(p.n_layer):
        for part in LAYER_LINEARS:
            _linear(shapes, "attentions.%d.%s" % (i, part), p.d_model, p.d_model)
        _norm(shapes, "layer_norm1.%d" % i, p.d_model)
        if (i, False) not in places:
            _linear(shapes, "ffns.%d.lin1" % i, 4 * p.d_model, p.d_model)
            _linear(shapes, "ffns.%d.lin2" % i, p.d_model, 4 * p.d_model)
        _norm(shapes, "layer_norm2.%d" % i, p.d_model)
    memories = [xlm_memory.expect(shapes, weights, p, index) for index in range(len(places))]
    if not p.cutoffs:
        _linear(shapes, "pred_layer.proj", p.n_vocab, p.d_model)
        return shapes, memories
    _linear(shapes, "pred_layer.proj.head", p.cutoffs[0] + len(p.cutoffs), p.d_model)
    for i, (first, end) in enumerate(zip(p.cutoffs, [*p.cutoffs[1:], p.n_vocab])):
        tail = "pred_layer.proj.tail.%d." % i
        _linear(shapes, tail + "0", p.widths[i], p.d_model, bias=False)
        _linear(shapes, tail + "1", end - first, p.widths[i], bias=False)
    return shapes, memories


def _compare(shapes, weights):
    check_shapes(weights, shapes)
    for name in weights:
        counter = name.endswith(".num_batches_tracked") and \
            name[:-len("num_batches_tracked")] + "running_mean" in shapes
        if name not in shapes and not counter:  # BatchNorm counts its batches: no use for that
            raise Refused("tensor '%s' is not one that params call for" % name)


def _arrays(file, shapes, weights, p):
    """name -> view of the file. No storage may be asked for more than it holds."""
    arrays, taken = {}, {}
    for name in shapes:
        tensor = weights[name]
        try:
            array = file.array(tensor)
        except Refused as fault:
            raise Refused("tensor '%s': %s" % (name, fault))
        kind = "i" if name.endswith(xlm_memory.MAP) else "f"
        if array.dtype.kind != kind:
            raise Refused("tensor '%s': %s expected, got %s" % (
                name, "integers" if kind == "i" else "floating point", array.dtype.name))
        key = tensor.storage.key
        tied = name == "pred_layer.proj.weight" and key == weights["embeddings.weight"].storage.key
        shared = key in taken and xlm_memory.is_shared_table(p, name, taken[key][0])
        first, size = taken.get(key, (name, 0))
        taken[key] = (first, size + (0 if tied or shared else array.size))
        if taken[key][1] > tensor.storage.root_numel:
            raise Refused("tensor '%s' shares its storage with another one; only the output and"
                          " the embeddings may, and values with mem_share_values" % name)
        arrays[name] = array
    return arrays


def read(file, settings, dtype):
    """.config (config.json), .tensors [(name, array)], .words (or None) of the model; .advice: lines
    for the summary."""
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
    arrays = _arrays(file, shapes, weights, p)
    if p.tie_output:
        xlm_memory.drop_copy(arrays, "pred_layer.proj.weight", "embeddings.weight",
                             "share_inout_emb")
    if memories:
        xlm_memory.arrange(arrays, p, memories)
    config = {
        "model_type": "pkm_transformer", "vocab_size": p.n_vocab, "d_model": p.d_model,
        "n_layer": p.n_layer, "n_head": p.n_head, "d_ff": 4 * p.d_model,
        "max_position": shapes["position_embeddings.weight"][0],
        "activation": "gelu" if p.gelu else "relu", "norm_eps": 1e-12, "tie_output": p.tie_output,
        "bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 2, "unk_token_id": 3,
        "add_bos": True, "dtype": dtype or "f32",
    }
    if p.cutoffs:
        config["adaptive_cutoffs"], config["adaptive_widths"] = p.cutoffs, p.widths
    if p.languages:
        config["languages"] = p.languages
    config["memories"] = memories
    advice = ["The perplexity that XLM's evaluator prints: pkmserve score --windows xlm --bptt %d FILE"
              % p.bptt] if p.bptt else []
    return SimpleNamespace(config=config, tensors=list(arrays.items()), words=words, own={},
                           advice=advice)
