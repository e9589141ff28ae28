"""What tells about the server: models, info, version, health, metrics, tokens."""

import json
import os
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest

from server_harness import DEMO, FOREVER, UNBOUNDED, Server, error_of, eventually, head

GET_ROUTES = ["/v1/models", "/v1/models/demo", "/info", "/version", "/health", "/health/live",
              "/health/ready", "/ping", "/v1/health", "/livez", "/readyz", "/v2/health/live",
              "/v2/health/ready", "/metrics", "/", "/tokenizer_info"]
METRICS_BYTES_MAX = 64 * 1024  # of a scrape, by the contract


@pytest.mark.parametrize("path", GET_ROUTES)
def test_get_and_head(server, path):
    got = server.get(path)
    assert got.status_code == 200 and got.content
    head = server.session.head(server.url + path)
    assert head.status_code == 200 and head.content == b""
    assert head.headers["Content-Type"] == got.headers["Content-Type"]


@pytest.mark.parametrize("path, allow", [("/health", "GET, HEAD"), ("/metrics", "GET, HEAD"),
                                         ("/v1/models", "GET, HEAD")])
def test_post_on_a_get_route(server, path, allow):
    answer = server.post(path, "{}")
    error_of(answer, 405, "method_not_allowed")
    assert answer.headers["Allow"] == allow


@pytest.mark.parametrize("path", ["/generate", "/score", "/tokenize", "/detokenize"])
def test_get_on_a_post_route(server, path):
    answer = server.get(path)
    error_of(answer, 405, "method_not_allowed")
    assert answer.headers["Allow"] == "POST"
    assert server.session.delete(server.url + path).status_code == 405


@pytest.mark.parametrize("path", ["/nothing", "/generate/", "/v1", "/%00", "/" + "x" * 2000])
def test_unknown_route(server, path):
    error_of(server.get(path), 404, "route_not_found")


def test_models(server):
    got = server.get("/v1/models").json()
    assert got["object"] == "list" and len(got["data"]) == 1
    model = got["data"][0]
    assert model["id"] == "demo" and model["object"] == "model"
    assert model["max_model_len"] == 512 and model["meta"]["n_vocab"] == 4096
    assert server.get("/v1/models/demo").json() == model
    error_of(server.get("/v1/models/other"), 404, "model_not_found")


def test_info_and_version(server):
    got = server.get("/info").json()
    for name in ("model_id", "max_concurrent_requests", "max_stop_sequences", "max_input_tokens",
                 "max_total_tokens", "max_client_batch_size", "version", "router"):
        assert name in got
    assert (got["max_input_tokens"], got["max_total_tokens"]) == (511, 512)
    assert got["model"]["memories"][0]["slots"] == 65536 and got["backend"]["threads"] >= 1
    assert got["limits"]["max_score_tokens"] == 262144
    assert got["backend"]["device"] == "auto" and got["backend"]["why"]
    assert got["backend"]["deterministic"] is True
    assert got["memory"]["value_placement"] in ("mmap", "device") # never "auto"
    assert got["memory"]["kv_bytes"] > 0 and got["memory"]["workspace_bytes"] > 0
    assert server.get("/version").json() == {"version": got["version"]}


def test_health(server):
    got = server.get("/health").json()
    assert set(got) == {"status", "model", "uptime_s", "queue", "running", "last_step_age_ms",
                        "phase", "progress"}
    assert got["status"] == "ok" and got["model"] == "demo" and got["progress"] == 1
    deep = server.get("/health/ready?deep=1")
    assert deep.status_code == 200 and deep.json()["status"] == "ok"


