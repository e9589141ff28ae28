"""What the authors' own evaluators printed, by one command: --windows xlm and adaptive-span.

Rerun one: B=build PKMSERVE=build/pkmserve /usr/bin/python3 -m pytest \
           tests/golden/test_evaluators.py -k 'xlm and trained'
"""

import json
import math

import golden_harness as gh
import pytest

XLM = ["trained", "dense12", "pkm12-2mem", "asm", "share-values"]
SPAN = ["a-fixed-ffn", "c-allattn-fixed", "e-allattn-adaptive-io", "g-span-epsilon"]


@pytest.fixture(scope="module", autouse=True)
def converted():
    gh.convert_all()


def close(got, due, tolerance):
    assert abs(got - due) <= tolerance, "%.10g expected, got %.10g" % (due, got)


def score(case, path, *flags):
    status, out, err = gh.run_program("score", "--model", gh.model_directory(case), "--json", *flags,
                                      path)
    assert status == 0, err
    return json.loads(out)


@pytest.mark.parametrize("form", ["text", "ids"])
@pytest.mark.parametrize("case", XLM)
def test_xlm_prints_this_perplexity(case, form, tmp_path):
    due = gh.expected(case)
    for stream in due["stream"]:
        path = tmp_path / "stream"
        if form == "ids":
            path.write_text(" ".join(map(str, stream["ids"])))
        else:
            path.write_text("".join(line + "\n" for line in stream["text"]))
        flags = ["--windows", "xlm", "--bptt", due["config"]["bptt"]] + (["--ids"] * (form == "ids"))
        if stream["lang"] is not None:
            flags += ["--language", str(stream["lang"])]
        got = score(case, path, *flags)["results"][0]
        assert got["n_scored"] == stream["predicted"]
        assert got["windows"]["count"] == len(stream["windows"])
        assert (got["windows"]["scheme"], got["windows"]["bptt"]) == ("xlm", due["config"]["bptt"])
        close(got["perplexity"], stream["ppl_f64"], gh.PPL_RELATIVE * stream["ppl_f64"])
        close(100 * got["accuracy"], stream["acc"], 1e-6)


def test_xlm_counts_the_slots_of_whole_windows(tmp_path):
    stream, = gh.expected("trained")["stream"]
    (tmp_path / "ids").write_text(" ".join(map(str, stream["ids"])))
    got = score("trained", tmp_path / "ids", "--windows", "xlm", "--bptt", "32", "--ids", "--memory")
    layer, = got["results"][0]["memory"]["layers"]
    due = stream["memory"]["2_in"]
    close(100 * layer["mem_used"], due["used"], 1e-6)
    for kind in "wu":
        close(layer["mem_kl_" + kind], due["kl_" + kind], gh.KL)
        close(layer["mem_top90_" + kind], due["top90_" + kind], gh.TOP)


def test_a_last_line_without_an_end_is_a_line(tmp_path):
    stream, = gh.expected("trained")["stream"]
    (tmp_path / "whole").write_text("".join(line + "\n" for line in stream["text"]))
    (tmp_path / "open").write_text("\n".join(stream["text"]))
    one, other = (score("trained", tmp_path / name, "--windows", "xlm", "--bptt", "32")["results"][0]
                  for name in ("whole", "open"))
    assert one["sum_logprob"] == other["sum_logprob"] and one["n_scored"] == other["n_scored"]


def test_the_command_line_prints_the_evaluators_names(tmp_path):
    stream, = gh.expected("trained")["stream"]
    (tmp_path / "ids").write_text(" ".join(map(str, stream["ids"])))
    status, out, err = gh.run_program("score", "--model", gh.model_directory("trained"), "--ids",
                                      "--windows", "xlm", "--bptt", "32", tmp_path / "ids")
    assert status == 0 and "XLM: ppl 25.0336" in out and "acc 18.709677" in out, out + err


@pytest.mark.parametrize("case", SPAN)
def test_adaptive_span_prints_this_loss(case, tmp_path):
    due = json.loads((gh.ROOT / "tests/golden/allattention" / case / "expected.json").read_text())
    theirs = due["trainer_full_eval"]
    (tmp_path / "ids").write_text(" ".join(map(str, due["ids"])))
    got = score(case, tmp_path / "ids", "--ids", "--windows", "adaptive-span", "--bptt",
                due["params"]["block_size"], "--batch-size", theirs["batch_size"])["results"][0]
    assert got["n_scored"] == theirs["tokens_scored"]
    close(got["mean_nll"], theirs["loss"], due["tolerance"]["nll_abs"])
    close(got["bits_per_token"], theirs["loss"] / math.log(2), 2 * due["tolerance"]["nll_abs"])


def test_adaptive_span_cuts_rows_and_drops_what_is_left(tmp_path):
    """Three rows by hand: equal lengths, each a text of its own, without its last, broken block."""
    case, bptt, batch = "a-fixed-ffn", 10, 3
    due = json.loads((gh.ROOT / "tests/golden/allattention" / case / "expected.json").read_text())
    ids = due["ids"][:200]
    row = len(ids) // batch
    used = 1 + (row - 1) // bptt * bptt
    assert used < row and row * batch < len(ids)
    (tmp_path / "ids").write_text(" ".join(map(str, ids)))
    got = score(case, tmp_path / "ids", "--ids", "--windows", "adaptive-span", "--bptt", bptt,
                "--batch-size", batch)["results"][0]
    paths = []
    for r in range(batch):
        paths.append(tmp_path / ("row%d" % r))
        paths[-1].write_text(" ".join(map(str, ids[r * row:r * row + used])))
    status, out, err = gh.run_program("score", "--model", gh.model_directory(case), "--ids", "--json",
                                      *paths)
    assert status == 0, err
    rows = json.loads(out)["aggregate"]
    assert got["n_scored"] == rows["n_scored"] == batch * (used - 1)
    close(got["sum_logprob"], rows["sum_logprob"], 1e-9 * abs(rows["sum_logprob"]))


def test_compare_counts_the_same_predictions(tmp_path):
    stream, = gh.expected("trained")["stream"]
    (tmp_path / "ids").write_text(" ".join(map(str, stream["ids"])))
    status, out, err = gh.run_program("compare", "--model", gh.model_directory("trained"), "--ids",
                                      "--windows", "xlm", "--bptt", "32", "--json", tmp_path / "ids")
    assert status == 0, err
    got = json.loads(out)
    assert got["n_scored"] == stream["predicted"] and got["n_unk"] == stream["ids"].count(3)
    close(got["perplexity"], stream["ppl_f64"], gh.PPL_RELATIVE * stream["ppl_f64"])
