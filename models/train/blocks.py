"""What the models share: sums of slots, causal attention, and the loss of an output layer, each with
a backward of its own. model.py, memory_llama.py, all_attention.py and memory.py use them.
"""
import torch
import torch.nn.functional as F

PRECISIONS = {"bf16": torch.bfloat16, "f32": torch.float}  # of a training's matrix products


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
        offsets = torch.arange(0, n_tok * n_read, n_read, device=flat.device)
        token = torch.arange(n_tok, device=flat.device).repeat_interleave(
            n_read, output_size=n_tok * n_read)
        d_weight = None
        if ctx.needs_input_grad[2]:
            d_weight = torch.ops.aten._embedding_bag_per_sample_weights_backward(
                grad, values, flat, offsets, token, 0).view_as(weight)
        if not ctx.needs_input_grad[0]:
            return None, None, d_weight
        ordered, order = torch.sort(flat)
        start = torch.searchsorted(ordered, torch.arange(values.shape[0], device=flat.device))
        d_values = F.embedding_bag(order // n_read, grad, start, mode="sum",
                                   per_sample_weights=weight.flatten()[order])
        return d_values, None, d_weight


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


def causal_attention(q, k, v):
    """q, k, v [n_seq, n_head, n_tok, d] -> the same shape; k and v may have a divisor of n_head"""
    if k.shape[1] != q.shape[1]:
        k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    if q.is_cuda:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    y = CausalAttention.apply(*(t.flatten(0, 1) for t in (q, k, v)))
    return y.view_as(q)


class OutputLoss(torch.autograd.Function):
    """Mean cross entropy of a linear output layer, made of a few tokens at a time.

    x [T, D], weight [V, D], bias [V] or None, targets [T]. The gradients are computed in the
    forward, where each chunk of logits exists anyway, so the [T, V] array is never whole.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, targets, n_chunk):
        low = torch.bfloat16 if torch.is_autocast_enabled(x.device.type) else x.dtype
        with torch.autocast(x.device.type, enabled=False):
            x16, w16, b16 = x.to(low), weight.to(low), None if bias is None else bias.to(low)
            d_x = torch.empty_like(x)
            d_w = torch.zeros_like(weight)
            d_b = None if bias is None else torch.zeros_like(bias)
            loss = x.new_zeros(())
            n_tok = x.shape[0]
            for a in range(0, n_tok, n_chunk):
                part, target = x16[a:a + n_chunk], targets[a:a + n_chunk, None]
                logp = F.log_softmax(F.linear(part, w16, b16), -1, dtype=torch.float)
                loss -= logp.gather(1, target).sum()
                grad = logp.exp_()
                grad.scatter_add_(1, target, -torch.ones_like(target, dtype=grad.dtype))
                grad *= 1 / n_tok
                if d_b is not None:
                    d_b += grad.sum(0)
                grad = grad.to(low)
                d_x[a:a + n_chunk] = grad @ w16
                d_w += grad.t() @ part
        ctx.save_for_backward(d_x, d_w, d_b)
        return loss / n_tok

    @staticmethod
    def backward(ctx, g):
        d_x, d_w, d_b = ctx.saved_tensors
        return d_x * g, d_w * g, None if d_b is None else d_b * g, None, None


def output_loss(proj, hidden, targets, n_chunk=None):
    """Mean cross entropy of the linear layer proj; n_chunk tokens at a time, which suits the device
    if it is not given: a CPU's cache holds few logits, and a GPU wants large products."""
    if n_chunk is None:
        n_chunk = 8192 if hidden.is_cuda else 256
    return OutputLoss.apply(hidden.flatten(0, 1), proj.weight, proj.bias, targets.flatten(), n_chunk)
