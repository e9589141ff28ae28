"""Reads safetensors: one file, or the shards that an index names, each mapped and checked.

hf.py asks a SafetensorsSource for the names of its tensors and for views of them, the trainer a Shard. The
header is held against the file before a tensor is looked at: every type, shape and offset, that tensors
neither overlap nor leave gaps, and that index and shards name the same tensors.
"""

import json
import math
import mmap
import os

import numpy as np

import json_file
from fault import Refused, show
from torch_file import Brain

FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
HEADER_MAX, INDEX_MAX = 100 << 20, 100 << 20  # as the format's own reader bounds the header
SHARD_MAX, DIM_MAX = 512, 8
DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}
# Those that a model may have but whose numbers we do not take; their sizes are still checked.
OTHER_BITS = {"I64": 64, "I32": 32, "I16": 16, "I8": 8, "U64": 64, "U32": 32, "U16": 16, "U8": 8,
              "BOOL": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4, "F6_E2M3": 6,
              "F6_E3M2": 6, "C64": 64}


def _is_count(value):
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


def _integer(digits):
    """A longer number, which Python may not read at all, stays a text: no count, but told where it stands."""
    return int(digits) if len(digits) <= json_file.DIGITS_MAX else digits


class Entry:
    """A tensor as the checked header describes it."""

    __slots__ = ("shard", "dtype", "shape", "begin", "size")

    def __init__(self, shard, dtype, shape, begin, size):
        self.shard, self.dtype, self.shape, self.begin, self.size = shard, dtype, shape, begin, size

    def bytes(self):
        """A read-only view of the mapped file."""
        return memoryview(self.shard.data)[self.begin:self.begin + self.size]


class Shard:
    """One mapped file. .entries: {name: Entry}; .metadata: {name: text}"""

    def __init__(self, path):
        self.name = os.path.basename(path)
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size < 8:
                self.refuse("shorter than the 8 bytes that tell the length of its header")
            self.data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        n_header = int.from_bytes(self.data[:8], "little")
        if n_header > min(HEADER_MAX, len(self.data) - 8):
            self.refuse("a header of %d bytes, but the file has %d and the limit is %d (truncated,"
                        " or no safetensors)" % (n_header, len(self.data), HEADER_MAX))
        self.base = 8 + n_header
        self.entries = self.read_header(self.data[8:self.base])

    def refuse(self, text):
        raise Refused("%s: %s" % (self.name, text))

    def read_header(self, text):
        def no_twins(pairs):
            fields = dict(pairs)
            if len(fields) != len(pairs):
                self.refuse("a key twice in its header")
            return fields

        try:
            header = json.loads(text.decode(), parse_int=_integer, object_pairs_hook=no_twins)
        except (ValueError, RecursionError) as fault:
            self.refuse("its header is not JSON: %s" % fault)
        if not isinstance(header, dict):
            self.refuse("its header is no object: %s" % show(header))
        self.metadata = header.pop("__metadata__", None)
        self.metadata = {} if self.metadata is None else self.metadata
        if not isinstance(self.metadata, dict) or not all(isinstance(text, str) for text in self.metadata.values()):
            self.refuse("its __metadata__ is no object of texts: %s" % show(self.metadata))
        spans = []
        entries = {name: self.read_entry(name, entry, spans) for name, entry in header.items()}
        reached, before = 0, None
        for begin, end, name in sorted(spans):
            if begin != reached:
                self.refuse("tensor '%s' begins at byte %d of the data, %s ends at %d"
                            % (name, begin, "'%s'" % before if before else "what is before it", reached))
            reached, before = end, name
        if reached != len(self.data) - self.base:
            self.refuse("its tensors take %d bytes, but %d are there (truncated or damaged)"
                        % (reached, len(self.data) - self.base))
        return entries

    def read_entry(self, name, entry, spans):
        entry = entry if isinstance(entry, dict) else {}
        dtype, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
        for key, value in (("shape", shape), ("data_offsets", offsets)):
            if not isinstance(value, list) or len(value) > DIM_MAX or not all(map(_is_count, value)):
                self.refuse("tensor '%s': %s: at most %d counts below 2^63 expected, got %s"
                            % (name, key, DIM_MAX, show(value)))
        bits = OTHER_BITS.get(dtype) if isinstance(dtype, str) else None
        if isinstance(dtype, str) and dtype in DTYPES:
            bits = 8 * np.dtype(DTYPES[dtype]).itemsize
        if bits is None:
            self.refuse("tensor '%s': %s is no type of safetensors" % (name, show(dtype)))
        size = math.prod(shape) * bits
        if len(offsets) != 2 or 8 * (offsets[1] - offsets[0]) != size:
            self.refuse("tensor '%s': shape %s of %s takes %d bytes, data_offsets are %s"
                        % (name, show(shape), dtype, size // 8, show(offsets)))
        spans.append((*offsets, name))
        return Entry(self, dtype, tuple(shape), self.base + offsets[0], size // 8)


class SafetensorsSource:
    """The tensors of a directory. .entries: {name: Entry}; array() gives views."""

    def __init__(self, folder):
        files = [name for name in (FILE, INDEX) if os.path.isfile(os.path.join(folder, name))]
        if len(files) != 1:
            raise Refused("%s expected, %s" % (
                "either %s or %s" % (FILE, INDEX),
                "both are there" if files else "neither is there: weights in other files (.bin, .pth,"
                " .gguf) are not read; transformers' save_pretrained writes such"))
        self.entries = Shard(os.path.join(folder, FILE)).entries if files == [FILE] \
            else self.read_shards(folder)

    @classmethod
    def of_file(cls, path):
        """The tensors of one file, whatever its name."""
        source = cls.__new__(cls)
        source.entries = Shard(path).entries
        return source

    @staticmethod
    def read_shards(folder):
        index = json_file.load(os.path.join(folder, INDEX), INDEX_MAX).get("weight_map")
        if not isinstance(index, dict) or not index:
            raise Refused("%s: weight_map: names of files by tensor expected, got %s"
                          % (INDEX, show(index)))
        shards = {}
        for name, file in index.items():
            if not isinstance(file, str) or not file.endswith(".safetensors") \
                    or os.path.basename(file) != file or "\0" in file:
                raise Refused("%s: '%s': the name of a .safetensors file beside it expected, got %s"
                              % (INDEX, name, show(file)))
            shards.setdefault(file, set()).add(name)
        if len(shards) > SHARD_MAX:
            raise Refused("%s: %d files, the limit is %d" % (INDEX, len(shards), SHARD_MAX))
        entries = {}
        for file, names in sorted(shards.items()):
            if not os.path.isfile(os.path.join(folder, file)):
                raise Refused("%s names %s, which is missing" % (INDEX, file))
            shard = Shard(os.path.join(folder, file))
            for name in names ^ shard.entries.keys():
                raise Refused("%s: tensor '%s' is %s" % (
                    file, name, "missing, though %s says that it is there" % INDEX
                    if name in names else "not what %s says is there" % INDEX))
            entries.update(shard.entries)
        return entries

    def array(self, name):
        """A read-only view of the mapped file; a Brain of bfloat16."""
        entry = self.entries[name]
        if entry.dtype not in DTYPES:
            raise Refused("tensor '%s' is of %s; %s are read" % (name, entry.dtype, " ".join(DTYPES)))
        view = np.ndarray(entry.shape, DTYPES[entry.dtype], entry.shard.data, entry.begin)
        return Brain(view) if entry.dtype == "BF16" else view
