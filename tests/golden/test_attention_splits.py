"""The ablations attn-split and head-split, which have no checkpoints, against their definition here.

"Augmenting Self-attention with Persistent Memory" (2019) gives them a sentence each. A random model is
computed in float64 below; joint attention, which the authors' own numbers check elsewhere, shows that
the definition is right in everything else.
"""

import golden_harness as gh
import numpy as np
import pytest

VOCAB, WIDTH, LAYERS, HEADS, PERSISTENT, MAX_SPAN, RAMP = 13, 32, 2, 4, 3, 150, 8
HEAD = WIDTH // HEADS
SPLITS = ["joint", "attn-split", "head-split"]
TOLERANCE = 1e-4


def softmax(s):
    e = np.exp(s - s.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def norm(x, tensors, name):
    x = x - x.mean(-1, keepdims=True)
    x = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5)
    return x * tensors[name + ".weight"] + tensors[name + ".bias"]


def make_tensors(split):
    rng = np.random.default_rng(7)
    text = HEADS // 2 if split == "head-split" else HEADS
    alone = HEADS - text if split == "head-split" else HEADS
    shapes = {"embeddings.weight": (VOCAB, WIDTH), "positions": (HEAD, MAX_SPAN),
              "output.weight": (VOCAB, WIDTH), "output.bias": (VOCAB,)}
    for i in range(LAYERS):
        at = "layers.%d." % i
        shapes.update({at + "query.weight": (WIDTH, WIDTH), at + "out.weight": (WIDTH, WIDTH),
                       at + "key.weight": (text * HEAD, WIDTH),
                       at + "value.weight": (text * HEAD, WIDTH), at + "spans": (text,),
                       at + "persistent.keys": (alone, PERSISTENT, HEAD),
                       at + "persistent.values": (alone, PERSISTENT, HEAD),
                       at + "norm1.weight": (WIDTH,), at + "norm1.bias": (WIDTH,)})
    tensors = {name: rng.normal(0, 0.5, shape) for name, shape in shapes.items()}
    for i in range(LAYERS):
        tensors["layers.%d.spans" % i] = rng.uniform(0.05, 0.45, text)
    return {name: t.astype(np.float32) for name, t in tensors.items()}


def attend(tensors, at, x, split):
    """The heads' outputs side by side, [n, WIDTH], before the output matrix."""
    n = len(x)
    q = x @ tensors[at + "query.weight"].T
    k, v = x @ tensors[at + "key.weight"].T, x @ tensors[at + "value.weight"].T
    spans = tensors[at + "spans"].astype(np.float64) * MAX_SPAN
    longest = min(MAX_SPAN, max(np.ceil(spans)) + RAMP)
    window = int(MAX_SPAN - 64 * (min(MAX_SPAN - 1, MAX_SPAN - longest) // 64))
    distance = np.arange(1, window + 1)
    past = np.arange(n)[:, None] - distance  # [n, window] positions, below 0 before the text
    y = np.zeros((n, WIDTH))
    for head in range(HEADS):
        cols = slice(head * HEAD, (head + 1) * HEAD)
        sees_text = split != "head-split" or head < HEADS // 2
        first_alone = HEADS // 2 if split == "head-split" else 0
        scores, values, masks = [], [], []
        if sees_text:
            near = np.where(past[..., None] >= 0, k[past.clip(0)][..., cols], 0)
            near = near + tensors["positions"].T[MAX_SPAN - distance]
            scores.append(np.einsum("nc,nwc->nw", q[:, cols], near))
            values.append(np.where(past[..., None] >= 0, v[past.clip(0)][..., cols], 0))
            masks.append(np.clip((1 - distance + spans[head]) / RAMP + 1, 0, 1) + np.zeros((n, 1)))
        if split != "head-split" or not sees_text:
            scores.append(q[:, cols] @ tensors[at + "persistent.keys"][head - first_alone].T)
            values.append(tensors[at + "persistent.values"][head - first_alone] + np.zeros((n, 1, 1)))
            masks.append(np.ones((n, PERSISTENT)))
        if split == "joint":
            scores, values, masks = [[np.concatenate(part, 1)] for part in (scores, values, masks)]
        for s, value, mask in zip(scores, values, masks):
            share = softmax(s / np.sqrt(HEAD)) * mask
            share = share / (share.sum(1, keepdims=True) + (0 if mask.min() == 1 else 1e-8))
            y[:, cols] += np.einsum("nw,nwc->nc", share, value)
    return y


def forward(tensors, ids, split):
    """log p of each next token, [n, VOCAB], in float64."""
    tensors = {name: t.astype(np.float64) for name, t in tensors.items()}
    x = tensors["embeddings.weight"][ids]
    for i in range(LAYERS):
        at = "layers.%d." % i
        y = attend(tensors, at, x, split) @ tensors[at + "out.weight"].T
        x = norm(x + y, tensors, at + "norm1")
    z = x @ tensors["output.weight"].T + tensors["output.bias"]
    return np.log(softmax(z))


def write_model(directory, tensors, **config):
    gh.write_model(directory, tensors, {
        "model_type": "all_attention", "vocab_size": VOCAB, "d_model": WIDTH, "n_layer": LAYERS,
        "n_head": HEADS, "d_ff": 0, "n_persistent": PERSISTENT, "max_span": MAX_SPAN,
        "span_ramp": RAMP, "norm_eps": 1e-5, "tie_output": False, **config})


@pytest.mark.parametrize("device", ["ref", "cpu", "cuda"])
@pytest.mark.parametrize("split", SPLITS)
def test_a_split_follows_its_definition(tmp_path, split, device):
    tensors = make_tensors(split)
    write_model(tmp_path, tensors, **({} if split == "joint" else {"attention": split}))
    ids = np.random.default_rng(3).integers(0, VOCAB, 200)
    due = forward(tensors, ids, split)[np.arange(199), ids[1:]]
    server = gh.Server(tmp_path, "--device", device, "--dtype", "f32", "--max-batch-tokens", "32",
                       "--max-seqs", "2")
    got = server.post("/score", {"tokens": ids.tolist(), "logprobs": 0})["results"][0]["tokens"]
    server.stop()
    assert max(abs(t["logprob"] - d) for t, d in zip(got[1:], due)) <= TOLERANCE


def test_each_split_is_another_model():
    ids = np.random.default_rng(3).integers(0, VOCAB, 50)
    tensors = make_tensors("joint")  # attn-split has the same
    assert abs(forward(tensors, ids, "joint") - forward(tensors, ids, "attn-split")).max() > 0.01


@pytest.mark.parametrize("config, words", [
    ({"attention": "single-head"}, ["attention", "single-head", "attn-split"]),
    ({"attention": "head-split", "n_head": 1}, ["head-split", "n_head is 1", "even"]),
    ({"attention": "attn-split", "n_persistent": 0, "d_ff": 8}, ["n_persistent is 0", "joint"])])
def test_what_cannot_be_split_is_refused(tmp_path, config, words):
    write_model(tmp_path, make_tensors("joint"), **config)
    status, _, error = gh.run_program("inspect", "--model", tmp_path)
    assert status == 1 and all(word in error for word in words), error
