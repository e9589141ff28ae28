"""The same model in straightforward PyTorch, on the same GPU: what the engine's figures stand beside.

    baseline.py [--device cuda] [--seconds 0.2] [--budget 70] [--small] [--verify CASE MODEL]

It prints JSON lines. With --verify it first checks itself on a golden case (tests/golden/xlm) whose converted
model is MODEL; with --budget 0 that is all.

Written as one would write it: bf16 weights and activations, scaled_dot_product_attention over a static
key/value cache, topk over the sums of both halves' best keys, embedding_bag over the values. As in
models/train/model.py, memory scores are F32. Each figure is taken eagerly and, on a GPU, as a replayed CUDA
graph; as for the engine, a step ends when the drawn tokens are on the host. Weights are random.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

MODEL_A = {"n_layer": 12, "d_model": 1024, "n_head": 16, "d_ff": 4096, "vocab_size": 60000,
           "max_position": 512, "memory_layer": 6, "n_key": 512, "k_top": 32, "mem_head": 4,
           "d_key": 256}
SMALL = {"n_layer": 3, "d_model": 64, "n_head": 4, "d_ff": 256, "vocab_size": 500,
         "max_position": 64, "memory_layer": 1, "n_key": 32, "k_top": 8, "mem_head": 4, "d_key": 32}


# ---- the model --------------------------------------------------------------------------------

class Memory:
    """A product-key memory: query, the k best of each half, the k best sums, their values."""

    def __init__(self, query_w, query_b, keys, values, k_top):
        self.query_w, self.query_b = query_w, query_b
        self.keys = keys.float()                         # [n_head, 2, n_key, d_key / 2]
        self.values, self.k_top = values, k_top

    def __call__(self, x):
        n_head, _, n_key, half = self.keys.shape
        query = F.linear(x, self.query_w, self.query_b).float().view(-1, n_head, 2, half)
        score = torch.einsum("nhck,hcmk->nhcm", query, self.keys)
        best, index = score.topk(self.k_top, dim=-1)
        pairs = (best[:, :, 0, :, None] + best[:, :, 1, None, :]).flatten(2)
        total, pair = pairs.topk(self.k_top, dim=-1)
        first = index[:, :, 0].gather(-1, pair // self.k_top)
        second = index[:, :, 1].gather(-1, pair % self.k_top)
        slots = (first * n_key + second).flatten(1)
        shares = total.softmax(-1).flatten(1).to(self.values.dtype)
        return F.embedding_bag(slots, self.values, per_sample_weights=shares, mode="sum")


class Model:
    """config as above; weight(name, *shape) gives the parameters."""

    def __init__(self, config, weight):
        c = self.config = config
        d, ff = c["d_model"], c["d_ff"]
        self.eps = c.get("norm_eps", 1e-12)
        self.act = F.relu if c.get("activation") == "relu" else F.gelu
        self.tok, self.pos = weight("tok", c["vocab_size"], d), weight("pos", c["max_position"], d)
        self.norm_emb = weight("gain", d), weight("bias", d)
        self.layers = []
        for i in range(c["n_layer"]):
            memory = None
            if i == c["memory_layer"]:
                q = c["mem_head"] * c["d_key"]
                memory = Memory(weight("query", q, d), weight("bias", q),
                                weight("keys", c["mem_head"], 2, c["n_key"], c["d_key"] // 2),
                                weight("values", c["n_key"] ** 2, d), c["k_top"])
            self.layers.append({
                "qkv": (weight("qkv", 3 * d, d), weight("bias", 3 * d)),
                "out": (weight("out", d, d), weight("bias", d)),
                "norm1": (weight("gain", d), weight("bias", d)),
                "norm2": (weight("gain", d), weight("bias", d)),
                "up": memory is None and (weight("up", ff, d), weight("bias", ff)),
                "down": memory is None and (weight("down", d, ff), weight("bias", d)),
                "memory": memory})
        self.bias = weight("bias", c["vocab_size"])

    def norm(self, x, gain_bias):
        return F.layer_norm(x, x.shape[-1:], *gain_bias, eps=self.eps)

    def hidden(self, ids, positions, attend):
        """ids, positions [n_seq, n] -> [n_seq, n, d]; attend(layer, q, k, v) -> [n_seq, head, n, :]"""
        n_seq, n = ids.shape
        x = self.norm(F.embedding(ids, self.tok) + F.embedding(positions, self.pos), self.norm_emb)
        for i, layer in enumerate(self.layers):
            qkv = F.linear(x, *layer["qkv"]).view(n_seq, n, 3, self.config["n_head"], -1)
            y = attend(i, *qkv.permute(2, 0, 3, 1, 4))
            y = F.linear(y.transpose(1, 2).reshape(n_seq, n, -1), *layer["out"])
            x = self.norm(x + y, layer["norm1"])
            if layer["memory"]:
                y = layer["memory"](x.flatten(0, 1)).view_as(x)
            else:
                y = F.linear(self.act(F.linear(x, *layer["up"])), *layer["down"])
            x = self.norm(x + y, layer["norm2"])
        return x

    def logits(self, x):
        return F.linear(x, self.tok, self.bias)

    def prompt(self, ids):
        positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        return self.hidden(ids, positions, lambda i, q, k, v: F.scaled_dot_product_attention(
            q, k, v, is_causal=True))


class Decoder:
    """One token of each sequence per call, over a static cache; everything it reads stays in place."""

    def __init__(self, model, n_seq, first, device, dtype):
        c = model.config
        shape = n_seq, c["n_head"], c["max_position"], c["d_model"] // c["n_head"]
        self.model, self.first = model, first
        self.cache = [(torch.randn(shape, device=device, dtype=dtype),
                       torch.randn(shape, device=device, dtype=dtype)) for _ in model.layers]
        self.ids = torch.zeros(n_seq, 1, dtype=torch.long, device=device)
        self.pos = torch.full((1,), first, dtype=torch.long, device=device)
        self.steps = torch.arange(c["max_position"], device=device)

    def attend(self, i, q, k, v):
        keys, values = self.cache[i]
        keys.index_copy_(2, self.pos, k)
        values.index_copy_(2, self.pos, v)
        mask = (self.steps <= self.pos)[None, None, None]
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)

    def step(self):
        x = self.model.hidden(self.ids, self.pos.expand_as(self.ids), self.attend)
        self.ids.copy_(self.model.logits(x[:, -1]).argmax(-1, keepdim=True))
        span = self.model.config["max_position"] - self.first
        self.pos.copy_(self.first + (self.pos + 1 - self.first) % span)
        return self.ids


# ---- measuring --------------------------------------------------------------------------------

class Bench:
    def __init__(self, device, seconds, end, dtype=torch.bfloat16):
        self.device, self.seconds, self.end, self.dtype = device, seconds, end, dtype
        self.gpu = device.startswith("cuda")

    def random_weight(self, name, *shape):
        if name == "gain":
            return torch.ones(shape, device=self.device, dtype=self.dtype)
        return torch.randn(shape, device=self.device, dtype=self.dtype) * (
            0.02 if name == "bias" else shape[-1] ** -0.5)

    def wait(self):
        if self.gpu:
            torch.cuda.synchronize()

    def time(self, call):
        """Seconds per call: median, fastest, slowest but a tenth, number."""
        warm = time.perf_counter()
        for i in range(3):
            call()
            self.wait()
            if i and time.perf_counter() - warm > self.seconds:
                break
        samples, begun = [], time.perf_counter()
        while len(samples) < 3 or (time.perf_counter() - begun < self.seconds
                                   and len(samples) < 4096):
            start = time.perf_counter()
            call()
            self.wait()
            samples.append(time.perf_counter() - start)
        samples.sort()
        return (statistics.median(samples), samples[0], samples[len(samples) * 9 // 10],
                len(samples))

    def graph(self, call):
        """A replay of the call as one CUDA graph."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                call()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = call()
        return lambda: (graph.replay(), result)[1]

    def measure(self, head, call, times=1, to_host=False):
        """Prints the figure eagerly and captured."""
        for backend in ["torch eager", "torch graph"] if self.gpu else ["torch eager"]:
            if time.monotonic() > self.end:
                raise TimeoutError
            try:
                run = call if backend == "torch eager" else self.graph(call)
                seconds = self.time((lambda: run().cpu()) if to_host else run)
            except RuntimeError as e:  # also out of memory; the other figures may do
                emit({**head, "part": "error", "backend": backend, "error": str(e).split("\n")[0]})
                continue
            us = [s / times * 1e6 for s in seconds[:3]]
            emit({**head, "us": us[0], "us_min": us[1], "us_p90": us[2], "n": seconds[3] * times,
                  "backend": backend, "dtype": str(self.dtype).split(".")[1]
                  .replace("bfloat16", "bf16").replace("float32", "f32")})


