"""Changes one fact of the demo's invented world in two ways, and measures what else that changes.

    python models/train/edit_demo.py --model models/demo --dense models/demo-dense --text neutral.txt

* The memory model. `pkmserve memory` counts which slots the fact's sentences read and ranks them against
  what other sentences read; edit.py trains these rows alone; a server gets them over HTTP as an overlay (PUT),
  answers requests that name it and requests that do not, and drops it (DELETE).
* Its dense twin. All weights are trained on the same sentences and written as a model directory.

The sentences are the wordings of the fact that end with the answer, but for the one in which it is asked: that
one is neither in the training text nor among the sentences. The new answers alone are learned, and both models
are trained until these are as likely as the old ones were or, where the model did not know the fact, as those of
facts that it knows.

Without --subject the fact is the first, in the order of --seed, that both models know; without --answer the new
answer is another one of this relation. Questions are answered greedily, by servers that compute in f32; an
answer ends at its full stop. The first 20,000 bytes of --text, in whole lines, are the neutral text, and
the 100,000 behind them background for the ranking. Prints a Markdown table; --out keeps the files that led to
it, and the figures as edit.json.
"""
import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request

import torch

import edit
import world
from export import export, load_model
from files import run as run_command

HERE = os.path.dirname(os.path.abspath(__file__))
N_CHOICE = 1000  # facts that are asked in order to choose one
N_BACKGROUND = 300  # facts whose sentences are background
NEUTRAL, BACKGROUND = 20000, 100000  # bytes of --text
PATIENCE = 600  # seconds for an answer, and until a server is ready
AT_ONCE = 64  # questions of a request
PASSING = ("id", "created", "timings", "usage")  # what differs between answers to the same request


def say(*words):
    print("edit_demo.py:", *words, file=sys.stderr, flush=True)


def pkmserve(args, *words):
    done = subprocess.run([args.program, *map(str, words)], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"pkmserve {' '.join(map(str, words))}: {done.stderr.strip()}")
    return done.stdout


# ---- a model that is served ------------------------------------------------------------------------

def free_ports(n):
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(n)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


class Server:
    """`pkmserve serve` of a model directory, for the length of a `with`."""

    def __init__(self, args, model):
        self.url, self.admin = (f"http://127.0.0.1:{port}" for port in free_ports(2))
        self.command = [args.program, "serve", "--model", model, "--dtype", "f32", "--host", "127.0.0.1",
                        "--port", self.url.split(":")[-1], "--admin-port", self.admin.split(":")[-1],
                        "--drain-delay-s", "0", "--threads", str(args.threads)]

    def __enter__(self):
        self.log = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(self.command, stdout=subprocess.DEVNULL, stderr=self.log)
        end = time.monotonic() + PATIENCE
        while self.process.poll() is None and time.monotonic() < end:
            try:
                self.ask("GET", self.url + "/health/ready")
                return self
            except OSError:  # not listening yet, or 503
                time.sleep(0.1)
        self.process.kill()
        self.process.wait()
        self.log.seek(0)
        raise SystemExit("the server did not become ready:\n" + self.log.read())

    def __exit__(self, *_):
        self.process.terminate()
        self.process.wait()
        self.log.close()

    def ask(self, method, url, data=None):
        with urllib.request.urlopen(urllib.request.Request(url, data, method=method), timeout=PATIENCE) as answer:
            return answer.read()

    def post(self, path, **fields):
        got = json.loads(self.ask("POST", self.url + path, json.dumps(fields).encode()))
        return {name: value for name, value in got.items() if name not in PASSING}

    def answers(self, questions, **more):
        """-> for each question what /generate says: text, ids and their log-probabilities"""
        found = []
        for i in range(0, len(questions), AT_ONCE):
            found += self.post("/generate", prompt=questions[i:i + AT_ONCE], max_tokens=24, temperature=0, seed=0,
                               stop=".", logprobs=0, **more)["choices"]
        return found

    def figures(self, asked, text, **more):
        """-> all that is asked of a model, and of a changed one again"""
        return {"answers": self.answers([fact.question(fact.held_out)[0] for fact in asked], **more),
                "score": self.post("/score", text=text, logprobs=0, **more)["results"][0]}


