"""The table of errors in server/API.md: each example is sent and must be answered as it says; each
code that takes more than a request to bring about names the test that does it."""

import glob
import json
import os
import re
import resource
import sys

import pytest
import requests

from server_harness import DEMO, FOREVER, PATIENCE, PROGRAM, ROOT, UNBOUNDED, Server, error_of, eventually, head

sys.path.insert(0, os.path.join(ROOT, "tests"))
from broken_model import without_numbers_at  # noqa: E402

TEXT = open(os.path.join(ROOT, "server", "API.md")).read()
# | 400 `code` | `/path` `body` | message |
EXAMPLE = re.compile(r"^\| (\d+) `(\w+)` \| (GET )?`(/[\w/]+)` `(.*)` \| (.*) \|$", re.M)
# | 429 `code` | what brings it about |
STATE = re.compile(r"^\| (\d+) `(\w+)` \| ([^|]+) \|$", re.M)
ELSEWHERE = {
    "invalid_api_key": "test_keys.py anything_else_is_401",
    "memory_trace_disabled": "test_generate.py memory",
    "trace_too_large": "test_slots.py",
    "overlay_forbidden": "test_overlays.py keys_are_bound",
    "overlay_not_found": "test_overlays.py versions_while_requests_run",
    "overlay_mismatch": "test_overlays.py what_is_refused",
    "overlays_full": "test_overlays.py what_is_refused",
    "counts_disabled": "test_counts.py without_being_asked_nothing_is_counted",
    "body_timeout": "test_http_rules.py slow_body_gets_408",
    "body_too_large": "test_http_rules.py large_content_length_is_refused_before_the_body",
    "queue_full": "test_life.py full_queue_gets_429",
    "queue_tokens_full": "test_errors.py full_queue_of_tokens",
    "queue_memory_full": "test_fair.py unread_results",
    "client_limit": "test_keys.py one_client_may_not_take_all",
    "buffers_full": "test_http_rules.py stalled_uploads_cost_their_own_connections",
    "internal_error": "test_cuda.py a_failure_ends_requests_readiness_and_process",
    "numerical_error": "test_errors.py what_is_no_number_is_an_error",
    "out_of_memory": "test_errors.py out_of_memory_is_told_as_such",
    "model_loading": "test_life.py",
    "shutting_down": "test_life.py",
    "engine_stalled": "test_cuda.py a_stalled_engine_is_not_ready",
    "engine_failed": "test_cuda.py a_failure_ends_requests_readiness_and_process",
    "too_many_connections": "test_http_rules.py too_many_connections_get_503",
    "queue_timeout": "test_life.py full_queue_gets_429",
    "run_timeout": "test_life.py",
}


@pytest.fixture(scope="module")
def server():
    with Server("--strict", "--max-items", "2", "--max-score-tokens", "8") as s:
        yield s


@pytest.mark.parametrize("row", EXAMPLE.findall(TEXT), ids=lambda row: row[1])
def test_example_of_the_table(server, row):
    status, code, get, path, body, message = row
    data = body.encode().decode("unicode_escape").encode("latin-1") if "\\x" in body \
        else body.encode()
    answer = requests.request("GET" if get else "POST", server.url + path, data=data,
                              timeout=PATIENCE) if not get else server.get(path)
    assert error_of(answer, int(status), code).replace("|", "\\|") == message


def test_table_is_complete():
    """Every code in the sources is in the table, and every other way round."""
    sources = ""
    for name in glob.glob(os.path.join(ROOT, "server", "**", "*.c"), recursive=True):
        sources += open(name).read()
    used = set(re.findall(r'\b(?:40[0-9]|413|429|50[0-9]), "(\w+)"', sources))
    examples = {row[1] for row in EXAMPLE.findall(TEXT)}
    states = {row[1] for row in STATE.findall(TEXT)}
    assert len(used) > 20 and used <= examples | states, used - examples - states
    assert states == set(ELSEWHERE)
    assert all('"%s"' % code in sources for code in examples | states)
    for code, where in ELSEWHERE.items():
        name, *test = where.split()
        source = open(os.path.join(ROOT, "tests", "server", name)).read()
        assert code in source, (code, where)
        assert not test or re.search(r"^def test_\w*%s" % test[0], source, re.M), where


@pytest.fixture(scope="module")
def narrow():
    with Server("--max-body-bytes", "1500", "--max-score-tokens", "110", "--max-score-positions", "100") as s:
        yield s


def padded(n):
    return b'{"text": "A"}'.ljust(n)


# What is just within a limit, and what is one more.
LIMITS = {
    "body": (padded(1500), padded(1501), 413, "body_too_large"),
    "body in chunks": ([padded(1000), b" " * 500], [padded(1000), b" " * 501], 413, "body_too_large"),
    "log-probabilities": ({"tokens": [5] * 55, "logprobs": 7}, {"tokens": [5] * 63, "logprobs": 6}, 400,
                          "too_many_tokens"),  # 55 * 8 are 4 * 110, and 63 * 7 one more
    "positions": ({"tokens": [5] * 101}, {"tokens": [5] * 102}, 400, "too_many_tokens"),
}


