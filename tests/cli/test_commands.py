"""inspect, score, generate, bench, and a server that cannot start."""

import hashlib
import json
import math
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys

import pytest
import requests

from cli_harness import LIMIT_S, MODEL, PROGRAM, ROOT, fails, ok, run

sys.path.insert(0, str(ROOT / "tests"))
from broken_model import without_numbers_at  # noqa: E402

TEXT = ("It is a truth universally acknowledged, that a single man in possession of a good "
        "fortune, must be in want of a wife.\n") * 3
FIRST, SECOND = TEXT[:200], TEXT[100:]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    (folder / "a.txt").write_text(FIRST)
    (folder / "b.txt").write_text(SECOND)
    return [folder / "a.txt", folder / "b.txt"]


@pytest.fixture(scope="module")
def scored(files):
    return json.loads(ok("score", "--json", *files))


# ---- inspect -----------------------------------------------------------------------------------

def test_inspect_tells_what_the_configuration_says():
    config = json.loads((MODEL / "config.json").read_text())
    seen = json.loads(ok("inspect", "--json"))
    assert (seen["family"], seen["vocab_size"], seen["layers"], seen["width"], seen["context"]) == (
        config["model_type"], config["vocab_size"], config["n_layer"], config["d_model"],
        config["max_position"])
    assert [(m["layer"], m["slots"], m["heads"], m["knn"]) for m in seen["memories"]] == [
        (m["layer"], m["n_slot"], m["n_head"], m["k_top"]) for m in config["memories"]]
    assert sum(k["parameters"] for k in seen["kinds"]) == seen["total"]["parameters"]
    served = json.loads(ok("serve", "--check"))
    assert seen["total"]["parameters"] == served["model"]["n_param"]
    size = (MODEL / "model.safetensors").stat().st_size
    assert seen["total"]["bytes"] <= size < seen["total"]["bytes"] + 100000  # the header


def test_inspect_prints_it_for_people():
    text = ok("inspect", "--model", MODEL)
    assert "pkm_transformer" in text and "product keys" in text and "sentencepiece" in text


def test_inspect_prints_the_hash_of_each_table():
    data = (MODEL / "model.safetensors").read_bytes()
    n = int.from_bytes(data[:8], "little")
    config, header = json.loads((MODEL / "config.json").read_text()), json.loads(data[8:8 + n])
    wanted = []
    for memory in config["memories"]:
        name = "memories.%d_%s.values.weight" % (memory["layer"], memory["place"])
        sum = hashlib.sha256()
        for part in (name, name + ".scale"):
            if part in header:
                begin, end = header[part]["data_offsets"]
                sum.update(data[8 + n + begin:8 + n + end])
        wanted.append(sum.hexdigest())
    seen = json.loads(ok("inspect", "--json", "--hash"))
    assert [h["sha256"] for h in seen["hashes"]] == wanted
    assert all(h in ok("inspect", "--hash") for h in wanted)


def test_warnings_of_a_compiler_newer_than_those_tried_stop_nobody(tmp_path):
    for name, version, is_error in (("gcc", "14.2.0", True), ("gcc-99", "99", False), ("clang", "19.1.7", True),
                                    ("clang-20", "20.1.0", False)):
        compiler = tmp_path / name
        compiler.write_text("#!/bin/sh\necho %s\n" % version)
        compiler.chmod(0o755)
        told = subprocess.run(["make", "-n", "V=1", "B=%s" % tmp_path, "CC=%s" % compiler, "%s/engine/bounds.o" % tmp_path],
                              cwd=ROOT, check=True, capture_output=True, text=True).stdout
        assert "-Wconversion" in told and ("-Werror" in told) is is_error, told


