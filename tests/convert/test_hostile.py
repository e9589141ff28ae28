"""Files that want to do something else than being converted: code in the pickle, containers that
lie, files cut anywhere. Each ends with status 1, one line naming the culprit, and no output.

Rerun one: /usr/bin/python3 -m pytest tests/convert/test_hostile.py -k os.system
"""

import os
import shutil
import struct
import subprocess
import sys
import zipfile
import zlib

import numpy as np
import pytest
import torch_writer as tw
from convert_harness import PROGRAM, convert, convert_program

TEXT = struct.Struct("<I")


def text(value):
    raw = value.encode()
    return b"X" + TEXT.pack(len(raw)) + raw


def call(module, name, argument):
    return tw.global_(module, name) + text(argument) + b"\x85R"


def zip_file(tmp_path, value, **how):
    return tw.write_zip(tmp_path / "c.pth", value, **how)


def legacy_file(tmp_path, value, **how):
    return tw.write_legacy(tmp_path / "c.pth", value, **how)


def poisoned(code, where="best_metrics"):
    value = tw.tiny()
    value[where] = tw.Raw(code)
    return value


# Pickles that execute something when a common unpickler reads them, and the global they name.
# CANARY is replaced by a path that must not exist afterwards.
EXECUTE = {
    "os.system": (call("os", "system", "touch CANARY"), "os.system"),
    "posix.system": (call("posix", "system", "touch CANARY"), "posix.system"),
    "eval": (call("builtins", "eval", "open('CANARY','w')"), "builtins.eval"),
    "py2 eval": (call("__builtin__", "eval", "open('CANARY','w')"), "__builtin__.eval"),
    "exec": (call("builtins", "exec", "open('CANARY','w')"), "builtins.exec"),
    "subprocess": (tw.global_("subprocess", "call") + b"(](" + text("touch") + text("CANARY")
                   + b"etR", "subprocess.call"),
    "getattr chain": (tw.global_("builtins", "getattr") + b"(" + tw.global_("os", "path")
                      + text("join") + b"tR", "builtins.getattr"),
    "nested reduce": (tw.global_("collections", "OrderedDict") + b"(("
                      + call("os", "system", "touch CANARY") + b"ttR", "os.system"),
    "inside encode": (tw.global_("_codecs", "encode") + b"(" + call("os", "system", "touch CANARY")
                      + text("latin1") + b"tR", "os.system"),
    "inst": (b"(" + text("touch CANARY") + b"ios\nsystem\n", "INST"),
    "obj": (b"(" + tw.global_("collections", "OrderedDict") + b"o", "OBJ"),
    "newobj": (tw.global_("collections", "OrderedDict") + b")\x81", "NEWOBJ"),
    "stack global": (text("os") + text("system") + b"\x93", "STACK_GLOBAL"),
    "text persistent id": (b"Pos.system\n", "PERSID"),
    "extension": (b"\x82\x01", "EXT1"),
    "unknown opcode": (b"\xff", "0xff"),
    "dotted name": (tw.global_("collections", "OrderedDict.fromkeys"), "OrderedDict.fromkeys"),
    "module as prefix": (tw.global_("torch", "_utils._rebuild_tensor_v3"), "_rebuild_tensor_v3"),
    "torch.load": (call("torch.serialization", "load", "CANARY"), "torch.serialization.load"),
    "numpy load": (call("numpy", "load", "CANARY"), "numpy.load"),
    "class of storage": (call("torch", "FloatStorage", "CANARY"), "torch.FloatStorage"),
    "call of data": (b"}" + text("x") + b"\x85R", "not an allowed constructor"),
    "call of a tensor": (b"K\x05)R", "not an allowed constructor"),
    "call without tuple": (tw.global_("collections", "OrderedDict") + b"]R",
                           "not an allowed constructor"),
    "build on a dict": (b"}}b", "BUILD"),
    "build on a global": (tw.global_("collections", "OrderedDict") + b"}b", "BUILD"),
    "setitems on a global": (tw.global_("collections", "OrderedDict") + b"(K\1K\2u", "dict"),
    "append to a dict": (b"}K\1a", "list"),
    "ordered dict of items": (tw.global_("collections", "OrderedDict") + b"](K\1K\2\x86e\x85R",
                              "initial"),
}


