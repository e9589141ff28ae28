"""Overlays: rows that a request reads instead of the base's, who has which, and what is refused."""

import json
import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import requests

from server_harness import (DEMO, PATIENCE, PROGRAM, ROOT, UNBOUNDED, Server, error_of, eventually, events, free_port,
                            is_answered)
from test_keys import bearer

sys.path.insert(0, ROOT + "/tests")
from overlay_files import Base, bf16, in_bf16, pack, widened  # noqa: E402

GOLDEN = os.path.join(ROOT, os.environ.get("B", "build"), "golden")
TWO_MEMORIES, SHARED_TABLE = os.path.join(GOLDEN, "pkm12-2mem"), os.path.join(GOLDEN, "share-values")
OF_GOLDEN = {"tokens": [[3 + i * i % 190 for i in range(40)]], "logprobs": 0, "memory": "summary"}
TEXT = "It is a truth universally acknowledged, that a single man must be in want of a wife."
PROMPT = [7] + [200 + i * 31 % 700 for i in range(50)]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return Base(in_bf16(DEMO, tmp_path_factory.mktemp("base") / "demo"))


@pytest.fixture(scope="module")
def changed(base):
    """Slots, of which every text here reads some, and other rows for them in the table's type."""
    slots = np.arange(1, 16384, 3)
    return slots, bf16(np.roll(widened(base.table(0)[slots]), 7, axis=0) * 2)


class Admin(Server):
    def __init__(self, *flags, **kw):
        self.admin = "http://127.0.0.1:%d" % (port := free_port())
        super().__init__("--admin-port", str(port), *flags, **kw)

    def find_port(self, other_than=0):
        return super().find_port(int(self.admin.rsplit(":", 1)[1]))

    def ask(self, method, path, **kw):
        return requests.request(method, self.admin + path, timeout=PATIENCE, **kw)

    def put(self, name, data):
        answer = self.ask("PUT", "/memory/overlays/" + name, data=data)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def connect_admin(self):
        return socket.create_connection(("127.0.0.1", int(self.admin.rsplit(":", 1)[1])), timeout=PATIENCE)

    def metric_of(self, line):
        for each in self.ask("GET", "/metrics").text.splitlines():
            if each.startswith("pkmserve_" + line + " "):
                return float(each.split()[-1])
        return None


@pytest.fixture(scope="module")
def server(base, changed):
    with Admin("--overlay-bytes", str(64 << 20), model=base.directory) as s:
        slots, rows = changed
        s.put("changed", base.overlay({0: (slots, "BF16", rows)}))
        s.put("same", base.overlay({0: (slots, "BF16", base.table(0)[slots])}))
        s.put("even", base.overlay({0: (slots[::2], "BF16", rows[::2])}))
        s.put("odd", base.overlay({0: (slots[1::2], "F32", widened(rows[1::2]))}))
        yield s


def scored(server, **fields):
    got = server.ok("/score", {"text": TEXT, "logprobs": 1, "memory": "summary", **fields})
    return got["results"]


def test_the_bits_of_a_directory_with_these_rows(server, base, changed, tmp_path):
    slots, rows = changed
    directory = base.with_rows(tmp_path / "model", {(0, "values"): (slots, rows)})
    bodies = [("/score", {"text": TEXT, "logprobs": 2}),
              ("/generate", {"prompt": TEXT, "max_tokens": 24, "temperature": 0, "logprobs": 2}),
              ("/v1/completions", {"prompt": TEXT, "max_tokens": 8, "seed": 3, "logprobs": 1, "echo": True})]

    def essence(answer):
        return answer.get("results") or answer["choices"]

    got = [essence(server.ok(path, {**body, "overlay": "changed"})) for path, body in bodies]
    plain = [essence(server.ok(path, body)) for path, body in bodies]
    with Server(model=directory) as other:
        assert [essence(other.ok(path, body)) for path, body in bodies] == got
    assert all(a != b for a, b in zip(got, plain))


def test_tgis_form_tells_the_versions_too(server):
    body = {"inputs": "The", "overlay": "changed", "parameters": {"max_new_tokens": 2}}
    due = server.ok("/score", {"text": "A", "overlay": "changed"})["overlay"]
    assert server.ok("/generate", body)["overlay"] == due
    stream = server.post("/generate_stream", body).text.split("\n\n")
    told = [json.loads(part[len("data:"):]) for part in stream if part.startswith("data:")]
    assert told[-1]["overlay"] == due and "overlay" not in told[0]
    assert "overlay" not in server.ok("/generate", {**body, "overlay": None})