def emit(record):
    print(json.dumps(record), flush=True)


def copy_rate(bench, n):
    a = torch.randint(0, 100, (n,), dtype=torch.uint8, device=bench.device)
    b = torch.empty_like(a)
    return 2 * n / bench.time(lambda: b.copy_(a))[1]


def product_rate(bench, n):
    x, y = (torch.randn(n, n, device=bench.device, dtype=bench.dtype) for _ in range(2))
    return 2 * n ** 3 / bench.time(lambda: x @ y)[0]


def rates(bench, small):
    """A large copy's bytes per second, read and written, and the rate of a large bf16 product."""
    emit({"part": "rates", "backend": "torch", "torch": torch.__version__,
          "cuda": torch.version.cuda,
          "copy_bytes_per_s": copy_rate(bench, 1 << (20 if small else 30)),
          "flops_bf16_per_s": product_rate(bench, 256 if small else 8192)})


def head_of(config, part, op, rows):
    memory = config["memory_layer"] is not None
    return {"part": part, "op": op, "rows": rows, "layers": config["n_layer"],
            "width": config["d_model"], "memory": "product" if memory else "none",
            "keys": config["n_key"] if memory else 0}


SCORE_ROWS = 2048  # rows of logits at once


def score(model, ids):
    x = model.prompt(ids)[:, :-1].flatten(0, 1)
    targets = ids[:, 1:].flatten()
    return torch.cat([
        model.logits(x[i:i + SCORE_ROWS]).float().log_softmax(-1)
        .gather(1, targets[i:i + SCORE_ROWS, None]) for i in range(0, len(x), SCORE_ROWS)])


