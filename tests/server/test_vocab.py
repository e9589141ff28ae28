"""Models with a vocabulary of words: XLM's text as it was split, and plain text by its codes; and the
shipped model of bytes, from its trainer's figures to generated text."""

import json
import math
import os
import subprocess
import sys

import pytest

from server_harness import PROGRAM, ROOT, Server, events

CASE = os.path.join(ROOT, "tests", "golden", "xlm", "dense12")
BYTES = os.path.join(ROOT, "models", "demo-bytes")
CODES = "f e</w> 2\nc i</w> 1\n"


def convert(folder, *args):
    model = str(folder / "model")
    subprocess.run([sys.executable, os.path.join(ROOT, "models", "convert", "convert.py"),
                    os.path.join(CASE, "checkpoint.pth"), "--output", model, *args], check=True,
                   stdout=subprocess.DEVNULL)
    return model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return convert(tmp_path_factory.mktemp("words"))


@pytest.fixture(scope="module")
def server(model):
    with Server(model=model) as s:
        yield s


@pytest.fixture(scope="module")
def due():
    with open(os.path.join(CASE, "expected.json"), encoding="utf-8") as file:
        return json.load(file)


def test_text_is_the_authors_ids(server, due):
    for row in due["tokenize"]:
        got = server.ok("/tokenize", {"prompt": row["text"] + "\n", "add_special_tokens": False})
        assert got["tokens"] == row["ids"]


def test_a_text_of_many_lines_is_their_stream(server, due):
    for stream in due["stream"]:
        text = "\n".join(stream["text"]) + "\n"
        got = server.ok("/tokenize", {"prompt": text, "add_special_tokens": False})
        assert got["tokens"] == stream["ids"]


def test_a_piece_behind_a_part_of_a_word_has_no_space(server):
    """The tokens of a text, one after the other, are the text; so are their bytes."""
    text = "ka fe da@@ ci da@@ ka"
    echo = {"prompt": text, "max_tokens": 1, "echo": True, "echo_bos": True, "logprobs": 2, "temperature": 0}
    got = server.ok("/v1/completions", {**echo, "prompt_logprobs": 1})["choices"][0]
    tokens = got["logprobs"]["tokens"]
    assert "".join(tokens[1:7]) == " ka fe daci daka", tokens
    assert all(t in tops for t, tops in zip(tokens[1:], got["logprobs"]["top_logprobs"][1:]))
    due = [entry for row in got["prompt_logprobs"][1:] for entry in row.values()
           if entry["decoded_token"] in (" ci", "ci")]
    assert "ci" in [entry["decoded_token"] for entry in due]
    # generated after "da@@": the first token is joined to the prompt
    more = server.ok("/generate", {"prompt": text + " da@@", "max_tokens": 2, "logprobs": 0,
                                   "temperature": 0, "ignore_eos": True})["choices"][0]
    first = bytes(more["logprobs"][0]["bytes"]).decode()
    assert more["text"].startswith(first) and not first.startswith(" "), more


def test_pieces_spans_and_back(server):
    text = "ka  fe da@@\tci"
    got = server.ok("/tokenize", {"inputs": text, "add_special_tokens": False})
    assert [(t["id"], t["text"], t["start"], t["stop"]) for t in got] == [
        (20, "ka", 0, 2), (33, "  fe", 2, 6), (16, " da@@", 6, 11), (47, "\tci", 11, 14)]
    assert server.ok("/detokenize", {"tokens": [20, 33, 16, 47, 1, 3]})["prompt"] \
        == "ka fe daci <unk>"
    info = server.get("/tokenizer_info").json()
    assert info["tokenizer_class"] == "xlm"
    assert server.get("/info").json()["model"]["tokenizer"] == "xlm"


def test_scores_of_text_are_those_of_its_ids(server):
    by_text = server.ok("/score", {"text": ["ka fe ci"], "logprobs": 0})["results"][0]
    by_ids = server.ok("/score", {"tokens": [1, 20, 33, 47], "logprobs": 0})["results"][0]
    assert [t["logprob"] for t in by_text["tokens"]] \
        == [t["logprob"] for t in by_ids["tokens"]][1:]
    assert [t["offset"] for t in by_text["tokens"]] == [0, 2, 5]
    assert by_text["sum_logprob"] == by_ids["sum_logprob"]


def test_generated_text_continues_the_prompt(server):
    def text_of(ids):
        return server.ok("/detokenize", {"tokens": ids})["prompt"]

    body = {"prompt": "ka fe", "max_tokens": 8, "ignore_eos": True, "temperature": 0}
    whole = server.ok("/generate", body)["choices"][0]
    text = whole["text"]
    assert "ka fe" + text == text_of([20, 33, *whole["token_ids"]])
    stop = text[3:6]
    cut = server.ok("/generate", {**body, "stop": stop})["choices"][0]
    assert cut["finish_reason"] == "stop" and cut["text"] == text[:text.index(stop)]
    inside = server.ok("/generate", {**body, "prompt": "ka da@@"})["choices"][0]
    assert "ka da" + inside["text"] == text_of([20, 16, *inside["token_ids"]])
    fresh = server.ok("/generate", {**body, "prompt": [1]})["choices"][0]
    assert fresh["text"] == text_of(fresh["token_ids"])


def test_codes_split_plain_words(tmp_path):
    (tmp_path / "fast").write_text(CODES)
    with Server(model=convert(tmp_path, "--codes", str(tmp_path / "fast"))) as s:
        assert s.get("/info").json()["model"]["tokenizer"] == "xlm-bpe"
        got = s.ok("/tokenize", {"prompt": "ci fe\n", "add_special_tokens": False})
        assert got["tokens"] == [47, 33, 1]
        score = s.ok("/score", {"text": ["ci fe"]})["results"][0]
        assert score["n_tokens"] == 2


