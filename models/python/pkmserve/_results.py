"""What the server's answers become: arrays, and how they are read.

A number that the server does not have (JSON's null) is NaN: the log-probability of a token that nothing
predicts, a mean over no tokens, a sum in which a token is impossible. Such a token itself is -inf.
"""

import base64
from dataclasses import dataclass, fields
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

import numpy as np
import numpy.typing as npt

Object = Dict[str, Any]
Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]
Counts = npt.NDArray[np.int64]
Doubles = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Tokens:
    """The tokens of one text, n of them."""

    ids: Ints  # [n]
    pieces: List[str]  # as the vocabulary writes them
    offsets: Ints  # [n] characters of the text before the token; -1 where there is no text
    logprobs: Floats  # [n] natural logarithm
    ranks: Optional[Ints]  # [n] 1 = the likeliest; 0 = nothing predicts it. With ranks=True
    entropy: Optional[Floats]  # [n] nats. With entropy=True


@dataclass(frozen=True, eq=False)
class Scores:
    """The figures of n texts, one element each; server/SCORING.md says what they mean."""

    n_tokens: Counts
    n_scored: Counts
    n_unk: Counts
    n_bytes: Counts
    n_chars: Counts
    n_words: Counts
    sum_logprob: Doubles
    mean_nll: Doubles
    perplexity: Doubles
    bits_per_token: Doubles
    bits_per_byte: Doubles
    bits_per_char: Doubles
    byte_perplexity: Doubles
    word_perplexity: Doubles
    accuracy: Doubles
    tokens: Optional[List[Tokens]]  # with tokens=True
    rankings: List[Dict[str, Optional[int]]]  # of score(context, continuations): by sum, per_token, ...
    answers: List[Object]  # as they came, one for each request that was made

    def __len__(self) -> int:
        return len(self.n_tokens)


@dataclass(frozen=True, eq=False)
class Generation:
    """One text that was generated, of n tokens."""

    prompt: int  # which of the prompts it continues
    text: str
    ids: Ints  # [n]
    logprobs: Floats  # [n] of the distribution before it was drawn from; NaN with logprobs=None
    finish_reason: str  # "stop" or "length"
    seed: int
    answer: Object  # the choice as it came


@dataclass(frozen=True, eq=False)
class Memory:
    """Which slots a text read. Position i is the one behind which token i + 1 is predicted."""

    pieces: List[str]  # of the positions; "" is a BOS that the server put in front
    indices: Tuple[Ints, ...]  # for each memory asked for [n_position, heads, knn]: the slots
    weights: Tuple[Floats, ...]  # alike: what their values were multiplied by
    memories: Tuple[int, ...]  # their numbers in the model
    layers: List[Object]  # summary of each memory of the model: mem_used, mem_kl_w, ...

    def top(self, k: int, memory: int = 0) -> List[Tuple[int, int, float]]:
        """The k slots of a memory (by its place in indices) with the most weight: (slot, reads, weight)."""
        slots, place = np.unique(self.indices[memory], return_inverse=True)
        place = place.reshape(-1)
        weight = np.bincount(place, self.weights[memory].reshape(-1).astype(np.float64), len(slots))
        reads = np.bincount(place, minlength=len(slots))
        best = np.lexsort((slots, -weight))[:k]
        return [(int(slots[i]), int(reads[i]), float(weight[i])) for i in best]


def _float(value: Optional[float]) -> float:
    return float("nan") if value is None else value


def _logprobs(tokens: Sequence[Mapping[str, Any]]) -> Floats:
    return np.array([-np.inf if t.get("impossible") else _float(t.get("logprob")) for t in tokens],
                    np.float32)


def _ints(values: Sequence[Optional[int]], absent: int = 0) -> Ints:
    return np.array([absent if v is None else v for v in values], np.int32)


def read_tokens(tokens: Sequence[Mapping[str, Any]]) -> Tokens:
    """The list "tokens" of a result of /score."""
    ranked = any("rank" in t for t in tokens)
    weighed = any("entropy" in t for t in tokens)
    return Tokens(
        ids=_ints([t["id"] for t in tokens]),
        pieces=[t.get("piece") or "" for t in tokens],
        offsets=_ints([t.get("offset") for t in tokens], -1),
        logprobs=_logprobs(tokens),
        ranks=_ints([t.get("rank") for t in tokens]) if ranked else None,
        entropy=np.array([_float(t.get("entropy")) for t in tokens], np.float32) if weighed else None)


def read_scores(answers: List[Object]) -> Scores:
    """Answers of /score, put one behind another."""
    results = [r for answer in answers for r in answer["results"]]
    columns: Dict[str, Any] = {}
    for field in fields(Scores):
        if field.name.startswith("n_"):
            columns[field.name] = np.array([r.get(field.name) or 0 for r in results], np.int64)
        elif field.name not in ("tokens", "rankings", "answers"):
            columns[field.name] = np.array([_float(r.get(field.name)) for r in results], np.float64)
    told = bool(results) and all("tokens" in r for r in results)
    return Scores(tokens=[read_tokens(r["tokens"]) for r in results] if told else None,
                  rankings=[a["ranking"] for a in answers if "ranking" in a],
                  answers=answers, **columns)


def read_generations(answers: List[Object], n: int) -> List[Generation]:
    """Answers of /generate, with n samples for each prompt."""
    found: List[Generation] = []
    for answer in answers:
        for choice in answer["choices"]:
            told = choice["logprobs"] or [{}] * len(choice["token_ids"])
            found.append(Generation(
                prompt=len(found) // n, text=choice["text"], ids=_ints(choice["token_ids"]),
                logprobs=_logprobs(told), finish_reason=choice["finish_reason"],
                seed=answer["seed"], answer=choice))
    return found


def read_memory(answers: List[Object]) -> Memory:
    """The answer of /score for one text with "memory": "slots". The server tells memories of one shape
    in a block; here each has arrays of its own."""
    result = answers[0]["results"][0]
    indices: Dict[int, Ints] = {}
    weights: Dict[int, Floats] = {}
    start = n_position = 0
    for block in result["memory"]["slots"]:
        start, n_position = block["start"], block["n_position"]
        shape = (n_position, len(block["memories"]), block["heads"], block["knn"])
        slots = np.frombuffer(base64.b64decode(block["indices"]), "<i4").reshape(shape)
        shares = np.frombuffer(base64.b64decode(block["weights"]), "<f4").reshape(shape)
        for i, memory in enumerate(block["memories"]):
            indices[memory] = slots[:, i].astype(np.int32)
            weights[memory] = shares[:, i].astype(np.float32)
    pieces = [t.get("piece") or "" for t in result["tokens"]]
    n_front = max(0, start + n_position - len(pieces))
    order = sorted(indices)
    return Memory(pieces=([""] * n_front + pieces)[start:start + n_position],
                  indices=tuple(indices[m] for m in order), weights=tuple(weights[m] for m in order),
                  memories=tuple(order), layers=result["memory"]["layers"])
