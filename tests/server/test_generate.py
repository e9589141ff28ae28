"""POST /generate: the fields of the contract, and what is refused."""

import json
import math

import pytest

from server_harness import UNBOUNDED, Server, error_of, events

PROMPT = "It was a dark night, and the"


def test_answer_has_the_fields_of_the_contract(server):
    answer = server.post("/generate", {"prompt": PROMPT, "max_tokens": 4, "seed": 7})
    got = answer.json()
    assert set(got) == {"id", "object", "created", "model", "choices", "usage", "seed", "timings"}
    assert got["object"] == "generation" and got["model"] == "demo" and got["seed"] == 7
    choice = got["choices"][0]
    assert set(choice) == {"index", "text", "token_ids", "finish_reason", "stop_reason", "logprobs"}
    assert choice["finish_reason"] == "length" and choice["stop_reason"] is None
    assert len(choice["token_ids"]) == 4 and choice["logprobs"] is None
    n_prompt = got["usage"]["prompt_tokens"]
    assert got["usage"] == {"prompt_tokens": n_prompt, "completion_tokens": 4,
                            "total_tokens": n_prompt + 4,
                            "prompt_tokens_details": {"cached_tokens": 0}}
    assert set(got["timings"]) == {"queue_ms", "prefill_ms", "decode_ms", "total_ms",
                                   "prompt_per_second", "predicted_per_second"}
    for name in ("x-queue-time", "x-inference-time", "x-total-time"):
        assert int(answer.headers[name]) >= 0
    assert answer.headers["x-prompt-tokens"] == str(n_prompt)
    assert answer.headers["x-generated-tokens"] == "4"
    assert answer.headers["Content-Type"] == "application/json"


def test_request_id_is_echoed_or_made(server):
    body = json.dumps({"prompt": PROMPT, "max_tokens": 1})
    answer = server.post("/generate", body, headers={"x-request-id": "my-id/7"})
    assert answer.headers["x-request-id"] == "my-id/7" and answer.json()["id"] == "my-id/7"
    first, second = (server.post("/generate", body).headers["x-request-id"] for _ in range(2))
    assert first != second


def test_same_seed_same_text_other_seed_other_text(server):
    def run(seed):
        return server.ok("/generate", {"prompt": PROMPT, "max_tokens": 12, "seed": seed})

    a, b, c = run(1), run(1), run(2)
    assert a["choices"] == b["choices"]
    assert a["choices"] != c["choices"]


def test_absent_seed_is_drawn_and_returned(server):
    a = server.ok("/generate", {"prompt": PROMPT, "max_tokens": 8})
    b = server.ok("/generate", {"prompt": PROMPT, "max_tokens": 8})
    assert a["seed"] != b["seed"]
    assert max(a["seed"], b["seed"]) < 2**53  # which readers of JSON that have doubles alone keep
    again = server.ok("/generate", {"prompt": PROMPT, "max_tokens": 8, "seed": a["seed"]})
    assert again["choices"] == a["choices"]


@pytest.mark.parametrize("seed", [0, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1])
def test_seed_has_64_bits(server, seed):
    got = server.ok("/generate", {"prompt": PROMPT, "max_tokens": 1, "seed": seed})
    assert got["seed"] == seed


def test_prompt_forms_give_the_same(server):
    ids = server.ok("/tokenize", {"prompt": PROMPT})["tokens"]
    greedy = {"max_tokens": 4, "temperature": 0}
    text = server.ok("/generate", {"prompt": PROMPT, **greedy})
    texts = server.ok("/generate", {"prompt": [PROMPT, PROMPT], **greedy})
    by_ids = server.ok("/generate", {"prompt": ids, **greedy})
    id_lists = server.ok("/generate", {"prompt": [ids], **greedy})
    want = text["choices"][0]["token_ids"]
    for got in (texts, by_ids, id_lists):
        assert all(c["token_ids"] == want for c in got["choices"])
    assert [c["index"] for c in texts["choices"]] == [0, 1]
    assert by_ids["usage"]["prompt_tokens"] == len(ids)  # nothing is added to ids


def test_n_samples_differ_and_come_prompt_major(server):
    got = server.ok("/generate", {"prompt": [PROMPT, "Once upon"], "max_tokens": 6, "n": 3,
                                  "seed": 3})
    assert [c["index"] for c in got["choices"]] == list(range(6))
    assert len({tuple(c["token_ids"]) for c in got["choices"]}) > 3
    alone = server.ok("/generate", {"prompt": PROMPT, "max_tokens": 6, "seed": 3})
    assert alone["choices"][0]["token_ids"] == got["choices"][0]["token_ids"]


