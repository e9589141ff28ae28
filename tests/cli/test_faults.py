"""A call that fails inside the program: never exit status 0 with less than the whole result, and never a file
that is not whole under its name. fault.c makes the calls fail."""

import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest

from cli_harness import LIMIT_S, MODEL, PROGRAM, ROOT, ok, run

sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "server")]
from overlay_files import Base  # noqa: E402
from server_harness import Server, eventually, head, read_to_end  # noqa: E402

SMALL = ["--model", MODEL, "--threads", "1", "--max-seqs", "2", "--max-model-len", "256"]
TEXT = "The spear of Yeldene is kept in the hall of the old king, by the sea. "


@pytest.fixture(scope="module")
def faulty(tmp_path_factory):
    """faulty(call, n): the variables with which the program's n-th such call fails."""
    library = tmp_path_factory.mktemp("fault") / "fault.so"
    source = os.path.join(os.path.dirname(os.path.abspath(__file__)), "fault.c")
    subprocess.run(["cc", "-D_GNU_SOURCE", "-shared", "-fPIC", "-O1", "-o", str(library), source], check=True)
    return lambda call, n: {"LD_PRELOAD": str(library), "FAULT_CALL": call, "FAULT_N": str(n)}


@pytest.fixture(scope="module")
def fault(faulty):
    """fault(call, n, arguments): runs the program; the n-th such call fails. n 0: how many there are."""
    def start(call, n, *arguments):
        done = run(*arguments, env=faulty(call, n))
        return int(done.stderr.split()[-1]) if n == 0 else done

    return start


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("faults")
    (folder / "a.txt").write_text(TEXT * 3)
    (folder / "in.jsonl").write_text("".join(
        json.dumps({"tokens": [5, 6, 99999 if i % 5 == 3 else 7 + i], "id": i}) + "\n" for i in range(20)))
    for name in ("a", "b"):
        ok("memory", "count", *SMALL, folder / "a.txt", "-o", folder / (name + ".counts"))
    return folder


