"""Reads what torch.save wrote, without PyTorch and without executing anything.

The families' modules ask for the root object and for single tensors. Both containers are known: the zip archive
(PyTorch >= 1.6: `<stem>/data.pkl` and one stored member per storage) and the legacy file before it
(five pickles, then each storage as an element count and raw elements). The file is mapped, not
loaded: a tensor is a NumPy view into the mapping, so an optimizer's state costs nothing unless
someone asks for it.

Promised: every offset, size, stride and count is checked against the file before it is used; a
tensor never has more elements than its storage; a fault is a Refused naming member or tensor.
"""

import mmap
import os
import struct
import zipfile
import zlib

import numpy as np

from fault import Refused, show
from pickle_machine import Constructor, Opaque, PickleMachine, StateDict

DTYPES = {"torch.FloatStorage": "<f4", "torch.HalfStorage": "<f2",
          "torch.DoubleStorage": "<f8", "torch.LongStorage": "<i8",
          "torch.BFloat16Storage": "<u2"}
BF16 = np.dtype("<u2")  # NumPy has none: its bits, and no storage of unsigned numbers is read
LEGACY_MAGIC = b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19."
LEGACY_VERSION = 1001
DIM_MAX = 8
CHECKSUM_CHUNK = 1 << 24


class StorageClass(Constructor):
    """torch.FloatStorage and its kin: only ever an item of a persistent id, never called."""

    __slots__ = ("dtype",)

    def __init__(self, name):
        Constructor.__init__(self, name, self.refuse_call)
        self.dtype = np.dtype(DTYPES[name])

    def refuse_call(self, arguments):
        raise Refused("a call of %s, which no checkpoint contains" % self.name)


class Storage:
    """numel elements of dtype; those of the storage `key` of the file from element `begin` on."""

    __slots__ = ("key", "dtype", "root_numel", "begin", "numel")

    def __init__(self, key, dtype, root_numel, begin, numel):
        self.key = key
        self.dtype = dtype
        self.root_numel = root_numel
        self.begin = begin
        self.numel = numel


class Tensor:
    """A view of a storage as the file claims it: counts, which only TorchFile.array compares."""

    __slots__ = ("storage", "offset", "size", "stride")

    def __init__(self, storage, offset, size, stride):
        self.storage = storage
        self.offset = offset
        self.size = size
        self.stride = stride

    def __repr__(self):
        return "<tensor %s>" % list(self.size)


def check_shapes(weights, shapes):
    """Refuses weights that lack a tensor of shapes or have it in another shape."""
    for name, shape in shapes.items():
        if name not in weights:
            raise Refused("tensor '%s' is missing (shape %s expected)" % (name, show(list(shape))))
        if weights[name].size != shape:
            raise Refused("tensor '%s': shape %s expected, got %s"
                          % (name, show(list(shape)), show(list(weights[name].size))))


class Brain:
    """A tensor of bfloat16, as safetensors_file.write takes arrays: slices are widened to fp32."""

    dtype = np.dtype(np.float32)  # of the slices

    def __init__(self, bits):
        self.bits = bits

    shape = property(lambda self: self.bits.shape)
    ndim = property(lambda self: self.bits.ndim)
    size = property(lambda self: self.bits.size)

    def reshape(self, shape):
        return Brain(self.bits.reshape(shape))

    def __getitem__(self, rows):
        return (self.bits[rows].astype(np.uint32) << np.uint32(16)).view(np.float32)


def is_count(value):
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _make_state_dict(arguments):
    if not arguments:
        return StateDict()
    raise Refused("an OrderedDict with initial items, which no checkpoint contains")


def _make_tensor(arguments):
    if len(arguments) < 6 or not isinstance(arguments[0], Storage):
        raise Refused("a tensor without a storage")
    storage, offset, size, stride = arguments[:4]
    # Here and not later, for size may hold tensors that hold tensors, and messages show it.
    for what, counts in (("size", size), ("strides", stride), ("offset", (offset,))):
        if not isinstance(counts, tuple) or len(counts) > DIM_MAX \
                or not all(is_count(n) for n in counts):
            raise Refused("a tensor's %s: at most %d counts expected, got %s"
                          % (what, DIM_MAX, show(counts)))
    return Tensor(storage, offset, size, stride)


def _make_parameter(arguments):
    if not arguments or not isinstance(arguments[0], Tensor):
        raise Refused("a parameter without a tensor")
    return arguments[0]


def _constructors():
    table = {name: StorageClass(name) for name in DTYPES}
    table["collections.OrderedDict"] = Constructor("collections.OrderedDict", _make_state_dict)
    table["torch._utils._rebuild_tensor_v2"] = Constructor("_rebuild_tensor_v2", _make_tensor)
    table["torch._utils._rebuild_parameter"] = Constructor("_rebuild_parameter", _make_parameter)
    for name in ("numpy.core.multiarray._reconstruct", "numpy.core.multiarray.scalar",
                 "numpy._core.multiarray._reconstruct", "numpy._core.multiarray.scalar",
                 "numpy.ndarray", "numpy.dtype", "_codecs.encode"):
        table[name] = Constructor(name, lambda arguments, name=name: Opaque(name))
    return table


