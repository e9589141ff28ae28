"""A server for compare.py: how long it takes to start, and what many streams at once cost beside the model.

The client reads bytes and counts events, nothing more: it runs on the cores that it measures."""

import json
import os
import re
import selectors
import signal
import socket
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path

PATIENCE_S = 60


class Server:
    """`pkmserve serve`, ready when __init__ returns; start_s is the time that took, from the call of the program."""

    def __init__(self, program, *flags):
        self.log = tempfile.TemporaryFile()  # a pipe that nobody reads would hold the server up
        begin = time.monotonic()
        self.process = subprocess.Popen(
            [program, "serve", "--host", "127.0.0.1", "--port", "0", "--drain-delay-s", "0", *map(str, flags)], stdout=subprocess.DEVNULL, stderr=self.log)
        ready = None
        while ready is None:
            time.sleep(0.001)
            ended = self.process.poll() is not None
            text = os.pread(self.log.fileno(), 1 << 16, 0).decode()
            ready = re.search(r" event=ready port=(\d+) ", text)
            if ended and ready is None:
                self.log.close()
                raise RuntimeError("pkmserve serve: %s" % (text.strip().splitlines() or ["no log"])[-1])
        self.start_s = time.monotonic() - begin
        self.port = int(ready.group(1))

    def metrics(self):
        """{sample with its labels: value}, without the prefix."""
        with urllib.request.urlopen("http://127.0.0.1:%d/metrics" % self.port, timeout=PATIENCE_S) as answer:
            lines = [line for line in answer.read().decode().splitlines() if not line.startswith("#")]
        return {name.removeprefix("pkmserve_"): float(value) for name, _, value in (x.rpartition(" ") for x in lines)}

    def resident_bytes(self):
        text = Path("/proc/%d/status" % self.process.pid).read_text()
        return 1024 * int(re.search(r"VmRSS:\s*(\d+)", text).group(1))

    def front_seconds(self):
        """Processor time of the threads that neither compute nor schedule: HTTP, JSON, tokens and their text."""
        total = 0
        for task in Path("/proc/%d/task" % self.process.pid).iterdir():
            try:
                if (task / "comm").read_text().strip() not in ("engine", "compute"):
                    total += int((task / "schedstat").read_text().split()[0])
            except OSError:
                pass  # a thread that has just ended
        return total * 1e-9

    def close(self):
        self.process.send_signal(signal.SIGTERM)
        self.process.wait()
        self.log.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def request(body):
    data = json.dumps(body).encode()
    return b"POST /generate HTTP/1.1\r\nHost: bench\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s" % (
        len(data), data)


def streams(port, bodies, seen):
    """Sends all at once and reads until each has ended. seen(begun, ended): called when either number grows."""
    selector = selectors.DefaultSelector()
    begun, n_ended = set(), 0
    for i, body in enumerate(bodies):
        connection = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S)
        connection.sendall(request(body))
        selector.register(connection, selectors.EVENT_READ, i)
    while n_ended < len(bodies):
        ready = selector.select(PATIENCE_S)
        if not ready:
            raise RuntimeError("no event of a stream for %d s" % PATIENCE_S)
        for key, _ in ready:
            data = key.fileobj.recv(1 << 16)
            if not data:
                selector.unregister(key.fileobj)
                key.fileobj.close()
                n_ended += 1
                seen(len(begun), n_ended)
            elif key.data not in begun and b"data: " in data:
                begun.add(key.data)
                seen(len(begun), n_ended)


class Window:
    """What a server did while all of n streams were running: from the first token of the last to the end of the
    first. Seconds: wall; of it the engine's thread in the model; processor time of the front's threads, and ours."""

    def __init__(self, server, n):
        self.server, self.n = server, n
        self.begin = self.end = None

    def look(self):
        m = self.server.metrics()
        return {"steps": m["engine_steps_total"], "model": m["engine_model_seconds_total"],
                "tokens": m["generation_tokens_total"], "wall": time.monotonic(),
                "front": self.server.front_seconds(), "client": time.process_time()}

    def seen(self, n_begun, n_ended):
        if n_begun == self.n and n_ended == 0 and self.begin is None:
            self.begin = self.look()
        elif n_ended > 0 and self.end is None:
            self.end = self.look()

    def figures(self):
        """None if they never ran at the same time."""
        if self.begin is None or self.end is None or self.end["steps"] == self.begin["steps"]:
            return None
        return {name: self.end[name] - self.begin[name] for name in self.begin}


def serve_streams(server, bodies):
    """-> figures of the time in which all streams ran"""
    for _ in range(5):
        window = Window(server, len(bodies))
        streams(server.port, bodies, window.seen)
        figures = window.figures()
        if figures is not None:
            return figures
    raise RuntimeError("the %d streams never ran at the same time: let them be longer" % len(bodies))
