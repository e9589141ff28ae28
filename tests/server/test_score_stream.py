"""POST /score with stream: the lines are the results of the whole answer, and come as they are found."""

import json
import signal

import pytest

from server_harness import PATIENCE, Server, error_of, eventually, events, head, in_time, read_to_end

LONG = "In the morning the sun rose over the quiet hills, and the river ran on. " * 60
SHORT = LONG[:400]  # still several windows of 64
SSE = {"Accept": "text/event-stream"}

CASES = [
    {"text": ["a b", "", SHORT, "c"], "max_context": 64, "logprobs": 20, "ranks": True,
     "entropy": True},
    {"text": SHORT, "max_context": 64, "stride": 50},
    {"tokens": [[1, 5, 6], [7]], "target_ids": [5, 9]},
    {"context": "The old man", "continuations": [" went", " slept on"], "unconditional": True},
    {"pairs": [{"context": "a", "continuation": " b"}], "memory": "summary"},
]


@pytest.mark.parametrize("case", CASES, ids=[json.dumps(c)[:40] for c in CASES])
@pytest.mark.parametrize("headers", [{}, SSE], ids=["ndjson", "sse"])
def test_lines_are_the_whole_answer(server, case, headers):
    whole = server.ok("/score", case)
    answer = server.post("/score", {**case, "stream": True}, headers=headers)
    assert answer.status_code == 200
    lines = events(answer.text) if headers else [json.loads(x) for x in answer.text.splitlines()]
    windows = [x for x in lines if "window" in x]
    results = [x for x in lines if "n_tokens" in x]
    last = lines[-1]
    for a, b in zip(results, whole["results"]):
        a.pop("windows"), b.pop("windows")  # positions_computed depends on what is cached
    assert results == whole["results"]
    assert len(lines) == len(windows) + len(results) + 1
    assert set(last) == set(whole) - {"results"}
    for one in (last, whole):
        one["usage"].pop("prompt_tokens_details")  # so does what it had not to compute
    for name in set(last) - {"id", "created", "timings"}:
        assert last[name] == whole[name]
    for i, result in enumerate(results):
        mine = [x["window"] for x in windows if x["index"] == i]
        assert [w["index"] for w in mine] == list(range(len(mine)))
        if mine:
            assert len(mine) == mine[0]["count"] > 1
            assert sum(w["n_scored"] for w in mine) == result["n_scored"]
            assert abs(sum(w["sum_logprob"] for w in mine) - result["sum_logprob"]) < 1e-6
            # All windows of a text stand before its line, all of it before the next text.
            order = [x["index"] for x in lines[:-1]]
            assert order == sorted(order)


def test_heads_of_streams(server):
    for headers, kind in (({}, "application/x-ndjson; charset=utf-8"),
                          ({"Accept": "*/*"}, "application/x-ndjson; charset=utf-8"),
                          ({"Accept": "Text/Event-Stream;q=0.9, */*"},
                           "text/event-stream; charset=utf-8")):
        answer = server.post("/score", {"text": "a b", "stream": True, "unheard": 1},
                             headers=headers)
        assert answer.headers["Content-Type"] == kind
        assert answer.headers["Cache-Control"] == "no-store"
        assert answer.headers["X-Accel-Buffering"] == "no"
        assert answer.headers["X-Ignored-Fields"] == "unheard"
        assert answer.headers["x-prompt-tokens"] == "3"


def test_errors_before_the_first_line_keep_their_status(server):
    error_of(server.post("/score", {"tokens": [9999], "stream": True}), 400, "token_out_of_range")
    answer = server.post("/score", {"text": [LONG] * 40, "stream": True, "timeout_ms": 1})
    # Where it ended depends on the machine: queued, running, or before its body was read, when no field is known.
    assert answer.json()["error"]["code"] in ("queue_timeout", "run_timeout")
    error_of(answer, 504, answer.json()["error"]["code"])


def test_events_have_pings_and_ndjson_has_none():
    with Server("--ping-s", "0.01", "--prefix-cache", "off", "--max-seqs", "1") as s:
        body = {"text": [LONG] * 8, "max_context": 128, "stream": True}
        silent = s.post("/score", body).text.splitlines()
        assert len(silent) > 2 and all(json.loads(line) for line in silent)

        def has_pings():
            with s.post("/score", body, headers=SSE, stream=True) as answer:
                lines = answer.iter_lines()
                first = next(lines)
                # There is room for one sequence, and a generation has it for longer than the quarter of
                # a second after which deadlines are looked at.
                s.ok("/generate", {"prompt": "a", "max_tokens": 500, "ignore_eos": True})
                text = "\n".join(line.decode() for line in [first, *lines]) + "\n"
            assert not text.startswith(":") and len(events(text)) == len(silent)
            return ": ping\n\n" in text

        in_time(has_pings, "a ping while a generation has the only place")


BIG = json.dumps({"text": [LONG] * 200, "stride": 8, "max_context": 256,
                  "stream": True}).encode()


def first_line(s, extra=""):
    """Sends the big request and reads until a line of its stream has come."""
    s.sendall(head("/score", BIG, extra=extra))
    data = b""
    while b'{"index":0' not in data:
        more = s.recv(65536)
        assert more, data
        data += more
        assert data.startswith(b"HTTP/1.1 200 OK"), data
    return data


def test_a_client_that_leaves_ends_the_work():
    with Server() as s:
        connection = s.connect()
        first_line(connection)
        connection.close()
        eventually(lambda: s.metric('requests_cancelled_total{stage="score"}') == 1, "cancelled")
        eventually(lambda: s.metric('requests_total{route="/score",code="499"}') == 1, "counted")
        s.counted("num_requests_running", 0)


@pytest.mark.parametrize("sse", [False, True])
def test_an_error_after_the_first_line_is_a_line(sse):
    with Server("--shutdown-timeout-s", "0") as s:
        connection = s.connect()
        data = first_line(connection, "Accept: text/event-stream\r\n" if sse else "")
        s.process.send_signal(signal.SIGTERM)
        data += read_to_end(connection)
        assert s.process.wait(PATIENCE) == 0  # a second signal would cut its way out short
        assert data.endswith(b"0\r\n\r\n")  # a stream that ended, not one that broke off
        error = json.loads(data[data.index(b'{"error"'):].splitlines()[0])
        assert error["error"]["code"] == "shutting_down" and "request_id" in error
        assert (b"data: [DONE]" in data) == sse
        connection.close()