COMMANDS = {
    "generate": ["generate", *SMALL, "--seed", "3", "--max-tokens", "20", "Once"],
    "generate --json": ["generate", *SMALL, "--seed", "3", "--max-tokens", "6", "--json", "Where is the spear?"],
    "score --json": ["score", *SMALL, "--json", "a.txt"],
    "examples": ["memory", "examples", *SMALL, "--slots", "17,99,5,300,4000", "a.txt"],
    "inspect": ["inspect", MODEL, "--json"],
    "count": ["memory", "inspect", "a.counts", "--json"],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_no_memory_is_no_success(fault, folder, name, monkeypatch):
    """Of the last allocations, which make the result, some fail, one in each run."""
    monkeypatch.chdir(folder)
    command = COMMANDS[name]
    whole = without_times(ok(*command))
    calls = fault("memory", 0, *command)
    for n in sorted({max(1, calls - step) for step in (0, 1, 2, 3, 5, 8, 12, 17, 24, 33, 48, 70)}):
        done = fault("memory", n, *command)
        if done.returncode == 0:
            assert without_times(done.stdout) == whole, (n, calls)
        else:
            assert done.returncode == 1 and "pkmserve: " in done.stderr, (n, calls, done.returncode, done.stderr)


def test_no_memory_for_the_tokenizer(fault, tmp_path):
    """SentencePiece's own objects cannot be destroyed after an allocation of theirs has failed."""
    (tmp_path / "text").write_text("It is a truth")
    command = ["score", *SMALL, "--json", tmp_path / "text"]
    whole = without_times(ok(*command))
    calls = fault("tokenizer", 0, *command)
    for n in range(calls - 48, calls, 3):
        done = fault("tokenizer", n, *command)
        assert done.returncode == 1 or without_times(done.stdout) == whole, (n, calls, done.returncode, done.stderr)


def without_times(text):
    """The result but for what differs from run to run."""
    try:
        value = json.loads(text)
    except ValueError:
        return text
    for name in ("created", "id", "timings"):
        value.pop(name, None)
    return value


def test_no_memory_leaves_no_file_that_is_not_whole(fault, folder, tmp_path):
    out = tmp_path / "x.counts"
    command = ["memory", "add", folder / "a.counts", folder / "b.counts", "-o", out]
    ok(*command)
    whole = out.read_bytes()
    calls = fault("memory", 0, *command)
    for n in range(1, calls + 1, max(1, calls // 25)):
        out.write_bytes(b"earlier")
        status = fault("memory", n, *command).returncode
        assert out.read_bytes() == (whole if status == 0 else b"earlier"), (n, calls)
    assert sorted(os.listdir(tmp_path)) == ["x.counts"]


def test_a_folder_that_cannot_be_read_to_its_end_is_not_copied(fault, tmp_path):
    one = Base(str(MODEL)).overlay({0: ([3], "F32", np.zeros((1, 256), "<f4"))})
    (tmp_path / "one.safetensors").write_bytes(one)
    command = ["memory", "apply", MODEL, tmp_path / "one.safetensors", "-o", tmp_path / "new"]
    calls = fault("readdir", 0, *command)
    assert calls > 5
    shutil.rmtree(tmp_path / "new")
    for n in (1, calls // 2):
        done = fault("readdir", n, *command)
        assert done.returncode == 1 and "cannot be read" in done.stderr
        assert not (tmp_path / "new").exists()


def test_faults_that_cannot_be_read_are_not_forgotten(fault, folder, tmp_path):
    command = ["score", *SMALL, "--jsonl", folder / "in.jsonl", "--output", tmp_path / "out.jsonl"]
    assert run(*command).returncode == 0
    files = [tmp_path / "out.jsonl", tmp_path / "out.jsonl.errors"]
    before = [file.read_bytes() for file in files]
    for n in (1, 2, 3):
        done = fault("getline", n, *command, "--resume")
        assert done.returncode == 1 and "cannot be read" in done.stderr, done.stderr
        assert [file.read_bytes() for file in files] == before


def test_a_file_at_its_size_limit_is_an_error(tmp_path):
    out = tmp_path / "out"
    text = tmp_path / "text"
    text.write_text(TEXT * 50)
    done = subprocess.run(["prlimit", "--fsize=1000", str(PROGRAM), "score", "--model", str(MODEL), "--slots",
                           str(out), str(text)], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, timeout=LIMIT_S)
    assert done.returncode == 1 and b"File too large" in done.stderr, done


def test_a_server_without_one_of_its_threads_does_not_start(faulty):
    """Each thread in turn cannot be had: one line says which, and the exit status is 1."""
    command = [str(PROGRAM), "serve", "--model", str(MODEL), "--threads", "2", "--port", "0", "--log-format", "text"]
    for n in range(1, 20):
        with subprocess.Popen(command, env={**os.environ, **faulty("thread", n)}, text=True, stdout=subprocess.DEVNULL,
                              stderr=subprocess.PIPE) as server:
            lines = []
            for line in server.stderr:
                lines.append(line)
                if " event=ready " in line:
                    server.kill()
        if server.returncode < 0:
            break
        assert server.returncode == 1 and lines[-1].startswith("pkmserve: ") and "cannot" in lines[-1], (n, lines)
    assert n > 6  # as many threads as there are at least


def n_growth(faulty, *bodies):
    """Larger allocations of a server that starts and is asked to score these."""
    with Server(env=faulty("growth", 0)) as s:
        for body in bodies:
            s.ok("/score", body)
        assert s.stop() == 0
        return int(s.read_log().split()[-1])


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_no_memory_within_a_stream_ends_its_connection(faulty, version):
    """The client sees that the answer is not whole, the log says why, and nothing of the connection is left."""
    body = {"prompt": [5] + [300 + i * 7 % 900 for i in range(300)], "max_tokens": 3, "stream": True, "memory": "slots",
            "temperature": 0, "ignore_eos": True}
    with Server(env=faulty("growth", n_growth(faulty) + 1)) as s:
        c = s.connect()
        c.sendall(head("/generate", json.dumps(body).encode()).replace(b"HTTP/1.1", b"HTTP/" + version.encode()))
        top, text = read_to_end(c).split(b"\r\n\r\n", 1)
        c.close()
        assert top.startswith(b"HTTP/1.1 200 ") and b"[DONE]" not in text and not text.endswith(b"0\r\n\r\n")
        eventually(lambda: s.metric("http_connections") == 1, "the connection is over")  # but for the one that asks
        s.logged("status=200 code=out_of_memory")
        assert s.ok("/generate", {**body, "stream": False})["choices"][0]["memory"]["slots"][0]["n_position"] == 304


def test_no_memory_for_a_text_is_told_as_such(faulty):
    """Each of a request's larger allocations fails in turn."""
    body = {"tokens": [300 + i * 7 % 900 for i in range(4000)]}
    codes = []
    for n in range(n_growth(faulty) + 1, n_growth(faulty, body) + 1):
        with Server(env=faulty("growth", n)) as s:
            answer = s.post("/score", body)
            codes.append(answer.status_code == 200 or answer.json()["error"]["code"])
    assert "out_of_memory" in codes and set(codes) <= {True, "out_of_memory"}, codes
