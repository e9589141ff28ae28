"""The rules found by trying libmicrohttpd, and what HTTP asks for. One test per rule."""

import contextlib
import ctypes
import http.client
import json
import os
import re
import resource
import select
import socket
import subprocess
import threading
import time

import pytest

from server_harness import (DEMO, FOREVER, PATIENCE, PROGRAM, UNBOUNDED, Server, error_of, eventually, head, in_time,
                            is_answered, read_answer, read_to_end)

GENERATE = json.dumps({"prompt": "It was", "max_tokens": 2, "temperature": 0}).encode()


@pytest.fixture(scope="module")
def small():
    with Server("--max-body-bytes", "20000") as s:
        yield s


# Rule 1: answers come in the second call, so connections are kept; sizes are refused in the first.


def test_connection_is_kept_alive(server):
    with server.connect() as s:
        for _ in range(3):
            s.sendall(head("/generate", GENERATE))
            status, headers, _ = read_answer(s)
            assert status == 200 and "close" not in headers.get("connection", "")
            s.sendall(head("/health", b"", "GET"))
            assert read_answer(s)[0] == 200


def test_large_content_length_is_refused_before_the_body(small):
    with small.connect() as s:
        s.sendall(b"POST /generate HTTP/1.1\r\nHost: t\r\nContent-Length: 20001\r\n\r\n")
        status, headers, body = read_answer(s)
        assert status == 413 and json.loads(body)["error"]["code"] == "body_too_large"
        assert headers["connection"] == "close" and headers["x-request-id"]
        assert s.recv(10) == b""


@pytest.mark.parametrize("path, lengths, status", [
    ("/generate_stream", [20001], 413), ("/", [20001], 413), ("/generate_stream", [5, 5], 422)])
def test_a_refused_head_has_its_routes_form_and_counts_there(small, path, lengths, status):
    name = 'requests_total{route="%s",code="%d"}' % (path, status)
    before = small.metric(name)
    with small.connect() as s:
        s.sendall(("POST %s HTTP/1.1\r\nHost: t\r\n%s\r\n" % (
            path, "".join("Content-Length: %d\r\n" % n for n in lengths))).encode())
        got, _, body = read_answer(s)
        assert got == status and json.loads(body)["error_type"] == "validation", body
    small.counted(name, before + 1)


def test_large_body_is_refused_also_when_it_is_sent_at_once(small):
    for _ in range(5):  # an early close would reset the connection now and then
        error_of(small.post("/generate", b"x" * 3000000), 413, "body_too_large")


def test_large_chunked_body_is_counted(small):
    def pieces(n):
        for _ in range(n):
            yield b"x" * 1000

    answer = small.session.post(small.url + "/generate", data=pieces(21), timeout=PATIENCE)
    error_of(answer, 413, "body_too_large")
    answer = small.session.post(small.url + "/generate", timeout=PATIENCE,
                                data=iter([GENERATE[:10], GENERATE[10:]]))
    assert answer.status_code == 200


def test_absurd_content_lengths(small):
    for length in (b"99999999999999999999999", b"18446744073709551616", b"9223372036854775807"):
        with small.connect() as s:
            s.sendall(b"POST /generate HTTP/1.1\r\nHost: t\r\nContent-Length: " + length +
                      b"\r\n\r\n")
            assert read_to_end(s).split(b" ")[1] in (b"413", b"400")
    for length in (b"-1", b"x", b"5x", b"+5", b"0x10"):
        with small.connect() as s:
            s.sendall(b"POST /generate HTTP/1.1\r\nHost: t\r\nContent-Length: " + length +
                      b"\r\n\r\nhello")
            assert read_to_end(s).split(b" ")[1] == b"400", length


def library_version():
    version = ctypes.CDLL("libmicrohttpd.so.12").MHD_get_version
    version.restype = ctypes.c_char_p
    return tuple(int(part) for part in version().decode().split("."))


def refusal(got):
    """The error of a single answer 400; or None where libmicrohttpd 1.0 refused the head itself, with a page of HTML."""
    statuses = re.findall(rb"HTTP/1\.1 (\d{3}) ", got)
    body = got.split(b"\r\n\r\n", 1)[1]
    if body.startswith(b"<html>") and library_version() >= (1, 0):
        assert statuses in ([b"400"], [b"501"]), got
        return None
    assert got.startswith(b"HTTP/1.1 400 ") and statuses == [b"400"], got
    return json.loads(body)["error"]


