"""model.sha256 of a converted model: sums that sha256sum confirms, and a probe that the server meets.

Rerun one: /usr/bin/python3 -m pytest tests/convert/test_model_sums.py -k 'probe'
"""

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch_writer as tw
from convert_harness import PROGRAM, ROOT, convert

sys.path.insert(0, str(ROOT / "tests"))
from broken_model import set_output_bias  # noqa: E402

PKMSERVE = os.environ.get("PKMSERVE", str(ROOT / "build" / "pkmserve"))
WRITER = PROGRAM.parent / "identity.py"


def converted(tmp_path, *args):
    source = tw.write_zip(tmp_path / "c.pth", tw.tiny(params=tw.tiny_params()))
    done = convert(source, "--output", tmp_path / "m", *args)
    assert done.status == 0, done.err
    return tmp_path / "m", done.out


def served(model):
    done = subprocess.run([PKMSERVE, "serve", "--check", "full", "--model", model], capture_output=True, text=True)
    return done.returncode, json.loads(done.stdout)["model"]["identity"] if done.stdout else done.stderr


def test_a_converted_model_has_sums_and_a_probe(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setenv("PKMSERVE_MAX_QUEUE", "none")  # options of a server that runs here are not the probe's
        model, _ = converted(tmp_path, "--program", PKMSERVE)
    names = [line.split()[1] for line in (model / "model.sha256").read_text().splitlines() if line[0] != "#"]
    assert names == ["config.json", "model.safetensors", "vocab.txt"]
    done = subprocess.run(["sha256sum", "--check", "--strict", "model.sha256"], cwd=model, capture_output=True)
    assert done.returncode == 0, done.stderr
    status, identity = served(model)
    assert status == 0 and identity["probe"] == identity["files"] == "ok", identity
    again, _ = converted(tmp_path, "--program", PKMSERVE)  # replaces the earlier conversion
    assert served(again)[0] == 0


def test_the_program_beside_the_installed_converter_is_found(tmp_path):
    """What make install and make dist lay out, wherever that is and whatever PATH says."""
    folder, program = tmp_path / "share/pkmserve/models/convert", tmp_path / "bin/pkmserve"
    for path in (folder / WRITER.name, program):
        path.parent.mkdir(parents=True)
    shutil.copy(WRITER, folder)
    program.write_text("")
    program.chmod(0o755)
    names = "import sys; sys.path[:0] = sys.argv[1:]; import identity; print(identity.find_program())"
    env = {name: value for name, value in os.environ.items() if name != "PKMSERVE"}
    done = subprocess.run([sys.executable, "-c", names, folder, WRITER.parent], capture_output=True, text=True, env=env)
    assert os.path.realpath(done.stdout.strip()) == str(program), done.stderr


def test_without_the_program_there_are_sums_alone(tmp_path):
    model, out = converted(tmp_path, "--program", tmp_path / "missing")
    assert "model.sha256 has no probe" in out and "missing" in out
    status, identity = served(model)
    assert status == 0 and identity["probe"] == "unchecked" and identity["files"] == "ok", identity


@pytest.mark.parametrize("answer", [
    "", "hello", "\\377", "[]", "{}", '{"results": []}', '{"results": [{"tokens": null}]}',
    '{"results": [{"tokens": [{}, {}, {}, {}, {}, {}]}]}',
    '{"results": [{"tokens": [0, {"logprob": null}, {"logprob": "x"}, 1, 2, 3]}]}',
    '{"results": [{"tokens": [0, {"logprob": -1}]}]}'])
def test_a_program_that_answers_something_else_gives_no_probe(answer, tmp_path):
    """--program names the wrong one: what was converted stays, with its sums and one line that says so."""
    program = tmp_path / "other"
    program.write_text("#!/bin/sh\nprintf '%s'\n" % answer)
    program.chmod(0o755)
    due = "%s: 5 log-probabilities expected in what it writes, got %d" % (program, "-1" in answer)
    model, out = converted(tmp_path, "--program", program)
    assert "model.sha256 has no probe of what the model computes: " + due in out
    before = (model / "model.sha256").read_bytes()
    assert before.count(b"\n") == 4 and b"# probe" not in before
    done = subprocess.run([sys.executable, WRITER, model, "--program", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "identity: %s: no probe: %s\n" % (model, due))
    assert (model / "model.sha256").read_bytes() == before


@pytest.mark.parametrize("value, due", [(0.05, 0.05), (0.0501, 0.051), (0.051, 0.051), (0.0999, 0.1), (1e-3, 1e-3),
                                        (0.00101, 0.0011), (3.14, 3.2)])
def test_tolerances_are_rounded_up_to_two_digits(value, due):
    from identity import round_up
    assert round_up(value) == due


def test_a_probe_of_another_program_is_held_against_ours(tmp_path):
    """PyTorch's, of the trainer: without pkmserve they stand with wide tolerances, and not at all if one differs."""
    from identity import content
    model, _ = converted(tmp_path, "--program", PKMSERVE)
    lines = (model / "model.sha256").read_text().splitlines()
    own = [float(word) for line in lines for word in line.split()[3:] if line.startswith("# probe logprobs")]
    for program, tolerances in ((None, ["f32 0.01", "bf16 0.5", "int8 1"]), (PKMSERVE, ["f32 0.001"])):
        text, why = content(model, program, lambda tokens: own)
        found = [line for line in text.decode().splitlines() if line.startswith("# probe tolerance ")]
        assert why is None and found[:len(tolerances)] == ["# probe tolerance " + due for due in tolerances]
        assert "# probe logprobs " + " ".join("%.7g" % value for value in own) in text.decode()
    for change in (0.06, -0.06):
        text, why = content(model, PKMSERVE, lambda tokens: [*own[:2], own[2] + change, *own[3:]])
        assert why == "pkmserve computes log-probabilities that are off by up to 0.06" and b"# probe" not in text
        assert content(model, PKMSERVE, lambda tokens: [own[0] + change * 0.8, *own[1:]])[1] is None


def test_a_text_of_one_token_has_no_probe(tmp_path):
    weights = tw.tiny_weights()
    weights["position_embeddings.weight"] = weights["position_embeddings.weight"][:1]
    source = tw.write_zip(tmp_path / "c.pth", tw.tiny(weights=weights))
    done = convert(source, "--output", tmp_path / "m", "--program", PKMSERVE)
    assert done.status == 0 and "no probe of what the model computes: a text of two tokens does not fit" in done.out
    assert served(tmp_path / "m")[0] == 0


def test_a_token_that_is_impossible_leaves_no_probe(tmp_path):
    from identity import probe_tokens
    model, _ = converted(tmp_path, "--program", PKMSERVE)
    token = probe_tokens(model)[1]
    set_output_bias(model, [token], float("-inf"))
    done = subprocess.run([sys.executable, WRITER, model, "--program", PKMSERVE], capture_output=True, text=True)
    due = "identity: %s: no probe: the model holds token %d, which the probe has, for impossible\n" % (model, token)
    assert (done.returncode, done.stderr) == (1, due)
    assert "# probe" not in (model / "model.sha256").read_text()


def test_the_file_is_written_anew_for_a_model_that_was_changed(tmp_path):
    model, _ = converted(tmp_path, "--program", PKMSERVE)  # whose old probe is no reason to compute no new one
    config = json.loads((model / "config.json").read_text())
    config["norm_eps"] = 0.5
    (model / "config.json").write_text(json.dumps(config))
    assert served(model)[0] == 1
    done = subprocess.run([sys.executable, WRITER, model, "--program", PKMSERVE], capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    status, identity = served(model)
    assert status == 0 and identity["probe"] == "ok", identity
    done = subprocess.run([sys.executable, WRITER, model, "--program", "none"], capture_output=True, text=True)
    assert done.returncode == 0 and b"# probe" not in (model / "model.sha256").read_bytes(), done.stderr
    done = subprocess.run([sys.executable, WRITER, tmp_path], capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.startswith("identity: ") and "config.json" in done.stderr


@pytest.mark.parametrize("config, said", [
    ('{"vocab_size": "9"}', "vocab_size: an integer"), ("[]", "an object expected"), ("{", "not JSON"),
    ('{"vocab_size": 9, "max_position": null}', "max_position: an integer"), ("{}", "vocab_size: an integer")])
def test_a_config_that_cannot_be_read_is_named_in_one_line(tmp_path, config, said):
    (tmp_path / "config.json").write_text(config)
    (tmp_path / "model.sha256").write_text("# what stood there\n")
    done = subprocess.run([sys.executable, WRITER, tmp_path, "--program", "none"], capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.startswith("identity: ") and done.stderr.count("\n") == 1, done.stderr
    assert "config.json: " + said in done.stderr
    assert (tmp_path / "model.sha256").read_text() == "# what stood there\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.sha256"]
