"""Client of pkmserve: scores, generated text and memory reads as numpy arrays.

`Client` waits for each answer, `AsyncClient` has the same methods as coroutines. See README.md.
"""

from ._client import AsyncClient, Client
from ._http import ServerError
from ._results import Generation, Memory, Scores, Tokens

__all__ = ["AsyncClient", "Client", "Generation", "Memory", "Scores", "ServerError", "Tokens"]
