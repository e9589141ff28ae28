"""What the server does under stress, with figures: make stress, make soak.

    python3 tests/bench/stress.py [overload] [streams] [slow] [bulk] [soak] [--seconds N]

Each scenario starts a server on the shipped model, prints a line per figure, and fails (exit 1) where
a promise is broken: an answer that is neither good nor a documented refusal, memory that grows, a
stream that is cut. Times are printed, never judged: they depend on the machine."""

import argparse
import asyncio
import os
import random
import re
import sys
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))),
                                "server"))
from load import ask, events, gaps, open_files, percentile, resident_mib  # noqa: E402
from server_harness import Server  # noqa: E402

WORDS = "the old man and sea of a house in which there was no light but his own".split()
failures = []


def say(name, value):
    print("| %s | %s |" % (name, value), flush=True)


def demand(condition, what):
    if not condition:
        failures.append(what)
        say("FAILED", what)


def ms(values):
    return "p50 %.1f ms, p99 %.1f ms, max %.1f ms" % tuple(
        1e3 * x for x in (percentile(values, 50), percentile(values, 99), max(values)))


def prompt(random_):
    return " ".join(random_.choice(WORDS) for _ in range(random_.randint(4, 40)))


def generation(random_, n=16, **more):
    return {"prompt": prompt(random_), "max_tokens": n, "ignore_eos": True, **more}


# ---- scenarios ----------------------------------------------------------------------------------


SOAK_CACHE = 4096  # positions
OVERLOAD_TOKENS = 64  # of a request: so many that the server has more work with it than the client


async def closed_loop(port, concurrency, seconds, random_):
    """Requests per second that so many clients get, each sending when it has its answer."""
    end = time.monotonic() + seconds
    done = []

    async def client():
        while time.monotonic() < end:
            answer = await ask(port, "/generate", generation(random_, OVERLOAD_TOKENS))
            demand(answer.status == 200, "closed loop: status %d" % answer.status)
            done.append(answer.seconds)

    begin = time.monotonic()
    await asyncio.gather(*(client() for _ in range(concurrency)))
    return len(done) / (time.monotonic() - begin)


async def overload(seconds):
    """Three times as many requests as it can do: some are refused at once, the others in time."""
    random_ = random.Random(1)
    with Server("--max-seqs", "8", "--max-queue", "16") as s:
        rate = await closed_loop(s.port, 8, max(4, seconds / 10), random_)
        memory = resident_mib(s.process.pid)
        tasks = []
        due = time.monotonic()
        end = due + seconds
        while due < end:
            await asyncio.sleep(due - time.monotonic())
            tasks.append(asyncio.create_task(
                ask(s.port, "/generate", generation(random_, OVERLOAD_TOKENS))))
            due += random_.expovariate(3 * rate)
        took = time.monotonic() - (end - seconds)
        answers = [await t for t in tasks]
        good = [a.seconds for a in answers if a.status == 200]
        refused = [a for a in answers if a.status == 429]
        demand(len(good) + len(refused) == len(answers),
               "other answers: %s" % {a.status or a.error for a in answers})
        demand(refused and all("retry-after" in a.headers for a in refused), "no refusals")
        inside = [float(x) / 1e3 for x in re.findall(r"status=429 code=queue_full ms=([\d.]+)",
                                                     s.read_log())]
        grown = resident_mib(s.process.pid) - memory
        demand(grown < 32, "memory grew by %.0f MiB" % grown)
        say("capacity", "%.1f requests/s (8 at a time)" % rate)
        offered = len(answers) / took
        demand(offered > 2.7 * rate, "only %.1f requests/s were offered" % offered)
        say("offered", "%.1f requests/s for %.0f s" % (offered, took))
        say("accepted", "%d, latency %s" % (len(good), ms(good)))
        say("bound of the queue", "%.0f ms = (16 waiting + 8 running) / capacity"
            % (24e3 / rate))
        say("refused", "%d, in the server %s" % (len(refused), ms(inside)))
        say("memory", "%+.1f MiB" % grown)


async def streams(seconds):
    """256 streams at once."""
    random_ = random.Random(2)
    with Server("--max-seqs", "256", "--max-model-len", "128", "--max-queue", "256") as s:
        answers = await asyncio.gather(*(
            ask(s.port, "/generate", generation(random_, 32, stream=True)) for _ in range(256)))
        demand(all(a.status == 200 and a.complete and len(events(a)) == 33 and
                   a.body.endswith(b"data: [DONE]\n\n") for a in answers), "a stream is not whole")
        begin, end = min(a.begin for a in answers), max(a.end for a in answers)
        say("256 streams of 32 tokens", "%.0f tokens/s" % (256 * 32 / (end - begin)))
        say("first token", ms([a.first - a.begin for a in answers]))
        say("between tokens", ms([g for a in answers for g in gaps(a)]))


async def slow(seconds):
    """Streams that nobody reads hold up no others."""
    random_ = random.Random(3)
    with Server("--max-seqs", "32") as s:
        async def normal():
            answers = await asyncio.gather(*(
                ask(s.port, "/generate", generation(random_, 64, stream=True)) for _ in range(4)))
            demand(all(a.complete for a in answers), "a normal stream was cut")
            return [g for a in answers for g in gaps(a)]

        alone = await normal()
        memory = resident_mib(s.process.pid)
        readers = [asyncio.create_task(
            ask(s.port, "/generate", generation(random_, 400, stream=True, logprobs=20),
                pause=0.02)) for _ in range(24)]
        await asyncio.sleep(1)
        for _ in range(200):  # until the engine has done its part for the slow ones
            if s.metric("num_requests_running") == 0:
                break
            await asyncio.sleep(0.2)
        beside = await normal()
        grown = resident_mib(s.process.pid) - memory
        done = await asyncio.gather(*readers)
        demand(all(a.complete and len(events(a)) == 401 for a in done), "a slow reader lost events")
        say("between tokens of 4 streams, alone", ms(alone))
        say("beside 24 slow readers", ms(beside))
        say("memory for 24 unread streams of 400 tokens with 20 alternatives", "%+.1f MiB" % grown)


