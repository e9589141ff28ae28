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


def test_the_summary_of_memory_layers():
    import memory_layers
    memory = {"layer": 1, "n_head": 2, "k_top": 3, "n_key": 4, "d_key": 6, "n_slot": 16, "d_value": 5}
    config = {"n_layer": 7, "d_model": 8, "n_head": 9, "d_head": 10, "n_kv_head": 11, "vocab_size": 12,
              "max_position": 13, "d_ff": 14, "memories": [
                  {**memory, "value_gate": True, "value_projection": True, "output_gate": True},
                  {**memory, "layer": 2, "place": "beside", "experts": True, "values_of": 0},
                  {**memory, "layer": 2, "place": "in", "input_norm": "rms", "query_norm": "rms", "relu": True}]}
    sizes = "4 x 4 keys (16 slots of 5), heads 2, k = 3, queries of 6"
    assert memory_layers.summary(config) == [
        "memory layers, layers 7 of 8, heads 9 of 10 (11 for keys and values), vocabulary 12, context 13,"
        " feed-forward networks of 14",
        "memory layer 1: %s, gated values, projected values, gated output" % sizes,
        "memory beside layer 2: %s, slots are experts, table of layer 1" % sizes,
        "memory layer 2: %s, normed input, normed queries, scores through ReLU" % sizes]


def test_the_summary_of_xlm(tmp_path):
    params = tw.tiny_params(mem_n_keys=..., n_indices=..., mem_size=...)
    source = tw.write_zip(tmp_path / "c.pth", tw.tiny(params=params))
    out = convert(source, "--output", tmp_path / "m", "--values", "q4").out.splitlines()
    assert out[:2] == [
        "%s/m: XLM, layers 2 of 8, heads 2, vocabulary 16, context 6, gelu, tied output" % tmp_path,
        "memory in layer 1: 4 x 4 keys (16 slots), heads 2, k = 3, queries of 4 with batch norm"]
    assert out[2].startswith("41 tensors, 1664 parameters, ") and "bytes in f32, tables in q4, relative" in out[2], out
    import convert as program
    memory = {"place": "after", "layer": 3, "kind": "flat", "n_key": 4, "n_slot": 5, "n_head": 6, "k_top": 7,
              "d_key": 8, "query_batch_norm": False}
    config = {"model_type": "pkm_transformer", "n_layer": 1, "d_model": 2, "n_head": 9, "vocab_size": 10,
              "max_position": 11, "activation": "relu", "tie_output": False, "languages": ["en", "fr"],
              "memories": [memory]}
    assert program.family_summary(config) == [
        "XLM, layers 1 of 2, heads 9, vocabulary 10, context 11, relu, untied output", "languages: en fr",
        "memory after layer 3: 4 keys (5 slots), heads 6, k = 7, queries of 8"]


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
