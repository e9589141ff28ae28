"""Writes model.safetensors: a JSON header of names, types, shapes and offsets, then the data.

The families' modules say what is written, convert.py where. Each tensor is read, checked, rounded and written
in pieces, so that a value table of many gigabytes never has a second copy in memory. Rounding is
to nearest, ties to even. NaN and infinity are refused by the tensor's name, also those that
rounding to 16 bits would make.

q4, of a memory's values alone: row r becomes codes of 4 bits, two in a byte, and one fp16 number
s[r]; a value is (code - 8)·s[r] (class Coded). Its error is measured too, and never refused: who
asks for 4 bits knows.

int8: row r of a matrix W becomes integers q[r] in -127..127 and one fp32 number s[r], so that W[r] is
about q[r]·s[r]; the integers stand under the tensor's own name, the numbers under NAME.scale. A row
with one element far above its others loses them, so the relative error ||W - q·s|| / ||W|| of each
tensor is measured, and a tensor beyond LOSS_MAX is refused.
"""

import json
import math
import os
from types import SimpleNamespace

import numpy as np

from fault import Refused

NAMES = {"f32": "F32", "bf16": "BF16", "f16": "F16", "int8": "I8"}
WIDTH = {"F32": 4, "I32": 4, "BF16": 2, "F16": 2, "I8": 1, "U8": 1}
CHUNK = 1 << 20  # elements in work at a time
HEADER_ALIGN = 64
SCALE = ".scale"
SCALE_OF = {"I8": "F32", "U8": "F16"}  # the type of the scales of rows
# q is off by up to half a step of max/127, in root mean square by max / (127·sqrt(12)). Bell-shaped rows
# of a thousand weights have a max of 3.4 times their root mean square, hence an error of 0.8 %; 3 %
# allows 13 times.
LOSS_MAX = 0.03
Q_MAX = np.float32(127)
TINY = np.float32(1e-30)  # a row below it is written as zeros: 127 / max stays far from overflow


class Coded:
    """A table of 4 bits a value, as write takes arrays. codes: [n, m/2] of uint8, the code of column i in
    the low half of byte i, that of column i + m/2 in its high half; scales: [n] of fp16, of any sign.
    The value is (code - 8)·scale, exactly. Slices are widened to fp32."""

    dtype = np.dtype(np.float32)  # of the slices
    ndim = 2
    own_dtype = "q4"

    def __init__(self, codes, scales):
        self.codes, self.scales = codes, scales
        self.shape = (codes.shape[0], 2 * codes.shape[1])
        self.size = self.shape[0] * self.shape[1]

    def numbers(self, rows):
        """code - 8, as int8 [n, m]"""
        codes = self.codes[rows]
        return np.concatenate([codes & 15, codes >> 4], 1).astype(np.int8) - np.int8(8)

    def __getitem__(self, rows):
        return self.numbers(rows) * np.asarray(self.scales[rows], np.float32)[:, None]

    def bytes(self, rows):
        """int8 rows and their scales, which are not negative: the same values."""
        scales = np.asarray(self.scales[rows], np.float32)
        return self.numbers(rows) * np.where(scales < 0, -1, 1).astype(np.int8)[:, None], np.abs(scales)


def stored_dtype(name, array, dtype):
    """Vectors (biases, norms) stay fp32: they are small, and rounding them would gain nothing.
    Slot maps are integers. Of what has two dimensions int8 spares a memory's keys and query networks,
    since they decide which slots are read, and the all-attention family's vectors of positions."""
    if array.dtype.kind == "i":
        return "I32"
    if dtype == "q4":
        return "U8"
    if dtype == "int8":
        spared = name.endswith(".keys") or ".query_proj." in name or name == "positions"
        return "F32" if array.ndim != 2 or spared else "I8"
    return NAMES[dtype] if array.ndim >= 2 else "F32"


def encode(values, dtype):
    """fp32 values as the bytes of dtype; the second result is false where one overflows."""
    if dtype == "F32":
        return values.astype("<f4", copy=False), True
    if dtype == "F16":
        half = values.astype("<f2")
        return half, bool(np.isfinite(half).all())
    bits = values.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return rounded.astype("<u2"), bool(((rounded & 0x7F80) != 0x7F80).all())


def encode_rows(values):
    """fp32 rows as int8 [n, m] and their scales fp32 [n], in fp32 arithmetic."""
    most = np.abs(values).max(axis=1)
    tiny = most < TINY
    factors = np.where(tiny, np.float32(0), Q_MAX / np.where(tiny, np.float32(1), most))
    scales = np.where(tiny, np.float32(0), most / Q_MAX)
    return np.rint(values * factors[:, None]).astype(np.int8), scales


def encode_codes(values):
    """fp32 rows [n, m], m even, as codes of 4 bits [n, m/2] and their scales fp16 [n]. A scale is the
    entry of largest magnitude, the first of equals, over -8, or 1 where that is 0."""
    most = np.take_along_axis(values, np.abs(values).argmax(1)[:, None], 1)[:, 0]
    scales = (most / np.float32(-8)).astype("<f2")
    scales[scales == 0] = 1
    codes = (np.clip(np.rint(values / scales.astype(np.float32)[:, None]), -8, 7) + 8).astype(np.uint8)
    half = values.shape[1] // 2
    return codes[:, :half] | codes[:, half:] << 4, scales