@pytest.mark.parametrize("name", LIMITS)
def test_what_is_at_a_limit_is_taken_and_one_more_is_not(narrow, name):
    within, beyond, status, code = LIMITS[name]

    def send(body):
        data = json.dumps(body) if isinstance(body, dict) else iter(body) if isinstance(body, list) else body
        return requests.post(narrow.url + "/score", data=data, timeout=PATIENCE)

    assert send(within).status_code == 200
    error_of(send(beyond), status, code)


def test_the_longest_request_id_comes_back_and_a_longer_one_does_not(server):
    for n in (128, 129):
        answer = server.get("/health", headers={"x-request-id": "i" * n})
        assert answer.status_code == 200 and (answer.headers["x-request-id"] == "i" * n) == (n == 128)
        answer = server.post("/score", {"text": "A", "id": "i" * n})
        if n == 128:
            assert answer.json()["id"] == "i" * n
        else:
            assert "id has 129 bytes, but 128" in error_of(answer, 400, "invalid_value", "id")


@pytest.mark.parametrize("given", [b"two words", b"a\ttab", "\u00e9t\u00e9".encode(), b""])
def test_an_id_of_other_than_visible_ascii_gives_way_to_a_drawn_one(server, given):
    answer = server.get("/health", headers={"x-request-id": given})
    assert re.fullmatch("[0-9a-f]{24}", answer.headers["x-request-id"])


def test_full_queue_of_tokens_is_429():
    with Server("--max-seqs", "1", "--max-queue-tokens", "500000", model=UNBOUNDED) as s:
        held = [s.connect() for _ in range(2)]
        for number, metric in enumerate(("num_requests_running", "num_requests_waiting")):
            held[number].sendall(head("/generate", json.dumps(FOREVER).encode()))
            eventually(lambda: s.metric(metric) == 1, metric)
        assert "--max-queue-tokens" in error_of(s.post("/generate", FOREVER), 429, "queue_tokens_full")
        for connection in held:
            connection.close()


def test_what_is_no_number_is_an_error_500(tmp_path):
    model = without_numbers_at(40, DEMO, tmp_path / "model")
    with Server(model=str(model)) as s:
        assert s.post("/score", {"tokens": [300] * 40}).status_code == 200
        error_of(s.post("/score", {"tokens": [300] * 60}), 500, "numerical_error")
        error_of(s.post("/generate", {"prompt": [300] * 60, "max_tokens": 2}), 500,
                 "numerical_error")
        tgi = {"inputs": "a b " * 30, "parameters": {"max_new_tokens": 2}}
        assert s.post("/generate", tgi).status_code == 424
        s.counted('requests_total{route="/generate",code="424"}')
        assert s.metric('requests_rejected_total{reason="invalid"}') == 0  # it had been taken
        assert s.get("/health/ready?deep=1").status_code == 200
        # Of several inputs the one is told, which two samples or two texts may stand for.
        prompts = {"prompt": [[300] * 20, [300] * 60], "n": 2, "max_tokens": 2}
        for path in ("/generate", "/v1/completions"):
            assert "prompt[1]: " in error_of(s.post(path, prompts), 500, "numerical_error")
        assert "prompt[" not in error_of(s.post("/generate", {**prompts, "prompt": [300] * 60}), 500,
                                         "numerical_error")
        ranked = {"context": "a", "continuations": [" b", " a b" * 30], "unconditional": True}
        assert "item 1: " in error_of(s.post("/score", ranked), 500, "numerical_error")
        # The other texts of a request are not computed in vain, and do not hide why it failed.
        many, before = [[300] * 39] * 200, s.metric("engine_steps_total")
        s.ok("/score", {"tokens": many})
        all_of_them = s.metric("engine_steps_total") - before
        bad = many[:1] + [[300] * 60] + many
        assert "item 1: " in error_of(s.post("/score", {"tokens": bad}), 500, "numerical_error")
        assert s.metric("engine_steps_total") - before < 1.5 * all_of_them
        assert s.metric('requests_cancelled_total{stage="score"}') == 0


def test_the_windows_of_a_text_end_with_the_first_that_fails(tmp_path):
    """Those in the same step, those that are admitted but not in it, and those that wait."""
    model = without_numbers_at(40, DEMO, tmp_path / "model")
    with Server("--max-seqs", "8", "--max-batch-tokens", "64", model=str(model)) as s:
        windows = {"max_context": 60, "stride": 10}
        for texts in ([300] * 400, [[300] * 30, [300] * 400, [300] * 400]):
            error_of(s.post("/score", {"tokens": texts, **windows}), 500, "numerical_error")
            eventually(lambda: s.metric("kv_cache_usage_perc") == s.metric("num_requests_running") == 0,
                       "no page is held")
            s.ok("/score", {"tokens": [300] * 400, "max_context": 39, "stride": 10})


