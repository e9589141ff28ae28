"""Loading, overload, draining, ending; and what goes wrong at the start."""

import contextlib
import fcntl
import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import termios
import threading
import time

import pytest
import requests

from server_harness import (DEMO, FOREVER, PATIENCE, PROGRAM, UNBOUNDED, Server, error_of, eventually,
                            events, head, in_time, read_answer, read_to_end)

SHORT = {"prompt": "It was", "max_tokens": 20, "temperature": 0, "ignore_eos": True}
SECONDS = {**FOREVER, "max_tokens": 8000}
LONG_S = 1000  # for so many tokens where the machine is slow


def in_background(call):
    result = []
    thread = threading.Thread(target=lambda: result.append(call()))
    thread.start()
    return thread, result


def test_loading_answers_503(tmp_path):
    """With when to come back; who asks again and again whether it is ready fills no log. Loading goes on once the
    library of another device, which it looks for first, has an end."""
    library = tmp_path / "library"
    os.mkfifo(library)
    with Server("--device", "auto", wait=False, env={"PKMSERVE_CUDA_LIBRARY": str(library)}) as s:
        work = s.post("/generate", SHORT)
        health, live, models, metrics = (
            s.get(path) for path in ("/health/ready", "/health/live", "/v1/models", "/metrics"))
        library.write_bytes(b"")
        error_of(work, 503, "model_loading")
        assert work.headers["Retry-After"] == "2"
        assert health.json()["status"] == "loading" and "Retry-After" in health.headers
        assert isinstance(health.json()["phase"], str) and 0 <= health.json()["progress"] <= 1
        assert live.status_code == 200
        error_of(models, 503, "model_loading")
        assert metrics.status_code == 200
        s.wait_ready()
        assert s.post("/generate", SHORT).status_code == 200
        assert s.stop() == 0
        log = s.read_log()
        assert 'path="/generate" status=503' in log and 'path="/health' not in log


def test_ready_line_names_the_port():
    with Server() as s:
        s.logged("event=ready")
        lines = [line for line in s.read_log().splitlines() if "event=ready" in line]
        assert len(lines) == 1 and " port=%d " % s.port in lines[0]


def test_json_log():
    with Server("--log-format", "json") as s:
        s.ok("/generate", SHORT)
        s.logged('"path":"/generate"')
        lines = [json.loads(line) for line in s.read_log().splitlines()]
        ready = [e for e in lines if e["event"] == "ready"][0]
        assert ready["port"] == s.port
        access = [e for e in lines if e["event"] == "request" and e["path"] == "/generate"][-1]
        assert access["status"] == 200 and access["method"] == "POST"
        assert access["generated_tokens"] == 20 and access["ms"] > 0


def test_what_a_client_calls_its_method_does_not_break_the_json_log():
    with Server("--log-format", "json") as s:
        for method in (b'"\\', b'G"', b"\xff\xc2\x9b"):
            c = s.connect()
            c.sendall(method + b" /odd HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n")
            read_to_end(c)

        def access():
            lines = [json.loads(line) for line in s.read_log().splitlines()]
            return [e["method"] for e in lines if e.get("path") == "/odd"]

        eventually(lambda: len(access()) == 3, "three access lines")
        assert access() == ['"\\', 'G"', "\ufffd\x9b"]


@pytest.mark.parametrize("status", [429, 503])
def test_full_queue_gets_429_or_what_was_chosen_with_retry_after(status):
    with Server("--max-seqs", "1", "--max-queue", "1", "--overload-status", str(status),
                "--metrics-compat", "vllm", model=UNBOUNDED) as s:
        held = [s.connect() for _ in range(2)]
        held[0].sendall(head("/generate", json.dumps(FOREVER).encode()))
        eventually(lambda: s.metric("num_requests_running") == 1, "running")
        held[1].sendall(head("/generate", json.dumps(FOREVER).encode()))
        eventually(lambda: s.metric("num_requests_waiting") == 1, "waiting")
        answer = s.post("/generate", SHORT)
        error_of(answer, status, "queue_full")
        assert int(answer.headers["Retry-After"]) >= 1
        assert int(answer.headers["retry-after-ms"]) >= 1
        s.counted('requests_rejected_total{reason="queue_full"}')
        assert s.get("/health").status_code == 200  # a full server is a healthy server
        late = s.connect()
        held[1].close()
        eventually(lambda: s.metric("num_requests_waiting") == 0, "left")
        theirs = re.findall(r"^vllm:num_requests_(\w+){.*} (\d+)$", s.get("/metrics").text, re.M)
        assert theirs == [("running", "1"), ("waiting", "0")]
        late.sendall(head("/generate", json.dumps({**SHORT, "timeout_ms": 200}).encode()))
        status, headers, body = read_answer(late)
        assert status == 504 and json.loads(body)["error"]["code"] == "queue_timeout"
        assert headers["x-should-retry"] == "true"
        held[0].close()
        late.close()


