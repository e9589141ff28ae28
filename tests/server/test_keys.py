"""API keys, the admin port, trace ids: who may ask what, where, and what the log says of it."""

import json
import os
import re
import select
import signal
import socket
import subprocess

import pytest
import requests

from server_harness import (DEMO, FOREVER, PATIENCE, PROGRAM, UNBOUNDED, Server, error_of, eventually, free_port,
                            head, read_answer)

LONGEST = "k" * 256
KEYS = "# ours\nalpha-key\n\n  beta-key  \r\n" + LONGEST


def bearer(key):
    return {"Authorization": "Bearer " + key}


@pytest.fixture(scope="module")
def key_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("keys") / "keys"
    path.write_text(KEYS)
    return path


@pytest.fixture(scope="module")
def guarded(key_file):
    with Server("--api-key-file", str(key_file), "--log-format", "json") as server:
        yield server


def get(server, path, **headers):
    return requests.get(server.url + path, headers=headers, timeout=PATIENCE)


BODY = json.dumps({"prompt": "A", "max_tokens": 1})


@pytest.mark.parametrize("key", ["alpha-key", "beta-key", LONGEST])
def test_each_key_of_the_file_opens(guarded, key):
    assert guarded.post("/generate", BODY, headers=bearer(key)).status_code == 200
    assert get(guarded, "/v1/models", **bearer(key)).status_code == 200
    assert get(guarded, "/info", Authorization="bearer  " + key).status_code == 200


@pytest.mark.parametrize("header", [
    None, "", "Bearer ", "Bearer", "alpha-key", "Basic alpha-key", "Bearer alpha-ke",
    "Bearer alpha-keyx", "Bearer ALPHA-KEY", "Bearer #", "Bearer " + "a" * 300, "Bearer # ours",
    "Bearer " + LONGEST[:-1] + "?", "Bearer " + LONGEST + "?",
    "Bearer alpha-key beta-key", "Bearer alpha-key, Bearer beta-key"])
def test_anything_else_is_401(guarded, header):
    headers = {} if header is None else {"Authorization": header}
    answer = requests.post(guarded.url + "/score", data=BODY, headers=headers, timeout=PATIENCE)
    assert "API key" in error_of(answer, 401, "invalid_api_key", "Authorization")
    assert answer.headers["WWW-Authenticate"] == "Bearer"


def test_a_wrong_key_and_a_missing_one_are_told_apart(guarded):
    assert "API key is not valid" in error_of(get(guarded, "/info", **bearer("wrong")), 401, "invalid_api_key")
    assert "asks for an API key" in error_of(get(guarded, "/info"), 401, "invalid_api_key")


def test_refused_before_the_body_is_read(guarded):
    with guarded.connect() as s:
        s.sendall(b"POST /score HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n")
        assert b" 401 " in s.recv(65536).split(b"\r\n")[0]


@pytest.mark.parametrize("path", ["/health", "/health/ready", "/health/live", "/ping", "/livez",
                                  "/readyz", "/v1/health", "/version", "/", "/metrics"])
def test_open_routes_need_no_key(guarded, path):
    assert get(guarded, path).status_code == 200


@pytest.mark.parametrize("path", ["/nowhere", "/health", "/ping"])
def test_who_has_no_key_cannot_take_the_room_for_bodies(key_file, path):
    with Server("--api-key-file", str(key_file), "--max-body-bytes", "1024") as server:
        held = [server.connect() for _ in range(18)]  # of 16 times 1024 bytes
        for c in held:
            c.sendall(head(path, b"x" * 1000)[:-1])
        eventually(lambda: server.metric("http_connections") >= len(held), "the uploads")
        assert server.post("/generate", BODY, headers=bearer("alpha-key")).status_code == 200
        for c in held:
            c.sendall(b"x")
            assert read_answer(c)[0] == {"/nowhere": 404, "/health": 405, "/ping": 200}[path]
            c.close()
        assert server.post("/nowhere", b"x" * 1025).status_code == 413


def test_unknown_paths_are_404_without_a_key(guarded):
    error_of(get(guarded, "/nowhere"), 404, "route_not_found")


