"""The all-attention network and the adaptive-span transformer: from a checkpoint to config and tensors.

convert.py calls read() with an opened TorchFile. The authors' files (facebookresearch/adaptive-span)
hold no hyper-parameters: sizes follow from the tensors' shapes, which are then all compared; the one
number that no shape tells, over how many distances a span ends, is the authors' default unless --set
gives it. The factors that their code applies to persistent vectors (keys times the square root of a
head's width, values times that of their number) are applied here, so that the served tensors are
keys and values like any other. So are the products of matrices that nothing stands between: adaptive
input becomes a table of whole rows, and the head of an adaptive softmax one matrix.
"""

from types import SimpleNamespace

import numpy as np

from fault import Refused, show
from torch_file import Tensor, check_shapes

RAMP = 32
SETTABLE = ["adapt_span_ramp", "vocab_kind"]
VOCAB_KINDS = ["byte", "char", "word"]
CLUSTER_MAX = 16
LAYER_MAX, VOCAB_MAX, WIDTH_MAX, FF_MAX, SPAN_MAX = 1024, 1 << 24, 1 << 16, 1 << 20, 1 << 20
# Second names of what a layer's attention shares with its persistent vectors, and a constant.
IGNORED = (".attn.attn.persistent_memory.adaptive_span._mask.current_val",
           ".attn.attn.persistent_memory.adaptive_span._mask.mask_template",
           ".attn.attn.adaptive_span._mask.mask_template")
TIED = {"emb_layers": "out_emb.out_layers.", "emb_projs": "out_emb.out_projs."}
LINE_END, UNKNOWN = "<eos>", "<unk>"


def looks_like(root):
    """Whether a checkpoint's top level is that of the authors' training script."""
    return isinstance(root, dict) and "model" in root and "iter_no" in root \
        and "params" not in root


def _weights(root):
    """The weights by name, without the prefix of data-parallel training."""
    weights = root.get("model")
    if not isinstance(weights, dict) or not weights:
        raise Refused("'model': a state dict expected, got %s" % show(weights))
    for name, tensor in weights.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise Refused("model: tensors by name expected, got %s = %s"
                          % (show(name), show(tensor)))
    if all(name.startswith("module.") for name in weights):
        return {name[len("module."):]: tensor for name, tensor in weights.items()}
    return dict(weights)


def _dims(weights, name, n_dim):
    """The claimed shape of a tensor from which sizes are taken."""
    if name not in weights:
        raise Refused("tensor '%s' is missing" % name)
    size = weights[name].size
    if len(size) != n_dim:
        raise Refused("tensor '%s': %d dimensions expected, got shape %s"
                      % (name, n_dim, show(list(size))))
    if 0 in size:
        raise Refused("tensor '%s': sizes of 1 or more expected, got shape %s"
                      % (name, show(list(size))))
    return size


def _bound(what, value, most):
    if value > most:
        raise Refused("%s is %d, at most %d are served" % (what, value, most))
    return value


def _ramp(settings):
    value = settings.get("adapt_span_ramp", RAMP)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= SPAN_MAX:
        raise Refused("--set adapt_span_ramp: an integer 1..%d expected, got %s"
                      % (SPAN_MAX, show(value)))
    return value


def _clusters(weights):
    """Of adaptive input and softmax: words and width of each cluster; none without."""
    rows, widths = [], []
    while "out_emb.out_layers.%d.weight" % len(rows) in weights:
        n_row, width = _dims(weights, "out_emb.out_layers.%d.weight" % len(rows), 2)
        rows.append(n_row)
        widths.append(width)
        _bound("the number of clusters", len(rows), CLUSTER_MAX)
    if len(rows) == 1:
        raise Refused("tensor 'out_emb.out_layers.1.weight' is missing: an adaptive softmax has two"
                      " clusters or more")
    return rows, widths


