"""--cors: which web pages may call the server from a browser. Off unless asked for."""

import subprocess

import pytest
import requests

from server_harness import PATIENCE, PROGRAM, Server

ORIGIN = "https://app.example:8443"
ASK = {"Origin": ORIGIN, "Access-Control-Request-Method": "POST",
       "Access-Control-Request-Headers": "authorization,content-type,x-stainless-os"}


def ask(server, path):
    return requests.options(server.url + path, headers=ASK, timeout=PATIENCE)


def test_without_it_no_page_is_let_in():
    with Server() as s:
        assert ask(s, "/v1/completions").status_code == 405
        answer = s.post("/generate", {"prompt": "a", "max_tokens": 1}, headers={"Origin": ORIGIN})
        assert not [name for name in answer.headers if name.lower().startswith("access-control")]


def test_a_browser_s_question_is_answered_before_it_sends_its_key(tmp_path):
    (tmp_path / "keys").write_text("secret\n")
    with Server("--cors", ORIGIN, "--api-key-file", str(tmp_path / "keys")) as s:
        for path in ("/v1/completions", "/generate", "/score", "/info", "/"):
            answer = ask(s, path)
            assert answer.status_code == 200 and answer.content == b""
            assert answer.headers["Access-Control-Allow-Origin"] == ORIGIN
            assert "POST" in answer.headers["Access-Control-Allow-Methods"]
            allowed = answer.headers["Access-Control-Allow-Headers"].split(", ")
            assert {"*", "Authorization"} == set(allowed)  # * alone does not cover the key
            assert answer.headers["Vary"] == "Origin"
        refused = s.post("/generate", {"prompt": "a"}, headers={"Origin": ORIGIN})
        assert refused.status_code == 401, "the question alone opens nothing"
        assert refused.headers["Access-Control-Allow-Origin"] == ORIGIN, "the page can read why"


def test_answers_streams_and_errors_can_be_read_by_the_page():
    with Server("--cors", "*") as s:
        for path, body in (("/generate", {"prompt": "a", "max_tokens": 1}),
                           ("/generate", {"prompt": "a", "max_tokens": 1, "stream": True}),
                           ("/score", {"text": "It was"}), ("/generate", {"prompt": 5}),
                           ("/nowhere", {})):
            answer = s.post(path, body)
            assert answer.headers["Access-Control-Allow-Origin"] == "*", path
            assert answer.headers["Access-Control-Expose-Headers"] == "*", path
            assert "Vary" not in answer.headers
        assert ask(s, "/nowhere").status_code == 404


@pytest.mark.parametrize("origin", ["example.org", "https://", "https://a/b", "https://a\r\nX: y",
                                    "https://a, https://b", "null"])
def test_what_is_no_origin_is_refused(origin):
    done = subprocess.run([PROGRAM, "serve", "--cors", origin], capture_output=True, text=True)
    assert done.returncode == 2 and "--cors" in done.stderr, done.stderr
