"""The commands of memory on a table that is larger than what they may keep of it.

Rerun: PKMSERVE=build/pkmserve /usr/bin/python3 -m pytest tests/cli/test_memory_large.py
"""

import json
import shutil
import struct
import subprocess
import sys

import pytest

from cli_harness import LIMIT_S, PROGRAM, ok

N_KEY, D = 1024, 16
TABLE_BYTES = N_KEY * N_KEY * D * 4
PEAK = """import resource, subprocess, sys
done = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
sys.exit(done.returncode)"""


def peak(*arguments):
    """The most memory that a run held, in bytes. A Python between, since a process inherits the peak of its parent."""
    done = subprocess.run([sys.executable, "-S", "-c", PEAK, str(PROGRAM), *map(str, arguments)], check=True,
                          capture_output=True, text=True, timeout=LIMIT_S)
    return int(done.stdout) * 1024


def large(folder):
    """A model directory that is a table of zeros, which takes no room on the disk -> where its rows begin"""
    memory = {"layer": 1, "place": "in", "kind": "product", "n_head": 1, "k_top": 2, "n_key": N_KEY, "d_key": 2,
              "n_slot": N_KEY * N_KEY, "query_batch_norm": False, "query_bias": True}
    config = {"model_type": "pkm_transformer", "vocab_size": 9, "d_model": D, "n_layer": 2, "n_head": 1, "d_ff": 4,
              "max_position": 8, "activation": "gelu", "norm_eps": 1e-12, "tie_output": True, "memories": [memory]}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    header = json.dumps({"memories.1_in.values.weight": {
        "dtype": "F32", "shape": [N_KEY * N_KEY, D], "data_offsets": [0, TABLE_BYTES]}}).encode()
    header += b" " * (-len(header) % 8)
    with open(folder / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + TABLE_BYTES)
    return 8 + len(header)


@pytest.mark.skipif(bool({"asan", "tsan"} & set(PROGRAM.parts)), reason="a sanitizer keeps memory")
def test_little_of_a_table_is_kept(tmp_path):
    base, tuned = tmp_path / "base", tmp_path / "tuned"
    begin = large(base)
    shutil.copytree(base, tuned)
    with open(tuned / "model.safetensors", "r+b") as file:
        for slot in (0, 70000, N_KEY * N_KEY - 1):
            file.seek(begin + slot * D * 4)
            file.write(struct.pack("<%df" % D, *range(D)))
    overlay = tmp_path / "overlay"
    runs = [("memory", "diff", base, tuned, "-o", overlay), ("memory", "inspect", overlay, "--model", base),
            ("memory", "apply", base, overlay, "-o", tmp_path / "new")]
    for run in runs:
        assert peak(*run) < TABLE_BYTES // 2, run
    assert ok("memory", "diff", base, tmp_path / "new", "-o", overlay).startswith("memory 0: rows that differ: 3;")
