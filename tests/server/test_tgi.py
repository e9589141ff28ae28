"""The dialect of text-generation-inference: /generate with inputs, /generate_stream, POST /."""

import json

import pytest

from server_harness import Server, error_of, eventually, head

PROMPT = "It was a dark night, and the"


def frames(text):
    """The frames of a TGI stream, which has no [DONE]."""
    parts = [p for p in text.split("\n\n") if p and not p.startswith(":")]
    assert all(p.startswith("data: ") and "\n" not in p for p in parts), parts
    return [json.loads(p[len("data: "):]) for p in parts]


def tgi_error(answer, status, kind):
    """Checks an error against TGI's form, with the type kind or None; returns its message."""
    assert answer.status_code == status, (answer.status_code, answer.text)
    body = answer.json()
    assert set(body) == {"error", *(["error_type"] if kind else [])} and body.get("error_type") == kind, body
    assert "x-request-id" in answer.headers
    return body["error"]


def generate(server, path="/generate", **parameters):
    return server.ok(path, {"inputs": PROMPT, "parameters": parameters})


@pytest.fixture(scope="module")
def greedy(server):
    return server.ok("/generate", {"prompt": PROMPT, "max_tokens": 12, "temperature": 0,
                                   "logprobs": 0})["choices"][0]


# ---- whole answers ----------------------------------------------------------------------------------


def test_text_alone_unless_details_are_asked_for(server, greedy):
    assert generate(server, max_new_tokens=12) == {"generated_text": greedy["text"]}
    full = generate(server, max_new_tokens=12, return_full_text=True)
    assert full == {"generated_text": PROMPT + greedy["text"]}


def test_what_langchain_s_endpoint_sends_as_it_comes(server):
    """Its defaults are always sent; typical_p means that tokens are drawn."""
    sent = {"max_new_tokens": 8, "top_k": None, "top_p": 0.95, "typical_p": 0.95, "temperature": 0.8,
            "repetition_penalty": None, "return_full_text": False, "truncate": None, "stop": [],
            "seed": 3, "do_sample": False, "watermark": False}
    got = generate(server, **sent)
    native = server.ok("/generate", {"prompt": PROMPT, "max_tokens": 8, "top_p": 0.95,
                                     "typical_p": 0.95, "temperature": 0.8, "seed": 3})
    assert got["generated_text"] == native["choices"][0]["text"]
    drawn = generate(server, max_new_tokens=4, typical_p=0.5, details=True, seed=3)
    assert drawn["details"]["seed"] == 3


def test_truncate_keeps_the_last_tokens(server):
    ids = server.ok("/tokenize", {"prompt": PROMPT})["tokens"]
    got = generate(server, max_new_tokens=3, truncate=4, details=True, decoder_input_details=True)
    assert [t["id"] for t in got["details"]["prefill"]] == ids[-4:]
    native = server.ok("/generate", {"prompt": ids[-4:], "max_tokens": 3, "temperature": 0})
    assert got["generated_text"] == native["choices"][0]["text"]
    whole = generate(server, max_new_tokens=3, truncate=len(ids))
    assert whole == generate(server, max_new_tokens=3) == generate(server, max_new_tokens=3,
                                                                   truncate=512)
    full = generate(server, max_new_tokens=3, truncate=4, return_full_text=True)
    assert full["generated_text"] == PROMPT + got["generated_text"]
    error_of(server.post("/generate", {"prompt": PROMPT, "truncate": 4}), 400,
             "unsupported_parameter", "truncate")


