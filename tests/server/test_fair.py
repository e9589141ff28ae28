"""Fair shares: what one client asks for does not keep the others waiting."""

import json
import re
import socket

import pytest

from server_harness import (FOREVER, PROGRAM, UNBOUNDED, Server, error_of, eventually, head, in_time, is_answered,
                            read_answer)

TEXT = "The quick brown fox jumps over the lazy dog. "


@pytest.fixture(scope="module")
def server():
    with Server() as s:
        yield s


def test_one_address_behind_a_proxy_leaves_others_a_place_in_the_queue():
    flags = ("--max-seqs", "1", "--max-queue", "8", "--max-queue-tokens", "10000000", "--trusted-proxies", "127.0.0.0/8")
    with Server(*flags, model=UNBOUNDED) as s:
        held = []

        def begin(address, **more):
            held.append(s.connect())
            held[-1].sendall(head("/generate", json.dumps({**FOREVER, **more}).encode(),
                                  extra="X-Forwarded-For: %s\r\n" % address))
            return held[-1]

        begin("192.0.2.1")
        eventually(lambda: s.metric("num_requests_running") == 1, "one runs")
        for n in range(1, 8):
            begin("192.0.2.1")
            eventually(lambda: s.metric("num_requests_waiting") == n, "%d wait" % n)
        status, _, body = read_answer(begin("192.0.2.1", timeout_ms=60000))
        assert status == 429 and "of this client" in json.loads(body)["error"]["message"], (status, body)
        begin("192.0.2.2")
        eventually(lambda: s.metric("num_requests_waiting") == 8, "another one waits, too")
        for connection in held:
            connection.close()


LARGE = {
    "windows": ("/score", {"text": TEXT * 300, "stride": 1}),
    "bulk windows": ("/score", {"text": TEXT * 300, "stride": 1, "priority": "bulk"}),
    "samples": ("/generate", {"prompt": ["A", "B", "C", "D"] * 16, "n": 8, "max_tokens": 300,
                              "ignore_eos": True}),
}


@pytest.mark.parametrize("kind", LARGE)
def test_a_large_request_holds_up_nobody(server, kind):
    path, body = LARGE[kind]
    with server.connect() as large:
        large.sendall(head(path, json.dumps(body).encode()))
        eventually(lambda: server.metric("num_requests_running") == 1, "the large request")
        small = {"prompt": "Hello", "max_tokens": 1, "priority": body.get("priority", "interactive")}
        assert server.post("/generate", small).status_code == 200
        assert server.metric("num_requests_running") == 1  # the large one is not over
    eventually(lambda: server.metric("num_requests_running") == 0, "an end")


def test_positions_are_the_measure_of_a_score():
    with Server("--max-score-positions", "10000") as s:
        body = {"text": TEXT * 20, "stride": 8, "max_context": 128}
        assert s.post("/score", body).status_code == 200
        body["stride"] = 1
        answer = s.post("/score", body)
        message = error_of(answer, 400, "too_many_tokens", "stride")
        assert "but 10000 are the limit of one request (--max-score-positions)" in message
        assert s.get("/info").json()["limits"]["max_score_positions"] == 10000


def resident(server):
    return int(re.search(r"VmRSS:\s+(\d+) kB",
                         open("/proc/%d/status" % server.process.pid).read())[1]) * 1024


SANITIZED = bool({"asan", "tsan"} & set(PROGRAM.split("/")))


