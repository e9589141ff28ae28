"""The all-attention network with adaptive spans, to be trained on streams of tokens.

Sukhbaatar et al. 2019, "Augmenting Self-attention with Persistent Memory", section 3, and "Adaptive
Attention Span in Transformers", section 2.2. Layers, arithmetic and tensor names are those that
models/all_attention.c serves:

    h = token's row;  per layer  h = LN(h + W_out attention(h));  logits = W h + b

A token sees the `window` positions before its own, not itself, and the layer's persistent vectors.
A stream is fed block by block: of the blocks before, the inputs of each layer are kept, zero before
the stream's start, and keys and values are made of them anew; no gradient enters the past.

Under bf16 autocast scores and weights of the attention are bf16 as well; the residual stream, norms,
spans and the loss are fp32.
"""
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

WINDOW_STEP = 64  # windows end in these steps: see models/all_attention.c
EPS = 1e-8


def band(whole, window):
    """View of [n, n_head, n_tok, window + n_tok]: column c of row i is column i + c."""
    a, b, n_tok, n_key = whole.shape
    stride = whole.stride()
    return whole.as_strided((a, b, n_tok, window), stride[:2] + (stride[2] + 1, 1))


class SpanAttention(torch.autograd.Function):
    """Heads first: q [K, B, T, d], k and v [K, B, window + T, d], positions [d, window], persistent
    keys and values [K, N, d], mask [K, window] -> [K, B, T, d]

    weights = softmax over the window and the persistent vectors; those of the window times the
    mask; all divided by their sum + EPS. Query i meets keys i .. i + window - 1: a band of the
    matrix of all products, and a view of it.
    """

    @staticmethod
    def forward(ctx, q, k, v, positions, keys, values, mask):
        n_head, n_seq, n_tok, d = q.shape
        window = mask.shape[1]
        q = q * d ** -0.5
        table = torch.cat([positions.expand(n_head, d, window), keys.transpose(1, 2)], 2)
        p = torch.bmm(q.view(n_head, -1, d), table).view(n_head, n_seq, n_tok, -1)
        near = torch.matmul(q, k.transpose(2, 3))
        p[..., :window] += band(near, window)
        p = p.softmax(-1)
        seen, persistent = p[..., :window], p[..., window:]
        weight = band(near.zero_(), window)
        torch.mul(seen, mask[:, None, None], out=weight)
        total = weight.sum(-1, True).float() + persistent.sum(-1, True).float()
        y = torch.matmul(near, v)
        y += torch.bmm(persistent.reshape(n_head, -1, keys.shape[1]), values).view_as(y)
        y = y / (total + EPS)
        ctx.save_for_backward(q, k, v, table, values, mask, p, near, total, y)
        return y.to(q.dtype)

    @staticmethod
    def backward(ctx, grad):
        q, k, v, table, values, mask, p, near, total, y = ctx.saved_tensors
        n_head, n_seq, n_tok, d = q.shape
        window = mask.shape[1]
        flat = (n_head, n_seq * n_tok, -1)
        grad = grad / (total + EPS)
        mean = (grad * y).sum(-1, True).to(q.dtype)
        grad = grad.to(q.dtype)
        d_v = torch.matmul(near.transpose(2, 3), grad)
        persistent = p[..., window:].reshape(flat)
        d_values = torch.bmm(persistent.transpose(1, 2), grad.reshape(flat))

        # The gradient of the weights, less its mean over them, which leaves out a term of EPS.
        d_p = torch.empty_like(p)
        d_near = torch.matmul(grad, v.transpose(2, 3))
        torch.sub(band(d_near, window), mean, out=d_p[..., :window])
        torch.sub(torch.bmm(grad.reshape(flat), values.transpose(1, 2)).view(n_head, n_seq, n_tok, -1),
                  mean, out=d_p[..., window:])
        d_s = d_p.mul_(p)
        ones = d_s.new_ones(n_head, 1, n_seq * n_tok)
        d_mask = torch.bmm(ones, d_s.view(flat))[:, 0, :window]
        d_s[..., :window] *= mask[:, None, None]

        d_table = torch.bmm(q.view(flat).transpose(1, 2), d_s.view(flat))
        d_q = torch.bmm(d_s.view(flat), table.transpose(1, 2)).view_as(q)
        band(d_near.zero_(), window).copy_(d_s[..., :window])
        d_q += torch.matmul(d_near, k)
        d_k = torch.matmul(d_near.transpose(2, 3), q)
        return (d_q * d ** -0.5, d_k, d_v, d_table[..., :window].sum(0),
                d_table[..., window:].transpose(1, 2), d_values, d_mask)


