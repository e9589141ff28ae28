"""compare: the figures of a model against itself and against others, and when it is refused."""

import json
import math
import shutil

import pytest

from cli_harness import MODEL, fails, ok, run

BYTES = MODEL.parent / "demo-bytes"
TEXT = ("It is a truth universally acknowledged, that a single man in possession of a good "
        "fortune, must be in want of a wife.\n") * 12
FIELDS = ["model", "dtype", "against", "against_dtype", "backend", "n_scored", "n_unk", "perplexity",
          "against_perplexity", "worse_percent", "kl_mean", "kl_p99", "kl_max", "same_best",
          "max_kl", "max_worse", "is_close"]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("texts") / "a.txt"
    path.write_text(TEXT)
    return path


def figures(*arguments, **keywords):
    return json.loads(ok("compare", "--json", *arguments, **keywords))


def copy_of(model, folder, **changes):
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return folder


@pytest.mark.parametrize("model", [MODEL, BYTES], ids=["demo", "demo-bytes"])
def test_a_model_is_exactly_itself(model, text):
    seen = figures("--model", model, "--dtype", "f32", "--max-kl", 0, "--max-worse", 0, text)
    assert list(seen) == FIELDS
    assert (seen["dtype"], seen["against_dtype"], seen["against"]) == ("f32", "f32", str(model))
    assert seen["kl_mean"] == seen["kl_max"] == seen["worse_percent"] == 0
    assert seen["same_best"] == 1 and seen["is_close"]
    scored = json.loads(ok("score", "--json", "--model", model, "--dtype", "f32", text))
    assert seen["n_scored"] == scored["aggregate"]["n_scored"]
    assert math.isclose(seen["perplexity"], scored["aggregate"]["perplexity"], rel_tol=1e-6)


@pytest.mark.parametrize("dtype", ["bf16", "int8"])
def test_rounding_is_near_f32_and_has_the_perplexity_that_score_prints(dtype, text):
    cpu = ["--device", "cpu"]
    seen = figures("--dtype", dtype, *cpu, text)
    assert (seen["dtype"], seen["against_dtype"]) == (dtype, "f32")
    assert seen["is_close"] and 0 < seen["kl_mean"] < seen["kl_p99"] <= seen["kl_max"]
    assert 0.9 < seen["same_best"] <= 1
    for each, field in ((dtype, "perplexity"), ("f32", "against_perplexity")):
        scored = json.loads(ok("score", "--json", "--dtype", each, *cpu, text))["aggregate"]
        assert math.isclose(seen[field], scored["perplexity"], rel_tol=1e-6), each
    ratio = seen["perplexity"] / seen["against_perplexity"]
    assert math.isclose(seen["worse_percent"], 100 * (ratio - 1), rel_tol=1e-6, abs_tol=1e-10)


def test_figures_do_not_depend_on_threads(text):
    assert figures("--dtype", "bf16", text) == figures("--dtype", "bf16", "--threads", 1, text)


def test_windows_are_those_of_score(text):
    options = ["--max-context", 16, "--stride", 5]
    seen = figures("--dtype", "f32", *options, text)
    scored = json.loads(ok("score", "--json", "--dtype", "f32", *options, text))["aggregate"]
    assert seen["n_scored"] == scored["n_scored"]
    assert math.isclose(seen["perplexity"], scored["perplexity"], rel_tol=1e-6)
    assert "stride" in fails(2, "compare", "--max-context", 8, "--stride", 9, text)


def test_several_files_and_standard_input_are_pooled(text, tmp_path):
    (tmp_path / "b.txt").write_text("Call me Ishmael.")
    one, other = figures(text), figures("-", stdin="Call me Ishmael.")
    both = figures(text, tmp_path / "b.txt")
    assert both["n_scored"] == one["n_scored"] + other["n_scored"]
    assert both["kl_max"] == max(one["kl_max"], other["kl_max"])


def test_token_ids_need_no_tokenizer(tmp_path):
    model = copy_of(MODEL, tmp_path / "model")
    for name in ("tokenizer.model", "tokenizer.json"):
        (model / name).unlink()
    assert figures("--model", model, "--ids", stdin="1 20 30\n40")["n_scored"] == 3
    assert "--ids" in fails(1, "compare", "--model", model, stdin="text")