def run_out(s, path, body):
    """The answer to a request whose time ended while it ran: a busy machine may take long to begin."""
    for timeout_ms in (300, 1000, 4000, 16000):
        answer = s.post(path, {**body, "timeout_ms": timeout_ms})
        if answer.headers["x-should-retry"] == "false":
            break
    assert answer.headers["x-should-retry"] == "false"
    return answer


def test_running_out_of_time_gets_504():
    with Server() as s:
        error_of(run_out(s, "/score", {"text": "the quick brown fox " * 4000, "stride": 4}), 504, "run_timeout")
    with Server(model=UNBOUNDED) as s:
        answer = run_out(s, "/generate", {"inputs": "It was", "parameters": {"max_new_tokens": 400000}})
        assert answer.status_code == 504 and answer.json()["error_type"] == "incomplete_generation"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_idle_server_ends_with_0(number):
    with Server() as s:
        assert s.stop(number) == 0


def test_drain_finishes_what_runs():
    with Server("--drain-delay-s", "4", "--shutdown-timeout-s", str(LONG_S), "--threads", "1", model=UNBOUNDED) as s:
        stream = in_background(lambda: s.post("/generate", {**SECONDS, "stream": True}, LONG_S))
        whole = in_background(lambda: s.post("/generate", SECONDS, LONG_S))
        kept = s.connect()
        kept.sendall(head("/health", b"", "GET"))
        assert read_answer(kept)[0] == 200
        eventually(lambda: s.metric("num_requests_running") == 2, "running")
        s.process.send_signal(signal.SIGTERM)
        eventually(lambda: s.get("/health/ready").status_code == 503, "not ready")
        # Load balancers that have not noticed still get their work done, and are told to go.
        kept.sendall(head("/generate", json.dumps({**SHORT, "max_tokens": 1}).encode()))
        status, headers, _ = read_answer(kept)
        assert status == 200 and headers["connection"] == "close"
        for thread, result in (stream, whole):
            thread.join(LONG_S)
            assert result[0].status_code == 200
        assert events(stream[1][0].text)[-1]["usage"]["completion_tokens"] == SECONDS["max_tokens"]
        assert whole[1][0].json()["usage"]["completion_tokens"] == SECONDS["max_tokens"]
        assert s.process.wait(PATIENCE) == 0
        kept.close()


def test_after_the_delay_new_work_is_refused_and_old_work_goes_on():
    with Server("--drain-delay-s", "0", "--shutdown-timeout-s", str(LONG_S), "--threads", "1", model=UNBOUNDED) as s:
        running = in_background(lambda: s.post("/generate", SECONDS, LONG_S))
        eventually(lambda: s.metric("num_requests_running") == 1, "running")
        kept = s.connect()
        kept.sendall(head("/health", b"", "GET"))
        assert read_answer(kept)[0] == 200
        s.process.send_signal(signal.SIGTERM)
        eventually(lambda: s.get("/health/ready").status_code == 503, "not ready")
        kept.sendall(head("/generate", json.dumps(SHORT).encode()))
        status, headers, body = read_answer(kept)
        assert status == 503 and json.loads(body)["error"]["code"] == "shutting_down"
        assert headers["connection"] == "close" and headers["retry-after"]
        running[0].join(LONG_S)
        assert running[1][0].json()["usage"]["completion_tokens"] == SECONDS["max_tokens"]
        assert s.process.wait(PATIENCE) == 0
        kept.close()


def test_an_idle_server_too_refuses_before_its_port_closes():
    """For load balancers that do not ask for health: a 503 can be sent elsewhere, a closed connection
    cannot."""
    def is_refused():
        with Server("--drain-delay-s", "1") as s:
            s.process.send_signal(signal.SIGTERM)
            seen = []

            def closed():
                try:
                    seen.append(s.post("/generate", {**SHORT, "max_tokens": 1}))
                except requests.ConnectionError:
                    return True
                return False

            eventually(closed, "the port closes")
            late = [a for a in seen if a.status_code != 200]
            for a in late:
                error_of(a, 503, "shutting_down")
            assert s.process.wait(PATIENCE) == 0
            return late

    in_time(is_refused, "an answer 503 before the end")


