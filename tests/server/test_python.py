"""The Python package of models/python against a server: arrays equal what the routes answer."""

import asyncio
import inspect
import pathlib
import re
import shutil
import socket
import ssl
import subprocess
import sys
import threading

import numpy as np
import pytest

from server_harness import FOREVER, ROOT, UNBOUNDED, Server, eventually

PACKAGE = pathlib.Path(ROOT) / "models" / "python"
sys.path.insert(0, str(PACKAGE))

from pkmserve import AsyncClient, Client, ServerError  # noqa: E402
from pkmserve import _calls, _http, _results  # noqa: E402

TEXT = "The old man went to the sea."


@pytest.fixture(scope="module")
def client(server):
    return Client(server.url, timeout=60)


def run(coroutine):
    return asyncio.run(coroutine)


def test_scores_are_the_routes_as_arrays(server, client):
    texts = [TEXT, "a", "It was."]
    got = client.score(texts, ranks=True, entropy=True)
    told = server.ok("/score", {"text": texts, "logprobs": 0, "ranks": True, "entropy": True})["results"]
    assert len(got) == 3 and got.n_tokens.dtype == np.int64
    for name in ("sum_logprob", "perplexity", "bits_per_byte", "n_scored", "accuracy"):
        assert getattr(got, name).tolist() == [r[name] for r in told]
    for tokens, result in zip(got.tokens, told):
        assert tokens.ids.tolist() == [t["id"] for t in result["tokens"]]
        assert tokens.offsets.tolist() == [t["offset"] for t in result["tokens"]]
        assert tokens.ranks.tolist() == [t["rank"] for t in result["tokens"]]
        assert tokens.logprobs.tolist() == [np.float32(t["logprob"]) for t in result["tokens"]]
        assert tokens.entropy.dtype == np.float32 and tokens.pieces[0] == result["tokens"][0]["piece"]
    assert got.answers[0]["results"] == told  # nothing that was not asked for, such as alternatives
    assert client.score(texts).tokens is None and len(client.score([])) == 0
    for asked in ("tokens", "ranks", "entropy"):
        tokens = client.score(TEXT, **{asked: True}).tokens[0]
        assert (tokens.ranks is not None, tokens.entropy is not None) == (asked == "ranks", asked == "entropy")
    assert client.request("/tokenize", {"prompt": "a", "add_special_tokens": False})["count"] == 1
    assert client.info()["model"]["n_layer"] == 12


def test_ids_continuations_and_what_nothing_predicts(client):
    ids = np.array([542, 699, 450], np.int64)
    got = client.score([ids, ids[:1]], tokens=True)
    assert got.tokens[0].ids.tolist() == ids.tolist()
    assert _results.read_tokens([{"id": 5, "logprob": None}]).offsets.tolist() == [-1]  # of a model without a tokenizer
    assert client.memory(ids).pieces == got.tokens[0].pieces  # the server puts nothing in front of ids
    assert np.isnan(got.tokens[0].logprobs[0]) and got.tokens[0].logprobs[1] < 0
    assert np.isnan(got.perplexity[1]) and got.n_scored.tolist() == [2, 0]
    assert client.score(ids).sum_logprob[0] == got.sum_logprob[0]
    assert client.score(ids[:1]).n_tokens.tolist() == client.score([542]).n_tokens.tolist() == [1]
    ranked = client.score("A dark", [" night", " x"], unconditional=True)
    assert ranked.rankings[0]["sum"] == 0 and len(ranked) == 2


def test_many_texts_go_in_requests_of_a_bounded_size(client):
    texts = ["word %d" % i for i in range(2 * _calls.ITEMS + 1)]
    got = client.score(texts)
    assert len(got.answers) == 3
    assert got.sum_logprob[40] == client.score(texts[40]).sum_logprob[0]

    def parts(*lengths):
        return [len(part) for part in _calls._parts(["a" * n for n in lengths])]

    most = _calls.LENGTH
    assert (_calls.ITEMS, most) == (32, 131072)  # as the README says; below --max-score-tokens
    assert parts(*[1] * 33) == [32, 1] and parts(*[1] * 64) == [32, 32]
    assert parts(most, 1, most - 1, 1) == [1, 2, 1] and parts(most + 1, 1) == [1, 1]
    assert [len(part) for part in _calls._parts(["a", [5], [6]])] == [1, 2]
    same = run(AsyncClient("http://127.0.0.1:%d" % client._address.port).score(texts))
    assert same.sum_logprob.tolist() == got.sum_logprob.tolist()


