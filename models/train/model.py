"""A causal transformer with product-key memories, and its dense twin.

train.py, evaluate.py and export.py build the model from here. The layers, their order and the
tensor names are those of XLM language-model checkpoints: post-norm, learned positions, biases
everywhere, output tied to the token table with a bias of its own, and in some layers a
product-key memory (Lample et al. 2019, "Large Memory Layers with Product Keys") in place of the
feed-forward network.

Under bf16 autocast the matrix products of the transformer run in bf16. The residual stream,
norms, memory scores, softmaxes and the loss stay in fp32: a slot is chosen by comparing scores,
and rounding those to 8 bits would choose between slots at random.
"""
import math

import torch
import torch.nn as nn
import torch.nn.functional as F


def default_config(vocab_size, memory=True):
    """The shipped shape, in the form config.json has it."""
    slots = {"layer": 6, "place": "in", "kind": "product", "n_head": 4, "k_top": 32,
             "n_key": 128, "d_key": 256, "n_slot": 128 * 128,
             "query_batch_norm": True, "query_bias": True}
    return {"model_type": "pkm_transformer", "vocab_size": vocab_size, "d_model": 256,
            "n_layer": 12, "n_head": 4, "d_ff": 1024, "max_position": 512,
            "activation": "gelu", "norm_eps": 1e-12, "tie_output": True,
            "bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 2, "unk_token_id": 3,
            "add_bos": True, "memories": [slots] if memory else []}


class SlotSum(torch.autograd.Function):
    """out[t] = sum over j of weight[t, j] * values[slot[t, j]].

    values [S, D], slot [T, J] int64, weight [T, J] -> [T, D]. The gradient of the value table is
    a sum over the readers of each slot. They are brought together by a sort, after which it is
    the same kind of sum as the forward, and no two readers write to one row.
    """

    @staticmethod
    def forward(ctx, values, slot, weight):
        ctx.save_for_backward(values, slot, weight)
        return F.embedding_bag(slot, values, per_sample_weights=weight, mode="sum")

    @staticmethod
    def backward(ctx, grad):
        values, slot, weight = ctx.saved_tensors
        grad = grad.contiguous()
        n_tok, n_read = slot.shape
        flat = slot.flatten()
        token = torch.arange(n_tok).repeat_interleave(n_read)
        d_weight = torch.ops.aten._embedding_bag_per_sample_weights_backward(
            grad, values, flat, torch.arange(0, n_tok * n_read, n_read), token, 0).view_as(weight)
        order = torch.argsort(flat)
        count = torch.bincount(flat, minlength=values.shape[0])
        start = torch.cumsum(count, 0) - count
        d_values = F.embedding_bag(order // n_read, grad, start, mode="sum",
                                   per_sample_weights=weight.flatten()[order])
        return d_values, None, d_weight


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