def test_details(server, greedy):
    got = generate(server, max_new_tokens=12, details=True, decoder_input_details=True)
    details = got["details"]
    assert set(details) == {"finish_reason", "generated_tokens", "seed", "prefill", "tokens"}
    assert details["finish_reason"] == "length" and details["generated_tokens"] == 12
    assert details["seed"] is None  # nothing was drawn
    tokens = details["tokens"]
    assert [t["id"] for t in tokens] == greedy["token_ids"]
    assert [t["logprob"] for t in tokens] == [t["logprob"] for t in greedy["logprobs"]]
    assert all(set(t) == {"id", "text", "logprob", "special"} for t in tokens)
    assert "".join(t["text"] for t in tokens) == got["generated_text"] == greedy["text"]
    prefill = details["prefill"]
    assert [t["id"] for t in prefill] == server.ok("/tokenize", {"prompt": PROMPT})["tokens"]
    assert all(set(t) == {"id", "text", "logprob"} for t in prefill)
    assert prefill[0]["logprob"] is None and all(t["logprob"] < 0 for t in prefill[1:])
    assert generate(server, max_new_tokens=1, details=True)["details"]["prefill"] == []


def test_top_n_tokens(server):
    details = generate(server, max_new_tokens=3, details=True, top_n_tokens=2)["details"]
    assert [len(tops) for tops in details["top_tokens"]] == [2, 2, 2]
    assert [tops[0] for tops in details["top_tokens"]] == details["tokens"]


def test_tokens_are_drawn_without_parameters_and_the_likeliest_taken_with_them(server, greedy):
    drawn = {server.ok("/generate", {"inputs": PROMPT})["generated_text"] for _ in range(3)}
    assert len(drawn) == 3
    assert generate(server, max_new_tokens=12)["generated_text"] == greedy["text"]
    assert generate(server, max_new_tokens=12, do_sample=False)["generated_text"] == greedy["text"]
    for how in ({"do_sample": True}, {"temperature": 0.9}, {"top_k": 50}, {"top_p": 0.95}):
        got = [generate(server, max_new_tokens=12, seed=seed, details=True, **how)
               for seed in (1, 1, 2**64 - 1)]
        assert [g["details"]["seed"] for g in got] == [1, 1, 2**64 - 1]
        assert got[0] == got[1] != got[2]


def test_max_new_tokens_is_100_by_default_or_what_the_context_leaves(server):
    parameters = {"details": True, "allowed_token_ids": [300]}
    assert generate(server, **parameters)["details"]["generated_tokens"] == 100
    got = server.ok("/generate", {"inputs": "\n" * 450, "parameters": parameters})["details"]
    assert got["generated_tokens"] == 512 - 451


def test_stop_sequence_stays_in_the_text(server, greedy):
    stop = greedy["text"][4:9]
    end = greedy["text"].index(stop) + len(stop)
    got = generate(server, max_new_tokens=12, stop=[stop], details=True)
    assert got["generated_text"] == greedy["text"][:end]
    assert got["details"]["finish_reason"] == "stop_sequence"
    assert got["details"]["generated_tokens"] == len(got["details"]["tokens"]) < 12


def test_end_token_is_special_and_not_in_the_text(server):
    got = generate(server, max_new_tokens=5, details=True, logit_bias={"1": 100})
    assert got["generated_text"] == "" and got["details"]["finish_reason"] == "eos_token"
    token, = got["details"]["tokens"]
    assert token["id"] == 1 and token["text"] == "</s>" and token["special"] is True


def test_root_gives_a_list_or_a_stream(server, greedy):
    body = {"inputs": PROMPT, "parameters": {"max_new_tokens": 12}}
    assert server.ok("/", body) == [{"generated_text": greedy["text"]}]
    assert server.ok("/", {**body, "stream": False}) == [{"generated_text": greedy["text"]}]
    got = frames(server.post("/", {**body, "stream": True}).text)
    assert got[-1]["generated_text"] == greedy["text"]
    page = server.get("/")
    assert page.status_code == 200 and "pkmserve" in page.text


def test_hugging_face_client_body(server, greedy):
    """What InferenceClient.text_generation sends to a server's address: unset parameters as null."""
    names = ["adapter_id", "best_of", "decoder_input_details", "details", "do_sample",
             "frequency_penalty", "grammar", "repetition_penalty", "return_full_text", "seed", "stop",
             "temperature", "top_k", "top_n_tokens", "top_p", "truncate", "typical_p", "watermark"]
    parameters = dict.fromkeys(names) | {"max_new_tokens": 12, "watermark": False, "stop": []}
    answer = server.post("/", {"inputs": PROMPT, "parameters": parameters, "stream": False})
    assert answer.json() == [{"generated_text": greedy["text"]}]
    assert "X-Ignored-Fields" not in answer.headers


