"""A small asyncio HTTP client for load: one connection per request unless kept, times of every
piece. Python's own library, so that the load needs nothing installed."""

import asyncio
import json
import os
import time


def percentile(values, p):
    values = sorted(values)
    return values[min(len(values) - 1, int(len(values) * p / 100))] if values else float("nan")


class Answer:
    """status 0: the connection broke before an answer; error says how."""

    def __init__(self):
        self.status, self.headers, self.body, self.error = 0, {}, b"", None
        self.begin = time.monotonic()
        self.first = self.end = None  # of the body's first and last byte, comments left out
        self.pieces = []  # when each piece of a stream came that is no comment
        self.complete = False

    def json(self):
        return json.loads(self.body)

    @property
    def seconds(self):
        return self.end - self.begin


async def read_body(reader, answer, pause):
    if answer.headers.get("transfer-encoding") != "chunked":
        answer.body = await reader.readexactly(int(answer.headers.get("content-length", 0)))
        answer.first = time.monotonic()
        return
    parts = []
    while True:
        n = int(await reader.readuntil(b"\r\n"), 16)
        data = await reader.readexactly(n + 2)
        if n == 0:
            break
        if not data.startswith(b":"):
            answer.pieces.append(time.monotonic())
            answer.first = answer.first or answer.pieces[0]
        parts.append(data[:-2])
        if pause:
            await asyncio.sleep(pause)
    answer.body = b"".join(parts)


async def ask(port, path, body=None, pause=0, leave_after=None, host="127.0.0.1", headers=""):
    """One request. pause: seconds between the pieces of a stream that is read slowly.
    leave_after: closes the connection after so many seconds."""
    answer = Answer()
    writer = None

    async def run():
        nonlocal writer
        limit = 2 ** 16 if not pause else 2 ** 10
        reader, writer = await asyncio.open_connection(host, port, limit=limit)
        data = b"" if body is None else json.dumps(body).encode()
        head = "%s %s HTTP/1.1\r\nHost: load\r\nConnection: close\r\n%sContent-Length: %d\r\n\r\n"
        writer.write((head % ("GET" if body is None else "POST", path, headers,
                              len(data))).encode() + data)
        lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        answer.headers = {k.lower(): v for k, v in (x.split(": ", 1) for x in lines[1:] if x)}
        answer.status = int(lines[0].split()[1])
        await read_body(reader, answer, pause)
        answer.complete = True

    try:
        await asyncio.wait_for(run(), leave_after)
    except asyncio.TimeoutError:
        answer.error = "left"
    except (OSError, asyncio.IncompleteReadError) as error:
        answer.error = repr(error)
    finally:
        if writer is not None:
            writer.close()
    answer.end = time.monotonic()
    return answer


def events(answer):
    return [json.loads(line[6:]) for line in answer.body.decode().split("\n")
            if line.startswith("data: {")]


def gaps(answer):
    """Seconds between the pieces of a stream."""
    return [b - a for a, b in zip(answer.pieces, answer.pieces[1:])]


def resident_mib(pid):
    with open("/proc/%d/statm" % pid) as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE") / 2 ** 20


def open_files(pid):
    return len(os.listdir("/proc/%d/fd" % pid))
