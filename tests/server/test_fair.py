"""Fair shares: what one client asks for does not keep the others waiting."""

import json
import threading

import pytest
import requests

from server_harness import PATIENCE, Server, error_of, eventually, head

TEXT = "The quick brown fox jumps over the lazy dog. "


@pytest.fixture(scope="module")
def server():
    with Server() as s:
        yield s


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