def test_refusals_are_counted_and_no_key_is_logged(guarded):
    before = guarded.metric('requests_rejected_total{reason="auth"}')
    get(guarded, "/info", **bearer("wrong-secret"))
    guarded.counted('requests_rejected_total{reason="auth"}', before + 1)
    assert guarded.metric('requests_total{route="/info",code="401"}') >= 1
    assert "wrong-secret" not in guarded.read_log() and "alpha-key" not in guarded.read_log()


RECORD = ("Patient record: %s Smith, born 1970, diagnosis diabetes type two, medication metformin "
          "500 mg twice a day.")


@pytest.mark.parametrize("cache", ["on", "shared", "off"])
def test_a_key_does_not_hear_what_others_have_sent(key_file, cache):
    with Server("--api-key-file", str(key_file), "--prefix-cache", cache) as server:
        def cached(key, name, **more):
            body = {"prompt": RECORD % name, "max_tokens": 1, **more}
            answer = server.post("/generate", body, headers=bearer(key)).json()
            return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

        def hits():
            return server.metric("prefix_cache_hits_total")

        assert cached("alpha-key", "Mary") == 0
        assert cached("beta-key", "Anna") == 0
        before = hits()
        for key in ("alpha-key", "beta-key"):  # a salt opens nobody else's texts
            assert cached(key, "Mary", cache_salt="guessed") == 0
        assert (hits() > before) == (cache == "shared")
        before = hits()
        assert cached("beta-key", "Mary") == 0  # a guess is not confirmed
        assert (hits() > before) == (cache == "shared")
        assert (cached("alpha-key", "Mary") >= 32) == (cache != "off")
        server.process.send_signal(signal.SIGHUP)  # a key keeps its pages when the file is read again
        eventually(lambda: "event=reload" in server.read_log(), "SIGHUP")
        assert (cached("alpha-key", "Mary") >= 32) == (cache != "off")
        info = server.get("/info", headers=bearer("alpha-key")).json()
        assert info["defaults"]["prefix_cache"] == cache


def test_trace_ids_of_the_client_are_logged(guarded):
    trace, parent = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
    get(guarded, "/info", traceparent="00-%s-%s-01" % (trace, parent), **{"x-request-id": "traced"})
    wrong = {"none": "00-%s-%s-01" % ("0" * 32, parent), "never": "ff-%s-%s-01" % (trace, parent),
             "longer": "00-%s-%s-01-x" % (trace, parent)}
    for name, given in wrong.items():
        get(guarded, "/info", traceparent=given, **{"x-request-id": name})

    def lines():
        events = [json.loads(line) for line in guarded.read_log().splitlines()]
        found = {e["id"]: e for e in events if e["event"] == "request"}
        return found if {"traced", *wrong} <= set(found) else None

    found = eventually(lines, "all requests in the log")
    assert (found["traced"]["trace_id"], found["traced"]["parent_id"]) == (trace, parent)
    assert not any("trace_id" in found[name] for name in wrong)


def test_hangup_signal_reads_the_keys_again_and_keeps_them_if_it_cannot(tmp_path):
    path = tmp_path / "keys"
    path.write_text("old\n")
    with Server("--api-key-file", str(path), "--metrics-auth") as server:
        def status(key):
            return get(server, "/v1/models", **bearer(key)).status_code

        def reload(text, count):
            path.write_text(text)
            server.process.send_signal(signal.SIGHUP)
            eventually(lambda: server.read_log().count("event=reload") == count, "reload")

        assert (status("old"), status("new")) == (200, 401)
        reload("new\n", 1)
        assert (status("old"), status("new")) == (401, 200)
        reload("two WORDS\n", 2)
        assert (status("old"), status("new")) == (401, 200)
        assert "line 1: after a key and a blank" in server.read_log()
        assert get(server, "/metrics").status_code == 401
        assert get(server, "/metrics", **bearer("new")).status_code == 200


