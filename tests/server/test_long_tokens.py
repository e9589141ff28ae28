"""Tokens of hundreds and thousands of bytes, more than the buffers that most tokens fit: their text, bytes and offsets,
streamed and whole, and stop strings within them."""

import os
import shutil

import pytest
from server_harness import ROOT, Server, events

GOLDEN = os.path.join(ROOT, os.environ.get("B", "build"), "golden", "knn32")
OTHER, TOKEN = 150, 151  # two whole words of its vocabulary
WORDS = ["ä" * 150 + "STOP" + "b" * 3000, "q" * 4000 + "STOP", "STOP" + "é" * 2000, "x" * 255 + "STOP" + "y", "STOP" * 64]


@pytest.fixture(scope="module", params=range(len(WORDS)))
def word_and_server(request, tmp_path_factory):
    model = shutil.copytree(GOLDEN, tmp_path_factory.mktemp("long") / "model")
    (model / "model.sha256").unlink()
    words = (model / "vocab.txt").read_text().split("\n")
    words[TOKEN] = WORDS[request.param]
    (model / "vocab.txt").write_text("\n".join(words))
    with Server("--max-seqs", "2", model=str(model)) as server:
        yield words[TOKEN], server


@pytest.mark.parametrize("stop", [[], ["STOP"]])
@pytest.mark.parametrize("echo", [False, True])
def test_generated(word_and_server, stop, echo):
    word, server = word_and_server
    body = {"prompt": [20, 21], "max_tokens": 4, "allowed_token_ids": [TOKEN, OTHER], "logit_bias": {str(TOKEN): 100},
            "seed": 3, "stop": stop, "echo": echo, "logprobs": 1}
    whole = server.ok("/generate", body)["choices"][0]
    due = (" " + word) * 4
    due = due[:due.find("STOP")] if stop else due
    assert whole["text"].endswith(due) and (echo or whole["text"] == due)
    assert whole["finish_reason"] == ("stop" if stop else "length")
    drawn = [token for token in whole["logprobs"] if token["id"] == TOKEN]
    assert len(drawn) == (1 if stop else 4) and all(bytes(token["bytes"]).decode() == " " + word for token in drawn)
    got = events(server.post("/generate", {**body, "stream": True}).text)
    assert "".join(event.get("text", "") for event in got) == whole["text"]
    openai = server.ok("/v1/completions", body)["choices"][0]
    assert openai["text"] == whole["text"]
    if not stop:
        assert [b - a for a, b in zip(openai["logprobs"]["text_offset"][-4:], openai["logprobs"]["text_offset"][-3:])] \
            == [1 + len(word)] * 3


def test_read(word_and_server):
    word, server = word_and_server
    text = server.ok("/detokenize", {"tokens": [20, TOKEN, 21]})["prompt"]
    assert word in text and TOKEN in server.ok("/tokenize", {"prompt": text})["tokens"]
    scored = server.ok("/score", {"tokens": [20, TOKEN, 21], "logprobs": 1})["results"][0]
    assert scored["tokens"][2]["offset"] - scored["tokens"][1]["offset"] == 1 + len(word)
    assert scored["n_bytes"] == len(text.encode())