def test_work_past_the_shutdown_time_is_cut_with_an_error():
    with Server("--shutdown-timeout-s", "0", model=UNBOUNDED) as s:
        whole = in_background(lambda: s.post("/generate", FOREVER))
        stream = in_background(lambda: s.post("/generate", {**FOREVER, "stream": True}))
        before = s.metric("generation_tokens_total")
        eventually(lambda: s.metric("generation_tokens_total") > before + 4, "decoding")
        eventually(lambda: s.metric("num_requests_running") == 2, "both run")
        assert s.stop() == 0
        whole[0].join(PATIENCE)
        stream[0].join(PATIENCE)
        error_of(whole[1][0], 503, "shutting_down")
        if stream[1][0].status_code == 200:
            parts = [p for p in stream[1][0].text.split("\n\n") if p]
            assert parts[-1] == "data: [DONE]"
            assert json.loads(parts[-2][6:])["error"]["code"] == "shutting_down"


def slow_reader(s, body):
    """A connection that asks for a large answer and has not begun to read it, though it is there."""
    c = s.unread("/tokenize", body, 65536)
    c.recv(1, socket.MSG_PEEK)
    return c


LARGE = {"content": "a " * 500000, "with_pieces": True}  # an answer of 13 MB


def test_answers_on_their_way_have_the_shutdown_time():
    with Server("--shutdown-timeout-s", "100") as s:
        c = slow_reader(s, LARGE)
        s.process.send_signal(signal.SIGTERM)
        time.sleep(3)  # longer than an answer was given once the engine had nothing to do
        answer = http.client.HTTPResponse(c, method="POST")
        answer.begin()
        assert len(json.loads(answer.read())["tokens"]) > 400000
        c.close()
        assert s.process.wait(PATIENCE) == 0
        assert "event=stopped cut_short=0" in s.read_log()


def test_answers_that_are_cut_are_told_as_cut():
    with Server("--shutdown-timeout-s", "0") as s:
        with slow_reader(s, LARGE):
            assert s.stop() == 0
        assert "event=stopped cut_short=1" in s.read_log()
        line = [line for line in s.read_log().splitlines() if "path=\"/tokenize\"" in line][0]
        assert "status=200 code=cut_short" in line


def test_bodies_that_nobody_came_to_read_are_refused():
    """The first's connection may be ended by the server, which looks as if the client had left."""
    body = json.dumps({"content": "a" * 4000000}).encode()
    with Server("--body-threads", "1", "--shutdown-timeout-s", "0") as s:
        with s.connect() as first, s.connect() as second:
            first.sendall(head("/tokenize", body))
            eventually(lambda: s.metric("request_body_wait_seconds_count") == 1, "the first is read")
            second.sendall(head("/tokenize", body))
            eventually(lambda: s.metric("long_bodies_unread") == 2, "the second waits")
            s.process.send_signal(signal.SIGTERM)
            status, headers, answer = read_answer(second)
            assert (status, json.loads(answer)["error"]["code"]) == (503, "shutting_down")
            assert headers["retry-after"] == "5" and headers["connection"].lower() == "close", headers
            assert s.process.wait(PATIENCE) == 0
        lines = [line for line in s.read_log().splitlines() if "path=\"/tokenize\"" in line]
        assert len(lines) == 2 and not any("client_left" in line for line in lines), lines
        assert "event=stopped cut_short=%d" % sum("code=cut_short" in line for line in lines) in s.read_log()


def test_a_body_that_had_arrived_in_time_is_served():
    slow = head("/tokenize", json.dumps({"content": "a" * 1500000}).encode())
    work = json.dumps({"prompt": ["A"] * 60 + ["a " * 200] * 3 + [" " * 70000], "max_tokens": 1}).encode()
    with Server("--body-threads", "1", "--shutdown-timeout-s", "100") as s:

        def seen_unread(n):
            end = time.monotonic() + 3
            while s.metric("long_bodies_unread") != n and time.monotonic() < end:
                time.sleep(0.005)
            return time.monotonic() < end

        for attempt in range(10):  # A busy machine may have read the first before the second comes.
            first, second = s.connect(), s.connect()
            first.sendall(slow)
            if seen_unread(1):
                second.sendall(head("/generate", work))
                if seen_unread(2):
                    break
            first.close(), second.close()
        else:
            raise AssertionError("the second never waited for the first")
        s.process.send_signal(signal.SIGTERM)
        assert read_answer(second)[0] in (200, 400)
        first.close(), second.close()
        assert s.process.wait(PATIENCE) == 0


