"""A causal transformer with product-key memories, and its dense twin.

train.py, evaluate.py and export.py build the model from here. The layers, their order and the
tensor names are those of XLM language-model checkpoints: post-norm, learned positions, biases
everywhere, output tied to the token table with a bias of its own, and in some layers a
product-key memory (Lample et al. 2019, "Large Memory Layers with Product Keys") in place of the
feed-forward network.

Under bf16 autocast the matrix products of the transformer run in bf16. The residual stream,
norms, memory scores, softmaxes over slots and the loss stay in fp32.
"""
import torch
import torch.nn as nn
import torch.nn.functional as F

from blocks import causal_attention
from memory import Memory


class Attention(nn.Module):
    def __init__(self, d_model, n_head):
        super().__init__()
        self.n_head = n_head
        self.q_lin = nn.Linear(d_model, d_model)
        self.k_lin = nn.Linear(d_model, d_model)
        self.v_lin = nn.Linear(d_model, d_model)
        self.out_lin = nn.Linear(d_model, d_model)

    def forward(self, x):
        n_seq, n_tok, d_model = x.shape
        # One product with the three matrices stacked reads x once.
        lins = (self.q_lin, self.k_lin, self.v_lin)
        qkv = F.linear(x, torch.cat([p.weight for p in lins]), torch.cat([p.bias for p in lins]))
        q, k, v = qkv.view(n_seq, n_tok, 3, self.n_head, -1).permute(2, 0, 3, 1, 4)
        with torch.autocast(x.device.type, enabled=False):
            y = causal_attention(q, k, v)
        return self.out_lin(y.transpose(1, 2).reshape(n_seq, n_tok, d_model))


def make_memories(config):
    """-> the memories of a configuration by the name of their place, as tensors are named"""
    made = []
    for m in config.get("memories", []):
        owner = made[m["values_of"]][1] if "values_of" in m else None
        made.append((f"{m['layer']}_{m.get('place', 'in')}", Memory(config["d_model"], m, owner)))
    return nn.ModuleDict(made)


class FeedForward(nn.Module):
    def __init__(self, d_model, d_ff, activation):
        super().__init__()
        self.lin1 = nn.Linear(d_model, d_ff)
        self.lin2 = nn.Linear(d_ff, d_model)
        self.act = {"gelu": F.gelu, "relu": F.relu}[activation]

    def forward(self, x):
        return self.lin2(self.act(self.lin1(x)))


class OutputLayer(nn.Module):
    def __init__(self, d_model, vocab_size):
        super().__init__()
        self.proj = nn.Linear(d_model, vocab_size)


class Transformer(nn.Module):
    # Ends of parameters' names: linear maps, and tables of which a token trains a few rows.
    LINEAR = ("lin.weight", "lin1.weight", "lin2.weight", "query_mlps.0.weight")
    VALUES = ("values.weight",)

    def __init__(self, config):
        super().__init__()
        c = self.config = config
        d_model, n_layer = c["d_model"], c["n_layer"]
        norm = lambda: nn.LayerNorm(d_model, eps=c["norm_eps"])
        self.embeddings = nn.Embedding(c["vocab_size"], d_model)
        self.position_embeddings = nn.Embedding(c["max_position"], d_model)
        self.layer_norm_emb = norm()
        self.attentions = nn.ModuleList(Attention(d_model, c["n_head"]) for _ in range(n_layer))
        self.layer_norm1 = nn.ModuleList(norm() for _ in range(n_layer))
        self.layer_norm2 = nn.ModuleList(norm() for _ in range(n_layer))
        self.memories = make_memories(c)
        self.ffns = nn.ModuleDict({str(i): FeedForward(d_model, c["d_ff"], c["activation"])
                                   for i in range(n_layer) if f"{i}_in" not in self.memories})
        self.pred_layer = OutputLayer(d_model, c["vocab_size"])
        self.init_weights()
        if c["tie_output"]:
            self.pred_layer.proj.weight = self.embeddings.weight

    def init_weights(self):
        """The branches added to the residual stream start small, so that twelve post-norm layers
        are near the identity and a high learning rate does not blow them up."""
        d_model = self.config["d_model"]
        nn.init.normal_(self.embeddings.weight, std=d_model ** -0.5)
        nn.init.normal_(self.position_embeddings.weight, std=d_model ** -0.5)
        nn.init.zeros_(self.pred_layer.proj.bias)
        for part in (*self.attentions, *self.ffns.values()):
            for lin in part.children():
                nn.init.normal_(lin.weight, std=lin.in_features ** -0.5)
                nn.init.zeros_(lin.bias)
        branch_gain = (2 * self.config["n_layer"]) ** -0.5
        with torch.no_grad():
            for lin in (*(a.out_lin for a in self.attentions), *(f.lin2 for f in self.ffns.values())):
                lin.weight *= branch_gain

    def output_layer(self):
        return self.pred_layer.proj

    def forward(self, ids, probe=None):
        """ids [n_seq, n_tok] -> hidden states [n_seq, n_tok, d_model] in fp32

        probe: for names of memories what is to be called with their slots and weights, or None.
        """
        probe = probe or {}
        x = self.embeddings(ids) + self.position_embeddings.weight[:ids.shape[1]]
        x = self.layer_norm_emb(x)
        for i, attention in enumerate(self.attentions):
            x = self.layer_norm1[i](x + attention(x))
            here, after = f"{i}_in", f"{i}_after"
            if here in self.memories:
                y = self.memories[here](x, probe.get(here))
            else:
                y = self.ffns[str(i)](x)
            x = self.layer_norm2[i](x + y)
            if after in self.memories:
                x = x + self.memories[after](x, probe.get(after))
        return x
