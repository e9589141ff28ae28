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


class MemoryLlama:
    def __init__(self, directory):
        self.config = json.loads((directory / "config.json").read_text())
        self.d_head = self.config.get("d_head", self.config["d_model"] // self.config["n_head"])
        self.w = {name: array.astype(np.float64)
                  for name, array in read_safetensors(directory / "model.safetensors").items()}

    def linear(self, name, x):
        y = x @ self.w[name + ".weight"].T
        return y + self.w[name + ".bias"] if name + ".bias" in self.w else y

    def norm(self, name, x):
        scale = np.sqrt((x * x).mean(-1, keepdims=True) + self.config["norm_eps"])
        return x / scale * self.w[name + ".weight"]

    def frequencies(self):
        """[d_head/2] of the pairs of a head, scaled as models/README.md says."""
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

    def memory(self, m, x):
        """(output, slots, scores), the last two [n_tok, n_head, k_top], best first"""
        name = "memories.%d_in." % m["layer"]
        query = self.linear(name + "query_proj.query_mlps.0", x) \
            .reshape(len(x), m["n_head"], 2, m["d_key"] // 2)
        half = np.einsum("thsd,hsnd->thsn", query, self.w[name + "keys"])
        sums = (half[:, :, 0, :, None] + half[:, :, 1, None, :]).reshape(len(x), m["n_head"], -1)
        slots = np.argsort(-sums, axis=-1, kind="stable")[..., :m["k_top"]]
        scores = np.take_along_axis(sums, slots, -1)
        owner = self.config["memories"][m.get("values_of", self.config["memories"].index(m))]
        shares = softmax(scores)
        if m.get("experts"):
            experts = self.w["memories.%d_in.experts.weight" % owner["layer"]]
            hidden = np.einsum("td,thkd->thk", x, experts[slots])
            shares = shares * hidden * 0.5 * (1 + erf(hidden / np.sqrt(2)))
        values = self.w["memories.%d_in.values.weight" % owner["layer"]]
        y = np.einsum("thk,thkd->td", shares, values[slots])
        if m.get("value_gate"):
            y = y * silu(self.linear(name + "value_gate", x))
        if m.get("value_projection"):
            y = self.linear(name + "value_proj", y)
        if m.get("output_gate"):
            y = y * sigmoid(self.linear(name + "output_gate", x))
        return y, slots, scores

    def forward(self, ids):
        """log-probabilities [n_tok, n_vocab], {layer: (slots, scores)}"""
        memories, looked_up = {m["layer"]: m for m in self.config.get("memories", [])}, {}
        x = self.w["embeddings.weight"][ids]
        for i in range(self.config["n_layer"]):
            x = x + self.attention(i, self.norm("layers.%d.attention_norm" % i, x))
            y = self.norm("layers.%d.ffn_norm" % i, x)
            if i in memories:
                y, *looked_up[i] = self.memory(memories[i], y)
            else:
                y = self.network(i, y)
            x = x + y
        output = "embeddings" if self.config["tie_output"] else "output"
        return log_softmax(self.linear(output, self.norm("norm", x))), looked_up