def test_a_full_server_is_ready_deep_down():
    """No seat, then no place in the queue: steps are made, and nothing is remembered against it."""
    with Server("--max-seqs", "1", "--max-queue", "1", "--threads", "1", model=UNBOUNDED) as s:
        runs = s.connect()
        runs.sendall(head("/generate", json.dumps(FOREVER).encode()))
        eventually(lambda: s.metric("num_requests_running") == 1, "a full server")
        for waiting in (0, 1):
            for path in ("/health/ready", "/health/ready?deep=1", "/health/ready?deep=1"):
                answer = s.get(path)
                assert (answer.status_code, answer.json()["status"]) == (200, "ok"), answer.text
            if not waiting:
                eventually(lambda: s.metric("num_requests_waiting") == 0, "a free place")
                waits = s.connect()
                waits.sendall(head("/generate", json.dumps(FOREVER).encode()))
                eventually(lambda: s.metric("num_requests_waiting") == 1, "a full queue")
        waits.close()
        runs.close()
        eventually(lambda: s.metric("num_requests_running") == 0, "an empty server")
        before = s.metric("request_success_total{finished_reason=\"length\"}")
        assert s.get("/health/ready?deep=1").json()["status"] == "ok"
        s.counted("request_success_total{finished_reason=\"length\"}", before + 1)  # a real check


def test_chat_is_refused_by_its_code(server):
    error_of(server.post("/v1/chat/completions", {"messages": []}), 400, "chat_template_missing")


# ---- metrics ----------------------------------------------------------------------------------


def test_metrics_count(server):
    before = {n: server.metric(n) for n in (
        'generation_tokens_total', 'score_items_total{form="text"}',
        'score_tokens_total{form="text"}', 'requests_total{route="/generate",code="200"}',
        'requests_total{route="/generate",code="400"}', 'requests_rejected_total{reason="invalid"}',
        'e2e_request_latency_seconds_count', 'requests_total{route="other",code="404"}')}
    server.ok("/generate", {"prompt": "a", "max_tokens": 3, "ignore_eos": True})
    n = server.ok("/score", {"text": ["a b c", "d"]})["aggregate"]["n_scored"]
    server.post("/generate", "{}")
    server.get("/nowhere")
    for name, more in zip(before, (3, 2, n, 1, 1, 1, 2, 1)):
        server.counted(name, before[name] + more)


def test_metrics_are_what_the_answers_say():
    """Two generations, of which the second waits for the first, and windows that overlap."""
    with Server("--max-seqs", "1") as s:
        both = [{"prompt": "a", "max_tokens": n, "ignore_eos": True} for n in (100, 20)]
        with ThreadPoolExecutor() as pool:
            timings = [answer["timings"] for answer in pool.map(lambda b: s.ok("/generate", b), both)]
        score = s.ok("/score", {"text": "It was a dark night, and nobody came.", "max_context": 8,
                                "stride": 3})
        result = score["results"][0]
        assert result["windows"]["positions_computed"] > result["n_scored"]
        s.counted('score_items_total{form="text"}')
        assert s.metric('score_tokens_total{form="text"}') == result["n_scored"]
        assert s.metric('score_positions_total{form="text"}') == result["windows"]["positions_computed"]
        assert abs(s.metric('score_nll_nats_total{form="text"}') + result["sum_logprob"]) < 1e-5

        def total_ms(*names):
            return sum(t[name] for t in timings for name in names)

        queue, scored = score["timings"]["queue_ms"], score["timings"]["prefill_ms"]
        for name, ms in (("queue_time", total_ms("queue_ms") + queue),
                         ("prefill_time", total_ms("prefill_ms")),
                         ("decode_time", total_ms("decode_ms")),
                         ("inference_time", total_ms("prefill_ms", "decode_ms") + scored)):
            # each of three times is rounded
            assert abs(1e3 * s.metric("request_%s_seconds_sum" % name) - ms) < 0.01, name
        per_token = sum(t["decode_ms"] / (b["max_tokens"] - 1) for t, b in zip(timings, both))
        assert abs(1e3 * s.metric("request_time_per_output_token_seconds_sum") - per_token) < 0.01


def test_metrics_are_small_and_well_formed(server):
    text = server.get("/metrics").text
    assert len(text) < METRICS_BYTES_MAX
    seen = set()
    for line in text.splitlines():
        if line.startswith("#"):
            continue
        assert re.match(r'^[a-z_0-9]+(\{[^}]*\})? -?[0-9.eE+-]+$', line), line
        sample = line.rsplit(" ", 1)[0]
        assert sample not in seen, "twice: " + sample
        seen.add(sample)