def test_generations_in_order(server, client):
    got = client.generate(["It was", "Two"], max_tokens=3, n=2, seed=5)
    told = server.ok("/generate", {"prompt": ["It was", "Two"], "max_tokens": 3, "n": 2, "seed": 5,
                                   "logprobs": 0})["choices"]
    assert [g.prompt for g in got] == [0, 0, 1, 1] and got[0].seed == 5
    for mine, choice in zip(got, told):
        assert mine.text == choice["text"] and mine.ids.tolist() == choice["token_ids"]
        assert mine.logprobs.tolist() == [np.float32(t["logprob"]) for t in choice["logprobs"]]
        assert mine.finish_reason == choice["finish_reason"]
        assert [set(t) for t in choice["logprobs"]] == [set(t) for t in mine.answer["logprobs"]]
    without, = client.generate("It was", max_tokens=3, seed=5, logprobs=None)
    assert without.ids.tolist() == got[0].ids.tolist() and np.isnan(without.logprobs).tolist() == [True] * 3
    alone = run(AsyncClient(server.url).generate("It was", max_tokens=3, seed=5))
    assert alone[0].text == client.generate("It was", max_tokens=3, seed=5)[0].text


def test_each_of_many_prompts_has_draws_of_its_own(server):
    """They go in several requests; the first of them is as before."""
    many = Client(server.url).generate(["Once upon a time"] * 64, max_tokens=12, seed=1, temperature=1.0)
    few = Client(server.url).generate(["Once upon a time"] * 32, max_tokens=12, seed=1, temperature=1.0)
    texts = [g.text for g in many]
    assert texts[:32] == [g.text for g in few]
    assert sum(a == b for a, b in zip(texts[:32], texts[32:])) < 16
    seeds = [_calls._seed_of(2**64 - 1, part) for part in range(3)]
    assert seeds == [2**64 - 1, 0x9E3779B97F4A7C14, 0x3C6EF372FE94F829]
    assert [_calls._seed_of(None, part) for part in range(2)] == [None, None]


def test_a_client_serves_one_loop_after_another(server):
    client = AsyncClient(server.url, concurrency=1)

    async def several():
        return await asyncio.gather(*(client.score("a text") for _ in range(4)))

    assert [len(asyncio.run(several())) for _ in range(2)] == [4, 4]


@pytest.mark.parametrize("concurrency, most", [(0, 1), (1, 1), (3, 3)])
def test_no_more_requests_than_concurrency_are_under_way(concurrency, most):
    open_now, seen = set(), []

    async def answer(reader, writer):
        open_now.add(writer)
        seen.append(len(open_now))
        await reader.readuntil(b"\r\n\r\n")
        await asyncio.sleep(0.02)
        open_now.remove(writer)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
        writer.close()

    async def ask():
        listening = await asyncio.start_server(answer, "127.0.0.1", 0)
        client = AsyncClient("http://127.0.0.1:%d" % listening.sockets[0].getsockname()[1], concurrency=concurrency)
        await asyncio.gather(*(client.request("/info") for _ in range(7)))
        listening.close()

    run(ask())
    assert (len(seen), max(seen)) == (7, most)


def test_both_clients_have_the_same_methods():
    for name in ("request", "info", "score", "generate", "memory"):
        mine, other = (inspect.signature(getattr(kind, name)) for kind in (Client, AsyncClient))
        assert mine == other, name


def test_memory_has_a_row_for_each_position(server, client):
    got = client.memory(TEXT)
    tokens = server.ok("/score", {"text": TEXT, "memory": "tokens"})["results"][0]["memory"]["layers"][0]
    shape = (len(tokens["tokens"]), tokens["heads"], tokens["knn"])
    assert got.indices[0].shape == got.weights[0].shape == shape and got.memories == (0,)
    for i, position in enumerate(tokens["tokens"]):
        for h, head in enumerate(position):
            assert got.indices[0][i, h].tolist() == head["slots"]
            np.testing.assert_allclose(got.weights[0][i, h], head["weights"], rtol=1e-6)
    assert got.pieces[0] == "" and len(got.pieces) == shape[0] and got.pieces[1] == "The"
    part = run(AsyncClient(server.url).memory(TEXT, start=3, memories=[0]))
    assert part.pieces == got.pieces[3:] and (part.indices[0] == got.indices[0][3:]).all()
    told = server.ok("/score", {"text": TEXT, "memory": "slots", "memory_slots": {"top": 4}})
    best = told["results"][0]["memory"]["slots"][0]["top"]
    assert [row[:2] for row in got.top(4)] == [tuple(row[1:3]) for row in best]
    np.testing.assert_allclose([row[2] for row in got.top(4)], [row[3] for row in best], rtol=1e-6)


