"""score --jsonl and generate --jsonl: a line for each line, in order, and going on after a kill."""

import fcntl
import gzip
import json
import os
import pty
import re
import resource
import select
import signal
import subprocess
import sys
import time

import pytest

from cli_harness import LIMIT_S, MODEL, PROGRAM, ROOT, fails, ok, run

sys.path.insert(0, str(ROOT / "tests"))
from broken_model import without_numbers_at  # noqa: E402

TEXTS = ["A dark night %d, and the wind blew." % i for i in range(20)]
LINES = [json.dumps({"id": i, "text": text}) for i, text in enumerate(TEXTS)]
LINES[3] = '{"id": 3, "text": '
LINES[11] = '{"id": 11, "text": "a", "stride": -1}'
LINES[5] = json.dumps({"context": "It was", "continuations": [" so", " not"], "id": "five"})
GOOD = [i for i in range(20) if i not in (3, 11)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("jsonl")
    (folder / "in.jsonl").write_text("\n".join(LINES[:9]) + "\n\n" + "\n".join(LINES[9:]))
    done = run("score", "--jsonl", folder / "in.jsonl", "--output", folder / "whole.jsonl")
    assert done.returncode == 0 and "bad lines: 2 of 20" in done.stderr
    return folder


def read(path):
    if path.suffix == ".zst":
        return subprocess.run(["zstd", "-dcq", str(path)], stdout=subprocess.PIPE, check=True).stdout
    return gzip.open(path).read() if path.suffix == ".gz" else path.read_bytes()


def test_each_line_gets_what_the_route_answers(folder):
    results = [json.loads(line) for line in (folder / "whole.jsonl").read_text().splitlines()]
    assert [r["id"] for r in results] == ["five" if i == 5 else i for i in GOOD]
    (folder / "text").write_text(TEXTS[2])
    alone = json.loads(ok("score", "--json", folder / "text"))
    assert results[2]["results"] == alone["results"] and "timings" not in results[2]
    assert results[4]["ranking"].keys() >= {"sum", "per_token"} and len(results[4]["results"]) == 2
    first, second = (folder / "whole.jsonl.errors").read_text().splitlines()
    assert first.startswith("%s:4: the body is not" % (folder / "in.jsonl"))
    assert second.startswith("%s:13: stride " % (folder / "in.jsonl"))  # a blank line is counted


def test_files_of_others_fields_shards_and_pipes(folder):
    lines = [json.dumps({"id": "d%d" % i, "content": t, "text": 5}) for i, t in enumerate(TEXTS[:5])]
    data = gzip.compress("\n".join(lines[:3]).encode() + b"\n") + gzip.compress("\n".join(lines[3:]).encode())
    common = ["score", "--jsonl", "--text-field", "content", "--fields", "n_unk,perplexity"]
    all_lines = ok(*common, stdin=data).splitlines()
    assert [json.loads(line)["id"] for line in all_lines] == ["d0", "d1", "d2", "d3", "d4"]
    assert list(json.loads(all_lines[0])["results"][0]) == ["n_unk", "perplexity"]
    assert ok(*common, "--shard", "1/3", stdin=data).splitlines() == all_lines[1::3]
    done = run("score", "--jsonl", "--text-field", "none", "--strict", "-", stdin=lines[0])
    assert done.returncode == 1 and "standard input:1: the line has no field none" in done.stderr


def test_options_hold_where_a_line_says_nothing(folder):
    lines = '{"prompt": "It was"}\n{"prompt": "It was", "max_tokens": 2, "seed": 4}\n'
    out = ok("generate", "--jsonl", "--max-tokens", "3", "--seed", "7", stdin=lines).splitlines()
    first, second = map(json.loads, out)
    assert len(first["choices"][0]["token_ids"]) == 3 and first["seed"] == 7
    assert len(second["choices"][0]["token_ids"]) == 2 and second["seed"] == 4
    assert first["id"] == "standard input:1"


@pytest.mark.parametrize("name", ["max_new_tokens", "n_predict"])
def test_a_line_may_have_an_option_s_field_by_another_name(name):
    line = json.dumps({"prompt": "It was", name: 2, "ignore_eos": True})
    for options in ([], ["--max-tokens", "3"]):
        out = json.loads(ok("generate", "--jsonl", *options, stdin=line + "\n"))
        assert len(out["choices"][0]["token_ids"]) == 2


def test_without_max_tokens_a_long_prompt_gets_what_the_context_leaves():
    ids = [5] * 509
    line = json.dumps({"prompt": ids, "ignore_eos": True, "seed": 1})
    out = json.loads(ok("generate", "--jsonl", stdin=line + "\n"))
    assert len(out["choices"][0]["token_ids"]) == 3
    out = ok("generate", "--ids", "--ignore-eos", "--seed", "1", " ".join(map(str, ids)))
    assert len(out.split()) == 3
    assert run("generate", "--jsonl", "--max-tokens", "4", "--strict", stdin=line).returncode == 1


def test_a_seed_of_64_bits_holds_for_lines_too():
    lines = '{"prompt": "It was"}\n{"prompt": "It was", "seed": 18446744073709551614}\n'
    out = ok("generate", "--jsonl", "--max-tokens", "1", "--seed", 2**64 - 1, stdin=lines).splitlines()
    assert [json.loads(line)["seed"] for line in out] == [2**64 - 1, 2**64 - 2]


@pytest.mark.parametrize("ending", ["", ".gz", ".zst"])
def test_resume_goes_on_wherever_a_kill_has_cut(folder, ending):
    """A file that is cut anywhere is what a kill leaves behind. The second member comes of a resumed run."""
    whole = (folder / "whole.jsonl").read_bytes()
    faults = (folder / "whole.jsonl.errors").read_text()
    out = folder / ("cut.jsonl" + ending)
    errors = folder / (out.name + ".errors")
    command = ["score", "--jsonl", folder / "in.jsonl", "--output", out, "--resume"]
    text = (folder / "in.jsonl").read_text()
    (folder / "in.jsonl").write_text("\n".join(text.split("\n")[:8]))
    run(*command)
    (folder / "in.jsonl").write_text(text)
    first = out.stat().st_size
    assert run(*command).returncode == 0 and read(out) == whole
    data = out.read_bytes()
    for size in (first + (len(data) - first) // 2, first - 1):
        out.write_bytes(data[:size])
        errors.write_text(faults if size > first else faults[:faults.index("\n") + 9])
        assert run(*command).returncode == 0
        assert read(out) == whole and errors.read_text() == faults


def test_a_killed_run_goes_on(folder):
    """The first run reads a pipe that stays open, so it is killed while it works."""
    pipe, out = folder / "pipe.jsonl", folder / "killed.jsonl"
    command = ["score", "--jsonl", str(pipe), "--output", str(out), "--resume"]
    os.mkfifo(pipe)
    for n in (4, 9):
        with subprocess.Popen([str(PROGRAM), *command], stderr=subprocess.DEVNULL) as process:
            with open(pipe, "w") as feed:
                feed.write("\n".join(LINES[:n]) + "\n")
                feed.flush()
                end = time.monotonic() + LIMIT_S / 2
                while out.stat().st_size == 0 if out.exists() else True:
                    assert process.poll() is None and time.monotonic() < end
                    time.sleep(0.01)
                process.send_signal(signal.SIGKILL)
                process.wait()
    pipe.unlink()
    pipe.write_text("\n".join(LINES))
    assert run(*command).returncode == 0
    assert out.read_bytes() == (folder / "whole.jsonl").read_bytes()
    assert len((folder / "killed.jsonl.errors").read_text().splitlines()) == 2


def test_resume_knows_its_input_however_its_place_is_spelled(folder, tmp_path):
    whole, faults = (read(folder / name) for name in ("whole.jsonl", "whole.jsonl.errors"))
    out = tmp_path / "out.jsonl"
    errors = tmp_path / "out.jsonl.errors"
    other = os.path.relpath(folder / "in.jsonl")
    (tmp_path / "in.jsonl").write_text((folder / "in.jsonl").read_text())
    for given in ([other], [os.path.join(str(folder), ".", "in.jsonl")]):
        out.write_bytes(whole[:whole.index(b"\n", len(whole) // 2) + 1])
        errors.write_bytes(faults)
        assert run("score", "--jsonl", *given, "--output", out, "--resume").returncode == 0
        assert out.read_bytes() == whole and errors.read_text().splitlines()[0] == faults.decode().splitlines()[0]
    # Which of two files of one name, or a file of another: not guessed, and nothing is cut off.
    (tmp_path / "other").write_text('{"text": "a"}')
    for given in ([other, tmp_path / "in.jsonl"], [tmp_path / "other"]):
        out.write_bytes(b"")
        errors.write_bytes(faults)
        assert "has a fault of another input" in fails(2, "score", "--jsonl", *given, "--output", out, "--resume")
        assert errors.read_bytes() == faults


def test_lines_of_another_dialect_are_refused(tmp_path):
    """TGI's request has no id, and its options are in an object of their own."""
    lines = tmp_path / "in.jsonl"
    lines.write_text('{"prompt": "Once", "id": "q"}\n{"inputs": "Once"}\n')
    out = tmp_path / "out.jsonl"
    assert run("generate", "--jsonl", lines, "--output", out, "--max-tokens", 3, "--seed", 5).returncode == 0
    assert [json.loads(line)["id"] for line in out.read_text().splitlines()] == ["q"]
    assert "send prompt alone" in (tmp_path / "out.jsonl.errors").read_text()


def test_a_line_that_no_memory_would_do_for_is_a_fault_of_its_own(tmp_path):
    """Its values take more than the 512 MiB that reading may take; the run goes on."""
    lines = tmp_path / "in.jsonl"
    lines.write_text('{"text": [%s{}]}\n{"text": "Once"}\n' % ("{}," * 2700000))
    out = tmp_path / "out.jsonl"
    ok("score", "--jsonl", lines, "--output", out)
    assert (tmp_path / "out.jsonl.errors").read_text() == (
        "%s:1: no memory to read the body: its values take more than 512 MiB\n" % lines)
    assert len(out.read_text().splitlines()) == 1


@pytest.mark.parametrize("ending", ["gz", "zst"])
def test_a_compressed_output_without_results_is_whole(tmp_path, ending):
    """That of a shard without lines, say: a file of no bytes is none for gzip and zstd."""
    lines, out = tmp_path / "in.jsonl", tmp_path / ("out.jsonl." + ending)
    lines.write_text('{"text": "Once"}\n')
    common = ["score", "--jsonl", lines, "--output", out, "--shard", "1/2"]
    ok(*common)
    members = out.read_bytes()
    tool = {"gz": "gzip", "zst": "zstd"}[ending]
    assert subprocess.run([tool, "-dcq", out], stdout=subprocess.PIPE, check=True).stdout == b""
    ok(*common, "--resume")
    assert out.read_bytes() == members
    lines.write_text('{"text": "Once"}\n{"text": "upon"}\n')
    ok(*common, "--resume")
    assert len(read(out).splitlines()) == 1


@pytest.mark.parametrize("ending", [".gz", ".zst"])
def test_results_of_many_bytes_are_compressed_whole(tmp_path, ending):
    """A line of some 600 KB between short ones; its weights of memories hardly shrink."""
    lines = [json.dumps({"tokens": [5 + i % 3000 for i in range(n)], "memory": "slots", "id": n}) for n in (3, 500, 4, 300)]
    (tmp_path / "in").write_text("\n".join(lines))
    for out in (tmp_path / "plain", tmp_path / ("out" + ending)):
        ok("score", "--jsonl", "--output", out, tmp_path / "in")
    plain = (tmp_path / "plain").read_bytes()
    assert read(tmp_path / ("out" + ending)) == plain
    assert [json.loads(line)["id"] for line in plain.splitlines()] == [3, 500, 4, 300] and len(plain) > 1 << 20


def test_a_file_that_cannot_be_written_holds_each_fault_once(folder, tmp_path):
    lines = [json.dumps({"tokens": [5, 6, 99999 if i % 10 == 3 else 7 + i % 50], "id": i}) for i in range(400)]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    command = ["score", "--jsonl", tmp_path / "in.jsonl", "--output", tmp_path / "out.jsonl"]

    def limit():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (30000, resource.RLIM_INFINITY))

    done = subprocess.run([str(PROGRAM), *map(str, command)], preexec_fn=limit, stderr=subprocess.PIPE,
                          timeout=LIMIT_S, check=False)
    assert done.returncode == 1 and b"out.jsonl: cannot be written: File too large" in done.stderr, done.stderr
    faults = (tmp_path / "out.jsonl.errors").read_text().splitlines()
    assert faults and len(set(faults)) == len(faults)
    assert run(*command, "--resume").returncode == 0
    assert len((tmp_path / "out.jsonl.errors").read_text().splitlines()) == 40
    assert [json.loads(line)["id"] for line in (tmp_path / "out.jsonl").read_text().splitlines()] == [
        i for i in range(400) if i % 10 != 3]


def test_no_input_is_written_over(folder, tmp_path):
    text = (folder / "in.jsonl").read_bytes()
    for name in ("a", "a.errors", "a.run"):
        path = tmp_path / name
        path.write_bytes(text)
        line = fails(2, "score", "--jsonl", path, "--output", tmp_path / "a")
        assert "--output: %s would be written and is an input too" % path in line
        with open(path, "rb") as file:  # standard input
            done = subprocess.run([str(PROGRAM), "score", "--jsonl", "--output", str(tmp_path / "a")], stdin=file,
                                  stderr=subprocess.PIPE, timeout=LIMIT_S, check=False)
        assert done.returncode == 2 and b"is an input too" in done.stderr
        assert path.read_bytes() == text
        path.unlink()


def test_what_cannot_begin_leaves_the_earlier_results(folder, tmp_path):
    out = tmp_path / "out.jsonl"
    assert run("score", "--jsonl", folder / "in.jsonl", "--output", out).returncode == 0
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    fails(1, "score", "--jsonl", folder / "in.jsonl", "--output", out, "--overlay", folder / "in.jsonl")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before and before["out.jsonl"]


@pytest.mark.parametrize("arguments, status, wanted", [
    (["--jsonl", "--resume"], 2, "--resume needs a file"),
    (["--jsonl", "--shard", "3/3"], 2, "--shard: '3/3'"),
    (["--jsonl", "--fields", "perplexity,colour"], 2, "--fields: 'colour'"),
    (["--fields", "perplexity"], 2, "go with --jsonl"),
    (["--jsonl", "--output", "IN"], 2, "is an input too"),
    (["--jsonl", "none.jsonl"], 1, "none.jsonl: cannot be opened"),
    (["--jsonl", "--slots", "x.npz"], 2, "--slots writes the slots of whole texts"),
    (["--jsonl", "a\nnone.jsonl"], 2, "the name has a control character"),
])
def test_what_cannot_be_is_told_before_anything_is_done(folder, arguments, status, wanted):
    place = str(folder / "in.jsonl")
    given = [place if a == "IN" else a for a in arguments]
    assert wanted in fails(status, "score", *given, *([] if given[-1].endswith("none.jsonl") else [place]))
    assert (folder / "in.jsonl").read_text().count("\n") == 20


def test_damaged_input_ends_the_run_and_keeps_what_is_done(folder):
    data = gzip.compress("\n".join(LINES).encode())
    (folder / "cut.gz").write_bytes(data[:-12])
    done = run("score", "--jsonl", folder / "cut.gz")
    assert done.returncode == 1 and "cut off after" in done.stderr


def test_damage_inside_compressed_input_is_told_with_its_place(folder):
    """The first member is whole; the second begins with a kind of block, or of frame, that there is not."""
    first = (LINES[0] + "\n").encode()
    zstd = subprocess.run(["zstd", "-cq"], input=first, stdout=subprocess.PIPE, check=True).stdout
    members = {"gzip": (gzip.compress(first), 10, 7), "zstd": (zstd, 4, 8)}
    for kind, (member, at, bits) in members.items():
        second = bytearray(member)
        second[at] |= bits
        (folder / "damaged").write_bytes(member + second)
        done = run("score", "--jsonl", folder / "damaged")
        assert done.returncode == 1 and len(done.stdout.splitlines()) == 1, done
        place = re.search(r"damaged: damaged %s near byte (\d+): " % kind, done.stderr)
        assert place and len(member) <= int(place[1]) <= len(member + second), done.stderr


def test_a_line_that_fails_alone_does_not_end_the_run(tmp_path):
    """One whose numbers are none. That nobody waits for a line is none of its faults."""
    model = without_numbers_at(40, MODEL, tmp_path / "model")
    lines = tmp_path / "in.jsonl"
    lines.write_text("\n".join(map(json.dumps, [
        {"text": "Once"}, {"text": "Once upon a time. " * 500, "max_context": 16, "timeout_ms": 1},
        {"tokens": [[300], [300] * 600], "max_context": 64, "stride": 8}, {"text": "upon"}])))
    out = tmp_path / "out"
    done = run("score", "--model", model, "--jsonl", lines, "--output", out)
    assert done.returncode == 0 and "bad lines: 1 of 4" in done.stderr
    assert [json.loads(line)["id"] for line in out.read_text().splitlines()] == ["%s:%d" % (lines, n) for n in (1, 2, 4)]
    assert (tmp_path / "out.errors").read_text().startswith("%s:3: item 1: the model gave no number" % lines)
    assert run("score", "--model", model, "--jsonl", lines, "--output", out, "--strict").returncode == 1


def test_ids_that_are_integers_stay_so_and_a_byte_order_mark_is_none_of_the_line():
    lines = b'\xef\xbb\xbf{"id": 7, "content": "Once"}\n{"id": "x", "content": "upon"}\n'
    out = ok("score", "--jsonl", "--text-field", "content", "--fields", "n_unk", stdin=lines).splitlines()
    assert [json.loads(line)["id"] for line in out] == [7, "x"]


def test_a_line_that_is_too_long_is_a_fault_of_its_own():
    lines = '{"text": "%s"}\n{"text": "upon"}\n' % ("a" * 2000)
    done = run("score", "--jsonl", "--max-line-bytes", 1024, stdin=lines)
    assert done.returncode == 0 and len(done.stdout.splitlines()) == 1
    assert "standard input:1: the line has more than 1024 bytes (--max-line-bytes)" in done.stderr


def test_an_output_that_another_run_is_writing_is_refused(folder, tmp_path):
    out = tmp_path / "out.jsonl"
    with open(out, "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert "out.jsonl: another run is writing it" in fails(1, "score", "--jsonl", folder / "in.jsonl", "--output", out)
    assert out.read_bytes() == b""
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDWR)
    line = fails(2, "score", "--jsonl", folder / "in.jsonl", "--output", tmp_path / "pipe", "--resume")
    os.close(reader)
    assert "--resume: %s is no file" % (tmp_path / "pipe") in line


def at_terminal(arguments, feed=None):
    """What the command writes to a terminal as standard error; whenever it is silent, feed(what was shown)."""
    controller, terminal = pty.openpty()
    shown = b""
    with subprocess.Popen([str(PROGRAM), *map(str, arguments)], stdout=subprocess.DEVNULL, stderr=terminal) as process:
        os.close(terminal)
        end = time.monotonic() + LIMIT_S
        while time.monotonic() < end:
            if not select.select([controller], [], [], 0.02)[0]:
                if feed:
                    feed(shown)
                continue
            try:
                more = os.read(controller, 65536)
            except OSError:  # the last writer has closed it
                break
            shown += more
        os.close(controller)
        process.kill()
    assert process.returncode == 0, shown
    return shown.decode()


def test_a_terminal_is_shown_how_far_it_is(tmp_path):
    line = json.dumps({"text": "The old man went to sea. " * 30}).ljust(1 << 15)  # read in pieces, so in steps
    (tmp_path / "in").write_text((line + "\n") * 40)
    shown = at_terminal(["score", "--jsonl", "--output", tmp_path / "out", tmp_path / "in"])
    frame = re.compile(r"scoring, documents: (\d+)  [#.]{30}  +(\d+) %(  \d+ tokens/s  \d+:\d\d left)?")
    frames = [frame.fullmatch(f) for f in shown.split("\r\x1b[K") if f.startswith("scoring")]
    assert frames and all(frames), shown
    for place in (1, 2):
        numbers = [int(f[place]) for f in frames]
        assert numbers == sorted(numbers) and numbers[-1] <= 100, shown
    assert shown.endswith("\r\x1b[K") and "\n" not in shown


def test_a_pipe_of_unknown_length_is_counted(tmp_path):
    """Lines are fed until there is a second frame."""
    pipe = tmp_path / "in"
    os.mkfifo(pipe)
    lines = open(os.open(pipe, os.O_RDWR), "w")  # opens at once, unlike O_WRONLY

    def feed(shown):
        if not lines.closed:
            lines.write('{"text": "It was."}\n')
            lines.flush()
            if shown.count(b", documents: ") > 1:
                lines.close()

    shown = at_terminal(["score", "--jsonl", "--output", tmp_path / "out", pipe], feed)
    frames = [f for f in shown.split("\r\x1b[K") if f.startswith("scoring")]
    assert len(frames) > 1 and all(re.fullmatch(r"scoring, documents: \d+  \d+ tokens/s", f) for f in frames), shown
