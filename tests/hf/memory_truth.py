"""Memories added to small models of the transformers package, computed by PyTorch in float64.

    python3 tests/hf/memory_truth.py       writes tests/golden/hf-memory/<case> anew, which
                                           test_hf_memory.py reads

The modules are our own, written from the papers (Lample et al. 2019; Berges et al. 2024; He 2024): they
have the tensors, by name and layout, of the modules that people train, and compute the scores of all
slots at once, so that nothing of a fast search can be wrong here. A case takes its base from
tests/golden/hf; its folder holds memory.json, the memory's file as its makers save it, ids, the logits of
each row and a greedy text.
"""

import json
import shutil
import sys

import torch
from safetensors.numpy import save_file
from safetensors.torch import save_file as save_tensors
from torch import nn
from torch.nn import functional
from truth import GAP, N_PROMPT, ROOT, expect, load

FOLDER = ROOT / "tests" / "golden" / "hf-memory"
BASES = ROOT / "tests" / "golden" / "hf"
D, N_ID = 16, 24


def choose(scores, k, activation):
    """Slots and shares [.., head, k] of the scores of all slots [.., head, slot]."""
    best = scores.topk(k, -1)
    return best.indices, best.values.relu() if activation == "relu" else best.values.softmax(-1)


def all_scores(query, keys):
    """query [.., H, 2, w], keys [H, 2, N, w] → [.., H, N²]: slot i·N + j has the sum of both halves'."""
    half = torch.einsum("...hpw,hpnw->...hpn", query, keys)
    return (half[..., 0, :, None] + half[..., 1, None, :]).flatten(-2)