def test_the_bases_own_rows_give_its_bits(server):
    assert scored(server, overlay="same") == scored(server)


def test_two_overlays_are_one_and_a_wider_type_changes_nothing(server):
    whole = scored(server, overlay="changed")
    assert scored(server, overlay=["even", "odd"]) == scored(server, overlay=["odd", "even"]) == whole
    assert scored(server, overlay="even") != whole


def test_adding_is_done_once_in_fp32(server, base, changed):
    slots, rows = changed
    before = widened(base.table(0)[slots])
    delta = (widened(rows) - before).astype("<f4")
    server.put("delta", base.overlay({0: (slots, "F32", delta)}, mode="add"))
    server.put("sum", base.overlay({0: (slots, "F32", before + delta)}))
    assert scored(server, overlay="delta") == scored(server, overlay="sum") != scored(server)


def test_rows_of_every_type(server, base, changed):
    """Numbers that each type holds exactly are the same in each."""
    slots = changed[0][:400]
    codes = np.random.default_rng(2).integers(-127, 128, (len(slots), 256)).astype(np.int8)
    scale = np.full(len(slots), 2.0 ** -9, "<f4")
    values = codes.astype("<f4") * scale[:, None]
    rows = {"f32": ("F32", values), "f16": ("F16", values.astype("<f2")), "bf16": ("BF16", bf16(values)),
            "i8": ("I8", (codes, scale))}
    for name, (dtype, each) in rows.items():
        server.put("type-" + name, base.overlay({0: (slots, dtype, each)}))
    got = [scored(server, overlay="type-" + name) for name in rows]
    assert got[0] == got[1] == got[2] == got[3] != scored(server)  # a scale that is a power of 2 rounds nothing


def test_tenants_mixed_in_a_batch_have_the_bits_of_alone(server):
    kinds = [{}, {"overlay": "changed"}, {"overlay": "same"}, {"overlay": "even"}, {"overlay": ["odd", "even"]},
             {"overlay": "odd", "ablate": [{"memory": 0, "head": 1}]}]
    bodies = [{"prompt": PROMPT[:20 + i], "max_tokens": 12, "temperature": 0, "logprobs": 1, "ignore_eos": True,
               **kinds[i % len(kinds)]} for i in range(24)]
    alone = [server.ok("/generate", body)["choices"] for body in bodies]
    with ThreadPoolExecutor(24) as pool:
        assert list(pool.map(lambda body: server.ok("/generate", body)["choices"], bodies)) == alone
    assert alone[0] != server.ok("/generate", {**bodies[0], "overlay": "changed"})["choices"]


