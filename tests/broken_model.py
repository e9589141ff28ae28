"""Copies of a model with other numbers, for tests: some that are none, some that are infinite."""

import json
import os
import shutil
import struct


def write_rows(folder, tensor, rows, data):
    """Overwrites rows of a tensor, or elements of a vector, by data(n) each: its n bytes."""
    with open(os.path.join(folder, "model.safetensors"), "r+b") as file:
        n = int.from_bytes(file.read(8), "little")
        entry = json.loads(file.read(n))[tensor]
        begin, end = entry["data_offsets"]
        n_byte = (end - begin) // entry["shape"][0]
        for row in rows:
            file.seek(8 + n + begin + row * n_byte)
            file.write(data(n_byte))


def without_numbers_at(position, model, folder):
    """A copy of a model directory in which the embedding of one position is NaN; of position 40, say, which neither the
    self-test nor the probe of model.sha256 reaches. Returns folder."""
    shutil.copytree(model, folder)
    write_rows(folder, "position_embeddings.weight", [position], lambda n: b"\xff" * n)  # NaN in F32 as in BF16
    return folder


def set_output_bias(folder, tokens, value):
    """Sets the output's bias (F32) of tokens; with minus infinity the model holds them for impossible."""
    write_rows(folder, "pred_layer.proj.bias", tokens, lambda n: struct.pack("<f", value))


def with_output_bias(token, value, model, folder):
    """A copy of a model directory in which the output's bias of one token is value. Returns folder."""
    shutil.copytree(model, folder)
    set_output_bias(folder, [token], value)
    return folder