@pytest.mark.skipif(bool({"asan", "tsan"} & set(PROGRAM.split("/"))),
                    reason="a sanitizer needs all of the address space")
def test_a_large_answer_takes_no_memory_of_its_own():
    """Traces lie in memory that was reserved at start, and their answer is written in pieces."""
    with Server() as s:
        limit_memory(s, 4 << 20)
        body = {"tokens": [[300] * 500] * 20, "memory": "tokens"}
        assert len(s.ok("/score", body)["results"]) == 20
        assert s.post("/score", {"text": "A small one."}).status_code == 200


def limit_memory(s, more):
    """Lets the server map that many bytes more than it has mapped."""
    status = open("/proc/%d/status" % s.process.pid).read()
    used = int(re.search(r"VmSize:\s+(\d+) kB", status)[1]) * 1024
    resource.prlimit(s.process.pid, resource.RLIMIT_AS, (used + more, used + more))


HUNGRY = {"/generate": b'{"prompt":[' + b"{}," * 1000000 + b"{}]}",
          "/tokenize": b'{"content":"' + b"a b " * 1000000 + b'"}',
          "/detokenize": b'{"tokens":[' + b"300," * 2000000 + b"300]}"}


@pytest.mark.skipif(bool({"asan", "tsan"} & set(PROGRAM.split("/"))),
                    reason="sanitizers map far more than they use")
@pytest.mark.parametrize("path", HUNGRY)
def test_out_of_memory_is_told_as_such(path):
    with Server() as s:
        limit_memory(s, 16 << 20)
        error_of(s.post(path, HUNGRY[path]), 500, "out_of_memory")
        assert s.post("/score", {"text": "A small one."}).status_code == 200


UNSUPPORTED = re.findall(r'^    \{"(\w+)", ([01])\},$',
                         open(os.path.join(ROOT, "server", "io", "input.c")).read(), re.M)
TAKES = {"/generate": {"prompt": "A", "max_tokens": 1}, "/v1/completions": {"prompt": "A", "max_tokens": 1},
         "/score": {"text": "A"}, "/v1/score": {"query": "A", "items": "B", "label_token_ids": [5]},
         "/generate_stream": {"inputs": "A", "parameters": {"max_new_tokens": 1}}}


READS = {"/generate": ["typical_p"], "/v1/completions": ["typical_p"],
         "/generate_stream": ["typical_p", "truncate"]}


@pytest.mark.parametrize("path", TAKES)
def test_what_is_left_out_is_refused_by_name_on_every_route(server, path):
    names = [name for name, _ in UNSUPPORTED]
    assert {"lora_request", "multi_modal_data", "structured_outputs", "json_schema", "tools", "functions",
            "chat_template", "kv_transfer_params", "suffix", "truncate", "mirostat"} <= set(names)
    for name in names:
        if name in READS.get(path, ()):
            continue
        body = {**TAKES[path], name: {"some": "thing"}}
        if path == "/generate_stream":
            assert name in server.post(path, body).json()["error"]
            body = {"inputs": "A", "parameters": {name: {"some": "thing"}}}
            assert name in server.post(path, body).json()["error"]
        else:
            error_of(server.post(path, body), 400, "unsupported_parameter", name)
    for nothing in (None, False, "", [], {}, "none"):
        others = [n for n in names if nothing is None or n not in READS.get(path, ())]
        answer = server.post(path, {**TAKES[path], **dict.fromkeys(others, nothing)})
        assert answer.status_code == 200 and "X-Ignored-Fields" not in answer.headers, answer.text
    for name, off in UNSUPPORTED:
        if name not in READS.get(path, ()):
            answer = server.post(path, {**TAKES[path], name: int(off) + 1})
            assert answer.status_code >= 400 and name in answer.text, name
    neutral = {name: int(off) for name, off in UNSUPPORTED}
    assert server.post(path, {**TAKES[path], **neutral, "response_format": {"type": "text"}}).status_code == 200


def test_a_path_without_v1_is_told_where_it_is(server):
    for path in ("/completions", "/chat/completions"):
        message = error_of(server.post(path, {}), 404, "route_not_found")
        assert "/v1%s is there" % path in message and "base_url" in message, message
    assert "/v1" not in error_of(server.post("/nowhere", {}), 404, "route_not_found")


def test_single_quotes_are_told_from_other_faults(server):
    message = error_of(server.post("/generate", b"{'prompt': 'a'}"), 400, "invalid_json")
    assert message.endswith("strings of JSON stand in double quotes"), message
    assert "double quotes" not in error_of(server.post("/generate", b'{"prompt": "it\'s"'), 400,
                                           "invalid_json")