def test_one_client_may_not_take_all(key_file):
    busy = {**FOREVER, "stream": True}
    with Server("--api-key-file", str(key_file), "--max-client-requests", "1", model=UNBOUNDED) as server:
        def post(key, body, **kw):
            return requests.post(server.url + "/generate", json=body, headers=bearer(key),
                                 timeout=PATIENCE, **kw)

        with post("alpha-key", busy, stream=True) as running:
            lines = running.iter_lines()  # a dropped iterator would close the connection
            next(lines)
            refused = post("alpha-key", busy)
            assert "--max-client-requests" in error_of(refused, 429, "client_limit")
            assert int(refused.headers["Retry-After"]) >= 1
            for other in ("bearer alpha-key", "Bearer   alpha-key"):  # the same key
                refused = requests.post(server.url + "/generate", json=busy, timeout=PATIENCE,
                                        headers={"Authorization": other})
                error_of(refused, 429, "client_limit")
            tgi = requests.post(server.url + "/generate_stream", json={"inputs": "A"}, timeout=PATIENCE,
                                headers=bearer("alpha-key"))
            assert tgi.status_code == 429 and tgi.json()["error_type"] == "overloaded"
            server.counted('requests_rejected_total{reason="client_limit"}', 4)
            later = post("beta-key", busy, stream=True)  # goes on when the first has ended
            rest = later.iter_lines()
            next(rest)
        eventually(lambda: post("alpha-key", {"prompt": "A", "max_tokens": 1}).status_code == 200,
                   "room again after the first has ended")
        later.close()
        eventually(lambda: post("beta-key", {"prompt": "A", "max_tokens": 1}).status_code == 200,
                   "room again after the second has ended")


class Upload:
    """A request whose last byte does not come. One that is refused, since a request of the same client has the one
    place, is begun again."""

    def __init__(self, server, data):
        self.server, self.data, self.socket = server, data, None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.socket:
            self.socket.close()

    def go_on(self):
        if self.socket and not select.select([self.socket], [], [], 0)[0]:
            return
        if self.socket:
            self.socket.close()
        self.socket = self.server.connect()
        self.socket.sendall(self.data)


def test_a_key_that_the_file_has_twice_is_one_client_and_no_other(tmp_path):
    path = tmp_path / "keys"
    path.write_text("one\none\ntwo\n")
    with Server("--api-key-file", str(path), "--max-client-requests", "1") as server:
        def status(key):
            return server.post("/tokenize", {"prompt": "A"}, headers=bearer(key)).status_code

        begun = head("/tokenize", b'{"prompt":"A"}', extra="Authorization: Bearer one\r\n")[:-1]
        with Upload(server, begun) as upload:
            def refused():
                upload.go_on()
                return status("one") == 429

            eventually(refused, "the upload counts for its key")
            assert status("two") == 200


@pytest.mark.parametrize("path", ["/generate", "/tokenize"])
def test_a_clients_uploads_count_from_the_head_on(path):
    """Without keys a client is an address."""
    with Server("--max-client-requests", "1") as server:
        with Upload(server, head(path, b'{"prompt":"A","max_tokens":1}')[:-1]) as upload:
            def refused():
                upload.go_on()
                return server.post(path, {"prompt": "A"}).status_code != 200

            eventually(refused, "the upload counts")
            error_of(server.post(path, {"prompt": "A"}), 429, "client_limit")
            for other in ("/health", "/metrics", "/v1/models"):  # which do no work for it
                assert server.get(other).status_code == 200, other
        eventually(lambda: server.post(path, {"prompt": "A"}).status_code == 200, "it has left")


def test_behind_a_trusted_proxy_the_address_that_it_names_counts():
    with Server("--max-client-requests", "1", "--trusted-proxies", "127.0.0.0/8") as server:
        def post(address):
            return requests.post(server.url + "/tokenize", json={"prompt": "A"}, timeout=PATIENCE,
                                 headers={"X-Forwarded-For": address})

        def named(*lines):
            given = "".join("X-Forwarded-For: %s\r\n" % line for line in lines)
            with server.connect() as s:
                s.sendall(head("/tokenize", b'{"prompt":"A"}', extra=given))
                return read_answer(s)[0]

        begun = head("/tokenize", b'{"prompt":"A"}', extra="X-Forwarded-For: 192.0.2.1\r\n")[:-1]
        with Upload(server, begun) as upload:
            def refused():
                upload.go_on()
                return post("192.0.2.1").status_code == 429

            eventually(refused, "the upload counts for its client")
            assert post("192.0.2.2").status_code == 200
            assert post("192.0.2.1, 192.0.2.3").status_code == 200  # the first part may be a lie
            for lines, status in ((["9" * 1020, "192.0.2.1"], 429), (["9" * 1020, "192.0.2.4"], 200),
                                  (["9" * 2000 + ", 192.0.2.1"], 429), (["9" * 2000 + ", 192.0.2.5"], 200)):
                assert named(*lines) == status, lines  # ... of any length
    line = subprocess.run([PROGRAM, "serve", "--trusted-proxies", "10.0.0.0/99"], capture_output=True,
                          text=True, timeout=PATIENCE)
    assert line.returncode == 2 and "'10.0.0.0/99'" in line.stderr


