"""The golden cases as data: what the authors' own code computed, and how far one may be from it.

Used by the tests over HTTP (golden_harness.py) and by the check on a GPU (tests/gpu). Needs NumPy alone.
"""

import json
import struct
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
CASES = ROOT / "tests" / "golden" / "xlm"
LAYER_CASES = ROOT / "tests" / "golden" / "memory-layers"
LAYER_NAMES = ["plain-pk", "swilu-shared"]
NAMES = ["dense12", "pkm12", "pkm12-2mem", "pkm-added", "flat", "knn32", "ties", "fp16ckpt",
         "trained", "pkm-mlpquery", "pkm-multiquery", "pkm-groupedquery", "rescore-a", "rescore-b",
         "share-values", "samekeys", "identityquery", "asm"]

# Largest error allowed, from tests/golden/xlm/README.md: the original's own fp32 is off by a third.
LOGPROB, LOGPROB_ROW, NLL, PPL_RELATIVE = 1e-4, 2e-4, 1e-3, 1e-5
WEIGHT, KL, GINI, TOP = 5e-5, 1e-4, 1e-3, 1


def expected(case):
    folder = LAYER_CASES if case in LAYER_NAMES else CASES
    due = json.loads((folder / case / "expected.json").read_text())
    return {"memory_short": {}, "memory_metrics": None, **due}  # dense12 has no memory


def by_slot(slots, weights):
    """Both with the last axis in the order of the slots, which may repeat (modulo), then weights."""
    order = np.lexsort((weights, slots))
    return np.take_along_axis(slots, order, -1), np.take_along_axis(weights, order, -1)


def expected_arrays(case):
    data = (CASES / case / "expected.safetensors").read_bytes()
    n, = struct.unpack("<Q", data[:8])
    header = json.loads(data[8:8 + n])
    header.pop("__metadata__", None)
    kinds = {"F64": "<f8", "F32": "<f4", "I64": "<i8"}
    return {name: np.frombuffer(data[8 + n:][slice(*e["data_offsets"])], kinds[e["dtype"]])
            .reshape(e["shape"]) for name, e in header.items()}
