"""memory count, add, rank, hot and inspect: what files of counts say, and what is refused by name."""

import gzip
import json
import math
import shutil
import struct

import pytest

from cli_harness import MODEL, fails, ok, run

np = pytest.importorskip("numpy")

TYPES = {"F64": "<f8", "I64": "<i8", "F32": "<f4", "I32": "<i4", "I8": "i1", "BF16": "<u2", "F16": "<f2"}
TEXTS = ["The cat sat on the mat, and the dog looked on.\n", "It was a dark and stormy night.\n",
         "The cat looked at the night. It was dark.\n"]


def read(path):
    """-> tensors by name, metadata"""
    data = path.read_bytes()
    n, = struct.unpack("<Q", data[:8])
    header = json.loads(data[8:8 + n])
    metadata = header.pop("__metadata__")
    assert (8 + n) % 8 == 0
    return {name: np.frombuffer(data[8 + n:][slice(*e["data_offsets"])], TYPES[e["dtype"]]).reshape(e["shape"])
            for name, e in header.items()}, metadata


def write(path, tensors, metadata):
    header, blobs, at = {"__metadata__": metadata}, [], 0
    names = {np.dtype(t): name for name, t in TYPES.items() if name != "BF16"}
    names[np.dtype("<u2")] = "BF16"
    for name, array in tensors.items():
        blobs.append(np.ascontiguousarray(array).tobytes())
        header[name] = {"dtype": names[array.dtype], "shape": list(array.shape),
                        "data_offsets": [at, at + len(blobs[-1])]}
        at += len(blobs[-1])
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(blobs))
    return path


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    paths = [folder / ("%d.txt" % i) for i in range(len(TEXTS))]
    for path, text in zip(paths, TEXTS):
        path.write_text(text)
    return paths


@pytest.fixture(scope="module")
def counted(files, tmp_path_factory):
    """Counts of the three texts, and of the last one alone."""
    folder = tmp_path_factory.mktemp("counts")
    assert ok("memory", "count", *files, "-o", folder / "all") == "3 texts, %d positions\n" % int(
        read(folder / "all")[1]["positions"])
    ok("memory", "count", files[2], "-o", folder / "task")
    return folder


def test_counts_are_those_of_the_slots_that_score_writes(counted, files, tmp_path):
    ok("score", "--model", MODEL, "--slots", tmp_path / "s.npz", *files)
    slots = np.load(tmp_path / "s.npz")
    tensors, metadata = read(counted / "all")
    reads, weight, documents = (tensors["memories.0." + name] for name in ("reads", "weight", "documents"))
    wanted = np.zeros(16384, "i8"), np.zeros(16384), np.zeros(16384, "i8")
    for i in range(3):
        index = slots["indices_%d" % i].ravel()
        np.add.at(wanted[0], index, 1)
        np.add.at(wanted[1], index, slots["weights_%d" % i].ravel())
        wanted[2][np.unique(index)] += 1
    assert (reads == wanted[0]).all() and (documents == wanted[2]).all()
    assert abs(weight - wanted[1]).max() < 1e-9
    assert metadata["format"] == "pkmserve-counts-1" and metadata["documents"] == "3"
    assert metadata["tables"] == "0" and len(metadata["model"]) == 64


def test_lines_count_as_files_do(counted, tmp_path):
    with gzip.open(tmp_path / "lines.jsonl.gz", "wt") as f:
        f.writelines(json.dumps({"body": text}) + "\n" for text in TEXTS)
    ok("memory", "count", "--jsonl", "--text-field", "body", tmp_path / "lines.jsonl.gz", "-o", tmp_path / "c")
    assert (tmp_path / "c").read_bytes() == (counted / "all").read_bytes()
    done = run("memory", "count", "--jsonl", "-", "-o", tmp_path / "d", stdin='{"text": "a b"}\n{"memory": false, "text": "x"}\n')
    assert done.returncode == 0 and "1 of 2 lines are bad" in done.stderr and "memory is false" in done.stderr
    assert read(tmp_path / "d")[1]["documents"] == "1"


def test_counts_add_up(counted, files, tmp_path):
    ok("memory", "count", *files[:2], "-o", tmp_path / "two")
    ok("memory", "add", tmp_path / "two", counted / "task", "-o", tmp_path / "two")  # over one of them
    assert (tmp_path / "two").read_bytes() == (counted / "all").read_bytes()
    assert list(tmp_path.iterdir()) == [tmp_path / "two"]