class ProductKeyMemory(nn.Module):
    """Reads the k_top best of n_key * n_key slots for each head, and adds what they hold."""

    def __init__(self, d_model, m):
        super().__init__()
        self.n_head, self.n_key, self.k_top, self.d_key = m["n_head"], m["n_key"], m["k_top"], m["d_key"]
        bound = 1 / math.sqrt(self.d_key // 2)
        self.keys = nn.Parameter(torch.empty(self.n_head, 2, self.n_key, self.d_key // 2)
                                 .uniform_(-bound, bound))
        self.values = nn.Embedding(m["n_slot"], d_model)
        nn.init.normal_(self.values.weight, std=d_model ** -0.5)
        self.query_proj = QueryProj(d_model, self.n_head * self.d_key, m["query_bias"],
                                    m["query_batch_norm"])
        # A pair of ranks (i, j), counted from 1, has i * j pairs at least as good as itself: with
        # i * j > k_top it cannot be needed. 119 of 1024 pairs are left for k_top = 32.
        pairs = [(i, j) for i in range(self.k_top) for j in range(self.k_top // (i + 1))]
        self.register_buffer("rank1", torch.tensor([p[0] for p in pairs]), persistent=False)
        self.register_buffer("rank2", torch.tensor([p[1] for p in pairs]), persistent=False)

    def search(self, q):
        """q [T, n_head * d_key] -> slots and weights, each [T, n_head, k_top]"""
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
        shape = x.shape
        x = x.reshape(-1, shape[-1])
        q = self.query_proj(x)
        with torch.autocast(x.device.type, enabled=False):
            slot, weight = self.search(q)
            slot, weight = slot.flatten(1), weight.flatten(1)
            if probe is not None:
                probe(slot, weight)
            return SlotSum.apply(self.values.weight, slot, weight).view(shape)


class CausalAttention(torch.autograd.Function):
    """softmax(q k^T / sqrt(d)) v over earlier positions; q, k, v [n_seq * n_head, n_tok, d].

    For a few hundred positions keeping the probabilities costs less than computing them again,
    which is what the fused attention of PyTorch does in its backward: on a CPU that was 40 % of
    a training step. Skipping the masked half by blocks loses more in copies than it saves.
    """

    @staticmethod
    def forward(ctx, q, k, v):
        ctx.scale = q.shape[2] ** -0.5
        mask = q.new_full((q.shape[1], q.shape[1]), -torch.inf).triu_(1)
        p = torch.baddbmm(mask, q, k.transpose(1, 2), alpha=ctx.scale).softmax(-1)
        ctx.save_for_backward(q, k, v, p)
        return torch.bmm(p, v)

    @staticmethod
    def backward(ctx, grad):
        q, k, v, p = ctx.saved_tensors
        d_v = torch.bmm(p.transpose(1, 2), grad)
        d_p = torch.bmm(grad, v.transpose(1, 2))
        d_s = torch._softmax_backward_data(d_p, p, -1, p.dtype)
        d_q = torch.bmm(d_s, k).mul_(ctx.scale)
        d_k = torch.bmm(d_s.transpose(1, 2), q).mul_(ctx.scale)
        return d_q, d_k, d_v


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
        q, k, v = qkv.view(n_seq, n_tok, 3, self.n_head, -1).permute(2, 0, 3, 1, 4).flatten(1, 2)
        with torch.autocast(x.device.type, enabled=False):
            y = CausalAttention.apply(q, k, v).view(n_seq, self.n_head, n_tok, -1)
        return self.out_lin(y.transpose(1, 2).reshape(n_seq, n_tok, d_model))


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
        self.memories = nn.ModuleDict({f"{m['layer']}_in": ProductKeyMemory(d_model, m)
                                       for m in c["memories"]})
        self.ffns = nn.ModuleDict({str(i): FeedForward(d_model, c["d_ff"], c["activation"])
                                   for i in range(n_layer) if f"{i}_in" not in self.memories})
        self.pred_layer = OutputLayer(d_model, c["vocab_size"])
        self.init_weights()
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

    def forward(self, ids, probe=None):
        """ids [n_seq, n_tok] -> hidden states [n_seq, n_tok, d_model] in fp32"""
        x = self.embeddings(ids) + self.position_embeddings.weight[:ids.shape[1]]
        x = self.layer_norm_emb(x)
        for i, attention in enumerate(self.attentions):
            x = self.layer_norm1[i](x + attention(x))
            if f"{i}_in" in self.memories:
                y = self.memories[f"{i}_in"](x, probe)
            else:
                y = self.ffns[str(i)](x)
            x = self.layer_norm2[i](x + y)
        return x


class OutputLoss(torch.autograd.Function):
    """Mean cross entropy of a linear output layer, made of a few tokens at a time.

    x [T, D], weight [V, D], bias [V], targets [T]. The gradients are computed in the forward,
    where each chunk of logits exists anyway, so the [T, V] array is never whole.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, targets, n_chunk):
        low = torch.bfloat16 if torch.is_autocast_enabled(x.device.type) else x.dtype
        with torch.autocast(x.device.type, enabled=False):
            x16, w16, b16 = x.to(low), weight.to(low), bias.to(low)
            d_x = torch.empty_like(x)
            d_w = torch.zeros_like(weight)
            d_b = torch.zeros_like(bias)
            loss = x.new_zeros(())
            n_tok = x.shape[0]
            for a in range(0, n_tok, n_chunk):
                part, target = x16[a:a + n_chunk], targets[a:a + n_chunk, None]
                logp = F.log_softmax(F.linear(part, w16, b16), -1, dtype=torch.float)
                loss -= logp.gather(1, target).sum()
                grad = logp.exp_()
                grad.scatter_add_(1, target, -torch.ones_like(target, dtype=grad.dtype))
                grad *= 1 / n_tok
                d_b += grad.sum(0)
                grad = grad.to(low)
                d_x[a:a + n_chunk] = grad @ w16
                d_w += grad.t() @ part
        ctx.save_for_backward(d_x, d_w, d_b)
        return loss / n_tok

    @staticmethod
    def backward(ctx, g):
        d_x, d_w, d_b = ctx.saved_tensors
        return d_x * g, d_w * g, d_b * g, None, None


def output_loss(proj, hidden, targets, n_chunk=256):
    return OutputLoss.apply(hidden.flatten(0, 1), proj.weight, proj.bias, targets.flatten(), n_chunk)
