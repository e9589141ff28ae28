"""OUT.run: a corpus is finished with the model and the options that it was begun with, in every shard."""

import shutil

import pytest

from cli_harness import fails, ok

DEMO = "models/demo"
LINES = "".join('{"text": "Line %d."}\n' % i for i in range(4))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A corpus whose shard 0 is done, and a model that differs from its in one bit of a weight."""
    folder = tmp_path_factory.mktemp("record")
    (folder / "in.jsonl").write_text(LINES)
    ok("score", "--jsonl", "--shard", "0/2", "--output", folder / "0.jsonl", folder / "in.jsonl")
    shutil.copytree(DEMO, folder / "other", ignore=shutil.ignore_patterns("model.sha256"))
    weights = folder / "other" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[len(data) // 2 + 1] ^= 1
    weights.write_bytes(data)
    return folder


def score(folder, *arguments):
    return ["score", "--jsonl", *arguments, folder / "in.jsonl"]


def test_a_shard_of_another_model_is_refused_before_anything_is_done(folder):
    out = folder / "1.jsonl"
    told = fails(1, *score(folder, "--shard", "1/2", "--output", out, "--model", folder / "other"))
    assert "0.jsonl.run: another shard of this corpus was scored with another model" in told
    told = fails(1, *score(folder, "--shard", "1/2", "--output", out, "--stride", "64"))
    assert "with other options" in told and out.read_bytes() == b"" and not (folder / "1.jsonl.run").exists()
    ok(*score(folder, "--shard", "1/2", "--output", out))
    assert out.read_text().count("\n") == 2


def test_outputs_without_a_folder_are_beside_each_other(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ok(*score(folder, "--shard", "0/2", "--output", "a.jsonl"))
    told = fails(1, *score(folder, "--shard", "1/2", "--output", "b.jsonl", "--stride", "64"))
    assert "a.jsonl.run: another shard of this corpus was scored with other options" in told


def test_of_a_large_file_the_ends_and_the_size_are_looked_at(folder, tmp_path):
    """One of 80 MiB, of which 2 MiB are read."""
    model, out = tmp_path / "model", tmp_path / "out.jsonl"
    shutil.copytree(DEMO, model)
    with open(model / "notes.txt", "wb") as file:
        file.truncate(80 << 20)
    ok(*score(folder, "--model", model, "--output", out))
    whole = out.read_bytes()
    command = score(folder, "--model", model, "--output", out, "--resume")
    for place in (0, (80 << 20) - 1, 80 << 20):
        with open(model / "notes.txt", "r+b") as file:
            file.seek(place)
            file.write(b"x")
        assert "begun with another model" in fails(1, *command), place
        with open(model / "notes.txt", "r+b") as file:
            file.seek(place)
            file.write(b"\0")
            file.truncate(80 << 20)
    out.write_bytes(whole[:-5])
    ok(*command)
    assert out.read_bytes() == whole


def test_what_is_not_of_the_same_corpus_is_none_of_ours(folder):
    """Other shares, another command, no record at all: scored beside it with another model."""
    (folder / "junk.run").write_bytes(b"\0model\n" * 9)
    other = ["--model", folder / "other"]
    ok(*score(folder, "--shard", "0/3", "--output", folder / "third.jsonl", *other))
    ok("generate", "--jsonl", "--text-field", "text", "--max-tokens", "1", "--shard", "1/2", "--output",
       folder / "texts.jsonl", *other, folder / "in.jsonl")


@pytest.mark.parametrize("arguments, wanted", [
    (["--model", "OTHER"], "begun with another model"),
    (["--dtype", "f32"], "begun with other options"),
    (["--fields", "perplexity"], "begun with other options"),
    (["--shard", "1/2"], "another command or shard"),
])
def test_a_run_goes_on_as_it_was_begun(folder, arguments, wanted):
    out, whole = folder / "0.jsonl", (folder / "0.jsonl").read_bytes()
    given = [str(folder / "other") if a == "OTHER" else a for a in arguments]
    shard = [] if "--shard" in given else ["--shard", "0/2"]
    assert wanted in fails(1, *score(folder, *shard, "--output", out, "--resume", *given))
    assert out.read_bytes() == whole


def test_a_record_that_is_none_stops_a_run_and_a_missing_one_does_not(folder):
    out, record = folder / "0.jsonl", folder / "0.jsonl.run"
    command = score(folder, "--shard", "0/2", "--output", out, "--resume")
    whole, text = out.read_bytes(), record.read_bytes()
    out.write_bytes(whole[:-9])
    record.write_bytes(text[:-9])
    assert "is not the record of a run" in fails(1, *command)
    record.unlink()
    ok(*command)
    assert out.read_bytes() == whole and record.read_bytes() == text