def make_storage(pid):
    """The storage a persistent id speaks of: ('storage', class, key, location, numel[, view])."""
    if not isinstance(pid, tuple) or len(pid) not in (5, 6) or pid[0] != "storage":
        raise Refused("a persistent id that is not a storage: %s" % show(pid))
    kind, key, numel = pid[1], pid[2], pid[4]
    if not isinstance(kind, StorageClass):
        raise Refused("a storage of an unknown class: %s" % show(kind))
    if not isinstance(key, str) or not is_count(numel):
        raise Refused("storage %s with %s elements" % (show(key), show(numel)))
    view = pid[5] if len(pid) == 6 else None
    if view is None:
        return Storage(key, kind.dtype, numel, 0, numel)
    if not isinstance(view, tuple) or len(view) != 3 or not all(is_count(n) for n in view[1:]):
        raise Refused("storage %s: view data %s" % (show(key), show(view)))
    begin, length = view[1:]
    if begin + length > numel:
        raise Refused("storage %s: a view of elements %d..%d, but it has %d"
                      % (show(key), begin, begin + length, numel))
    return Storage(key, kind.dtype, numel, begin, length)


class Zip:
    """Where the storages of a zip container lie. The directory is checked before anything else."""

    def __init__(self, data, file):
        self.data = data
        try:
            with zipfile.ZipFile(file) as archive:
                members = archive.infolist()
                end = archive.start_dir
        except Refused:
            raise
        except Exception as fault:  # zipfile lets several kinds through on damaged directories
            raise Refused("the zip directory cannot be read (truncated or damaged): %s" % fault)
        self.members = {}
        for member in members:
            self.add(member)
        self.check_layout(end)
        pickles = [name for name in self.members if name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise Refused("one member <stem>/data.pkl expected, found %d" % len(pickles))
        self.stem = pickles[0][:-len("data.pkl")]
        for name in self.members:
            if not name.startswith(self.stem):
                raise Refused("member %s is outside %s" % (show(name), show(self.stem)))
        order = self.find("byteorder", required=False)
        if order is not None and bytes(order) != b"little":
            raise Refused("member byteorder: 'little' expected, got %s" % show(bytes(order)))

    def add(self, member):
        name = member.orig_filename
        parts = name.split("/")
        if "" in parts or ".." in parts or "\\" in name or "\0" in name:
            raise Refused("member %s: a name that leaves the archive" % show(name))
        if name in self.members:
            raise Refused("member %s occurs twice" % show(name))
        if member.compress_type != zipfile.ZIP_STORED or member.compress_size != member.file_size:
            raise Refused("member %s is compressed; checkpoints store their members" % show(name))
        if member.flag_bits & 1:
            raise Refused("member %s is encrypted" % show(name))
        head = self.data[member.header_offset:member.header_offset + 30]
        if member.header_offset < 0 or len(head) < 30 or head[:4] != b"PK\x03\x04":
            raise Refused("member %s: no local header at byte %d"
                          % (show(name), member.header_offset))
        n_name, n_extra = struct.unpack("<HH", head[26:30])
        begin = member.header_offset + 30 + n_name + n_extra
        local = self.data[member.header_offset + 30:member.header_offset + 30 + n_name]
        if local != name.encode("utf-8" if member.flag_bits & 0x800 else "cp437"):
            raise Refused("member %s: its local header names %s" % (show(name), show(local)))
        self.members[name] = (member.header_offset, begin, member.file_size, member.CRC)

    def check_layout(self, end):
        spans = sorted((header, begin + size, name)
                       for name, (header, begin, size, _) in self.members.items())
        reached = 0
        for header, stop, name in spans:
            if header < reached:
                raise Refused("member %s overlaps the one before it" % show(name))
            if stop > end:
                raise Refused("member %s ends at byte %d, the directory begins at %d (truncated)"
                              % (show(name), stop, end))
            reached = stop

    def find(self, name, required=True):
        """The bytes of a member after its checksum was verified; None where it is optional."""
        if self.stem + name not in self.members:
            if required:
                raise Refused("member %s is missing" % show(self.stem + name))
            return None
        _, begin, size, checksum = self.members[self.stem + name]
        got = 0
        for at in range(begin, begin + size, CHECKSUM_CHUNK):
            got = zlib.crc32(self.data[at:min(at + CHECKSUM_CHUNK, begin + size)], got)
        if got != checksum:
            raise Refused("member %s: checksum %08x expected, got %08x (damaged)"
                          % (show(self.stem + name), checksum, got))
        return memoryview(self.data)[begin:begin + size]

    def read(self, constructors):
        machine = PickleMachine(self.find("data.pkl"), 0, "data.pkl", constructors, make_storage)
        root = machine.run()
        if machine.pos != len(machine.data):
            machine.refuse("data after the end of the pickle, of length %d"
                           % (len(machine.data) - machine.pos))
        return root

    def locate(self, storage):
        """(first byte, bytes) of the whole storage."""
        name = "data/" + storage.key
        n_bytes = len(self.find(name))
        return self.members[self.stem + name][1], n_bytes


class Legacy:
    """Where the storages of a legacy container lie: after the pickles, one behind the other."""

    def __init__(self, data):
        self.data = data
        self.seen = {}  # key -> Storage, from the persistent ids
        self.spans = {}

    def storage(self, pid):
        storage = make_storage(pid)
        known = self.seen.setdefault(storage.key, storage)
        if (known.dtype, known.root_numel) != (storage.dtype, storage.root_numel):
            raise Refused("storage %s is described in two ways" % show(storage.key))
        return storage

    def read(self, constructors):
        pos = len(LEGACY_MAGIC)
        parts = []
        for what in ("the protocol version", "the system description", "the object",
                     "the list of storages"):
            machine = PickleMachine(memoryview(self.data), pos, what, constructors, self.storage)
            parts.append(machine.run())
            pos = machine.pos
        version, system, root, keys = parts
        if version != LEGACY_VERSION:
            raise Refused("legacy protocol version %d expected, got %s"
                          % (LEGACY_VERSION, show(version)))
        if not isinstance(system, dict) or system.get("little_endian") is not True:
            raise Refused("little_endian = true expected in the system description")
        if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
            raise Refused("the list of storages is no list of names")
        for key in keys:
            pos = self.add(key, pos)
        if pos != len(self.data):
            raise Refused("data after the last storage, of length %d" % (len(self.data) - pos))
        return root

    def add(self, key, pos):
        storage = self.seen.get(key)
        if storage is None or key in self.spans:
            raise Refused("storage %s is listed, but %s" % (
                show(key), "no tensor uses it" if storage is None else "listed twice"))
        if pos + 8 > len(self.data):
            raise Refused("storage %s: the file ends before it (truncated)" % show(key))
        numel, = struct.unpack("<q", self.data[pos:pos + 8])
        n_bytes = storage.root_numel * storage.dtype.itemsize
        if numel != storage.root_numel:
            raise Refused("storage %s: %d elements expected, the file says %d"
                          % (show(key), storage.root_numel, numel))
        if pos + 8 + n_bytes > len(self.data):
            raise Refused("storage %s: %d bytes expected, the file has %d left (truncated)"
                          % (show(key), n_bytes, len(self.data) - pos - 8))
        self.spans[key] = (pos + 8, n_bytes)
        return pos + 8 + n_bytes

    def locate(self, storage):
        if storage.key not in self.spans:
            raise Refused("storage %s is used but not in the file" % show(storage.key))
        return self.spans[storage.key]


class TorchFile:
    """A checkpoint: .root is the saved object, array() gives its tensors."""

    def __init__(self, path):
        self.path = path
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                raise Refused("the file is empty")
            self.data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            if self.data[:4] == b"PK\x03\x04":
                self.container = Zip(self.data, file)
            elif self.data[:len(LEGACY_MAGIC)] == LEGACY_MAGIC:
                self.container = Legacy(self.data)
            elif self.data[:1] == b"\x80" and LEGACY_MAGIC[2:] in self.data[:32]:
                raise Refused("pickle protocol 2 expected, got %d" % self.data[1])
            else:
                raise Refused("not a file of torch.save: neither its zip nor its legacy container"
                              " begins like this (or it is truncated)")
        self.located = {}  # key -> (first byte, bytes), so that a checksum is computed once
        self.root = self.container.read(_constructors())

    def locate(self, storage):
        if storage.key not in self.located:
            self.located[storage.key] = self.container.locate(storage)
        begin, n_bytes = self.located[storage.key]
        if n_bytes != storage.root_numel * storage.dtype.itemsize:
            raise Refused("storage %s: %d elements of %d bytes expected, the file has %d bytes" % (
                show(storage.key), storage.root_numel, storage.dtype.itemsize, n_bytes))
        return begin + storage.begin * storage.dtype.itemsize

    def array(self, tensor, brain=False):
        """The tensor as a read-only NumPy view of the mapped file, after all checks. brain: whether the
        caller takes a Brain too."""
        storage, size, stride = tensor.storage, tensor.size, tensor.stride
        if len(stride) != len(size):
            raise Refused("strides %s do not fit size %s" % (show(stride), show(size)))
        numel, last = 1, tensor.offset
        for n, step in zip(size, stride):
            numel *= n
            last += (n - 1) * step
        if numel == 0 or numel > storage.numel or last >= storage.numel:
            raise Refused("size %s, strides %s, offset %d do not fit a storage of %d elements"
                          % (show(size), show(stride), tensor.offset, storage.numel))
        if storage.dtype == BF16 and not brain:
            raise Refused("torch.BFloat16Storage: checkpoints of this family have no bfloat16")
        item = storage.dtype.itemsize
        begin = self.locate(storage) + tensor.offset * item
        # Where a dimension has one element, its stride is never taken, and may be any number.
        strides = [step * item if n > 1 else 0 for n, step in zip(size, stride)]
        view = np.ndarray(size, storage.dtype, self.data, begin, strides)
        return Brain(view) if storage.dtype == BF16 else view
