"""The commands of memory: what files of counts say, overlays from models and into models, and what is
refused by name."""

import gzip
import hashlib
import json
import math
import os
import shutil
import struct

import pytest

from cli_harness import MODEL, ROOT, fails, ok, run

np = pytest.importorskip("numpy")

TYPES = {"F64": "<f8", "I64": "<i8", "F32": "<f4", "I32": "<i4", "I8": "i1", "BF16": "<u2", "F16": "<f2"}
CONFIG = json.loads((MODEL / "config.json").read_text())
MEMORY = CONFIG["memories"][0]
N_SLOT, WIDTH = MEMORY["n_slot"], CONFIG["d_model"]
VALUES = "memories.%d_%s.values.weight" % (MEMORY["layer"], MEMORY["place"])
TEXTS = ["The cat sat on the mat, and the dog looked on.\n", "It was a dark and stormy night.\n",
         "The cat looked at the night. It was dark.\n"]


def read(path):
    """-> tensors by name, metadata"""
    data = path.read_bytes()
    n, = struct.unpack("<Q", data[:8])
    header = json.loads(data[8:8 + n])
    metadata = header.pop("__metadata__", None)
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
    assert ok("memory", "count", *files, "-o", folder / "all") == "texts: 3, positions: %d\n" % int(
        read(folder / "all")[1]["positions"])
    ok("memory", "count", files[2], "-o", folder / "task")
    return folder


def test_counts_are_those_of_the_slots_that_score_writes(counted, files, tmp_path):
    ok("score", "--model", MODEL, "--slots", tmp_path / "s.npz", *files)
    slots = np.load(tmp_path / "s.npz")
    tensors, metadata = read(counted / "all")
    reads, weight, documents = (tensors["memories.0." + name] for name in ("reads", "weight", "documents"))
    wanted = np.zeros(N_SLOT, "i8"), np.zeros(N_SLOT), np.zeros(N_SLOT, "i8")
    for i in range(3):
        index = slots["indices_%d" % i].ravel()
        np.add.at(wanted[0], index, 1)
        np.add.at(wanted[1], index, slots["weights_%d" % i].ravel())
        wanted[2][np.unique(index)] += 1
    assert (reads == wanted[0]).all() and (documents == wanted[2]).all()
    assert abs(weight - wanted[1]).max() < 1e-9
    assert metadata["format"] == "pkmserve-counts-1" and metadata["documents"] == "3"
    assert metadata["tables"] == ",".join(map(str, range(len(CONFIG["memories"])))) and len(metadata["model"]) == 64


def test_lines_count_as_files_do(counted, tmp_path):
    with gzip.open(tmp_path / "lines.jsonl.gz", "wt") as f:
        f.writelines(json.dumps({"body": text}) + "\n" for text in TEXTS)
    ok("memory", "count", "--jsonl", "--text-field", "body", tmp_path / "lines.jsonl.gz", "-o", tmp_path / "c")
    assert (tmp_path / "c").read_bytes() == (counted / "all").read_bytes()
    done = run("memory", "count", "--jsonl", "-", "-o", tmp_path / "d", stdin='{"text": "a b"}\n{"memory": false, "text": "x"}\n')
    assert done.returncode == 0 and "bad lines: 1 of 2" in done.stderr and "memory is false" in done.stderr
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
    assert (tensors["memories.0.slots"] == np.sort(order[:math.ceil(N_SLOT / 100)])).all() and told["hot"] == math.ceil(N_SLOT / 100)
    assert (tensors["memories.0.score"] == reads[tensors["memories.0.slots"]]).all()
    assert "the top 10 %" in ok("memory", "hot", counted / "all")


def test_inspect_tells_what_is_counted(counted):
    told = json.loads(ok("memory", "inspect", counted / "all", "--json"))
    reads = read(counted / "all")[0]["memories.0.reads"]
    memory, = told["memories"]
    assert told["documents"] == 3 and memory["reads"] == reads.sum() and memory["slots_read"] == (reads > 0).sum()
    assert ": counts; texts: 3, positions: " in ok("memory", "inspect", counted / "all")


# ---- examples ------------------------------------------------------------------------------------