@pytest.mark.parametrize("container", ["zip", "legacy"])
@pytest.mark.parametrize("name", EXECUTE)
def test_nothing_in_a_pickle_is_executed(name, container, tmp_path, refused, monkeypatch):
    code, word = EXECUTE[name]
    canary = str(tmp_path / "canary")
    for unsafe in ("system", "popen"):
        monkeypatch.setattr(os, unsafe, lambda *args: pytest.fail("executed"))
    parts = code.split(b"CANARY")
    if len(parts) > 1:  # the length in front of the text grows with the path
        at = code.index(b"CANARY")
        start = code.rindex(b"X", 0, at)
        length, = TEXT.unpack(code[start + 1:start + 5])
        code = code[:start + 1] + TEXT.pack(length + len(canary) - 6) + code[start + 5:]
        code = code.replace(b"CANARY", canary.encode())
    source = tw.WRITERS[container](tmp_path / "c.pth", poisoned(code))
    refused(source, "c.pth", word)
    assert not os.path.exists(canary)


def test_the_program_itself_executes_nothing_either(tmp_path):
    code = call("os", "system", "touch %s/canary" % tmp_path)
    source = zip_file(tmp_path, poisoned(code))
    got = convert_program(source, "--output", tmp_path / "o")
    assert got.status == 1 and "os.system" in got.err and "nothing was executed" in got.err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c.pth"]


@pytest.mark.parametrize("protocol, begin", [(3, b""), (4, b"\x95" + bytes([13]) + bytes(7)), (5, b"\x95" + bytes([13]) + bytes(7))])
def test_an_old_container_of_another_protocol_is_named(protocol, begin, tmp_path, refused):
    """pickle frames what it writes from protocol 4 on."""
    path = tmp_path / "c.pth"
    path.write_bytes(b"\x80" + bytes([protocol]) + begin + tw.LEGACY_MAGIC[2:] + b"rest")
    refused(path, "c.pth", "pickle protocol 2 expected, got %d" % protocol)


DAMAGED_PICKLES = {
    "stack underflow": b"R", "pop below a mark": b"(0(t", "mark missing": b"t",
    "odd items": b"}(K\1u", "memo missing": b"h\x07", "string not UTF-8": b"X\1\0\0\0\xff",
    "list as key": b"}]K\1s",
    "nested tuple as key": b"}))\x86)\x86K\1s", "long tuple as key": b"}(" + text("x") * 5 + b"tK\1s",
    "numbers as key": b"}K\1K\2\x86K\1s", "NaN as key": b"}G\x7f\xf8" + b"\0" * 6 + b"K\1s",
    "long integer": b"\x8a\x20" + b"\1" * 32,
    "name without end": b"c" + b"a" * 300, "protocol 5": b"\x80\x05",
    "persistent id of text": text("storage") + b"Q", "persistent id of 3": b"K\1K\2K\3\x87Q",
    "tensor of nothing": tw.global_("torch._utils", "_rebuild_tensor_v2") + b")R",
    "parameter of nothing": tw.global_("torch._utils", "_rebuild_parameter") + b")R",
}


@pytest.mark.parametrize("container", ["zip", "legacy"])
@pytest.mark.parametrize("name", DAMAGED_PICKLES)
def test_damaged_pickles(name, container, tmp_path, refused):
    source = tw.WRITERS[container](tmp_path / "c.pth", poisoned(DAMAGED_PICKLES[name]))
    refused(source, "c.pth", "byte")


def test_an_endless_pickle_is_stopped(tmp_path, refused, monkeypatch):
    import pickle_machine
    monkeypatch.setattr(pickle_machine, "OPERATIONS_MAX", 1000)
    refused(zip_file(tmp_path, poisoned(b"]0" * 1000 + b"N")), "1000 operations")


def test_objects_that_hold_themselves_can_be_named(tmp_path, refused):
    """A list in itself, and a tuple that doubles 200 times: messages stay short and quick."""
    loop = b"]q\1h\1a"
    doubling = b")" + b"q\2h\2\x86" * 200
    for code in (loop, doubling):
        value = tw.tiny()
        value["params"]["n_layers"] = tw.Raw(code)
        refused(zip_file(tmp_path, value), "params.n_layers")


