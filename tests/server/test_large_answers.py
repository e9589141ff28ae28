"""Answers that are larger than a piece: written in pieces, and the same as small ones put together."""

import pytest
import requests

from server_harness import PATIENCE, Server, events

WORDS = "The quick brown fox, caf\u00e9 \u65e5\u672c\u8a9e \U0001f600 "
N = 8000  # an answer of more than three pieces in each form


@pytest.fixture(scope="module")
def server():
    with Server("--max-score-items", "4000") as s:
        yield s


def post(server, path, body, in_pieces):
    answer = requests.post(server.url + path, json=body, timeout=PATIENCE)
    assert answer.status_code == 200, answer.text
    assert (answer.headers.get("Transfer-Encoding") == "chunked") is in_pieces
    assert ("Content-Length" in answer.headers) is not in_pieces
    assert answer.headers["Content-Type"] == "application/json"
    return answer.json()


def test_ids_come_in_pieces(server):
    text = WORDS * N
    ids = post(server, "/tokenize", {"prompt": text, "add_special_tokens": False}, True)["tokens"]
    assert ids == post(server, "/tokenize", {"content": text}, True)["tokens"]
    assert len(ids) > 10 * N
    strings = post(server, "/tokenize", {"prompt": text, "return_token_strs": True}, True)
    assert strings["count"] == len(strings["tokens"]) == len(strings["token_strs"])
    assert strings["tokens"][1:] == ids
    pairs = post(server, "/tokenize", {"content": text, "with_pieces": True, "add_special": True}, True)["tokens"]
    assert [[p["id"], p["piece"]] for p in pairs] == [list(p) for p in zip(strings["tokens"], strings["token_strs"])]


@pytest.mark.parametrize("path, results, few, many", [
    ("/score", "results", {"text": ["The cat " * 40] * 2}, {"text": ["The cat " * 220] * 20}),
    ("/generate", "choices", {"prompt": ["The cat " * 40] * 2, "max_tokens": 1, "temperature": 0},
     {"prompt": ["The cat " * 220] * 20, "max_tokens": 1, "temperature": 0})])
def test_figures_of_many_look_ups_come_in_pieces(server, path, results, few, many):
    """Counting them takes a thread longer than writing them."""
    assert len(post(server, path, {**few, "memory": "summary"}, False)[results]) == 2
    post(server, path, many, False)
    got = post(server, path, {**many, "memory": "summary"}, True)[results]
    assert [result["index"] for result in got] == list(range(20))
    assert all(result["memory"] == got[0]["memory"] for result in got)
    assert sum(result["memory"]["layers"][0]["lookups"] for result in got) > 1 << 20


@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
def test_one_choice_comes_in_pieces(server, path):
    """Its list of tokens is what is long; of each token it says the same as a stream does."""
    body = {"prompt": "The cat " * 200, "max_tokens": 3, "temperature": 0, "echo": True, "logprobs": 20}
    choice, = post(server, path, body, True)["choices"]
    told = [event.get("choices", [event])[0] for event in events(server.post(path, {**body, "stream": True}).text)]
    assert choice["text"] == "".join(each.get("text", "") for each in told)
    if path == "/generate":
        assert choice["logprobs"] == told[0]["prompt"] + [each["token"] for each in told if "token" in each]
    else:
        for name, values in choice["logprobs"].items():
            assert values == sum((each["logprobs"][name] for each in told), [])


def test_a_list_comes_in_pieces_without_a_gap(server):
    text = WORDS * (N // 8)
    entries = post(server, "/tokenize", {"inputs": text}, True)
    assert entries[0]["start"] == entries[0]["stop"] == 0 and entries[-1]["stop"] == len(text)
    assert all(a["stop"] == b["start"] for a, b in zip(entries, entries[1:]))
    ids = post(server, "/tokenize", {"prompt": text}, True)["tokens"]
    assert [entry["id"] for entry in entries] == ids


def test_a_text_comes_in_pieces_cut_between_characters(server):
    ids = post(server, "/tokenize", {"prompt": WORDS * N, "add_special_tokens": False}, True)["tokens"]
    text = post(server, "/detokenize", {"tokens": ids}, True)
    assert text["prompt"] == text["content"] == WORDS * N
    assert post(server, "/detokenize", {"tokens": []}, False) == {"prompt": "", "content": ""}


def test_nothing_has_both_lists(server):
    got = post(server, "/tokenize", {"prompt": "", "add_special_tokens": False, "return_token_strs": True}, False)
    assert got["tokens"] == got["token_strs"] == []


def test_labels_come_in_pieces(server):
    labels = list(range(100))
    some = post(server, "/v1/score", {"query": [5], "items": [[6], [7]], "label_token_ids": labels}, False)["scores"]
    many = post(server, "/v1/score", {"query": [5], "items": [[6], [7]] * 60, "label_token_ids": labels}, True)
    assert many["scores"] == some * 60 and many["usage"]["prompt_tokens"] > 0


def test_an_error_is_still_an_error(server):
    for path, body, status in (("/tokenize", {"inputs": 5}, 422), ("/tokenize", {}, 400), ("/detokenize", {}, 400),
                               ("/detokenize", {"tokens": [10 ** 8]}, 400)):
        answer = requests.post(server.url + path, json=body, timeout=PATIENCE)
        assert answer.status_code == status and "error" in answer.json(), answer.text