def test_ctrl_c_at_a_terminal_ends_an_idle_server_at_once():
    terminal, theirs = os.openpty()

    def own_terminal():
        os.setsid()
        fcntl.ioctl(theirs, termios.TIOCSCTTY, 0)

    log = tempfile.NamedTemporaryFile()
    process = subprocess.Popen(
        [PROGRAM, "serve", "--model", DEMO, "--port", "0", "--host", "127.0.0.1", "--drain-delay-s", "3000"],
        stdin=theirs, stdout=subprocess.DEVNULL, stderr=open(log.name, "w"), preexec_fn=own_terminal)
    eventually(lambda: "event=ready" in open(log.name).read(), "ready")
    os.write(terminal, b"\x03")
    assert process.wait(PATIENCE) == 0
    os.close(terminal), os.close(theirs)


def test_second_signal_ends_at_once():
    with Server("--drain-delay-s", "300") as s:
        s.process.send_signal(signal.SIGTERM)
        eventually(lambda: s.get("/health/ready").status_code == 503, "draining")
        assert s.stop() == 1


def test_signal_while_loading_ends_with_0():
    with Server(wait=False) as s:
        assert s.stop() == 0


def cut(path):
    os.truncate(path, 4096)


def overwrite(path):
    with open(path, "r+b") as f:
        f.seek(-4, os.SEEK_END)
        f.write(bytes(4))


@pytest.mark.parametrize("damage", [cut, overwrite])
def test_a_mapped_file_that_changes_makes_the_server_unready(tmp_path, damage):
    """By a read past its end, or when the files are looked at: one line names the file, and no answer is made of what
    was read. The server drains, and ends."""
    model = tmp_path / "model"
    weights = model / "model.safetensors"
    body = {"prompt": ["a b"] * 16, "max_tokens": 500, "ignore_eos": True}  # longer than until the files are looked at

    def is_unready():
        shutil.copytree(DEMO, model, dirs_exist_ok=True)
        with Server("--drain-delay-s", "3", model=str(model)) as s:
            was_unready = False
            damage(weights)
            with contextlib.suppress(requests.ConnectionError):
                answer = s.post("/generate", body)
                assert answer.status_code in (500, 503)
                assert answer.json()["error"]["code"] in ("internal_error", "engine_failed")
                ready, refused = s.get("/health/ready"), s.post("/generate", body)
                assert ready.status_code == 503 and ready.json()["status"] == "failed"
                error_of(refused, 503, "engine_failed")
                was_unready = True
            assert s.process.wait(PATIENCE) == 1
            failed = [line for line in s.read_log().splitlines() if "event=engine_failed" in line]
            assert len(failed) == 1 and str(weights) in failed[0]
            return was_unready

    in_time(is_unready, "a server that has failed and not yet ended")


# ---- what goes wrong at the start: one line, exit 1 --------------------------------------------


def refused(*flags):
    got = subprocess.run([PROGRAM, "serve", *flags], capture_output=True, text=True,
                         timeout=PATIENCE)
    assert got.returncode == 1, got
    lines = got.stderr.splitlines()
    assert len(lines) == 1 and lines[0].startswith("pkmserve: "), got.stderr
    return lines[0]


def test_busy_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        port = s.getsockname()[1]
        line = refused("--model", DEMO, "--host", "127.0.0.1", "--port", str(port))
        assert str(port) in line and "in use" in line


def test_impossible_host():
    assert "no.such.host.invalid" in refused("--model", DEMO, "--host", "no.such.host.invalid",
                                             "--port", "0")


def test_missing_model(tmp_path):
    path = str(tmp_path / "nothing")
    assert path in refused("--model", path, "--host", "127.0.0.1", "--port", "0")


def test_broken_model(tmp_path):
    for name in os.listdir(DEMO):
        if os.path.isfile(os.path.join(DEMO, name)):
            shutil.copy(os.path.join(DEMO, name), tmp_path)
    with open(tmp_path / "model.safetensors", "r+b") as f:
        f.truncate(1000)
    assert "safetensors" in refused("--model", str(tmp_path), "--host", "127.0.0.1", "--port", "0")


@pytest.mark.parametrize("is_file", [True, False], ids=["file", "abstract"])
def test_the_service_manager_is_told(tmp_path, is_file):
    """systemd's protocol: READY=1 once requests are answered, STOPPING=1 when the end begins. A name that is no file
    begins with a zero byte, which the environment writes as @."""
    name = str(tmp_path / "notify") if is_file else "@pkmserve-test-%d" % os.getpid()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(name.replace("@", "\0"))
        manager.settimeout(120)
        server = Server(env={"NOTIFY_SOCKET": name}, wait=False)
        assert manager.recv(100) == b"READY=1"
        assert server.get("/health/ready").status_code == 200
        assert server.stop() == 0
        assert manager.recv(100) == b"STOPPING=1"