def test_genai_perf_body_and_ignored_names(server):
    answer = server.post("/generate", {"model": "demo", "inputs": PROMPT, "extra": 1,
                                       "parameters": {"max_new_tokens": 1, "odd": 2}})
    assert answer.status_code == 200
    assert answer.headers["X-Ignored-Fields"] == "parameters.odd, extra"


# ---- streams ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("parameters", [
    {"max_new_tokens": 12}, {"max_new_tokens": 8, "do_sample": True, "seed": 3},
    {"max_new_tokens": 3, "return_full_text": True}, {"max_new_tokens": 12, "stop": ["e", " a"]},
    {"max_new_tokens": 4, "top_n_tokens": 3}, {"max_new_tokens": 4, "logit_bias": {"1": 100}},
    {"max_new_tokens": 12, "do_sample": True, "seed": 1, "allowed_token_ids": list(range(4, 260))},
], ids=str)
def test_stream_equals_whole(server, parameters):
    whole = generate(server, details=True, **parameters)
    answer = server.post("/generate_stream", {"inputs": PROMPT, "parameters": parameters})
    assert answer.status_code == 200
    assert answer.headers["Content-Type"].startswith("text/event-stream")
    got = frames(answer.text)
    details = whole["details"]
    assert [f["token"] for f in got] == details["tokens"]
    assert [f["index"] for f in got] == list(range(1, len(got) + 1))
    assert [f.get("top_tokens", []) for f in got] == details.get("top_tokens", [[]] * len(got))
    assert all(f["generated_text"] is None and f["details"] is None for f in got[:-1])
    assert got[-1]["generated_text"] == whole["generated_text"]
    assert got[-1]["details"] == {
        "finish_reason": details["finish_reason"], "seed": details["seed"],
        "generated_tokens": details["generated_tokens"],
        "input_length": len(server.ok("/tokenize", {"prompt": PROMPT})["tokens"])}


# ---- errors -----------------------------------------------------------------------------------------

WRONG = [
    ({"inputs": ["a"]}, "inputs"),
    ({"inputs": 5}, "inputs"),
    ({"inputs": None}, "inputs"),
    ({"inputs": "a", "stream": 1}, "stream"),
    ({"inputs": "a", "parameters": []}, "parameters"),
    ({"inputs": "a", "model": "other"}, "other"),
] + [({"inputs": "a", "parameters": p}, next(iter(p))) for p in (
    {"truncate": 0}, {"typical_p": 0}, {"typical_p": 1.5}, {"watermark": True}, {"grammar": {"type": "json"}},
    {"adapter_id": "x"}, {"best_of": 2}, {"best_of": 0}, {"max_new_tokens": 0},
    {"max_new_tokens": 512}, {"max_new_tokens": "5"}, {"temperature": 0}, {"temperature": -1},
    {"top_k": -3}, {"top_p": 0}, {"top_p": 1.5}, {"repetition_penalty": 0}, {"seed": -1},
    {"seed": 2**64}, {"stop": "a" * 257}, {"stop": ["a"] * 17}, {"top_n_tokens": 21},
    {"details": 1}, {"decoder_input_details": True}, {"do_sample": "yes"}, {"frequency_penalty": 3})]


@pytest.mark.parametrize("body, name", WRONG, ids=[json.dumps(w[0])[:50] for w in WRONG])
def test_wrong_field_is_a_validation_error_that_names_it(server, body, name):
    for path in ("/generate", "/"):
        assert name in tgi_error(server.post(path, body), 422, "validation")


