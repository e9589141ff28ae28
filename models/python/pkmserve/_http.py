"""One request and its answer, waiting or not.

Each request has a connection of its own: a Kubernetes service spreads connections, not requests, over its
pods, and a client that gives up a request tells the server so by closing. Nothing depends on what was
asked before, so a request that found the server full, gone or on its way out is sent again.
"""

import asyncio
import http.client
import io
import json
import ssl
from typing import Any, Dict, Mapping, Optional, Tuple, cast
from urllib.parse import urlsplit

Object = Dict[str, Any]
BACKOFF_S = 0.25  # doubled with each attempt, unless the server says how long
LONGEST_S = 60.0  # that a server may ask to wait


class ServerError(Exception):
    """The server refused a request, or failed: message names the field, the limit and the value."""

    def __init__(self, status: int, message: str, code: Optional[str] = None,
                 param: Optional[str] = None, request_id: Optional[str] = None) -> None:
        super().__init__("%d %s: %s" % (status, code, message) if code else "%d: %s" % (status, message))
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.request_id = request_id


class Retry(Exception):
    """The request may be sent again, in wait_s; cause is what to raise if it is not."""

    def __init__(self, cause: Exception, wait_s: Optional[float] = None) -> None:
        super().__init__(str(cause))
        self.cause = cause
        self.wait_s = wait_s

    def delay(self, attempt: int) -> float:
        return BACKOFF_S * 2.0**attempt if self.wait_s is None else min(self.wait_s, LONGEST_S)


class Address:
    """Where the server is, and what is sent with every request."""

    def __init__(self, url: str, api_key: Optional[str], timeout: float,
                 context: Optional[ssl.SSLContext]) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("url is %r, but must be like http://HOST:PORT" % url)
        self.context: Optional[ssl.SSLContext] = None
        if parts.scheme == "https":
            self.context = context or ssl.create_default_context()
        self.host: str = parts.hostname
        self.port: int = parts.port or (443 if self.context else 80)
        self.path = parts.path.rstrip("/")
        self.timeout = timeout
        self.headers = {"Content-Type": "application/json", "Connection": "close"}
        if api_key:
            if not (api_key.isascii() and api_key.isprintable()):
                raise ValueError("api_key has characters that no header may have")
            self.headers["Authorization"] = "Bearer " + api_key

    def head(self, method: str, path: str, n_byte: int) -> bytes:
        host = "[%s]" % self.host if ":" in self.host else self.host
        lines = ["%s %s%s HTTP/1.1" % (method, self.path, path), "Host: %s:%d" % (host, self.port),
                 "Content-Length: %d" % n_byte]
        lines += ["%s: %s" % item for item in self.headers.items()]
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def check_path(path: str) -> str:
    if not path.startswith("/") or not path.isprintable() or " " in path:
        raise ValueError("path is %r, but must be like /score" % path)
    return path


def encode(body: Optional[Mapping[str, Any]]) -> bytes:
    return b"" if body is None else json.dumps(body, allow_nan=False).encode()


def read_answer(status: int, retry_after: Optional[str], data: bytes) -> Object:
    """The JSON of an answer, or its error."""
    try:
        answer = json.loads(data)
    except ValueError:
        answer = None
    if 200 <= status < 300 and isinstance(answer, dict):
        return answer
    told = answer.get("error") if isinstance(answer, dict) else None
    if isinstance(told, dict):
        error = ServerError(status, str(told.get("message")), told.get("code"), told.get("param"),
                            cast(Object, answer).get("request_id"))
    else:  # of something between here and the server
        error = ServerError(status, data[:200].decode("utf-8", "replace") or "no message")
    if status in (429, 503):
        known = retry_after is not None and retry_after.isdecimal()
        raise Retry(error, float(cast(str, retry_after)) if known else None)
    if status == 502:  # a balancer whose replica died
        raise Retry(error)
    raise error


def send(address: Address, method: str, path: str, data: bytes) -> Object:
    connection = http.client.HTTPConnection(address.host, address.port, timeout=address.timeout)
    if address.context is not None:
        connection = http.client.HTTPSConnection(address.host, address.port, timeout=address.timeout,
                                                 context=address.context)
    try:
        connection.request(method, address.path + path, data, address.headers)
        answer = connection.getresponse()
        status, retry_after, text = answer.status, answer.getheader("Retry-After"), answer.read()
    except TimeoutError:
        raise
    except (OSError, http.client.HTTPException) as error:
        raise Retry(error) from error
    finally:
        connection.close()
    return read_answer(status, retry_after, text)


class _Bytes:
    """What http.client asks of a socket that it reads an answer from."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def makefile(self, *_: Any) -> io.BytesIO:
        return io.BytesIO(self.data)


def parse(data: bytes, method: str) -> Tuple[int, Optional[str], bytes]:
    """Status, Retry-After and body of a whole answer, read as http.client reads it."""
    answer = http.client.HTTPResponse(cast(Any, _Bytes(data)), method=method)
    answer.begin()
    return answer.status, answer.getheader("Retry-After"), answer.read()


async def _exchange(address: Address, request: bytes) -> bytes:
    reader, writer = await asyncio.open_connection(address.host, address.port, ssl=address.context)
    try:
        writer.write(request)
        await writer.drain()
        return await reader.read()
    finally:  # also when the task is cancelled: the server then stops computing
        writer.close()


async def send_async(address: Address, method: str, path: str, data: bytes) -> Object:
    request = address.head(method, path, len(data)) + data
    try:
        whole = await asyncio.wait_for(_exchange(address, request), address.timeout)
        status, retry_after, text = parse(whole, method)
    except asyncio.TimeoutError as late:
        raise TimeoutError("timed out") from late
    except (OSError, http.client.HTTPException) as error:
        raise Retry(error) from error
    return read_answer(status, retry_after, text)