def said(answer):
    return answer["text"].strip()


def knows(fact, answer):
    return said(answer) == fact.question(fact.held_out)[1].strip().rstrip(".")


# ---- which fact, and the texts ---------------------------------------------------------------------

def changed(fact, answer):
    return world.Fact(fact.relation, fact.subject, answer, fact.times, fact.held_out)


def named(args, facts):
    """-> the fact of --subject"""
    found = [fact for fact in facts if fact.subject == args.subject and args.relation in (None, fact.relation)]
    if not found:
        raise SystemExit(f"no fact about {args.subject!r}" + (f" of {args.relation}" if args.relation else ""))
    return found[0]


def first_known(facts, servers):
    """-> the first fact that all of them know"""
    some = facts[:N_CHOICE]
    known = [True] * len(some)
    for server in servers:
        got = server.answers([fact.question(fact.held_out)[0] for fact in some])
        known = [k and knows(fact, answer) for k, fact, answer in zip(known, some, got)]
    if not any(known):
        raise SystemExit(f"the models know none of {len(some)} facts: name one with --subject")
    return some[known.index(True)]


def new_answer(args, fact, facts, draw):
    others = sorted({each.answer for each in facts if each.relation == fact.relation} - {fact.answer})
    if args.answer is None:
        return draw.choice(others)
    if args.answer not in others:
        raise SystemExit(f"{args.answer!r} is no other answer to {fact.relation}; such are: {', '.join(others)}")
    return args.answer


def parts_of(path):
    """-> the neutral text, and the lines behind it"""
    with open(path, "rb") as f:
        data = f.read(NEUTRAL + BACKGROUND)
    end = data.rfind(b"\n", 0, NEUTRAL) + 1 or len(data)
    lines = data[end:].decode(errors="ignore").split("\n")[:-1]
    return data[:end].decode(errors="ignore"), [line for line in lines if line.strip()]


def write_lines(path, lines):
    with open(path, "w", encoding="utf-8") as f:
        f.writelines(json.dumps(line) + "\n" for line in lines)
    return path


# ---- the two changes -------------------------------------------------------------------------------

def sentences(fact):
    """-> the wordings that end with the answer, but for the one that is asked, and what stands before it"""
    parts = [fact.question(i) for i in range(world.N_ASKED) if i != fact.held_out]
    return [(question + answer, question) for question, answer in parts]


def likeliness(model, folder, facts, size):
    """The mean loss of the facts' answers, which training on others is to reach."""
    taught = edit.lessons(model, folder, [pair for fact in facts for pair in sentences(fact)])
    with torch.no_grad():
        return float(torch.cat([edit.losses(model, part) for part in edit.batches(taught, size)]).mean())


def edit_rows(args, fact, known, background):
    """Writes the overlay -> what edit.py says of it"""
    path = lambda name: os.path.join(args.out, name)
    until = likeliness(load_model(args.model), args.model, known, args.batch)
    texts = write_lines(path("fact.jsonl"), [{"text": text, "prompt": prompt} for text, prompt in sentences(fact)])
    others = write_lines(path("background.jsonl"), [{"text": text} for text in background])
    for name, lines in (("task", texts), ("background", others)):
        pkmserve(args, "memory", "count", "--model", args.model, "--jsonl", lines, "-o", path(name + ".counts"))
    pkmserve(args, "memory", "rank", path("task.counts"), "--background", path("background.counts"), "--top",
             args.top, "--by", "tfidf", "-o", path("slots.safetensors"))
    command = [sys.executable, os.path.join(HERE, "edit.py"), "--model", args.model, "--texts", texts, "--slots",
               path("slots.safetensors"), "--out", path("edit.safetensors"), "--steps", args.steps, "--rate",
               args.rate, "--until", until, "--batch", args.batch, "--threads", args.threads]
    done = subprocess.run(list(map(str, command)), stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout) | {"until": until}