def test_what_was_installed_finds_its_model(tmp_path):
    """make install, without the build that this would begin with, to a place with a blank in its name."""
    place = tmp_path / "of two"
    subprocess.run(["make", "-s", "-o", "all", "install", "CUDA=0", "B=" + os.path.relpath(PROGRAM.parent, ROOT),
                    "DESTDIR=%s" % place, "PREFIX=/usr"], cwd=ROOT, check=True)
    told = subprocess.run([place / "usr/bin/pkmserve", "inspect"], cwd="/", timeout=LIMIT_S,
                          capture_output=True, text=True)
    assert told.returncode == 0, told.stderr
    assert told.stdout.startswith("%s/usr/share/pkmserve/models/demo\n" % place)
    share = place / "usr/share"
    assert (share / "doc/pkmserve/LICENSE").exists() and (share / "pkmserve/models/convert/convert.py").exists()
    assert (share / "man/man1/pkmserve.1").read_text() == ok("help", "man")
    assert (share / "bash-completion/completions/pkmserve").read_text() == ok("help", "bash")
    assert (share / "zsh/site-functions/_pkmserve").read_text() == ok("help", "zsh")
    assert (share / "fish/vendor_completions.d/pkmserve.fish").read_text() == ok("help", "fish")


def test_the_shipped_model_is_one_or_two_folders_above_the_program(tmp_path):
    program = tmp_path / "1" / "2" / "3" / "4" / "pkmserve"
    program.parent.mkdir(parents=True)
    shutil.copy(PROGRAM, program)

    def asked():
        return subprocess.run([program, "inspect"], cwd="/", timeout=LIMIT_S, capture_output=True, text=True)

    for above, found in ((0, False), (1, True), (2, True), (3, False)):
        link = program.parents[above] / "models"
        link.symlink_to(MODEL.parent)
        told = asked()
        link.unlink()
        assert (told.returncode == 0) == found, (above, told)
        assert found or told.stderr == "pkmserve: the shipped model is not beside the program: give --model\n"


# ---- models that cannot be opened --------------------------------------------------------------

@pytest.mark.parametrize("damage, wanted", [
    (lambda d: (d / "config.json").unlink(), "config.json"),
    (lambda d: (d / "config.json").write_text("{"), "config.json"),
    (lambda d: edit(d, n_layer=13), "12"),
    (lambda d: edit(d, colour="red"), "colour"),
    (lambda d: edit(d, vocab_size=0), "vocab_size"),
    (lambda d: (d / "model.safetensors").unlink(), "model.safetensors"),
    (lambda d: truncate(d / "model.safetensors", 100000), "model.safetensors"),
    (lambda d: (d / "tokenizer.model").write_bytes(b"not a tokenizer"), "tokenizer.model"),
])
def test_a_damaged_model_is_one_line_and_exit_1(tmp_path, damage, wanted):
    copy = tmp_path / "model"
    shutil.copytree(MODEL, copy)
    damage(copy)
    for command in (["inspect"], ["serve", "--port", "0"]):
        done = run(*command, "--model", copy)
        assert done.returncode == 1, done.stderr
        last = done.stderr.splitlines()[-1]
        assert last.startswith("pkmserve: ") and wanted in last, last


def test_what_is_no_number_is_one_line(tmp_path):
    model, ids = without_numbers_at(40, MODEL, tmp_path / "model"), tmp_path / "ids"
    ids.write_text("300 " * 60)
    (tmp_path / "short").write_text("300 301")
    for command in (["score"], ["score", "--json"]):
        assert "no number" in fails(1, *command, "--model", model, "--ids", ids)
        assert ": %s: the model gave no number" % ids in fails(
            1, *command, "--model", model, "--ids", tmp_path / "short", ids, tmp_path / "short")
    assert ": %s: the model gave no number" % ids in fails(
        1, "memory", "count", "--model", model, "--ids", tmp_path / "short", ids, "-o", tmp_path / "x")
    done = run("generate", "--model", model, "--ids", ids.read_text())
    assert done.returncode == 1 and "no number" in done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr


