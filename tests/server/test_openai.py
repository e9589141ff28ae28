"""POST /v1/completions, as the clients of OpenAI's and vLLM's servers send it and read it."""

import json
import math

import pytest

from server_harness import UNBOUNDED, Server, error_of, events

PROMPT = "It was a dark night, and the"
GREEDY = {"temperature": 0, "ignore_eos": True}


def complete(server, prompt=PROMPT, **fields):
    return server.ok("/v1/completions", {"model": "demo", "prompt": prompt, **fields})


def ids_of(server, text, special=False):
    return server.ok("/tokenize", {"prompt": text, "add_special_tokens": special})["tokens"]


# ---- the answer ---------------------------------------------------------------------------------


def test_answer_has_the_layout_of_a_completion(server):
    got = complete(server, max_tokens=4, **GREEDY)
    assert set(got) == {"id", "object", "created", "model", "system_fingerprint", "choices", "usage"}
    assert got["id"].startswith("cmpl-") and got["object"] == "text_completion"
    assert got["system_fingerprint"].startswith("fp_") and got["model"] == "demo"
    choice, = got["choices"]
    assert set(choice) == {"index", "text", "logprobs", "finish_reason", "stop_reason"}
    assert choice["logprobs"] is None and choice["finish_reason"] == "length"
    usage = got["usage"]
    assert usage["completion_tokens"] == 4
    assert usage["prompt_tokens"] == len(ids_of(server, PROMPT, special=True))
    assert usage["total_tokens"] == usage["prompt_tokens"] + 4
    native = server.ok("/generate", {"prompt": PROMPT, "max_tokens": 4, **GREEDY})
    assert choice["text"] == native["choices"][0]["text"]
    assert complete(server, max_tokens=1)["system_fingerprint"] == got["system_fingerprint"]


@pytest.mark.parametrize("fields", [{}, {"max_tokens": None}])
def test_max_tokens_is_16_by_default(server, fields):
    assert complete(server, ignore_eos=True, **fields)["usage"]["completion_tokens"] == 16


def test_default_max_tokens_shrinks_to_the_context_but_an_asked_one_is_refused(server):
    prompt = [300] * 507
    assert complete(server, prompt, ignore_eos=True)["usage"]["completion_tokens"] == 5
    message = error_of(server.post("/v1/completions", {"prompt": prompt, "max_tokens": 6}), 400,
                       "context_length_exceeded", "max_tokens")
    assert "max_length=512" in message


def test_request_id_is_part_of_the_id(server):
    assert complete(server, max_tokens=1, request_id="abc")["id"] == "cmpl-abc"
    answer = server.post("/v1/completions", {"prompt": "a", "max_tokens": 1},
                         headers={"x-request-id": "xyz"})
    assert answer.json()["id"] == "cmpl-xyz" and answer.headers["x-request-id"] == "xyz"


def test_prompt_forms_and_prompt_major_indices(server):
    ids = ids_of(server, PROMPT, special=True)
    want = complete(server, max_tokens=4, **GREEDY)["choices"][0]["text"]
    for prompt in ([PROMPT], ids, [ids], [PROMPT, PROMPT], [ids, ids]):
        got = complete(server, prompt, max_tokens=4, **GREEDY)
        assert [c["text"] for c in got["choices"]] == [want] * len(got["choices"])
    got = complete(server, [PROMPT, "Once"], n=2, max_tokens=3, echo=True, seed=3)
    assert [c["index"] for c in got["choices"]] == [0, 1, 2, 3]
    assert [c["text"].startswith(PROMPT) for c in got["choices"]] == [True, True, False, False]
    assert got["usage"]["prompt_tokens"] == len(ids) + len(ids_of(server, "Once", special=True))


def test_add_special_tokens_false_leaves_bos_out(server):
    got = complete(server, max_tokens=1, add_special_tokens=False, return_token_ids=True)
    assert got["choices"][0]["prompt_token_ids"] == ids_of(server, PROMPT)
    assert len(got["choices"][0]["token_ids"]) == 1


def test_stop_ends_is_cut_and_named(server):
    text = complete(server, max_tokens=24, **GREEDY)["choices"][0]["text"]
    stop = text[4:9]
    got = complete(server, max_tokens=24, stop=["\u2603"] * 15 + [stop], **GREEDY)["choices"][0]
    assert got["text"] == text[:text.index(stop)]
    assert got["finish_reason"] == "stop" and got["stop_reason"] == stop
    kept = complete(server, max_tokens=24, stop=stop, include_stop_str_in_output=True, **GREEDY)
    assert kept["choices"][0]["text"] == text[:text.index(stop)] + stop


