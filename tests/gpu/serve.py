"""Serving over HTTP on the device: what HTTP costs beside the model, whether a request alone has the bits it has in
a crowd, and whether a mixture of everything leaves anything behind.

    serve.py PROGRAM MODEL --device cuda [--streams 1,8] [--tokens 1000] [--seconds 60] [--vocab 60000]

prints JSON lines, each with "part", and exits with 1 where a promise is broken; check_serve runs it as a part of the
check, on a model with random weights. Prompts are token ids, since the model has no tokenizer. Needs Python alone.
"""

import argparse
import asyncio
import json
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from run import FAST, ROOT
from speed import SMALL

sys.path.insert(0, str(ROOT / "tests" / "bench"))

from load import ask, open_files, percentile, resident_mib  # noqa: E402
from serving import Server, streams  # noqa: E402

PROGRAMS = ["pkmserve", "tests/bench/make_model", "tests/gpu/forward"]  # forward holds the device
KIT = ROOT / "build" / "gpu-kit" / "lib"
POSITIONS = 2048
STREAMS = [1, 8, 32, 128, 256]
PER_CLIENT = 32          # streams of one client process: a core of it must not be what is measured
CROWD = 64               # requests beside those that are compared
CLIENTS = 96             # of the soak
HOST_MIB, DEVICE_MIB = 64, 64  # that it may grow by
PARTS = ("start", "streams", "score", "bits", "soak")


def say(part, **what):
    print(json.dumps({"part": part, **what}), flush=True)


def ids(random_, n, vocab):
    return [random_.randrange(4, vocab) for _ in range(n)]


# ---- many streams ---------------------------------------------------------------------------------


def client(port, bodies):
    """When all of its streams had begun, and when the first had ended."""
    times = {}

    def seen(begun, ended):
        if begun == len(bodies):
            times.setdefault("begun", time.monotonic())
        if ended > 0:
            times.setdefault("ended", time.monotonic())
    streams(port, bodies, seen)
    return times


class Watch(threading.Thread):
    """Looks at the server's counters all the time: [(when, metrics)]."""

    def __init__(self, server):
        super().__init__()
        self.server, self.seen, self.over = server, [], threading.Event()

    def run(self):
        while not self.over.wait(0.005):
            self.seen.append((time.monotonic(), self.server.metrics(), self.server.front_seconds()))

    def between(self, begin, end):
        """Of what was seen within that time, the first and the last; None if there are no two with steps between."""
        seen = [s for s in self.seen if begin <= s[0] <= end]
        return (seen[0], seen[-1]) if seen and seen[-1][1]["engine_steps_total"] > seen[0][1]["engine_steps_total"] else None


def run_streams(server, n, tokens, args, pool):
    """Steps while all of n streams run; None if they never did."""
    random_ = random.Random(n)
    bodies = [{"prompt": ids(random_, 16, args.vocab), "max_tokens": tokens, "ignore_eos": True, "stream": True}
              for _ in range(n)]
    watch = Watch(server)
    watch.start()
    try:
        shares = [bodies[i:i + PER_CLIENT] for i in range(0, n, PER_CLIENT)]
        times = list(pool.map(client, [server.port] * len(shares), shares))
    finally:
        watch.over.set()
        watch.join()
    found = watch.between(max(t["begun"] for t in times), min(t["ended"] for t in times))
    if found is None:
        return None
    (begin, a, front), (end, b, front_end) = found
    steps = b["engine_steps_total"] - a["engine_steps_total"]
    return {"steps": steps, "us": 1e6 * (end - begin) / steps, "front_us": 1e6 * (front_end - front) / steps,
            "model_us": 1e6 * (b["engine_model_seconds_total"] - a["engine_model_seconds_total"]) / steps,
            "tokens_per_s": (b["generation_tokens_total"] - a["generation_tokens_total"]) / (end - begin)}


def measure_streams(server, n, args, pool):
    """Where streams are over before the next look, longer ones."""
    tokens, found = args.tokens, None
    while found is None and tokens <= POSITIONS - 16:
        found = run_streams(server, n, tokens, args, pool)
        tokens *= 2
    say("streams", n=n, **(found or {"note": "%d streams never ran at the same time" % n}))


