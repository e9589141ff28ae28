"""Writes model.safetensors: a JSON header of names, types, shapes and offsets, then the data.

xlm.py says what is written, convert.py where. Each tensor is read, checked, rounded and written
in pieces, so that a value table of many gigabytes never has a second copy in memory. Rounding is
to nearest, ties to even. NaN and infinity are refused by the tensor's name, also those that
rounding to 16 bits would make.
"""

import json

import numpy as np

from fault import Refused

NAMES = {"f32": "F32", "bf16": "BF16", "f16": "F16"}
WIDTH = {"F32": 4, "I32": 4, "BF16": 2, "F16": 2}
CHUNK = 1 << 20  # elements in work at a time
HEADER_ALIGN = 64


def stored_dtype(array, dtype):
    """Vectors (biases, norms) stay fp32: they are small, and rounding them would gain nothing.
    Slot maps are integers."""
    if array.dtype.kind == "i":
        return "I32"
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


def _pieces(array):
    """array in runs of whole rows, about CHUNK elements each."""
    rows = max(1, CHUNK // max(1, array[0].size))
    for i in range(0, array.shape[0], rows):
        yield array[i:i + rows]


def _write_tensor(file, name, array, dtype):
    for piece in _pieces(array):
        if dtype == "I32":
            file.write(np.ascontiguousarray(piece, dtype="<i4"))
            continue
        with np.errstate(all="ignore"):  # overflow is looked for right below
            values = np.ascontiguousarray(piece, dtype=np.float32)
            finite = np.isfinite(values)
            if not finite.all():
                raise Refused("tensor '%s' holds %s; every weight must be finite"
                              % (name, values[~finite].flat[0]))
            if name.endswith("running_var") and (values < 0).any():
                raise Refused("tensor '%s' holds %g; a variance cannot be negative"
                              % (name, values.min()))
            coded, fits = encode(values, dtype)
        if not fits:
            raise Refused("tensor '%s' holds %g, too large for %s; convert with --dtype f32"
                          % (name, values.flat[np.abs(values).argmax()], dtype))
        file.write(coded)


def write(file, tensors, dtype):
    """Writes tensors, a list of (name, array), to file. Returns (parameters, data bytes)."""
    plan = [(name, array, stored_dtype(array, dtype)) for name, array in tensors]
    # Readers want each tensor aligned to its element: the wide ones go first.
    plan.sort(key=lambda item: -WIDTH[item[2]])
    header, at = {}, 0
    for name, array, stored in plan:
        end = at + array.size * WIDTH[stored]
        header[name] = {"dtype": stored, "shape": list(array.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % HEADER_ALIGN)
    file.write(len(text).to_bytes(8, "little") + text)
    for name, array, stored in plan:
        _write_tensor(file, name, array, stored)
    return sum(array.size for _, array in tensors), at
