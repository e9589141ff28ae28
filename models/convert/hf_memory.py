"""Memories beside a model in Hugging Face form: --memory FILE, --memory-config, --memory-names.

hf.py calls open_memory(), then tensors() and entries(). What a memory is, memory.json says
(hf_memory_config.py); names and shapes that FILE must have follow from it and are compared by name. FILE
is safetensors or what torch.save wrote, of which nothing is executed. A scheme of names (NAMES) says what
a module's tensors are called and in which order it keeps heads and halves. What can be computed
beforehand is folded in, in float64: batch norms into the queries' layer, temperatures and the length of
keys into the keys, the norm of unit length into an RMS norm's weights.
"""

import math
from types import SimpleNamespace

import numpy as np

import hf_memory_config
import memory_layers
from fault import Refused, show
from hf_memory_config import KEY_MAX, WIDTH_MAX
from safetensors_source import SafetensorsSource
from torch_file import Brain, Tensor, TorchFile

ZIP, LEGACY = b"PK\x03\x04", b"\x80\x02\x8a\x0a"  # how files of torch.save begin
IGNORED = "num_batches_tracked"
BATCH = ("weight", "bias", "running_mean", "running_var")


def _names(**own):
    plain = {"query": "query", "query_norm": "query_norm", "batch_norm": None, "keys": "keys",
             "others": {},             # {a name of these: that of the same in other modules}
             "values": "values.weight", "expert_values": "values.weight", "experts": "experts.weight",
             "value_gate": "value_gate", "value_proj": "value_proj", "gate": "gate",
             "linear_gate": "gate", "input_norm": "norm", "gamma": None,
             "is_flat": False,         # keys are one matrix [H·2·N, d/2]
             "are_keys_first": False,  # keys are [H, N, 2, d/2], and queries [2, H, d/2]
             "has_experts": False, "norm_of": "head", "refused": {}}
    return SimpleNamespace(**{**plain, **own})


# What the modules call their tensors. Whatever a module lacks has the plain name.
NAMES = {
    "plain": _names(others={"query": "query_proj.query_mlps.0", "query_norm": "query_proj.query_mlps.1",
                            "gate": "output_gate"}),  # as in model directories of ours
    "hashing-memory": _names(
        query="query_proj.query_mlps.0", query_norm="query_proj.query_mlps.1",
        expert_values="values_v.weight", experts="values_u.weight", value_gate="swilu_projection",
        linear_gate="gating", is_flat=True),
    "product-key-memory": _names(
        query="to_queries", query_norm="norm", batch_norm="norm.fn", input_norm="pre_layernorm",
        are_keys_first=True, norm_of="half",
        refused={"values.0.weight": "concat_values_and_combine", "output_norm.weight": "norm_output",
                 "maybe_concat_combine.2.weight": "concat_values_and_combine"}),
    "peer": _names(
        query="to_queries.0", expert_values="weight_up_embed.weight", experts="weight_down_embed.weight",
        gamma="norm.gamma", are_keys_first=True, norm_of="half", has_experts=True),
}


class MemoryFile:
    """The tensors of FILE. .shapes: {name: shape}; array() gives views."""

    def __init__(self, path):
        with open(path, "rb") as file:
            begin = file.read(4)
        if begin in (ZIP, LEGACY):
            self.file = TorchFile(path)
            self.tensors = self.weights(self.file.root)
            self.shapes = {name: tuple(tensor.size) for name, tensor in self.tensors.items()}
        else:
            self.file, self.tensors = SafetensorsSource.of_file(path), None
            self.shapes = {name: entry.shape for name, entry in self.file.entries.items()}

    @staticmethod
    def weights(root):
        """The tensors by name: the whole object, or what it has under one of two usual keys."""
        for key in ("state_dict", "model"):
            if isinstance(root, dict) and isinstance(root.get(key), dict):
                root = root[key]
        if not isinstance(root, dict) or not root:
            raise Refused("tensors by name expected, got %s" % show(root))
        for name, tensor in root.items():
            if not isinstance(name, str) or not isinstance(tensor, Tensor):
                raise Refused("tensors by name expected, got %s = %s" % (show(name), show(tensor)))
        return root

    def array(self, name):
        if self.tensors is None:
            return self.file.array(name)
        try:
            array = self.file.array(self.tensors[name], brain=True)
        except Refused as fault:
            raise Refused("tensor '%s': %s" % (name, fault))
        if array.dtype.kind != "f":
            raise Refused("tensor '%s': floating point expected, got %s" % (name, array.dtype.name))
        return array


