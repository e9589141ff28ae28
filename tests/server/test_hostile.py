"""Hostile bodies: a 4xx in the contract's form, never a crash."""

import json

import pytest

from server_harness import error_of

BODIES = {
    "empty": (b"", "invalid_json"),
    "nothing": (b"   ", "invalid_json"),
    "not json": (b"hello", "invalid_json"),
    "cut": (b'{"prompt": "a"', "invalid_json"),
    "rest": (b'{"prompt": "a"} x', "invalid_json"),
    "two": (b'{"prompt": "a"}{"prompt": "b"}', "invalid_json"),
    "list": (b'["prompt"]', "invalid_json"),
    "string": (b'"prompt"', "invalid_json"),
    "number": (b"5", "invalid_json"),
    "single quotes": (b"{'prompt': 'a'}", "invalid_json"),
    "trailing comma": (b'{"prompt": "a",}', "invalid_json"),
    "duplicate": (b'{"prompt": "a", "prompt": "b"}', "invalid_json"),
    "duplicate inside": (b'{"prompt": "a", "logit_bias": {"1": 1, "1": 2}}', "invalid_json"),
    "nan": (b'{"prompt": "a", "temperature": NaN}', "invalid_json"),
    "infinity": (b'{"prompt": "a", "temperature": Infinity}', "invalid_json"),
    "minus infinity": (b'{"prompt": "a", "temperature": -Infinity}', "invalid_json"),
    "huge exponent": (b'{"prompt": "a", "temperature": 1e999}', "invalid_value"),
    "huge integer": (b'{"prompt": "a", "max_tokens": ' + b"9" * 40 + b"}", "invalid_value"),
    "endless integer": (b'{"prompt": "a", "max_tokens": ' + b"9" * 100000 + b"}", "invalid_value"),
    "leading zero": (b'{"prompt": "a", "max_tokens": 01}', "invalid_json"),
    "hex": (b'{"prompt": "a", "max_tokens": 0x10}', "invalid_json"),
    "raw nul": (b'{"prompt": "a\x00b"}', "invalid_json"),
    "nul between": (b'{"prompt":\x00 "a"}', "invalid_json"),
    "escaped nul": (b'{"prompt": "a", "model": "a\\u0000b"}', "invalid_value"),
    "nul in key": (b'{"prompt": "a", "a\\u0000b": 1}', "invalid_json"),
    "raw newline": (b'{"prompt": "a\nb"}', "invalid_json"),
    "latin-1": (b'{"prompt": "\xe9"}', "invalid_utf8"),
    "overlong": (b'{"prompt": "\xc0\xaf"}', "invalid_utf8"),
    "surrogate": (b'{"prompt": "\xed\xa0\x80"}', "invalid_utf8"),
    "above unicode": (b'{"prompt": "\xf5\x80\x80\x80"}', "invalid_utf8"),
    "cut character": (b'{"prompt": "\xe2\x82"}', "invalid_utf8"),
    "invalid in key": (b'{"prompt": "a", "\xff": 1}', "invalid_utf8"),
    "lone surrogate": (b'{"prompt": "\\ud800"}', "invalid_json"),
    "deep lists": (b'{"prompt": ' + b"[" * 100000 + b"]" * 100000 + b"}", "invalid_json"),
    "deep objects": (b'{"a":' * 100000 + b"1" + b"}" * 100000, "invalid_json"),
    "deep enough": (b'{"prompt": ' + b"[" * 500 + b"]" * 500 + b"}", "invalid_value"),
    "utf-16": ('{"prompt": "a"}'.encode("utf-16"), None),
    "binary": (bytes(range(256)) * 16, None),
}


@pytest.mark.parametrize("path", ["/generate", "/score", "/tokenize"])
@pytest.mark.parametrize("name", BODIES)
def test_hostile_body(server, path, name):
    body, code = BODIES[name]
    if path == "/score":
        body = body.replace(b"prompt", b"text").replace(b"max_tokens", b"stride")
    if path == "/tokenize":
        body = body.replace(b"max_tokens", b"add_special_tokens")
    answer = server.post(path, body)
    if code is None:
        assert answer.status_code == 400 and answer.json()["error"]["code"].startswith("invalid_")
    else:
        error_of(answer, 400, code)
    assert server.get("/health").status_code == 200


def test_ten_megabytes_of_text(server):
    body = json.dumps({"prompt": "word " * (2 << 20)})
    error_of(server.post("/generate", body), 413, "body_too_large")
    body = json.dumps({"text": "word " * (1 << 20)})
    error_of(server.post("/score", body), 400, "too_many_tokens")


def test_text_without_blanks_and_odd_characters(server):
    for text in ("x" * 1500, "\u202e\u0301" * 30, "\U0010ffff" * 30, "\ufeff", "\x7f\x01\x1f",
                 "a\u0300" * 50, "</s><s><unk><pad>" * 5):
        got = server.ok("/score", {"text": text, "logprobs": 0})["results"][0]
        assert got["n_chars"] == len(text) and got["n_scored"] == got["n_tokens"] > 0


def test_any_content_type_is_json(server):
    for kind in ("application/x-www-form-urlencoded", "text/plain", "image/png",
                 "multipart/form-data; boundary=x"):
        answer = server.post("/generate", {"prompt": "a", "max_tokens": 1},
                             headers={"Content-Type": kind})
        assert answer.status_code == 200
