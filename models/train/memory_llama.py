"""The decoder of "Memory Layers at Scale" (Berges et al. 2024), to be trained: pre-norm, rotary
positions, gated networks, and memories in place of some of them, with values that layers may share.
With value gates it is the paper's "Memory+". Layers, arithmetic and tensor names are those that
models/memory_llama.c serves.
"""
import torch
import torch.nn as nn
import torch.nn.functional as F

from blocks import causal_attention
from model import make_memories


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.n_head = config["n_head"]
        self.n_kv_head = config.get("n_kv_head", self.n_head)
        self.d_head = config.get("d_head", config["d_model"] // self.n_head)
        for name, n_head in (("query", self.n_head), ("key", self.n_kv_head),
                             ("value", self.n_kv_head)):
            self.add_module(name, nn.Linear(config["d_model"], n_head * self.d_head, bias=False))
        self.out = nn.Linear(self.n_head * self.d_head, config["d_model"], bias=False)

    def forward(self, x, turns):
        n_seq, n_tok, _ = x.shape
        qkv = F.linear(x, torch.cat([self.query.weight, self.key.weight, self.value.weight]))
        qkv = qkv.view(n_seq, n_tok, -1, self.d_head).transpose(1, 2)
        with torch.autocast(x.device.type, enabled=False):
            turned = rotate(qkv[:, :self.n_head + self.n_kv_head], turns)
            q, k = turned.split((self.n_head, self.n_kv_head), 1)
            y = causal_attention(q, k, qkv[:, self.n_head + self.n_kv_head:])
        return self.out(y.transpose(1, 2).reshape(n_seq, n_tok, -1))


def rotate(x, turns):
    """x [n_seq, n_head, n_tok, d]: neighbouring columns turn by turns [2, n_tok, d / 2]"""
    cos, sin = turns[:, :x.shape[2]]
    a, b = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2).to(x.dtype)


class FeedForward(nn.Module):
    def __init__(self, d_model, d_ff):
        super().__init__()
        self.gate = nn.Linear(d_model, d_ff, bias=False)
        self.up = nn.Linear(d_model, d_ff, bias=False)
        self.down = nn.Linear(d_ff, d_model, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    def __init__(self, config, has_memory):
        super().__init__()
        d_model, eps = config["d_model"], config["norm_eps"]
        self.attention_norm = nn.RMSNorm(d_model, eps=eps)
        self.attention = Attention(config)
        self.ffn_norm = nn.RMSNorm(d_model, eps=eps)
        if not has_memory:
            self.ffn = FeedForward(d_model, config["d_ff"])


class MemoryLlama(nn.Module):
    # Ends of parameters' names: linear maps, and tables of which a token trains a few rows.
    LINEAR = ("attention.query.weight", "attention.key.weight", "attention.value.weight",
              "attention.out.weight", "ffn.gate.weight", "ffn.up.weight", "ffn.down.weight",
              "query_mlps.0.weight", "value_gate.weight", "value_proj.weight")
    VALUES = ("values.weight",)

    def __init__(self, config):
        super().__init__()
        c = self.config = config
        d_model = c["d_model"]
        d_head = c.get("d_head", d_model // c["n_head"])
        self.embeddings = nn.Embedding(c["vocab_size"], d_model)
        self.memories = make_memories(c)
        self.layers = nn.ModuleList(Layer(c, f"{i}_in" in self.memories) for i in range(c["n_layer"]))
        self.norm = nn.RMSNorm(d_model, eps=c["norm_eps"])
        self.output = nn.Linear(d_model, c["vocab_size"], bias=False)
        frequency = c["rope_theta"] ** (-torch.arange(0, d_head, 2, dtype=torch.double) / d_head)
        angle = torch.arange(c["max_position"], dtype=torch.double)[:, None] * frequency
        turns = torch.stack((angle.cos(), angle.sin())).float()
        self.register_buffer("turns", turns, persistent=False)
        self.init_weights()
        if c["tie_output"]:
            self.output.weight = self.embeddings.weight

    def init_weights(self):
        """Branches start small beside the residual stream, as deep pre-norm networks want it."""
        c = self.config
        nn.init.normal_(self.embeddings.weight, std=c["d_model"] ** -0.5)
        nn.init.normal_(self.output.weight, std=c["d_model"] ** -0.5)
        for name, p in self.layers.named_parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=p.shape[1] ** -0.5)
                if name.endswith(("out.weight", "down.weight")):
                    p.data *= (2 * c["n_layer"]) ** -0.5

    def output_layer(self):
        return self.output

    def forward(self, ids, probe=None):
        """ids [n_seq, n_tok] -> hidden states [n_seq, n_tok, d_model] in fp32; probe as in model.py"""
        probe = probe or {}
        x = self.embeddings(ids)
        for i, layer in enumerate(self.layers):
            x = x + layer.attention(layer.attention_norm(x), self.turns)
            y, here = layer.ffn_norm(x), f"{i}_in"
            if here in self.memories:
                x = x + self.memories[here](y, probe.get(here))
            else:
                x = x + layer.ffn(y)
        return self.norm(x)