def test_sampling_extras_reach_the_sampler(server):
    got = complete(server, max_tokens=6, ignore_eos=True, allowed_token_ids=[300, 301], min_p=0.1,
                   top_k=5, repetition_penalty=1.1, return_token_ids=True)["choices"][0]
    assert set(got["token_ids"]) <= {300, 301} and len(got["token_ids"]) == 6
    got = complete(server, max_tokens=4, temperature=0, stop_token_ids=[400],
                   logit_bias={"400": 100}, return_token_ids=True)["choices"][0]
    assert got["token_ids"] == [400] and got["stop_reason"] == 400 and got["text"] == ""
    got = complete(server, max_tokens=4, min_tokens=4, temperature=0, logit_bias={"1": 100},
                   return_token_ids=True)["choices"][0]
    assert len(got["token_ids"]) == 4 and 1 not in got["token_ids"][:3]


def test_special_tokens_are_shown_when_asked_for(server):
    body = {"max_tokens": 3, "ignore_eos": True, "allowed_token_ids": [1]}
    assert complete(server, **body)["choices"][0]["text"] == ""
    assert complete(server, skip_special_tokens=False, **body)["choices"][0]["text"] == "</s>" * 3
    stopped = complete(server, skip_special_tokens=False, stop="s></", **body)["choices"][0]
    assert stopped["text"] == "</" and stopped["stop_reason"] == "s></"