def test_errors_have_the_form_of_the_route_or_the_body(server):
    for path in ("/generate_stream", "/"):
        tgi_error(server.post(path, "{"), 422, "validation")
        assert "inputs is missing" in tgi_error(server.post(path, {}), 422, "validation")
    error_of(server.post("/generate", "{"), 400, "invalid_json")
    error_of(server.post("/generate", {}), 400, "missing_field", "prompt")
    error_of(server.post("/generate", {"prompt": "a", "inputs": "b"}), 400, "wrong_dialect")
    for name in ("sampling_params", "text_input"):
        error_of(server.post("/generate", {name: "a"}), 400, "wrong_dialect", name)
    error_of(server.get("/generate_stream"), 405, "method_not_allowed")
    error_of(server.post("/v1/completions", {"inputs": "a"}), 400, "missing_field", "prompt")
    tgi_error(server.post("/tokenize", {"inputs": 5}), 422, "validation")
    for parameter in ({"decoder_input_details": True}, {"best_of": 2}):
        body = {"inputs": "a", "parameters": parameter}
        message = tgi_error(server.post("/generate_stream", body), 422, "validation")
        assert next(iter(parameter)) in message
    assert "stream" in tgi_error(server.post("/generate_stream", {"inputs": "a", "stream": False}),
                                 422, "validation")


def test_context_is_named_when_exceeded(server):
    message = tgi_error(server.post("/generate", {"inputs": "word " * 3000}), 422, "validation")
    assert "max_length=512" in message


def test_full_queue_in_the_dialect_and_in_the_metrics():
    with Server("--max-queue-tokens", "600", "--max-seqs", "1") as s:
        busy = s.connect()
        busy.sendall(head("/generate", json.dumps(
            {"prompt": [[300] * 100] * 60, "max_tokens": 400, "ignore_eos": True}).encode()))
        eventually(lambda: s.metric("num_requests_running") == 1, "the other request runs")
        long = {"inputs": "a", "parameters": {"max_new_tokens": 500}}
        waiting = s.connect()
        before = s.metric("num_requests_waiting")
        waiting.sendall(head("/", json.dumps(long).encode()))
        eventually(lambda: s.metric("num_requests_waiting") == before + 1, "one more waits")
        answer = s.post("/", long)
        assert "Retry-After" in answer.headers
        tgi_error(answer, 429, "overloaded")
        busy.close()
        waiting.close()
        s.counted('requests_total{route="/",code="429"}')
        invalid = s.metric('requests_rejected_total{reason="invalid"}')
        s.post("/", {"inputs": 5})
        s.counted('requests_rejected_total{reason="invalid"}', invalid + 1)
        s.counted('requests_total{route="/",code="422"}')


# ---- the rest of the dialect ------------------------------------------------------------------------


def test_tokenize_and_info(server):
    listed = server.ok("/tokenize", {"inputs": PROMPT})
    assert all(set(t) == {"id", "text", "start", "stop"} for t in listed)
    assert [t["id"] for t in listed] == server.ok("/tokenize", {"prompt": PROMPT})["tokens"]
    info = server.get("/info").json()
    assert {"model_id", "model_sha", "model_pipeline_tag", "max_concurrent_requests", "max_best_of",
            "max_stop_sequences", "max_input_tokens", "max_total_tokens", "validation_workers",
            "max_client_batch_size", "router", "version", "sha", "docker_label"} <= set(info)
    assert info["max_best_of"] == 1 and info["max_total_tokens"] == 512


def test_keys_are_asked_for_at_post_but_not_at_get(tmp_path):
    """By the type "validation" huggingface_hub and text-generation raise what they raise for a wrong parameter."""
    keys = tmp_path / "keys"
    keys.write_text("secret-key-of-some-length\n")
    with Server("--api-key-file", str(keys)) as s:
        assert s.get("/").status_code == 200
        body = {"inputs": "a", "parameters": {"max_new_tokens": 1}}
        wrong = {"Authorization": "Bearer a-wrong-key"}
        for path in ("/", "/generate_stream"):
            assert "asks for an API key" in tgi_error(s.post(path, body), 401, None)
            assert "is not valid" in tgi_error(s.post(path, body, headers=wrong), 401, None)
        s.post("/", body, headers={"Authorization": "Bearer secret-key-of-some-length"}
               ).raise_for_status()
