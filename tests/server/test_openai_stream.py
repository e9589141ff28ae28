"""Completions as a stream: one chunk per token, the same as whole, and what load clients count."""

import json

import pytest

from server_harness import Server, error_of, events, eventually, head

PROMPT = "It was a dark night, and the"

CASES = [
    {"max_tokens": 12, "seed": 5},
    {"max_tokens": 12, "temperature": 0, "logprobs": 2, "ignore_eos": True},
    {"max_tokens": 6, "seed": 5, "n": 3, "logprobs": 0},
    {"max_tokens": 5, "seed": 6, "echo": True, "logprobs": 1, "prompt": ["A", "\u00e9 b"]},
    {"max_tokens": 0, "echo": True, "logprobs": 1},
    {"max_tokens": 4, "echo": True, "seed": 7},
    {"max_tokens": 20, "seed": 9, "stop": ["e", " a", "the"], "temperature": 2},
    {"max_tokens": 20, "seed": 9, "stop": "the ", "include_stop_str_in_output": True},
    {"max_tokens": 12, "seed": 1, "allowed_token_ids": list(range(4, 260)), "ignore_eos": True},
    {"max_tokens": 4, "allowed_token_ids": [1], "logprobs": 1},
    {"max_tokens": 3, "allowed_token_ids": [1], "skip_special_tokens": False, "ignore_eos": True},
]


@pytest.mark.parametrize("case", CASES, ids=[json.dumps(c)[:40] for c in CASES])
def test_stream_equals_whole(server, case):
    body = {"prompt": PROMPT, "return_token_ids": True, **case}
    whole = server.ok("/v1/completions", body)
    answer = server.post("/v1/completions", {**body, "stream": True})
    assert answer.headers["Content-Type"].startswith("text/event-stream")
    got = events(answer.text)
    assert all(set(e) == {"id", "object", "created", "model", "system_fingerprint", "choices"}
               and len(e["choices"]) == 1 and e["object"] == "text_completion" for e in got)
    assert len({e["id"] for e in got}) == 1
    for choice in whole["choices"]:
        mine = [e["choices"][0] for e in got if e["choices"][0]["index"] == choice["index"]]
        # One chunk per token: load clients take each as a sample of the time between tokens.
        assert len(mine) == max(1, len(choice["token_ids"]))
        assert "".join(c["text"] for c in mine) == choice["text"]
        assert sum((c["token_ids"] for c in mine), []) == choice["token_ids"]
        assert mine[0]["prompt_token_ids"] == choice["prompt_token_ids"]
        assert all("prompt_token_ids" not in c for c in mine[1:])
        assert [c["finish_reason"] for c in mine[:-1]] == [None] * (len(mine) - 1)
        assert mine[-1]["finish_reason"] == choice["finish_reason"]
        assert mine[-1]["stop_reason"] == choice["stop_reason"]
        if choice["logprobs"] is None:
            assert all(c["logprobs"] is None for c in mine)
            continue
        for name, values in choice["logprobs"].items():
            assert sum((c["logprobs"][name] for c in mine), []) == values, name


def test_usage_comes_last_in_a_chunk_of_its_own(server):
    body = {"prompt": [PROMPT, "A"], "max_tokens": 3, "ignore_eos": True}
    want = server.ok("/v1/completions", body)["usage"]
    got = events(server.post("/v1/completions", {
        **body, "stream": True, "stream_options": {"include_usage": True}}).text)
    assert got[-1]["choices"] == [] and got[-1]["usage"] == want
    assert all(e["usage"] is None for e in got[:-1]) and len(got) == 7


def test_continuous_usage_counts_up(server):
    got = events(server.post("/v1/completions", {
        "prompt": PROMPT, "max_tokens": 3, "ignore_eos": True, "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True}}).text)
    assert [e["usage"]["completion_tokens"] for e in got] == [1, 2, 3, 3]
    assert len({e["usage"]["prompt_tokens"] for e in got}) == 1


def test_vllm_bench_serve_body(server):
    """As its completions client sends it, and reads the answer line by line."""
    answer = server.post("/v1/completions", {
        "model": "demo", "prompt": PROMPT, "temperature": 0.0, "repetition_penalty": 1.0,
        "max_tokens": 5, "logprobs": None, "stream": True, "ignore_eos": True,
        "stream_options": {"include_usage": True}}, headers={"Authorization": "Bearer "})
    assert answer.status_code == 200 and "X-Ignored-Fields" not in answer.headers
    lines = [line for line in answer.text.split("\n") if line]
    assert all(line.startswith("data: ") for line in lines) and lines[-1] == "data: [DONE]"
    chunks = [json.loads(line[len("data: "):]) for line in lines[:-1]]
    assert sum(bool(c["choices"]) for c in chunks) == 5
    assert chunks[-1]["usage"]["completion_tokens"] == 5


def test_errors_before_the_first_token_keep_their_status(server):
    error_of(server.post("/v1/completions", {"prompt": [9999], "stream": True}), 400,
             "token_out_of_range")


@pytest.fixture(scope="module")
def one_at_a_time():
    with Server("--max-seqs", "1", "--ping-s", "0.05", "--device", "ref") as s:  # the reference is slow anywhere
        yield s


@pytest.mark.parametrize("path", ["/v1/completions", "/generate", "/generate_stream"])
def test_silent_stream_sends_comments_also_before_the_first_token(one_at_a_time, path):
    """It waits behind another request, whose client leaves when two comments have come."""
    s = one_at_a_time
    blocker = s.connect()
    blocker.sendall(head("/generate", json.dumps(
        {"prompt": [300] * 10, "max_tokens": 500, "ignore_eos": True}).encode()))
    eventually(lambda: s.metric("num_requests_running") == 1, "the other request runs")
    body = {"inputs": PROMPT, "parameters": {"max_new_tokens": 2}} if path == "/generate_stream" else {
        "prompt": PROMPT, "max_tokens": 2, "stream": True}
    answer = s.post(path, body, stream=True)
    assert answer.status_code == 200
    text = ""
    for piece in answer.iter_content(None):
        text += piece.decode()
        if text.count(": ping\n\n") >= 2:
            blocker.close()
    assert text.startswith(": ping\n\n: ping\n\n") and "data: {" in text