def test_metrics_say_where_what_lies(server):
    where = server.get("/info").json()["memory"]["value_placement"]
    text = server.get("/metrics").text
    for kind, placement in (("weights", "device"), ("memory_values", where), ("kv", "device"),
                            ("workspace", "device")):
        assert 'pkmserve_model_bytes{kind="%s",placement="%s"} ' % (kind, placement) in text, kind
    assert 'memory_placement="%s",deterministic="on"} 1' % where in text
    assert 'pkmserve_startup_seconds{phase="warmup"} ' in text
    assert server.metric('device_memory_bytes{kind="available"}') > 0
    assert 'pkmserve_cache_config_info{block_size="16",' in text
    assert 'cache_dtype="bf16"} 1' in text


def test_histograms_of_lengths_end_at_the_context(server):
    text = server.get("/metrics").text
    for name in ("request_prompt_tokens", "request_generation_tokens", "request_params_max_tokens"):
        bounds = re.findall(r'^pkmserve_%s_bucket\{le="([^"]*)"\}' % name, text, re.M)
        assert bounds == ["1", "2", "5", "10", "20", "50", "100", "200", "500", "+Inf"], name


def promtool(metrics, lint=True):
    tool = shutil.which("promtool")
    if tool is None:
        pytest.skip("promtool is not installed")
    got = subprocess.run([tool, "check", "metrics"], input=metrics, capture_output=True)
    assert got.returncode in ([0] if lint else [0, 3]), got.stdout + got.stderr
    assert not (lint and got.stderr), got.stderr


def test_promtool_accepts_the_metrics(server):
    promtool(server.get("/metrics").content)


VLLM = """num_requests_running num_requests_waiting kv_cache_usage_perc prompt_tokens_total
    generation_tokens_total request_success_total time_to_first_token_seconds
    inter_token_latency_seconds request_time_per_output_token_seconds e2e_request_latency_seconds
    request_queue_time_seconds request_inference_time_seconds request_prefill_time_seconds
    request_decode_time_seconds request_prompt_tokens request_generation_tokens
    request_params_max_tokens iteration_tokens_total cache_config_info prefix_cache_queries_total
    prefix_cache_hits_total engine_sleep_state"""
TGI = """queue_size request_success request_duration request_mean_time_per_token_duration
    request_input_length request_generated_tokens"""


@pytest.mark.parametrize("names, prefix, families, labels", [
    ("vllm", "vllm:", VLLM.split(), 'model_name="a \\"b\\" \\\\",engine="0"'),
    ("tgi", "tgi_", TGI.split(), "")])
def test_metrics_under_the_names_of_others(names, prefix, families, labels):
    with Server("--metrics-compat", names, "--served-model-name", 'a "b" \\') as server:
        server.ok("/generate", {"prompt": "A", "max_tokens": 3, "ignore_eos": True})
        text = server.get("/metrics").text
        assert len(text) < METRICS_BYTES_MAX
        theirs = [line for line in text.splitlines() if line.startswith(prefix)]
        for family in families:
            assert "# TYPE %s%s " % (prefix, family) in text, family
            assert any(re.match(re.escape(prefix + family) + r"(_bucket|_sum|_count)?[{ ]", line)
                       for line in theirs), family
        assert all(labels in line for line in theirs), [x for x in theirs if labels not in x]
        tokens = "%s%s" % (prefix, {"vllm": "generation_tokens_total",
                                    "tgi": "request_generated_tokens_sum"}[names])
        values = [line.split()[-1] for line in theirs if re.match(tokens + r"[{ ]", line)]
        assert values == ["3"], (tokens, values)
        if names == "vllm":
            assert len([x for x in theirs if x.startswith("vllm:e2e_request_latency_seconds_bucket")]) == 11
        promtool(text.encode(), lint=False)  # its lint dislikes colons and names without unit


@pytest.mark.parametrize("folder, name", [(b"a" + 60 * "\u0434".encode(), "a" + 47 * "\u0434"),
                                          (b"x\xffy\xd0", "x?y?")])
