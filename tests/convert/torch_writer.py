"""Writes checkpoints in both containers of torch.save, honest ones and others, without PyTorch.

A value is plain Python data, a Tensor (a view of a Storage), or Raw pickle bytes; the pickle is
protocol 2, made by hand so that a test can say anything. tiny() is a small valid checkpoint.
"""

import struct
import zipfile

import numpy as np

LEGACY_MAGIC = b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19."
CLASSES = {"float32": "FloatStorage", "float16": "HalfStorage", "float64": "DoubleStorage",
           "int64": "LongStorage", "uint16": "BFloat16Storage"}


class Raw:
    """Pickle opcodes that leave one object on the stack."""

    def __init__(self, code):
        self.code = code


class Storage:
    def __init__(self, data, numel=None, view=None, cls=None):
        self.data = np.ascontiguousarray(data).reshape(-1)
        self.numel = self.data.size if numel is None else numel  # what the pickle claims
        self.view = view
        self.cls = cls or CLASSES[self.data.dtype.name]


class Tensor:
    def __init__(self, array, storage=None, offset=0, size=None, stride=None):
        array = np.asarray(array)
        self.storage = storage or Storage(array)
        self.offset = offset
        self.size = tuple(array.shape) if size is None else size
        self.stride = tuple(n // array.itemsize for n in np.ascontiguousarray(array).strides) \
            if stride is None else stride


class OrderedDict(dict):
    """Pickled as collections.OrderedDict with a _metadata BUILD, as a state dict is."""


def global_(module, name):
    return b"c" + module.encode() + b"\n" + name.encode() + b"\n"


class Pickler:
    def __init__(self, legacy):
        self.legacy = legacy
        self.storages = []

    def key(self, storage):
        for i, known in enumerate(self.storages):
            if known is storage:
                return str(i)
        self.storages.append(storage)
        return str(len(self.storages) - 1)

    def code(self, value):
        if isinstance(value, Raw):
            return value.code
        if value is None:
            return b"N"
        if isinstance(value, bool):
            return b"\x88" if value else b"\x89"
        if isinstance(value, int):
            if -2**31 <= value < 2**31:
                return b"J" + struct.pack("<i", value)
            raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
            return b"\x8a" + bytes([len(raw)]) + raw
        if isinstance(value, float):
            return b"G" + struct.pack(">d", value)
        if isinstance(value, str):
            raw = value.encode("utf-8", "surrogatepass")
            return b"X" + struct.pack("<I", len(raw)) + raw
        if isinstance(value, tuple):
            return b"(" + b"".join(map(self.code, value)) + b"t"
        if isinstance(value, list):
            return b"](" + b"".join(map(self.code, value)) + b"e"
        if isinstance(value, OrderedDict):
            return global_("collections", "OrderedDict") + b")R" + self.items(value) \
                + b"}" + self.code("_metadata") + b"}sb"
        if isinstance(value, dict):
            return b"}" + self.items(value)
        assert isinstance(value, Tensor), value
        return self.tensor(value)

    def items(self, value):
        return b"(" + b"".join(self.code(k) + self.code(v) for k, v in value.items()) + b"u"

    def tensor(self, t):
        s = t.storage
        view = self.code(s.view) if self.legacy else b""
        pid = b"(" + self.code("storage") + global_("torch", s.cls) + self.code(self.key(s)) \
            + self.code("cpu") + self.code(s.numel) + view + b"tQ"
        return global_("torch._utils", "_rebuild_tensor_v2") + b"(" + pid + self.code(t.offset) \
            + self.code(t.size) + self.code(t.stride) + b"\x89" \
            + global_("collections", "OrderedDict") + b")RtR"

    def pickle(self, value):
        return b"\x80\x02" + self.code(value) + b"."


def write_zip(path, value, stem="archive", compression=zipfile.ZIP_STORED, extra=(), zip64=False):
    """extra: more members as (full name, bytes)."""
    pickler = Pickler(legacy=False)
    members = [(stem + "/data.pkl", pickler.pickle(value))]
    members += [("%s/data/%d" % (stem, i), storage.data.tobytes())
                for i, storage in enumerate(pickler.storages)]
    members += [(stem + "/version", b"3\n")] + list(extra)
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in members:
            with archive.open(zipfile.ZipInfo(name), "w", force_zip64=zip64) as file:
                file.write(data)
    if compression != zipfile.ZIP_STORED:
        with zipfile.ZipFile(path, "w") as archive:
            for name, data in members:
                archive.writestr(name, data, compression)
    return path


def write_legacy(path, value, version=1001, little_endian=True, counts=None, keys=None, tail=b""):
    pickler = Pickler(legacy=True)
    body = pickler.pickle(value)
    keys = [str(i) for i in range(len(pickler.storages))] if keys is None else keys
    out = LEGACY_MAGIC + pickler.pickle(version) \
        + pickler.pickle({"protocol_version": 1001, "little_endian": little_endian}) \
        + body + pickler.pickle(keys)
    for i, s in enumerate(pickler.storages):
        count = (counts or {}).get(i, s.data.size)
        out += struct.pack("<q", count) + s.data.tobytes()
    with open(path, "wb") as file:
        file.write(out + tail)
    return path


WRITERS = {"zip": write_zip, "legacy": write_legacy}


def tiny_params(**changes):
    """params of a model of one layer with a memory in it. A value of ... removes the field."""
    params = {
        "encoder_only": True, "n_layers": 2, "emb_dim": 8, "n_heads": 2, "n_words": 16,
        "gelu_activation": True, "share_inout_emb": True, "sinusoidal_embeddings": False,
        "use_lang_emb": True, "n_langs": 1, "lang2id": {"en": 0}, "clm_steps": [("en", None)],
        "asm": False, "bos_index": 0, "eos_index": 1, "pad_index": 2, "unk_index": 3,
        "use_memory": True, "mem_enc_positions": [(1, "in")], "mem_implementation": "pq_fast",
        "mem_heads": 2, "mem_knn": 3, "mem_n_keys": 4, "n_indices": 16, "mem_size": 16,
        "mem_k_dim": 4, "mem_v_dim": -1, "mem_use_different_keys": True, "mem_keys_type": "uniform",
        "mem_query_layer_sizes": [0, 0], "mem_query_bias": True, "mem_query_batchnorm": True,
        "mem_multi_query_net": False, "mem_grouped_conv": False, "mem_shuffle_query": False,
        "mem_shuffle_indices": False, "mem_modulo_size": -1, "mem_normalize_query": False,
        "mem_temperature": 1, "mem_score_softmax": True, "mem_score_subtract": "",
        "mem_score_normalize": False, "mem_share_values": False, "mem_input2d": False,
        "mem_query_kernel_sizes": "", "mem_query_residual": False,
    }
    params.update(changes)
    return {key: value for key, value in params.items() if value is not ...}


def tiny_weights():
    """The arrays of tiny_params(), by name."""
    rng = np.random.default_rng(7)
    shapes = {"embeddings.weight": (16, 8), "position_embeddings.weight": (6, 8),
              "layer_norm_emb.weight": (8,), "layer_norm_emb.bias": (8,)}
    for i in range(2):
        for part in ("q_lin", "k_lin", "v_lin", "out_lin"):
            shapes["attentions.%d.%s.weight" % (i, part)] = (8, 8)
            shapes["attentions.%d.%s.bias" % (i, part)] = (8,)
        for part in ("layer_norm1", "layer_norm2"):
            shapes["%s.%d.weight" % (part, i)] = shapes["%s.%d.bias" % (part, i)] = (8,)
    shapes.update({"ffns.0.lin1.weight": (32, 8), "ffns.0.lin1.bias": (32,),
                   "ffns.0.lin2.weight": (8, 32), "ffns.0.lin2.bias": (8,)})
    memory = "memories.1_in."
    query = memory + "query_proj.query_mlps."
    shapes.update({memory + "keys": (2, 2, 4, 2), memory + "values.weight": (16, 8),
                   query + "0.weight": (8, 8), query + "0.bias": (8,)})
    for part in ("weight", "bias", "running_mean", "running_var"):
        shapes[query + "1." + part] = (8,)
    shapes["pred_layer.proj.bias"] = (16,)
    arrays = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    arrays[query + "1.running_var"] = np.abs(arrays[query + "1.running_var"]) + np.float32(0.1)
    arrays[query + "1.num_batches_tracked"] = np.array(5)
    return arrays


def tiny_words():
    return ["<s>", "</s>", "<pad>", "<unk>", *("<special%d>" % i for i in range(10)), "la", "le@@"]


def tiny(params=None, weights=None, words=None, prefix="", **tensors):
    """A checkpoint as a dict. tensors: replacements of weights by Tensor, or None to remove one;
    names with '__' for '.'."""
    arrays = tiny_weights() if weights is None else weights
    model = OrderedDict((prefix + name, Tensor(array)) for name, array in arrays.items())
    tied = model[prefix + "embeddings.weight"]
    model[prefix + "pred_layer.proj.weight"] = Tensor(arrays["embeddings.weight"], tied.storage)
    for name, tensor in tensors.items():
        name = name.replace("__", ".")
        model.pop(name, None)
        if tensor is not None:
            model[name] = tensor
    words = tiny_words() if words is None else words
    return {"epoch": 0, "n_total_iter": 10, "best_metrics": {}, "best_stopping_criterion": None,
            "model": model, "dico_id2word": dict(enumerate(words)),
            "dico_word2id": {word: i for i, word in enumerate(words)},
            "dico_counts": {word: 1 for word in words},
            "params": tiny_params() if params is None else params}
