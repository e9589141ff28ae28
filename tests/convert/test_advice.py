"""What convert.py tells its user besides what it did: which text a model expects, what was probably meant.

Rerun one: /usr/bin/python3 -m pytest tests/convert/test_advice.py -k 'split'
"""

import subprocess
import sys

import torch_writer as tw
from convert_harness import GOLDEN, PROGRAM, convert

CODES = "a b</w> 3\n"


def test_a_model_without_codes_is_said_to_expect_split_text(tmp_path):
    source = tw.write_zip(tmp_path / "c.pth", tw.tiny(params=tw.tiny_params()))
    plain = convert(source, "--output", tmp_path / "m")
    assert plain.status == 0
    for word in ("split", "--codes", "unknown", "perplexities"):
        assert word in plain.out, plain.out
    (tmp_path / "codes").write_text(CODES)
    split = convert(source, "--output", tmp_path / "m", "--codes", tmp_path / "codes")
    assert split.status == 0 and "--codes" not in split.out, split.out


def test_the_authors_evaluation_is_named_with_its_window(tmp_path):
    done = convert(GOLDEN / "trained" / "checkpoint.pth", "-o", tmp_path / "m")
    assert done.status == 0 and "score --windows xlm --bptt 32 FILE" in done.out, done.out


def test_a_folder_of_checkpoints_gets_the_file_that_was_meant(tmp_path):
    for name in ("periodic-1.pth", "checkpoint.pth"):
        (tmp_path / name).write_bytes(b"")
    done = convert(tmp_path, "-o", tmp_path / "m")
    assert done.status == 1
    assert "consolidated.pth and params.json are missing" in done.err, done.err
    assert "did you mean the file %s/checkpoint.pth" % tmp_path in done.err, done.err
    assert done.err.count("params.json") == 2, done.err


def test_what_a_folder_lacks_and_which_files_it_has(tmp_path):
    lacks = "then it holds consolidated.pth and params.json: %s missing; or a model in Hugging Face form, which has" \
        " config.json%s\n"
    folder = str(tmp_path) + "/"
    for names, missing, meant in (
            (["notes.txt", "x.pth.txt"], "consolidated.pth and params.json are", ""),
            (["params.json", "b.pt"], "consolidated.pth is", "; did you mean the file %sb.pt" % folder),
            (["consolidated.pth", "d.pth", "c.pt"], "params.json is",
             "; did you mean the file %sc.pt or another of its 2 checkpoints" % folder),
            (["d.pth", "checkpoint.pth", "c.pt"], "consolidated.pth and params.json are",
             "; did you mean the file %scheckpoint.pth or another of its 3 checkpoints" % folder)):
        for name in names:
            (tmp_path / name).write_bytes(b"")
        done = convert(tmp_path, "-o", tmp_path / "m")
        assert done.status == 1 and done.err.endswith(lacks % (missing, meant)), done.err
        for name in names:
            (tmp_path / name).unlink()


def test_without_numpy_a_virtual_environment_is_thought_of():
    hide = "import sys; sys.modules['numpy'] = None; sys.argv = ['convert.py']; import runpy; " \
        "runpy.run_path(%r, run_name='__main__')" % str(PROGRAM)
    done = subprocess.run([sys.executable, "-c", hide], capture_output=True, text=True)
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert "pip install numpy" in done.stderr and "python3-numpy" in done.stderr, done.stderr