def test_examples_are_the_places_of_largest_weight(files, tmp_path):
    ok("score", "--model", MODEL, "--slots", tmp_path / "s.npz", *files)
    slots = np.load(tmp_path / "s.npz")
    index = [slots["indices_%d" % i][:, 0] for i in range(3)]
    often = np.argsort(-np.bincount(np.concatenate([i.ravel() for i in index]), minlength=N_SLOT))[:3]
    told = json.loads(ok("memory", "examples", "--slots", "%d,0:%d,%d,%d" % (*often, often[0]), "--most", 4, *files))
    assert [(s["memory"], s["slot"]) for s in told["slots"]] == [(0, slot) for slot in often]
    for answer in told["slots"]:
        hits = [(i == answer["slot"]) for i in index]
        weights = [(h * slots["weights_%d" % i][:, 0]).sum((1, 2), dtype="f8") for i, h in enumerate(hits)]
        places = [(-w[p], i, p) for i, w in enumerate(weights) for p in np.flatnonzero(hits[i].any((1, 2)))]
        got = [(-p["weight"], files.index(type(files[0])(p["file"])), p["position"]) for p in answer["places"]]
        assert [g[1:] for g in got] == [w[1:] for w in sorted(places)[:4]]
        assert np.allclose([g[0] for g in got], [w[0] for w in sorted(places)[:4]], atol=1e-9)
        assert answer["reads"] == sum(h.sum() for h in hits) and math.isclose(answer["weight"], sum(
            w.sum() for w in weights), rel_tol=1e-6)
        for p in answer["places"]:
            text = TEXTS[[str(f) for f in files].index(p["file"])]
            assert (p["before"] + p["token"] + p["after"]).replace("</s>", "").lstrip() in text


def test_examples_of_lines_name_the_line(tmp_path):
    lines = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS)
    told = json.loads(ok("memory", "examples", "--jsonl", "--slots", ",".join(map(str, range(200))), "-", stdin=lines))
    places = [place for slot in told["slots"] for place in slot["places"]]
    assert {place["line"] for place in places} == {1, 2, 3} and {p["file"] for p in places} == {"standard input"}


@pytest.mark.parametrize("slots, wanted", [
    ("x", "'x' is no list of slots"), ("1,", "'1,' is no list"), ("9:1", "n_memory is %d" % len(CONFIG["memories"])),
    ("0:", "is no list"), (str(N_SLOT), "slot %d does not exist" % N_SLOT),
    ("99999999999999999999", "is no list"), ("-1", "is no list")])
def test_examples_of_slots_that_do_not_exist_are_refused(slots, wanted):
    assert wanted in fails(2, "memory", "examples", "--slots", slots, stdin="a text")


# ---- overlays ------------------------------------------------------------------------------------

def base_of(tensors, name):
    """The hash of a table, as inspect --hash prints it."""
    parts = [n + s for n in (name, name.replace(".values.", ".experts.")) for s in ("", ".scale") if n + s in tensors]
    return hashlib.sha256(b"".join(tensors[n].tobytes() for n in parts)).hexdigest()


def overlay(path, slots, rows, base, mode="replace", **more):
    tensors = {"memories.0.slots": np.array(slots, "<i4"), "memories.0.rows": rows, **more}
    return write(path, dict(sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize)),
                 {"format": "pkmserve-overlay-1", "mode": mode, "base": base})


def widened(tensors, name):
    """The rows of a table in fp32."""
    if name + ".scale" in tensors:
        return tensors[name] * tensors[name + ".scale"][:, None]
    array = tensors[name]
    return (array.astype("<u4") << 16).view("<f4") if array.dtype == "<u2" else array.astype("<f4")


@pytest.fixture(scope="module")
def table():
    """The table of the demo model in fp32, and its hash."""
    tensors, _ = read(MODEL / "model.safetensors")
    return widened(tensors, VALUES), base_of(tensors, VALUES)