def _pieces(array):
    """array in runs of whole rows, about CHUNK elements each."""
    rows = max(1, CHUNK // math.prod(array.shape[1:]))
    for i in range(0, array.shape[0], rows):
        yield array[i:i + rows]


def _checked_pieces(name, array):
    """The pieces in fp32, every element of which is a number."""
    for piece in _pieces(array):
        with np.errstate(all="ignore"):  # overflow is looked for right below
            values = np.ascontiguousarray(piece, dtype=np.float32)
        finite = np.isfinite(values)
        if not finite.all():
            raise Refused("tensor '%s' holds %s; every weight must be finite"
                          % (name, values[~finite].flat[0]))
        if name.endswith("running_var") and (values < 0).any():
            raise Refused("tensor '%s' holds %g; a variance cannot be negative"
                          % (name, values.min()))
        yield values


def _write_tensor(file, name, array, dtype):
    if dtype == "I32":
        for piece in _pieces(array):
            file.write(np.ascontiguousarray(piece, dtype="<i4"))
        return
    for values in _checked_pieces(name, array):
        with np.errstate(all="ignore"):
            coded, fits = encode(values, dtype)
        if not fits:
            raise Refused("tensor '%s' holds %g, too large for %s; convert with --dtype f32"
                          % (name, values.flat[np.abs(values).argmax()], dtype))
        file.write(coded)


def _write_coded(file, array):
    """A table of 4 bits as int8. Returns its scales; nothing is lost."""
    scales, step = [], max(1, CHUNK // array.shape[1])
    for i in range(0, array.shape[0], step):
        numbers, some = array.bytes(slice(i, i + step))
        file.write(np.ascontiguousarray(numbers))
        scales.append(some)
    return np.concatenate(scales).astype("<f4"), 0.0


def _write_rows(file, name, array):
    """An int8 tensor. Returns its scales and its relative error."""
    if isinstance(array, Coded):
        return _write_coded(file, array)
    scales, lost, whole = [], 0.0, 0.0
    for values in _checked_pieces(name, array):
        coded, scale = encode_rows(values)
        file.write(coded)
        scales.append(scale)
        exact = values.astype(np.float64)
        whole += float(np.vdot(exact, exact))
        exact -= coded * scale[:, None].astype(np.float64)
        lost += float(np.vdot(exact, exact))
    return np.concatenate(scales).astype("<f4"), math.sqrt(lost / whole) if whole > 0 else 0.0


def _write_codes(file, name, array):
    """A table of 4 bits. Returns its scales and its relative error."""
    if isinstance(array, Coded):
        step = max(1, CHUNK // array.shape[1])
        for i in range(0, array.shape[0], step):
            file.write(np.ascontiguousarray(array.codes[i:i + step]))
        return np.asarray(array.scales), 0.0
    scales, lost, whole = [], 0.0, 0.0
    for values in _checked_pieces(name, array):
        with np.errstate(all="ignore"):
            codes, scale = encode_codes(values)
        if not np.isfinite(scale).all():
            raise Refused("tensor '%s' holds %g, too large for a scale in fp16; leave --values q4 out"
                          % (name, values.flat[np.abs(values).argmax()]))
        file.write(codes)
        scales.append(scale)
        exact = values.astype(np.float64)
        whole += float(np.vdot(exact, exact))
        exact -= Coded(codes, scale)[:]
        lost += float(np.vdot(exact, exact))
    return np.concatenate(scales), math.sqrt(lost / whole) if whole > 0 else 0.0


def _shape(array, stored):
    return (array.shape[0], array.shape[1] // 2) if stored == "U8" else array.shape


def _lay_out(tensors, dtype, own):
    """[(name, array, stored dtype)], scales left out, and the header with all offsets."""
    plan = [(name, array, stored_dtype(name, array, own.get(name, dtype)))
            for name, array in tensors]
    entries = [(name, _shape(array, stored), stored) for name, array, stored in plan]
    entries += [(name + SCALE, array.shape[:1], SCALE_OF[stored]) for name, array, stored in plan
                if stored in SCALE_OF]
    # Readers want each tensor aligned to its element: the wide ones go first.
    entries.sort(key=lambda entry: -WIDTH[entry[2]])
    header, at = {}, 0
    for name, shape, stored in entries:
        end = at + math.prod(shape) * WIDTH[stored]
        header[name] = {"dtype": stored, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    return plan, header, at


def _check_room(file, size):
    """A small file with adaptive input may become a huge one: said before hours of work."""
    system = os.fstatvfs(file.fileno())
    left = system.f_bavail * system.f_frsize
    if system.f_blocks > 0 and size > left:
        raise Refused("model.safetensors takes %d bytes, but where --output is %d are left"
                      % (size, left))


def write(file, tensors, dtype, force=False, own=()):
    """Writes tensors, a list of (name, array), to file; an array may be anything with the shape, size
    and slices of one. force: also what int8 loses too much of. own: {name: dtype} of those that have
    another one.
    Returns .parameters, .bytes of data, .loss (largest relative error, tensor) of int8 or None."""
    plan, header, size = _lay_out(tensors, dtype, dict(own))
    _check_room(file, size)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % HEADER_ALIGN)
    file.write(len(text).to_bytes(8, "little") + text)
    base, loss = 8 + len(text), None

    def seek(name):
        file.seek(base + header[name]["data_offsets"][0])

    for name, array, stored in plan:
        seek(name)
        if stored not in SCALE_OF:
            _write_tensor(file, name, array, stored)
            continue
        scales, lost = (_write_rows if stored == "I8" else _write_codes)(file, name, array)
        if stored == "I8" and lost > LOSS_MAX and not force:
            raise Refused("tensor '%s' would have a relative error of %.4f in int8, at most %g is"
                          " allowed; convert with --dtype bf16, or with --force all the same"
                          % (name, lost, LOSS_MAX))
        if loss is None or lost > loss[0]:
            loss = (lost, name)
        seek(name + SCALE)  # known only now, though it stands before
        file.write(scales)
    return SimpleNamespace(parameters=sum(array.size for _, array in tensors), bytes=size, loss=loss)