async def bulk(seconds):
    """Interactive generations while documents to score saturate the engine."""
    random_ = random.Random(4)
    documents = [" ".join(random_.choice(WORDS) for _ in range(1500)) for _ in range(16)]
    with Server("--max-seqs", "16") as s:
        async def interactive(n):
            answers = []
            for _ in range(n):
                answers.append(await ask(s.port, "/generate", generation(random_, 32, stream=True)))
                demand(answers[-1].complete, "an interactive stream was cut")
            return ([a.first - a.begin for a in answers], [g for a in answers for g in gaps(a)])

        alone = await interactive(8)
        going = True
        tokens = 0

        async def score():
            nonlocal tokens
            while going:
                answer = await ask(s.port, "/score", {"text": documents, "priority": "bulk"})
                demand(answer.status == 200, "scoring: status %d" % answer.status)
                tokens += answer.json()["aggregate"]["n_tokens"]

        begin = time.monotonic()
        scorers = [asyncio.create_task(score()) for _ in range(2)]
        await asyncio.sleep(2)
        beside = await interactive(max(8, seconds // 4))
        going = False
        await asyncio.gather(*scorers)
        say("bulk scoring beside it", "%.0f tokens/s" % (tokens / (time.monotonic() - begin)))
        for name, a, b in (("first token", alone[0], beside[0]),
                           ("between tokens", alone[1], beside[1])):
            say(name + ", alone", ms(a))
            say(name + ", beside bulk scoring", ms(b))


async def fill_cache(s, random_):
    """The cache takes memory as texts fill it. Texts that differ from the first token on fill it all."""
    n = 0
    while n < 3 * SOAK_CACHE:
        text = " ".join(prompt(random_) for _ in range(60))
        answer = await ask(s.port, "/score", {"text": text})
        demand(answer.status == 200, "filling the cache: %s" % answer.status)
        n += answer.json()["usage"]["prompt_tokens"]


async def soak(seconds):
    """A mix of everything, with clients that leave, for as long as you like."""
    random_ = random.Random(5)
    counts = {}
    with Server("--max-seqs", "16", "--max-queue", "64", "--kv-tokens", str(SOAK_CACHE)) as s:
        await fill_cache(s, random_)
        end = time.monotonic() + seconds

        def request():
            kind = random_.choice(["generate", "stream", "score", "leave", "long", "wrong"])
            if kind == "score":
                return kind, "/score", {"text": [prompt(random_) * 8] * 2, "logprobs": 1,
                                        "memory": "summary"}, {}
            if kind == "wrong":
                return kind, "/generate", {"prompt": 5, "max_tokens": -1}, {}
            body = generation(random_, random_.randint(1, 48), stream=kind in ("stream", "leave"),
                              logprobs=random_.choice([None, 0, 3]))
            if kind == "long":
                body.update(n=4, temperature=0.9)
            return kind, "/generate", body, \
                {"leave_after": random_.uniform(0, 0.3)} if kind == "leave" else {}

        async def client():
            while time.monotonic() < end:
                kind, path, body, how = request()
                answer = await ask(s.port, path, body, **how)
                counts[kind] = counts.get(kind, 0) + 1
                wanted = 400 if kind == "wrong" else 200
                demand(kind == "leave" or (answer.status == wanted and answer.complete),
                       "%s: %s %s %s" % (kind, answer.status, answer.error, answer.body[:300]))

        clients = [asyncio.create_task(client()) for _ in range(12)]
        await asyncio.sleep(min(20, seconds / 3))  # what a busy server needs it has by then
        memory, files = resident_mib(s.process.pid), open_files(s.process.pid)
        await asyncio.gather(*clients)
        grown = resident_mib(s.process.pid) - memory
        for _ in range(100):
            if s.metric("num_requests_running") == 0:
                break
            await asyncio.sleep(0.1)
        say("requests in %d s" % seconds, ", ".join("%s %d" % kv for kv in sorted(counts.items())))
        say("memory", "%+.1f MiB" % grown)
        say("open files", "%+d" % (open_files(s.process.pid) - files))
        demand(grown < 16, "memory grew by %.0f MiB" % grown)
        demand(s.metric("num_requests_running") == 0 and s.metric("num_requests_waiting") == 0,
               "work is left behind")
        demand(s.get("/health/ready?deep=1").status_code == 200, "not healthy at the end")
        demand(s.stop() == 0, "exit status")


def main():
    scenarios = {f.__name__: f for f in (overload, streams, slow, bulk, soak)}
    parser = argparse.ArgumentParser()
    parser.add_argument("scenario", nargs="*", choices=[*scenarios, []], default=[])
    parser.add_argument("--seconds", type=int, default=60)
    arguments = parser.parse_args()
    for name in arguments.scenario or scenarios:
        print("\n%s: %s\n\n| | |\n|---|---|" % (name, scenarios[name].__doc__), flush=True)
        asyncio.run(scenarios[name](arguments.seconds))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