# ---- truncation ---------------------------------------------------------------------------------

@pytest.mark.parametrize("container", ["zip", "legacy"])
def test_a_file_cut_anywhere(container, tmp_path, refused):
    data = tw.WRITERS[container](tmp_path / "whole.pth", tw.tiny()).read_bytes()
    steps = sorted({0, 1, 3, 4, 14, 15, 16, 20, len(data) - 1, len(data) - 22, len(data) - 23}
                   | set(range(0, len(data), len(data) // 150)))
    for cut in steps:
        (tmp_path / "c.pth").write_bytes(data[:cut])
        refused(tmp_path / "c.pth", "c.pth")


@pytest.mark.parametrize("container", ["zip", "legacy"])
def test_bytes_changed_anywhere(container, tmp_path):
    """A changed byte is refused in one line or does no harm; it never ends in a surprise."""
    data = tw.WRITERS[container](tmp_path / "whole.pth", tw.tiny()).read_bytes()
    rng = np.random.default_rng(3)
    for trial in range(400):
        changed = bytearray(data)
        for at in rng.integers(0, min(len(data), 9000), 1 + trial % 3):
            changed[at] = rng.integers(0, 256)
        (tmp_path / "c.pth").write_bytes(changed)
        got = convert(tmp_path / "c.pth", "--output", tmp_path / "o")
        assert got.status in (0, 1) and got.err.count("\n") == got.status, (trial, got.err)
        assert "Traceback" not in got.err and "cannot be converted" not in got.err, (trial, got.err)
        assert (tmp_path / "o").exists() == (got.status == 0)
        shutil.rmtree(tmp_path / "o", ignore_errors=True)


# ---- the zip container --------------------------------------------------------------------------

@pytest.fixture
def tiny_zip(tmp_path):
    return zip_file(tmp_path, tw.tiny())


def test_compressed_members(tmp_path, refused):
    """Also the classical bomb: a megabyte of zeros in a kilobyte."""
    source = zip_file(tmp_path, tw.tiny(), compression=zipfile.ZIP_DEFLATED)
    refused(source, "archive/data.pkl", "compressed")
    with zipfile.ZipFile(source, "w") as archive:
        archive.writestr("archive/data.pkl", b"\0" * 10**6, zipfile.ZIP_DEFLATED)
    refused(source, "archive/data.pkl", "compressed")


@pytest.mark.parametrize("name", ["../evil", "/etc/evil", "archive/../../evil", "archive//x",
                                  "archive/a\\b", "elsewhere/data/0"])
def test_members_that_leave_the_archive(name, tmp_path, refused):
    refused(zip_file(tmp_path, tw.tiny(), extra=[(name, b"x")]), "member", "evil"
            if "evil" in name else "member")


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_member_twice(tmp_path, refused):
    refused(zip_file(tmp_path, tw.tiny(), extra=[("archive/data/0", b"x" * 512)]),
            "archive/data/0", "twice")


def test_two_pickles_or_none(tmp_path, refused):
    refused(zip_file(tmp_path, tw.tiny(), extra=[("archive/b/data.pkl", b"N.")]), "data.pkl")
    with zipfile.ZipFile(tmp_path / "c.pth", "w") as archive:
        archive.writestr("archive/version", b"3\n")
    refused(tmp_path / "c.pth", "data.pkl", "found 0")


def test_the_other_byte_order(tmp_path, refused):
    refused(zip_file(tmp_path, tw.tiny(), extra=[("archive/byteorder", b"big")]), "byteorder")


def test_a_damaged_storage(tiny_zip, refused):
    data = tiny_zip.read_bytes()
    at = data.index(tw.tiny_weights()["embeddings.weight"].tobytes())
    tiny_zip.write_bytes(data[:at] + b"\x01" + data[at + 1:])
    sums = zlib.crc32(data[at:at + 512]), zlib.crc32(b"\x01" + data[at + 1:at + 512])
    refused(tiny_zip, "'embeddings.weight': member 'archive/data/0': checksum %08x expected, got %08x" % sums)


def test_a_missing_storage(tmp_path, refused):
    source = tw.write_zip(tmp_path / "a.pth", tw.tiny())
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(tmp_path / "c.pth", "w") as new:
        for name in old.namelist():
            if name != "archive/data/2":
                new.writestr(name, old.read(name))
    refused(tmp_path / "c.pth", "tensor", "archive/data/2", "missing")


def directory_entry(data, name):
    """Where the central directory speaks of a member."""
    at = data.index(b"PK\x01\x02")
    while data[at + 46:at + 46 + len(name)] != name:
        at = data.index(b"PK\x01\x02", at + 1)
    return at


def patched(source, name, offset, layout, value):
    data = bytearray(source.read_bytes())
    struct.pack_into(layout, data, directory_entry(data, name) + offset, value)
    source.write_bytes(data)
    return source


def test_a_directory_that_lies(tiny_zip, refused):
    whole = tiny_zip.read_bytes()
    member = b"archive/data/3"
    for offset, layout, value, word in (
            (42, "<I", 0, "data/3"),             # header of another member
            (42, "<I", len(whole) - 5, "data/3"),  # header at the end
            (8, "<H", 1, "encrypted"), (16, "<I", 1, "checksum")):
        tiny_zip.write_bytes(whole)
        refused(patched(tiny_zip, member, offset, layout, value), word)
    for size, word in ((2**31, "archive/data/3"), (len(whole), "truncated"), (300, "overlaps")):
        tiny_zip.write_bytes(whole)
        for offset in (20, 24):
            patched(tiny_zip, member, offset, "<I", size)
        refused(tiny_zip, "member 'archive/data/", word)


def test_data_after_the_pickle(tmp_path, refused):
    with zipfile.ZipFile(tmp_path / "c.pth", "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02N.more")
    refused(tmp_path / "c.pth", "data.pkl", "data after the end of the pickle, of length 4")


# ---- the legacy container -----------------------------------------------------------------------

def test_headers_of_the_legacy_container(tmp_path, refused):
    path = tmp_path / "c.pth"
    refused(tw.write_legacy(path, tw.tiny(), version=1002), "1001", "1002")
    refused(tw.write_legacy(path, tw.tiny(), little_endian=False), "little_endian")
    refused(tw.write_legacy(path, tw.tiny(), tail=b"x"), "data after the last storage, of length 1")
    refused(tw.write_legacy(path, tw.tiny(), little_endian=1), "little_endian")
    refused(tw.write_legacy(path, tw.tiny(), keys=["0", "0"]), "storage '0' is listed, but listed twice")
    refused(tw.write_legacy(path, tw.tiny(), keys=["nope"]), "storage 'nope' is listed, but no tensor uses it")
    for keys in (3, [3], [[]], {}):
        refused(tw.write_legacy(path, tw.tiny(), keys=keys), "the list of storages is no list of names")
    data = tw.write_legacy(path, tw.tiny()).read_bytes()
    system = tw.Pickler(legacy=True).pickle({"protocol_version": 1001, "little_endian": True})
    path.write_bytes(data.replace(system, b"\x80\x02]."))
    refused(path, "little_endian")
    refused(tw.write_legacy(path, tw.tiny(), keys=[]), "data after")
    path.write_bytes(b"\x80\x02}q\0.")
    refused(path, "not a file of torch.save")


def test_a_last_storage_that_is_cut(tmp_path, refused):
    """The last one has 8 elements of fp32 behind their count of 8 bytes."""
    value = tw.tiny(layer_norm_emb__bias=None)
    value["model"]["layer_norm_emb.bias"] = tw.Tensor(np.arange(8, dtype=np.float32))
    whole = legacy_file(tmp_path, value).read_bytes()
    for n_gone, words in ((1, "32 bytes expected, the file has 31 left"),
                          (32, "32 bytes expected, the file has 0 left"), (33, "the file ends before it"),
                          (40, "the file ends before it")):
        (tmp_path / "c.pth").write_bytes(whole[:-n_gone])
        refused(tmp_path / "c.pth", "storage '", words + " (truncated)")
    n = len({id(tensor.storage) for tensor in value["model"].values()})
    listed = tw.write_legacy(tmp_path / "c.pth", value, keys=[str(i) for i in range(n - 1)]).read_bytes()
    (tmp_path / "c.pth").write_bytes(listed[:-40])
    refused(tmp_path / "c.pth", "'layer_norm_emb.bias': storage '%d' is used but not in the file" % (n - 1))


def test_a_storage_described_in_two_ways_or_not_there(tmp_path, refused):
    class Renamed(tw.Pickler):
        def key(self, storage):
            return self.names.get(super().key(storage), super().key(storage))

    shape = tw.tiny_weights()["layer_norm_emb.bias"].shape
    for claim, words in ((dict(numel=9), "two ways"), (dict(cls="DoubleStorage"), "two ways"), ({}, None)):
        first, second = tw.Storage(np.zeros(shape, np.float32)), tw.Storage(np.zeros(shape, np.float32), **claim)
        pickler = Renamed(legacy=True)
        pickler.names = {"1": "0"}
        body = pickler.pickle({"a": tw.Tensor(first.data, first), "b": tw.Tensor(first.data, second)})
        (tmp_path / "c.pth").write_bytes(tw.LEGACY_MAGIC + pickler.pickle(1001) + pickler.pickle(
            {"little_endian": True}) + body + pickler.pickle(["0"]) + struct.pack("<q", 8) + first.data.tobytes())
        refused(tmp_path / "c.pth", "storage '0' is described in two ways" if words else "not an XLM checkpoint")


@pytest.mark.parametrize("count", [0, 1, 127, 129, -1, 2**62, -2**63])
def test_legacy_counts_that_lie(count, tmp_path, refused):
    refused(legacy_file(tmp_path, tw.tiny(), counts={0: count}),
            "storage '0': 128 elements expected, the file says %d" % count)


@pytest.mark.parametrize("view, words", [
    (("v", 0, 9), "a view of elements 0..9, but it has 8"), (("v", 5, 4), "a view of elements 5..9, but it has 8"),
    (("v", 2**62, 2**62), "a view of elements"), (("v", -1, 4), "view data ('v', -1, 4)"),
    (("v", 4, -1), "view data ('v', 4, -1)"), (("v", "0", 4), "view data ('v', '0', 4)"),
    (("v", 0, True), "view data ('v', 0, True)"), (("v", 0), "view data ('v', 0)"), (7, "view data 7")])
def test_legacy_views_that_lie(view, words, tmp_path, refused):
    root = tw.Storage(np.zeros(8, np.float32), view=view)
    value = tw.tiny(layer_norm_emb__bias=tw.Tensor(root.data, root))
    refused(legacy_file(tmp_path, value), "storage '", "': " + words)


# ---- tensors that lie ---------------------------------------------------------------------------

LIES = {
    "offset": (dict(offset=1), "size (8,), strides (1,), offset 1 do not fit a storage of 8 elements"),
    "far offset": (dict(offset=2**62), "size (8,), strides (1,), offset %d do not fit" % 2**62),
    "large stride": (dict(stride=(2,)), "size (8,), strides (2,), offset 0 do not fit"),
    "too few strides": (dict(stride=()), "strides () do not fit size (8,)"),
    "too many strides": (dict(stride=(8, 1)), "strides (8, 1) do not fit size (8,)"),
}

# What no view can be made of, and the part that messages name.
NO_COUNTS = {
    "negative offset": (dict(offset=-1), "offset"), "offset of text": (dict(offset="0"), "offset"),
    "offset none": (dict(offset=None), "offset"),
    "negative stride": (dict(stride=(-1,), offset=7), "strides"),
    "stride of text": (dict(stride=("1",)), "strides"), "list of strides": (dict(stride=[1]), "strides"),
    "boolean size": (dict(size=(True,)), "size"), "size of floats": (dict(size=(8.0,)), "size"),
    "negative size": (dict(size=(-8,)), "size"), "60 dimensions": (dict(size=(8,) * 60), "size"),
    "size of tensors": (dict(size=(tw.Tensor(np.zeros(2, np.float32)),) * 6), "size"),
}


@pytest.mark.parametrize("container", ["zip", "legacy"])
@pytest.mark.parametrize("name", LIES)
def test_views_that_leave_their_storage(name, container, tmp_path, refused):
    how, words = LIES[name]
    value = tw.tiny(layer_norm_emb__bias=tw.Tensor(tw.tiny_weights()["layer_norm_emb.bias"], **how))
    refused(tw.WRITERS[container](tmp_path / "c.pth", value), "'layer_norm_emb.bias': " + words)


@pytest.mark.parametrize("container", ["zip", "legacy"])
@pytest.mark.parametrize("name", NO_COUNTS)
def test_views_that_are_not_counts(name, container, tmp_path, refused):
    how, part = NO_COUNTS[name]
    tensor = tw.Tensor(tw.tiny_weights()["layer_norm_emb.bias"], **how)
    refused(tw.WRITERS[container](tmp_path / "c.pth", tw.tiny(layer_norm_emb__bias=tensor)),
            "byte", "a tensor's %s:" % part)


@pytest.mark.parametrize("size", [(2**62, 2**62), (0,), (8,) * 8])
def test_sizes_that_cannot_be(size, tmp_path, refused):
    """Positions are the one tensor whose rows are taken from the file."""
    for field in ("position_embeddings__weight", "memories__1_in__keys", "layer_norm_emb__bias"):
        tensor = tw.Tensor(np.zeros(8, np.float32), size=size, stride=(1,) * len(size))
        refused(zip_file(tmp_path, tw.tiny(**{field: tensor})), field.replace("__", "."))


def test_one_row_repeated_by_stride_zero(tmp_path, refused):
    """32 bytes that claim to be a large table would fill the disk."""
    row = tw.Tensor(np.zeros(8, np.float32), size=(2**20, 8), stride=(0, 1))
    refused(zip_file(tmp_path, tw.tiny(position_embeddings__weight=row)),
            "'position_embeddings.weight'", "storage of 8 elements")


@pytest.mark.parametrize("numel", [0, 7, 9, 2**61, -8, 2**62])
def test_storages_whose_count_lies(numel, tmp_path, refused):
    storage = tw.Storage(tw.tiny_weights()["layer_norm_emb.bias"], numel=numel)
    value = tw.tiny(layer_norm_emb__bias=tw.Tensor(storage.data, storage))
    refused(zip_file(tmp_path, value), "do not fit a storage of %d elements" % numel if 0 <= numel < 8
            else "with -8 elements" if numel < 0 else "%d elements of 4 bytes expected, the file has 32 bytes" % numel)
    refused(legacy_file(tmp_path, value), "storage")


@pytest.mark.parametrize("cls", ["DoubleStorage", "HalfStorage", "BFloat16Storage", "ByteStorage",
                                 "UntypedStorage"])
def test_storages_of_another_class(cls, tmp_path, refused):
    array = tw.tiny_weights()["layer_norm_emb.bias"]
    array = array.astype(np.uint16) if cls == "BFloat16Storage" else array
    storage = tw.Storage(array, cls=cls)
    value = tw.tiny(layer_norm_emb__bias=tw.Tensor(storage.data, storage))
    known = cls in ("DoubleStorage", "HalfStorage")
    refused(zip_file(tmp_path, value), "layer_norm_emb" if known else "torch." + cls)


def test_names_with_line_breaks_stay_one_line(tmp_path, refused):
    value = tw.tiny(**{"evil\nname\x1b[31m": tw.Tensor(np.zeros(1, np.float32))})
    refused(zip_file(tmp_path, value), "evil?name?[31m")


# ---- interruption -------------------------------------------------------------------------------

def test_a_terminated_conversion_leaves_nothing(tmp_path):
    """SIGTERM in the middle of writing: the staging directory goes too."""
    source = zip_file(tmp_path, tw.tiny())
    script = ("import sys, os, signal; sys.path.insert(0, %r); import convert, safetensors_file\n"
              "safetensors_file.write = lambda *args: os.kill(os.getpid(), signal.SIGTERM)\n"
              "convert.main([%r, '--output', %r])"
              % (str(PROGRAM.parent), str(source), str(tmp_path / "a" / "o")))
    done = subprocess.run([sys.executable, "-B", "-c", script], timeout=60, check=False)
    assert done.returncode != 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c.pth"]