def test_inspect_compares_an_overlay_with_its_base(counted, table, tmp_path):
    values, base = table
    slots = [3, 500, N_SLOT - 1]
    rows = values[slots] * np.float32([[1], [-2], [0.5]])
    path = overlay(tmp_path / "o", slots, rows, base)
    told, = json.loads(ok("memory", "inspect", path, "--counts", counted / "all", "--json"))["memories"]
    assert [row["slot"] for row in told["rows"]] == slots and told["dtype"] == "f32"
    assert np.allclose([row["norm"] for row in told["rows"]], np.linalg.norm(rows, axis=1), rtol=1e-6)
    assert np.allclose([row["cosine"] for row in told["rows"]], [1, -1, 1], atol=1e-6)
    assert np.allclose([row["change"] for row in told["rows"]], [0, 3, 0.5], atol=1e-6)
    reads = read(counted / "all")[0]["memories.0.reads"]
    assert [row["reads"] for row in told["rows"]] == list(reads[slots])
    text = ok("memory", "inspect", path, "--model", MODEL, "--counts", counted / "all")
    assert "rows: 3, of width %d, f32" % WIDTH in text and "texts: 3" in text
    added = overlay(tmp_path / "a", slots, values[slots], base, "add")
    told, = json.loads(ok("memory", "inspect", added, "--json"))["memories"]
    assert np.allclose([row["norm"] for row in told["rows"]], 2 * np.linalg.norm(values[slots], axis=1), rtol=1e-6)
    assert np.allclose([row["change"] for row in told["rows"]], 1, atol=1e-6)


def test_reads_of_a_slot_are_those_of_all_memories_of_its_table(tmp_path):
    model = ROOT / os.environ.get("B", "build") / "golden" / "share-values"
    (tmp_path / "ids").write_text("5 9 14 23 40 61 87 118")
    ok("memory", "count", "--model", model, "--ids", tmp_path / "ids", "-o", tmp_path / "counts")
    tensors, metadata = read(tmp_path / "counts")
    assert metadata["tables"] == "0,0"
    each = [tensors["memories.%d.reads" % m] for m in (0, 1)]
    slots = [int((each[0] * each[1]).argmax()), int(each[0].argmax()), int(each[1].argmax())]
    assert each[0][slots[0]] > 0 and each[1][slots[0]] > 0  # one that both read
    slots = sorted(set(slots))
    rows = np.ones((len(slots), json.loads((model / "config.json").read_text())["d_model"]), "<f4")
    base = json.loads(ok("inspect", model, "--hash", "--json"))["hashes"][0]["sha256"]
    path = overlay(tmp_path / "o", slots, rows, base)
    told, = json.loads(ok("memory", "inspect", path, "--model", model, "--counts", tmp_path / "counts",
                          "--json"))["memories"]
    assert [row["reads"] for row in told["rows"]] == [int(each[0][slot] + each[1][slot]) for slot in slots]


def test_an_overlay_of_another_base_is_told_alone_or_refused(counted, tmp_path):
    path = overlay(tmp_path / "o", [1], np.ones((1, WIDTH), "<f4"), "0" * 64)
    text = ok("memory", "inspect", path)
    assert "another model than the shipped one" in text and "cosine" not in text
    for command in (["memory", "inspect", path, "--model", MODEL], ["memory", "apply", MODEL, path, "-o", tmp_path / "x"],
                    ["score", "--overlay", path, tmp_path / "o"], ["generate", "--overlay", path, "x"]):
        assert "made for another base" in fails(1, *command)
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


def test_counts_of_another_model_are_refused_by_name(counted, other, table, tmp_path):
    theirs, ours = other.parent / "counts", counted / "all"
    for arguments in (["add", ours, theirs], ["rank", ours, "--background", theirs]):
        line = fails(1, "memory", *arguments, "-o", tmp_path / "x")
        assert str(theirs) + ": counts of another model" in line and str(ours) in line
    path = overlay(tmp_path / "o", [1], np.ones((1, WIDTH), "<f4"), table[1])
    assert "counts of another model" in fails(1, "memory", "inspect", path, "--counts", theirs)
    tensors, metadata = read(ours)  # of the same model, if one believes its name
    fewer = {name: array[:-1] for name, array in tensors.items()}
    more = {**tensors, **{name.replace(".0.", ".1."): array for name, array in tensors.items()}}
    for shape, tables in ((fewer, "0"), (more, "0,1"), (more, "0,0")):
        theirs = write(tmp_path / "theirs", shape, {**metadata, "tables": tables})
        for arguments in (["add", ours, theirs], ["rank", ours, "--background", theirs]):
            assert "theirs: counts of another model" in fails(1, "memory", *arguments, "-o", tmp_path / "x")
        assert "theirs: counts of another model" in fails(1, "memory", "inspect", path, "--counts", theirs)
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
    (tmp_path / "x").write_text("a text, and no counts at all")
    assert fails(1, "memory", "hot", tmp_path / "x").endswith(": it is not in the safetensors format")
    assert "neither counts nor an overlay" in fails(1, "memory", "inspect", MODEL / "model.safetensors")


