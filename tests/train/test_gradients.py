"""Each backward that is written out is that of the same sums left to autograd; windows and masks are those of the text."""

import math

import pytest

torch = pytest.importorskip("torch")

import all_attention  # noqa: E402
import blocks  # noqa: E402


def same(plain, ours, inputs, tolerance=1e-9):
    """Both functions of the inputs give the same, and the same gradients."""
    due, got = plain(*inputs), ours(*inputs)
    torch.testing.assert_close(got, due, rtol=tolerance, atol=tolerance)
    grad = torch.randn_like(due)
    for a, b in zip(torch.autograd.grad(due, inputs, grad), torch.autograd.grad(got, inputs, grad), strict=True):
        torch.testing.assert_close(b, a, rtol=tolerance, atol=tolerance)


def numbers(*shape):
    return torch.randn(*shape, dtype=torch.double, requires_grad=True)


def test_of_causal_attention():
    torch.manual_seed(1)
    q, k, v = numbers(2, 4, 7, 6), numbers(2, 2, 7, 6), numbers(2, 2, 7, 6)

    def plain(q, k, v):
        k, v = (t.repeat_interleave(2, 1) for t in (k, v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    same(plain, blocks.causal_attention, (q, k, v))


@pytest.mark.parametrize("bias", [True, False])
def test_of_the_loss_of_an_output_layer(bias):
    torch.manual_seed(2)
    x, weight, targets = numbers(2, 5, 6), numbers(11, 6), torch.randint(0, 11, (2, 5))
    inputs = (x, weight, numbers(11)) if bias else (x, weight)

    def plain(x, weight, b=None):
        logits = torch.nn.functional.linear(x, weight, b).flatten(0, 1)
        return torch.nn.functional.cross_entropy(logits, targets.flatten())

    def ours(x, weight, b=None):
        return blocks.OutputLoss.apply(x.flatten(0, 1), weight, b, targets.flatten(), 3)

    same(plain, ours, inputs, 1e-6)  # Its softmax is in fp32.


def test_of_attention_over_a_span_and_persistent_vectors():
    """From the text: a softmax over both; what is seen times the mask; all divided by their sum + EPS."""
    torch.manual_seed(3)
    n_head, n_seq, n_tok, d, window, n = 2, 3, 5, 4, 6, 3
    inputs = (numbers(n_head, n_seq, n_tok, d), numbers(n_head, n_seq, window + n_tok, d),
              numbers(n_head, n_seq, window + n_tok, d), numbers(d, window), numbers(n_head, n, d),
              numbers(n_head, n, d), torch.rand(n_head, window, dtype=torch.double, requires_grad=True))

    def plain(q, k, v, positions, keys, values, mask):
        rows = []
        for t in range(n_tok):
            near = torch.einsum("hbd,hbjd->hbj", q[:, :, t], k[:, :, t:t + window] + positions.t())
            far = torch.einsum("hbd,hnd->hbn", q[:, :, t], keys)
            p = (torch.cat([near, far], -1) / math.sqrt(d)).softmax(-1)
            seen, persistent = p[..., :window] * mask[:, None], p[..., window:]
            y = torch.einsum("hbj,hbjd->hbd", seen, v[:, :, t:t + window])
            y = y + torch.einsum("hbn,hnd->hbd", persistent, values)
            rows.append(y / (seen.sum(-1, True) + persistent.sum(-1, True) + all_attention.EPS))
        return torch.stack(rows, 2)

    same(plain, all_attention.SpanAttention.apply, inputs, 1e-5)  # Its sum of weights is in fp32.


def test_spans_are_masked_and_windows_rounded_as_the_spec_says():
    layer = all_attention.Layer({"d_model": 8, "n_head": 2, "max_span": 300, "span_ramp": 32, "n_layer": 1,
                                 "n_persistent": 2, "norm_eps": 1e-5})
    for spans in ((0.0, 0.0), (0.1, 0.35), (1.0, 0.2), (0.893, 0.894)):
        layer.spans.data[:] = torch.tensor(spans)
        longest = max(min(300, math.ceil(z * 300) + 32) for z in layer.spans.tolist())
        window = 300 - 64 * (min(299, 300 - longest) // 64)
        assert layer.window() == window
        due = [[min(1.0, max(0.0, (1 - j + z * 300) / 32 + 1)) for j in range(window, 0, -1)] for z in spans]
        torch.testing.assert_close(layer.mask(window), torch.tensor(due), rtol=0, atol=1e-5)


def test_a_token_sees_those_before_it_and_not_itself():
    torch.manual_seed(4)
    model = all_attention.AllAttention({"vocab_size": 9, "d_model": 8, "n_head": 2, "max_span": 6, "span_ramp": 2,
                                        "n_layer": 2, "n_persistent": 2, "norm_eps": 1e-5, "tie_output": False}).eval()
    ids = torch.randint(0, 9, (2, 11))
    with torch.no_grad():
        past = model.start(2)
        whole = model(ids, past)
        parts, other = [], model.start(2)
        for a, b in ((0, 1), (1, 4), (4, 11)):
            parts.append(model(ids[:, a:b], other))
    torch.testing.assert_close(torch.cat(parts, 1), whole)
    torch.testing.assert_close(other, past)
