"""The memory layer (Lample et al. 2019, "Large Memory Layers with Product Keys"), for both families
that have one. Tensor names and arithmetic are those of models/MEMORY.md.

Scores, softmaxes over slots and queries stay in fp32 also under bf16 autocast: a slot is chosen by
comparing scores, and rounding those to 8 bits would choose between slots at random.
"""
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

from blocks import SlotSum


class QueryProj(nn.Module):
    """One linear map and a BatchNorm over its outputs. [T, d_model] -> [T, n_head * d_key]"""

    def __init__(self, d_model, d_out, bias, batch_norm):
        super().__init__()
        linear = nn.Linear(d_model, d_out, bias=bias)
        self.query_mlps = nn.Sequential(linear, *([nn.BatchNorm1d(d_out)] if batch_norm else []))

    def forward(self, x):
        q = self.query_mlps[0](x).float()
        for norm in self.query_mlps[1:]:
            q = norm(q)
        return q


class Memory(nn.Module):
    """For each head the k_top best of n_key * n_key slots (kind "product") or of n_key ("flat"), and
    the sum of what they hold, weighted by the softmax of their scores.

    With a value projection the sum goes through a linear layer, with a value gate it is multiplied
    by silu of another before, and with an output gate the result by the sigmoid of a third. With
    `owner`, an earlier memory, its table of values is read.
    """

    def __init__(self, d_model, m, owner=None):
        super().__init__()
        self.n_head, self.n_key, self.k_top = m["n_head"], m["n_key"], m["k_top"]
        self.d_key, self.n_slot = m["d_key"], m["n_slot"]
        self.product = m.get("kind", "product") == "product"
        width = self.d_key // 2 if self.product else self.d_key
        bound = 1 / math.sqrt(width)
        halves = (2,) if self.product else ()
        self.keys = nn.Parameter(torch.empty(self.n_head, *halves, self.n_key, width)
                                 .uniform_(-bound, bound))
        d_value = m.get("d_value", d_model)
        if owner is None:
            self.values = nn.Embedding(self.n_slot, d_value)
            nn.init.normal_(self.values.weight, std=d_value ** -0.5)
        self.owner = (owner,) if owner else ()  # In a tuple: its parameters are not ours.
        self.edit = ()  # Of edit.py: changes of some rows, which are read beside the table.
        self.query_proj = QueryProj(d_model, self.n_head * self.d_key, m.get("query_bias", True),
                                    m.get("query_batch_norm", False))
        for name, given, shape in (("value_gate", "value_gate", (d_model, d_value)),
                                   ("value_proj", "value_projection", (d_value, d_model)),
                                   ("output_gate", "output_gate", (d_model, 1))):
            if m.get(given):
                linear = nn.Linear(*shape)
                nn.init.normal_(linear.weight, std=shape[0] ** -0.5)
                nn.init.zeros_(linear.bias)
                self.add_module(name, linear)
        # A pair of ranks (i, j), counted from 1, has i * j pairs at least as good as itself: with
        # i * j > k_top it cannot be needed. 119 of 1024 pairs are left for k_top = 32.
        pairs = [(i, j) for i in range(self.k_top) for j in range(self.k_top // (i + 1))]
        self.register_buffer("rank1", torch.tensor([p[0] for p in pairs]), persistent=False)
        self.register_buffer("rank2", torch.tensor([p[1] for p in pairs]), persistent=False)

    def table(self):
        return self.owner[0].table() if self.owner else self.values.weight

    def search_flat(self, q):
        q = q.view(q.shape[0], self.n_head, self.d_key).transpose(0, 1)         # [H, T, d_key]
        score, slot = torch.bmm(q, self.keys.transpose(1, 2)).topk(self.k_top, dim=-1)
        return slot.transpose(0, 1), score.softmax(-1).transpose(0, 1)

    def search(self, q):
        """q [T, n_head * d_key] -> slots and weights, each [T, n_head, k_top]"""
        if not self.product:
            return self.search_flat(q)
        n_tok, half = q.shape[0], self.d_key // 2
        q = q.view(n_tok, self.n_head * 2, half).transpose(0, 1)                # [2H, T, half]
        keys = self.keys.view(self.n_head * 2, self.n_key, half)
        s = torch.bmm(q, keys.transpose(1, 2)).view(self.n_head, 2, n_tok, self.n_key)
        with torch.no_grad():
            best, index = s.topk(self.k_top, dim=-1)                            # [H, 2, T, k_top]
            total = torch.cat([best[:, 0, :, i:i + 1] + best[:, 1, :, :self.k_top // (i + 1)]
                               for i in range(self.k_top)], -1)                 # [H, T, n_pair]
            pair = total.topk(self.k_top, dim=-1, sorted=False).indices         # [H, T, k_top]
            key1 = index[:, 0].gather(2, self.rank1[pair])
            key2 = index[:, 1].gather(2, self.rank2[pair])
        score = s[:, 0].gather(2, key1) + s[:, 1].gather(2, key2)
        slot = key1 * self.n_key + key2
        return slot.transpose(0, 1), score.softmax(-1).transpose(0, 1)

    def forward(self, x, probe=None):
        """x [..., d_model] -> the same shape; probe is called with slots and weights"""
        shape = x.shape
        x = x.reshape(-1, shape[-1])
        q = self.query_proj(x)
        with torch.autocast(x.device.type, enabled=False):
            slot, weight = self.search(q)
            slot, weight = slot.flatten(1), weight.flatten(1)
            if probe is not None:
                probe(slot, weight)
            y = SlotSum.apply(self.table(), slot, weight)
            for edit in self.edit:
                y = y + edit.read(slot, weight)
        if hasattr(self, "value_gate"):
            y = y * F.silu(self.value_gate(x))
        if hasattr(self, "value_proj"):
            y = self.value_proj(y)
        if hasattr(self, "output_gate"):
            y = y * torch.sigmoid(self.output_gate(x))
        return y.view(shape)
