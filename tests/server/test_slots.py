"""Slot traces: "memory": "slots", and the part of it that memory_slots asks for."""

import base64
import struct

import pytest

from server_harness import UNBOUNDED, Server, error_of, events

TEXT = "It is a truth universally acknowledged, that a single man must be in want of a wife."
BODY = {"prompt": TEXT, "max_tokens": 6, "temperature": 0, "ignore_eos": True}


def words(text, kind):
    data = base64.b64decode(text, validate=True)
    return list(struct.unpack("<%d%s" % (len(data) // 4, kind), data))


def arrays(block):
    """Positions of slots, of weights."""
    n = len(block["memories"]) * block["heads"] * block["knn"]
    lists = [words(block["indices"], "i"), words(block["weights"], "f")]
    for each in lists:
        assert len(each) == block["n_position"] * n
    return [[each[i:i + n] for i in range(0, len(each), n)] for each in lists]


def told(tokens, key):
    """What "memory": "tokens" tells of a single memory, alike."""
    return [[value for head in position for value in head[key]] for position in tokens]


def near(a, b):
    return all(abs(x - y) <= 1e-6 * abs(x) for p, q in zip(a, b) for x, y in zip(p, q))


@pytest.mark.parametrize("path, body", [("/score", {"text": TEXT}), ("/generate", BODY),
                                        ("/v1/completions", {"model": "demo", **BODY})])
def test_the_same_as_tokens(server, path, body):
    def memory(**fields):
        got = server.ok(path, {**body, **fields})
        return (got.get("choices") or got["results"])[0]["memory"]

    tokens = memory(memory="tokens")["layers"][0].pop("tokens")
    got = memory(memory="slots")
    assert got["layers"] == memory(memory="summary")["layers"]
    block, = got["slots"]
    assert list(block) == ["start", "n_position", "memories", "heads", "knn", "indices", "weights"]
    assert (block["start"], block["n_position"], block["memories"]) == (0, len(tokens), [0])
    slots, weights = arrays(block)
    assert slots == told(tokens, "slots") and near(told(tokens, "weights"), weights)
    wish = {"start": 5, "memories": [0], "weights": False}
    part, = memory(memory="slots", memory_slots=wish)["slots"]
    assert (part["start"], part["n_position"]) == (5, len(tokens) - 5) and "weights" not in part
    assert words(part["indices"], "i") == sum(slots[5:], [])
    past, = memory(memory="slots", memory_slots={"start": 1000})["slots"]
    assert past["n_position"] == 0 and past["indices"] == ""
    top, = memory(memory="slots", memory_slots={"top": 7, "start": 2})["slots"]
    sums = {}
    for slot, weight in zip(sum(slots[2:], []), sum(weights[2:], [])):
        n, total = sums.get(slot, (0, 0))
        sums[slot] = (n + 1, total + weight)
    best = sorted(sums, key=lambda slot: (-sums[slot][1], slot))[:7]
    assert "indices" not in top
    assert [row[:3] for row in top["top"]] == [[0, slot, sums[slot][0]] for slot in best]
    assert near([[sums[slot][1] for slot in best]], [[row[3] for row in top["top"]]])


@pytest.mark.parametrize("n, top", [(300, 4096), (700, 4096), (700, 1)])
def test_the_slots_read_most_of_fewer_look_ups_than_slots_and_of_more(server, n, top):
    body = {"tokens": [5 + 7 * i * i % 900 for i in range(n)], "memory": "slots"}
    whole, = server.ok("/score", body)["results"][0]["memory"]["slots"]
    rows, weights = arrays(whole)
    sums = {}
    for slot, weight in zip(sum(rows, []), sum(weights, [])):
        reads, total = sums.get(slot, (0, 0.0))
        sums[slot] = (reads + 1, total + weight)
    best = sorted(sums, key=lambda slot: (-sums[slot][1], slot))[:top]
    got, = server.ok("/score", {**body, "memory_slots": {"top": top}})["results"][0]["memory"]["slots"]
    assert got["top"] == [[0, slot, *sums[slot]] for slot in best]


@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
def test_a_stream_tells_each_position_once(server, path):
    body = {"model": "demo", **BODY, "n": 2, "seed": 3, "temperature": 1, "memory": "slots"}
    whole = server.ok(path, body)["choices"]
    seen = {0: [], 1: []}
    last = {}
    for event in events(server.post(path, {**body, "stream": True}).text):
        choice = event["choices"][0] if "choices" in event else event
        for block in choice.get("memory", {}).get("slots", []):
            seen[choice["index"]].append(block)
        last[choice["index"]] = choice.get("memory", last.get(choice["index"]))
    for choice in whole:
        block, = choice["memory"]["slots"]
        parts = seen[choice["index"]]
        assert len(parts) >= BODY["max_tokens"]
        assert last[choice["index"]]["layers"] == choice["memory"]["layers"]
        at = 0
        slots, weights = [], []
        for part in parts:
            assert part["start"] == at
            at += part["n_position"]
            some = arrays(part)
            slots += some[0]
            weights += some[1]
        assert [slots, weights] == arrays(block)


def test_each_document_and_window(server):
    long = [5 + i * 7 % 3000 for i in range(700)]
    got = server.ok("/score", {"tokens": [long, [5, 6, 7]], "memory": "slots", "stride": 100,
                               "memory_slots": {"start": 690}})["results"]
    assert [r["memory"]["slots"][0]["start"] for r in got] == [690, 690]
    assert [r["memory"]["slots"][0]["n_position"] for r in got] == [10, 0]
    assert all(r["memory"]["layers"][0]["lookups"] > 0 for r in got)
    ending = server.ok("/score", {"pairs": [{"context": long, "continuation": [9, 8]}],
                                  "on_long": "window", "memory": "slots",
                                  "memory_slots": {"weights": False}})["results"][0]
    block, = ending["memory"]["slots"]  # the context's beginning was lost: it is not computed
    assert block["start"] + block["n_position"] == 702 and block["start"] > 0


def test_a_text_of_one_token_is_read_though_nothing_of_it_is_scored(server):
    got, = server.ok("/score", {"tokens": [300], "memory": "slots"})["results"]
    block, = got["memory"]["slots"]
    assert (got["n_scored"], block["start"], block["n_position"]) == (0, 0, 1)


def test_what_is_traced_is_computed(server):
    body = {"prompt": [9] + [300 + i for i in range(40)], "max_tokens": 2, "temperature": 0}
    server.ok("/generate", body)
    got = server.ok("/generate", {**body, "memory": "slots"})
    assert got["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert got["choices"][0]["memory"]["slots"][0]["n_position"] == 43


def test_weights_are_those_used(server):
    def block(**fields):
        return arrays(server.ok("/score", {"text": TEXT, "memory": "slots", **fields})["results"][0]
                      ["memory"]["slots"][0])

    slots, weights = block()
    off_slots, off_weights = block(ablate=[{"memory": 0, "head": 0}])
    assert off_slots == slots
    assert [row[:32] for row in off_weights] == [[0.0] * 32] * len(weights)
    assert [row[32:] for row in off_weights] == [row[32:] for row in weights]


WRONG = [
    ({"memory_slots": {}}, "\"memory\": \"slots\" only"),
    ({"memory": "summary", "memory_slots": {"top": 1}}, "only"),
    ({"memory": "slots", "memory_slots": []}, "an object"),
    ({"memory": "slots", "memory_slots": {"stop": 1}}, "not stop"),
    ({"memory": "slots", "memory_slots": {"start": -1}}, ".start must be an integer from 0, not -1"),
    ({"memory": "slots", "memory_slots": {"start": True}}, ".start"),
    ({"memory": "slots", "memory_slots": {"memories": []}}, ".memories must be a list of one or more memories, not an empty list"),
    ({"memory": "slots", "memory_slots": {"memories": [0, 1]}}, ".memories[1] must be an integer 0 ... 0, not 1"),
    ({"memory": "slots", "memory_slots": {"weights": 1}}, ".weights must be true or false, not 1"),
    ({"memory": "slots", "memory_slots": {"top": 0}}, ".top"),
    ({"memory": "slots", "memory_slots": {"top": 4097}}, ".top must be an integer 1 ... 4096, not 4097"),
]


@pytest.mark.parametrize("fields, says", WRONG)
def test_what_is_refused(server, fields, says):
    for path, body in (("/score", {"text": "a"}), ("/generate", {"prompt": "a"}),
                       ("/v1/completions", {"model": "demo", "prompt": "a"})):
        assert says in error_of(server.post(path, {**body, **fields}), 400, "invalid_value",
                                "memory_slots")


def test_the_bound_holds_before_the_queue():
    with Server("--max-trace-bytes", "10240") as s:  # ten positions of 4 · 32 · 8 bytes
        ids = list(range(5, 15))
        assert s.ok("/score", {"tokens": ids, "memory": "slots"})
        message = error_of(s.post("/score", {"tokens": ids + [7], "memory": "slots"}), 400,
                           "trace_too_large", "memory")
        assert "11264" in message and "10240 (--max-trace-bytes)" in message
        for more in ({"weights": False}, {"start": 1}, {"top": 200}):
            s.ok("/score", {"tokens": ids + [7], "memory": "slots", "memory_slots": more})
        message = error_of(s.post("/score", {"tokens": ids, "memory": "slots", "memory_slots": {"top": 4096}}), 400,
                           "trace_too_large", "memory")
        assert "the limit is 10240" in message
        for n, status in ((1, 200), (2, 400)):
            body = {"prompt": ids[:7], "max_tokens": 3, "n": n, "memory": "slots"}
            assert s.post("/generate", body).status_code == status


def test_traces_for_which_there_is_never_room_are_refused():
    with Server("--memory-trace-bytes", "10240") as s:
        ids = list(range(5, 205))
        one = error_of(s.post("/score", {"tokens": ids, "memory": "summary"}), 400, "trace_too_large", "memory")
        assert "10240 bytes, the limit (--memory-trace-bytes)" in one
        error_of(s.post("/generate", {"prompt": ids, "memory": "summary"}), 400, "trace_too_large", "memory")
        many = error_of(s.post("/score", {"text": ["a"] * 200, "memory": "summary"}), 400, "too_many_items", "memory")
        assert "200 items" in many


def test_memory_trace_says_what_may_be_asked_for():
    for level, allowed in (("off", []), ("summary", ["summary"])):
        with Server("--memory-trace", level) as s:
            assert s.get("/info").json()["defaults"]["memory_trace"] == level
            for memory in ("summary", "tokens", "slots"):
                answer = s.post("/score", {"text": "a", "memory": memory})
                if memory in allowed:
                    assert answer.status_code == 200
                else:
                    error_of(answer, 403, "memory_trace_disabled", "memory")
            s.counted('requests_rejected_total{reason="invalid"}', 3 - len(allowed))  # it is no matter of keys


def test_a_model_without_memories_has_no_slots():
    with Server(model=UNBOUNDED) as s:
        error_of(s.post("/score", {"text": "a", "memory": "slots"}), 400, "unsupported_parameter",
                 "memory")
        got = s.ok("/score", {"text": "a b", "memory": "summary"})["results"][0]
        assert got["memory"]["layers"] == []