def test_missing_host_gets_one_answer(server):
    with server.connect() as s:
        s.sendall(b"GET /health HTTP/1.1\r\n\r\n")
        error = refusal(read_to_end(s))
        assert error is None or error["param"] == "Host"
    with server.connect() as s:
        s.sendall(b"GET /health HTTP/1.0\r\n\r\n")
        assert read_to_end(s).split(b" ")[1] == b"200"


def test_what_a_proxy_could_read_otherwise_is_400(server):
    """Two hosts, or a length that is none to a reader who wants no space before the colon."""
    for line, code in ((b"Host: u", "invalid_value"),
                       (b"Content-Length : %d" % len(GENERATE), "invalid_value"),
                       (b"Transfer-Encoding\t: chunked", "invalid_value"),
                       (b"X y: z", "invalid_value")):
        with server.connect() as s:
            s.sendall(b"POST /generate HTTP/1.1\r\nHost: t\r\n" + line + b"\r\n\r\n" + GENERATE)
            error = refusal(read_to_end(s))  # and nothing behind it is taken for a request
            assert error is None or error["code"] == code


def test_expect_continue_only_after_the_size_check(small):
    with small.connect() as s:
        s.sendall(head("/generate", b"", extra="").replace(
            b"Content-Length: 0", b"Expect: 100-continue\r\nContent-Length: %d" % len(GENERATE)))
        got = s.recv(100)
        assert got.startswith(b"HTTP/1.1 100")
        s.sendall(GENERATE)
        assert read_answer(s)[0] == 200
    with small.connect() as s:
        s.sendall(b"POST /generate HTTP/1.1\r\nHost: t\r\nExpect: 100-continue\r\n"
                  b"Content-Length: 20001\r\n\r\n")
        assert read_to_end(s).startswith(b"HTTP/1.1 413")


# Rule 2: suspending and resuming never loses a wake.


