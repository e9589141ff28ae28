"""A converted memory-layers directory computed with NumPy in float64: the formulas, slowly.

test_memory_layers.py compares it with what the original code computes, so a converter that confuses
two tensors of one shape is found; tests/golden/test_memory_llama.py what is served with it, also of the
kinds of memories that no golden case has. One sequence, no cache, no batch.
"""

import json

import numpy as np

from numpy_model import erf, log_softmax, read_safetensors, softmax


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def silu(x):
    return x * sigmoid(x)


def gelu(x):
    return x * 0.5 * (1 + erf(x / np.sqrt(2)))


def memory_name(m):
    return "memories.%d_%s." % (m["layer"], m.get("place", "in"))


class MemoryLlama:
    def __init__(self, directory):
        self.config = json.loads((directory / "config.json").read_text())
        self.d_head = self.config.get("d_head", self.config["d_model"] // self.config["n_head"])
        self.w = {name: array.astype(np.float64)
                  for name, array in read_safetensors(directory / "model.safetensors").items()}

    def linear(self, name, x):
        y = x @ self.w[name + ".weight"].T
        return y + self.w[name + ".bias"] if name + ".bias" in self.w else y

    def norm(self, name, x, kind="rms", eps=None):
        eps = self.config["norm_eps"] if eps is None else eps
        if kind == "layer":
            x = x - x.mean(-1, keepdims=True)
        y = x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * self.w[name + ".weight"]
        return y + self.w[name + ".bias"] if kind == "layer" else y

    def frequencies(self):
        """[d_head/2] of the pairs of a head, scaled as models/FORMAT.md says."""
        frequency = self.config["rope_theta"] ** -(np.arange(0, self.d_head, 2) / self.d_head)
        scaling = self.config.get("rope_scaling")
        if scaling is None:
            return frequency
        slow = frequency / scaling["factor"]
        if scaling["rope_type"] == "linear":
            return slow
        turns = scaling["original_max_position_embeddings"] * frequency / (2 * np.pi)
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        share = np.clip((turns - low) / (high - low), 0, 1)
        return (1 - share) * slow + share * frequency

    def rotate(self, x):
        """Pairs of neighbours [n_tok, n_head, d_head] turned by position times frequency."""
        angle = np.arange(len(x))[:, None] * self.frequencies()
        turned = (x[..., 0::2] + 1j * x[..., 1::2]) * np.exp(1j * angle)[:, None]
        return np.stack([turned.real, turned.imag], -1).reshape(x.shape)

    def attention(self, i, x):
        c, n_tok = self.config, len(x)
        q, k, v = (self.linear("layers.%d.attention.%s" % (i, part), x)
                   .reshape(n_tok, -1, self.d_head) for part in ("query", "key", "value"))
        if c.get("query_key_norm"):
            q, k = (self.norm("layers.%d.attention.%s_norm" % (i, name), part)
                    for name, part in (("query", q), ("key", k)))
        q, k = self.rotate(q), self.rotate(k)
        k, v = (np.repeat(part, c["n_head"] // part.shape[1], 1) for part in (k, v))
        scores = np.einsum("thd,shd->hts", q, k) / np.sqrt(self.d_head)
        scores[:, np.triu(np.ones((n_tok, n_tok), bool), 1)] = -np.inf
        y = np.einsum("hts,shd->thd", softmax(scores), v).reshape(n_tok, -1)
        return self.linear("layers.%d.attention.out" % i, y)

    def network(self, i, x):
        name = "layers.%d.ffn." % i
        return self.linear(name + "down", silu(self.linear(name + "gate", x))
                           * self.linear(name + "up", x))

    def output_gate(self, m, name, x):
        gate, activation = m.get("output_gate"), m.get("gate_activation", "relu")
        if gate in (None, False, "none"):
            return 1
        if gate == "scalar":
            return self.w[name + "output_gate.factor"]
        if gate == "mlp":
            x = self.linear(name + "output_gate.hidden", x)
            x = np.maximum(x, 0) if activation == "relu" else gelu(x)
        return sigmoid(self.linear(name + "output_gate", x))

    def memory(self, m, x):
        """(output, slots, scores), the last two [n_tok, n_head, k_top], best first"""
        name = memory_name(m)
        if m.get("input_norm", "none") != "none":
            x = self.norm(name + "input_norm", x, m["input_norm"], m.get("input_norm_eps", 1e-5))
        query = self.linear(name + "query_proj.query_mlps.0", x)
        if m.get("query_norm", "none") != "none":
            runs = query.reshape(len(x), -1, m.get("query_norm_width", m["d_key"]))
            query = self.norm(name + "query_norm", runs, m["query_norm"], m.get("query_norm_eps", 1e-5))
        query = query.reshape(len(x), m["n_head"], 2, m["d_key"] // 2)
        half = np.einsum("thsd,hsnd->thsn", query, self.w[name + "keys"])
        sums = (half[:, :, 0, :, None] + half[:, :, 1, None, :]).reshape(len(x), m["n_head"], -1)
        slots = np.argsort(-sums, axis=-1, kind="stable")[..., :m["k_top"]]
        scores = np.take_along_axis(sums, slots, -1)
        owner = self.config["memories"][m.get("values_of", self.config["memories"].index(m))]
        shares = softmax(scores) if m.get("softmax", True) else \
            np.maximum(scores, 0) if m.get("relu") else scores
        if m.get("experts"):
            experts = self.w[memory_name(owner) + "experts.weight"]
            shares = shares * gelu(np.einsum("td,thkd->thk", x, experts[slots]))
        values = self.w[memory_name(owner) + "values.weight"]
        y = np.einsum("thk,thkd->td", shares, values[slots])
        if m.get("value_gate"):
            y = y * silu(self.linear(name + "value_gate", x))
        if m.get("value_projection"):
            y = self.linear(name + "value_proj", y)
        return y * self.output_gate(m, name, x), slots, scores

    def forward(self, ids):
        """log-probabilities [n_tok, n_vocab], {layer: (slots, scores)} of memories in place of networks"""
        memories = {(m["layer"], m.get("place", "in")): m for m in self.config.get("memories", [])}
        looked_up = {}
        x = self.w["embeddings.weight"][ids]
        for i in range(self.config["n_layer"]):
            x = x + self.attention(i, self.norm("layers.%d.attention_norm" % i, x))
            y = self.norm("layers.%d.ffn_norm" % i, x)
            if (i, "beside") in memories:
                x = x + self.memory(memories[i, "beside"], y)[0]
            if (i, "in") in memories:
                y, *looked_up[i] = self.memory(memories[i, "in"], y)
            else:
                y = self.network(i, y)
            x = x + y
            if (i, "after") in memories:
                x = x + self.memory(memories[i, "after"], x)[0]
        output = "embeddings" if self.config["tie_output"] else "output"
        return log_softmax(self.linear(output, self.norm("norm", x))), looked_up