def burst(server, path, body, n):
    """n requests at once that wait in the queue, and then leave."""
    held = [server.connect() for _ in range(n)]
    for connection in held:
        connection.sendall(head(path, json.dumps(body).encode()))
    eventually(lambda: server.metric("num_requests_waiting") >= n // 2, "a queue")
    most = resident(server)
    for connection in held:
        connection.close()
    eventually(lambda: server.metric("num_requests_waiting") <= 1, "the others' end")
    return most


@pytest.mark.skipif(SANITIZED, reason="a sanitizer has an allocator of its own")
def test_resident_memory_returns_after_a_burst(huge_pages):
    """The reviewed burst: bodies of 1.3 kB that held 49 MB each while they waited. Without huge pages less of what was
    reserved at start is resident before it."""
    with Server("--max-seqs", "1") as s:
        s.post("/score", {"text": ["a"] * 250, "memory": "summary"})
        before = resident(s)
        blocker = s.connect()
        endless = {"text": TEXT * 300, "stride": 1, "priority": "interactive"}
        blocker.sendall(head("/score", json.dumps(endless).encode()))
        eventually(lambda: s.metric("num_requests_running") == 1, "the one that holds the others up")
        summary = {"text": ["a"] * 250, "memory": "summary", "priority": "bulk"}
        many = {"prompt": list(range(8, 200)), "max_tokens": 300, "n": 8, "logprobs": 20,
                "priority": "bulk"}
        for path, body in (("/score", summary), ("/generate", many)) * 2:
            most = burst(s, path, body, 60)
            assert most < before + (100 << 20)
        blocker.close()
        eventually(lambda: s.metric("num_requests_running") == 0, "an end")
        parsed = b'{"prompt": [' + b"{}," * 1000000 + b"{}]}"
        assert s.post("/generate", parsed).status_code == 400
        eventually(lambda: resident(s) < 1.2 * before, "the memory's return")


def test_unread_results_are_counted_and_bounded():
    """Results stay counted until they are read; then queue_memory_full is over."""
    text = TEXT * 40
    with Server("--max-request-bytes", "200000") as s:
        body = {"text": text, "logprobs": 20, "stream": True}
        assert s.post("/score", dict(body, logprobs=2, stream=False)).status_code == 200
        message = error_of(s.post("/score", dict(body, text=[text] * 8)), 400, "invalid_value")
        assert "(--max-request-bytes) is 200000" in message
        held, refusals = 'request_memory_bytes{kind="results"}', 'requests_rejected_total{reason="queue_memory_full"}'

        def is_refused():
            with s.connect() as blocker:
                blocker.sendall(head("/generate", json.dumps(
                    {"prompt": [8] * 100, "max_tokens": 400, "n": 8, "logprobs": 5,
                     "ignore_eos": True, "temperature": 1}).encode()))
                eventually(lambda: s.metric(held) > 100000 or is_answered(blocker), "arrays")
                answer = s.post("/score", body)
                if answer.status_code == 200:
                    return False
                error_of(answer, 429, "queue_memory_full")
                s.counted(refusals, 1)
                return True

        in_time(is_refused, "a score beside results that nobody reads")
        eventually(lambda: s.metric(held) == 0, "an end")
        assert s.post("/score", body).status_code == 200


@pytest.mark.parametrize("flag,body", [
    ("--max-request-bytes", {"logprobs": 20, "entropy": True, "memory": "tokens"}),
    ("--memory-trace-bytes", {"memory": "tokens", "logprobs": 20})])
def test_unread_results_keep_nobody_out(flag, body):
    """What a client has asked for and does not read is given up once others need its memory."""
    most = {"--max-request-bytes": 600000, "--memory-trace-bytes": 3 << 20}[flag]  # of one such request, not of two
    body = {"text": [TEXT * 40] * 5, **body}
    with Server(flag, str(most), "--min-read-rate", "0") as s, s.unread("/score", body) as unread:
        unread.recv(1, socket.MSG_PEEK)
        kind = "traces" if "trace" in flag else "results"
        assert s.metric('request_memory_bytes{kind="%s"}' % kind) > most / 2
        assert s.metric('requests_rejected_total{reason="buffers_full"}') == 0
        eventually(lambda: s.post("/score", {**body, "timeout_ms": 20000}).status_code == 200, "room for others")
        s.counted('requests_rejected_total{reason="buffers_full"}', 1)
        eventually(lambda: any("path=\"/score\"" in line and "code=buffers_full" in line
                               for line in s.read_log().splitlines()), "a line of the log")