async def measure_score(server, args):
    """Documents of half the context, as many as one request may have."""
    random_ = random.Random(7)
    length = min(POSITIONS // 2, args.tokens)
    documents = [ids(random_, length, args.vocab) for _ in range(8 if args.small else 128)]
    best = None
    for _ in range(3):
        answer = await ask(server.port, "/score", {"tokens": documents})
        if answer.status != 200:
            raise SystemExit("score: status %d: %s" % (answer.status, answer.body[:300]))
        best = min(best or answer.seconds, answer.seconds)
        documents = [list(reversed(d)) for d in documents]  # nothing of it is in the cache
    say("score", documents=len(documents), tokens=length, tokens_per_s=len(documents) * length / best)


# ---- the same bits --------------------------------------------------------------------------------


def compared(args):
    """Requests whose answers must not depend on the company."""
    random_ = random.Random(11)
    most = min(1500, 2 * args.tokens)
    for i, n in enumerate((1, 17, 64, most // 3, most)):
        prompt = ids(random_, n, args.vocab)
        yield "/score", {"tokens": [prompt + [5], prompt[:9] + [6]], "logprobs": 2, "ranks": True}
        yield "/generate", {"prompt": prompt, "max_tokens": 24, "temperature": 0, "logprobs": 3, "ignore_eos": True}
        yield "/generate", {"prompt": prompt, "max_tokens": 24, "seed": i, "top_p": 0.9, "n": 2, "logprobs": 1, "echo": True,
                            "ignore_eos": True}


def essence(path, answer):
    if answer.status != 200:
        return "status %d: %s %s" % (answer.status, answer.error, answer.body[:300])
    return json.dumps(answer.json()["results" if path == "/score" else "choices"])


async def compare_bits(server, args):
    work = list(compared(args))
    alone = [essence(path, await ask(server.port, path, body)) for path, body in work]
    random_ = random.Random(13)
    crowd = [{"prompt": ids(random_, random_.randint(1, 40), args.vocab), "max_tokens": 3 * 24, "ignore_eos": True, "seed": i}
             for i in range(8 if args.small else CROWD)]
    different = []
    for _ in range(2):
        answers = await asyncio.gather(*(ask(server.port, "/generate", body) for body in crowd),
                                       *(ask(server.port, path, body) for path, body in work))
        for (path, body), before, answer in zip(work, alone, answers[len(crowd):]):
            if before != essence(path, answer) or before.startswith("status"):
                different.append("%s of %d ids: %.200s, in a crowd %.200s" % (
                    path, len(body.get("prompt") or body["tokens"][0]), before, essence(path, answer)))
        if not all(a.status == 200 for a in answers[:len(crowd)]):
            different.append("the crowd: status %s" % sorted({a.status for a in answers[:len(crowd)]}))
    say("bits", n=2 * len(work), different=different)
    return not different


# ---- a mixture of everything ----------------------------------------------------------------------


def device_mib(device):
    """Of the GPU's memory, what is used; None where there is none to look at."""
    if device != "cuda" or shutil.which("nvidia-smi") is None:
        return None
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0] or "0"
    done = subprocess.run(["nvidia-smi", "-i", gpu, "--query-gpu=memory.used", "--format=csv,noheader,nounits"],
                          capture_output=True, text=True)
    return int(done.stdout) if done.returncode == 0 and done.stdout.strip().isdigit() else None


def mixed(random_, args):
    """kind, path, body, how it is asked"""
    kind = random_.choice(["generate", "stream", "score", "leave", "several", "wrong"])
    prompt = ids(random_, random_.randint(1, min(600, args.tokens)), args.vocab)
    if kind == "score":
        return kind, "/score", {"tokens": [prompt + [5], prompt[:3] + [6]], "logprobs": 1, "memory": "summary"}, {}
    if kind == "wrong":
        return kind, "/generate", {"prompt": prompt, "max_tokens": -1}, {}
    body = {"prompt": prompt, "max_tokens": random_.randint(1, min(96, args.tokens)), "ignore_eos": True,
            "stream": kind in ("stream", "leave"), "logprobs": random_.choice([None, 0, 3])}
    if kind == "several":
        body.update(n=4, temperature=0.9)
    return kind, "/generate", body, {"leave_after": random_.uniform(0, 0.3)} if kind == "leave" else {}


async def soak(server, args):
    random_, wrong, seconds = random.Random(17), [], []
    end = time.monotonic() + args.seconds

    async def ask_all():
        while time.monotonic() < end:
            kind, path, body, how = mixed(random_, args)
            answer = await ask(server.port, path, body, **how)
            seconds.append(answer.seconds)
            if kind != "leave" and (answer.status != (400 if kind == "wrong" else 200) or not answer.complete):
                wrong.append("%s: %s %s %r" % (kind, answer.status, answer.error, answer.body[:200]))
    pid = server.process.pid
    clients = [asyncio.create_task(ask_all()) for _ in range(8 if args.small else CLIENTS)]
    await asyncio.sleep(args.seconds / 3)  # what a busy server needs it has by then
    host, device, files = resident_mib(pid), device_mib(args.device), open_files(pid)
    await asyncio.gather(*clients)
    host, files = resident_mib(pid) - host, open_files(pid) - files
    device = None if device is None else device_mib(args.device) - device
    for _ in range(300):
        left = [server.metrics()["num_requests_" + what] for what in ("running", "waiting")]
        if left == [0, 0]:
            break
        await asyncio.sleep(0.1)
    health = await ask(server.port, "/health/ready?deep=1")
    wrong += ["%s requests are left" % left] if left != [0, 0] else []
    wrong += ["/health/ready?deep=1: %s %r" % (health.status, health.body[:200])] if health.status != 200 else []
    wrong += ["memory grew by %.0f MiB" % host] if host > HOST_MIB else []
    wrong += ["the device's memory grew by %d MiB" % device] if device is not None and device > DEVICE_MIB else []
    say("soak", requests=len(seconds), seconds=args.seconds, host_mib=host, device_mib=device, files=files,
        p50_s=percentile(seconds, 50), p99_s=percentile(seconds, 99), wrong=wrong[:8], n_wrong=len(wrong))
    return not wrong


def drive(args):
    """Whether all is well."""
    flags = ["--model", args.model, "--device", args.device, "--max-seqs", max(args.streams), "--max-model-len", POSITIONS,
             "--max-queue", 1024]
    with Server(args.program, *flags) as server:
        say("start", seconds=server.start_s, log=os.pread(server.log.fileno(), 1 << 16, 0).decode(errors="replace"))
        good = asyncio.run(compare_bits(server, args))
        n_client = -(-max(args.streams) // PER_CLIENT)  # all at once, and there before the first stream begins
        with ProcessPoolExecutor(n_client, get_context("spawn")) as pool:
            list(pool.map(time.sleep, [1.0] * n_client))
            for n in args.streams:
                measure_streams(server, n, args, pool)
        asyncio.run(measure_score(server, args))
        good = asyncio.run(soak(server, args)) and good
        for line in os.pread(server.log.fileno(), 1 << 24, 0).decode(errors="replace").splitlines():
            if "level=warn" in line or "level=error" in line:
                print(line, file=sys.stderr)
    if server.process.returncode != 0:
        print("serve.py: exit status %d after SIGTERM" % server.process.returncode, file=sys.stderr)
    return good and server.process.returncode == 0


# ---- the part of the check ------------------------------------------------------------------------


def make_model(run):
    """Model A's shape with random weights, or None."""
    folder = run.build / "gpu-out" / "serve-model"
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    done = run.command([run.program("tests/bench/make_model"), folder, *(SMALL if run.small else []), "--positions", POSITIONS,
                        "--dtype", "bf16"])
    if not done.good:
        run.lose("make_model", done)
        return None
    return folder


def row(record):
    kind = record["part"]
    if kind == "start":
        return "start, with the self-test", "%.1f s" % record["seconds"]
    if kind == "streams":
        return "1 stream" if record["n"] == 1 else "%d streams" % record["n"], record.get("note") or (
            "%.0f tokens/s; a step %.0f µs, of it in the model %.0f; front's threads %.0f µs a step" % (
                record["tokens_per_s"], record["us"], record["model_us"], record["front_us"]))
    if kind == "score":
        return "scoring of %d texts of %d tokens" % (record["documents"], record["tokens"]), "%.0f tokens/s" % record["tokens_per_s"]
    if kind == "bits":
        return "the same bits alone and in a crowd", "%d of %d answers" % (record["n"] - len(record["different"]), record["n"])
    return "everything at once for %g s" % record["seconds"], (
        "%d requests, p50 %.2f s, p99 %.2f s, %d wrong; memory %+.0f MiB, the device's %s, files %+d" % (
            record["requests"], record["p50_s"], record["p99_s"], record["n_wrong"], record["host_mib"],
            "not known" if record["device_mib"] is None else "%+d MiB" % record["device_mib"], record["files"]))


def check_serve(run):
    model = make_model(run)
    if model is None:
        return
    kit = {"LD_LIBRARY_PATH": ":".join(filter(None, [str(KIT), os.environ.get("LD_LIBRARY_PATH")]))} if KIT.exists() else {}
    seconds = 2 if run.small else max(5, min(60, run.left() - 45))
    small = ["--small", "--streams", "1,40", "--tokens", 24, "--vocab", 500] if run.small else []
    done = run.command([run.python, "tests/gpu/serve.py", run.program("pkmserve"), model, "--device", run.device,
                        "--seconds", "%g" % seconds, *small], env={**{name: "" for name in FAST}, **kit})
    records = done.records()
    run.tables["serve"] = ["| %s | %s |" % row(r) for r in records]
    for record in records:
        for wrong in record.get("different", []) + record.get("wrong", []):
            run.fail("%s: %s" % (record["part"], wrong))
        if "note" in record:
            run.note(record["note"])
    missing = [part for part in PARTS if part not in {r["part"] for r in records}]
    if missing or not done.good and not run.failures:
        run.lose("serving over HTTP: %s" % (", ".join(missing) or "its end"), done)
    shutil.rmtree(model, ignore_errors=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("program")
    parser.add_argument("model", type=Path)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--streams", type=lambda text: [int(n) for n in text.split(",")], default=STREAMS)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--vocab", type=int, default=100000)
    parser.add_argument("--small", action="store_true")
    return 0 if drive(parser.parse_args()) else 1


if __name__ == "__main__":
    sys.exit(main())