def test_empty_prompt_starts_from_bos(server):
    got = server.ok("/generate", {"prompt": "", "max_tokens": 2, "temperature": 0})
    assert got["usage"]["prompt_tokens"] == 1


def test_aliases(server):
    for name in ("max_tokens", "max_new_tokens", "n_predict"):
        got = server.ok("/generate", {"prompt": PROMPT, name: 2})
        assert got["usage"]["completion_tokens"] == 2
    got = server.ok("/generate", {"prompt": PROMPT, "max_tokens": 1, "repeat_penalty": 1.5,
                                  "details": True})
    assert got["params"]["repetition_penalty"] == 1.5
    error_of(server.post("/generate", {"prompt": "a", "max_tokens": 1, "max_new_tokens": 1}),
             400, "conflicting_fields")
    error_of(server.post("/generate", {"prompt": "a", "max_tokens": 1, "n_predict": 1}),
             400, "conflicting_fields", "n_predict")


def test_logprobs_list(server):
    got = server.ok("/generate", {"prompt": PROMPT, "max_tokens": 3, "temperature": 0,
                                  "logprobs": 2})
    choice = got["choices"][0]
    assert [t["id"] for t in choice["logprobs"]] == choice["token_ids"]
    for token in choice["logprobs"]:
        assert set(token) == {"id", "piece", "bytes", "offset", "logprob", "rank", "top"}
        assert token["rank"] == 1 and token["top"][0]["id"] == token["id"]
        assert token["top"][0]["logprob"] == token["logprob"] <= 0
        assert choice["text"][token["offset"]:].encode().startswith(bytes(token["bytes"]))
    zero = server.ok("/generate", {"prompt": PROMPT, "max_tokens": 3, "temperature": 0,
                                   "logprobs": 0})["choices"][0]
    assert [t["logprob"] for t in zero["logprobs"]] == [t["logprob"] for t in choice["logprobs"]]
    assert all(t["top"] == [] for t in zero["logprobs"])


def test_echo_gives_the_prompt_and_its_logprobs_as_score_does(server):
    got = server.ok("/generate", {"prompt": PROMPT, "max_tokens": 0, "echo": True, "logprobs": 1})
    choice = got["choices"][0]
    assert choice["text"] == PROMPT and choice["finish_reason"] == "length"
    scored = server.ok("/score", {"text": PROMPT, "logprobs": 1, "ranks": True})
    want = scored["results"][0]["tokens"]
    assert [t["id"] for t in choice["logprobs"]] == [t["id"] for t in want] == choice["token_ids"]
    assert [(t["logprob"], t["rank"], t["offset"], t["top"]) for t in choice["logprobs"]] == \
           [(t["logprob"], t["rank"], t["offset"], t["top"]) for t in want]
    more = server.ok("/generate", {"prompt": PROMPT, "max_tokens": 2, "echo": True, "logprobs": 0,
                                   "temperature": 0})["choices"][0]
    assert more["text"].startswith(PROMPT) and len(more["logprobs"]) == len(want) + 2
    assert more["logprobs"][len(want)]["offset"] == len(PROMPT)


def test_each_choice_has_offsets_of_its_own(server):
    got = server.ok("/generate", {"prompt": PROMPT, "max_tokens": 2, "n": 2, "echo": True, "logprobs": 0, "top_k": 1})
    first, second = (choice["logprobs"] for choice in got["choices"])
    assert first == second and first[0]["offset"] == 0


def test_echo_does_not_cut_characters():
    with Server(model=UNBOUNDED) as s:
        for prompt in ("\u00e9" * 2100, "a" + "\u00e9" * 2100):  # whatever byte a piece ends at
            got = s.ok("/generate", {"prompt": prompt, "max_tokens": 0, "echo": True})
            assert got["choices"][0]["text"] == prompt


def test_echo_of_ids_tells_half_a_character_at_the_end(server):
    ids = server.ok("/tokenize", {"prompt": "A \u2603", "add_special_tokens": False})["tokens"][:-1]
    got = server.ok("/generate", {"prompt": ids, "max_tokens": 0, "echo": True})
    assert got["choices"][0]["text"] == server.ok("/detokenize", {"tokens": ids})["prompt"] == "A \ufffd\ufffd"


def test_the_rate_is_of_the_tokens_that_were_decoded(server):
    """The first one is the prefill's."""
    body = {"prompt": PROMPT, "max_tokens": 20, "ignore_eos": True}
    times = server.ok("/generate", body)["timings"]
    assert times["predicted_per_second"] * times["decode_ms"] / 1000 == pytest.approx(19, rel=1e-3)


