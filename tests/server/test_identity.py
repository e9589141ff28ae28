"""model.sha256 at start: what matches is said, and what does not keeps the server from being ready."""

import json
import os
import shutil
import subprocess

import pytest

from server_harness import DEMO, PROGRAM, UNBOUNDED, Server

NAME = "model.sha256"


@pytest.fixture
def model(tmp_path):
    return shutil.copytree(UNBOUNDED, tmp_path / "model")


def check(model, *flags):
    """serve --check: status, /info's model.identity, and the log with the error."""
    done = subprocess.run([PROGRAM, "serve", "--check", *flags, "--model", model], capture_output=True, text=True,
                          timeout=120)
    return done.returncode, json.loads(done.stdout)["model"]["identity"] if done.stdout else None, done.stderr


def edit(model, old, new):
    path = model / NAME
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def flip_last_byte(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_a_server_says_that_the_probe_matches_and_the_deep_check_repeats_it():
    with Server(model=UNBOUNDED) as s:
        identity = s.get("/info").json()["model"]["identity"]
        assert identity["probe"] == "ok" and identity["files"] == "unchecked" and identity["why"] is None
        assert identity["tokens"] == 40 and identity["largest_difference"] < identity["tolerance"]
        s.logged("event=identity probe=ok files=unchecked")
        assert s.get("/health/ready?deep=1").json()["status"] == "ok"
        s.counted("step_tokens_sum", 39)  # those of the probe but the last, in one step


@pytest.mark.parametrize("shipped", [DEMO, UNBOUNDED])
def test_the_shipped_models_are_what_they_were_when_they_were_made(shipped):
    status, identity, log = check(shipped, "full")
    assert status == 0 and identity["probe"] == identity["files"] == "ok", log


def test_the_files_are_compared_with_check_full_alone(model):
    status, identity, _ = check(model, "full")
    assert status == 0 and identity["files"] == "ok"
    flip_last_byte(model / "vocab.txt")  # the line feed
    status, identity, log = check(model)
    assert identity is None or identity["files"] == "unchecked"
    status, identity, log = check(model, "full")
    assert status == 1 and identity is None
    assert "%s: its SHA-256 is " % (model / "vocab.txt") in log and "identity.py" in log, log
    (model / "vocab.txt").unlink()
    assert "vocab.txt: cannot open" in check(model, "full")[2]


@pytest.mark.parametrize("dtype", ["auto", "f32", "int8"])
def test_a_matching_probe_has_a_tolerance_for_each_dtype(model, dtype):
    status, identity, log = check(model, "--dtype", dtype)
    assert status == 0 and identity["probe"] == "ok", log


def test_another_log_probability_keeps_it_from_starting(model):
    edit(model, "-3.312659", "-9.312659")
    with pytest.raises(AssertionError, match="died"):
        Server(model=str(model))
    status, _, log = check(model)
    assert status == 1
    assert "log-probability at position 2 of the probe is -3.3" in log and "-9.31266 is stored" in log, log
    assert "--check full" in log and "identity.py" in log, log


def test_without_the_file_or_its_probe_it_is_served_unchecked(model):
    lines = (model / NAME).read_text().splitlines(True)
    (model / NAME).write_text("".join(line for line in lines if " probe " not in line))
    status, identity, log = check(model, "full")
    assert status == 0 and identity["probe"] == "unchecked" and identity["files"] == "ok", log
    assert "has no probe" in identity["why"]
    (model / NAME).write_text("".join(line for line in lines if "tolerance" not in line))
    assert "has no tolerance" in check(model)[1]["why"]
    (model / NAME).unlink()
    status, identity, log = check(model, "full")
    assert status == 0 and identity["probe"] == identity["files"] == "unchecked"
    assert "has no model.sha256" in identity["why"]
    assert "event=identity probe=unchecked files=unchecked why=" in log


@pytest.mark.parametrize("text, what", [
    (b"\0\xff" * 500, "line 1: expected is a line as sha256sum writes it"),
    (b"# probe tokens 1 999999\n# probe logprobs -1\n# probe tolerance bf16 1\n",
     "token 1 of the probe is 999999, but the vocabulary has 256 words"),
    (b"#" * (2 << 20), "longer than the limit of 1048576 bytes"),
], ids=["bytes", "vocabulary", "long"])
def test_a_hostile_file_is_refused_by_name(model, text, what):
    (model / NAME).write_bytes(text)
    status, _, log = check(model)
    assert status == 1 and str(model / NAME) in log and what in log, log


def test_a_pipe_in_its_place_does_not_hold_the_start_up(model):
    (model / NAME).unlink()
    os.mkfifo(model / NAME)
    status, _, log = check(model)
    assert status == 1 and "not a regular file" in log, log


def test_check_takes_a_level_in_each_way_it_can_be_given(model):
    (model / NAME).write_text("0" * 64 + "  config.json\n")
    for flags, status in ((["--check"], 0), (["--check", "on"], 0), (["--check=full"], 1), (["--check", "full"], 1)):
        done = subprocess.run([PROGRAM, "inspect", *flags, model], capture_output=True, text=True, timeout=120)
        assert done.returncode == status, (flags, done.stderr)
    for value, status in (("1", 0), ("on", 0), ("full", 1), ("most", 2)):
        done = subprocess.run([PROGRAM, "inspect", model], capture_output=True, text=True, timeout=120,
                              env={**os.environ, "PKMSERVE_CHECK": value})
        assert done.returncode == status, (value, done.stderr)
