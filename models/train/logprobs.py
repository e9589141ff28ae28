"""Log-probabilities of given tokens, by PyTorch: for evaluate.py, and for the probe of export.py."""
import torch


@torch.no_grad()
def logprobs(model, inputs, targets, probe=None):
    """Log-probabilities of the targets, in order, of windows of one length."""
    hidden = model(torch.tensor(inputs), probe)
    out = []
    for h, target in zip(hidden, targets):
        logits = model.output_layer()(h[len(h) - len(target):])
        out.append(logits.log_softmax(-1).gather(1, torch.tensor(target)[:, None])[:, 0])
    return torch.cat(out)


@torch.no_grad()
def stream_logprobs(model, ids, n_block=256):
    """Log-probabilities of all ids but the first, read as one stream."""
    past, out = model.start(1), []
    for a in range(0, len(ids) - 1, n_block):
        block = torch.tensor(ids[a:a + n_block + 1])
        logits = model.output(model(block[None, :-1], past)[0])
        out.append(logits.log_softmax(-1).gather(1, block[1:, None])[:, 0])
    return torch.cat(out)


def of_text(model, ids):
    """Of all ids but the first, by any model of ours."""
    values = stream_logprobs(model, ids) if hasattr(model, "start") else logprobs(model, [ids[:-1]], [ids[1:]])
    return [float(value) for value in values]