def test_hangup_signal_without_a_key_file_does_no_harm():
    with Server() as server:
        server.process.send_signal(signal.SIGHUP)
        eventually(lambda: "there is no --api-key-file" in server.read_log(), "the warning")
        assert server.get("/health/ready").status_code == 200


def test_admin_port_takes_the_metrics_and_gives_no_work(key_file):
    port = free_port()
    with Server("--admin-port", str(port), "--api-key-file", str(key_file),
                wait=False) as server:
        admin = "http://127.0.0.1:%d" % port
        # Two ports listen, and the table does not say which is which.
        server.port = eventually(lambda: server.find_port(other_than=port), "the other port")
        server.url = "http://127.0.0.1:%d" % server.port
        server.wait_ready()
        answer = requests.get(admin + "/metrics", timeout=PATIENCE)
        assert answer.status_code == 200 and "pkmserve_engine_state" in answer.text
        assert requests.get(admin + "/health/ready", timeout=PATIENCE).status_code == 200
        error_of(get(server, "/metrics"), 404, "route_not_found")
        for path in ("/info", "/v1/models"):
            error_of(requests.get(admin + path, timeout=PATIENCE), 404, "route_not_found")
        answer = requests.post(admin + "/generate", data=BODY, timeout=PATIENCE)
        error_of(answer, 404, "route_not_found")
        # Each names the routes that it has.
        there = requests.get(admin + "/", timeout=PATIENCE).text
        assert "/metrics" in there and "/memory/overlays" in there and "/generate" not in there
        here = get(server, "/").text
        assert "/generate" in here and "/metrics" not in here


@pytest.mark.parametrize("flags, there", [((), False), (("--admin-host", "0.0.0.0"), True)])
def test_the_admin_port_is_for_this_machine_alone_unless_told(flags, there):
    """It asks for no key. 127.0.0.2 stands for another address of the machine, on which the API may listen."""
    command = [PROGRAM, "serve", "--model", DEMO, "--port", "0", "--drain-delay-s", "0", "--admin-port"]
    port = free_port()
    with subprocess.Popen([*command, str(port), *flags], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as server:
        ready = next(line for line in server.stderr if " event=ready " in line)
        api = int(re.search(r" port=(\d+) ", ready)[1])
        try:
            assert requests.get("http://127.0.0.2:%d/health/live" % api, timeout=PATIENCE).status_code == 200
            assert requests.get("http://127.0.0.1:%d/health/live" % port, timeout=PATIENCE).status_code == 200
            with socket.socket() as other:
                assert (other.connect_ex(("127.0.0.2", port)) == 0) is there
        finally:
            server.terminate()


@pytest.mark.parametrize("text, wanted", [
    (None, "keys: No such file"), ("\n# none\n", "no key in it"), ("a B\n", "line 1: after a key and a blank"),
    ("a [bc\n", "line 1: after a key and a blank"),
    ("ok\n" + "k" * 257, "line 2 has 257 bytes"), ("k\n" * 1025, "more than 1024 keys"),
    ("schl\u00fcssel\n", "not printable ASCII")])
def test_a_key_file_that_cannot_be_taken_ends_the_start(tmp_path, text, wanted):
    path = tmp_path / "keys"
    if text is not None:
        path.write_text(text)
    ends_the_start(path, wanted)


def test_a_key_file_that_is_too_long_ends_the_start(tmp_path):
    (tmp_path / "keys").write_text("# a comment\n" * 200000)
    ends_the_start(tmp_path / "keys", "keys: more than ")


def ends_the_start(path, wanted):
    run = subprocess.run([PROGRAM, "serve", "--port", "0", "--api-key-file", str(path)],
                         capture_output=True, text=True, timeout=PATIENCE)
    assert run.returncode == 1 and str(path) in run.stderr and wanted in run.stderr, run
    assert run.stderr.count("\n") == 1


def test_a_pipe_that_nobody_writes_to_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "keys")
    ends_the_start(tmp_path / "keys", "no key in it")