def test_many_small_requests_at_once(server):
    codes = []

    def run():
        with server.connect() as s:
            for _ in range(5):
                s.sendall(head("/generate", GENERATE))
                codes.append(read_answer(s)[0])

    threads = [threading.Thread(target=run) for _ in range(12)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(PATIENCE)
    assert codes == [200] * 60


def test_pipelined_requests_are_answered_in_order(server):
    with server.connect() as s:
        s.sendall(head("/generate", GENERATE, extra="x-request-id: a\r\n") +
                  head("/health", b"", "GET", "x-request-id: b\r\n") +
                  head("/score", b'{"text": "a b"}', extra="x-request-id: c\r\n"))
        data = b""
        while data.count(b"x-request-id: ") < 3 or not data.endswith(b"\n"):
            more = s.recv(65536)
            assert more
            data += more
        order = [data.index(b"x-request-id: " + c) for c in (b"a", b"b", b"c")]
        assert order == sorted(order)


# Rule 3: a client that leaves a waiting request is noticed.


@pytest.fixture(scope="module")
def unbounded():
    with Server("--max-seqs", "1", model=UNBOUNDED) as s:
        yield s


def leave(server, body=FOREVER, path="/generate"):
    """Sends a request and returns its connection, to be closed before the answer."""
    s = server.connect()
    s.sendall(head(path, json.dumps(body).encode()))
    return s


def test_leaving_a_running_request_stops_it(unbounded):
    name = 'requests_cancelled_total{stage="decode"}'
    before = unbounded.metric(name)
    s = leave(unbounded)
    eventually(lambda: unbounded.metric("num_requests_running") >= 1, "running")
    steps = unbounded.metric("generation_tokens_total")
    eventually(lambda: unbounded.metric("generation_tokens_total") > steps, "decoding")
    s.close()
    eventually(lambda: unbounded.metric(name) == before + 1, "cancelled")
    eventually(lambda: unbounded.metric("num_requests_running") == 0, "idle")
    name = 'requests_total{route="/generate",code="499"}'
    eventually(lambda: unbounded.metric(name) >= 1, "counted")


def test_half_closing_counts_as_leaving(unbounded):
    name = 'requests_cancelled_total{stage="decode"}'
    before = unbounded.metric(name)
    with leave(unbounded) as s:
        eventually(lambda: unbounded.metric("num_requests_running") >= 1, "running")
        steps = unbounded.metric("generation_tokens_total")
        eventually(lambda: unbounded.metric("generation_tokens_total") > steps, "decoding")
        s.shutdown(socket.SHUT_WR)
        eventually(lambda: unbounded.metric(name) == before + 1, "cancelled")


def test_who_half_closes_at_once_is_refused_or_not_answered_and_the_connection_ends():
    """Whether the exchange or the library learns of it, and when, is different each time."""
    def status(server):
        with leave(server) as s:
            s.shutdown(socket.SHUT_WR)
            s.settimeout(60)  # half of --keepalive-s
            return read_to_end(s)[9:12]

    with Server(model=UNBOUNDED) as server:
        assert {status(server) for _ in range(60)} <= {b"", b"429"}  # the others have filled the queue


def test_leaving_a_stream_stops_it(unbounded):
    name = 'requests_cancelled_total{stage="decode"}'
    before = unbounded.metric(name)
    s = leave(unbounded, {**FOREVER, "stream": True})
    data = b""
    while data.count(b"data: ") < 2:
        data += s.recv(4096)
    s.close()
    eventually(lambda: unbounded.metric(name) == before + 1, "cancelled")
    eventually(lambda: unbounded.metric("num_requests_running") == 0, "idle")


def test_leaving_the_queue_and_a_score(unbounded):
    with leave(unbounded):
        eventually(lambda: unbounded.metric("num_requests_running") == 1, "running")
        with leave(unbounded):
            eventually(lambda: unbounded.metric("num_requests_waiting") == 1, "waiting")
        unbounded.counted('requests_cancelled_total{stage="queued"}')
    eventually(lambda: unbounded.metric("num_requests_running") == 0, "idle")
    with leave(unbounded, {"text": "the quick brown fox " * 12000}, "/score"):
        eventually(lambda: unbounded.metric("num_requests_running") == 1, "scoring")
    unbounded.counted('requests_cancelled_total{stage="score"}')
    eventually(lambda: unbounded.metric("num_requests_running") == 0, "idle")


# Long bodies are read by a thread of their own.


def test_long_requests_do_not_hold_up_others(server):
    """Tokenising each takes far longer than all health checks; four would block all http threads."""
    body = json.dumps({"text": "word " * 500000}).encode()

    def health_is_answered_first():
        done = []

        def run():
            done.append(server.post("/score", body).status_code)

        threads = [threading.Thread(target=run) for _ in range(5)]
        for t in threads:
            t.start()
        eventually(lambda: server.metric("http_connections") >= 5 or len(done) == 5, "the uploads")
        for _ in range(8):
            with server.connect() as s:
                s.sendall(head("/health", b"", "GET"))
                assert read_answer(s)[0] == 200
        n_done = len(done)
        for t in threads:
            t.join(PATIENCE)
        assert done == [400] * 5
        return n_done < 5

    in_time(health_is_answered_first, "health checks answered before all long requests")


def test_a_long_prompt_does_not_hold_up_a_short_one():
    with Server(model=UNBOUNDED) as s:
        long = s.connect()  # minutes of prefill
        long.sendall(head("/generate", json.dumps({"prompt": "x " * 2000000}).encode()))
        eventually(lambda: s.metric("engine_steps_total") >= 2, "its prefill")
        assert s.post("/generate", {"prompt": "Hello", "max_tokens": 2}).status_code == 200
        assert s.metric("num_requests_running") == 1
        long.close()


def test_leaving_while_a_long_body_is_read(server):
    name = 'requests_total{route="/score",code="499"}'
    before = server.metric(name)
    text = json.dumps({"text": "the quick brown fox " * 30000}).encode()
    for _ in range(3):
        s = server.connect()
        s.sendall(head("/score", text))
        s.close()
    eventually(lambda: server.metric(name) == before + 3, "all were noticed")
    eventually(lambda: server.metric("num_requests_running") == 0, "idle")


def test_whoever_leaves_before_a_long_body_is_read_costs_nothing():
    body = {"text": "word " * 1000000}

    def they_leave_before():
        with Server("--body-threads", "1") as s, leave(s, {"content": "a" * 1500000}, "/tokenize"):
            eventually(lambda: s.metric("request_body_wait_seconds_count") == 1, "the thread is busy")
            left = [leave(s, body, "/score") for _ in range(8)]
            for c in left:
                c.close()
            with leave(s, body, "/score") as c:
                assert read_answer(c)[0] == 400  # it has more tokens than are taken, once they are counted
            s.counted("long_bodies_unread", 0)
            # Some of the first may have been read before they left.
            n_gone = s.metric('requests_total{route="/score",code="499"}')
            return s.metric("request_tokenize_time_seconds_count") <= 6 and n_gone >= 4

    in_time(they_leave_before, "four of eight bodies that were not read")


SLOW = {"content": "a" * 1200000}  # a text without blanks is slow to tokenise


def test_of_long_bodies_the_shorter_is_read_first():
    def shorter_is_first():
        with Server("--body-threads", "1") as s:
            first = leave(s, SLOW, "/tokenize")
            eventually(lambda: s.metric("request_body_wait_seconds_count") == 1, "the first is read")
            second = leave(s, SLOW, "/tokenize")
            eventually(lambda: s.metric("long_bodies_unread") == 2 or s.metric("request_body_wait_seconds_count") == 2,
                       "the second waits, or did")
            third = leave(s, {"content": "a " * 40000}, "/tokenize")
            assert read_answer(third)[0] == 200
            was_first = not is_answered(second)
            assert read_answer(second)[0] == 200
            s.counted("long_bodies_unread", 0)
            s.counted("request_body_wait_seconds_count", 3)
            first.close(), second.close(), third.close()
            return was_first

    in_time(shorter_is_first, "the shorter one before the longer one that came before it")


@pytest.mark.parametrize("threads, n", [("2", 20000), ("3", 200000)])
def test_one_thread_is_kept_for_the_shorter_of_long_bodies(threads, n):
    def shorter_has_a_thread():
        with Server("--body-threads", threads) as s:
            slow = [leave(s, SLOW, "/tokenize") for _ in range(3)]
            eventually(lambda: s.metric("long_bodies_unread") >= 2 or s.metric("request_body_wait_seconds_count") == 3,
                       "they are here")
            with leave(s, {"text": "a " * n, "timeout_ms": 1}, "/score") as c:
                assert read_answer(c)[0] in (200, 504)
            n_unread = s.metric("long_bodies_unread")
            for c in slow:
                c.close()
            return n_unread >= 1

    in_time(shorter_has_a_thread, "an answer before those to all that came before it")


def test_a_body_that_is_late_is_not_read():
    """It would be refused as no JSON, were it read."""
    late = b'{"timeout_ms" : 1, "text": "' + b"a" * 100000
    with Server("--body-threads", "1") as s:
        first = leave(s, SLOW, "/tokenize")
        eventually(lambda: s.metric("request_body_wait_seconds_count") == 1, "the first is read")
        second = s.connect()
        second.sendall(head("/score", late))
        status, headers, body = read_answer(second)
        assert status == 504 and json.loads(body)["error"]["code"] == "queue_timeout"
        assert headers["x-should-retry"] == "true"
        first.close()


def test_the_time_of_a_long_body_is_read_as_that_of_a_short_one():
    text = json.dumps("a " * 40000)
    with Server("--body-threads", "1", "--max-queue-tokens", "1000000") as s:
        error_of(s.post("/score", b'{"timeout_ms": 0, "text": %s}' % text.encode()), 400, "invalid_value", "timeout_ms")
        before = s.metric("request_body_wait_seconds_count")
        with s.connect() as first, s.connect() as second:
            first.sendall(head("/tokenize", json.dumps({"content": "a" * 300000}).encode()))
            eventually(lambda: s.metric("request_body_wait_seconds_count") == before + 1, "the first is read")
            second.sendall(head("/tokenize", b'{"timeout_ms": 1e5, "content": %s}' % text.encode()))
            assert read_answer(second)[0] == 200
            assert read_answer(first)[0] == 200


def test_the_time_of_a_request_runs_from_its_head_on(server):
    body = json.dumps({"prompt": "A", "max_tokens": 1, "timeout_ms": 500}).encode()
    with server.connect() as c:
        c.sendall(head("/generate", body, extra="Expect: 100-continue\r\n")[:-len(body)])
        assert c.recv(100).startswith(b"HTTP/1.1 100 ")  # the head has been read
        time.sleep(0.7)
        c.sendall(body)
        status, _, answer = read_answer(c)
        assert status == 504 and json.loads(answer)["error"]["code"] == "queue_timeout"


@pytest.mark.parametrize("path,body,code", [
    ("/generate", {"prompt": "a" * 70000}, "context_length_exceeded"),
    ("/score", {"text": "a" * 7000}, "too_many_tokens")])
def test_a_text_that_cannot_fit_is_not_tokenised(path, body, code):
    with Server("--max-score-tokens", "100") as s:
        error_of(s.post(path, body), 400, code)
        assert "token" in s.post(path, body).json()["error"]["message"]


# Rule 4: deadlines of our own.


@pytest.fixture(scope="module")
def strict():
    """Short times: whoever is late by a second has left."""
    with Server("--header-timeout-s", "1", "--body-timeout-s", "1", "--keepalive-s", "2") as s:
        yield s


def test_slow_head_is_cut_off(strict):
    with strict.connect() as s:
        s.sendall(b"GET /health HTTP/1.1\r\nHost: t\r\n")
        begin = time.monotonic()
        try:
            while time.monotonic() - begin < PATIENCE:
                s.sendall(b"a: b\r\n")
                time.sleep(0.1)
            pytest.fail("still open after %d s, the limit is 1 s" % PATIENCE)
        except OSError:
            pass


def test_slow_head_is_cut_off_also_on_a_kept_connection(strict):
    with strict.connect() as s:
        s.sendall(head("/health", b"", "GET"))
        assert read_answer(s)[0] == 200
        begin = time.monotonic()
        try:
            for c in b"GET /health HTTP/1.1\r\nHost: t\r\n" + b"a: b\r\n" * 1000:
                s.sendall(bytes([c]))
                time.sleep(0.1)
                assert time.monotonic() - begin < PATIENCE, "still open, the limit is 1 s"
        except OSError:
            pass


def test_silent_connection_is_closed(strict):
    with strict.connect() as s:
        assert read_to_end(s) == b""


def test_slow_body_gets_408(strict):
    with strict.connect() as s:
        s.sendall(b"POST /generate HTTP/1.1\r\nHost: t\r\nContent-Length: 1000\r\n\r\n{")
        status, headers, body = read_answer(s)
        assert status == 408 and json.loads(body)["error"]["code"] == "body_timeout"
        assert headers["connection"] == "close"


def test_trickling_body_gets_408(strict):
    with strict.connect() as s:
        s.sendall(b"POST /generate HTTP/1.1\r\nHost: t\r\nContent-Length: 1000\r\n\r\n")
        s.setblocking(False)
        data = b""
        end = time.monotonic() + PATIENCE
        while not data:
            assert time.monotonic() < end, "no answer, the limit is 1 s"
            try:
                s.send(b" ")
            except OSError:
                pass
            time.sleep(0.05)
            try:
                data = s.recv(4096)
            except BlockingIOError:
                pass
        assert data.startswith(b"HTTP/1.1 408")


def test_idle_connection_is_closed_in_the_end(strict):
    with strict.connect() as s:
        s.sendall(head("/health", b"", "GET"))
        assert read_answer(s)[0] == 200
        assert s.recv(1) == b""  # after --keepalive-s


def test_keep_alive_time_is_not_that_of_bodies_and_answers():
    large = {"content": "a " * 500000, "with_pieces": True}  # an answer of 13 MB
    with Server("--keepalive-s", "1", "--body-timeout-s", "3") as server:
        with server.connect() as s:
            s.sendall(b"POST /generate HTTP/1.1\r\nHost: t\r\nContent-Length: 1000\r\n\r\n{")
            status, _, body = read_answer(s)  # without a byte for longer than the keep-alive time
            assert status == 408 and json.loads(body)["error"]["code"] == "body_timeout"
        with server.unread("/tokenize", large, 65536) as s:
            select.select([s], [], [])
            time.sleep(3)  # not a byte is read
            status, _, body = read_answer(s)
            assert status == 200 and len(json.loads(body)["tokens"]) > 400000


# Rule 5: over the limit of connections clients get an answer, not silence.


def test_whose_body_is_ended_while_it_is_read_has_not_left():
    body = json.dumps({"text": "word " * 180000}).encode()
    with Server("--max-buffered-bytes", str(1 << 20)) as s:
        for _ in range(20):
            with s.connect() as other, s.connect() as large:
                other.sendall(b"POST /score HTTP/1.1\r\nHost: t\r\nContent-Length: 400000\r\n\r\n" + b" " * 50000)
                eventually(lambda: s.metric("buffered_bytes") >= 50000, "a part of the other")
                large.sendall(head("/score", body))
                other.sendall(b" " * 200000)  # over the limit, while a thread reads the large one, or before
                assert large.recv(12) in (b"", b"HTTP/1.1 429")
            s.counted("buffered_bytes", 0)
        ended = [line for line in s.read_log().splitlines() if "event=request" in line and "prompt_tokens=180004" in line]
        assert all("status=429 code=buffers_full" in line for line in ended), ended


def test_uploads_whose_clients_leave_are_dropped_at_once():
    """The end may come in one event with the last bytes, and the library then does not see it."""
    with Server("--body-timeout-s", "3600") as s:
        for _ in range(40):
            with s.connect() as c:
                c.sendall(b"POST /score HTTP/1.1\r\nHost: t\r\nContent-Length: 900000\r\n\r\n")
                c.sendall(b" " * 300000)
        s.counted("buffered_bytes", 0)
        eventually(lambda: s.metric("http_connections") <= 2, "closed")


@pytest.mark.parametrize("status", [429, 503])
def test_stalled_uploads_cost_their_own_connections(status):
    body = json.dumps({"prompt": "x" * 250, "stop": ["y"], "max_tokens": 1, "user": "u" * 240000}).encode()
    whole = {"prompt": "x", "max_tokens": 1}
    with Server("--max-body-bytes", "262144", "--max-buffered-bytes", str(1 << 20), "--overload-status",
                str(status), model=UNBOUNDED) as s:
        held = [s.connect() for _ in range(6)]  # four of them fit
        for c in held:
            c.sendall(head("/generate", body)[:-1])
        refused = eventually(lambda: (lambda ready: ready if len(ready) == 2 else None)(
            select.select(held, [], [], 0)[0]), "two are refused")
        for c in refused:
            got, headers, answer = read_answer(c)
            assert got == status and json.loads(answer)["error"]["code"] == "buffers_full"
            assert headers["retry-after"] == "1" and headers["retry-after-ms"] == "1000"
        assert s.post("/generate", whole).status_code == 200
        s.counted('requests_rejected_total{reason="buffers_full"}', 2)
        for c in [c for c in held if c not in refused]:  # the others have not noticed
            c.sendall(body[-1:])
            assert read_answer(c)[0] == 200
            c.close()
        s.counted("buffered_bytes", 0)


def all_unread(s, n):
    """n connections whose clients do not read the answers that they have got."""
    held = []
    for _ in range(n):  # one by one: a new one must not take the place of one whose head is not read yet
        held.append(s.unread("/tokenize", {"inputs": "a b " * 100000}))
        assert held[-1].recv(1, socket.MSG_PEEK) == b"H"  # it is answered
    return held


def ask(s, path):
    """Status, headers and body of what a new connection gets."""
    with s.connect() as c:
        c.sendall(head(path, b"", "GET"))
        return read_answer(c)


def test_unread_answers_cost_their_own_connections():
    large = {"inputs": "a b " * 100000}  # an answer of some 9 MB
    with Server("--max-buffered-bytes", str(48 << 20), "--read-window-s", "600") as s:  # slowness is another test's
        held = []
        while s.metric('requests_rejected_total{reason="buffers_full"}') == 0:
            held.append(s.unread("/tokenize", large))
            held[-1].recv(1, socket.MSG_PEEK)  # it is answered
            assert s.post("/tokenize", {"prompt": "x"}).status_code == 200  # nobody else is refused
            assert s.metric("buffered_bytes") <= 48 << 20
            assert len(held) < 30
        for c in held:
            c.close()
        s.counted("buffered_bytes", 0)


@pytest.mark.parametrize("path,body", [
    ("/score", {"text": ["the quick brown fox " * 90] * 20, "logprobs": 20}),
    ("/generate", {"prompt": ["the quick brown fox " * 60] * 20, "max_tokens": 1, "echo": True, "logprobs": 20,
                   "temperature": 0}),
    ("/v1/completions", {"prompt": ["the quick brown fox " * 60] * 20, "max_tokens": 1, "echo": True,
                         "logprobs": 20, "temperature": 0})])
def test_large_answers_are_written_as_they_are_read(server, path, body):
    """In pieces out of the results: none lies in memory whole."""
    one = {name: value[:1] if isinstance(value, list) else value for name, value in body.items()}
    with server.unread(path, body) as c:
        c.recv(1, socket.MSG_PEEK)
        assert server.metric("buffered_bytes") < 1 << 18
        answer = http.client.HTTPResponse(c, method="POST")
        answer.begin()
        data = answer.read()
    assert len(data) > 1 << 20
    results = json.loads(data)["results" if path == "/score" else "choices"]
    first = server.ok(path, one)["results" if path == "/score" else "choices"][0]
    assert len(results) == 20
    for number, each in enumerate(results):
        assert {**each, "index": 0} == {**first, "index": 0}, number


def test_who_takes_next_to_nothing_of_an_answer_is_given_up():
    large = {"inputs": "a b " * 100000}
    with Server("--min-read-rate", "1000000", "--read-window-s", "1") as s:
        with s.unread("/tokenize", large):
            s.counted('requests_rejected_total{reason="slow_reader"}')
            s.counted("buffered_bytes", 0)
        s.logged("code=slow_reader")
        assert [line for line in s.read_log().splitlines() if "code=slow_reader" in line and "/tokenize" in line]
        assert s.post("/tokenize", large).status_code == 200  # who reads, gets all of it


def test_too_many_connections_get_503_but_health_is_answered():
    """All places are in use by requests: a fourth connection is told so, and may ask how the server is."""
    with Server("--max-connections", "3", "--min-read-rate", "0") as server:
        server.session.close()
        held = all_unread(server, 3)
        status, headers, body = ask(server, "/version")
        assert status == 503 and json.loads(body)["error"]["code"] == "too_many_connections"
        assert headers["retry-after"] and headers["connection"] == "close"
        for path, expected in (("/health/live", 200), ("/health/ready", 200), ("/health", 200), ("/metrics", 503)):
            status, headers, _ = ask(server, path)
            assert status == expected and headers["connection"] == "close", path
        for s in held:
            s.close()
        eventually(lambda: server.get("/version").status_code == 200, "connections are free again")


def test_a_connection_too_many_gets_503_also_from_a_client_at_its_limit():
    """429 would say that the server is well and the client asks too much; 503 says to ask another server."""
    with Server("--max-connections", "3", "--max-client-requests", "3", "--min-read-rate", "0") as server:
        server.session.close()
        held = all_unread(server, 3)
        with server.connect() as c:
            c.sendall(head("/generate", b'{"prompt": "A"}'))
            status, headers, body = read_answer(c)
        assert status == 503 and json.loads(body)["error"]["code"] == "too_many_connections"
        assert headers["connection"] == "close"
        for c in held:
            c.close()


def test_slow_uploads_make_room():
    """Who sends heads and then no bodies keeps nobody out: the oldest upload goes, and is told so."""
    with Server("--max-connections", "3") as server:
        server.session.close()
        uploads = []
        for _ in range(3):
            uploads.append(server.connect())
            uploads[-1].sendall(b"POST /tokenize HTTP/1.1\r\nHost: t\r\nContent-Length: 15\r\n"
                                b"Expect: 100-continue\r\n\r\n")
            assert uploads[-1].recv(100).startswith(b"HTTP/1.1 100 ")  # the head has been read
        eventually(lambda: ask(server, "/version")[0] == 200, "a second has passed")
        status, headers, body = read_answer(uploads[0])
        assert status == 503 and json.loads(body)["error"]["code"] == "too_many_connections"
        assert headers["retry-after"] and headers["connection"] == "close"
        for s in uploads[1:]:  # there is room for these again
            s.sendall(b'{"prompt": "x"}')
            assert read_answer(s)[0] == 200
        for s in uploads:
            s.close()


def test_slow_readers_make_room():
    """Who does not read answers keeps nobody out, however much time is left for reading."""
    with Server("--max-connections", "3", "--read-window-s", "600") as server:
        server.session.close()
        held = all_unread(server, 3)
        eventually(lambda: ask(server, "/version")[0] == 200, "a second has passed")
        server.logged("code=slow_reader")
        n_gone = 'requests_rejected_total{reason="slow_reader"}'
        eventually(lambda: server.metric(n_gone) > 0, "it is counted")
        assert server.metric(n_gone) < 3  # not all of them at once
        for s in held:
            s.close()


def test_silent_connections_make_room():
    """Who opens connections and sends nothing keeps nobody out: the oldest of them goes for each new one."""
    with Server("--max-connections", "10", "--header-timeout-s", "300", "--keepalive-s", "3000") as server:
        server.session.close()
        silent = [server.connect() for _ in range(40)]
        try:
            eventually(lambda: sum(bool(select.select([s], [], [], 0)[0]) for s in silent) >= 30, "30 are closed")
            for path in ("/health/live", "/version", "/info"):
                assert ask(server, path)[0] == 200
            with server.connect() as kept:  # and one that is kept goes after those that said nothing
                kept.sendall(head("/version", b"", "GET"))
                assert read_answer(kept)[0] == 200
                more = [server.connect() for _ in range(5)]
                kept.sendall(head("/version", b"", "GET"))
                assert read_answer(kept)[0] == 200
                for s in more:
                    s.close()
        finally:
            for s in silent:
                s.close()


# Rule 6: what the library accepts and we do not.


@pytest.mark.parametrize("target, status", [
    ("http://proxy.example/health/live", 200), ("HTTPS://proxy.example:8443/health/live?deep=0", 200),
    ("http://proxy.example", 200), ("ftp://proxy.example/health/live", 404)])
def test_a_target_may_be_absolute(server, target, status):
    with server.connect() as s:
        s.sendall(head(target, b"", "GET"))
        assert read_answer(s)[0] == status


def test_missing_host_is_400(server):
    with server.connect() as s:
        s.sendall(b"GET /health HTTP/1.1\r\n\r\n")
        assert read_to_end(s).startswith(b"HTTP/1.1 400")


@pytest.mark.parametrize("lengths", [(b"5", b"6"), (b"6", b"5"), (b"5", b"5")])
def test_two_content_lengths_are_400(server, lengths):
    with server.connect() as s:
        s.sendall(b"POST /generate HTTP/1.1\r\nHost: t\r\nContent-Length: %s\r\n"
                  b"content-length: %s\r\n\r\nhello!" % lengths)
        refusal(read_to_end(s))


@pytest.mark.parametrize("lines", [
    b"Content-Length: 14\r\nTransfer-Encoding: chunked\r\n",
    b"Transfer-Encoding: chunked\r\nContent-Length: 14\r\n",
    b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n",
    b"Transfer-Encoding: chunked, identity\r\n", b"Transfer-Encoding: gzip\r\n"])
def test_ambiguous_ends_of_the_body_are_400(server, lines):
    with server.connect() as s:
        s.sendall(b"POST /score HTTP/1.1\r\nHost: t\r\n" + lines + b"\r\n"
                  b"d\r\n{\"text\": \"a\"}\r\n0\r\n\r\n")
        refusal(read_to_end(s))


def test_long_uri_and_large_headers(server):
    with server.connect() as s:
        s.sendall(b"GET /" + b"x" * 100000 + b" HTTP/1.1\r\nHost: t\r\n\r\n")
        assert read_to_end(s)[9:12] in (b"414", b"431", b"")
    with server.connect() as s:
        s.sendall(b"GET /health HTTP/1.1\r\nHost: t\r\na: " + b"x" * 100000 + b"\r\n\r\n")
        assert read_to_end(s)[9:12] in (b"431", b"413", b"")
    assert server.get("/health").status_code == 200


@pytest.mark.parametrize("data", [b"\x00" * 100 + b"\r\n\r\n", b"GET\r\n\r\n", b"\r\n" * 50,
                                  b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
                                  b"GET /health HTTP/9.9\r\nHost: t\r\n\r\n",
                                  b"POST /generate HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: "
                                  b"chunked\r\n\r\nzz\r\n"])
def test_garbage_is_survived(small, data):
    with small.connect() as s:
        s.sendall(data)
        with contextlib.suppress(OSError):  # it has been answered and closed
            s.shutdown(socket.SHUT_WR)
        read_to_end(s)
    assert small.get("/health").status_code == 200


# Rule 7 is about draining: test_life.py.


# Rule 6: descriptors that are used up.


def cpu_s(pid):
    """Seconds of processor time that a process has used."""
    fields = open("/proc/%d/stat" % pid).read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_descriptors_are_raised_to_what_connections_need_or_the_start_ends():
    """As many as --max-connections, 64 that are told that there is no room, and 128 for the rest of the process, which
    may raise what a shell gives it to begin with."""
    got = subprocess.run(["prlimit", "--nofile=256:1215", PROGRAM, "serve", "--model", DEMO, "--port", "0", "--host", "127.0.0.1",
                          "--max-connections", "1024"], capture_output=True, text=True, timeout=PATIENCE)
    assert got.returncode == 1 and got.stderr.splitlines()[-1].endswith(
        "--max-connections 1024 needs 1216 file descriptors, but the process may open 1215: lower it or raise ulimit -n")
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
    try:
        server = Server("--max-connections", "1024", wait=False)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    with server:
        assert resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE)[0] == 1216