def steps(bench, config, decode, prompt, scored):
    model = Model(config, bench.random_weight)
    first = config["max_position"] // 2
    for n in decode:
        decoder = Decoder(model, n, first, bench.device, bench.dtype)
        bench.measure(head_of(config, "decode", "step", n), decoder.step, to_host=True)
        del decoder
    for part, sizes in (("prefill", prompt), ("score", scored)):
        for n in sizes:
            length = min(n, config["max_position"])
            ids = torch.randint(config["vocab_size"], (n // length, length), device=bench.device)
            call = (lambda: model.logits(model.prompt(ids)[:, -1]).argmax(-1)) if (
                part == "prefill") else lambda: score(model, ids)
            bench.measure(head_of(config, part, "step", n), call, to_host=True)


def memory_layer(bench, config, rows, cold_bytes):
    """The layer alone, over copies of its weights that no cache holds together."""
    d, q = config["d_model"], config["mem_head"] * config["d_key"]
    key_shape = config["mem_head"], 2, config["n_key"], config["d_key"] // 2
    values = bench.random_weight("values", config["n_key"] ** 2, d)
    n_copy = int(min(64, 1 + cold_bytes // (2 * q * d + 4 * np.prod(key_shape))))
    layers = [Memory(bench.random_weight("query", q, d), bench.random_weight("bias", q),
                     bench.random_weight("keys", *key_shape), values, config["k_top"])
              for _ in range(n_copy)]
    for n in rows:
        inputs = torch.randn(n_copy, n, d, device=bench.device, dtype=bench.dtype)

        def call():
            for layer, x in zip(layers, inputs):
                layer(x)
        bench.measure(head_of(config, "memory", "layer", n), call, times=n_copy)


def run(args):
    bench = Bench(args.device, args.seconds, time.monotonic() + args.budget)
    base = SMALL if args.small else MODEL_A
    rates(bench, args.small)
    if args.small:
        steps(bench, base, [1, 2], [64], [64])
        memory_layer(bench, base, [1, 4], 1 << 18)
        return
    steps(bench, base, [1, 8, 32, 128, 256], [512, 1024, 2048, 4096, 8192, 16384],
          [512, 4096, 16384])
    memory_layer(bench, base, [1, 32, 256, 1024], 160 << 20)
    wide = {"d_model": 1600, "d_ff": 6400}
    deep = {"n_layer": 24, "memory_layer": None}
    for change in (deep, wide, {**wide, **deep}):
        steps(bench, {**base, **change}, [1, 32], [4096], [])


# ---- is it the same model? --------------------------------------------------------------------

def golden_model(folder, device):
    """The model of a converted directory in F32; kinds: no memory or one product memory "in"."""
    config = json.loads((folder / "config.json").read_text())
    data = (folder / "model.safetensors").read_bytes()
    n = int.from_bytes(data[:8], "little")
    header = json.loads(data[8:8 + n])
    header.pop("__metadata__", None)
    tensors = {name: torch.from_numpy(np.frombuffer(
        data[8 + n:][slice(*e["data_offsets"])], "<f4").reshape(e["shape"]).copy()).to(device)
        for name, e in header.items() if e["dtype"] == "F32"}
    memory = (config["memories"] or [None])[0]
    c = {**config, "memory_layer": memory and memory["layer"]}
    if memory:
        c.update(n_key=memory["n_key"], k_top=memory["k_top"], mem_head=memory["n_head"],
                 d_key=memory["d_key"])
    names = iter(parameter_names(c, tensors))
    return Model(c, lambda *_: next(names))


def parameter_names(c, t):
    """The parameters in the order in which Model asks for them; batch norm folded into the query."""
    yield from (t["embeddings.weight"], t["position_embeddings.weight"],
                t["layer_norm_emb.weight"], t["layer_norm_emb.bias"])
    for i in range(c["n_layer"]):
        if i == c["memory_layer"]:
            yield from folded_memory(t, "memories.%d_in." % i)
        a = "attentions.%d." % i
        for kind in ("weight", "bias"):
            yield torch.cat([t["%s%s_lin.%s" % (a, p, kind)] for p in "qkv"])
        parts = [a + "out_lin", "layer_norm1.%d" % i, "layer_norm2.%d" % i]
        if i != c["memory_layer"]:
            parts += ["ffns.%d.lin1" % i, "ffns.%d.lin2" % i]
        for part in parts:
            yield from (t[part + ".weight"], t[part + ".bias"])
    yield t["pred_layer.proj.bias"]


def folded_memory(t, prefix):
    q = prefix + "query_proj.query_mlps."
    weight, bias = t[q + "0.weight"].double(), t[q + "0.bias"].double()
    gain, beta, mean, var = (t[q + "1." + p].double()
                             for p in ("weight", "bias", "running_mean", "running_var"))
    scale = gain / (var + 1e-5).sqrt()
    yield (weight * scale[:, None]).float()
    yield ((bias - mean) * scale + beta).float()
    yield from (t[prefix + "keys"], t[prefix + "values.weight"])


@torch.no_grad()
def verify(case, folder, device):
    """Whether log-probabilities are near those that the authors' code computed."""
    due = json.loads((case / "expected.json").read_text())
    model = golden_model(folder, device)
    worst = 0.0
    for item in due["sequences"][:3]:
        ids = torch.tensor([item["ids"]], device=device)
        got = score(model, ids)[:, 0].cpu().double().numpy()
        worst = max(worst, float(np.abs(got - np.array(item["logprobs_f64"])).max()))
    emit({"part": "verify", "case": case.name, "error": worst})
    return worst <= 1e-4


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=0.2)
    parser.add_argument("--budget", type=float, default=70)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--verify", nargs=2, type=Path, metavar=("CASE", "MODEL"))
    args = parser.parse_args()
    torch.manual_seed(1)
    if args.device == "cpu":
        torch.set_num_threads(1)  # a rehearsal: sizes are tiny
    same = verify(*args.verify, args.device) if args.verify else True
    try:
        with torch.no_grad():
            run(args) if args.budget > 0 else None
    except TimeoutError:
        emit({"part": "cut", "backend": "torch"})
    return 0 if same else 3


if __name__ == "__main__":
    sys.exit(main())
