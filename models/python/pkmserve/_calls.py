"""What each method sends, and how its answers are read: the same for both clients."""

from dataclasses import dataclass
from typing import Any, Callable, Generic, List, Mapping, Optional, Sequence, TypeVar, Union

import numpy as np
import numpy.typing as npt

from ._results import (Generation, Memory, Object, Scores, read_generations, read_memory,
                       read_scores)

Result = TypeVar("Result")
Ids = Union[Sequence[int], npt.NDArray[np.integer[Any]]]
Text = Union[str, Ids]  # a text, or its token ids
Texts = Union[Text, Sequence[str], Sequence[Ids]]

ITEMS = 32  # of one request, below every default limit of the server
LENGTH = 1 << 17  # and its characters or ids together, unless one item alone has more


@dataclass(frozen=True)
class Call(Generic[Result]):
    """Requests to one path, each made by itself, and what becomes of their answers."""

    path: str
    bodies: List[Object]
    read: Callable[[List[Object]], Result]


def _plain(text: Any) -> Any:
    """A text as it is, ids as a list of int."""
    return text if isinstance(text, str) else [int(i) for i in text]


def _several(texts: Texts) -> List[Any]:
    """One text, one list of ids, or several of either."""
    if isinstance(texts, str):
        return [texts]
    items = list(texts)
    if items and isinstance(items[0], (int, np.integer)):
        return [_plain(items)]
    return [_plain(item) for item in items]


def _whole(fields: Mapping[str, Any]) -> Object:
    if fields.get("stream"):
        raise ValueError("stream: answers are read whole here")
    return dict(fields)


def _parts(items: List[Any]) -> List[List[Any]]:
    """The items in order, in groups that fit a request. Texts and ids are not mixed in one."""
    groups: List[List[Any]] = []
    length = 0
    for item in items:
        fits = (bool(groups) and len(groups[-1]) < ITEMS and length + len(item) <= LENGTH
                and isinstance(groups[-1][0], str) == isinstance(item, str))
        if not fits:
            groups.append([])
            length = 0
        groups[-1].append(item)
        length += len(item)
    return groups


def score(texts: Texts, continuations: Optional[Union[Sequence[str], Sequence[Ids]]], tokens: bool,
          ranks: bool, entropy: bool, fields: Mapping[str, Any]) -> Call[Scores]:
    body = _whole(fields)
    if tokens or ranks or entropy:
        body.setdefault("logprobs", 0)
    if ranks:
        body["ranks"] = True
    if entropy:
        body["entropy"] = True
    if continuations is not None:
        endings = [_plain(c) for c in continuations]
        bodies = [{**body, "context": _plain(texts), "continuations": endings}]
    else:
        bodies = [{**body, ("text" if isinstance(part[0], str) else "tokens"): part}
                  for part in _parts(_several(texts))]
    return Call("/score", bodies, read_scores)


def _seed_of(seed: Optional[int], part: int) -> Optional[int]:
    """Of a request. The server draws by seed and place in the request: with one seed, the first prompt of each
    request would get the same draws."""
    return seed if seed is None or part == 0 else (int(seed) + part * 0x9E3779B97F4A7C15) % 2**64


def generate(prompts: Texts, max_tokens: Optional[int], temperature: Optional[float],
             seed: Optional[int], n: int, fields: Mapping[str, Any]) -> Call[List[Generation]]:
    body: Object = {"logprobs": 0, "n": n, "max_tokens": max_tokens, "temperature": temperature,
                    **_whole(fields)}
    bodies = [{**body, "prompt": part, "seed": _seed_of(seed, i)}
              for i, part in enumerate(_parts(_several(prompts)))]
    return Call("/generate", bodies, lambda answers: read_generations(answers, n))


def memory(text: Text, memories: Optional[Sequence[int]], start: int,
           fields: Mapping[str, Any]) -> Call[Memory]:
    plain = _plain(text)
    body = {**_whole(fields), "text" if isinstance(plain, str) else "tokens": plain, "logprobs": 0,
            "memory": "slots",
            "memory_slots": {"start": start, "memories": None if memories is None else list(memories)}}
    return Call("/score", [body], read_memory)
