"""Streaming: what comes piecewise is what comes whole."""

import json
import signal

import pytest
import requests

from server_harness import FOREVER, PATIENCE, UNBOUNDED, Server, error_of, events

PROMPT = "It was a dark night, and the"

CASES = [
    {"max_tokens": 12, "seed": 5},
    {"max_tokens": 12, "temperature": 0, "logprobs": 2},
    {"max_tokens": 6, "seed": 5, "n": 3},
    {"max_tokens": 5, "seed": 6, "echo": True, "logprobs": 1, "ignore_eos": True},
    {"max_tokens": 0, "echo": True, "logprobs": 0},
    {"max_tokens": 20, "seed": 9, "stop": ["e", " a", "the"], "temperature": 2},
    {"max_tokens": 20, "seed": 9, "stop": ["the "], "include_stop": True, "min_tokens": 5},
    {"max_tokens": 12, "seed": 1, "allowed_token_ids": list(range(4, 260)), "ignore_eos": True},
    {"max_tokens": 4, "allowed_token_ids": [1]},
    {"max_tokens": 3, "memory": "summary", "seed": 2, "ignore_eos": True},
]


@pytest.mark.parametrize("case", CASES, ids=[json.dumps(c)[:40] for c in CASES])
def test_stream_equals_whole(server, case):
    streamed_and_whole(server, {"prompt": PROMPT, **case})


def streamed_and_whole(server, body):
    """What comes of the body in both ways, which must be the same."""
    whole = server.ok("/generate", body)
    answer = server.post("/generate", {**body, "stream": True})
    assert answer.status_code == 200
    got = events(answer.text)
    n = len(whole["choices"])
    for i, choice in enumerate(whole["choices"]):
        mine = [e for e in got if e["index"] == i]
        assert "".join(e["text"] for e in mine) == choice["text"]
        n_prompt = len(mine[0].get("prompt", []))
        tokens = [e["token"] for e in mine if "token" in e]
        assert [t["id"] for t in tokens] == choice["token_ids"][n_prompt:]
        if choice["logprobs"] is not None:
            assert mine[0].get("prompt", []) + tokens == choice["logprobs"]
        end = mine[-1]
        assert end["finish_reason"] == choice["finish_reason"]
        assert end["stop_reason"] == choice["stop_reason"]
        assert end.get("memory") == choice.get("memory")
        assert sum("finish_reason" in e for e in mine) == 1
    assert sum("usage" in e for e in got) == 1 and "usage" in got[-1] and "timings" in got[-1]
    assert got[-1]["usage"] == whole["usage"]
    assert sum("finish_reason" in e for e in got) == n
    return whole["choices"]


def test_a_stop_token_ends_a_stream_without_its_text(server):
    """The first token, and a later one."""
    body = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    free = server.ok("/generate", body)["choices"][0]
    for place in (0, 5):
        stop = free["token_ids"][place]
        choice, = streamed_and_whole(server, {**body, "stop_token_ids": [9, stop]})
        assert choice["stop_reason"] == stop and choice["token_ids"] == free["token_ids"][:free["token_ids"].index(stop) + 1]
        assert free["text"].startswith(choice["text"]) and len(choice["text"]) < len(free["text"])


def test_stream_headers(server):
    answer = server.post("/generate", {"prompt": PROMPT, "max_tokens": 2, "stream": True,
                                       "unheard": 1})
    assert answer.headers["Content-Type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["Cache-Control"] == "no-store"
    assert answer.headers["X-Accel-Buffering"] == "no"
    assert answer.headers["X-Ignored-Fields"] == "unheard"
    assert "x-request-id" in answer.headers and "x-prompt-tokens" in answer.headers


def test_each_token_is_an_event_with_its_logprob(server):
    got = events(server.post("/generate", {"prompt": PROMPT, "max_tokens": 5, "stream": True,
                                           "ignore_eos": True}).text)
    tokens = [e for e in got if "token" in e]
    assert len(tokens) == 5
    for event in tokens:
        assert set(event) == {"index", "token", "text"}
        assert event["token"]["logprob"] <= 0 and isinstance(event["token"]["piece"], str)


def test_errors_before_the_first_token_keep_their_status(server):
    error_of(server.post("/generate", {"prompt": [9999], "stream": True}), 400,
             "token_out_of_range")
    answer = server.post("/generate", {"prompt": PROMPT, "max_tokens": 400, "stream": True,
                                       "timeout_ms": 1})
    assert answer.status_code in (200, 504)  # 200 only if the first token came within 1 ms
    if answer.status_code == 504:
        assert answer.json()["error"]["code"] in ("queue_timeout", "run_timeout")


@pytest.mark.parametrize("path, request_, done", [
    ("/generate", {**FOREVER, "n": 2}, True),
    ("/v1/completions", FOREVER, True),
    ("/generate", {"inputs": PROMPT, "parameters": {"max_new_tokens": 400000, "ignore_eos": True}},
     False)], ids=["native", "openai", "tgi"])
def test_error_after_the_first_token_is_an_event(path, request_, done):
    """The server is ended while the stream runs, which is too long to end before, and waits for nothing."""
    with Server("--shutdown-timeout-s", "0", model=UNBOUNDED) as s:
        with requests.post(s.url + path, json={**request_, "stream": True}, stream=True,
                           timeout=PATIENCE) as answer:
            lines = answer.iter_lines()
            assert b'"error"' not in next(lines)
            s.process.send_signal(signal.SIGTERM)
            parts = [line.decode() for line in lines if line.startswith(b"data: ")]
        assert s.process.wait(PATIENCE) == 0  # a second signal would cut its way out short
    assert (parts[-1] == "data: [DONE]") == done
    error = json.loads(parts[-2 if done else -1][len("data: "):])
    if done:
        assert error["error"]["code"] == "shutting_down"
        assert error["error"]["type"] == "unavailable_error"
    else:
        assert set(error) == {"error", "error_type"}
