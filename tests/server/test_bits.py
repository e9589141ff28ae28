"""The same request gives the same bits alone, in a crowd, streamed or not."""

import json
import threading

import pytest

from server_harness import PATIENCE, Server, events

TEXTS = ["The river ran on past the mill.", "He said nothing, and she went away. " * 4,
         "A", "When the bell rang for the third time, all the men stood up and left the hall."]


def requests():
    """Requests of all kinds."""
    for i in range(4):
        text = TEXTS[i]
        yield "/score", {"text": text, "logprobs": 2, "ranks": True}
        yield "/score", {"text": [text, TEXTS[0]], "max_context": 16, "stride": 5, "logprobs": 0}
        yield "/score", {"context": text, "continuations": [" the", " and so on."], "logprobs": 1,
                         "unconditional": True, "target_ids": [300, 267]}
        yield "/generate", {"prompt": text, "max_tokens": 6, "temperature": 0, "logprobs": 3,
                            "ignore_eos": True}
        yield "/generate", {"prompt": text, "max_tokens": 6, "seed": 10 + i, "top_k": 40,
                            "top_p": 0.9, "n": 2, "logprobs": 0, "echo": True,
                            "repetition_penalty": 1.2}
        yield "/generate", {"prompt": text, "max_tokens": 6, "seed": 50 + i, "stream": True,
                            "logprobs": 1, "stop": ["the"], "memory": "summary"}


def essence(path, body, answer):
    """What must not depend on the company: all but ids, times and what the cache saved."""
    assert answer.status_code == 200, answer.text
    if body.get("stream"):
        got = events(answer.text)
        for event in got:
            for name in ("id", "created", "timings"):
                event.pop(name, None)
            event.get("usage", {}).pop("prompt_tokens_details", None)
        return json.dumps(got)
    got = answer.json()
    return json.dumps(got["results"] if path == "/score" else got["choices"])


@pytest.mark.parametrize("weights", [[], ["--dtype", "int8", "--memory-placement", "device"]],
                         ids=["as stored", "int8"])
def test_alone_and_in_a_crowd(weights):
    with Server("--max-batch-tokens", "24", "--max-seqs", "8", *weights) as s:
        model = s.get("/info").json()["model"]
        assert model["dtype"] == ("int8" if weights else "bf16")
        assert model["kv_cache_dtype"] == "bf16"
        work = list(requests())
        alone = [essence(path, body, s.post(path, body)) for path, body in work]
        crowd = [None] * len(work)

        def run(i):
            path, body = work[i]
            crowd[i] = essence(path, body, s.post(path, body))

        for _ in range(2):
            threads = [threading.Thread(target=run, args=(i,)) for i in range(len(work))]
            for t in threads:
                t.start()
            for t in threads:
                t.join(PATIENCE)
            for i, (path, body) in enumerate(work):
                assert crowd[i] == alone[i], "expected %s\ngot %s\nfor %s %s" % (
                    alone[i], crowd[i], path, body)
    with Server(*weights) as s:  # other chunks: the whole prompt in one step
        for i, (path, body) in enumerate(work):
            assert essence(path, body, s.post(path, body)) == alone[i], (path, body)