def test_a_models_name_is_whole_characters_wherever_it_is(tmp_path, folder, name):
    path = os.path.join(os.fsencode(tmp_path), folder)
    os.symlink(DEMO, path)
    with Server(model=path) as server:
        assert 'model_info{model_name="%s"' % name in server.get("/metrics").content.decode()
        assert server.get("/v1/models").json()["data"][0]["id"] == name
        assert server.ok("/generate", {"prompt": "a", "model": name, "max_tokens": 1})


def test_metrics_stay_small_with_the_longest_name_and_traffic_on_all_routes():
    name = "meta-llama/" + "x" * 85
    with Server("--metrics-compat", "vllm", "--served-model-name", name) as server:
        paths = server.get("/openapi.json").json()["paths"]
        for path in list(paths) + GET_ROUTES + ["/nowhere"]:
            server.get(path)
            server.post(path, "{}")
            server.post(path, {"prompt": "A", "inputs": "A", "text": "A", "tokens": [5]})
        server.ok("/generate", {"prompt": "A", "max_tokens": 3, "ignore_eos": True})
        server.ok("/score", {"text": "A b"})
        text = server.get("/metrics").text
        assert len(text) < METRICS_BYTES_MAX, len(text)
        bounds = re.findall(r'vllm:e2e_request_latency_seconds_bucket\{.*le="([^"]*)"\} (\d+)', text)
        assert len(bounds) == 6 and bounds[-1][0] == "+Inf" and int(bounds[-1][1]) > 0, bounds


# ---- tokens -----------------------------------------------------------------------------------

TEXT = "The old man\u2019s  boat, \u00e9t\u00e9 \U0001f600 </s> \n x"


def test_tokenize_dialects(server):
    plain = server.ok("/tokenize", {"prompt": TEXT, "add_special_tokens": False})
    assert plain["count"] == len(plain["tokens"]) and plain["max_model_len"] == 512
    assert plain["token_strs"] is None
    marked = server.ok("/tokenize", {"prompt": TEXT, "return_token_strs": True})
    assert marked["tokens"] == [1] + plain["tokens"]
    assert len(marked["token_strs"]) == len(marked["tokens"])
    content = server.ok("/tokenize", {"content": TEXT})
    assert content == {"tokens": plain["tokens"]}
    pieces = server.ok("/tokenize", {"content": TEXT, "with_pieces": True})["tokens"]
    assert [p["id"] for p in pieces] == plain["tokens"]
    assert [p["piece"] for p in pieces] == marked["token_strs"][1:]
    listed = server.ok("/tokenize", {"inputs": TEXT, "add_special_tokens": False})
    assert [t["id"] for t in listed] == plain["tokens"]
    assert all(t["start"] <= t["stop"] for t in listed) and listed[-1]["stop"] == len(TEXT)


def test_control_token_alone_is_its_id(server):
    """What lm-evaluation-harness asks for; inside a text it is plain text."""
    body = {"prompt": "</s>", "add_special_tokens": False}
    assert server.ok("/tokenize", body)["tokens"] == [1]
    assert 1 not in server.ok("/tokenize", {"prompt": "a </s>", "add_special_tokens": False})["tokens"]


def test_bos_token_of_bytes_is_its_id():
    with Server(model=UNBOUNDED) as s:
        name = s.get("/tokenizer_info").json()["bos_token"]
        body = {"prompt": name, "add_special_tokens": False}
        bos = s.get("/info").json()["model"]["bos_token_id"]
        assert s.ok("/tokenize", body)["tokens"] == [bos]
        assert len(s.ok("/tokenize", {**body, "parse_special": False})["tokens"]) == len(name)


@pytest.mark.parametrize("text", [TEXT, "", " ", "a", "  a  ", "\u2581", "\n\n"])
def test_detokenize_is_the_inverse(server, text):
    ids = server.ok("/tokenize", {"prompt": text, "add_special_tokens": False})["tokens"]
    got = server.ok("/detokenize", {"tokens": ids})
    assert got["prompt"] == got["content"]
    assert got["prompt"] == text