def test_echo_of_ids_has_no_logprob_for_the_first(server):
    ids = server.ok("/tokenize", {"prompt": PROMPT, "add_special_tokens": False})["tokens"]
    got = server.ok("/generate", {"prompt": ids, "max_tokens": 0, "echo": True, "logprobs": 1})
    first = got["choices"][0]["logprobs"][0]
    assert first["logprob"] is None and first["rank"] is None and first["top"] == []
    assert got["choices"][0]["text"] == PROMPT


def greedy(server, n=24):
    return server.ok("/generate", {"prompt": PROMPT, "max_tokens": n, "temperature": 0,
                                   "ignore_eos": True})["choices"][0]


def test_stop_string_ends_and_is_cut_also_across_tokens(server):
    whole = greedy(server)
    text = whole["text"]
    stop = text[4:9]  # begins and ends inside tokens
    assert len(stop) == 5 and text.find(stop) == text.index(stop)
    got = server.ok("/generate", {"prompt": PROMPT, "max_tokens": 24, "temperature": 0,
                                  "ignore_eos": True, "stop": stop})["choices"][0]
    assert got["text"] == text[:text.index(stop)]
    assert got["finish_reason"] == "stop" and got["stop_reason"] == stop
    assert got["token_ids"] == whole["token_ids"][:len(got["token_ids"])]
    kept = server.ok("/generate", {"prompt": PROMPT, "max_tokens": 24, "temperature": 0,
                                   "ignore_eos": True, "stop": [stop, "\u2603"],
                                   "include_stop": True})["choices"][0]
    assert kept["text"] == text[:text.index(stop)] + stop