@pytest.mark.parametrize("ask", [lambda url: Client(url, retries=0).score(TEXT, stride=-1),
                                 lambda url: run(AsyncClient(url, retries=0).score(TEXT, stride=-1))])
def test_a_refusal_says_what_is_wrong(server, ask):
    with pytest.raises(ServerError, match="stride") as caught:
        ask(server.url)
    error = caught.value
    assert (error.status, error.code, error.param) == (400, "invalid_value", "stride")
    assert error.request_id and "stride" in error.message


def test_what_cannot_be_sent_is_refused_here(client):
    for wrong in (lambda: Client("127.0.0.1:8000"), lambda: Client(api_key="a\r\nb"),
                  lambda: Client("ftp://127.0.0.1"), lambda: Client("http:///score"),
                  lambda: client.request("/sc ore", {}), lambda: client.request("/sc\r\nore", {}),
                  lambda: client.request("score", {}), lambda: client.generate("a", stream=True),
                  lambda: client.score("a", max_context=float("nan"))):
        with pytest.raises(ValueError):
            wrong()


def test_an_address_has_the_port_of_its_scheme_unless_it_says_another():
    for url, port, host in (("http://a", 80, b"a:80"), ("https://a/", 443, b"a:443"), ("https://a:8443", 8443, b"a:8443"),
                            ("http://[::1]:8000", 8000, b"[::1]:8000")):
        address = _http.Address(url, None, 1.0, None)
        assert address.port == port and b"\r\nHost: %s\r\n" % host in address.head("GET", "/info", 0)


@pytest.mark.parametrize("told, waits", [(None, (0.25, 0.5, 1.0)), ("7", (7.0, 7.0, 7.0)), ("3600", (60.0, 60.0, 60.0)),
                                         ("Wed, 21 Oct 2015 07:28:00 GMT", (0.25, 0.5, 1.0)), ("\xb2", (0.25, 0.5, 1.0))])
@pytest.mark.parametrize("status", [429, 503])
def test_waits_are_those_that_are_asked_for_or_doubled(status, told, waits):
    with pytest.raises(_http.Retry) as retry:
        _http.read_answer(status, told, b"{}")
    assert tuple(retry.value.delay(attempt) for attempt in range(3)) == waits


@pytest.mark.parametrize("status, data", [(199, b"{}"), (300, b"{}"), (200, b"[]"), (200, b"")])
def test_only_an_object_with_a_good_status_is_an_answer(status, data):
    with pytest.raises(ServerError) as told:
        _http.read_answer(status, None, data)
    assert told.value.status == status and told.value.message == (data.decode() or "no message")


class Flaky:
    """A server whose first answers are what it is given, and whose last one is good."""

    def __init__(self, *answers, context=None):
        self.context = context
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.url = "http://127.0.0.1:%d/prefix" % self.socket.getsockname()[1]
        self.answers = answers
        self.heads = []
        self.thread = threading.Thread(target=self.serve)
        self.thread.start()

    def serve(self):
        for answer in self.answers:
            connection, _ = self.socket.accept()
            head = b""
            if self.context is not None:
                try:
                    connection = self.context.wrap_socket(connection, server_side=True)
                except (OSError, ssl.SSLError):  # the client does not trust this one
                    connection.close()
                    continue
            while b"\r\n\r\n" not in head:
                head += connection.recv(65536)
            head, _, body = head.partition(b"\r\n\r\n")
            length = int(re.search(rb"(?i)content-length: (\d+)", head)[1])
            while len(body) < length:  # what is not read would reset the connection
                body += connection.recv(65536)
            self.heads.append(head + b"\r\n")
            connection.sendall(answer)
            connection.close()
        self.socket.close()


FULL = (b"HTTP/1.1 429 Too Many\r\nRetry-After: 0\r\nContent-Length: 30\r\n\r\n"
        b'{"error": {"message": "full"}}')
