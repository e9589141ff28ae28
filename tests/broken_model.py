"""Copies of a model with other numbers, for tests: some that are none, some that are infinite."""

import json
import os
import shutil
import struct


def write_at(folder, tensor, row, data):
    """Overwrites a row of a tensor, or an element of a vector, by data(n): its n bytes."""
    with open(os.path.join(folder, "model.safetensors"), "r+b") as file:
        n = int.from_bytes(file.read(8), "little")
        entry = json.loads(file.read(n))[tensor]
        begin, end = entry["data_offsets"]
        n_byte = (end - begin) // entry["shape"][0]
        file.seek(8 + n + begin + row * n_byte)
        file.write(data(n_byte))


def without_numbers_at(position, model, folder):
    """A copy of a model directory in which the embedding of one position is NaN; of position 40, say, which neither the
    self-test nor the probe of model.sha256 reaches. Returns folder."""
    shutil.copytree(model, folder)
    write_at(folder, "position_embeddings.weight", position, lambda n: b"\xff" * n)  # NaN in F32 as in BF16
    return folder


def with_output_bias(token, value, model, folder):
    """A copy of a model directory in which the output's bias (F32) of one token is value; with minus infinity the model
    holds it for impossible. Returns folder."""
    shutil.copytree(model, folder)
    write_at(folder, "pred_layer.proj.bias", token, lambda n: struct.pack("<f", value))
    return folder