@pytest.mark.parametrize("bound", ["--max-kl", "--max-worse"])
def test_too_far_is_told_on_one_line_and_exit_1(bound, tmp_path, text):
    """Another activation makes the same weights another model, farther than any rounding."""
    changed = copy_of(MODEL, tmp_path / "model", activation="relu")
    other = "--max-worse" if bound == "--max-kl" else "--max-kl"
    done = run("compare", "--model", changed, "--against", MODEL, "--json", other, 1e9, text)
    seen = json.loads(done.stdout)
    assert done.returncode == 1 and not seen["is_close"]
    assert seen["kl_mean"] > 0.01 and seen["worse_percent"] > 1
    lines = done.stderr.splitlines()
    assert len(lines) == 1 and lines[0].startswith("pkmserve: %s" % changed), done.stderr
    assert "too far" in lines[0] and bound in lines[0] and other not in lines[0]
    assert figures("--model", changed, "--against", MODEL, "--max-kl", 1e9, "--max-worse", 1e9,
                   text) == {**seen, "max_kl": 1e9, "max_worse": 1e9, "is_close": True}


def test_max_kl_0_refuses_any_rounding(text):
    done = run("compare", "--dtype", "bf16", "--max-kl", 0, text)
    assert done.returncode == 1 and "--max-kl" in done.stderr
    assert "perplexity" in done.stdout and "same best token" in done.stdout


def test_models_of_other_tokens_are_refused(text, tmp_path):
    line = fails(1, "compare", "--against", BYTES, text)
    assert "vocab_size" in line and "demo-bytes" in line
    other = copy_of(BYTES, tmp_path / "words")
    words = (other / "vocab.txt").read_text().splitlines()
    words[5], words[6] = words[6], words[5]
    (other / "vocab.txt").write_text("".join(word + "\n" for word in words))
    line = fails(1, "compare", "--model", BYTES, "--against", other, text)
    assert "different tokenizers" in line and "token 5" in line
    other = copy_of(MODEL, tmp_path / "bos", add_bos=False)
    assert "add_bos" in fails(1, "compare", "--against", other, text)


def test_what_cannot_be_compared_is_named(tmp_path):
    assert "missing" in fails(1, "compare", "--against", tmp_path / "missing", stdin="x")
    assert "nothing to compare" in fails(1, "compare", "--ids", stdin="1")
    assert "not UTF-8" in fails(1, "compare", stdin=b"a\xff")
    assert "--max-kl" in fails(2, "compare", "--max-kl", "-1", stdin="x")


def test_a_sweep_switches_each_memory_and_head_off(tmp_path):
    text = tmp_path / "short.txt"
    text.write_text(TEXT[:240])
    rows = figures("--model", MODEL, "--ablate-sweep", text)
    assert [(row["memory"], row["head"]) for row in rows] == [
        (None, None), (0, None), (0, 0), (0, 1), (0, 2), (0, 3)]
    off = figures("--model", MODEL, "--ablate", '[{"memory": 0}]', "--max-kl", 99,
                  "--max-worse", 999, text)
    assert rows[1]["kl_mean"] == off["kl_mean"] and rows[1]["perplexity"] == off["perplexity"]
    assert rows[0]["kl_mean"] < min(row["kl_mean"] for row in rows[1:])
    table = ok("compare", "--model", MODEL, "--ablate-sweep", text).splitlines()
    assert len(table) == 7 and table[0].split()[:3] == ["memory", "head", "perplexity"]
    assert "has none" in fails(2, "compare", "--model", BYTES, "--ablate-sweep", text)


def test_a_sweep_adds_to_what_is_switched_off_already(tmp_path):
    """The first row is that alone; to switch the same head off again changes nothing."""
    text = tmp_path / "short.txt"
    text.write_text(TEXT[:240])
    ablate = '[{"memory": 0, "head": 1}]'
    rows = figures("--model", MODEL, "--ablate", ablate, "--ablate-sweep", text)
    off = figures("--model", MODEL, "--ablate", ablate, "--max-kl", 99, "--max-worse", 999, text)
    assert rows[0]["kl_mean"] == off["kl_mean"] > 0
    assert [row["kl_mean"] == off["kl_mean"] for row in rows] == [True, False, False, True, False, False]


def test_an_overlay_needs_memories(text):
    dense = MODEL.parent / "demo-dense"
    assert "overlays are rows of memories, and %s has none" % dense in fails(
        1, "compare", "--model", dense, "--overlay", "x.safetensors", text)
    assert "has none" in fails(1, "score", "--model", dense, "--overlay", "x.safetensors", text)