def edit_weights(args, fact, known):
    """Writes the twin, trained on the fact -> the like of what edit.py says"""
    model = load_model(args.dense)
    until = likeliness(model, args.dense, known, args.batch)
    parameters = list(model.parameters())
    taught = edit.lessons(model, args.dense, sentences(fact))
    optimizer = torch.optim.Adam(parameters, lr=args.dense_rate)
    course = edit.descend(model, optimizer, taught, args.steps, until, args.batch)
    export({"config": model.config, "model": model.state_dict()}, os.path.join(args.dense, "tokenizer.model"),
           os.path.join(args.out, "dense"), "f32", "f32", None, "none")
    return {"steps": len(course) - 1, "loss_before": round(course[0], 4), "loss_after": round(course[-1], 4),
            "numbers": sum(p.numel() for p in parameters), "until": until}


# ---- before and after ------------------------------------------------------------------------------

def served_edit(args, before, asked, text, server):
    """PUT, the figures with the overlay, DELETE -> the figures, and whether all other bits are the old ones"""
    at = server.admin + "/memory/overlays/edit"
    with open(os.path.join(args.out, "edit.safetensors"), "rb") as f:
        put = json.loads(server.ask("PUT", at, f.read()))
    after = server.figures(asked, text, overlay="edit")
    beside = server.figures(asked, text)
    server.ask("DELETE", at)
    try:
        server.answers(["."], overlay="edit")
        gone = False
    except urllib.error.HTTPError as refused:
        gone = json.loads(refused.read())["error"]["code"] == "overlay_not_found"
    return after, {"bytes": put["bytes"], "gone_after_delete": gone, "same_bits_beside": beside == before,
                   "same_bits_after_delete": server.figures(asked, text) == before}


def differences(asked, n_same, before, after):
    """asked: the fact, n_same others of its subject, and the facts that are counted"""
    others = slice(1 + n_same, None)
    was, now = before["answers"], after["answers"]
    differs = [said(a) != said(b) for a, b in zip(was, now)]
    known = lambda answers: [knows(fact, answer) for fact, answer in zip(asked, answers)]
    return {"answer_before": said(was[0]), "answer_after": said(now[0]), "new_answer_known": knows(asked[0], now[0]),
            "others": len(asked[others]), "others_changed": sum(differs[others]),
            "others_known_before": sum(known(was)[others]), "others_known_after": sum(known(now)[others]),
            "same_subject": n_same, "same_subject_changed": sum(differs[1:others.start]),
            "perplexity_before": before["score"]["perplexity"], "perplexity_after": after["score"]["perplexity"]}


def table(report):
    fact, columns = report["fact"], [report["memory"], report["dense"]]
    yes = {True: "yes", False: "**no**"}
    rows = [("", [f"memory: {sum(columns[0]['rows'].values())} rows", "dense twin: all weights"]),
            ("---", ["---"] * 2),
            ("answer before", [c["answer_before"] for c in columns]),
            ("answer after", [c["answer_after"] for c in columns]),
            (f"other facts, of {columns[0]['others']}: another answer", [c["others_changed"] for c in columns]),
            ("of these known, before and after",
             [f"{c['others_known_before']}, {c['others_known_after']}" for c in columns]),
            (f"the subject's {columns[0]['same_subject']} other facts: another answer",
             [c["same_subject_changed"] for c in columns]),
            ("perplexity of the neutral text, before and after",
             [f"{c['perplexity_before']:.3f}, {c['perplexity_after']:.3f}" for c in columns]),
            ("numbers trained, steps", [f"{c['numbers']:,}, {c['steps']}" for c in columns]),
            ("loss of the sentences' answers, before and after (until)",
             [f"{c['loss_before']:.3f}, {c['loss_after']:.3f} ({c['until']:.3f})" for c in columns]),
            ("requests without the overlay: bits as before", [yes[columns[0]["same_bits_beside"]], "-"]),
            ("after DELETE: bits as before, overlay gone",
             [", ".join(yes[columns[0][k]] for k in ("same_bits_after_delete", "gone_after_delete")), "-"])]
    print(f"{fact['relation']} of {fact['subject']}: {fact['old']} -> {fact['new']}\nAsked: {fact['question']}\n")
    for name, cells in rows:
        print(f"| {name} | " + " | ".join(map(str, cells)) + " |")