def test_sums_that_no_file_may_hold_are_not_written(counted, tmp_path):
    tensors, metadata = read(counted / "task")
    for name, value, wanted in (("weight", 1.5e308, "weights exceed"), ("reads", 1 << 62, "exceed 63 bits")):
        array = tensors["memories.0." + name].copy()
        array[:], array[5] = 0, value
        large = write(tmp_path / name, {**tensors, "memories.0." + name: array}, metadata)
        line = fails(1, "memory", "add", large, large, "-o", tmp_path / "x")
        assert str(large) in line and wanted in line and not (tmp_path / "x").exists()


def test_what_cannot_be_written_leaves_nothing(counted, tmp_path):
    assert "/no/x: cannot be written" in fails(1, "memory", "add", counted / "task", "-o", tmp_path / "no" / "x")
    assert "cannot be written" in fails(1, "memory", "add", counted / "task", "-o", "/dev/full")
    assert list(tmp_path.iterdir()) == []


# ---- diff and apply ------------------------------------------------------------------------------

N, D = 16, 6  # slots and columns of a small model: its files are copied and compared, nothing is computed
NAME, EXPERTS = "memories.1_in.values.weight", "memories.1_in.experts.weight"


def quantise(rows):
    """-> codes and scales of int8, as models/convert makes them"""
    largest = abs(rows).max(1)
    return np.rint(rows * (np.float32(127) / largest)[:, None]).astype("i1"), (largest / np.float32(127)).astype("<f4")


def table_of(dtype, rows, name=NAME):
    if dtype == "I8":
        codes, scale = quantise(rows)
        return {name: codes, name + ".scale": scale}
    return {name: (rows.view("<u4") >> 16).astype("<u2") if dtype == "BF16" else rows.astype(TYPES[dtype])}


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype("<f4")


def small(folder, dtype, experts=False):
    """A model directory with little more than a table of this type -> its tensors"""
    memory = {"layer": 1, "place": "in", "kind": "product", "n_head": 1, "k_top": 2, "n_key": 4, "d_key": 2,
              "n_slot": N}
    config = {"model_type": "pkm_transformer", "vocab_size": 9, "d_model": D, "n_layer": 2, "n_head": 1, "d_ff": 4,
              "max_position": 8, "activation": "gelu", "norm_eps": 1e-12, "tie_output": True, "bos_token_id": 1,
              "eos_token_id": 1, "pad_token_id": 2, "unk_token_id": 3, "add_bos": True, "memories": [
                  {**memory, "query_batch_norm": False, "query_bias": True}]}
    if experts:
        del config["activation"], memory["place"], memory["kind"]
        config.update(model_type="memory_llama", n_kv_head=1, rope_theta=1e4, memories=[{**memory, "experts": True}])
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "README.md").write_text("of the base")
    (folder / ".hidden").write_text("")
    (folder / "model.sha256").write_text("of the base")
    (folder / "vocab.txt").write_text("words")
    tensors = {"embeddings.weight": normal(1, 9, D), **table_of(dtype, normal(2, N, D))}
    if experts:
        tensors.update(table_of(dtype, normal(3, N, D), EXPERTS))
    tensors = dict(sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize))
    write(folder / "model.safetensors", tensors, {})
    return tensors