@pytest.mark.parametrize("by", ["tfidf", "kl"])
def test_rank_follows_its_formula(counted, tmp_path, by):
    told = json.loads(ok("memory", "rank", counted / "task", "--background", counted / "all", "--top", 40,
                         "--by", by, "-o", tmp_path / "slots", "--json"))
    task, background = read(counted / "task")[0], read(counted / "all")[0]
    c, b = task["memories.0.reads"].astype(float), background["memories.0.reads"].astype(float)
    if by == "tfidf":
        score = c / c.sum() * np.log((3 + 1) / (background["memories.0.documents"] + 1))
    else:
        q = (b + 1) / (b.sum() + len(b))
        score = np.where(c > 0, c / c.sum() * np.log(np.where(c > 0, c / c.sum() / q, 1)), 0)
    wanted = np.sort(np.lexsort((np.arange(len(score)), -score))[:40])
    tensors, metadata = read(tmp_path / "slots")
    assert metadata["format"] == "pkmserve-slots-1" and metadata["by"] == by
    assert (tensors["memories.0.slots"] == wanted).all()
    assert np.allclose(tensors["memories.0.score"], score[wanted], rtol=1e-12)
    memory, = told["memories"]
    assert memory["slots"] == 40 and math.isclose(memory["task_share"], c[wanted].sum() / c.sum())
    assert math.isclose(memory["background_share"], b[wanted].sum() / b.sum())


def test_hot_lists_the_slots_read_most(counted, tmp_path):
    reads = read(counted / "all")[0]["memories.0.reads"]
    told, = json.loads(ok("memory", "hot", counted / "all", "--share", "0.01", "-o", tmp_path / "hot",
                          "--json"))["memories"]
    order = np.lexsort((np.arange(len(reads)), -reads))
    for percent in (1, 5, 10, 20, 50):
        n = math.ceil(len(reads) * percent / 100)
        assert math.isclose(told["share_of_reads"][str(percent)], reads[order[:n]].sum() / reads.sum())
    tensors, _ = read(tmp_path / "hot")
    assert (tensors["memories.0.slots"] == np.sort(order[:164])).all() and told["hot"] == 164
    assert (tensors["memories.0.score"] == reads[tensors["memories.0.slots"]]).all()
    assert "the top 10 %" in ok("memory", "hot", counted / "all")


def test_inspect_tells_what_is_counted(counted):
    told = json.loads(ok("memory", "inspect", counted / "all", "--json"))
    reads = read(counted / "all")[0]["memories.0.reads"]
    memory, = told["memories"]
    assert told["documents"] == 3 and memory["reads"] == reads.sum() and memory["slots_read"] == (reads > 0).sum()
    assert "counts of 3 texts" in ok("memory", "inspect", counted / "all")


# ---- overlays ------------------------------------------------------------------------------------

def base_of(model):
    hashes = json.loads(ok("inspect", model, "--json", "--hash"))["hashes"]
    return hashes[0]["sha256"]


def overlay(path, slots, rows, base, mode="replace"):
    return write(path, {"memories.0.slots": np.array(slots, "<i4"), "memories.0.rows": rows},
                 {"format": "pkmserve-overlay-1", "mode": mode, "base": base})


def values(model=MODEL):
    """The table of the demo model, in fp32."""
    tensors, _ = read_model(model)
    return (tensors["memories.6_in.values.weight"].astype("<u4") << 16).view("<f4")


def read_model(model):
    data = (model / "model.safetensors").read_bytes()
    n, = struct.unpack("<Q", data[:8])
    header = json.loads(data[8:8 + n])
    header.pop("__metadata__", None)
    return {name: np.frombuffer(data[8 + n:][slice(*e["data_offsets"])], TYPES[e["dtype"]]).reshape(e["shape"])
            for name, e in header.items()}, header


def test_inspect_compares_an_overlay_with_its_base(counted, tmp_path):
    table, slots = values(), [3, 500, 16383]
    rows = table[slots] * np.float32([[1], [-2], [0.5]])
    path = overlay(tmp_path / "o", slots, rows, base_of(MODEL))
    told, = json.loads(ok("memory", "inspect", path, "--counts", counted / "all", "--json"))["memories"]
    assert [row["slot"] for row in told["rows"]] == slots and told["dtype"] == "f32"
    assert np.allclose([row["norm"] for row in told["rows"]], np.linalg.norm(rows, axis=1), rtol=1e-6)
    assert np.allclose([row["cosine"] for row in told["rows"]], [1, -1, 1], atol=1e-6)
    assert np.allclose([row["change"] for row in told["rows"]], [0, 3, 0.5], atol=1e-6)
    reads = read(counted / "all")[0]["memories.0.reads"]
    assert [row["reads"] for row in told["rows"]] == list(reads[slots])
    text = ok("memory", "inspect", path, "--model", MODEL, "--counts", counted / "all")
    assert "3 rows of 256 columns, f32" in text and "in 3 texts" in text
    added = overlay(tmp_path / "a", slots, table[slots], base_of(MODEL), "add")
    told, = json.loads(ok("memory", "inspect", added, "--json"))["memories"]
    assert np.allclose([row["norm"] for row in told["rows"]], 2 * np.linalg.norm(table[slots], axis=1), rtol=1e-6)
    assert np.allclose([row["change"] for row in told["rows"]], 1, atol=1e-6)


