"""A model directory read and computed with NumPy in float64: the formulas of the family, slowly.

test_convert.py compares it with what the original code computes, so a converter that confuses two
tensors of one shape is found. Written for the tests: one sequence, no cache, no batch.
"""

import json
import math
import struct

import numpy as np


def stored_tensors(path):
    """name -> array, as the file holds it: bf16 as its bits, codes as bytes."""
    with open(path, "rb") as file:
        data = file.read()
    n, = struct.unpack("<Q", data[:8])
    header = json.loads(data[8:8 + n])
    header.pop("__metadata__", None)
    kinds = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8",
             "I32": "<i4", "I8": "<i1", "U8": "u1"}
    body = memoryview(data)[8 + n:]
    return {name: np.frombuffer(body[slice(*entry["data_offsets"])], kinds[entry["dtype"]]).reshape(entry["shape"])
            for name, entry in header.items()}


def read_safetensors(path):
    """name -> array; bf16 is widened to float32, int8 multiplied by its rows' scales."""
    arrays = stored_tensors(path)
    for name, array in arrays.items():
        if array.dtype == np.uint16:
            arrays[name] = (array.astype(np.uint32) << np.uint32(16)).view(np.float32)
    for name in [name for name, array in arrays.items() if array.dtype == np.int8]:
        arrays[name] = arrays[name] * arrays.pop(name + ".scale")[:, None]
    return arrays


def normalise(x, weight, bias, eps=1e-12):
    mean = x.mean(-1, keepdims=True)
    variance = ((x - mean) ** 2).mean(-1, keepdims=True)
    return (x - mean) / np.sqrt(variance + eps) * weight + bias


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def log_softmax(x):
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


erf = np.vectorize(math.erf)