def files_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("dtype", ["BF16", "F32", "F16", "I8"])
def test_apply_and_diff_are_each_others_inverse(tmp_path, dtype):
    tensors, slots = small(tmp_path / "base", dtype), [0, 7, N - 1]
    rows = table_of(dtype, normal(4, 3, D))
    more = {"memories.0.rows.scale": rows[NAME + ".scale"]} if dtype == "I8" else {}
    overlay(tmp_path / "o", slots, rows[NAME], base_of(tensors, NAME), **more)
    assert ok("memory", "apply", tmp_path / "base", tmp_path / "o", "-o", tmp_path / "new") == (
        "memory 0: rows: 3; written to %s\n" % (tmp_path / "new"))
    before, after = files_of(tmp_path / "base"), files_of(tmp_path / "new")
    assert set(before) - set(after) == {"README.md", ".hidden", "model.sha256"} and not set(after) - set(before)
    assert [name for name in after if after[name] != before[name]] == ["model.safetensors"]
    wanted, got = dict(tensors), read(tmp_path / "new/model.safetensors")[0]
    for name in rows:
        wanted[name] = wanted[name].copy()
        wanted[name][slots] = rows[name]
    assert all((got[name] == wanted[name]).all() for name in wanted)

    assert "memory 0: rows that differ: 3; written to " in ok("memory", "diff", tmp_path / "base", tmp_path / "new", "-o", tmp_path / "x")
    back, metadata = read(tmp_path / "x")
    assert metadata == {"format": "pkmserve-overlay-1", "mode": "replace", "base": base_of(tensors, NAME)}
    assert list(back["memories.0.slots"]) == slots and (back["memories.0.rows"] == rows[NAME]).all()
    ok("memory", "diff", tmp_path / "new", tmp_path / "base", "-o", tmp_path / "undo")
    ok("memory", "apply", tmp_path / "new", tmp_path / "undo", "-o", tmp_path / "again")
    assert files_of(tmp_path / "again")["model.safetensors"] == before["model.safetensors"]
    assert "no row differs" in fails(2, "memory", "diff", tmp_path / "base", tmp_path / "again", "-o", tmp_path / "y")


@pytest.mark.parametrize("dtype", ["BF16", "F16", "I8"])
def test_rows_of_another_type_are_rounded_to_the_tables(tmp_path, dtype):
    tensors, slots = small(tmp_path / "base", dtype), [5, 6, 7]
    rows = normal(5, 3, D) * np.float32([[1e-6], [1], [100]])
    for mode, wanted in (("replace", rows), ("add", widened(tensors, NAME)[slots] + rows)):
        overlay(tmp_path / "o", slots, rows, base_of(tensors, NAME), mode)
        assert "rounded" in ok("memory", "apply", tmp_path / "base", tmp_path / "o", "-o", tmp_path / mode)
        got = read(tmp_path / mode / "model.safetensors")[0]
        if dtype == "I8":
            codes, scale = quantise(wanted)
            assert (got[NAME][slots] == codes).all() and (got[NAME + ".scale"][slots] == scale).all()
        elif dtype == "F16":
            assert (got[NAME][slots] == wanted.astype("<f2")).all()
        else:
            assert np.allclose(widened(got, NAME)[slots], wanted, rtol=2 ** -8, atol=0)


def test_rows_are_added_to_a_table_of_f32_without_rounding(tmp_path):
    tensors, slots = small(tmp_path / "base", "F32"), [0, 4, N - 1]
    rows = normal(5, 3, D)
    overlay(tmp_path / "o", slots, rows, base_of(tensors, NAME), "add")
    assert ok("memory", "apply", tmp_path / "base", tmp_path / "o", "-o", tmp_path / "new") == (
        "memory 0: rows: 3; written to %s\n" % (tmp_path / "new"))
    wanted = tensors[NAME].copy()
    wanted[slots] += rows
    assert (read(tmp_path / "new/model.safetensors")[0][NAME] == wanted).all()


def test_experts_are_changed_with_the_values(tmp_path):
    tensors, slots = small(tmp_path / "base", "F32", experts=True), [2, 9]
    rows, experts = normal(6, 2, D), normal(7, 2, D)
    overlay(tmp_path / "o", slots, rows, base_of(tensors, NAME), **{"memories.0.experts": experts})
    ok("memory", "apply", tmp_path / "base", tmp_path / "o", "-o", tmp_path / "new")
    got = read(tmp_path / "new/model.safetensors")[0]
    assert (got[NAME][slots] == rows).all() and (got[EXPERTS][slots] == experts).all()
    told, = json.loads(ok("memory", "inspect", tmp_path / "o", "--model", tmp_path / "base", "--json"))["memories"]
    seen, was = (np.concatenate(pair, axis=1, dtype="<f8")  # a row and its expert are one vector
                  for pair in ((rows, experts), (tensors[NAME][slots], tensors[EXPERTS][slots])))
    norm, old = np.linalg.norm(seen, axis=1), np.linalg.norm(was, axis=1)
    assert told["experts"] and np.allclose([row["norm"] for row in told["rows"]], norm, rtol=1e-6)
    assert np.allclose([row["cosine"] for row in told["rows"]], (seen * was).sum(1) / norm / old, atol=1e-6)
    assert np.allclose([row["change"] for row in told["rows"]], np.linalg.norm(seen - was, axis=1) / old, rtol=1e-6)
    ok("memory", "diff", tmp_path / "base", tmp_path / "new", "-o", tmp_path / "x")
    back, _ = read(tmp_path / "x")
    assert (back["memories.0.rows"] == rows).all() and (back["memories.0.experts"] == experts).all()