def test_the_cache_is_kept_by_content(server, base, changed):
    slots, rows = changed
    body = {"prompt": [9] + PROMPT, "max_tokens": 2, "temperature": 0, "ignore_eos": True, "logprobs": 1}

    def run(**fields):
        got = server.ok("/generate", {**body, **fields})
        return got["choices"], got["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert run()[1] == 0
    first, cached = run(overlay="changed")
    assert cached == 0 and run(overlay="changed") == (first, 48)
    server.put("twin", base.overlay({0: (slots, "BF16", rows)}))
    assert run(overlay="twin") == (first, 48)  # another name, the same content
    assert run(overlay="twin", ablate=[{"memory": 0, "head": 0}])[1] == 0
    both, cached = run(overlay=["even", "odd"])
    assert cached == 0 and run(overlay=["odd", "even"]) == (both, 48)  # in another order
    server.put("twin", base.overlay({0: (slots[:9], "BF16", rows[:9])}))
    assert run(overlay="twin")[1] == 0  # the same name, another content


def test_answers_say_what_they_were_computed_with(server, base, changed):
    info = next(each for each in server.ask("GET", "/memory/overlays").json()["data"] if each["name"] == "changed")
    told = [{key: info[key] for key in ("name", "version", "sha256")}]
    assert info["mode"] == "replace" and info["memories"] == [{"memory": 0, "rows": len(changed[0])}]
    assert server.ok("/score", {"text": "A", "overlay": "changed"})["overlay"] == told
    assert server.ok("/generate", {"prompt": "A", "max_tokens": 1, "overlay": ["changed"]})["overlay"] == told
    assert "overlay" not in server.ok("/generate", {"prompt": "A", "max_tokens": 1, "overlay": []})
    completion = {"model": "demo:changed", "prompt": "A", "max_tokens": 2, "temperature": 0}
    whole = server.ok("/v1/completions", completion)
    assert whole["overlay"] == told
    assert whole["choices"] == server.ok("/v1/completions", {**completion, "model": "demo",
                                                             "overlay": "changed"})["choices"]
    last = events(server.post("/generate", {"prompt": "A", "max_tokens": 2, "stream": True,
                                            "overlay": "changed"}).text)[-1]
    assert last["overlay"] == told


def test_each_of_two_memories_has_rows_of_its_own(tmp_path):
    """In one overlay and in a list of them; the slots of one are not those of the other."""
    two = Base(TWO_MEMORIES)
    rng = np.random.default_rng(4)
    rows = [rng.permutation(two.table(m)) * (2 + m) for m in range(2)]
    slots = [np.arange(m, 256, 2 - m) for m in range(2)]  # the even ones of memory 0, of memory 1 all but the first
    due = {}
    for which in ((0,), (1,), (0, 1)):
        folder = two.with_rows(tmp_path / str(which), {(m, "values"): (slots[m], rows[m][slots[m]]) for m in which})
        with Server(model=folder) as other:
            due[which] = other.ok("/score", OF_GOLDEN)["results"]
    with Admin(model=two.directory) as s:
        parts = [{m: (slots[m], "F32", rows[m][slots[m]])} for m in range(2)]
        for name, part in (("zero", parts[0]), ("one", parts[1]), ("both", {**parts[0], **parts[1]})):
            told = s.put(name, two.overlay(part))["memories"]
            assert told == [{"memory": m, "rows": len(slots[m])} for m in part]
        got = {name: s.ok("/score", {**OF_GOLDEN, "overlay": name.split()})["results"]
               for name in ("", "zero", "one", "both", "zero one", "one zero")}
        assert got["zero"] == due[0,] and got["one"] == due[1,]
        assert got["both"] == got["zero one"] == got["one zero"] == due[0, 1]
        assert len({json.dumps(each) for each in got.values()}) == 4
        message = error_of(s.post("/score", {**OF_GOLDEN, "overlay": ["one", "both"]}), 400, "overlay_mismatch")
        assert "both have rows for slot 1 of memory 1" in message
        other_base = two.overlay({**parts[0], **parts[1]}).replace(two.hash(1).encode(), two.hash(0).encode())
        message = error_of(s.ask("PUT", "/memory/overlays/x", data=other_base), 400, "overlay_mismatch")
        assert "values of memory 1 have the SHA-256 " + two.hash(1) in message


def test_memories_that_share_a_table_read_its_rows(tmp_path):
    shared = Base(SHARED_TABLE)
    slots, rows = np.arange(576), np.roll(shared.table(0), 5, axis=0)
    with Server(model=shared.with_rows(tmp_path / "model", {(0, "values"): (slots, rows)})) as other:
        due = other.ok("/score", OF_GOLDEN)["results"]
    with Admin(model=shared.directory) as s:
        s.put("acme", shared.overlay({0: (slots, "F32", rows)}))
        assert s.ok("/score", {**OF_GOLDEN, "overlay": "acme"})["results"] == due != s.ok("/score", OF_GOLDEN)["results"]


def test_models_lists_them(server):
    data = server.get("/v1/models").json()["data"]
    assert data[0]["id"] == "demo" and data[0]["parent"] is None
    mine = next(each for each in data if each["id"] == "demo:even")
    assert mine["parent"] == "demo" and mine["overlay"]["version"] == 1
    assert server.get("/v1/models/demo:even").json() == mine
    error_of(server.get("/v1/models/demo:nobody"), 404, "model_not_found")


def test_versions_while_requests_run(base, changed):
    """A running request keeps its version; DELETE takes the name away, and the base is as it was."""
    slots, rows = changed
    with Admin("--overlay-bytes", str(16 << 20), model=base.directory) as s:
        plain = scored(s)
        assert s.put("acme", base.overlay({0: (slots, "BF16", rows)}))["version"] == 1
        assert s.put("acme", base.overlay({0: (slots, "BF16", rows)}))["version"] == 1  # the same content
        body = {"prompt": PROMPT, "max_tokens": 160, "temperature": 0, "ignore_eos": True, "overlay": "acme"}
        due = s.ok("/generate", body)["choices"]
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(s.ok, "/generate", body)
            eventually(lambda: s.metric_of("num_requests_running") == 1 or running.done(), "it runs")
            assert s.put("acme", base.overlay({0: (slots[:5], "BF16", rows[:5])}))["version"] == 2
            assert s.ok("/score", {"text": "A", "overlay": "acme"})["overlay"][0]["version"] == 2
            assert s.ask("DELETE", "/memory/overlays/acme").json() == {"name": "acme", "deleted": True}
            got = running.result()
        assert got["choices"] == due and got["overlay"][0]["version"] == 1
        error_of(s.post("/score", {"text": "A", "overlay": "acme"}), 404, "overlay_not_found", "overlay")
        error_of(s.ask("DELETE", "/memory/overlays/acme"), 404, "overlay_not_found")
        assert scored(s) == plain
        eventually(lambda: s.metric_of("overlay_bytes") == 0, "all room is given back")
        assert s.ask("GET", "/memory/overlays").json() == {"object": "list", "data": [], "bytes": 0,
                                                           "bytes_max": 16 << 20}
        # A version is never another content, not even after DELETE.
        assert s.put("acme", base.overlay({0: (slots[:7], "BF16", rows[:7])}))["version"] == 3
        assert s.put("other", base.overlay({0: (slots[:7], "BF16", rows[:7])}))["version"] == 1
        # Nor after another name has come, for which there was room beside the deleted one.
        assert s.ask("DELETE", "/memory/overlays/acme").status_code == 200
        for name, version in (("third", 1), ("acme", 4)):
            assert s.put(name, base.overlay({0: (slots[:7], "BF16", rows[:7])}))["version"] == version


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_nobody_reads_keeps_no_room(base, changed, stream):
    """The rows of a version are the engine's: it needs them no more when the last result is there."""
    slots, rows = changed
    with Admin("--overlay-bytes", str(4 << 20), "--min-read-rate", "0", model=base.directory) as s:
        s.put("old", base.overlay({0: (slots, "BF16", rows)}))
        assert s.metric_of("overlay_bytes") > 2 << 20
        body = json.dumps({"text": [TEXT * 15] * 20, "logprobs": 20, "overlay": "old", "stream": stream})
        with socket.socket() as unread:
            unread.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            unread.connect(("127.0.0.1", s.port))
            unread.sendall(b"POST /score HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s"
                           % (len(body), body.encode()))
            eventually(lambda: s.metric_of("num_requests_running") == 1 or is_answered(unread), "it runs")
            assert s.ask("DELETE", "/memory/overlays/old").status_code == 200
            eventually(lambda: s.metric_of("num_requests_running") == 0, "all results are there")
            eventually(lambda: s.metric_of("overlay_bytes") == 0, "the room is given back")
            s.put("new", base.overlay({0: (slots, "BF16", rows * 1)}))
            unread.settimeout(PATIENCE)
            answer = b"".join(iter(lambda: unread.recv(1 << 20), b""))
        assert answer.startswith(b"HTTP/1.1 200") and b'"name":"old","version":1' in answer.replace(b" ", b"")


def test_a_file_may_be_larger_than_what_other_bodies_may_take(base):
    file = base.overlay({0: (np.arange(2000), "F32", np.zeros((2000, 256), "<f4"))})
    with Admin("--overlay-bytes", str(8 << 20), "--max-buffered-bytes", str(1 << 20), model=base.directory) as s:
        assert len(file) > 1 << 20 and s.put("large", file)["version"] == 1


def test_deleted_names_leave_room_for_others(base):
    """Of 256 names none is lost to those that were deleted."""
    one = base.overlay({0: ([3], "BF16", base.table(0)[:1])})
    with Admin("--overlay-bytes", str(1 << 20), model=base.directory) as s:
        for i in range(256):
            assert s.put("a%d" % i, one)["version"] == 1
        used = s.metric_of("overlay_bytes")
        error_of(s.ask("PUT", "/memory/overlays/more", data=one), 413, "overlays_full")
        assert s.metric_of("overlay_bytes") == used
        for i in (7, 9):
            assert s.ask("DELETE", "/memory/overlays/a%d" % i).status_code == 200
        assert s.put("a9", one)["version"] == 2 and s.put("more", one)["version"] == 1
        error_of(s.ask("PUT", "/memory/overlays/a7", data=one), 413, "overlays_full")
        names = [each["name"] for each in s.ask("GET", "/memory/overlays").json()["data"]]
        assert len(names) == 256 and names == sorted(names)


def test_all_bytes_can_be_used_and_used_again(base):
    """In the middle and at the end; and by a file of as many bytes as the limit."""
    def file(slot):
        return base.overlay({0: (slot + np.arange(200), "F32", np.zeros((200, 256), "<f4"))})

    with Admin("--overlay-bytes", str(8 << 20), model=base.directory) as s:
        bytes_of_one = s.put("a", file(0))["bytes"]
    with Admin("--overlay-bytes", str(3 * bytes_of_one), model=base.directory) as s:
        for name in "abc":
            s.put(name, file(0))
        error_of(s.ask("PUT", "/memory/overlays/d", data=file(0)), 413, "overlays_full")
        for name in "bc":
            assert s.ask("DELETE", "/memory/overlays/" + name).status_code == 200
            s.put(name, file(1))
        assert s.metric_of("overlay_bytes") == 3 * bytes_of_one


def test_metrics(server, base):
    before = server.metric_of('overlay_requests_total{overlay="changed"}')
    for _ in range(3):
        server.ok("/generate", {"prompt": TEXT, "max_tokens": 20, "ignore_eos": True, "overlay": "changed"})
    assert server.metric_of('overlay_requests_total{overlay="changed"}') == before + 3
    reads, hits = (server.metric_of("overlay_sampled_%s_total" % each) for each in ("reads", "hits"))
    assert 0 < hits < reads
    rows = base.table(0)
    server.put("all", base.overlay({0: (np.arange(len(rows)), "BF16", rows)}))
    server.ok("/generate", {"prompt": TEXT, "max_tokens": 20, "ignore_eos": True, "overlay": "all"})
    more, all_hit = (server.metric_of("overlay_sampled_%s_total" % each) for each in ("reads", "hits"))
    assert more - reads == all_hit - hits > 0
    assert server.ask("DELETE", "/memory/overlays/all").status_code == 200
    assert 0 < server.metric_of("overlay_bytes") <= server.metric_of("overlay_limit_bytes") == 64 << 20


def hostile(base):
    table = base.table(0)
    good = base.overlay({0: ([3, 5], "BF16", table[[3, 5]])})
    nan = bf16(np.full((1, 256), np.nan, "<f4"))
    yield "truncated", good[:-1], "truncated"
    yield "empty header", b"\0" * 8, ""
    yield "text", b"hello, world: no file at all", ""
    yield "nan", base.overlay({0: ([3], "BF16", nan)}), "NaN"
    yield "twice", base.overlay({0: ([3, 3], "BF16", table[:2])}), "slot 3 at index 1"
    yield "descending", base.overlay({0: ([5, 3], "BF16", table[:2])}), "slot 3 at index 1"
    yield "out of range", base.overlay({0: ([65536], "BF16", table[:1])}), "slot 65536"
    yield "negative", base.overlay({0: ([-1], "BF16", table[:1])}), "slot -1"
    yield "width", base.overlay({0: ([3], "BF16", table[:1, :255])}), "columns"
    yield "other base", good.replace(base.hash(0).encode(), b"0" * 64), "made for another base"
    yield "no memory", good.replace(b"memories.0.", b"memories.1."), "memory 1"
    yield "mode", base.overlay({0: ([3], "BF16", table[:1])}, mode="swap"), "mode"
    yield "nothing", pack({}, {"format": "pkmserve-overlay-1", "mode": "add"}), "at least one memory"


def test_what_is_refused_leaves_nothing(server, base):
    listed = server.ask("GET", "/memory/overlays").json()
    for name, data, says in hostile(base):
        answer = server.ask("PUT", "/memory/overlays/bad", data=data)
        assert says in error_of(answer, 400, "overlay_mismatch"), name
    for name in ("UPPER", "a/b", "a%20b", "x" * 65, ""):
        assert server.ask("PUT", "/memory/overlays/" + name, data=b"x").status_code in (400, 404), name
    error_of(server.ask("PUT", "/memory/overlays/bad", data=b""), 400, "overlay_mismatch")
    large = server.ask("PUT", "/memory/overlays/bad", data=b"\0" * ((64 << 20) + 1))
    assert "--overlay-bytes" in error_of(large, 413, "body_too_large")
    many = np.arange(16384)
    rows = np.zeros((16384, 256), "<f4")
    file = base.overlay({0: (many, "F32", rows)})
    taken = 0
    while (answer := server.ask("PUT", "/memory/overlays/fill%d" % taken, data=file)).status_code == 200:
        taken += 1
    assert 1 <= taken <= 4 and "--overlay-bytes" in error_of(answer, 413, "overlays_full")
    for i in range(taken):
        assert server.ask("DELETE", "/memory/overlays/fill%d" % i).status_code == 200
    with server.connect_admin() as s:  # an upload that breaks off
        s.sendall(b"PUT /memory/overlays/bad HTTP/1.1\r\nHost: x\r\nContent-Length: 900\r\n\r\n" + file[:400])
    assert server.ask("GET", "/memory/overlays").json() == listed


def test_only_the_admin_port_administers(server):
    for method in ("GET", "PUT", "DELETE"):
        answer = requests.request(method, server.url + "/memory/overlays/x", data=b"x", timeout=PATIENCE)
        error_of(answer, 404, "route_not_found")
    answer = server.ask("POST", "/memory/overlays/x", data=b"x")
    error_of(answer, 405, "method_not_allowed")
    assert answer.headers["Allow"] == "GET, HEAD, PUT, DELETE"
    assert server.ask("GET", "/memory/overlays/even").json()["version"] == 1


@pytest.mark.parametrize("fields, status, code", [
    ({"overlay": "nobody"}, 404, "overlay_not_found"),
    ({"overlay": ["even", "nobody"]}, 404, "overlay_not_found"),
    ({"model": "demo:nobody"}, 404, "overlay_not_found"),
    ({"overlay": ["even", "changed"]}, 400, "overlay_mismatch"),
    ({"overlay": ["even", "even"]}, 400, "overlay_mismatch"),
    ({"overlay": 3}, 400, "invalid_value"),
    ({"overlay": {"name": "even"}}, 400, "invalid_value"),
    ({"overlay": ["even", 3]}, 400, "invalid_value"),
    ({"overlay": ["n%d" % i for i in range(9)]}, 400, "invalid_value"),
    ({"model": "other:even"}, 404, "model_not_found"),
])
def test_requests_that_are_refused(server, fields, status, code):
    for path, body in (("/score", {"text": "A"}), ("/generate", {"prompt": "A"}),
                       ("/v1/completions", {"prompt": "A"})):
        answer = server.post(path, {**body, **fields})
        error_of(answer, status, code, "overlay" if "overlay" in fields else "model")


def test_any_two_of_a_requests_overlays_that_share_a_slot_are_named(server, base):
    for slots in ([2, 7], [3, 4, 7], [8]):  # the one that both have is the first of one, of none, behind all of the other
        for name, own in (("some", slots), ("others", [7, 8])):
            server.put(name, base.overlay({0: (own, "BF16", base.table(0)[own])}))
        for both in (["some", "others"], ["others", "some"]):
            message = error_of(server.post("/score", {"text": "A", "overlay": both}), 400, "overlay_mismatch")
            assert "both have rows for slot %d of memory 0" % slots[-1] in message
    for name in ("some", "others"):
        assert server.ask("DELETE", "/memory/overlays/" + name).status_code == 200
    server.put("apart", base.overlay({0: ([2], "BF16", base.table(0)[[2]])}))
    answer = server.post("/score", {"text": "A", "overlay": ["apart", "even", "changed"]})
    message = error_of(answer, 400, "overlay_mismatch", "overlay")
    assert "even and changed both have rows for slot 1 of memory 0" in message
    assert server.post("/score", {"text": "A", "overlay": ["apart", "even", "odd"]}).status_code == 200
    assert server.ask("DELETE", "/memory/overlays/apart").status_code == 200


def test_keys_are_bound_to_overlays(base, changed, tmp_path):
    slots, rows = changed
    directory = tmp_path / "overlays"
    directory.mkdir()
    (directory / "acme.safetensors").write_bytes(base.overlay({0: (slots[::2], "BF16", rows[::2])}))
    (directory / "fix-7.safetensors").write_bytes(base.overlay({0: (slots[1::2], "BF16", rows[1::2])}))
    (directory / "notes.txt").write_text("not an overlay")
    keys = tmp_path / "keys"
    longest, eight = "x" * 64, ["n%d" % i for i in range(8)]
    keys.write_text("free\ntenant acme\nboth acme, fix-7\nlost [gone]\nlong %s\neight %s\n" % (longest, ",".join(eight)))
    with Server("--overlay-dir", str(directory), "--api-key-file", str(keys), model=base.directory) as s:

        def ask(key, **fields):
            return s.post("/score", {"text": TEXT, "logprobs": 0, **fields}, headers=bearer(key))

        def result(key, **fields):
            return ask(key, **fields).json()["results"]

        assert result("tenant") == result("free", overlay="acme") == result("tenant", overlay="acme") != result("free")
        assert result("both") == result("free", overlay=["acme", "fix-7"])
        assert [each["name"] for each in ask("both", overlay="fix-7").json()["overlay"]] == ["acme", "fix-7"]
        for name in ("fix-7", "nobody"):  # a tenant does not learn what others have
            error_of(ask("tenant", overlay=name), 403, "overlay_forbidden", "overlay")
        error_of(ask("tenant", model="demo:fix-7"), 403, "overlay_forbidden", "model")
        s.counted('requests_rejected_total{reason="auth"}', 3)
        lost = ask("lost")
        error_of(lost, 404, "overlay_not_found")
        assert lost.json()["error"]["param"] is None  # no field of the request names it
        assert longest in error_of(ask("long"), 404, "overlay_not_found")
        assert '"n0"' in error_of(ask("eight"), 404, "overlay_not_found")
        listed = requests.get(s.url + "/v1/models", headers=bearer("tenant"), timeout=PATIENCE).json()["data"]
        assert [each["id"] for each in listed] == ["demo", "demo:acme"]
        labels = {"query": "It is", "items": [" a truth"], "label_token_ids": [5, 6]}
        mine, free = (s.post("/v1/score", labels, headers=bearer(key)).json() for key in ("tenant", "free"))
        assert mine["scores"] != free["scores"] and mine["overlay"][0]["name"] == "acme"


def test_a_directory_with_a_bad_file_ends_the_start(base, tmp_path):
    for name, model, says in (("bad.safetensors", DEMO, "truncated"), ("Bad.safetensors", DEMO, "name must be"),
                              ("x" * 90 + ".safetensors", DEMO, "name must be"),
                              ("x.txt", UNBOUNDED, "the model has none"), (None, DEMO, "--overlay-dir")):
        folder = tmp_path / str(name)
        if name is not None:
            folder.mkdir()
            (folder / name).write_bytes(base.overlay({0: ([3], "BF16", base.table(0)[[3]])})[:-1])
        done = subprocess.run([PROGRAM, "serve", "--check", "--model", model, "--overlay-dir", str(folder)],
                              capture_output=True, text=True, timeout=PATIENCE)
        line = done.stderr.splitlines()[-1]
        assert done.returncode in (1, 2) and says in line and str(folder) in line, done.stderr


def test_a_file_of_all_bytes_is_read_and_a_larger_one_is_not(tmp_path):
    two = Base(TWO_MEMORIES)
    (tmp_path / "one.safetensors").write_bytes(two.overlay({0: ([3], "F32", two.table(0)[[3]])}, note="." * (1 << 16)))
    n = (tmp_path / "one.safetensors").stat().st_size
    for most, status in ((n, 0), (n - 1, 1)):
        done = subprocess.run([PROGRAM, "serve", "--check", "--model", two.directory, "--overlay-dir", str(tmp_path),
                               "--overlay-bytes", str(most)], capture_output=True, text=True, timeout=PATIENCE)
        assert done.returncode == status, done.stderr
    assert "%d bytes, but %d are the limit (--overlay-bytes)" % (n, n - 1) in done.stderr


def test_servers_without_overlays():
    with Server(model=UNBOUNDED) as s:
        for path, body in (("/score", {"text": "a"}), ("/generate", {"prompt": "a"})):
            error_of(s.post(path, {**body, "overlay": "x"}), 400, "unsupported_parameter", "overlay")
            error_of(s.post(path, {**body, "model": "demo-bytes:x"}), 404, "model_not_found", "model")
        error_of(s.get("/v1/models/demo-bytes:x"), 404, "model_not_found")