@pytest.mark.parametrize("path, body, code, param", [
    ("/tokenize", {}, "missing_field", "prompt"),
    ("/tokenize", {"prompt": 5}, "invalid_value", "prompt"),
    ("/tokenize", {"prompt": "a", "content": "b"}, "conflicting_fields", "content"),
    ("/tokenize", {"prompt": "a", "add_special_tokens": 1}, "invalid_value", "add_special_tokens"),
    ("/tokenize", {"prompt": "a", "add_special": 1}, "invalid_value", "add_special"),
    ("/tokenize", {"prompt": "a", "add_special_tokens": True, "add_special": False},
     "conflicting_fields", "add_special"),
    ("/tokenize", {"content": "a", "return_token_strs": False, "with_pieces": True},
     "conflicting_fields", "with_pieces"),
    ("/detokenize", {}, "missing_field", "tokens"),
    ("/detokenize", {"tokens": "a"}, "invalid_value", "tokens"),
    ("/detokenize", {"tokens": [1.5]}, "invalid_value", "tokens"),
    ("/detokenize", {"tokens": [4096]}, "token_out_of_range", "tokens"),
])
def test_wrong_token_requests(server, path, body, code, param):
    error_of(server.post(path, body), 400, code, param)


def test_tokenizer_info(server):
    got = server.get("/tokenizer_info").json()
    assert got["eos_token"] == "</s>" and got["chat_template"] is None
    assert got["model_max_length"] == 512


def test_without_a_context_limit_all_name_the_same_bound():
    with Server(model=UNBOUNDED) as s:
        info = s.get("/info").json()
        model, = s.get("/v1/models").json()["data"]
        assert info["model"]["context"] is None
        assert {info["max_total_tokens"], info["limits"]["max_model_len"], model["max_model_len"],
                model["meta"]["n_ctx_train"], s.ok("/tokenize", {"prompt": "a"})["max_model_len"],
                s.get("/tokenizer_info").json()["model_max_length"]} == {1 << 28}


def test_check_prints_info_and_exits():
    from server_harness import DEMO, PROGRAM
    got = subprocess.run([PROGRAM, "serve", "--model", DEMO, "--check"], capture_output=True,
                         text=True, timeout=120)
    assert got.returncode == 0 and '"model_id":"demo"' in got.stdout


@pytest.mark.parametrize("model", [DEMO, UNBOUNDED])
def test_nul_is_a_character_of_texts_and_of_nothing_else(model):
    """/detokenize gives it, so every text takes it, whole."""
    text = "a\0b"
    with Server("--strict", model=model) as s:
        name = os.path.basename(model)
        ids = s.ok("/tokenize", {"prompt": text, "add_special_tokens": False})["tokens"]
        assert s.ok("/detokenize", {"tokens": ids})["prompt"] == text
        assert s.ok("/tokenize", {"inputs": text})[-1]["stop"] == 3
        echoed = {"max_tokens": 1, "echo": True, "seed": 1}
        for path, field in (("/generate", "prompt"), ("/v1/completions", "prompt")):
            assert s.ok(path, {field: text, **echoed})["choices"][0]["text"].startswith(text)
        got = s.ok("/generate", {"inputs": text, "parameters": {"max_new_tokens": 1, "return_full_text": True}})
        assert got["generated_text"].startswith(text)
        for body in ({"text": text}, {"context": "x", "continuations": [text]},
                     {"pairs": [{"context": "x", "continuation": text}]}):
            assert s.ok("/score", body)["results"][0]["n_bytes"] == 3, body
        s.ok("/v1/score", {"query": text, "items": [text], "label_token_ids": [5]})
        nul = s.ok("/tokenize", {"prompt": "\0", "add_special_tokens": False})["tokens"]
        stop = {"prompt": text, "stop": "\0", "max_tokens": 4, "allowed_token_ids": nul}
        choice = s.ok("/generate", stop)["choices"][0]
        assert (choice["text"], choice["stop_reason"]) == ("", "\0"), choice
        for field in ("model", "id", "priority", "memory"):
            value = {"model": name, "priority": "bulk", "memory": "summary"}.get(field, "me") + "\0x"
            error_of(s.post("/generate", {"prompt": "a", field: value}),
                     400, "invalid_value", field)
        error_of(s.post("/generate", {"prompt": "a", "i\0d": 1}), 400, "invalid_json")
