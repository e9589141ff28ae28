"""Writes overlays, and model directories whose tables hold the same rows, for tests."""

import hashlib
import json
import os
import struct

import numpy as np

NUMPY = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2"), "I8": np.dtype("i1"),
         "I32": np.dtype("<i4"), "U8": np.dtype("u1")}


def bf16(values):
    """float32 to the bits of bf16, to the nearest, ties to even."""
    bits = np.ascontiguousarray(values, "<f4").view("<u4").astype(np.uint64)
    return ((bits + 0x7fff + ((bits >> np.uint64(16)) & np.uint64(1))) >> np.uint64(16)).astype("<u2")


def widened(bits):
    return (bits.astype("<u4") << np.uint32(16)).view("<f4")


def pack(tensors, metadata):
    """A safetensors file: tensors {name: (dtype, array)}."""
    header, data = {"__metadata__": metadata}, b""
    for name, (dtype, array) in tensors.items():
        raw = np.ascontiguousarray(array, NUMPY[dtype]).tobytes()
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data


def in_bf16(directory, folder):
    """A copy of a model directory whose tables of int8, if any, are rounded to BF16: rows can then be given bit for bit."""
    base, tensors = Base(directory), {}
    for name, entry in base.header.items():
        if name == "__metadata__" or name.endswith(".weight.scale"):
            continue
        begin, end = base.place(name)
        array = np.frombuffer(base.data[begin:end], NUMPY[entry["dtype"]]).reshape(entry["shape"])
        if name + ".scale" in base.header:
            begin, end = base.place(name + ".scale")
            array = bf16(array * np.frombuffer(base.data[begin:end], "<f4")[:, None])
        tensors[name] = ("BF16" if entry["dtype"] == "I8" else entry["dtype"], array)
    os.makedirs(folder)
    with open(os.path.join(folder, "model.safetensors"), "wb") as file:
        file.write(pack(tensors, base.header.get("__metadata__", {})))
    for name in os.listdir(base.directory):
        if name not in ("model.safetensors", "model.sha256") and os.path.isfile(os.path.join(base.directory, name)):
            os.symlink(os.path.join(os.path.abspath(base.directory), name), os.path.join(folder, name))
    return folder


class Base:
    """The tensors of a model directory as they stand in its file."""

    def __init__(self, directory):
        self.directory = str(directory)
        with open(os.path.join(self.directory, "model.safetensors"), "rb") as file:
            self.data = file.read()
        n, = struct.unpack("<Q", self.data[:8])
        self.begin = 8 + n
        self.header = json.loads(self.data[8:self.begin])
        with open(os.path.join(self.directory, "config.json")) as file:
            self.memories = json.load(file)["memories"]

    def name(self, memory, table="values"):
        entry = self.memories[memory]
        return "memories.%d_%s.%s.weight" % (entry["layer"], entry.get("place", "in"), table)

    def place(self, name):
        begin, end = self.header[name]["data_offsets"]
        return self.begin + begin, self.begin + end

    def dtype(self, memory, table="values"):
        return self.header[self.name(memory, table)]["dtype"]

    def table(self, memory, table="values"):
        """[slots, columns] in the file's own type."""
        name = self.name(memory, table)
        begin, end = self.place(name)
        return np.frombuffer(self.data[begin:end], NUMPY[self.header[name]["dtype"]]).reshape(
            self.header[name]["shape"])

    def hash(self, memory):
        sum = hashlib.sha256()
        for table in ("values", "experts"):
            for suffix in ("", ".scale"):
                if self.name(memory, table) + suffix in self.header:
                    begin, end = self.place(self.name(memory, table) + suffix)
                    sum.update(self.data[begin:end])
        return sum.hexdigest()

    def overlay(self, rows, mode="replace", **metadata):
        """A file. rows: {memory: (slots, dtype, rows[, experts])}; rows of I8 are codes and their scales."""
        tensors, bases = {}, {}
        for memory, (slots, dtype, values, *experts) in rows.items():
            tensors["memories.%d.slots" % memory] = ("I32", np.asarray(slots))
            if dtype == "I8":
                values, scale = values
                tensors["memories.%d.rows.scale" % memory] = ("F32", scale)
            tensors["memories.%d.rows" % memory] = (dtype, values)
            if experts:
                tensors["memories.%d.experts" % memory] = (dtype, experts[0])
            bases["base" if len(rows) == 1 else "base.%d" % memory] = self.hash(memory)
        return pack(tensors, {"format": "pkmserve-overlay-1", "mode": mode, **bases, **metadata})

    def with_rows(self, folder, changes):
        """A model directory with rows of the tables replaced: changes {(memory, table): (slots, rows)}."""
        folder = str(folder)
        os.makedirs(folder)
        data = bytearray(self.data)
        for (memory, table), (slots, rows) in changes.items():
            begin, end = self.place(self.name(memory, table))
            held = self.table(memory, table).copy()
            held[slots] = rows
            data[begin:end] = held.tobytes()
        for name in os.listdir(self.directory):
            if name == "model.safetensors":
                with open(os.path.join(folder, name), "wb") as file:
                    file.write(data)
            elif name != "model.sha256" and os.path.isfile(os.path.join(self.directory, name)):
                os.symlink(os.path.join(os.path.abspath(self.directory), name), os.path.join(folder, name))
        return folder