def _sizes(weights):
    """What the shapes say. .shapes: every tensor the file must have, by its name there."""
    one, d_head, span = _dims(weights, "key_pe", 3)
    rows, widths = _clusters(weights)
    n_vocab, d_model = (sum(rows), widths[0]) if rows else _dims(weights, "in_emb.weight", 2)
    if one != 1 or d_model % d_head != 0:
        raise Refused("tensor 'key_pe': shape [1, width of a head, span] expected where heads divide"
                      " %d columns, got %s" % (d_model, show([one, d_head, span])))
    p = SimpleNamespace(
        n_vocab=_bound("the vocabulary", n_vocab, VOCAB_MAX),
        d_model=_bound("the width", d_model, WIDTH_MAX), d_head=d_head,
        n_head=_bound("the number of heads", d_model // d_head, LAYER_MAX),
        span=_bound("attn_span", span, SPAN_MAX), n_layer=0, n_persistent=0, d_ff=0,
        rows=rows, widths=widths)
    while "layers.%d.attn.proj_query.weight" % p.n_layer in weights:
        p.n_layer = _bound("the number of layers", p.n_layer + 1, LAYER_MAX)
    if p.n_layer == 0:
        raise Refused("tensor 'layers.0.attn.proj_query.weight' is missing")
    keys = "layers.0.attn.attn.persistent_memory.key"
    if keys in weights:
        p.n_persistent = _bound("pers_mem_size", _dims(weights, keys, 3)[2], SPAN_MAX)
    else:
        p.d_ff = _bound("inner_hid_sz", _dims(weights, "layers.0.ff.fc1.weight", 2)[0], FF_MAX)
    p.is_adaptive = "layers.0.attn.attn.adaptive_span._mask.current_val" in weights
    return p


def _shapes(p):
    """Every tensor a file of these sizes has, by its name there."""
    d = p.d_model
    shapes = {"key_pe": (1, p.d_head, p.span)}
    if p.rows:
        shapes["out_emb.cluster_proj.weight"] = (len(p.rows) - 1, d)
        shapes["out_emb.cluster_proj.bias"] = (len(p.rows) - 1,)
    else:
        shapes["in_emb.weight"] = shapes["out_emb.weight"] = (p.n_vocab, d)
        shapes["out_emb.bias"] = (p.n_vocab,)
    for i, (rows, width) in enumerate(zip(p.rows, p.widths)):
        shapes["in_emb.emb_layers.%d.weight" % i] = (rows, width)
        shapes["in_emb.emb_projs.%d" % i] = (d, width)
        shapes["out_emb.out_layers.%d.weight" % i] = (rows, width)
        shapes["out_emb.out_layers.%d.bias" % i] = (rows,)
        shapes["out_emb.out_projs.%d" % i] = (d, width)
    for i in range(p.n_layer):
        layer = "layers.%d." % i
        for name in ("query", "key", "val", "out"):
            shapes["%sattn.proj_%s.weight" % (layer, name)] = (d, d)
        shapes[layer + "norm1.weight"] = shapes[layer + "norm1.bias"] = (d,)
        inside = layer + "attn.attn."
        if p.n_persistent:
            shapes[inside + "persistent_memory.key"] = (p.n_head, p.d_head, p.n_persistent)
            shapes[inside + "persistent_memory.val"] = (p.n_head, p.n_persistent, p.d_head)
        else:
            shapes[layer + "ff.fc1.weight"] = (p.d_ff, d)
            shapes[layer + "ff.fc1.bias"] = (p.d_ff,)
            shapes[layer + "ff.fc2.weight"] = (d, p.d_ff)
            shapes[layer + "ff.fc2.bias"] = shapes[layer + "norm2.weight"] = (d,)
            shapes[layer + "norm2.bias"] = (d,)
        if p.is_adaptive:
            shapes[inside + "adaptive_span._mask.current_val"] = (p.n_head, 1, 1)
    return shapes


def _is_tied(name, weights):
    """Whether a tensor of an adaptive input is that of the softmax too, which the authors allow."""
    part = name.split(".", 2)
    if part[0] != "in_emb" or part[1] not in TIED:
        return False
    twin = weights.get(TIED[part[1]] + part[2])
    return twin is not None and twin.storage.key == weights[name].storage.key


def _arrays(file, shapes, weights):
    """name -> view of the file, after its shape was compared. No two share what a file holds."""
    for name in weights:
        if name not in shapes and not name.endswith(IGNORED):
            raise Refused("tensor '%s' is not one that the others' shapes call for" % name)
    check_shapes(weights, shapes)
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
        if _is_tied(name, weights):
            taken[tensor.storage.key] -= array.size
        if taken[tensor.storage.key] > tensor.storage.root_numel:
            raise Refused("tensor '%s' shares its storage with another one" % name)
        arrays[name] = array
    return arrays


class Products:
    """factor · a·b of each pair (a, b), one below the other, in F32, summed in F64. Rows are computed
    when a slice asks for them, as writing does: the whole may be far larger than the file."""

    ndim, dtype = 2, np.dtype(np.float32)

    def __init__(self, pairs, factor=1.0):
        self.pairs = [(a, factor * b.astype(np.float64)) for a, b in pairs]
        self.shape = (sum(len(a) for a, _ in pairs), pairs[0][1].shape[1])
        self.size = self.shape[0] * self.shape[1]

    def __getitem__(self, rows):
        first, stop, _ = rows.indices(self.shape[0])
        out, at = [], 0
        for a, b in self.pairs:
            part = a[max(first - at, 0):max(stop - at, 0)]
            with np.errstate(all="ignore"):  # what is not finite is found when it is written
                out.append((part.astype(np.float64) @ b).astype(np.float32))
            at += len(a)
        return np.concatenate(out)


def _adaptive(p, arrays):
    """Embeddings and output of a model with adaptive input and softmax."""
    yield "embeddings.weight", Products([
        (arrays["in_emb.emb_layers.%d.weight" % i], arrays["in_emb.emb_projs.%d" % i].T)
        for i in range(len(p.rows))], p.d_model ** 0.5)
    # The clusters' entries stand in reverse order in the file.
    yield "output.head.weight", Products([
        (part, arrays["out_emb.out_projs.0"].T) for part in
        (arrays["out_emb.out_layers.0.weight"], arrays["out_emb.cluster_proj.weight"][::-1])])
    yield "output.head.bias", np.concatenate([arrays["out_emb.out_layers.0.bias"],
                                              arrays["out_emb.cluster_proj.bias"][::-1]])
    for i in range(1, len(p.rows)):
        tail = "output.tail.%d." % (i - 1)
        yield tail + "0.weight", arrays["out_emb.out_projs.%d" % i].T
        yield tail + "1.weight", arrays["out_emb.out_layers.%d.weight" % i]
        yield tail + "1.bias", arrays["out_emb.out_layers.%d.bias" % i]


def _plain(arrays):
    """Embeddings and output of a model without."""
    yield "embeddings.weight", arrays["in_emb.weight"]
    yield "output.weight", arrays["out_emb.weight"]
    yield "output.bias", arrays["out_emb.bias"]


def _spans(arrays, name):
    """The shares of attn_span, which the authors' trainer keeps within 0 and 1."""
    spans = arrays[name].reshape(-1).astype(np.float32)
    for head, span in enumerate(spans):
        if span < 0 or span > 1:
            raise Refused("tensor '%s': head %d has %.9g, but spans are shares of attn_span, 0 to 1"
                          % (name, head, span))
    return spans


def _layer(p, arrays, i):
    """The tensors of a layer under the names they are served by."""
    layer, inside = "layers.%d." % i, "layers.%d.attn.attn." % i
    for theirs, ours in (("query", "query"), ("key", "key"), ("val", "value"), ("out", "out")):
        yield "%s%s.weight" % (layer, ours), arrays["%sattn.proj_%s.weight" % (layer, theirs)]
    if p.n_persistent:
        keys = arrays[inside + "persistent_memory.key"].astype(np.float64)
        values = arrays[inside + "persistent_memory.val"].astype(np.float64)
        yield layer + "persistent.keys", \
            (keys.transpose(0, 2, 1) * np.sqrt(p.d_head)).astype(np.float32)
        yield layer + "persistent.values", (values * np.sqrt(p.n_persistent)).astype(np.float32)
    if p.is_adaptive:
        yield layer + "spans", _spans(arrays, inside + "adaptive_span._mask.current_val")
    for name in ("norm1",) if p.n_persistent else ("norm1", "norm2"):
        for part in (".weight", ".bias"):
            yield layer + name + part, arrays[layer + name + part]
    if not p.n_persistent:
        for theirs, ours in (("ff.fc1", "ffn.lin1"), ("ff.fc2", "ffn.lin2")):
            for part in (".weight", ".bias"):
                yield layer + ours + part, arrays[layer + theirs + part]


def read(file, settings, dtype):
    """.config (config.json), .tensors [(name, array)], .words (None: the file has none)."""
    if not looks_like(file.root):
        raise Refused("not an all-attention checkpoint: a dictionary with 'model' and 'iter_no', and"
                      " no 'params', expected, got %s" % show(file.root))
    weights = _weights(file.root)
    p = _sizes(weights)
    if "adapt_span_ramp" in settings and not p.is_adaptive:
        raise Refused("--set adapt_span_ramp: this model's spans are fixed")
    ramp = _ramp(settings)
    arrays = _arrays(file, _shapes(p), weights)
    tensors = list(_adaptive(p, arrays) if p.rows else _plain(arrays))
    tensors.append(("positions", arrays["key_pe"].reshape(p.d_head, p.span)))
    for i in range(p.n_layer):
        tensors += _layer(p, arrays, i)
    config = {"model_type": "all_attention", "vocab_size": p.n_vocab, "d_model": p.d_model,
              "n_layer": p.n_layer, "n_head": p.n_head, "d_ff": p.d_ff,
              "n_persistent": p.n_persistent, "max_span": p.span,
              "norm_eps": 1e-5, "tie_output": False, "dtype": dtype or "f32"}
    if p.is_adaptive:
        config["span_ramp"] = ramp
    if p.rows:
        config["adaptive_cutoffs"] = [int(n) for n in np.cumsum(p.rows[:-1])]
        config["adaptive_widths"] = list(p.widths[1:])
    return SimpleNamespace(config=config, tensors=tensors, words=None, own={})


def name_tokens(config, vocab, settings):
    """What the words are, which only --set can tell; that the line end, which stands in every file
    of the authors', begins a text without words; and which word the server reads unknown ones as."""
    kind = settings.get("vocab_kind")
    if kind is not None and kind not in VOCAB_KINDS:
        raise Refused("--set vocab_kind: one of %s expected, got %s"
                      % (" ".join(VOCAB_KINDS), show(kind)))
    if kind is not None:
        config["tokenizer"] = kind
    words = vocab.decode().split("\n")
    for field, word in (("bos_token_id", LINE_END), ("unk_token_id", UNKNOWN)):
        if word in words:
            config[field] = words.index(word)


def summary(config):
    c = config
    spans = "spans of at most %d that end over %d" % (c["max_span"], c["span_ramp"]) \
        if "span_ramp" in c else "spans of %d" % c["max_span"]
    inside = "%d persistent vectors per head" % c["n_persistent"] if c["n_persistent"] \
        else "feed-forward networks of %d" % c["d_ff"]
    if "adaptive_cutoffs" in c:
        inside += "; adaptive softmax, cutoffs %s" % " ".join(map(str, c["adaptive_cutoffs"]))
    return ["all-attention, layers %d of %d, heads %d, vocabulary %d, %s" % (
        c["n_layer"], c["d_model"], c["n_head"], c["vocab_size"], spans), inside]