def test_seed_decides(server):
    texts = [complete(server, max_tokens=8, seed=s)["choices"][0]["text"] for s in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize("seed", [-2, -2.0, -2**63])
def test_seeds_below_0_decide_too(server, seed):
    texts = [complete(server, max_tokens=16, seed=s)["choices"][0]["text"]
             for s in (seed, seed, seed + 1 if seed < -2 else -3)]
    assert texts[0] == texts[1] != texts[2]
    if seed == -2:
        assert complete(server, max_tokens=16, seed=2**64 - 2)["choices"][0]["text"] == texts[0]


def test_seed_minus_1_is_none(server):
    """As for vLLM; 2^64 - 1, which has the same bits, is a seed."""
    texts = {complete(server, max_tokens=16, seed=-1)["choices"][0]["text"] for _ in range(3)}
    assert len(texts) > 1
    texts = {complete(server, max_tokens=16, seed=2**64 - 1)["choices"][0]["text"] for _ in range(3)}
    assert len(texts) == 1


@pytest.mark.parametrize("seed", [-2**63 - 1, -2.0**53, -0.5, 2**64, "1"])
def test_other_seeds_are_refused(server, seed):
    answer = server.post("/v1/completions", {"prompt": "a", "max_tokens": 1, "seed": seed})
    assert "seed" in error_of(answer, 400, "invalid_value")


@pytest.mark.parametrize("fields", [{"best_of": 1}, {"best_of": 2, "n": 2}, {"user": "me"},
                                    {"priority": 0}, {"priority": 3}, {"priority": "bulk"},
                                    {"suffix": None, "logprobs": None, "stop": None, "seed": None},
                                    {"timeout_ms": 60000, "stream": False}])
def test_accepted_fields_leave_no_ignored_header(server, fields):
    answer = server.post("/v1/completions", {"prompt": "a", "max_tokens": 1, **fields})
    assert answer.status_code == 200, answer.text
    assert "X-Ignored-Fields" not in answer.headers


def test_unknown_fields_are_named_also_inside_stream_options(server):
    answer = server.post("/v1/completions", {"prompt": "a", "max_tokens": 1, "usr": 1, "stream": True,
                                             "stream_options": {"include_obfuscation": False}})
    assert answer.headers["X-Ignored-Fields"] == "stream_options.include_obfuscation, usr"


def test_empty_bearer_is_no_error(server):
    answer = server.post("/v1/completions", {"prompt": "a", "max_tokens": 1},
                         headers={"Authorization": "Bearer "})
    assert answer.status_code == 200


WRONG = [
    ({}, "missing_field", "prompt"),
    ({"prompt": {}}, "invalid_value", "prompt"),
    ({"prompt": [9999]}, "token_out_of_range", "prompt"),
    ({"prompt": ["a"] * 65}, "too_many_items", "prompt"),
    ({"prompt": "a", "max_tokens": 0}, "invalid_value", "max_tokens"),
    ({"prompt": "a", "max_tokens": True}, "invalid_value", "max_tokens"),
    ({"prompt": "a", "n": 9}, "invalid_value", "n"),
    ({"prompt": "a", "n": 2, "temperature": 0}, "conflicting_fields", "n"),
    ({"prompt": "a", "best_of": 2}, "unsupported_parameter", "best_of"),
    ({"prompt": "a", "best_of": 3, "n": 2}, "unsupported_parameter", "best_of"),
    ({"prompt": "a", "suffix": "b"}, "unsupported_parameter", "suffix"),
    ({"prompt": "a", "truncate_prompt_tokens": 5}, "unsupported_parameter",
     "truncate_prompt_tokens"),
    ({"prompt": "a", "logprob_token_ids": [5]}, "unsupported_parameter", "logprob_token_ids"),
    ({"prompt": "a", "response_format": {"type": "json_object"}}, "unsupported_parameter",
     "response_format"),
    ({"prompt": "a", "logprobs": 21}, "invalid_value", "logprobs"),
    ({"prompt": "a", "logprobs": True}, "invalid_value", "logprobs"),
    ({"prompt": "a", "prompt_logprobs": -1}, "invalid_value", "prompt_logprobs"),
    ({"prompt": "a", "prompt_logprobs": 1, "stream": True}, "conflicting_fields",
     "prompt_logprobs"),
    ({"prompt": "a", "stop": ["a"] * 17}, "invalid_value", "stop"),
    ({"prompt": "a", "stream_options": {"include_usage": True}}, "conflicting_fields",
     "stream_options"),
    ({"prompt": "a", "stream": True, "stream_options": 1}, "invalid_value", "stream_options"),
    ({"prompt": "a", "stream": True, "stream_options": {"include_usage": 1}}, "invalid_value",
     "include_usage"),
    ({"prompt": "a", "priority": 1.5}, "invalid_value", "priority"),
    ({"prompt": "a", "temperature": 3}, "invalid_value", "temperature"),
    ({"prompt": "a", "user": 5}, "invalid_value", "user"),
    ({"prompt": "a", "echo": 1}, "invalid_value", "echo"),
    ({"prompt": "a", "skip_special_tokens": "no"}, "invalid_value", "skip_special_tokens"),
    ({"prompt": "a", "request_id": "i" * 200}, "invalid_value", "id"),
]


@pytest.mark.parametrize("body, code, param", WRONG, ids=[json.dumps(w[0])[:50] for w in WRONG])
def test_wrong_field_is_named(server, body, code, param):
    error_of(server.post("/v1/completions", body), 400, code, param)


def test_wrong_model_and_method_and_chat(server):
    error_of(server.post("/v1/completions", {"prompt": "a", "model": "gpt"}), 404,
             "model_not_found", "model")
    error_of(server.get("/v1/completions"), 405, "method_not_allowed")
    error_of(server.post("/v1/chat/completions", {"messages": []}), 400, "chat_template_missing")


def test_models_tell_what_clients_look_for(server):
    got = server.get("/v1/models").json()
    assert got["object"] == "list"
    model, = got["data"]
    assert model["id"] == "demo" and model["object"] == "model" and model["max_model_len"] == 512
    assert {"created", "owned_by", "root", "parent", "permission"} <= set(model)
    assert set(model["meta"]) == {"vocab_type", "n_vocab", "n_ctx_train", "n_embd", "n_params",
                                  "size"}
    assert server.get("/v1/models/demo").json()["id"] == "demo"
    with Server("--memory-placement", "device") as other:  # the size is the model's, wherever its tables are
        assert other.get("/v1/models").json()["data"][0]["meta"] == model["meta"]


# ---- log-probabilities ----------------------------------------------------------------------------


def check_lists(choice, n, k):
    """The rules that every legacy logprobs object keeps."""
    lists = choice["logprobs"]
    assert set(lists) == {"tokens", "token_logprobs", "top_logprobs", "text_offset"}
    assert [len(lists[name]) for name in lists] == [n] * 4
    assert lists["text_offset"] == sorted(lists["text_offset"])
    for token, logprob, top in zip(lists["tokens"], lists["token_logprobs"], lists["top_logprobs"]):
        if logprob is not None:
            assert top[token] == logprob and len(top) in (k, k + 1)
            assert len(top) == k or logprob == min(top.values())
    return lists


def test_logprobs_of_the_continuation(server):
    choice = complete(server, max_tokens=5, logprobs=3, **GREEDY)["choices"][0]
    lists = check_lists(choice, 5, 3)
    assert lists["text_offset"][0] == 0 and "".join(lists["tokens"]) == choice["text"]
    for offset, token in zip(lists["text_offset"], lists["tokens"]):
        assert choice["text"][offset:].startswith(token)
    native = server.ok("/generate", {"prompt": PROMPT, "max_tokens": 5, "logprobs": 0, **GREEDY})
    assert lists["token_logprobs"] == [t["logprob"] for t in native["choices"][0]["logprobs"]]


def test_logprobs_0_gives_the_chosen_token_alone(server):
    lists = check_lists(complete(server, max_tokens=4, logprobs=0, seed=1)["choices"][0], 4, 0)
    assert [list(top) for top in lists["top_logprobs"]] == [[t] for t in lists["tokens"]]


def test_echo_with_max_tokens_0_is_the_prompt_alone(server):
    ids = ids_of(server, PROMPT)
    got = complete(server, ids, max_tokens=0, echo=True, logprobs=1)
    choice = got["choices"][0]
    lists = check_lists(choice, len(ids), 1)
    assert choice["text"] == PROMPT and choice["finish_reason"] == "length"
    assert got["usage"]["completion_tokens"] == 0
    assert lists["token_logprobs"][0] is None and lists["top_logprobs"][0] is None
    scored = server.ok("/score", {"tokens": ids, "logprobs": 0})["results"][0]["tokens"]
    assert lists["token_logprobs"] == [t["logprob"] for t in scored]


def test_echo_lists_the_tokens_that_the_sender_wrote(server):
    """Not the server's BOS: who counts the tokens of a context, as lm-eval does, finds its end."""
    options = dict(max_tokens=2, echo=True, logprobs=2, **GREEDY)
    choice = complete(server, PROMPT, **options)["choices"][0]
    lists = choice["logprobs"]
    ids = ids_of(server, PROMPT)
    assert len(lists["tokens"]) == len(ids) + 2 and lists["tokens"][0] != ""
    assert "".join(lists["tokens"]) == choice["text"]
    scored = server.ok("/score", {"text": PROMPT, "logprobs": 0})["results"][0]["tokens"]
    assert lists["token_logprobs"][:len(ids)] == [t["logprob"] for t in scored]
    bos = complete(server, PROMPT, echo_bos=True, **options)["choices"][0]["logprobs"]
    assert bos["tokens"] == [""] + lists["tokens"]
    named = complete(server, PROMPT, echo_bos=True, return_tokens_as_token_ids=True, **options)["choices"][0]["logprobs"]
    assert named["tokens"][:-2] == ["token_id:%d" % each for each in [1] + ids]
    assert bos["token_logprobs"] == [None] + lists["token_logprobs"]
    chunks = events(server.post("/v1/completions", {"prompt": PROMPT, "stream": True, **options}).text)
    streamed = [t for c in chunks if c["choices"] for t in c["choices"][0]["logprobs"]["tokens"]]
    assert streamed == lists["tokens"]


def test_echo_bos_can_be_the_server_s_default():
    with Server("--echo-bos") as s:
        options = dict(max_tokens=0, echo=True, logprobs=0)
        listed = complete(s, PROMPT, **options)["choices"][0]["logprobs"]["tokens"]
        without = complete(s, PROMPT, echo_bos=False, **options)["choices"][0]["logprobs"]["tokens"]
        assert listed == [""] + without


def test_max_completion_tokens_is_max_tokens(server):
    got = complete(server, PROMPT, max_completion_tokens=3, **GREEDY)
    assert got["usage"]["completion_tokens"] == 3
    answer = server.post("/v1/completions", {"prompt": PROMPT, "max_completion_tokens": 3,
                                             "max_tokens": 3})
    error_of(answer, 400, "conflicting_fields")


@pytest.mark.parametrize("memory", ["summary", "tokens"])
def test_memory_is_told_as_on_generate(server, memory):
    body = {"prompt": PROMPT, "max_tokens": 4, "memory": memory, **GREEDY}
    native = server.ok("/generate", body)["choices"][0]["memory"]
    answer = server.post("/v1/completions", body)
    assert "X-Ignored-Fields" not in answer.headers
    assert answer.json()["choices"][0]["memory"] == native
    chunks = events(server.post("/v1/completions", {**body, "stream": True}).text)
    told = [c["choices"][0]["memory"] for c in chunks if "memory" in c["choices"][0]]
    assert told == [native]
    error_of(server.post("/v1/completions", {**body, "memory": "all"}), 400, "invalid_value", "memory")


def test_what_is_ignored_is_logged_once_a_name():
    with Server() as s:
        for _ in range(3):
            answer = s.post("/v1/completions", {"prompt": "a", "max_tokens": 1, "metadata": {},
                                                "stor": True})
            assert answer.headers["X-Ignored-Fields"] == "metadata, stor"
        s.post("/generate", {"prompt": "a", "max_tokens": 1, "stor": 1}).raise_for_status()
        s.stop()
        lines = [line for line in s.read_log().splitlines() if "event=field_ignored" in line]
        assert len(lines) == 2 and all("level=warn" in line for line in lines), lines
        assert 'field="metadata" path="/v1/completions"' in lines[0] and 'field="stor"' in lines[1]


def test_the_log_of_ignored_names_is_bounded():
    with Server("--max-seqs", "1") as s:
        for first in range(0, 200, 50):
            s.post("/generate", {"prompt": "a", "max_tokens": 1,
                                 **{"f%d" % i: 1 for i in range(first, first + 50)}})
        s.stop()
        lines = [line for line in s.read_log().splitlines() if "event=field_ignored" in line]
        assert len(lines) == 129 and "no more names" in lines[-1], len(lines)


def test_echo_of_text_with_its_bos_and_offsets_are_code_points(server):
    text = "\u00e9t\u00e9 \U0001f600 \u2019s"
    got = complete(server, text, max_tokens=2, echo=True, echo_bos=True, logprobs=1, **GREEDY)
    choice = got["choices"][0]
    lists = check_lists(choice, got["usage"]["total_tokens"], 1)
    assert choice["text"].startswith(text)
    assert lists["tokens"][0] == "" and lists["token_logprobs"][0] is None
    assert all(choice["text"][offset:].startswith(token) or token == "\ufffd"
               for token, offset in zip(lists["tokens"], lists["text_offset"]))
    assert lists["text_offset"][:2] == [0, 0] and lists["text_offset"][-2] == len(text)
    without = complete(server, text, max_tokens=0, echo=True)["choices"][0]
    assert without["text"] == text and without["logprobs"] is None


def test_equal_texts_lose_no_entry():
    """Bytes that are no character all look like U+FFFD: the chosen one keeps the key."""
    ids = list("\u6f22\u5b57 \u6f22\u5b57".encode())
    with Server(model=UNBOUNDED) as server:
        choice = complete(server, ids, model="demo-bytes", max_tokens=1, echo=True, logprobs=20, **GREEDY)["choices"][0]
    lists = check_lists(choice, len(ids) + 1, 20)
    behind = 0  # bytes that the model did not expect, behind others that look the same
    for token, logprob, top in list(zip(lists["tokens"], lists["token_logprobs"],
                                        lists["top_logprobs"]))[1:]:
        spelled = {key: value for key, value in top.items() if key.startswith("token_id:")}
        if token == "\ufffd":
            assert top[token] == logprob
            behind += any(value > logprob for value in spelled.values())
    assert behind > 0


def test_tokens_as_token_ids(server):
    choice = complete(server, max_tokens=3, logprobs=2, return_tokens_as_token_ids=True,
                      return_token_ids=True, **GREEDY)["choices"][0]
    lists = check_lists(choice, 3, 2)
    assert lists["tokens"] == ["token_id:%d" % i for i in choice["token_ids"]]
    assert all(key.startswith("token_id:") for top in lists["top_logprobs"] for key in top)


def test_prompt_logprobs_by_id(server):
    got = complete(server, max_tokens=1, prompt_logprobs=2, **GREEDY)
    choice = got["choices"][0]
    assert choice["logprobs"] is None
    ids = ids_of(server, PROMPT, special=True)
    assert len(choice["prompt_logprobs"]) == len(ids) and choice["prompt_logprobs"][0] is None
    scored = server.ok("/score", {"text": PROMPT, "logprobs": 0, "ranks": True})["results"][0]["tokens"]
    for id_, entry, want in zip(ids[1:], choice["prompt_logprobs"][1:], scored):
        mine = entry[str(id_)]
        assert (mine["logprob"], mine["rank"]) == (want["logprob"], want["rank"])
        assert len(entry) == (2 if mine["rank"] <= 2 else 3)
        assert all(set(e) == {"logprob", "rank", "decoded_token"} for e in entry.values())
    both = complete(server, max_tokens=2, prompt_logprobs=0, logprobs=3, **GREEDY)["choices"][0]
    check_lists(both, 2, 3)
    assert all(len(entry) == 1 for entry in both["prompt_logprobs"][1:])


# ---- lm-evaluation-harness --------------------------------------------------------------------------


def test_lm_eval_loglikelihood(server):
    """Its request to the letter; arrays of n_prompt + 1, also where the extra token is the end."""
    eos = ids_of(server, "</s>")
    assert eos == [1]  # "</s>" alone is the control token
    contexts = [ids_of(server, PROMPT), ids_of(server, "A man. "), eos + ids_of(server, "The sea")]
    answer = server.post("/v1/completions", {
        "model": "demo", "prompt": contexts, "temperature": 0, "max_tokens": 1, "logprobs": 1,
        "seed": 1234, "echo": True}, headers={"Authorization": "Bearer "})
    assert answer.status_code == 200
    choices = answer.json()["choices"]
    assert [c["index"] for c in choices] == [0, 1, 2]
    for ids, choice in zip(contexts, choices):
        lists = check_lists(choice, len(ids) + 1, 1)
        assert lists["token_logprobs"][0] is None
        scored = server.ok("/score", {"tokens": ids, "logprobs": 1, "ranks": True})["results"][0]
        got = sum(lists["token_logprobs"][1:-1])
        assert math.isclose(got, scored["sum_logprob"], rel_tol=1e-6)
        for logprob, top, want in zip(lists["token_logprobs"][1:-1], lists["top_logprobs"][1:-1],
                                      scored["tokens"][1:]):
            assert (logprob == max(top.values())) == (want["rank"] == 1)
            assert max(top.values()) == want["top"][0]["logprob"]
    forced = complete(server, [contexts[0]], temperature=0, max_tokens=1, logprobs=1, echo=True,
                      logit_bias={"1": 100})["choices"][0]
    lists = check_lists(forced, len(contexts[0]) + 1, 1)
    assert lists["tokens"][-1] == "</s>" and forced["finish_reason"] == "stop"
    assert forced["text"] == PROMPT and lists["text_offset"][-1] == len(PROMPT)


def test_lm_eval_finds_its_remote_tokenizer(server):
    info = server.get("/tokenizer_info").json()
    assert info["eos_token"] == "</s>" and "bos_token" in info
    got = server.ok("/tokenize", {"prompt": "test", "add_special_tokens": False})
    assert isinstance(got["tokens"], list)
    assert server.ok("/detokenize", {"tokens": got["tokens"]})["prompt"] == "test"


def test_lm_eval_generate_until(server):
    text = complete(server, max_tokens=24, **GREEDY)["choices"][0]["text"]
    stop = text[6:9]
    got = complete(server, [ids_of(server, PROMPT, special=True)], max_tokens=24, temperature=0,
                   stop=["\n\n", "Question:", "</s>", "\u2603", "Q.", stop], seed=1234,
                   ignore_eos=True)
    assert got["choices"][0]["text"] == text[:text.index(stop)]


def test_gguf_client_finds_its_continuation_by_offset(server):
    context, continuation = "It was a dark night", ", and the rain fell"
    got = complete(server, context + continuation, logprobs=10, temperature=0, max_tokens=1,
                   echo=True)["choices"][0]
    lists = check_lists(got, len(got["logprobs"]["tokens"]), 10)
    first = next(i for i, at in enumerate(lists["text_offset"]) if at >= len(context))
    assert "".join(lists["tokens"][first:-1]) == continuation


# ---- strict --------------------------------------------------------------------------------------


def test_strict_server_accepts_what_clients_send():
    with Server("--strict") as s:
        s.ok("/v1/completions", {"model": "demo", "prompt": [[5, 6]], "temperature": 0,
                                 "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True})
        s.post("/v1/completions", {
            "model": "demo", "prompt": "a", "repetition_penalty": 1.0, "max_tokens": 2,
            "logprobs": None, "stream": True, "stream_options": {"include_usage": True},
            "ignore_eos": True, "temperature": 0.0, "best_of": 1, "n": 1, "user": "u",
            "suffix": None}).raise_for_status()
        error_of(s.post("/v1/completions", {"prompt": "a", "usr": 1}), 400, "unknown_field", "usr")
        error_of(s.post("/v1/completions", {"prompt": "a", "stream": True,
                                            "stream_options": {"x": 1}}), 400, "unknown_field",
                 "stream_options.x")
        answer = s.post("/generate", {"inputs": "a", "parameters": {"x": 1}})
        assert answer.status_code == 422 and "x is not a field" in answer.json()["error"]