def test_a_stop_string_ends_with_the_last_of_the_min_tokens_but_not_before(server):
    body = {"prompt": PROMPT, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    whole = server.ok("/generate", {**body, "logprobs": 0})["choices"][0]
    pieces = [bytes(token["bytes"]).decode() for token in whole["logprobs"]]
    k = next(k for k in range(3, 24) if whole["text"].index(pieces[k - 1]) == whole["logprobs"][k - 1]["offset"])
    for min_tokens, ends in ((0, True), (k, True), (k + 1, False)):
        got = server.ok("/generate", {**body, "stop": pieces[k - 1], "min_tokens": min_tokens})["choices"][0]
        assert (got["finish_reason"] == "stop" and len(got["token_ids"]) == k) == ends, (min_tokens, got)
        assert ends or len(got["token_ids"]) > k


def test_stop_token_id_ends_and_is_not_shown(server):
    whole = greedy(server)
    stop = whole["token_ids"][2]
    got = server.ok("/generate", {"prompt": PROMPT, "max_tokens": 24, "temperature": 0,
                                  "ignore_eos": True, "stop_token_ids": [stop]})["choices"][0]
    n = whole["token_ids"].index(stop) + 1
    assert got["finish_reason"] == "stop" and got["stop_reason"] == stop
    assert got["token_ids"] == whole["token_ids"][:n]
    shown = server.ok("/generate", {"prompt": PROMPT, "max_tokens": 24, "temperature": 0,
                                    "ignore_eos": True, "stop_token_ids": [stop],
                                    "include_stop": True})["choices"][0]
    assert shown["text"].startswith(got["text"]) and whole["text"].startswith(shown["text"])
    assert len(shown["text"]) > len(got["text"])


def test_eos_is_counted_but_not_shown(server):
    got = server.ok("/generate", {"prompt": PROMPT, "max_tokens": 5, "allowed_token_ids": [1]})
    choice = got["choices"][0]
    assert choice["token_ids"] == [1] and choice["text"] == ""
    assert choice["finish_reason"] == "stop" and got["usage"]["completion_tokens"] == 1


def test_allowed_ids_and_bias_and_min_tokens(server):
    got = server.ok("/generate", {"prompt": PROMPT, "max_tokens": 6, "ignore_eos": True,
                                  "allowed_token_ids": [300, 301, 300]})["choices"][0]
    assert set(got["token_ids"]) <= {300, 301}
    got = server.ok("/generate", {"prompt": PROMPT, "max_tokens": 3, "temperature": 0,
                                  "logit_bias": {"400": 100}})["choices"][0]
    assert got["token_ids"] == [400] * 3
    got = server.ok("/generate", {"prompt": PROMPT, "max_tokens": 4, "min_tokens": 4,
                                  "logit_bias": {"1": 100}, "temperature": 0})["choices"][0]
    assert len(got["token_ids"]) == 4 and 1 not in got["token_ids"][:3]
    got = server.ok("/generate", {"prompt": PROMPT, "max_tokens": 2, "min_tokens": 2, "stop_token_ids": [7],
                                  "logit_bias": {"0": 100}, "temperature": 0})["choices"][0]
    assert got["token_ids"] == [0, 0]  # only what would end the text waits for min_tokens


def test_details_show_what_was_used(server):
    got = server.ok("/generate", {"prompt": PROMPT, "max_tokens": 2.0, "top_k": -1, "top_p": 0.5,
                                  "min_p": 0.25, "stop": "zz", "details": True, "seed": 4})
    params = got["params"]
    assert params["max_tokens"] == 2 and params["top_k"] == 0 and params["top_p"] == 0.5
    assert params["min_p"] == 0.25 and params["stop"] == ["zz"] and params["seed"] == 4


def test_default_max_tokens_shrinks_to_the_context(server):
    context = server.get("/v1/models").json()["data"][0]["max_model_len"]
    got = server.ok("/generate", {"prompt": [300] * (context - 3), "details": True,
                                  "ignore_eos": True})
    assert got["params"]["max_tokens"] == 3 and got["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_long_prompt_leaves_the_others_their_default(server, path, stream):
    """What a prompt is continued with does not depend on those beside it: not its length either."""
    context = server.get("/v1/models").json()["data"][0]["max_model_len"]
    body = {"ignore_eos": True, "seed": 1, "temperature": 0, "stream": stream}
    prompts = [[300, 301], [300] * (context - 3), [302]]

    def texts(prompt):
        got = server.post(path, {**body, "prompt": prompt})
        assert got.status_code == 200, got.text
        if not stream:
            return [(c["text"], c["finish_reason"]) for c in got.json()["choices"]]
        text = {}
        for event in events(got.text):
            for c in event.get("choices", [event]):
                text[c["index"]] = text.get(c["index"], "") + c["text"]
                if c.get("finish_reason"):
                    text[c["index"]] = (text[c["index"]], c["finish_reason"])
        return [text[i] for i in sorted(text)]

    assert texts(prompts) == [texts([p])[0] for p in prompts]
    if not stream:
        default = 16 if path == "/v1/completions" else 128
        usage = server.ok(path, {**body, "prompt": prompts})["usage"]
        assert usage["completion_tokens"] == default + 3 + default
        error_of(server.post(path, {**body, "prompt": prompts, "min_tokens": 4}), 400,
                 "conflicting_fields", "min_tokens")


def test_too_long_names_the_limit(server):
    context = server.get("/v1/models").json()["data"][0]["max_model_len"]
    message = error_of(server.post("/generate", {"prompt": [300] * 10, "max_tokens": context - 9}),
                       400, "context_length_exceeded", "max_tokens")
    assert "max_length=%d" % context in message and "the length of the prompt is 10" in message
    message = error_of(server.post("/generate", {"prompt": "word " * 3000}), 400,
                       "context_length_exceeded", "prompt")
    assert "max_length=%d" % context in message


def test_memory_telemetry(server):
    got = server.ok("/generate", {"prompt": PROMPT, "max_tokens": 3, "temperature": 0,
                                  "ignore_eos": True, "memory": "tokens"})
    layer = got["choices"][0]["memory"]["layers"][0]
    n_position = got["usage"]["total_tokens"]
    assert len(layer["tokens"]) == n_position
    assert layer["lookups"] == n_position * layer["heads"] * layer["knn"]
    for position in layer["tokens"]:
        assert len(position) == layer["heads"]
        for head in position:
            assert len(head["slots"]) == layer["knn"] == len(set(head["slots"]))
            assert head["weights"] == sorted(head["weights"], reverse=True)
            assert abs(sum(head["weights"]) - 1) < 1e-5
    summary = server.ok("/generate", {"prompt": PROMPT, "max_tokens": 3, "temperature": 0,
                                      "ignore_eos": True, "memory": "summary"})
    want = dict(layer)
    del want["tokens"]
    assert summary["choices"][0]["memory"]["layers"] == [want]


WRONG = [
    ({}, "missing_field", "prompt"),
    ({"prompt": None}, "missing_field", "prompt"),
    ({"prompt": 5}, "invalid_value", "prompt"),
    ({"prompt": {}}, "invalid_value", "prompt"),
    ({"prompt": []}, "invalid_value", "prompt"),
    ({"prompt": [[]]}, "invalid_value", "prompt"),
    ({"prompt": ["a", 5]}, "invalid_value", "prompt"),
    ({"prompt": ["a", ["b"]]}, "invalid_value", "prompt"),
    ({"prompt": [5, "a"]}, "invalid_value", "prompt"),
    ({"prompt": [5, True]}, "invalid_value", "prompt"),
    ({"prompt": [1.5]}, "invalid_value", "prompt"),
    ({"prompt": [-1]}, "token_out_of_range", "prompt"),
    ({"prompt": [4096]}, "token_out_of_range", "prompt"),
    ({"prompt": [10**30]}, "token_out_of_range", "prompt"),
    ({"prompt": ["a"] * 65}, "too_many_items", "prompt"),
    ({"prompt": "a", "max_tokens": True}, "invalid_value", "max_tokens"),
    ({"prompt": "a", "max_tokens": "5"}, "invalid_value", "max_tokens"),
    ({"prompt": "a", "max_tokens": 1.5}, "invalid_value", "max_tokens"),
    ({"prompt": "a", "max_tokens": -1}, "invalid_value", "max_tokens"),
    ({"prompt": "a", "max_tokens": 10**19}, "invalid_value", "max_tokens"),
    ({"prompt": "a", "max_tokens": 1e300}, "invalid_value", "max_tokens"),
    ({"prompt": "a", "max_tokens": 2, "min_tokens": 3}, "conflicting_fields", "min_tokens"),
    ({"prompt": "a", "temperature": 2.1}, "invalid_value", "temperature"),
    ({"prompt": "a", "temperature": -0.1}, "invalid_value", "temperature"),
    ({"prompt": "a", "temperature": "hot"}, "invalid_value", "temperature"),
    ({"prompt": "a", "temperature": True}, "invalid_value", "temperature"),
    ({"prompt": "a", "top_p": 0}, "invalid_value", "top_p"),
    ({"prompt": "a", "top_p": 1.01}, "invalid_value", "top_p"),
    ({"prompt": "a", "top_k": -2}, "invalid_value", "top_k"),
    ({"prompt": "a", "top_k": 8193}, "invalid_value", "top_k"),
    ({"prompt": "a", "min_p": 1}, "invalid_value", "min_p"),
    ({"prompt": "a", "repetition_penalty": 0}, "invalid_value", "repetition_penalty"),
    ({"prompt": "a", "repeat_penalty": 11}, "invalid_value", "repeat_penalty"),
    ({"prompt": "a", "presence_penalty": 3}, "invalid_value", "presence_penalty"),
    ({"prompt": "a", "frequency_penalty": -3}, "invalid_value", "frequency_penalty"),
    ({"prompt": "a", "logit_bias": [1]}, "invalid_value", "logit_bias"),
    ({"prompt": "a", "logit_bias": {"x": 1}}, "invalid_value", "logit_bias"),
    ({"prompt": "a", "logit_bias": {"5": "1"}}, "invalid_value", "logit_bias"),
    ({"prompt": "a", "logit_bias": {"5": 101}}, "invalid_value", "logit_bias"),
    ({"prompt": "a", "logit_bias": {"4096": 1}}, "token_out_of_range", "logit_bias"),
    ({"prompt": "a", "logit_bias": {"5": 1, "05": 2}}, "conflicting_fields", "logit_bias"),
    ({"prompt": "a", "logit_bias": {str(i): 1 for i in range(301)}}, "invalid_value",
     "logit_bias"),
    ({"prompt": "a", "allowed_token_ids": []}, "invalid_value", "allowed_token_ids"),
    ({"prompt": "a", "allowed_token_ids": [9999]}, "token_out_of_range", "allowed_token_ids"),
    ({"prompt": "a", "allowed_token_ids": [1] * 1025}, "invalid_value", "allowed_token_ids"),
    ({"prompt": "a", "allowed_token_ids": [1], "min_tokens": 1}, "conflicting_fields", "allowed_token_ids"),
    ({"prompt": "a", "allowed_token_ids": [5], "stop_token_ids": [5], "min_tokens": 1}, "conflicting_fields",
     "allowed_token_ids"),
    ({"prompt": "a", "language": "en"}, "unsupported_parameter", "language"),
    ({"prompt": "a", "lang": "en"}, "unsupported_parameter", "lang"),
    ({"prompt": "a", "seed": -1}, "invalid_value", "seed"),
    ({"prompt": "a", "seed": 2**64}, "invalid_value", "seed"),
    ({"prompt": "a", "seed": 1.5}, "invalid_value", "seed"),
    ({"prompt": "a", "seed": "1"}, "invalid_value", "seed"),
    ({"prompt": "a", "n": 0}, "invalid_value", "n"),
    ({"prompt": "a", "n": 9}, "invalid_value", "n"),
    ({"prompt": "a", "n": 2, "temperature": 0}, "conflicting_fields", "n"),
    ({"prompt": "a", "stop": ""}, "invalid_value", "stop"),
    ({"prompt": "a", "stop": ["a" * 257]}, "invalid_value", "stop"),
    ({"prompt": "a", "stop": ["a"] * 17}, "invalid_value", "stop"),
    ({"prompt": "a", "stop": [5]}, "invalid_value", "stop"),
    ({"prompt": "a", "stop_token_ids": [1] * 65}, "invalid_value", "stop_token_ids"),
    ({"prompt": "a", "stop_token_ids": 5}, "invalid_value", "stop_token_ids"),
    ({"prompt": "a", "ignore_eos": 1}, "invalid_value", "ignore_eos"),
    ({"prompt": "a", "echo": "yes"}, "invalid_value", "echo"),
    ({"prompt": "a", "stream": 0}, "invalid_value", "stream"),
    ({"prompt": "a", "logprobs": 21}, "invalid_value", "logprobs"),
    ({"prompt": "a", "logprobs": True}, "invalid_value", "logprobs"),
    ({"prompt": "a", "priority": "urgent"}, "invalid_value", "priority"),
    ({"prompt": "a", "priority": 1}, "invalid_value", "priority"),
    ({"prompt": "a", "timeout_ms": 0}, "invalid_value", "timeout_ms"),
    ({"prompt": "a", "timeout_ms": 10**9}, "invalid_value", "timeout_ms"),
    ({"prompt": "a", "memory": True}, "invalid_value", "memory"),
    ({"prompt": "a", "memory": "all"}, "invalid_value", "memory"),
    ({"prompt": "a", "max_tokens": 511, "memory": "tokens", "id": 5}, "invalid_value", "id"),
    ({"prompt": "a", "language": "en"}, "unsupported_parameter", "language"),
    ({"prompt": "a", "inputs": "a"}, "wrong_dialect", "inputs"),
    ({"text": "a", "sampling_params": {}}, "wrong_dialect", "sampling_params"),
    ({"text_input": "a"}, "wrong_dialect", "text_input"),
    ({"prompt": "a", "suffix": "b"}, "unsupported_parameter", "suffix"),
    ({"prompt": "a", "best_of": 2}, "unsupported_parameter", "best_of"),
    ({"prompt": "a", "grammar": "b"}, "unsupported_parameter", "grammar"),
]


@pytest.mark.parametrize("body, code, param", WRONG, ids=[json.dumps(w[0])[:50] for w in WRONG])
def test_wrong_field_is_named(server, body, code, param):
    error_of(server.post("/generate", body), 400, code, param)


@pytest.mark.parametrize("body, param", [
    ('{"prompt": "a", "temperature" : 1e999}', "temperature"), ('{"min_p":-1e999,"prompt": "a"}', "min_p"),
    ('{"prompt": [1, 1e999]}', None), ('{"prompt": "x" 1e999}', None), ("1e999", None),
    ('{"prompt": "a", "%s": 1e999}' % ("x" * 60), None)])
def test_a_number_beyond_all_is_named(server, body, param):
    answer = server.post("/generate", body)
    assert "beyond what any field takes" in error_of(answer, 400, "invalid_value")
    assert answer.json()["error"]["param"] == param


def test_the_least_values_are_taken(server):
    server.ok("/generate", {"prompt": [5], "max_tokens": 2, "repetition_penalty": 1e-30, "top_p": 1e-30})


def test_settings_come_back_as_they_were_sent(server):
    sent = {"temperature": 0.7, "top_p": 0.9, "min_p": 0.05, "typical_p": 0.95, "repetition_penalty": 1.1,
            "presence_penalty": 0.3, "frequency_penalty": -1.7}
    params = server.ok("/generate", {"prompt": [5], "max_tokens": 1, "details": True, "logit_bias": {"7": 0.1},
                                     **sent})["params"]
    assert {name: params[name] for name in sent} == sent and params["logit_bias"] == {"7": 0.1}


def test_values_that_are_nearer_to_an_open_end_than_a_float_are_taken(server):
    """Rounded, they would be the end itself."""
    body = {"prompt": "It was", "max_tokens": 4}
    greedy = server.ok("/generate", {**body, "temperature": 0})["choices"][0]["token_ids"]
    for least in ({"top_p": 1e-50}, {"min_p": 0.99999999999}):
        assert server.ok("/generate", {**body, **least})["choices"][0]["token_ids"] == greedy


@pytest.mark.parametrize("written, seed", [("1e19", 10**19), ("1.8446744073709551615e19", 2**64 - 1), ("25.0", 25),
                                           ("9007199254740993.0", 2**53 + 1), ("1" + 20 * "0" + "e-1", 10**19)])
def test_a_whole_number_is_a_seed_however_it_is_written(server, written, seed):
    """1.0 is an integer in all fields; of this one a double would not hold all digits."""
    body = '{"prompt": "a", "max_tokens": 1, "seed": %s}' % written
    assert server.post("/generate", body.encode()).json()["seed"] == seed


@pytest.mark.parametrize("written", ["2e19", "18446744073709551616.0", "-1e19", "9007199254740993.5"])
def test_a_seed_with_a_fraction_or_beyond_64_bits_is_refused(server, written):
    body = '{"prompt": "a", "max_tokens": 1, "seed": %s}' % written
    message = error_of(server.post("/generate", body.encode()), 400, "invalid_value", "seed")
    assert "must be an integer 0 ... 18446744073709551615" in message


@pytest.mark.parametrize("path, body, message", [
    ("/generate", {"prompt": [[5], [4096]]}, "prompt[1][0] is 4096, but token ids are 0 ... 4095"),
    ("/generate", {"prompt": [[], [5]]}, "prompt[0] is an empty list of token ids"),
    ("/generate", {"prompt": [99999999999999999999]}, "prompt[0] is 1e+20, but token ids are 0 ... 4095"),
    ("/score", {"tokens": [[5], [6, 4096]]}, "tokens[1][1] is 4096, but token ids are 0 ... 4095"),
    ("/score", {"pairs": [{"context": "a", "continuation": [5, 4096]}]}, "pairs[0].continuation[1] is 4096, "
     "but token ids are 0 ... 4095"),
    ("/score", {"pairs": [{"context": "a", "continuation": "b", "weight": 1}]},
     "pairs[0].weight: a pair takes context and continuation alone"),
    ("/v1/score", {"query": [5], "items": [[5], [4096]], "label_token_ids": [5]},
     "items[1][0] is 4096, but token ids are 0 ... 4095"),
    ("/v1/score", {"query": [4096], "items": [[5]], "label_token_ids": [5]},
     "query[0] is 4096, but token ids are 0 ... 4095"),
    ("/generate", {"prompt": [5], "n_predict": 600}, "the length of the prompt is 1 and n_predict is 600, together 601 tokens, "
     "but the model's context is 512 (max_length=512): ask for at most 511"),
    ("/generate", {"prompt": [5], "max_new_tokens": 2, "min_tokens": 3}, "min_tokens is 3, but max_new_tokens is 2"),
    ("/generate", {"prompt": [5], "n_predict": 2, "max_new_tokens": 3},
     "max_new_tokens and n_predict mean the same: give one of them"),
    ("/generate", {"prompt": [5] * 513, "max_tokens": 0},
     "the prompt has 513 tokens, but the model's context is 512 (max_length=512): shorten it"),
    ("/generate", {"prompt": [5], "max_tokens": 1.5}, "max_tokens is 1.5, but must be an integer 0 ... 2147483647"),
    ("/generate", {"prompt": [5], "n": 1e300}, "n is 1e+300, but must be an integer 1 ... 8"),
    ("/generate", {"prompt": [5], "n": "2"}, "n must be an integer, not a string"),
    ("/generate", {"prompt": [5], "seed": -1}, "seed is -1, but must be an integer 0 ... 18446744073709551615"),
    ("/generate", {"prompt": [5], "seed": 1.5}, "seed is 1.5, but must be an integer 0 ... 18446744073709551615"),
    ("/generate", {"prompt": [5], "seed": True}, "seed must be an integer, not a boolean"),
    ("/generate", {"prompt": [5], "stop": ["a"] * 17}, "stop has 17 strings, but 16 are the limit"),
    ("/generate", {"prompt": [5], "stop": ["a", "\u00e9" * 129]}, "stop[1] has 258 bytes, but must have 1 ... 256"),
    ("/generate", {"prompt": [5], "stop": ["a", 5]}, "stop[1] must be a string, not an integer"),
    ("/generate", {"prompt": [5], "stop": 5}, "stop must be a string or a list of at most 16 strings, not an integer"),
    ("/generate", {"prompt": [5], "stop_token_ids": [5] * 65}, "stop_token_ids has 65 token ids, but 64 are the limit"),
    ("/generate", {"prompt": [5], "allowed_token_ids": 5},
     "allowed_token_ids must be a list of at most 1024 token ids, not an integer"),
    ("/generate", {"prompt": [5], "logit_bias": {"5": 100.5}},
     "logit_bias of token 5 is 100.5, but must be in [-100, 100]"),
    ("/generate", {"prompt": [5], "logit_bias": {"5": "1"}}, "logit_bias of token 5 must be a number, not a string"),
    ("/generate", {"prompt": [5], "logit_bias": {str(i): 1 for i in range(301)}},
     "logit_bias has 301 entries, but 300 are the limit"),
    ("/score", {"tokens": [5], "target_ids": [5] * 101}, "target_ids must be a list of 1 to 100 token ids, and has 101"),
    ("/generate", {"prompt": [[5], [5] * 513, [6]]}, "prompt[1] has 513 tokens, but the model's context is 512 "
     "(max_length=512), of which at least one is generated: shorten it"),
    ("/v1/completions", {"prompt": [[5], [5] * 2], "max_tokens": 511}, "the length of prompt[1] is 2 and max_tokens is 511, "
     "together 513 tokens, but the model's context is 512 (max_length=512): ask for at most 510"),
    ("/generate", {"prompt": [5], "temperature": 2.0000001}, "temperature is 2.0000001, but must be in [0, 2]"),
    ("/generate", {"prompt": [5], "repeat_penalty": 0}, "repeat_penalty is 0, but must be in (0, 10]"),
    ("/generate", '{"prompt": [5], "temperature": 1e400}', "a number in the body is beyond what any field takes: "
     "real number overflow near '1e400' (line 1, column 36)"),
])
def test_messages_name_what_was_sent_and_where(server, path, body, message):
    assert server.post(path, body).json()["error"]["message"] == message


@pytest.mark.parametrize("path, body", [
    ("/generate", {"prompt": "A", "inputs": None, "sampling_params": None, "text_input": None,
                   "input_ids": None, "max_tokens": 2}),
    ("/generate", {"inputs": "A", "prompt": None, "parameters": {"max_new_tokens": 2}}),
    ("/score", {"text": "A", "text_1": None, "queries": None, "query": None, "items": None}),
    ("/v1/score", {"query": "A", "items": "B", "label_token_ids": [5], "text": None, "text_1": None}),
    ("/tokenize", {"inputs": "A", "prompt": None}),
    ("/tokenize", {"prompt": "A", "inputs": None}),
])
def test_null_is_not_given_in_other_dialects_keys_too(server, path, body):
    answer = server.post(path, body)
    assert answer.status_code == 200 and "X-Ignored-Fields" not in answer.headers, answer.text
    assert isinstance(answer.json(), list) == (path == "/tokenize" and body["prompt"] is None)


def test_wrong_model_is_404(server):
    error_of(server.post("/generate", {"prompt": "a", "model": "other"}), 404, "model_not_found",
             "model")
    server.ok("/generate", {"prompt": "a", "max_tokens": 1, "model": "demo"})


def test_unknown_fields_are_listed(server):
    answer = server.post("/generate", {"prompt": "a", "max_tokens": 1, "user": "me",
                                       "a\r\nb: c": 1, "\u00e9": 2})
    assert answer.status_code == 200
    assert answer.headers["X-Ignored-Fields"] == "user, a%0D%0Ab:%20c, %C3%A9"
    many = server.post("/generate", {"prompt": "a", "max_tokens": 1,
                                     **{"field_%d" % i: i for i in range(500)}})
    assert many.headers["X-Ignored-Fields"].endswith(", ...")
    assert len(many.headers["X-Ignored-Fields"]) <= 1024
    assert "X-Ignored-Fields" not in server.post("/generate", {"prompt": "a",
                                                               "max_tokens": 1}).headers


def test_strict_refuses_unknown_fields_and_trace_off_refuses_tokens():
    with Server("--strict", "--memory-trace", "summary", "--max-logprobs", "3") as s:
        error_of(s.post("/generate", {"prompt": "a", "usr": 1}), 400, "unknown_field", "usr")
        error_of(s.post("/score", {"text": "a", "usr": 1}), 400, "unknown_field", "usr")
        error_of(s.post("/generate", {"prompt": "a", "logprobs": 4}), 400, "invalid_value",
                 "logprobs")
        error_of(s.post("/generate", {"prompt": "a", "memory": "tokens"}), 403,
                 "memory_trace_disabled", "memory")
        s.ok("/score", {"text": "a b", "memory": "summary"})


def test_typical_p_draws_what_is_as_probable_as_expected(server):
    """Of eight allowed tokens, those whose log-probability is nearest to its mean, by hand."""
    allowed = [300, 301, 302, 303, 304, 305, 306, 307]
    targets = server.ok("/score", {"text": PROMPT, "target_ids": allowed})
    logprob = [t["logprob"] for t in targets["results"][0]["target_logprobs"]]
    share = [math.exp(x - max(logprob)) for x in logprob]
    share = [s / sum(share) for s in share]
    mean = sum(s * math.log(s) for s in share)
    order = sorted(range(8), key=lambda i: abs(math.log(share[i]) - mean))
    kept, mass = set(), 0.0
    for i in order:
        if mass >= 0.5:
            break
        kept.add(allowed[i])
        mass += share[i]
    assert 1 <= len(kept) < 8
    drawn = set()
    for seed in range(12):
        got = server.ok("/generate", {"prompt": PROMPT, "max_tokens": 1, "n": 8, "seed": seed,
                                      "allowed_token_ids": allowed, "typical_p": 0.5})
        drawn |= {c["token_ids"][0] for c in got["choices"]}
    assert drawn <= kept and drawn
    params = server.ok("/generate", {"prompt": PROMPT, "max_tokens": 1, "details": True})["params"]
    assert params["typical_p"] == 1