class Memories:
    """An opened memory file with its configuration. .memories: a struct for each"""

    def __init__(self, path, config, scheme, base):
        self.names = NAMES[scheme]
        self.memories = hf_memory_config.read(config, self.names, base)
        try:
            self.file = MemoryFile(path)
        except Refused as fault:
            raise Refused("--memory %s: %s" % (path, fault))
        self.path, self.base, self.taken = path, base, set()

    def refuse(self, text):
        raise Refused("--memory %s: %s" % (self.path, text))

    # ---- taking tensors by name

    def has(self, name):
        return name in self.file.shapes

    def take(self, name, shape):
        """The view of a tensor, or of several, whose shape must be that; None in it: of any size."""
        if not self.has(name):
            self.refuse("tensor '%s' is missing (shape %s expected)" % (name, _shape_text(shape)))
        found = self.file.shapes[name]
        if len(found) != len(shape) or any(due not in (None, n) for n, due in zip(found, shape)):
            self.refuse("tensor '%s': shape %s expected, got %s"
                        % (name, _shape_text(shape), show(list(found))))
        self.taken.add(name)
        return self.file.array(name)

    def place(self, m, name):
        """Where the weights of that name are: under it, or under the other that the scheme takes."""
        other = m.prefix + self.names.others.get(name, name)
        return other if self.has(other + ".weight") else m.prefix + name

    def linear(self, name, n_out, n_in):
        """Weight and bias, which is zero where the file has none."""
        weight = self.take(name + ".weight", (n_out, n_in))
        n_out = weight.shape[0]
        has_bias = self.has(name + ".bias")
        return weight, self.take(name + ".bias", (n_out,)) if has_bias else np.zeros(n_out, np.float32)

    def width(self, name, n):
        """n, which a tensor of the file tells."""
        if not 1 <= n <= WIDTH_MAX:
            self.refuse("tensor '%s' has a width of %d, 1..%d are served" % (name, n, WIDTH_MAX))
        return n

    def check_rest(self):
        for name in self.file.shapes:
            if name not in self.taken and not name.endswith(IGNORED):
                self.refuse("tensor '%s' is not one that the memory's configuration calls for" % name)

    # ---- one memory

    def keys(self, m):
        """float64 [H, 2, N, d/2]; completes m with its sizes."""
        name, n = m.prefix + self.names.keys, m.n_head
        shape = self.file.shapes.get(name)
        half = None if m.d_key is None else m.d_key // 2
        if self.names.is_flat and shape is not None and len(shape) == 2:
            array = self.take(name, (None if m.n_key is None else 2 * n * m.n_key, half))
            if array.shape[0] % (2 * n):
                self.refuse("tensor '%s': %d rows are not two halves of %d heads"
                            % (name, array.shape[0], n))
            keys = _double(array).reshape(n, 2, -1, array.shape[1])
        elif self.names.are_keys_first:
            keys = _double(self.take(name, (n, m.n_key, 2, half))).swapaxes(1, 2)
        else:
            keys = _double(self.take(name, (n, 2, m.n_key, half)))
        m.n_key, m.d_key = keys.shape[2], 2 * keys.shape[3]
        if not 1 <= m.n_key <= KEY_MAX or not 2 <= m.d_key <= WIDTH_MAX:
            self.refuse("tensor '%s': %d keys of %d columns are beyond the limits" % (
                name, m.n_key, m.d_key // 2))
        if m.k_top > m.n_key:
            raise Refused("%s: k_top: %d, more than the %d keys of tensor '%s'"
                          % (m.label, m.k_top, m.n_key, name))
        if m.has_unit_keys:
            keys = keys / np.maximum(np.sqrt((keys ** 2).sum(-1, keepdims=True)), 1e-12)
        return keys / self.temperatures(m)[:, None, None, None]

    def temperatures(self, m):
        """[H] from the configuration or from the file."""
        name = m.prefix + "temperature"
        if not self.has(name):
            return np.full(m.n_head, m.temperature or 1.0)
        if m.temperature is not None:
            raise Refused("%s: temperature: %g, but tensor '%s' is there: one of them expected"
                          % (m.label, m.temperature, name))
        shape = self.file.shapes[name]
        if math.prod(shape) not in (1, m.n_head):
            self.refuse("tensor '%s': one number or one for each of %d heads expected, got shape %s"
                        % (name, m.n_head, show(list(shape))))
        found = _double(self.take(name, shape).reshape((math.prod(shape),)))
        if not (found > 0).all():
            self.refuse("tensor '%s' holds %g; a temperature is above 0" % (name, found.min()))
        return np.broadcast_to(found, (m.n_head,))

    def in_our_order(self, m, rows):
        """Rows of queries by heads and in them by halves."""
        if not self.names.are_keys_first:
            return rows
        return rows.reshape(2, m.n_head, m.d_key // 2, -1).swapaxes(0, 1).reshape(rows.shape)

    def queries(self, m):
        """Weight and bias, a batch norm folded in."""
        n_query = m.n_head * m.d_key
        weight, bias = map(_double, self.linear(self.place(m, self.names.query), n_query, self.base.d_model))
        norm = self.place(m, self.names.batch_norm or self.names.query_norm)
        if m.query_norm.kind == "batch":
            width = self.file.shapes.get(norm + ".weight", (n_query,))
            width = m.d_key // 2 if width == (m.d_key // 2,) else n_query
            gain, shift, mean, variance = (np.resize(_double(self.take("%s.%s" % (norm, part), (width,))),
                                                     n_query) for part in BATCH)
            if not (variance >= 0).all():
                self.refuse("tensor '%s.running_var' holds %g; a variance cannot be negative"
                            % (norm, variance.min()))
            gain = gain / np.sqrt(variance + m.query_norm.eps)
            weight, bias = weight * gain[:, None], (bias - mean) * gain + shift
        return self.in_our_order(m, weight), self.in_our_order(m, bias)

    def norm(self, name, norm, width):
        """[(part, vector)] of an RMS or layer norm as the server has it."""
        if norm.kind == "l2":  # x / |x| is x over its root mean square, over the root of the width
            return [("weight", np.full(width, width ** -0.5))]
        parts = [("weight", self.take(name + ".weight", (width,)) if norm.weight else np.ones(width))]
        if norm.kind == "layer":
            parts.append(("bias", self.take(name + ".bias", (width,)) if norm.bias else np.zeros(width)))
        return parts

    def norms(self, m):
        d = self.base.d_model
        if m.input_norm.kind == "rms" and self.names.gamma and self.has(m.prefix + self.names.gamma):
            m.input_norm.eps = 1e-24  # it divides by the length, which is never below 1e-12
            yield "input_norm.weight", 1 + _double(self.take(m.prefix + self.names.gamma, (d,)))
        elif m.input_norm.kind != "none":
            for part, array in self.norm(m.prefix + self.names.input_norm, m.input_norm, d):
                yield "input_norm." + part, array
        if m.query_norm.kind in ("layer", "rms", "l2"):
            m.norm_width = {"half": m.d_key // 2, "head": m.d_key, "all": m.n_head * m.d_key}[
                m.query_norm.scope]
            if m.query_norm.scope == "all" and self.names.are_keys_first:
                raise Refused("%s: query_norm_of: all, which modules of these names do not have" % m.label)
            if m.norm_width > WIDTH_MAX:
                raise Refused("%s: query_norm_of: all, %d heads of %d are wider than the limit of %d"
                              % (m.label, m.n_head, m.d_key, WIDTH_MAX))
            for part, array in self.norm(m.prefix + self.names.query_norm, m.query_norm, m.norm_width):
                yield "query_norm." + part, array

    def gates(self, m):
        d, name = self.base.d_model, m.prefix + self.names.gate
        if m.gate == "scalar":
            shape = self.file.shapes.get(name, (1,))
            yield "output_gate.factor", self.take(name, shape if shape == () else (1,)).reshape((1,))
        elif m.gate == "linear":
            name = self.place(m, self.names.linear_gate)
            yield from zip(("output_gate.weight", "output_gate.bias"), self.linear(name, 1, d))
        elif m.gate == "mlp":
            hidden = self.linear(name + ".0", None, d)
            m.gate_hidden = self.width(name + ".0.weight", hidden[0].shape[0])
            yield from zip(("output_gate.hidden.weight", "output_gate.hidden.bias"), hidden)
            yield from zip(("output_gate.weight", "output_gate.bias"),
                           self.linear(name + ".2", 1, m.gate_hidden))

    def tables(self, m):
        """Those of a memory of its own; of one that reads another's, copies are compared with that."""
        d, n_slot = self.base.d_model, m.n_key ** 2
        own = [("values.weight", self.names.expert_values if m.has_experts else self.names.values,
                m.d_value)]
        if m.has_experts:
            own.append(("experts.weight", self.names.experts, d))
        owner = None if m.values_of is None else self.memories[m.values_of]
        if owner is not None and (owner.n_key, owner.has_experts) != (m.n_key, m.has_experts):
            raise Refused("%s: values_of: memories[%d] has %d keys%s, this one %d%s" % (
                m.label, m.values_of, owner.n_key, " and experts" if owner.has_experts else "", m.n_key,
                " and experts" if m.has_experts else ""))
        for ours, theirs, width in own:
            name = m.prefix + theirs
            shape = self.file.shapes.get(name)
            if m.n_head > 1 and shape == (m.n_head * n_slot, d):
                self.refuse("tensor '%s' has %d rows, %d for each head: tables of each head's own"
                            " (separate_embed_per_head) are not served" % (name, shape[0], n_slot))
            if owner is None:
                array = self.take(name, (n_slot, width))
                m.d_value = self.width(name, array.shape[1])
                yield ours, array
            elif self.has(name):
                self.check_copy(name, owner.prefix + theirs, (n_slot, width))
        if owner is not None:
            m.d_value = owner.d_value

    def check_copy(self, name, of, shape):
        copy, kept = self.take(name, shape), self.take(of, shape)
        same = self.file.tensors is not None and memory_layers.is_same(
            self.file.tensors[name], self.file.tensors[of])
        if not same:
            memory_layers.check_copy({name: copy, of: kept}, name, of, "with values_of they are one")

    def tensors_of(self, m):
        """(name in our file after the memory's, array)"""
        for name, option in self.names.refused.items():
            if self.has(m.prefix + name):
                self.refuse("tensor '%s': %s is not served" % (m.prefix + name, option))
        d = self.base.d_model
        yield "keys", self.keys(m)
        yield from zip(("query_proj.query_mlps.0.weight", "query_proj.query_mlps.0.bias"), self.queries(m))
        yield from self.norms(m)
        wide = None if m.has_projection else d
        if m.d_value not in (None, wide) and wide is not None:
            raise Refused("%s: d_value: %d, but without value_projection it is hidden_size %d"
                          % (m.label, m.d_value, d))
        m.d_value = m.d_value or wide
        yield from self.tables(m)
        if m.has_gate:
            yield from zip(("value_gate.weight", "value_gate.bias"),
                           self.linear(m.prefix + self.names.value_gate, m.d_value, d))
        if m.has_projection:
            yield from zip(("value_proj.weight", "value_proj.bias"),
                           self.linear(m.prefix + self.names.value_proj, d, m.d_value))
        yield from self.gates(m)

    # ---- all

    def tensors(self):
        """[(name in our file, array)]"""
        found = []
        for m in self.memories:
            for name, array in self.tensors_of(m):
                found.append(("memories.%d_%s.%s" % (m.layer, m.place, name), array))
        self.check_rest()
        return found

    def entries(self):
        """The memories in config.json, once tensors() has told all sizes."""
        for m in self.memories:
            entry = {"layer": m.layer, "place": m.place, "n_head": m.n_head, "k_top": m.k_top,
                     "n_key": m.n_key, "d_key": m.d_key, "n_slot": m.n_key ** 2, "d_value": m.d_value}
            entry.update((key, True) for key, has in (
                ("value_gate", m.has_gate), ("value_projection", m.has_projection),
                ("experts", m.has_experts)) if has)
            if m.gate != "none":
                entry["output_gate"] = m.gate
            if m.gate == "mlp":
                entry.update(gate_hidden=m.gate_hidden, gate_activation=m.gate_activation)
            if m.input_norm.kind != "none":
                entry.update(input_norm=m.input_norm.kind, input_norm_eps=m.input_norm.eps)
            if m.query_norm.kind in ("layer", "rms", "l2"):
                kind = "layer" if m.query_norm.kind == "layer" else "rms"
                eps = m.query_norm.eps / (m.norm_width if m.query_norm.kind == "l2" else 1)
                entry.update(query_norm=kind, query_norm_eps=eps, query_norm_width=m.norm_width)
            if m.has_relu:
                entry.update(softmax=False, relu=True)
            if m.values_of is not None:
                entry["values_of"] = m.values_of
            yield entry

    def replaced(self):
        """Layers without a network."""
        return {m.layer for m in self.memories if m.place == "in"}


def _shape_text(shape):
    return "[%s]" % ", ".join("any" if n is None else str(n) for n in shape)


def _double(array):
    return np.asarray(array[:], np.float64)


def own_types(tensors, dtype):
    """{name: dtype} of those that have another type in the file than the model."""
    own = {}
    for name, array in tensors:
        kind = "bf16" if isinstance(array, Brain) else "f16" if array.dtype.itemsize == 2 else "f32"
        if kind != dtype and array.ndim > 1:
            own[name] = kind
    return own
