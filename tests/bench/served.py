"""Two servers under the same load, for compare.py: pkmserve and llama.cpp's llama-server, each behind start(), round() and close().

A round sends every load of LOADS to /v1/completions, which both have: streams of token ids drawn at random, other ones in each round,
so that no server finds those of an earlier one in its cache of prompts. A client sends its next request when it has read the last answer."""

import asyncio
import os
import random
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import peers
import serving
from load import ask, gaps

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from free_port import free_port  # noqa: E402

FIRST_TOKEN = 3  # those below it are marks


class Load:
    """n_request requests by n_client clients. prompt: the fewest and the most tokens of one, behind n_shared that all begin with; each
    answer has half of n_token to n_token."""

    def __init__(self, name, n_client, n_request, prompt, n_token, n_shared=0):
        self.name, self.n_client, self.n_request, self.prompt, self.n_token = name, n_client, n_request, prompt, n_token
        self.n_shared = n_shared

    def bodies(self, seed, n_vocab):
        rng = random.Random("%s %d" % (self.name, seed))

        def tokens(n):
            return [rng.randrange(FIRST_TOKEN, n_vocab) for _ in range(n)]

        shared = tokens(self.n_shared)
        return [{"prompt": shared + tokens(rng.randint(*self.prompt)), "stream": True,
                 "max_tokens": rng.randint(self.n_token // 2, self.n_token), "temperature": 0, "ignore_eos": True}
                for _ in range(self.n_request)]


LOADS = [Load("1 client, prompts of 100 to 200 tokens", 1, 4, (100, 200), 64),
         Load("8 clients, prompts of 100 to 300", 8, 24, (100, 300), 64),
         Load("8 clients, prompts of 600 to 1500", 8, 12, (600, 1500), 32),
         Load("8 clients, prompts of 20 to 60 behind 600 that they share", 8, 32, (20, 60), 64, n_shared=600)]
QUICK_LOADS = [Load("2 clients, prompts of 10 to 20 tokens", 2, 4, (10, 20), 8)]
MAX_CLIENTS = 8
CONTEXT = 2048


async def answers(port, bodies, n_client):
    """The answers in the order of the bodies. One that is not whole is an error."""
    got = [None] * len(bodies)
    waiting = iter(enumerate(bodies))

    async def client():
        for i, body in waiting:
            got[i] = await ask(port, "/v1/completions", body)
            if got[i].status != 200 or not got[i].complete or b"data: [DONE]" not in got[i].body:
                raise RuntimeError("a stream ended with status %d: %s" % (
                    got[i].status, got[i].error or got[i].body[-200:].decode(errors="replace")))

    await asyncio.gather(*(client() for _ in range(n_client)))
    return got


def serve(port, load, seed, n_vocab):
    """-> {"rate": tokens per second of all answers, "first": seconds to the first token of each, "gaps": seconds between tokens}"""
    bodies = load.bodies(seed, n_vocab)
    begin = time.monotonic()
    got = asyncio.run(answers(port, bodies, load.n_client))
    seconds = time.monotonic() - begin
    for answer, body in zip(got, bodies):
        del answer.pieces[body["max_tokens"]:]  # what follows the last token
    return {"rate": sum(body["max_tokens"] for body in bodies) / seconds,
            "first": [answer.first - answer.begin for answer in got],
            "gaps": [gap for answer in got for gap in gaps(answer)]}


class Served:
    """What both servers share. A round's seeds are its number."""

    def __init__(self, loads, n_vocab):
        self.loads, self.n_vocab, self.n_round = loads, n_vocab, 0
        self.process = self.port = None

    def round(self):
        self.n_round += 1
        return [serve(self.port, load, self.n_round, self.n_vocab) for load in self.loads]

    def cpu_seconds(self):
        return peers.cpu_seconds(self.process.pid)


class Pkmserve(Served):
    def __init__(self, loads, n_vocab, program, flags):
        super().__init__(loads, n_vocab)
        self.program, self.flags, self.server = program, flags, None

    def start(self):
        self.server = serving.Server(self.program, *self.flags, "--max-seqs", MAX_CLIENTS)
        self.process, self.port = self.server.process, self.server.port

    def close(self):
        if self.server is not None:
            self.server.close()


class LlamaServer(Served):
    """A slot for each client, of the same context; everything else is as the program has it."""

    def __init__(self, loads, n_vocab, program, file, threads):
        super().__init__(loads, n_vocab)
        self.command = [str(program), "-m", str(file), "-t", str(threads), "-tb", str(threads), "-np", str(MAX_CLIENTS),
                        "-c", str(MAX_CLIENTS * CONTEXT), "--host", "127.0.0.1"]
        self.log = tempfile.TemporaryFile()

    def start(self):
        self.port = free_port()
        self.process = subprocess.Popen([*self.command, "--port", str(self.port)], stdout=self.log, stderr=self.log)
        while not self.ready():
            if self.process.poll() is not None:
                last = os.pread(self.log.fileno(), 1 << 20, 0).decode(errors="replace").strip().splitlines() or ["no log"]
                raise peers.Missing("llama.cpp: %s: exit status %d: %s" % (
                    self.command[0], self.process.returncode, last[-1]))
            time.sleep(0.05)

    def ready(self):
        try:
            with urllib.request.urlopen("http://127.0.0.1:%d/health" % self.port, timeout=serving.PATIENCE_S):
                return True
        except OSError:  # no connection yet, or a status that says so
            return False

    def close(self):
        if self.process is not None:
            self.process.terminate()
            self.process.wait()
        self.log.close()
