"""Value tables of 4 bits: the same answers as from the same values in f32, in every placement; what
convert.py --values q4 makes of any model's; files that must be refused by name."""

import hashlib
import json
import shutil
import struct
import subprocess
import sys

import golden_harness as gh
import numpy as np
import pytest

sys.path.insert(0, str(gh.ROOT / "tests"))
from overlay_files import pack  # noqa: E402

GOLDEN = gh.ROOT / "tests" / "golden"
KINDS = {"F32": "<f4", "F16": "<f2", "I8": "i1", "U8": "u1"}
NAMES = {np.dtype(kind): name for name, kind in KINDS.items()}
TABLE = "memories.1_in.values.weight"


def convert(source, output, *args, status=0):
    done = subprocess.run([sys.executable, str(gh.ROOT / "models" / "convert" / "convert.py"), str(source),
                           "--output", str(output), *args], capture_output=True, text=True, timeout=120)
    assert done.returncode == status, done.stderr
    return done.stderr if status else done.stdout


def read(directory):
    data = (directory / "model.safetensors").read_bytes()
    base = 8 + int.from_bytes(data[:8], "little")
    return {name: np.frombuffer(data[base:][slice(*e["data_offsets"])], KINDS[e["dtype"]]).reshape(e["shape"])
            for name, e in json.loads(data[8:base]).items()}


def write(directory, tensors):
    header, at = {}, 0
    for name, t in sorted(tensors.items(), key=lambda item: -item[1].itemsize):  # aligned
        header[name] = {"dtype": NAMES[t.dtype], "shape": t.shape, "data_offsets": [at, at + t.nbytes]}
        at += t.nbytes
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    (directory / "model.safetensors").write_bytes(
        struct.pack("<Q", len(head)) + head + b"".join(tensors[name].tobytes() for name in header))


def widen(codes, scale):
    return (np.concatenate([codes & 15, codes >> 4], 1).astype(np.float32) - 8) \
        * scale.astype(np.float32)[:, None]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """(4 bits, the same values in f32)"""
    folder = tmp_path_factory.mktemp("q4")
    convert(GOLDEN / "sparse-memory-lm" / "shared-q4", folder / "q4")
    convert(GOLDEN / "sparse-memory-lm" / "shared-q4", folder / "f32", "--dtype", "f32")
    return folder / "q4", folder / "f32"


def logprobs(model, device, *flags):
    # The double computes its kernels thread after thread: a few rows, and a self-test of few.
    few = ["--max-seqs", "1", "--max-batch-tokens", "8"] if device == "cuda" else ["--max-seqs", "4"]
    server = gh.Server(model, "--device", device, "--dtype", "f32", *few, *flags)
    n = 5 if device == "cuda" else 60
    ids = np.random.default_rng(3).integers(0, 1000, n).tolist()
    got = server.post("/score", {"tokens": ids, "logprobs": 0})["results"][0]["tokens"]
    info = server.get("/info")
    server.stop()
    return np.array([token["logprob"] for token in got[1:]]), info


@pytest.mark.parametrize("device", ["cpu", "ref", "cuda"])
def test_four_bits_are_their_values(models, device):
    due, _ = logprobs(models[1], device)
    placements = ["device", "host"] if device == "cuda" else ["mmap", "host"]
    got = [logprobs(models[0], device, "--memory-placement", each)[0] for each in placements]
    assert np.array_equal(got[0], due)  # to the bit, so that an overlay's rows can take their place
    assert np.array_equal(got[0], got[1])  # wherever they lie


def test_inspect_counts_two_values_in_a_byte(models):
    status, out, _ = gh.run_program("inspect", "--json", "--model", models[0])
    values = next(kind for kind in json.loads(out)["kinds"] if kind["kind"] == "memory values")
    assert status == 0
    assert (values["parameters"], values["bytes"]) == (4096 * 64, 4096 * 32 + 4096 * 2)
    assert "q4" in values["dtype"]


def test_values_of_any_model_can_be_written_so(tmp_path):
    """The scale is the entry of largest magnitude over -8, in fp16; codes are rounded to nearest."""
    source = GOLDEN / "memory-layers" / "plain-pk"
    convert(source, tmp_path / "whole", "--dtype", "f32")
    assert "relative error at most 0.0" in convert(source, tmp_path / "q4", "--dtype", "f32", "--values", "q4")
    whole, coded = read(tmp_path / "whole"), read(tmp_path / "q4")
    tables = [name for name, t in coded.items() if t.dtype == np.uint8]
    assert tables and all(name.endswith(".values.weight") for name in tables)
    for name in set(whole) - set(tables):
        assert np.array_equal(whole[name], coded[name])
    for name in tables:
        most = whole[name][np.arange(len(whole[name])), np.abs(whole[name]).argmax(1)]
        scale = (most / -8).astype(np.float16)
        scale[scale == 0] = 1
        assert np.array_equal(coded[name + ".scale"], scale)
        step = np.abs(scale.astype(np.float32))[:, None]
        error = np.abs(widen(coded[name], scale) - whole[name])
        at_end = whole[name] / scale.astype(np.float32)[:, None] > 7.5  # there is no code 8
        assert (error[~at_end] <= (0.5001 * np.broadcast_to(step, error.shape))[~at_end]).all()
    status, _, err = gh.run_program("inspect", "--model", tmp_path / "q4")
    assert status == 0, err