@pytest.mark.parametrize("name,change,words", [
    ("vocab.txt", lambda p: p.unlink(), ["vocab.txt", "cannot open"]),
    ("vocab.txt", lambda p: p.write_text(p.read_text() + "more\n"), ["vocab.txt", "201", "200"]),
    ("codes", lambda p: p.write_text("a b\n"), ["codes", "line 1"]),
    ("config.json", lambda p: p.write_text(p.read_text().replace('"xlm"', '"wordpiece"')),
     ["tokenizer", "wordpiece", "xlm"])])
def test_a_damaged_directory_is_refused(name, change, words, tmp_path):
    model = convert(tmp_path)
    change(tmp_path / "model" / name)
    got = subprocess.run([PROGRAM, "inspect", "--model", model], capture_output=True, text=True,
                         check=False)
    assert got.returncode == 1 and got.stderr.count("\n") == 1
    assert all(word in got.stderr for word in words), got.stderr


def test_inspect_names_the_tokenizer(model):
    got = subprocess.run([PROGRAM, "inspect", "--json", "--model", model], capture_output=True,
                         text=True, check=True)
    assert json.loads(got.stdout)["tokenizer"] == "xlm"


# ---- bytes ----


@pytest.fixture(scope="module")
def stream_server():
    with Server("--dtype", "f32", "--threads", "1", model=BYTES) as s:
        yield s


@pytest.fixture(scope="module")
def parity():
    with open(os.path.join(BYTES, "parity.json"), encoding="utf-8") as file:
        return json.load(file)["cases"]


def test_texts_score_as_in_the_trainer(stream_server, parity):
    texts = [case["text"] for case in parity]
    got = stream_server.ok("/score", {"text": texts, "logprobs": 0, "offset_unit": "byte"})
    for case, result in zip(parity, got["results"]):
        first, *rest = result["tokens"]
        assert first["logprob"] is None, "the first byte of a stream is not scored"
        assert [t["id"] for t in result["tokens"]] == case["ids"]
        for token, due in zip(rest, case["logprobs"]):
            assert abs(token["logprob"] - due) <= 1e-4, (token, due)
        bits = -sum(case["logprobs"]) / math.log(2)
        assert abs(result["bits_per_char"] - bits / len(case["text"])) <= 1e-4
        assert abs(result["bits_per_byte"] - bits / len(case["ids"])) <= 1e-4


def test_it_continues_without_end_and_in_whole_characters(stream_server):
    """Hot enough for bytes that are no characters; longer than any window; and the same bits as the
    same bytes scored."""
    body = {"prompt": "caf\u00e9 \u2014 \u65e5\u672c", "max_tokens": 800, "temperature": 2, "seed": 1,
            "logprobs": 0}
    whole = stream_server.ok("/generate", body)
    choice = whole["choices"][0]
    assert whole["usage"]["prompt_tokens"] == len(body["prompt"].encode())
    assert choice["finish_reason"] == "length" and len(choice["token_ids"]) == 800
    assert choice["text"] == bytes(choice["token_ids"]).decode(errors="replace")
    pieces = events(stream_server.post("/generate", {**body, "stream": True}).text)
    assert "".join(piece["text"] for piece in pieces) == choice["text"]
    ids = list(body["prompt"].encode()) + choice["token_ids"]
    again = stream_server.ok("/score", {"tokens": ids, "logprobs": 0})["results"][0]["tokens"]
    assert [t["logprob"] for t in again[-800:]] == [t["logprob"] for t in choice["logprobs"]]


def test_every_text_has_bytes(stream_server):
    text = "".join(map(chr, range(1, 0x100))) + "\u20ac\U0001f600\r\n"
    got = stream_server.ok("/tokenize", {"prompt": text})["tokens"]
    assert bytes(got) == text.encode()
    assert stream_server.ok("/detokenize", {"tokens": got})["prompt"] == text


def test_a_token_behind_half_a_character_has_the_offset_behind_its_replacement(stream_server):
    """The bytes E2 82 turn out to be no character only when the blank follows them."""
    ids = [97, 0xe2, 0x82, 32, 97]
    due = [0, 1, 1, 3, 4]  # the second of the two may still become one character with the first
    legacy = stream_server.ok("/v1/completions", {"prompt": ids, "max_tokens": 0, "echo": True, "logprobs": 0})
    choice = legacy["choices"][0]
    assert choice["text"] == "a\ufffd\ufffd a" and choice["logprobs"]["text_offset"] == due
    own = stream_server.ok("/generate", {"prompt": ids, "max_tokens": 0, "echo": True, "logprobs": 0})
    assert [t["offset"] for t in own["choices"][0]["logprobs"]] == due
    score = stream_server.ok("/score", {"tokens": ids, "logprobs": 0})["results"][0]
    assert [t["offset"] for t in score["tokens"]] == due
    # Each byte E2 that is drawn shows that the one before it began no character.
    body = {"prompt": "a", "max_tokens": 4, "allowed_token_ids": [0xe2], "logprobs": 0}
    drawn = stream_server.ok("/generate", body)["choices"][0]
    assert drawn["text"] == "\ufffd" * 4
    assert [t["offset"] for t in drawn["logprobs"]] == [0, 1, 2, 3]
    streamed = events(stream_server.post("/generate", {**body, "stream": True}).text)
    assert [e["token"]["offset"] for e in streamed if e.get("token")] == [0, 1, 2, 3]