def test_without_descriptors_connections_are_closed_not_asked_for_again_and_again():
    with Server("--header-timeout-s", "600") as s:
        n = len(os.listdir("/proc/%d/fd" % s.process.pid))
        most = resource.prlimit(s.process.pid, resource.RLIMIT_NOFILE)[1]
        resource.prlimit(s.process.pid, resource.RLIMIT_NOFILE, (n + 4, most))
        held = [s.connect() for _ in range(30)]

        def n_closed():
            ready, _, _ = select.select(held, [], [], 0)
            return len(ready)

        eventually(lambda: n_closed() >= 26, "those that wait are not left to wait")
        s.logged("event=no_descriptors")
        before = cpu_s(s.process.pid)
        time.sleep(1)
        assert cpu_s(s.process.pid) < before + 0.5
        for c in held:
            c.close()
        resource.prlimit(s.process.pid, resource.RLIMIT_NOFILE, (most, most))
        eventually(lambda: s.ok("/tokenize", {"prompt": "A"}), "it goes on")


def test_paths_that_do_not_exist_are_not_requests_turned_away(server):
    name = 'requests_rejected_total{reason="invalid"}'
    before = server.metric(name)
    assert server.get("/nowhere").status_code == 404 and server.get("/score").status_code == 405
    error_of(server.post("/score", {"text": 1}), 400, "invalid_value")
    server.counted(name, before + 1)