def test_overlays_of_a_table_of_four_bits(models, tmp_path):
    """Rows that differ are told in f32, and served beside the table, in place of its rows or added to them."""
    tensors = dict(read(models[0]))
    base = hashlib.sha256(tensors[TABLE].tobytes() + tensors[TABLE + ".scale"].tobytes()).hexdigest()
    slots = np.arange(5, 4096, 7, dtype="<i4")
    tuned = shutil.copytree(models[0], tmp_path / "tuned", ignore=shutil.ignore_patterns("model.sha256"))
    codes = tensors[TABLE].copy()
    codes[slots] ^= 0x31
    write(tuned, {**tensors, TABLE: codes})
    due = widen(codes, tensors[TABLE + ".scale"])[slots]
    status, _, err = gh.run_program("memory", "diff", models[0], tuned, "-o", tmp_path / "o.safetensors")
    assert status == 0, err
    data = (tmp_path / "o.safetensors").read_bytes()
    header = json.loads(data[8:8 + int.from_bytes(data[:8], "little")])
    assert header["memories.0.rows"]["dtype"] == "F32" and header["__metadata__"]["base"] == base
    assert data.endswith(slots.tobytes() + due.tobytes()) or data.endswith(due.tobytes() + slots.tobytes())

    was = widen(tensors[TABLE], tensors[TABLE + ".scale"])[slots]
    (tmp_path / "add.safetensors").write_bytes(pack(
        {"memories.0.slots": ("I32", slots), "memories.0.rows": ("F32", due - was)},
        {"format": "pkmserve-overlay-1", "mode": "add", "base": base}))
    scored = {}
    for model, *flags in ((tuned,), (models[0], "--overlay", tmp_path / "o.safetensors"),
                          (models[0], "--overlay", tmp_path / "add.safetensors"), (models[0],)):
        status, out, err = gh.run_program("score", "--json", "--ids", "--dtype", "f32", "--model", model, *flags,
                                          text=" ".join(map(str, range(3, 900, 13))))
        assert status == 0, err
        scored[len(scored)] = json.loads(out)["results"][0]["sum_logprob"]
    assert scored[0] == scored[1] and abs(scored[0] - scored[2]) < 1e-4 < abs(scored[0] - scored[3])

    status, out, err = gh.run_program("memory", "inspect", tmp_path / "o.safetensors", "--model", models[0], "--json")
    assert status == 0, err
    told = json.loads(out)["memories"][0]["rows"]
    change = np.linalg.norm(due - was, axis=1) / np.linalg.norm(was, axis=1)
    assert [row["slot"] for row in told] == slots[:len(told)].tolist()
    assert np.allclose([row["change"] for row in told], change[:len(told)], rtol=1e-5)
    status, _, err = gh.run_program("memory", "apply", models[0], tmp_path / "o.safetensors", "-o", tmp_path / "x")
    assert status == 1 and "has 4 bits: rows cannot be written into it without loss" in err


def test_what_has_no_halves_or_no_memory_is_refused(tmp_path):
    source = GOLDEN / "sparse-memory-lm" / "odd-scale"
    assert "rows of 37 columns, which have no two halves" in convert(source, tmp_path / "a", "--values", "q4",
                                                                     status=1)
    source = GOLDEN / "xlm" / "dense12" / "checkpoint.pth"
    assert "the model has no memory" in convert(source, tmp_path / "b", "--values", "q4", status=1)


def narrow(tensors, config):
    tensors[TABLE] = tensors[TABLE][:, 1:].copy()


REFUSED = {
    "no scale": (lambda t, c: t.pop(TABLE + ".scale"), TABLE + ".scale is missing"),
    "scale of f32": (lambda t, c: t.update({TABLE + ".scale": t[TABLE + ".scale"].astype(np.float32)}),
                     TABLE + ".scale has dtype F32; scales must be F16"),
    "scale of another length": (lambda t, c: t.update({TABLE + ".scale": t[TABLE + ".scale"][1:].copy()}),
                                TABLE + ".scale has shape [4095]; config.json makes it [4096]"),
    "infinite scale": (lambda t, c: t.update({TABLE + ".scale": np.full(4096, np.inf, np.float16)}),
                       TABLE + ".scale: element 0 is NaN or infinite"),
    "narrow": (narrow, TABLE + " has shape [4096, 31]; config.json makes it [4096, 32]"),
    "embeddings": (lambda t, c: t.update({"embeddings.weight": np.zeros((1024, 64), np.uint8)}),
                   "tensor embeddings.weight has dtype U8"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_damaged_tables_are_refused(models, tmp_path, name):
    change, found = REFUSED[name]
    model = shutil.copytree(models[0], tmp_path / "model")
    tensors = dict(read(model))
    change(tensors, json.loads((model / "config.json").read_text()))
    write(model, tensors)
    status, _, err = gh.run_program("score", "--model", model, "--ids", "--check", text="1 2 3")
    assert status != 0 and found in err, err
