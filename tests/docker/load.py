"""A steady load of generations, streams and scores whose answers are known, and what became of each.

Every request has an id of its own, which the replicas log, and is one of a few whose answer was asked
for beforehand: results are bit-identical whoever computes them, so an answer is either the right one or
the request is lost. Nothing is ever sent twice from here.
"""

import http.client
import itertools
import json
import socket
import threading
import time
import urllib.parse

PATIENCE_S = 60  # an answer that takes longer counts as lost, and as not clean
PROMPTS = ["It was a dark night, and", "The captain said that", "Once upon a time", "She looked at"]


def make_requests():
    """The (kind, path, body) that the load is made of."""
    out = []
    for i, prompt in enumerate(PROMPTS):
        body = {"prompt": prompt, "max_tokens": 4 + 4 * (i % 2), "temperature": 0.8, "seed": i,
                "ignore_eos": True}
        out.append(("generate", "/generate", body))
        out.append(("stream", "/generate", {**body, "stream": True}))
        out.append(("score", "/score", {"text": prompt + " the sea was calm."}))
    return out


def outcome(kind, raw):
    """What of an answer's body must be the same each time; raises ValueError if it is not whole."""
    if kind == "score":
        return json.loads(raw)["results"][0]["sum_logprob"]
    if kind == "generate":
        return json.loads(raw)["choices"][0]["token_ids"]
    parts = [p for p in raw.decode().split("\n\n") if p and not p.startswith(":")]
    if not parts or parts[-1] != "data: [DONE]":
        raise ValueError("the stream has no end")
    return [json.loads(p[len("data: "):])["token"]["id"] for p in parts[:-1] if '"token":{' in p]


class Lost:
    """A request that did not get its answer. clean: the client can tell, at once, that it failed."""

    def __init__(self, request_id, kind, begin, why, clean):
        self.id, self.kind, self.begin, self.end = request_id, kind, begin, time.monotonic()
        self.why, self.clean = why, clean

    def __repr__(self):
        return "%s %s after %.3f s: %s%s" % (self.id, self.kind, self.end - self.begin, self.why,
                                             "" if self.clean else " (NOT CLEAN)")


class Load:
    """n_worker clients in a closed loop, until n requests are sent and hold() says no more."""

    def __init__(self, url, n, n_worker=8, prefix="load"):
        self.address = urllib.parse.urlsplit(url)
        self.n, self.n_worker, self.prefix = n, n_worker, prefix
        self.requests = make_requests()
        self.known = None
        self.counter = itertools.count()
        self.n_done = 0
        self.kinds = {}
        self.lost = []
        self.held = threading.Event()  # set: the load may end when n are done
        self.lock = threading.Lock()
        self.threads = []

    def connect(self):
        return http.client.HTTPConnection(self.address.hostname, self.address.port,
                                          timeout=PATIENCE_S)

    def ask(self, request_id, number=0):
        """The answer to one request, which must succeed, over a connection of its own."""
        kind, path, body = self.requests[number]
        connection = self.connect()
        connection.request("POST", path, json.dumps(body), {"x-request-id": request_id})
        answer = connection.getresponse()
        raw = answer.read()
        connection.close()
        assert answer.status == 200, (answer.status, raw)
        return outcome(kind, raw)

    def learn(self):
        """Asks for the right answers."""
        self.known = [self.ask("learn-%d" % i, i) for i in range(len(self.requests))]

    def one(self, connection, number):
        """Sends a request and judges its answer; returns None, or why it is lost."""
        kind, path, body = self.requests[number % len(self.requests)]
        request_id = "%s-%d" % (self.prefix, number)
        begin = time.monotonic()
        try:
            connection.request("POST", path, json.dumps(body), {"x-request-id": request_id})
            answer = connection.getresponse()
            raw = answer.read()
        except socket.timeout:
            return Lost(request_id, kind, begin, "no answer within %d s" % PATIENCE_S, False)
        except (http.client.HTTPException, OSError) as e:
            # A connection that closes before its answer is complete.
            return Lost(request_id, kind, begin, "%s: %s" % (type(e).__name__, e), True)
        if answer.status != 200:
            return Lost(request_id, kind, begin, "%d %s" % (answer.status, raw[:80]),
                        answer.status in (502, 503, 504))
        try:
            if outcome(kind, raw) != self.known[number % len(self.requests)]:
                return Lost(request_id, kind, begin, "another answer: %s" % raw[:200], False)
        except (ValueError, KeyError, IndexError) as e:
            # Complete as HTTP, but not as an answer; an error event is one that says so.
            return Lost(request_id, kind, begin, "%s: %s" % (e, raw[-120:]), b'"error"' in raw)
        return None

    def work(self):
        connection = self.connect()
        while True:
            number = next(self.counter)
            if number >= self.n and self.held.is_set():
                break
            lost = self.one(connection, number)
            with self.lock:
                self.n_done += 1
                kind = self.requests[number % len(self.requests)][0]
                self.kinds[kind] = self.kinds.get(kind, 0) + 1
                if lost is not None:
                    self.lost.append(lost)
            if lost is not None:
                connection.close()
                connection = self.connect()
        connection.close()

    def start(self):
        self.threads = [threading.Thread(target=self.work, daemon=True)
                        for _ in range(self.n_worker)]
        for thread in self.threads:
            thread.start()

    def wait_done(self, n):
        """Until n requests have ended."""
        end = time.monotonic() + 10 * PATIENCE_S
        while self.n_done < n:
            assert time.monotonic() < end, "the load stands still at %d of %d" % (self.n_done, n)
            time.sleep(0.01)

    def finish(self):
        self.held.set()
        for thread in self.threads:
            thread.join(10 * PATIENCE_S)
            assert not thread.is_alive(), "a client hangs"

    def summary(self):
        return "%d requests (%s), %d lost" % (
            self.n_done, ", ".join("%d %s" % (v, k) for k, v in sorted(self.kinds.items())),
            len(self.lost))
