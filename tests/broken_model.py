"""A model whose numbers end, for tests."""

import json
import os
import shutil


def without_numbers_at(position, model, folder):
    """A copy of a model directory in which the embedding of one position is NaN; of position 40, say, which neither the
    self-test nor the probe of model.sha256 reaches. Returns folder."""
    shutil.copytree(model, folder)
    with open(os.path.join(folder, "model.safetensors"), "r+b") as file:
        n = int.from_bytes(file.read(8), "little")
        entry = json.loads(file.read(n))["position_embeddings.weight"]
        begin, end = entry["data_offsets"]
        row = (end - begin) // entry["shape"][0]
        file.seek(8 + n + begin + position * row)
        file.write(b"\xff" * row)  # NaN in F32 as in BF16
    return folder
