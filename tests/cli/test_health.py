"""`pkmserve health`: what a container's health check gets, from servers good, ill and strange."""

import socket
import threading

import pytest

from cli_harness import fails, ok


class FakeServer:
    """Answers every connection with the same bytes; None: with silence. Keeps what it was asked."""

    def __init__(self, answer):
        self.answer, self.asked = answer, b""
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.port = self.socket.getsockname()[1]
        self.open = []
        threading.Thread(target=self.serve, daemon=True).start()

    def serve(self):
        while True:
            try:
                connection, _ = self.socket.accept()
            except OSError:
                return
            self.open.append(connection)
            if self.answer is None:
                continue
            while b"\r\n\r\n" not in self.asked:
                self.asked += connection.recv(4096)
            connection.sendall(self.answer)
            connection.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.socket.close()


def answer(status, body=b""):
    return b"HTTP/1.1 %d Any\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body)


def test_200_is_healthy_and_the_question_is_plain_http():
    with FakeServer(answer(200, b'{"status":"ok"}')) as s:
        line = ok("health", "--port", s.port, "--host", "127.0.0.1")
        assert line == "healthy: 127.0.0.1 port %d answers /health/ready with 200\n" % s.port
        assert s.asked == (b"GET /health/ready HTTP/1.1\r\nHost: 127.0.0.1\r\n"
                           b"Connection: close\r\n\r\n")


def test_it_asks_where_the_server_listens_by_the_same_variables():
    with FakeServer(answer(200)) as s:
        # The wildcard that a server listens on is this machine to who asks.
        ok("health", env={"PKMSERVE_PORT": str(s.port), "PKMSERVE_HOST": "0.0.0.0",
                          "PKMSERVE_MODEL": "/nowhere"})


def test_path():
    with FakeServer(answer(200)) as s:
        ok("health", "--port", s.port, "--path", "/health/live")
        assert s.asked.startswith(b"GET /health/live HTTP/1.1\r\n")


@pytest.mark.parametrize("bytes_back, wanted", [
    (answer(503, b'{"status":"draining"}'), 'answers /health/ready with 503: {"status":"draining"}'),
    (answer(503, b"x" * 9000), "with 503: " + "x" * 200),
    (answer(503, b"two\nlines\x1b["), "with 503: two?lines?["),
    (answer(204), "with 204"),
    (answer(302), "with 302"),
    (b"HTTP/1.1 503 no end of the head", "with 503"),
    (b"", "does not answer as HTTP does"),
    (b"HTTP/1.", "does not answer as HTTP does"),
    (b"HTTP/1.1 20", "does not answer as HTTP does"),
    (b"SSH-2.0-OpenSSH_9.2\r\n", "does not answer as HTTP does"),
    (b"HTTP/1.1 2000 OK\r\n\r\n", "does not answer as HTTP does"),
    (b"\x00" * 5000, "does not answer as HTTP does"),
    (b"HTTP/1.1 503 x\r\n\r\n{\"a\": 1}\n", "with 503: {\"a\": 1}"),
])
def test_anything_else_is_not(bytes_back, wanted):
    with FakeServer(bytes_back) as s:
        line = fails(1, "health", "--port", s.port)
        assert line.startswith("pkmserve: not healthy: 127.0.0.1 port %d " % s.port), line
        assert line.endswith(wanted), line


def test_silence_ends_at_the_timeout():
    with FakeServer(None) as s:
        line = fails(1, "health", "--port", s.port, "--timeout-s", "1")
        assert "the answer took longer than 1 s" in line


def test_nobody_there():
    with socket.create_server(("127.0.0.1", 0)) as s:
        port = s.getsockname()[1]
    assert "connecting: Connection refused" in fails(1, "health", "--port", port)
    assert "--host nobody.invalid" in fails(1, "health", "--host", "nobody.invalid")


@pytest.mark.parametrize("arguments, wanted", [
    (["--port", "0"], "--port: 0"),
    (["--path", "health"], "--path: 'health' is not a path"),
    (["--path", "/a b"], "--path: '/a b' is not a path"),
    (["--path", "/a\r\nEvil: 1"], "is not a path"),
])
def test_a_question_that_cannot_be_asked(arguments, wanted):
    assert wanted in fails(2, "health", *arguments)