def test_an_overlay_of_another_base_is_told_alone_or_refused(counted, tmp_path):
    path = overlay(tmp_path / "o", [1], np.ones((1, 256), "<f4"), "0" * 64)
    text = ok("memory", "inspect", path)
    assert "another model than the shipped one" in text and "cosine" not in text
    assert "made for another base" in fails(2, "memory", "inspect", path, "--model", MODEL)
    assert "give --model" in fails(2, "memory", "inspect", path, "--counts", counted / "all")
    path.write_bytes(path.read_bytes()[:-1])
    assert "truncated or damaged" in fails(1, "memory", "inspect", path)


# ---- what is refused -----------------------------------------------------------------------------

@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """The demo model with another weight, and one text counted with it."""
    model = tmp_path_factory.mktemp("other") / "model"
    shutil.copytree(MODEL, model)
    data = bytearray((model / "model.safetensors").read_bytes())
    n, = struct.unpack("<Q", data[:8])
    begin = json.loads(data[8:8 + n])["embeddings.weight"]["data_offsets"][0]
    data[8 + n + begin] ^= 1
    (model / "model.safetensors").write_bytes(data)
    (model.parent / "text").write_text("The cat.")
    ok("memory", "count", "--model", model, model.parent / "text", "-o", model.parent / "counts")
    return model


def test_counts_of_another_model_are_refused_by_name(counted, other, tmp_path):
    theirs, ours = other.parent / "counts", counted / "all"
    for arguments in (["add", ours, theirs], ["rank", ours, "--background", theirs]):
        line = fails(2, "memory", *arguments, "-o", tmp_path / "x")
        assert str(theirs) + ": counts of another model" in line and str(ours) in line
    path = overlay(tmp_path / "o", [1], np.ones((1, 256), "<f4"), base_of(MODEL))
    assert "counts of another model" in fails(2, "memory", "inspect", path, "--counts", theirs)
    assert not (tmp_path / "x").exists()


def test_a_model_without_memories_has_nothing_to_count(tmp_path):
    line = fails(1, "memory", "count", "--model", MODEL.parent / "demo-bytes", "-o", tmp_path / "x", stdin="a text")
    assert "has no memories" in line and not (tmp_path / "x").exists()


def test_damaged_counts_are_refused_by_name(counted, tmp_path):
    tensors, metadata = read(counted / "task")
    def change(name, at, value):
        array = tensors["memories.0." + name].copy()
        array[at] = value
        return {**tensors, "memories.0." + name: array}, metadata
    cases = [
        (({**tensors, "rest": np.zeros(1, "<i8")}, metadata), "tensor rest is no part of counts"),
        (({k: v for k, v in tensors.items() if "weight" not in k}, metadata), "memories.0.weight is missing"),
        (change("reads", 7, -1), "memories.0.reads: -1 at index 7"),
        (change("reads", slice(0, 9), 1 << 62), "their sum within 63 bits"),
        (change("weight", 5, np.nan), "memories.0.weight is not finite at index 5"),
        (change("documents", 4, 2), "memories.0.documents: 2 at index 4"),
        ((tensors, {**metadata, "format": "x"}), "metadata's format is \"x\""),
        ((tensors, {**metadata, "model": "x"}), "metadata's model"),
        ((tensors, {**metadata, "documents": "-1"}), "metadata's documents is \"-1\""),
        ((tensors, {**metadata, "tables": "1"}), "metadata's tables is \"1\""),
        (({**tensors, "memories.0.reads": tensors["memories.0.reads"][:-1]}, metadata), "has"),
    ]
    for damaged, wanted in cases:
        line = fails(1, "memory", "hot", write(tmp_path / "x", *damaged))
        assert "/x: " in line and wanted in line, (wanted, line)
    (tmp_path / "x").write_bytes((counted / "task").read_bytes()[:-1])
    assert "truncated or damaged" in fails(1, "memory", "hot", tmp_path / "x")
    assert "neither counts nor an overlay" in fails(1, "memory", "inspect", MODEL / "model.safetensors")


def test_what_cannot_be_written_leaves_nothing(counted, tmp_path):
    assert "/no/x: cannot be written" in fails(1, "memory", "add", counted / "task", "-o", tmp_path / "no" / "x")
    assert "cannot be written" in fails(1, "memory", "add", counted / "task", "-o", "/dev/full")
    assert list(tmp_path.iterdir()) == []