class Model:
    def __init__(self, directory, ablate=()):
        self.ablate = ablate
        with open(directory / "config.json", "rb") as file:
            self.config = json.load(file)
        self.w = {name: array.astype(np.float64)
                  for name, array in read_safetensors(directory / "model.safetensors").items()}

    def linear(self, name, x):
        y = x @ self.w[name + ".weight"].T
        return y + self.w[name + ".bias"] if name + ".bias" in self.w else y

    def norm(self, name, x):
        return normalise(x, self.w[name + ".weight"], self.w[name + ".bias"])

    def attention(self, i, x):
        n_head = self.config["n_head"]
        n_tok, width = x.shape
        q, k, v = (self.linear("attentions.%d.%s_lin" % (i, part), x)
                   .reshape(n_tok, n_head, -1).transpose(1, 0, 2) for part in "qkv")
        scores = q @ k.transpose(0, 2, 1) / math.sqrt(width // n_head)
        scores[:, np.triu(np.ones((n_tok, n_tok), bool), 1)] = -np.inf
        return self.linear("attentions.%d.out_lin" % i,
                           (softmax(scores) @ v).transpose(1, 0, 2).reshape(n_tok, width))

    def batch_norm(self, name, x):
        deviation = np.sqrt(self.w[name + ".running_var"] + 1e-5)
        return (x - self.w[name + ".running_mean"]) / deviation * self.w[name + ".weight"] \
            + self.w[name + ".bias"]

    def query(self, m, name, x):
        """[n_tok, n_head, d_key]"""
        if m.get("query") == "identity":
            return np.stack([x] * m["n_head"], 1)
        if m.get("query") == "shuffled":
            heads = [x]
            for h in range(1, m["n_head"]):
                chunks = np.split(x, 2 ** (h + 1), 1)
                heads.append(np.concatenate(chunks[0::2] + chunks[1::2], 1))
            return np.stack(heads, 1)
        n_net = 2 * m["n_head"] if m.get("query") == "per_half" else 1
        nets = [x] * n_net  # the input of each network's next layer
        n_layer = len(m.get("query_hidden", [])) + 1
        for i in range(n_layer):
            j = i * (3 if m["query_batch_norm"] else 2)
            weight = self.w["%s%d.weight" % (name, j)]
            y = np.concatenate([net @ part.T for net, part in zip(nets, np.split(weight, n_net))],
                               1)
            y = y + self.w["%s%d.bias" % (name, j)] if m["query_bias"] else y
            y = self.batch_norm("%s%d" % (name, j + 1), y) if m["query_batch_norm"] else y
            nets = np.split(np.maximum(y, 0), n_net, 1)
        return y.reshape(len(x), m["n_head"], m["d_key"])

    @staticmethod
    def shares(m, scores):
        """Of the k_top scores, best first."""
        s = scores / m.get("temperature", 1)
        s = softmax(s) if m.get("softmax", True) else s
        k = s.shape[-1]
        subtract = m.get("subtract", "none")
        if subtract == "mean":
            s = s - s.mean(-1, keepdims=True)
        elif subtract != "none":
            at = 0 if subtract == "min" else (k - 1) // 2
            s = s - np.sort(s, -1)[..., at:at + 1]
        return s / np.abs(s).sum(-1, keepdims=True) if m.get("normalize") else s

    def ablation(self, m, slots):
        """What self.ablate, a request's list, multiplies the shares of these slots with."""
        factor = np.ones(slots.shape)
        for entry in self.ablate:
            head = np.arange(slots.shape[1])[None, :, None]
            named = np.full(slots.shape, self.config["memories"][entry["memory"]] is m)
            named &= head == entry.get("head", head)
            if "slots" in entry:
                named &= np.isin(slots, entry["slots"])
            factor = np.where(named, factor * entry.get("scale", 0), factor)
        return factor

    def memory(self, m, x):
        """(output, slots, shares)"""
        name = "memories.%d_%s" % (m["layer"], m["place"])
        query = self.query(m, name + ".query_proj.query_mlps.", x)
        halves = 1 if m["kind"] == "flat" else 2
        query = query.reshape(len(x), m["n_head"], halves, -1)
        if m.get("query_normalize"):
            query = query / np.sqrt((query ** 2).sum(-1, keepdims=True))
        keys = np.broadcast_to(self.w[name + ".keys"].reshape(-1, halves, m["n_key"],
                                                              m["d_key"] // halves)
                               if not m.get("shared_keys") else self.w[name + ".keys"],
                               (m["n_head"], halves, m["n_key"], m["d_key"] // halves))
        parts = np.einsum("thik,hink->thin", query, keys)
        scores = parts[:, :, 0]
        if m["kind"] == "product":
            scores = (scores[:, :, :, None] + parts[:, :, 1, None, :]) \
                .reshape(len(x), m["n_head"], -1)
        slots = np.argsort(-scores, axis=-1, kind="stable")[:, :, :m["k_top"]]
        shares = self.shares(m, np.take_along_axis(scores, slots, -1))
        if m.get("slot_map"):
            slot_map = self.w[name + ".slot_map"].astype(np.int64)
            slots = np.stack([row[slots[:, h]] for h, row in enumerate(slot_map)], 1)
        slots = slots % m["n_slot"]
        owner = self.config["memories"][m["values_of"]] if "values_of" in m else m
        values = self.w["memories.%d_%s.values.weight" % (owner["layer"], owner["place"])][slots]
        shares = shares * self.ablation(m, slots)
        return np.einsum("thk,thkd->td", shares, values), slots, shares

    def adaptive(self, x):
        """log-probabilities of a head of frequent words and tails of rarer ones"""
        first = self.config["adaptive_cutoffs"][0]
        head = log_softmax(self.linear("pred_layer.proj.head", x))
        parts = [head[:, :first]]
        for i in range(len(self.config["adaptive_cutoffs"])):
            tail = "pred_layer.proj.tail.%d." % i
            parts.append(head[:, first + i:first + i + 1]
                         + log_softmax(self.linear(tail + "1", self.linear(tail + "0", x))))
        return np.concatenate(parts, axis=1)

    def forward(self, ids, lang=None):
        """log-probabilities [n_tok, n_vocab], hidden states, {memory name: (slots, shares)}"""
        c = self.config
        act = (lambda z: z / 2 * (1 + erf(z / math.sqrt(2)))) if c["activation"] == "gelu" \
            else (lambda z: np.maximum(z, 0))
        places = {(m["layer"], m["place"]): m for m in c["memories"]}
        looked_up = {}

        def read(place, x):
            y, slots, shares = self.memory(places[place], x)
            looked_up["%d_%s" % place] = (slots, shares)
            return y

        x = self.w["embeddings.weight"][ids] + self.w["position_embeddings.weight"][:len(ids)]
        if "languages" in c:
            x = x + self.w["lang_embeddings.weight"][lang]
        x = self.norm("layer_norm_emb", x)
        hidden = [x]
        for i in range(c["n_layer"]):
            x = self.norm("layer_norm1.%d" % i, x + self.attention(i, x))
            f = read((i, "in"), x) if (i, "in") in places else \
                self.linear("ffns.%d.lin2" % i, act(self.linear("ffns.%d.lin1" % i, x)))
            x = self.norm("layer_norm2.%d" % i, x + f)
            if (i, "after") in places:
                x = x + read((i, "after"), x)
            hidden.append(x)
        if "adaptive_cutoffs" in c:
            return self.adaptive(x), hidden, looked_up
        output = self.w["embeddings.weight" if c["tie_output"] else "pred_layer.proj.weight"]
        return log_softmax(x @ output.T + self.w["pred_layer.proj.bias"]), hidden, looked_up