class Persistent(nn.Module):
    """Keys and values that stand beside those of the stream, for each head."""

    def __init__(self, n_head, n_persistent, d_head):
        super().__init__()
        self.keys = nn.Parameter(torch.randn(n_head, n_persistent, d_head))
        self.values = nn.Parameter(torch.randn(n_head, n_persistent, d_head))


class Layer(nn.Module):
    def __init__(self, config):
        super().__init__()
        d_model, self.n_head = config["d_model"], config["n_head"]
        self.max_span, self.ramp = config["max_span"], config["span_ramp"]
        for name in ("query", "key", "value", "out"):
            linear = nn.Linear(d_model, d_model, bias=False)
            nn.init.normal_(linear.weight, std=d_model ** -0.5)
            self.add_module(name, linear)
        # Branches start small, so that the post-norm layers begin near the identity.
        self.out.weight.data *= config["n_layer"] ** -0.5
        self.persistent = Persistent(self.n_head, config["n_persistent"], d_model // self.n_head)
        self.spans = nn.Parameter(torch.zeros(self.n_head))
        self.norm1 = nn.LayerNorm(d_model, eps=config["norm_eps"])

    def window(self):
        """Distances that count: those of the longest head, rounded up from the far end."""
        longest = max(math.ceil(z * self.max_span) + self.ramp for z in self.spans.tolist())
        unseen = min(max(self.max_span - longest, 0), self.max_span - 1)
        return self.max_span - unseen // WINDOW_STEP * WINDOW_STEP

    def mask(self, window):
        """[n_head, window]: the share of each distance, of the farthest first, that counts"""
        distance = torch.arange(window, 0, -1, device=self.spans.device)
        beyond = (1 - distance) + self.spans[:, None] * self.max_span
        return (beyond / self.ramp + 1).clamp(0, 1)

    def forward(self, x, past, positions):
        """x [B, T, D], past [B, max_span, D], positions [d, max_span] -> [B, T, D]"""
        n_seq, n_tok, d_model = x.shape
        window = self.window()
        seen = torch.cat([past[:, self.max_span - window:], x.to(past.dtype)], 1)
        q = self.query(x).view(n_seq, n_tok, self.n_head, -1).permute(2, 0, 1, 3).contiguous()
        kv = F.linear(seen, torch.cat([self.key.weight, self.value.weight]))
        k, v = kv.view(n_seq, window + n_tok, 2, self.n_head, -1).permute(2, 3, 0, 1, 4).contiguous()
        low = q.dtype
        with torch.autocast(x.device.type, enabled=False):
            y = SpanAttention.apply(q, k, v, positions[:, self.max_span - window:].to(low),
                                    self.persistent.keys.to(low), self.persistent.values.to(low),
                                    self.mask(window).to(low))
        return self.norm1(x + self.out(y.permute(1, 2, 0, 3).reshape(n_seq, n_tok, d_model)))


class AllAttention(nn.Module):
    LINEAR = ("query.weight", "key.weight", "value.weight", "out.weight")
    VALUES = ("persistent.keys", "persistent.values", "positions")

    def __init__(self, config):
        super().__init__()
        c = self.config = config
        d_model = c["d_model"]
        self.embeddings = nn.Embedding(c["vocab_size"], d_model)
        self.positions = nn.Parameter(torch.randn(d_model // c["n_head"], c["max_span"]))
        self.layers = nn.ModuleList(Layer(c) for _ in range(c["n_layer"]))
        self.output = nn.Linear(d_model, c["vocab_size"])
        nn.init.normal_(self.output.weight, std=d_model ** -0.5)
        nn.init.zeros_(self.output.bias)
        if c["tie_output"]:
            self.output.weight = self.embeddings.weight

    def start(self, n_seq, dtype=torch.float):
        """The past of streams that begin: [n_layer, n_seq, max_span, D]"""
        c = self.config
        return torch.zeros(c["n_layer"], n_seq, c["max_span"], c["d_model"], dtype=dtype,
                           device=self.positions.device)

    def forward(self, ids, past):
        """ids [B, T] -> hidden states [B, T, D]; past is moved on by T positions"""
        x = self.embeddings(ids)
        n_tok = ids.shape[1]
        for layer, rows in zip(self.layers, past):
            y = layer(x, rows, self.positions)
            with torch.no_grad():
                rows.copy_(torch.cat([rows[:, n_tok:], x[:, -rows.shape[1]:].to(rows.dtype)], 1))
            x = y
        return x

    def spans(self):
        """[n_layer, n_head]: distances that each head sees in full"""
        return self.config["max_span"] * torch.stack([layer.spans for layer in self.layers])
