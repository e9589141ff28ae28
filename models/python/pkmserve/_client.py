"""The two clients: they differ in how they wait, not in what they ask."""

import asyncio
import ssl
import time
from typing import Any, List, Mapping, Optional, Sequence, TypeVar, Union

from . import _calls
from ._calls import Call, Ids, Text, Texts
from ._http import Address, Retry, check_path, encode, send, send_async
from ._results import Generation, Memory, Object, Scores

Result = TypeVar("Result")


class Client:
    """A server at url, waited for. May be used by several threads at once.

    timeout: seconds without a byte before TimeoutError. retries: how often a request is sent again that
    found no server, a full one (429) or one on its way out (503). Refusals raise ServerError.
    """

    def __init__(self, url: str = "http://127.0.0.1:8000", *, api_key: Optional[str] = None,
                 timeout: float = 600.0, retries: int = 5,
                 ssl_context: Optional[ssl.SSLContext] = None) -> None:
        self._address = Address(url, api_key, timeout, ssl_context)
        self._retries = max(0, retries)

    def request(self, path: str, body: Optional[Mapping[str, Any]] = None) -> Object:
        """Any path of server/API.md that answers in JSON: POST with a body, GET without."""
        what = ("GET" if body is None else "POST", check_path(path), encode(body))
        for attempt in range(self._retries + 1):
            try:
                return send(self._address, *what)
            except Retry as retry:
                if attempt == self._retries:
                    raise retry.cause from None
                time.sleep(retry.delay(attempt))
        raise AssertionError("the last attempt returns or raises")

    def _run(self, call: "Call[Result]") -> Result:
        return call.read([self.request(call.path, body) for body in call.bodies])

    def info(self) -> Object:
        """The model, the backend and the limits: GET /info."""
        return self.request("/info")

    def score(self, texts: Texts, continuations: Optional[Union[Sequence[str], Sequence[Ids]]] = None,
              *, tokens: bool = False, ranks: bool = False, entropy: bool = False,
              **fields: Any) -> Scores:
        """How likely texts are (or ids: lists or arrays), any number of them; or, with continuations,
        each of these behind one text. tokens, ranks, entropy: also of each token. fields: any other
        field of POST /score, such as stride, add_bos, ablate."""
        return self._run(_calls.score(texts, continuations, tokens, ranks, entropy, fields))

    def generate(self, prompts: Texts, *, max_tokens: Optional[int] = None,
                 temperature: Optional[float] = None, seed: Optional[int] = None, n: int = 1,
                 **fields: Any) -> List[Generation]:
        """n continuations of each prompt, in order. fields: any other field of POST /generate but
        stream and echo."""
        return self._run(_calls.generate(prompts, max_tokens, temperature, seed, n, fields))

    def memory(self, text: Text, *, memories: Optional[Sequence[int]] = None, start: int = 0,
               **fields: Any) -> Memory:
        """Which slots each position of a text reads, and with what weights. memories, start: a part of
        it, for long texts. fields: any other field of POST /score, such as ablate."""
        return self._run(_calls.memory(text, memories, start, fields))


class AsyncClient:
    """The same as coroutines; at most concurrency requests are under way at once. A cancelled call closes
    its connections, and the server stops computing for them. timeout is that of a whole request."""

    def __init__(self, url: str = "http://127.0.0.1:8000", *, api_key: Optional[str] = None,
                 timeout: float = 600.0, retries: int = 5, concurrency: int = 16,
                 ssl_context: Optional[ssl.SSLContext] = None) -> None:
        self._address = Address(url, api_key, timeout, ssl_context)
        self._retries = max(0, retries)
        self._concurrency = max(1, concurrency)
        self._seats: Optional[asyncio.Semaphore] = None
        self._loop: Optional[asyncio.AbstractEventLoop] = None  # to which the seats belong

    async def request(self, path: str, body: Optional[Mapping[str, Any]] = None) -> Object:
        """Any path of server/API.md that answers in JSON: POST with a body, GET without."""
        what = ("GET" if body is None else "POST", check_path(path), encode(body))
        loop = asyncio.get_running_loop()
        if self._seats is None or self._loop is not loop:  # each asyncio.run has a loop of its own
            self._seats, self._loop = asyncio.Semaphore(self._concurrency), loop
        seats = self._seats
        for attempt in range(self._retries + 1):
            try:
                async with seats:
                    return await send_async(self._address, *what)
            except Retry as retry:
                if attempt == self._retries:
                    raise retry.cause from None
                await asyncio.sleep(retry.delay(attempt))
        raise AssertionError("the last attempt returns or raises")

    async def _run(self, call: "Call[Result]") -> Result:
        tasks = [asyncio.ensure_future(self.request(call.path, body)) for body in call.bodies]
        try:
            return call.read(list(await asyncio.gather(*tasks)))
        finally:
            for task in tasks:  # of the others, when one has failed
                task.cancel()

    async def info(self) -> Object:
        """As Client.info."""
        return await self.request("/info")

    async def score(self, texts: Texts,
                    continuations: Optional[Union[Sequence[str], Sequence[Ids]]] = None, *,
                    tokens: bool = False, ranks: bool = False, entropy: bool = False,
                    **fields: Any) -> Scores:
        """As Client.score."""
        return await self._run(_calls.score(texts, continuations, tokens, ranks, entropy, fields))

    async def generate(self, prompts: Texts, *, max_tokens: Optional[int] = None,
                       temperature: Optional[float] = None, seed: Optional[int] = None, n: int = 1,
                       **fields: Any) -> List[Generation]:
        """As Client.generate."""
        return await self._run(_calls.generate(prompts, max_tokens, temperature, seed, n, fields))

    async def memory(self, text: Text, *, memories: Optional[Sequence[int]] = None, start: int = 0,
                     **fields: Any) -> Memory:
        """As Client.memory."""
        return await self._run(_calls.memory(text, memories, start, fields))