CUT = b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{"
GOOD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n8\r\n{\"a\": 5}\r\n0\r\n\r\n"


BALANCER = (b"HTTP/1.1 502 Bad Gateway\r\nContent-Type: text/html\r\nContent-Length: 24\r\n\r\n"
            b"<h1>502 Bad Gateway</h1>")
ASKS = [lambda url, **kw: Client(url, **kw).request("/x", {}),
        lambda url, **kw: run(AsyncClient(url, **kw).request("/x", {}))]


@pytest.mark.parametrize("ask", ASKS)
def test_a_balancer_between_is_asked_again_and_may_answer_no_json(ask, monkeypatch):
    monkeypatch.setattr("pkmserve._http.BACKOFF_S", 0.001)
    assert ask(Flaky(BALANCER, GOOD).url) == {"a": 5}
    with pytest.raises(ServerError, match="502 Bad Gateway") as told:
        ask(Flaky(BALANCER).url, retries=0)
    assert told.value.status == 502 and told.value.code is None
    for status in (b"200 OK", b"500 Oh"):  # neither is asked again
        with pytest.raises(ServerError, match="<h1>") as told:
            ask(Flaky(BALANCER.replace(b"502 Bad Gateway\r", status + b"\r")).url)
        assert told.value.status == int(status[:3])


@pytest.mark.parametrize("ask", ASKS)
def test_who_does_not_answer_in_time_is_not_asked_again(ask):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        with pytest.raises(TimeoutError):
            ask("http://127.0.0.1:%d" % silent.getsockname()[1], timeout=0.2)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
@pytest.mark.parametrize("ask", ASKS)
def test_https_asks_whom_it_trusts(ask, tmp_path, monkeypatch):
    monkeypatch.setattr("pkmserve._http.BACKOFF_S", 0.001)
    key, cert = str(tmp_path / "key"), str(tmp_path / "cert")
    subprocess.run(["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
                    "-keyout", key, "-out", cert, "-days", "2", "-subj", "/CN=here", "-addext",
                    "subjectAltName=IP:127.0.0.1"], check=True, stderr=subprocess.DEVNULL)
    theirs = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    theirs.load_cert_chain(cert, key)
    ours = ssl.create_default_context(cafile=cert)
    for trusts in (True, False):
        flaky = Flaky(GOOD, context=theirs)
        url = flaky.url.replace("http:", "https:")
        if trusts:
            assert ask(url, ssl_context=ours) == {"a": 5}
        else:
            with pytest.raises(ssl.SSLCertVerificationError):
                ask(url, retries=0)
        flaky.thread.join()


@pytest.mark.parametrize("ask", ASKS)
def test_full_and_dying_servers_are_asked_again(ask, monkeypatch):
    monkeypatch.setattr("pkmserve._http.BACKOFF_S", 0.001)
    flaky = Flaky(FULL, b"", CUT, GOOD)
    assert ask(flaky.url, api_key="secret") == {"a": 5}
    flaky.thread.join()
    assert len(flaky.heads) == 4
    for head in flaky.heads:
        assert head.startswith(b"POST /prefix/x HTTP/1.1\r\n")
        assert b"Authorization: Bearer secret\r\n" in head
    flaky = Flaky(FULL)
    with pytest.raises(ServerError, match="full"):
        ask(flaky.url, retries=0)
    flaky.thread.join()
    with pytest.raises(ConnectionRefusedError):
        ask(flaky.url, retries=0)


def test_a_cancelled_call_ends_the_work():
    with Server(model=UNBOUNDED) as s:
        async def give_up():
            task = asyncio.ensure_future(AsyncClient(s.url).generate(FOREVER["prompt"], max_tokens=400000,
                                                                     ignore_eos=True))
            while s.metric("num_requests_running") == 0:
                await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        run(give_up())
        eventually(lambda: s.metric("num_requests_running") == 0, "the work ended")


def test_the_readmes_cells_run(server, capsys):
    cells = re.findall(r"^```python\n(.*?)^```", (PACKAGE / "README.md").read_text(), re.M | re.S)
    assert len(cells) == 4
    names = {}
    for cell in cells:
        exec(cell.replace("http://127.0.0.1:8000", server.url), names)
    shown = capsys.readouterr().out
    assert "= positions, heads, knn" in shown and shown.count("\n") > 12


def test_the_version_is_the_programs():
    header = (pathlib.Path(ROOT) / "server" / "version.h").read_text()
    version = re.search(r'PKMSERVE_VERSION "(.*)"', header)[1]
    assert 'version = "%s"' % version in (PACKAGE / "pyproject.toml").read_text()