class Plain(nn.Module):
    """Ours: every option that memory.json has, under the plain names."""

    def __init__(self, o, table=None):
        super().__init__()
        heads, n_key, width = o["n_head"], o["sizes"][0], o["sizes"][1]
        value = o["sizes"][2] if o.get("value_projection") else D
        self.o, self.half = o, width // 2
        self.keys = nn.Parameter(torch.empty(heads, 2, n_key, width // 2))
        self.query = nn.Linear(D, heads * width)
        self.values = table or nn.Embedding(n_key ** 2, value)
        norm = o.get("query_norm", "none")
        run = {"half": width // 2, "head": width, "all": heads * width}[o.get("query_norm_of", "head")]
        eps = o.get("query_norm_eps", 1e-5)
        if norm == "batch":
            self.query_norm = nn.BatchNorm1d(heads * width, eps=eps)
        elif norm in ("layer", "rms"):
            kind = nn.LayerNorm if norm == "layer" else nn.RMSNorm
            self.query_norm = kind(run, eps=eps, elementwise_affine=o.get("query_norm_weight", True))
        self.run = run
        place = o["place"]
        if o.get("input_norm", "rms" if place == "after" else "none") != "none":
            kind = nn.LayerNorm if o.get("input_norm") == "layer" else nn.RMSNorm
            self.norm = kind(D, eps=o.get("input_norm_eps", o["model_eps"]),
                             elementwise_affine=o.get("input_norm_weight", True))
        if o.get("value_gate"):
            self.value_gate = nn.Linear(D, value)
        if o.get("value_projection"):
            self.value_proj = nn.Linear(value, D)
        if o.get("learned_temperature"):
            self.temperature = nn.Parameter(torch.empty(heads))
        gate = o.get("gate", "none")
        if gate == "scalar":
            self.gate = nn.Parameter(torch.empty(()))
        elif gate == "linear":
            self.gate = nn.Linear(D, 1)
        elif gate == "mlp":
            act = nn.GELU() if o.get("gate_activation") == "gelu" else nn.ReLU()
            self.gate = nn.Sequential(nn.Linear(D, 5), act, nn.Linear(5, 1))

    def forward(self, x):
        o = self.o
        x = self.norm(x) if hasattr(self, "norm") else x
        query = self.query(x)
        if o.get("query_norm") == "batch":
            query = self.query_norm(query.flatten(0, 1)).view(query.shape)
        elif o.get("query_norm") == "l2":
            query = functional.normalize(query.unflatten(-1, (-1, self.run)), dim=-1).flatten(-2)
        elif hasattr(self, "query_norm"):
            query = self.query_norm(query.unflatten(-1, (-1, self.run))).flatten(-2)
        keys = functional.normalize(self.keys, dim=-1) if o.get("keys_norm") == "l2" else self.keys
        scores = all_scores(query.unflatten(-1, (o["n_head"], 2, self.half)), keys)
        temperature = self.temperature[:, None] if o.get("learned_temperature") else o.get("temperature", 1)
        slots, shares = choose(scores / temperature, o["k_top"], o.get("scores"))
        y = (shares[..., None] * self.values(slots)).sum((-3, -2))
        if o.get("value_gate"):
            y = y * functional.silu(self.value_gate(x))
        if o.get("value_projection"):
            y = self.value_proj(y)
        if o.get("gate") == "scalar":
            return y * self.gate
        return y * self.gate(x).sigmoid() if hasattr(self, "gate") else y


class Hashing(nn.Module):
    """The memory layer of Memory Layers at Scale, with its names."""

    def __init__(self, o, table=None):
        super().__init__()
        heads, (n_key, width, value), self.o = o["n_head"], o["sizes"], o
        value = value if o.get("value_projection") else D
        self.keys = nn.Parameter(torch.empty(2 * heads * n_key, width // 2))
        layers = [nn.Linear(D, heads * width)]
        if o.get("query_norm") == "batch":
            layers.append(nn.BatchNorm1d(heads * width))
        self.query_proj = nn.Module()
        self.query_proj.query_mlps = nn.Sequential(*layers)
        if o.get("experts"):
            self.values_u, self.values_v = nn.Embedding(n_key ** 2, D), nn.Embedding(n_key ** 2, D)
        else:
            self.values = table or nn.EmbeddingBag(n_key ** 2, value, mode="sum")
        if o.get("value_projection"):
            self.swilu_projection, self.value_proj = nn.Linear(D, value), nn.Linear(value, D)
        if o.get("gate", "none") != "none":
            self.gating = nn.Linear(D, 1)

    def forward(self, x):
        o = self.o
        rows = x.flatten(0, 1)
        query = self.query_proj.query_mlps(rows).unflatten(-1, (o["n_head"], 2, -1))
        keys = self.keys.view(o["n_head"], 2, -1, self.keys.shape[1])
        slots, shares = choose(all_scores(query, keys), o["k_top"], None)
        slots, shares = slots.flatten(1), shares.flatten(1)
        if o.get("experts"):
            hidden = functional.gelu((self.values_u(slots) * rows[:, None]).sum(-1)) * shares
            y = (hidden[..., None] * self.values_v(slots)).sum(1)
        else:
            y = self.values(slots, per_sample_weights=shares)
        if o.get("value_projection"):
            y = self.value_proj(y * functional.silu(self.swilu_projection(rows)))
        if o.get("gate", "none") != "none":
            y = y * self.gating(rows).sigmoid()
        return y.view(x.shape)


class Halves(nn.Module):
    """What the two below share: queries by halves before heads, keys [H, N, 2, w]."""

    def slots(self, query, k, activation=None):
        query = query.unflatten(-1, (2, self.o["n_head"], -1))
        query = self.normed(query).swapaxes(-3, -2)
        return choose(all_scores(query, self.keys.permute(0, 2, 1, 3)), k, activation)

    def normed(self, query):
        return query


class ProductKey(Halves):
    """A product-key memory with the names of lucidrains' package, layer or batch norm."""

    def __init__(self, o, table=None):
        super().__init__()
        heads, (n_key, width, _), self.o = o["n_head"], o["sizes"], o
        self.to_queries = nn.Linear(D, heads * width, bias=False)
        if o["query_norm"] == "batch":
            self.norm = nn.Module()
            self.norm.fn = nn.BatchNorm1d(o["batch"])
        else:
            self.norm = nn.LayerNorm(width // 2)
        if o.get("input_norm") == "layer":
            self.pre_layernorm = nn.LayerNorm(D)
        self.keys = nn.Parameter(torch.empty(heads, n_key, 2, width // 2))
        self.values = nn.EmbeddingBag(n_key ** 2, D, mode="sum")

    def normed(self, query):
        if self.o["query_norm"] != "batch":
            return self.norm(query)
        return self.norm.fn(query.reshape(-1, self.o["batch"])).view(query.shape)

    def forward(self, x):
        x = self.pre_layernorm(x) if hasattr(self, "pre_layernorm") else x
        slots, shares = self.slots(self.to_queries(x), self.o["k_top"], self.o.get("scores"))
        y = self.values(slots.flatten(0, 1).flatten(1), per_sample_weights=shares.flatten(0, 1).flatten(1))
        return y.view(x.shape)


class Peer(Halves):
    """A mixture of experts of one hidden unit, with the names of lucidrains' package."""

    def __init__(self, o, table=None):
        super().__init__()
        heads, (n_key, width, _), self.o = o["n_head"], o["sizes"], o
        self.to_queries = nn.Sequential(nn.Linear(D, heads * width, bias=False))
        self.keys = nn.Parameter(torch.empty(heads, n_key, 2, width // 2))
        self.weight_down_embed, self.weight_up_embed = (nn.Embedding(n_key ** 2, D) for _ in range(2))
        if o.get("input_norm") == "rms":
            self.norm = nn.Module()
            self.norm.gamma = nn.Parameter(torch.empty(D))

    def forward(self, x):
        if hasattr(self, "norm"):
            x = functional.normalize(x, dim=-1) * D ** 0.5 * (self.norm.gamma + 1)
        slots, shares = self.slots(self.to_queries(x), self.o["k_top"], self.o.get("scores"))
        hidden = torch.einsum("...d,...hkd->...hk", x, self.weight_down_embed(slots))
        return torch.einsum("...hk,...hkd->...d", functional.gelu(hidden) * shares,
                            self.weight_up_embed(slots))


MODULES = {"plain": Plain, "hashing-memory": Hashing, "product-key-memory": ProductKey, "peer": Peer}
# What of an entry memory.json does not say: the file does.
UNSAID = {"sizes", "model_eps", "learned_temperature", "batch"}
SMALL = {"n_head": 2, "k_top": 3, "sizes": (5, 6, 7)}
PLUS = {"value_gate": True, "value_projection": True}
# base, names, suffix of the file, the memories
CASES = {
    "replace": ("qwen3", "plain", "safetensors", [{"layer": 1, "place": "replace", **SMALL, **PLUS,
                                                   "query_norm": "batch"}]),
    "beside-shared": ("llama", "plain", "pt", [
        {"layer": 0, "place": "beside", **SMALL, "gate": "linear", "query_norm": "rms",
         "query_norm_of": "half", **PLUS},
        {"layer": 1, "place": "beside", **SMALL, "gate": "mlp", "query_norm": "layer",
         "query_norm_of": "all", **PLUS, "values_of": 0}]),
    "after": ("llama", "plain", "safetensors", [
        {"layer": 0, "place": "after", **SMALL, "gate": "scalar", "query_norm": "l2", "temperature": 0.2,
         "keys_norm": "l2", "prefix": "layers.0.memory."},
        {"layer": 1, "place": "after", **SMALL, "gate": "mlp", "gate_activation": "gelu", "query_norm": "l2",
         "query_norm_of": "half", "learned_temperature": True, "input_norm": "rms",
         "input_norm_weight": False, "input_norm_eps": 1e-6, "scores": "relu",
         "prefix": "layers.1.memory."}]),
    "all-places": ("qwen3", "plain", "pt", [
        {"layer": 0, "place": "beside", **SMALL},
        {"layer": 0, "place": "replace", **SMALL, "query_norm": "layer", "query_norm_eps": 1e-3},
        {"layer": 0, "place": "after", **SMALL, "input_norm": "layer", "query_norm": "rms",
         "query_norm_weight": False}]),
    "hashing": ("llama", "hashing-memory", "pt", [
        {"layer": 0, "place": "replace", **SMALL, **PLUS, "query_norm": "batch"},
        {"layer": 1, "place": "replace", **SMALL, **PLUS, "gate": "linear", "values_of": 0}]),
    "hashing-experts": ("llama", "hashing-memory", "safetensors", [
        {"layer": 1, "place": "replace", **SMALL, "experts": True}]),
    "product-key": ("llama", "product-key-memory", "pt", [
        {"layer": 1, "place": "beside", **SMALL, "query_norm": "layer", "input_norm": "layer", "prefix": ""}]),
    "product-key-batch": ("llama", "product-key-memory", "safetensors", [
        {"layer": 0, "place": "replace", **SMALL, "query_norm": "batch", "batch": 3},
        {"layer": 1, "place": "beside", **SMALL, "query_norm": "batch", "batch": 12}]),
    "peer": ("llama", "peer", "pt", [
        {"layer": 0, "place": "replace", **SMALL},
        {"layer": 1, "place": "beside", **SMALL, "scores": "relu", "input_norm": "rms"}]),
    "gated-or-projected": ("llama", "plain", "safetensors", [
        {"layer": 0, "place": "beside", **SMALL, "value_gate": True},
        {"layer": 1, "place": "replace", **SMALL, "value_projection": True, "query_norm": "rms"}]),
}


def fill(module, generator):
    """Every number is drawn: norms around 1, temperatures and variances above 0."""
    def draw(shape, mean, scale):
        return mean + scale * torch.randn(shape, generator=generator)

    with torch.no_grad():
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            if name.endswith("num_batches_tracked"):
                continue
            if "running_var" in name or name == "temperature":
                tensor.copy_(draw(tensor.shape, 0, 1).abs() + 0.5)
            elif "norm" in name and name.endswith("weight"):
                tensor.copy_(draw(tensor.shape, 1, 0.2))
            elif name == "gate":
                tensor.fill_(-1.3)
            elif name.endswith("keys"):
                tensor.copy_(draw(tensor.shape, 0, 1))
            else:
                tensor.copy_(draw(tensor.shape, 0, 0.3 if tensor.ndim < 2 else 0.4))


def attach(model, entry, module):
    """Puts a memory into a model of transformers. Returns the handles of its hooks."""
    layer = model.model.layers[entry["layer"]]
    if entry["place"] == "after":
        def after(block, inputs, output):
            hidden = output[0] if isinstance(output, tuple) else output
            hidden = hidden + module(hidden)
            return (hidden, *output[1:]) if isinstance(output, tuple) else hidden
        layer.register_forward_hook(after)
    elif entry["place"] == "beside":
        layer.mlp.register_forward_hook(lambda network, inputs, output: output + module(inputs[0]))
    else:
        layer.mlp = module


def random_case(rng):
    """A case as above, drawn anew."""
    def one(*choices):
        return choices[int(rng.integers(len(choices)))]

    names, entries = one(*MODULES), []
    for layer in range(2):
        for place in ("beside", "replace", "after"):
            if rng.random() > 0.4:
                continue
            entry = {"layer": layer, "place": place, "n_head": one(1, 2, 3), "k_top": one(1, 2, 4),
                     "sizes": (one(4, 6, 9), one(4, 6, 10), one(6, 8)), "scores": "softmax"}
            if place == "after":
                entry["input_norm"] = "none"
            if names in ("plain", "hashing-memory"):
                entry.update({key: value for key, value in PLUS.items() if one(True, False)}
                             if names == "plain" else one(PLUS, {}))
            entry.update(random_options(names, entry, one))
            entries.append(entry)
    if not entries:
        entry = {"layer": 0, "place": "beside", "n_head": 1, "k_top": 2, "sizes": (4, 6, 6)}
        entries = [{**entry, **random_options(names, entry, one)}]
    return one("llama", "qwen3"), names, one("pt", "safetensors"), entries


def random_options(names, entry, one):
    if names == "product-key-memory":
        norm = one("layer", "batch")
        return {"query_norm": norm, "scores": one("softmax", "relu"), **({"batch": entry["sizes"][1] // 2} if norm == "batch" else {})}
    if names == "peer":
        return {"scores": one("softmax", "relu")}
    if names == "hashing-memory":
        return {"query_norm": one("none", "batch"), "gate": one("none", "linear")}
    norm = one("none", "batch", "layer", "rms", "l2")
    options = {"query_norm": norm, "gate": one("none", "scalar", "linear", "mlp"), "keys_norm": one("none", "l2"),
               "temperature": one(0.5, 1.0, 2.0), "input_norm": one("none", "rms", "layer"),
               "scores": one("softmax", "relu")}
    if norm in ("layer", "rms", "l2"):
        options["query_norm_of"] = one("half", "head", "all")
    return options


def make(folder, case, seed, least=GAP):
    """Writes a case; with another seed if its greedy text would hang on rounding: if a word is closer than
    least to the one before it."""
    base, names, suffix, entries = case
    for attempt in range(seed, seed + 100):
        generator = torch.Generator().manual_seed(attempt)
        model = load(BASES / base)
        modules = []
        for entry in entries:
            options = {**entry, "model_eps": model.config.rms_norm_eps}
            table = modules[entry["values_of"]].values if "values_of" in entry else None
            modules.append(MODULES[names](options, table))
            fill(modules[-1], generator)
        weights = {}
        for index, (entry, module) in enumerate(zip(entries, modules)):
            prefix = entry.get("prefix", "memories.%d." % index)
            weights.update((prefix + key, tensor) for key, tensor in module.state_dict().items())
        model = model.double()
        # a memory beside a network that is itself replaced: hooks go onto what replaces it
        for entry, module in sorted(zip(entries, modules), key=lambda pair: pair[0]["place"] != "replace"):
            attach(model, entry, module.double().eval())
        ids = torch.randint(0, model.config.vocab_size, (N_ID,), generator=generator).tolist()
        logits, greedy, gap = expect(model, ids)
        if gap > least:
            break
    weights = {key: tensor.float() if tensor.is_floating_point() else tensor
               for key, tensor in weights.items()}
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if suffix == "pt":
        torch.save(weights, folder / "memory.pt")
    else:
        save_tensors({key: tensor.contiguous() for key, tensor in weights.items()},
                     folder / "memory.safetensors")
    said = [{key: value for key, value in entry.items() if key not in UNSAID} for entry in entries]
    (folder / "memory.json").write_text(json.dumps({"memories": said}, indent=1) + "\n")
    save_file({"logits": logits.astype("float32")}, folder / "expected.safetensors")
    (folder / "expected.json").write_text(json.dumps(
        {"base": base, "names": names, "ids": ids, "n_prompt": N_PROMPT, "greedy": greedy,
         "versions": {"torch": torch.__version__}}) + "\n")
    return gap


def main():
    shutil.rmtree(FOLDER, ignore_errors=True)
    for seed, name in enumerate(CASES):
        gap = make(FOLDER / name, CASES[name], 1000 * seed + 1)
        size = sum(path.stat().st_size for path in (FOLDER / name).iterdir())
        print("%-18s %6d bytes, least distance %.3f" % (name, size, gap))


if __name__ == "__main__":
    sys.exit(main())