def run(args):
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    facts, draw = world.read_facts(args.facts), world.Draw(args.seed)
    draw.shuffle(facts)
    text, lines = parts_of(args.text)
    fact = named(args, facts) if args.subject is not None else None
    answer = new_answer(args, fact, facts, draw) if fact else None
    with Server(args, args.model) as memory, Server(args, args.dense) as dense:
        fact = fact or first_known(facts, (memory, dense))
        new = changed(fact, answer or new_answer(args, fact, facts, draw))
        same = [each for each in facts if each.subject == fact.subject and each is not fact]
        rest = [each for each in facts if each.subject != fact.subject]
        background = lines + [t for each in rest[args.n:args.n + N_BACKGROUND] for t in each.sentences()]
        asked = [fact] + same + rest[:args.n]
        say(f"{fact.relation} of {fact.subject}: {fact.answer} -> {new.answer}")
        before, known = [], []
        for server in (memory, dense):
            before.append(server.figures(asked, text))
            knew = [f for f, answer in zip(asked, before[-1]["answers"]) if knows(f, answer)]
            known.append([fact] if fact in knew else knew[:20])
            if not knew:
                raise SystemExit("a model knows none of the facts: there is nothing to compare with")
        edited = edit_rows(args, new, known[0], background)
        after, bits = served_edit(args, before[0], asked, text, memory)
    tuned = edit_weights(args, new, known[1])
    with Server(args, os.path.join(args.out, "dense")) as server:
        after_dense = server.figures(asked, text)
    asked[0] = new
    return {"fact": {"subject": fact.subject, "relation": fact.relation, "old": fact.answer, "new": new.answer,
                     "question": fact.question(fact.held_out)[0]},
            "memory": {**edited, **bits, **differences(asked, len(same), before[0], after)},
            "dense": {**tuned, **differences(asked, len(same), before[1], after_dense)}}


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    ap.add_argument("--model", required=True, help="model directory with a memory")
    ap.add_argument("--dense", required=True, help="that of its dense twin")
    ap.add_argument("--facts", help="table of facts of demo_data.py (facts.tsv.xz in --model)")
    ap.add_argument("--text", required=True, help="a text about other things, UTF-8")
    ap.add_argument("--subject", help="whose fact is changed, as the table spells it")
    ap.add_argument("--relation", help="which fact of the subject")
    ap.add_argument("--answer", help="the new answer")
    ap.add_argument("--n", type=int, default=500, help="other facts that are asked (500)")
    ap.add_argument("--seed", type=int, default=1, help="of the choice of facts and answer (1)")
    ap.add_argument("--top", type=int, default=500, help="rows that are trained (500)")
    ap.add_argument("--steps", type=int, default=200, help="steps of all sentences, at most (200)")
    ap.add_argument("--rate", type=float, default=0.03, help="of the rows: edit.py says of what (0.03)")
    ap.add_argument("--dense-rate", type=float, default=2e-5, help="Adam's, of the twin's weights (2e-5)")
    ap.add_argument("--batch", type=int, default=4096, help="tokens trained at once (4096)")
    ap.add_argument("--threads", type=int, default=2, help="threads of PyTorch and of each server (2)")
    ap.add_argument("--program", default=os.environ.get("PKMSERVE") or
                    os.path.join(HERE, os.pardir, os.pardir, "build", "pkmserve"), help="pkmserve (that of build)")
    ap.add_argument("--out", help="folder for all files; without it they are not kept")
    args = ap.parse_args()
    if (args.relation is not None or args.answer is not None) and args.subject is None:
        ap.error("--relation and --answer need --subject")
    if args.facts is None:
        args.facts = os.path.join(args.model, "facts.tsv.xz")
    with tempfile.TemporaryDirectory() as folder:
        if args.out is None:
            args.out = folder
        os.makedirs(args.out, exist_ok=True)
        report = run(args)
        with open(os.path.join(args.out, "edit.json"), "w", encoding="utf-8") as f:
            json.dump(report, f, indent=1)
            f.write("\n")
    table(report)
    memory = report["memory"]
    if not (memory["same_bits_beside"] and memory["same_bits_after_delete"] and memory["gone_after_delete"]):
        raise SystemExit("the overlay changed what it must not change")


if __name__ == "__main__":
    run_command(main)
