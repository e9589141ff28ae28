"""Serving over HTTP as a part of the check, rehearsed on the CPU; and that it sees what it looks for."""

import argparse
import asyncio
import json
import re
import subprocess
import sys
import time

import pytest

from test_check import BUILD, ROOT, rehearse, section, tools  # noqa: F401

import serve
from load import Answer
from run import Run


def test_the_server_is_looked_at_over_http(tools, tmp_path):  # noqa: F811
    done, text = rehearse(tools, tmp_path, "cpu", "--part", "serve")
    assert done.returncode == 0, done.stdout + done.stderr + text
    rows = section(text, "Serving over HTTP")
    for line in (r"start, with the self-test \| [\d.]+ s", r"the same bits alone and in a crowd \| 30 of 30 answers",
                 r"1 stream \| \d+ tokens/s; a step \d+ µs, of it in the model \d+; front's threads \d+ µs a step",
                 r"40 streams \| \d+ tokens/s;", r"scoring of 8 texts of 24 tokens \| \d+ tokens/s",
                 r"everything at once for 2 s \| [1-9]\d* requests, .*, 0 wrong; memory [+-]\d+ MiB"):
        assert re.search(line, rows), rows
    assert "## Aims" not in text and "None of what was run." in section(text, "Failures")
    assert "event=ready" in (tmp_path / "report.log").read_text()


class FakeServer:
    """Serves nothing; its process is this one."""

    port = 0
    n_running = 0

    class process:
        pid = 0

    def metrics(self):
        return {"num_requests_running": self.n_running, "num_requests_waiting": 0}


def answer_of(status, body):
    answer = Answer()
    answer.status, answer.body, answer.complete, answer.end = status, json.dumps(body).encode(), True, answer.begin
    return answer


ARGS = argparse.Namespace(vocab=500, tokens=24, small=True, device="cpu", seconds=0.05)


@pytest.mark.parametrize("fault, message", [(None, None), ("bits", '"crowd"'), ("status", "status 500"),
                                            ("always", "status 503"), ("crowd", "the crowd: status [200, 429]")])
def test_an_answer_that_is_another_in_a_crowd_is_told(monkeypatch, capsys, fault, message):
    n = 0

    async def ask(port, path, body):
        nonlocal n
        n += 1
        is_crowd = "seed" in body and "n" not in body
        if fault == "always":
            return answer_of(503, {})
        if n > 20 and fault == ("crowd" if is_crowd else "status"):
            return answer_of(429 if is_crowd else 500, {})
        text = "crowd" if n > 20 and fault == "bits" else "same"
        return answer_of(200, {"results" if path == "/score" else "choices": [text]})

    monkeypatch.setattr(serve, "ask", ask)
    assert asyncio.run(serve.compare_bits(FakeServer(), ARGS)) == (fault is None)
    record = json.loads(capsys.readouterr().out)
    assert record["n"] == 30 and bool(record["different"]) == (fault is not None)
    assert fault is None or any(message in different for different in record["different"]), record


@pytest.mark.parametrize("fault, message", [
    (None, None), ("status", "generate: 500 None"), ("wrong", "wrong: 200 None"), ("cut", "stream: 200 None"),
    ("host", "memory grew by 65 MiB"), ("device", "the device's memory grew by 65 MiB"), ("left", "[1, 0] requests are left"),
    ("health", "/health/ready?deep=1: 503")])
def test_what_a_mixture_of_everything_leaves_is_told(monkeypatch, capsys, fault, message):
    async def ask(port, path, body=None, leave_after=None):
        if body is None:
            return answer_of(503 if fault == "health" else 200, {})
        await asyncio.sleep(0.001)
        kind = "wrong" if body.get("max_tokens") == -1 else "stream" if body.get("stream") and leave_after is None else "generate"
        answer = answer_of(400 if kind == "wrong" and fault != "wrong" else 200, {})
        answer.complete = not (fault == "cut" and kind == "stream")
        answer.status = 500 if fault == "status" and kind == "generate" and leave_after is None else answer.status
        return answer

    def grows(is_it):
        sizes = iter((100, 165 if is_it else 164))
        return lambda _: next(sizes)
    server = FakeServer()
    server.n_running = int(fault == "left")
    sleep = asyncio.sleep

    async def quick(seconds):
        await sleep(min(seconds, 0.02))
    monkeypatch.setattr(serve.asyncio, "sleep", quick)
    monkeypatch.setattr(serve, "ask", ask)
    monkeypatch.setattr(serve, "resident_mib", grows(fault == "host"))
    monkeypatch.setattr(serve, "device_mib", grows(fault == "device"))
    monkeypatch.setattr(serve, "open_files", lambda _: 9)
    assert asyncio.run(serve.soak(server, ARGS)) == (fault is None)
    record = json.loads(capsys.readouterr().out)
    assert (record["n_wrong"] > 0) == (fault is not None)
    assert fault is None or any(message in wrong for wrong in record["wrong"]), record


def test_a_server_that_does_not_start_is_a_failure(tmp_path, monkeypatch):
    run = Run(BUILD, "nonsense", True, sys.executable, time.monotonic() + 60)
    run.begin("serve", 60)
    serve.check_serve(run)
    assert len(run.failures) == 1 and run.failures[0][1].startswith(
        "serving over HTTP: start, streams, score, bits, soak: exit status 1: "), run.failures
    assert "nonsense" in run.failures[0][1]


def test_the_kit_has_what_the_server_needs_of_this_machine(tmp_path):
    kit = tmp_path / "kit"
    subprocess.run([".ci/gpu-kit", kit], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    assert {"jansson.h", "jansson_config.h", "microhttpd.h"} <= {f.name for f in (kit / "include").iterdir()}
    libraries = {f.name for f in (kit / "lib").iterdir()}
    needed = subprocess.run(["ldd", kit / "lib" / "libmicrohttpd.so.12"], check=True, capture_output=True, text=True).stdout
    system = {"linux-vdso", "libc", "libm", "libdl", "librt", "libpthread"}
    for name in re.findall(r"^\s*(\S+) =>", needed, re.M):
        assert name.split(".")[0] in system or name in libraries, name
    assert not {"libc.so.6", "libm.so.6", "libpthread.so.0"} & libraries
    source = tmp_path / "http.c"
    source.write_text("#include <jansson.h>\n#include <microhttpd.h>\n#include <stdio.h>\n"
                      "int main(void) { printf(\"%s\", MHD_get_version()); json_decref(json_object()); }\n")
    subprocess.run(["gcc", "-I", kit / "include", "-o", tmp_path / "http", source, "-L", kit / "lib",
                    "-Wl,-rpath-link,%s" % (kit / "lib"), "-lmicrohttpd", "-ljansson"], check=True)
    maps = subprocess.run(["ldd", tmp_path / "http"], check=True, capture_output=True, text=True,
                          env={"LD_LIBRARY_PATH": str(kit / "lib"), "PATH": "/usr/bin:/bin"}).stdout
    assert "libmicrohttpd.so.12 => %s" % (kit / "lib") in maps and "libjansson" not in maps, maps
    assert len(list((kit / "licences").iterdir())) >= len(libraries) - 2
