"""Starts pkmserve for a test, talks to it, and reads what it says about itself."""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time

import requests

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(ROOT, "tests"))
from free_port import free_port  # noqa: E402,F401

PROGRAM = os.environ.get("PKMSERVE", os.path.join(ROOT, "build", "pkmserve"))
DEMO = os.path.join(ROOT, "models", "demo")
UNBOUNDED = os.path.join(ROOT, "models", "demo-bytes")  # its streams end where they are told to
FOREVER = {"prompt": "It was", "max_tokens": 400000, "ignore_eos": True}  # of UNBOUNDED, minutes
PATIENCE = 120  # seconds before a test gives up: a sanitizer build on a busy machine is slow


def eventually(check, what, patience=PATIENCE):
    """Waits until check() is true."""
    end = time.monotonic() + patience
    while True:
        value = check()
        if value:
            return value
        assert time.monotonic() < end, "never happened: " + what
        time.sleep(0.01)


def in_time(attempt, what):
    """Tries until attempt() is true. It is false where this process was too slow to see in time what it looks for: the
    server had ended by then what should have gone on."""
    assert any(attempt() for _ in range(10)), "never seen: " + what


class Server:
    """A running server; use it in a with statement. Flags are given as a list of strings."""

    def __init__(self, *flags, model=DEMO, wait=True, env=None, stderr=None):
        self.log = tempfile.NamedTemporaryFile(mode="r", suffix=".log")
        command = [PROGRAM, "serve", "--model", model, "--port", "0", "--host", "127.0.0.1"]
        if "--drain-delay-s" not in flags:
            command += ["--drain-delay-s", "0"]
        self.process = subprocess.Popen(
            command + list(flags), stdout=subprocess.DEVNULL,
            stderr=open(self.log.name, "w") if stderr is None else stderr,
            env={**os.environ, **(env or {})})
        self.session = requests.Session()
        try:
            self.port = self.find_port()
            self.url = "http://127.0.0.1:%d" % self.port
            if wait:
                self.wait_ready()
        except BaseException:  # there is no with statement yet that would end it
            self.process.kill()
            self.process.wait()
            raise

    def find_port(self, other_than=0):
        """The kernel's table tells the port before the ready line does."""

        def look():
            assert self.process.poll() is None, "died:\n" + self.read_log()
            inodes = set()
            folder = "/proc/%d/fd" % self.process.pid
            for name in os.listdir(folder):
                try:
                    inodes.add(os.readlink(os.path.join(folder, name)))
                except OSError:
                    pass
            for line in open("/proc/net/tcp").read().splitlines()[1:]:
                field = line.split()
                port = int(field[1].split(":")[1], 16)
                if (field[3] == "0A" and "socket:[%s]" % field[9] in inodes
                        and port != other_than):
                    return port
            return None

        return eventually(look, "a listening port")

    def wait_ready(self):
        def ready():
            assert self.process.poll() is None, "died:\n" + self.read_log()
            try:
                return self.get("/health/ready").status_code == 200
            except requests.ConnectionError:  # It has died, or is dying.
                return False

        eventually(ready, "ready")

    def read_log(self):
        """What it has written so far, in whole lines: a thread of its own writes them."""
        text = open(self.log.name).read()
        return text[:text.rfind("\n") + 1] if self.process.poll() is None else text

    def logged(self, text):
        """Waits until the log has this text: it may be written after what it tells is seen."""
        eventually(lambda: text in self.read_log(), "a line of the log with " + text)

    def get(self, path, **kw):
        return self.session.get(self.url + path, timeout=PATIENCE, **kw)

    def post(self, path, body, timeout=PATIENCE, **kw):
        data = body if isinstance(body, (bytes, str)) else json.dumps(body)
        data = data.encode() if isinstance(data, str) else data
        return requests.post(self.url + path, data=data, timeout=timeout, **kw)

    def ok(self, path, body):
        answer = self.post(path, body)
        assert answer.status_code == 200, (answer.status_code, answer.text)
        return answer.json()

    def metric(self, name):
        """The value of a sample, named with its labels; absent is 0."""
        for line in self.get("/metrics").text.splitlines():
            if line.startswith("pkmserve_" + name + " "):
                return float(line.split()[-1])
        return 0.0

    def counted(self, name, value=1):
        """Waits until a sample has this value: requests are counted once their answer has gone out,
        so a client that asks at once may be earlier."""
        eventually(lambda: self.metric(name) == value, "%s is %d" % (name, value))

    def connect(self):
        s = socket.create_connection(("127.0.0.1", self.port))
        s.settimeout(PATIENCE)
        return s

    def unread(self, path, body, room=4096):
        """A connection whose client asks and does not read the answer, of which about room bytes reach it."""
        s = socket.socket()
        s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, room)
        s.settimeout(PATIENCE)
        s.connect(("127.0.0.1", self.port))
        s.sendall(head(path, json.dumps(body).encode()))
        return s

    def stop(self, number=signal.SIGTERM):
        """Sends a signal and returns the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(PATIENCE)

    def __enter__(self):
        return self

    def __exit__(self, kind, value, trace):
        self.session.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                self.process.kill()
                raise
        log = self.read_log()
        assert "Sanitizer" not in log and "CHECK failed" not in log, log[-6000:]
        if kind is not None:
            print(log[-3000:])


def head(path, body, method="POST", extra=""):
    """The bytes of a request."""
    return ("%s %s HTTP/1.1\r\nHost: test\r\nContent-Length: %d\r\n%s\r\n"
            % (method, path, len(body), extra)).encode() + body


def is_answered(s):
    """Whether something has come that was not read, or the end."""
    return bool(select.select([s], [], [], 0)[0])


def read_answer(s):
    """Reads one answer, with Content-Length or in chunks, off a socket: status, headers, body."""
    data = b""
    while b"\r\n\r\n" not in data:
        more = s.recv(65536)
        assert more, "closed after %r" % data
        data += more
    top, body = data.split(b"\r\n\r\n", 1)
    lines = top.decode().split("\r\n")
    headers = {k.lower(): v for k, v in (line.split(": ", 1) for line in lines[1:])}
    n = int(headers.get("content-length", 0))
    chunked = headers.get("transfer-encoding") == "chunked"
    while not body.endswith(b"\r\n0\r\n\r\n") if chunked else len(body) < n:
        more = s.recv(1 << 20)
        assert more, "closed within the body"
        body += more
    if chunked:
        left, body = body, b""
        while left:
            size, left = left.split(b"\r\n", 1)
            body, left = body + left[:int(size, 16)], left[int(size, 16) + 2:]
        return int(lines[0].split()[1]), headers, body
    assert len(body) == n, "more than one answer came: %r" % body[n:]
    return int(lines[0].split()[1]), headers, body


def read_to_end(s):
    """Everything until the server closes."""
    data = b""
    while True:
        try:
            more = s.recv(65536)
        except ConnectionResetError:
            return data
        if not more:
            return data
        data += more


def events(text):
    """The JSON of a stream's events; checks its end."""
    parts = [p for p in text.split("\n\n") if p and not p.startswith(":")]
    assert all(p.startswith("data: ") for p in parts), parts
    assert parts[-1] == "data: [DONE]", parts[-1]
    return [json.loads(p[len("data: "):]) for p in parts[:-1]]


def error_of(answer, status, code, param=None):
    """Checks an error against the contract's form; returns its message."""
    assert answer.status_code == status, (answer.status_code, answer.text)
    body = answer.json()
    assert set(body) == {"error", "request_id"}, body
    assert set(body["error"]) == {"message", "type", "param", "code"}, body
    assert body["error"]["code"] == code, body
    if param is not None:
        assert body["error"]["param"] == param, body
    assert body["request_id"] == answer.headers["x-request-id"]
    assert "\n" not in body["error"]["message"] and body["error"]["message"]
    return body["error"]["message"]