def test_tables_of_two_types_differ_where_their_numbers_do(tmp_path):
    tensors = small(tmp_path / "base", "BF16")
    small(tmp_path / "tuned", "F32")
    values = widened(tensors, NAME).copy()
    values[3] += 1
    write(tmp_path / "tuned/model.safetensors", {**tensors, NAME: values}, {})
    ok("memory", "diff", tmp_path / "base", tmp_path / "tuned", "-o", tmp_path / "x")
    back, _ = read(tmp_path / "x")
    assert list(back["memories.0.slots"]) == [3] and (back["memories.0.rows"] == values[[3]]).all()


def test_what_diff_and_apply_refuse_by_name(tmp_path):
    tensors = small(tmp_path / "base", "BF16")
    base, there = base_of(tensors, NAME), sorted(path.name for path in tmp_path.iterdir())

    def refused(status, wanted, rows=np.ones((1, D), "<f4"), slot=1, hash=base, to=tmp_path / "x"):
        path = overlay(tmp_path / "o", [slot], rows, hash)
        line = fails(status, "memory", "apply", tmp_path / "base", path, "-o", to)
        assert wanted in line, line
    refused(2, "is there already", to=tmp_path / "base")
    refused(1, "made for another base", hash="0" * 64)
    refused(1, "slot %d does not exist" % N, slot=N)
    refused(1, "NaN", rows=np.full((1, D), np.nan, "<f4"))
    refused(1, "new row 1 has the number", rows=np.full((1, D), 3.4e38, "<f4"))
    refused(1, "cannot be made", to=tmp_path / "no" / "x")
    (tmp_path / "x.part").mkdir()
    refused(1, "x.part: is there already: an apply is making it, or one was interrupted and it may be removed")
    (tmp_path / "x.part").rmdir()
    (tmp_path / "o").unlink()

    other = tmp_path / "other"
    tuned = small(other, "BF16")
    write(other / "model.safetensors", {**tuned, "embeddings.weight": tuned["embeddings.weight"] + 1}, {})
    line = fails(1, "memory", "diff", tmp_path / "base", other, "-o", tmp_path / "x")
    assert "tensor embeddings.weight is another one" in line
    write(other / "model.safetensors", {k: v for k, v in tuned.items() if k == NAME}, {})
    assert "tensor embeddings.weight is missing" in fails(
        1, "memory", "diff", tmp_path / "base", other, "-o", tmp_path / "x")
    write(other / "model.safetensors", {**tuned, "extra": np.ones(3, "<f4")}, {})
    assert "tensor extra" in fails(1, "memory", "diff", tmp_path / "base", other, "-o", tmp_path / "x")
    write(other / "model.safetensors", {k: v for k, v in tuned.items() if k != NAME}, {})
    for models in ([other, tmp_path / "base"], [tmp_path / "base", other]):  # which of them is told
        line = fails(1, "memory", "diff", *models, "-o", tmp_path / "x")
        assert "%s: tensor %s is missing" % (other / "model.safetensors", NAME) in line
    nan = tuned[NAME].copy()
    nan[4, 2] = 0x7fc0
    write(other / "model.safetensors", {**tuned, NAME: nan}, {})
    assert "row 4 holds NaN" in fails(1, "memory", "diff", tmp_path / "base", other, "-o", tmp_path / "x")
    assert "differ in shape" in fails(1, "memory", "diff", tmp_path / "base", MODEL, "-o", tmp_path / "x")
    shutil.rmtree(other)
    assert sorted(path.name for path in tmp_path.iterdir()) == there