def edit(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def truncate(path, size):
    with path.open("rb+") as file:
        file.truncate(size)


def test_a_model_without_tokenizer_takes_ids(tmp_path):
    copy = tmp_path / "model"
    shutil.copytree(MODEL, copy)
    for name in ("tokenizer.model", "tokenizer.json"):
        (copy / name).unlink()
    assert "--ids" in fails(1, "score", "--model", copy, stdin="text")
    figures = json.loads(ok("score", "--model", copy, "--ids", "--json", stdin="1 20 30\n40"))
    assert figures["results"][0]["n_scored"] == 3
    ids = ok("generate", "--model", copy, "--ids", "--max-tokens", 4, "--temperature", 0, "1 20")
    assert len(ids.split()) == 4 and all(i.isdigit() for i in ids.split())
    assert "no token id" in fails(1, "score", "--model", copy, "--ids", stdin="1 two")


# ---- score -------------------------------------------------------------------------------------

def test_score_prints_the_answer_of_the_contract(scored):
    assert scored["object"] == "score" and len(scored["results"]) == 2
    for result, text in zip(scored["results"], (FIRST, SECOND)):
        assert result["n_bytes"] == len(text)
        nll = -result["sum_logprob"] / result["n_scored"]
        assert math.isclose(result["perplexity"], math.exp(nll), rel_tol=1e-12)
    total = scored["aggregate"]
    pooled = sum(r["sum_logprob"] for r in scored["results"])
    assert math.isclose(total["sum_logprob"], pooled, rel_tol=1e-15)
    assert total["n_scored"] == sum(r["n_scored"] for r in scored["results"])


def test_score_of_standard_input_is_that_of_the_file(scored):
    for arguments in (["-"], []):
        alone = json.loads(ok("score", "--json", *arguments, stdin=FIRST))
        assert alone["results"][0] == scored["results"][0]


def test_score_does_not_depend_on_threads_or_steps(scored, files):
    for flags in (["--threads", 1], ["--max-batch-tokens", 7, "--max-seqs", 2], ["--memory-placement", "device"]):
        other = json.loads(ok("score", "--json", *flags, *files))
        assert other["results"] == scored["results"], flags


def test_score_table_and_memory(files):
    text = ok("score", "--memory", *files)
    rows = text.splitlines()
    assert rows[1].endswith("a.txt") and rows[2].endswith("b.txt") and rows[3].endswith("all")
    assert sum("memory 6_in" in row for row in rows) == 2


def test_score_windows(files):
    half = json.loads(ok("score", "--json", "--max-context", 16, "--stride", 4, files[0]))
    windows = half["results"][0]["windows"]
    assert (windows["max_context"], windows["stride"]) == (16, 4)
    assert windows["count"] > 4
    assert "--stride 9 is larger than --max-context 8" in fails(2, "score", "--max-context", 8, "--stride", 9, files[0])


def test_score_refuses_what_is_no_text(tmp_path, files):
    assert "byte 1 is not UTF-8" in fails(1, "score", stdin=b"a\xff")
    assert "NUL" in fails(1, "score", stdin=b"a\0b")
    assert "missing.txt" in fails(1, "score", files[0], tmp_path / "missing.txt")
    assert str(tmp_path) in fails(1, "score", tmp_path)


# ---- generate ----------------------------------------------------------------------------------

def test_generate_streams_the_text_of_the_answer():
    arguments = ["--max-tokens", 24, "--seed", 7, "--temperature", 0.9, "--top-p", 0.9]
    answer = json.loads(ok("generate", "--json", *arguments, "It was a dark"))
    choice = answer["choices"][0]
    assert answer["seed"] == 7 and len(choice["token_ids"]) <= 24
    assert ok("generate", *arguments, "It was a dark") == choice["text"] + "\n"
    assert ok("generate", *arguments, "-", stdin="It was a dark") == choice["text"] + "\n"


def test_generate_greedy_is_the_same_each_time_and_stops():
    arguments = ["generate", "--temperature", 0, "--max-tokens", 30, "--ignore-eos"]
    text = ok(*arguments, "He said").rstrip("\n")
    assert text == ok(*arguments, "--threads", 1, "He said").rstrip("\n")
    stop = text[5:8]
    assert ok(*arguments, "--stop", stop, "He said").rstrip("\n") == text[:text.index(stop)]


def test_generate_names_the_seed_that_it_drew():
    first = run("generate", "--max-tokens", 8, "He said")
    seed = re.fullmatch(r"\[seed (\d+)\]\n", first.stderr)[1]
    again = run("generate", "--max-tokens", 8, "--seed", seed, "He said")
    assert (again.stdout, again.stderr) == (first.stdout, "")


def test_wrong_ids_are_named_with_their_place(tmp_path):
    path = tmp_path / "ids"
    for text, wanted in (("5 6\n7 4096\n", "line 2: byte 6 of the file begins a number beyond the token ids 0 ... 4095"),
                         ("5 6\n\n7 x", "line 3: byte 7 of the file begins no token id"),
                         ("5 99999999999999999999", "line 1: byte 2 of the file begins a number beyond"),
                         (" \n", "holds no token id")):
        path.write_text(text)
        assert "%s: %s" % (path, wanted) in fails(1, "score", "--ids", path)
        assert "standard input: " + wanted in fails(1, "score", "--ids", stdin=text)
    assert "the prompt: line 1: byte 2" in fails(1, "generate", "--ids", "5 4096")


def test_generate_refuses_more_than_the_context():
    assert "max_tokens is 600, together" in fails(2, "generate", "--max-tokens", 600, "x")


# ---- bench -------------------------------------------------------------------------------------

def test_bench_measures_every_batch_size_and_its_hash_is_stable():
    quick = ["bench", "--json", "--rounds", 1, "--rows", 16, "--positions", 3]
    first, second = (json.loads(ok(*quick, *more)) for more in ([], ["--threads", 1]))
    assert [s["rows"] for s in first["steps"]] == [16, 16, 1, 2, 4, 8, 16, 32]
    assert all(s["tokens_per_s"] > 0 and s["read_share"] > 0 for s in first["steps"])
    assert first["hash"] == second["hash"]
    assert "exceed" in fails(2, "bench", "--positions", 512)


def test_bench_decodes_up_to_the_batch_that_is_asked_for():
    quick = ["bench", "--device", "cpu", "--rounds", 1, "--rows", 4, "--positions", 1]
    got = json.loads(ok(*quick, "--json", "--max-batch", 5))
    assert [s["rows"] for s in got["steps"]] == [4, 4, 1, 2, 4]
    assert got["read_is"] == "plain read" and got["deterministic"] is True
    assert got["memory_placement"] == "mmap"
    assert "raise --max-batch" in fails(2, "bench", "--rows", 513, "--max-batch", 1)


def test_bench_decodes_behind_a_prefill_that_ends_within_a_page():
    """Which the matrix unit lays out in another way than a full one."""
    ok("bench", "--dtype", "bf16", "--rounds", 2, "--rows", 20, "--positions", 40, "--max-batch", 2)


def test_bench_runs_a_round_for_each_line():
    quick = ["bench", "--device", "cpu", "--rows", 4, "--positions", 1, "--max-batch", 1]
    empty, *rounds = ok(*quick, "--rounds", 0, stdin="\n\n").splitlines()
    once = json.loads(ok(*quick, "--rounds", 1, "--json"))
    assert empty == "" and len(rounds) == 2
    for got in map(json.loads, rounds):
        assert got["hash"] == once["hash"] and got["logprobs"] == once["logprobs"]
    assert len(once["logprobs"]) == 4 and all(x < 0 for x in once["logprobs"])


def test_bench_measures_a_model_without_a_context_limit():
    got = json.loads(ok("bench", "--model", MODEL.parent / "demo-bytes", "--json", "--rounds", 1,
                        "--rows", 40, "--positions", 200, "--max-batch", 2))
    assert [s["rows"] for s in got["steps"]] == [40, 40, 1, 2]


# ---- serve -------------------------------------------------------------------------------------

def test_the_server_scores_as_the_command_does(scored):
    server = subprocess.Popen([PROGRAM, "serve", "--model", MODEL, "--port", "0",
                               "--host", "127.0.0.1", "--drain-delay-s", "0"],
                              stderr=subprocess.PIPE, text=True)
    try:
        port = None
        for line in server.stderr:
            if "event=ready" in line:
                port = int(line.split("port=")[1].split()[0])
                break
        assert port, "no ready line"
        answer = requests.post("http://127.0.0.1:%d/score" % port, timeout=LIMIT_S,
                               json={"text": [FIRST, SECOND]}).json()
        assert answer["results"] == scored["results"]
        assert answer["aggregate"] == scored["aggregate"]
    finally:
        server.send_signal(signal.SIGTERM)
        server.stderr.read()
        assert server.wait(LIMIT_S) == 0


def test_a_busy_port_is_named():
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = busy.getsockname()[1]
        assert str(port) in fails(1, "serve", "--host", "127.0.0.1", "--port", port)


def test_too_little_memory_is_told_before_anything_starts():
    done = run("serve", "--port", "0", "--kv-tokens", 10 ** 9)
    assert done.returncode == 1
    assert "not enough memory" in done.stderr
    assert "not enough memory" in fails(1, "generate", "--kv-tokens", 10 ** 9, "x")


def test_check_loads_tests_prints_and_exits():
    info = json.loads(ok("serve", "--check"))
    assert info["max_total_tokens"] == 512


def test_a_full_disk_is_a_failure():
    for arguments in (["inspect"], ["--version"], ["help"], ["help", "serve"]):
        with open("/dev/full", "wb") as full:
            done = run(*arguments, stdout=full)
        assert done.returncode == 1 and "cannot be written" in done.stderr, arguments


def test_score_writes_slots_that_numpy_reads(tmp_path, files):
    numpy = pytest.importorskip("numpy")
    ok("score", "--model", MODEL, "--slots", tmp_path / "s.npz", files[0])
    got = numpy.load(tmp_path / "s.npz")
    assert sorted(got.files) == ["indices", "memories", "weights"]
    assert got["indices"].dtype == "<i4" and got["weights"].dtype == "<f4"
    assert got["indices"].shape == got["weights"].shape and got["indices"].shape[1:] == (1, 4, 32)
    assert abs(got["weights"].sum(-1) - 1).max() < 1e-5 and got["indices"].max() < 65536
    ok("score", "--model", MODEL, "--slots", tmp_path / "t.npz", *files)
    both = numpy.load(tmp_path / "t.npz")
    assert (both["indices_0"] == got["indices"]).all() and len(both.files) == 3 * len(files)
    assert "/s.npz: cannot be written" in fails(
        1, "score", "--model", MODEL, "--slots", tmp_path / "no" / "s.npz", files[0])
    dense = ROOT / "models" / "demo-dense"
    assert fails(2, "score", "--model", dense, "--slots", tmp_path / "d.npz", stdin="A") == (
        "pkmserve: --slots needs a model with memories, %s has none" % dense)
    # Told before a model is opened, and an earlier file stays whole.
    assert "/s.npz: cannot be written" in fails(
        1, "score", "--model", tmp_path, "--slots", tmp_path / "no" / "s.npz", files[0])
    whole = (tmp_path / "t.npz").read_bytes()

    def limit():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, resource.RLIM_INFINITY))

    done = subprocess.run([str(PROGRAM), "score", "--model", str(MODEL), "--slots", str(tmp_path / "t.npz"), *map(str, files)],
                          preexec_fn=limit, capture_output=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 1 and b"t.npz: cannot be written: File too large" in done.stderr
    assert b"ppl/token" in done.stdout  # the figures are not lost
    assert (tmp_path / "t.npz").read_bytes() == whole and not (tmp_path / "t.npz.part").exists()


def test_no_output_replaces_its_input(tmp_path):
    text = tmp_path / "t"
    text.write_text("a text")
    for command in (["score", "--slots"], ["memory", "count", "-o"]):
        assert "%s would be written and is an input too" % text in fails(2, *command, text, text)
        assert text.read_text() == "a text"
