"""A model without a tokenizer, with two languages and two memories: ids in, ids out."""

import json
import math
import os
import subprocess
import sys

import pytest

from server_harness import ROOT, Server, error_of, events

SOURCE = os.path.join(ROOT, "tests", "golden", "xlm", "pkm12-2mem", "checkpoint.pth")
IDS = [1, 20, 30, 40, 50, 60]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    model = str(tmp_path_factory.mktemp("model") / "two")
    subprocess.run([sys.executable, os.path.join(ROOT, "models", "convert", "convert.py"), SOURCE,
                    "--output", model], check=True, stdout=subprocess.DEVNULL)
    path = os.path.join(model, "config.json")
    with open(path, encoding="utf-8") as file:
        config = json.load(file)
    del config["tokenizer"]
    with open(path, "w", encoding="utf-8") as file:
        json.dump(config, file)
    with Server("--served-model-name", 'tw"o\\', model=model) as s:
        yield s


def test_text_is_refused_by_saying_so(server):
    for path, body, param in (("/generate", {"prompt": "a"}, "prompt"),
                              ("/score", {"text": ["a"]}, "text"),
                              ("/score", {"context": "a", "continuations": [[5]]}, "context"),
                              ("/score", {"context": [5], "continuations": ["a"]},
                               "continuations"),
                              ("/v1/score", {"query": "a", "items": ["b"],
                                             "label_token_ids": [5]}, "query"),
                              ("/generate", {"prompt": IDS, "stop": "a"}, "stop"),
                              ("/tokenize", {"prompt": "a"}, None),
                              ("/detokenize", {"tokens": [5]}, None)):
        assert "no tokenizer" in error_of(server.post(path, body), 400, "unsupported_parameter",
                                          param)
    assert "no tokenizer" in error_of(server.get("/tokenizer_info"), 400, "unsupported_parameter")


def test_generation_gives_ids_and_no_text(server):
    body = {"prompt": IDS, "max_tokens": 4, "seed": 1, "logprobs": 1, "echo": True,
            "ignore_eos": True}
    choice = server.ok("/generate", body)["choices"][0]
    assert choice["text"] is None and choice["token_ids"][:6] == IDS
    assert len(choice["token_ids"]) == 10
    for token in choice["logprobs"]:
        assert token["piece"] is None and token["offset"] is None
    streamed = events(server.post("/generate", {**body, "stream": True}).text)
    assert [e["token"]["id"] for e in streamed if "token" in e] == choice["token_ids"][6:]


def test_completions_spell_tokens_by_their_ids(server):
    got = server.ok("/v1/completions", {"prompt": [IDS], "max_tokens": 2, "logprobs": 2, "echo": True,
                                        "return_token_ids": True, "ignore_eos": True,
                                        "language": "fr"})["choices"][0]
    assert got["text"] == "" and got["logprobs"]["text_offset"] == [0] * 8
    assert got["logprobs"]["tokens"] == ["token_id:%d" % i for i in IDS + got["token_ids"]]
    answer = server.post("/generate", {"inputs": "a"})
    assert answer.status_code == 422 and "no tokenizer" in answer.json()["error"]


def test_scores_have_what_needs_no_text(server):
    got = server.ok("/score", {"tokens": [IDS, IDS[:3]], "logprobs": 0})
    result = got["results"][0]
    assert result["n_scored"] == 5 and result["perplexity"] > 1
    for name in ("n_bytes", "n_words", "n_chars", "bits_per_byte", "bits_per_char",
                 "word_perplexity"):
        assert result[name] is None, name
    assert got["aggregate"]["n_bytes"] is None and got["aggregate"]["perplexity"] > 1
    units = server.ok("/score", {"tokens": IDS, "units": {"bytes": 9, "words": 2}})["results"][0]
    assert units["bits_per_byte"] > 0 and units["word_perplexity"] > 1


def test_endings_are_ranked_without_text(server):
    got = server.ok("/score", {"context": IDS[:4], "continuations": [[50, 60], [70]],
                               "unconditional": True, "target_ids": [9]})
    assert got["ranking"]["per_char"] is None and got["ranking"]["per_byte"] is None
    assert got["ranking"]["sum"] in (0, 1) and got["ranking"]["mutual_information"] in (0, 1)
    assert got["results"][0]["n_bytes"] is None
    assert got["results"][0]["target_logprobs"][0]["piece"] is None
    streamed = server.post("/score", {"tokens": IDS, "stream": True}).text.splitlines()
    assert len(streamed) == 2


def test_language_by_name_and_id(server):
    def score(**kw):
        return server.ok("/score", {"tokens": IDS, **kw})["results"][0]["sum_logprob"]

    assert score() == score(language="en") == score(language=0)
    assert score(language="fr") == score(lang=1) != score()
    english = server.ok("/generate", {"prompt": IDS, "max_tokens": 3, "temperature": 0,
                                      "logprobs": 0})
    french = server.ok("/generate", {"prompt": IDS, "max_tokens": 3, "temperature": 0,
                                     "logprobs": 0, "language": "fr"})
    assert english["choices"] != french["choices"]
    labels = {"query": IDS, "items": [[]], "label_token_ids": [5, 9], "apply_softmax": False}
    for lang in (0, 1):
        got = server.ok("/v1/score", {**labels, "lang": lang})["scores"][0]
        due = server.ok("/score", {"tokens": IDS, "target_ids": [5, 9], "lang": lang})["results"][0]
        assert got == pytest.approx([math.exp(t["logprob"]) for t in due["target_logprobs"]], rel=1e-6)
    assert got != pytest.approx(server.ok("/v1/score", labels)["scores"][0], rel=1e-3)
    for wrong, shown in (("de", '"de"'), (2, "2"), (-1, "-1"), (True, "a boolean"), (1.5, "1.5"),
                         (["en"], "a list"), ("d\0", "a string")):
        message = error_of(server.post("/score", {"tokens": IDS, "language": wrong}), 400,
                           "invalid_value", "language")
        assert message == "language is %s, but must be an id 0 ... 1 or one of: en, fr" % shown


def test_telemetry_of_two_memories(server):
    layers = server.ok("/score", {"tokens": IDS, "memory": "tokens"})["results"][0]["memory"]["layers"]
    assert [(m["layer"], m["place"], m["slots"]) for m in layers] == [(4, "in", 256), (8, "in", 256)]
    assert all(len(m["tokens"]) == len(IDS) for m in layers)
    lookups = server.metric('memory_lookups_total{layer="8"}')
    server.ok("/score", {"tokens": IDS})
    assert server.metric('memory_lookups_total{layer="8"}') > lookups


def test_odd_model_name_everywhere(server):
    name = 'tw"o\\'
    assert server.get("/v1/models").json()["data"][0]["id"] == name
    assert server.get("/v1/models/tw%22o%5C").status_code == 200
    assert server.ok("/score", {"tokens": IDS, "model": name})["model"] == name
    assert 'model_name="tw\\"o\\\\"' in server.get("/metrics").text


def test_tokens_outside_the_vocabulary(server):
    error_of(server.post("/score", {"tokens": [203]}), 400, "token_out_of_range", "tokens")
    error_of(server.post("/generate", {"prompt": [203]}), 400, "token_out_of_range", "prompt")
