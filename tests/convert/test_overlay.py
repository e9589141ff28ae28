"""Overlays through the command line, for every kind of memory: the bits of a directory whose tables hold
the same rows.

Rerun: /usr/bin/python3 -m pytest tests/convert/test_overlay.py
"""

import json
import os
import subprocess
import sys

import memory_layers_writer as mw
import numpy as np
import pytest
from convert_harness import ROOT, convert

sys.path.insert(0, str(ROOT / "tests"))
from overlay_files import Base, bf16, widened  # noqa: E402

PROGRAM = os.environ.get("PKMSERVE", str(ROOT / "build" / "pkmserve"))
PK = mw.PK
IDS = "1 4 5 3 9 7 2 8"
SLOTS = np.arange(0, 25, 2)


def run(command, directory, *flags):
    return subprocess.run([PROGRAM, command, "--model", str(directory), "--ids", "--json", *flags], input=IDS,
                          capture_output=True, text=True, timeout=120)


def score(directory, *flags):
    done = run("score", directory, "--add-bos", "off", *flags)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["results"][0]["sum_logprob"]


def model(folder, kind):
    """Two memories: the second one reads the first one's table, or its own; or both have experts."""
    changes = {PK + "swilu_projection": False, PK + "mem_share_values": kind != "own",
               **({PK + "peer_variant": True} if kind == "experts" else {})}
    arrays = mw.weights(own=kind == "own", copies=False, swilu=False, projection=False, peer=kind == "experts")
    got = convert(mw.tiny(folder, changes, arrays), "--output", folder / "model")
    assert got.status == 0, got.err
    return Base(folder / "model")


def numbers(base, memory, table):
    held = base.table(memory, table)[SLOTS]
    return widened(held) if base.dtype(memory, table) == "BF16" else held.astype("<f4")


def stored(base, memory, values):
    return bf16(values) if base.dtype(memory) == "BF16" else values


@pytest.mark.parametrize("kind", ["borrowed", "own", "experts"])
def test_the_bits_of_a_directory_with_these_rows(kind, tmp_path):
    base = model(tmp_path, kind)
    tables = ["values", "experts"] if kind == "experts" else ["values"]
    rows, deltas, changes = {}, {}, {}
    for memory in [0, 1] if kind == "own" else [0]:
        before = [numbers(base, memory, table) for table in tables]
        after = [stored(base, memory, np.roll(each, 1, axis=0) * np.float32(3) + np.float32(0.5)) for each in before]
        wide = [widened(each) if each.dtype == np.dtype("<u2") else each for each in after]
        rows[memory] = (SLOTS, base.dtype(memory), *after)
        deltas[memory] = (SLOTS, "F32", *(b - a for a, b in zip(before, wide)))
        changes.update({(memory, table): (SLOTS, each) for table, each in zip(tables, after)})
    overlay = tmp_path / "edit.safetensors"
    overlay.write_bytes(base.overlay(rows))
    added = tmp_path / "add.safetensors"
    added.write_bytes(base.overlay(deltas, mode="add"))
    directory = base.with_rows(tmp_path / "changed", changes)
    for flags in (["--dtype", "f32"], ["--dtype", "f32", "--memory-placement", "device"],
                  ["--dtype", "int8", "--force-int8", "--memory-placement", "device"], ["--device", "ref"]):
        due = score(directory, *flags)
        plain = score(base.directory, *flags)
        assert score(base.directory, "--overlay", str(overlay), *flags) == due != plain, flags
        close = 1e-2 if "int8" in flags else 1e-5
        assert score(base.directory, "--overlay", str(added), *flags) == pytest.approx(due, rel=close)
    compared = run("compare", base.directory, "--overlay", str(overlay), "--against", directory, "--dtype", "f32")
    assert compared.returncode == 0, compared.stderr
    assert json.loads(compared.stdout)["kl_max"] == 0


def test_a_memory_that_borrows_its_table_takes_no_rows(tmp_path):
    base = model(tmp_path, "borrowed")
    overlay = tmp_path / "x.safetensors"
    file = base.overlay({0: (SLOTS[:1], base.dtype(0), base.table(0)[SLOTS[:1]])})
    overlay.write_bytes(file.replace(b"memories.0.", b"memories.1."))
    done = run("score", base.directory, "--overlay", str(overlay))
    assert done.returncode == 1 and "memory 1 reads the table of memory 0" in done.stderr
    overlay.write_bytes(file[:-2])
    done = run("generate", base.directory, "--overlay", str(overlay))
    assert done.returncode == 1 and str(overlay) in done.stderr and "truncated" in done.stderr
