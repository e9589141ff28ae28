"""Asks models the facts of world.py, each in a wording in which it was never written.

A fact is known if greedy decoding, behind bos and the question, writes the expected answer to its
full stop. That is so exactly if each token of the answer is the most probable one behind those
before it, so a single pass over question and answer decides it.

Prints one JSON object per model: the share of facts known with its 95 % interval (Wilson), also by
how often a fact is written, the perplexity of the answers' tokens, and, for a model with memories, the
same with all their values set to zero. Takes model directories, or checkpoints of train.py.
"""
import argparse
import json
import math
import os

import sentencepiece as spm
import torch

import world
from export import load_checkpoint, load_model
from files import check_range, run

Z95 = 1.959964  # of the normal distribution, two-sided


def wilson(n_right, n):
    """-> share and the 95 % interval of what it estimates (Wilson 1927)"""
    p, z2 = n_right / n, Z95 ** 2
    middle = (p + z2 / (2 * n)) / (1 + z2 / n)
    half = Z95 / (1 + z2 / n) * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n))
    return {"known": n_right, "asked": n, "share": round(p, 4),
            "interval": [round(max(0.0, middle - half), 4), round(min(1.0, middle + half), 4)]}


def questions(facts, n, seed, wording):
    """-> n facts drawn without replacement, each with a question and its answer"""
    draw, order = world.Draw(seed), list(range(len(facts)))
    draw.shuffle(order)
    for i in order[:n]:
        fact, chosen = facts[i], facts[i].held_out
        if wording == "written":
            chosen = (chosen + 1 + draw.below(world.N_ASKED - 1)) % world.N_ASKED
        yield (fact, *fact.question(chosen))


@torch.no_grad()
def ask(model, sp, asked, batch, device):
    """-> for each question whether the answer is known, and the answers' log-probabilities"""
    rows = [([model.config["bos_token_id"]] + sp.encode(q), sp.encode(a)) for _, q, a in asked]
    order = sorted(range(len(rows)), key=lambda i: len(rows[i][0]) + len(rows[i][1]))
    known, logprobs = [False] * len(rows), []
    for start in range(0, len(order), batch):
        part = order[start:start + batch]
        # Positions behind the end of a row change nothing before it, so any token fills them.
        ids = torch.zeros(len(part), max(sum(map(len, rows[i])) for i in part), dtype=torch.long)
        for row, i in zip(ids, part):
            row[:sum(map(len, rows[i]))] = torch.tensor(rows[i][0] + rows[i][1])
        hidden = model(ids.to(device))
        for h, i in zip(hidden, part):
            n, answer = len(rows[i][0]), torch.tensor(rows[i][1], device=device)
            logp = model.output_layer()(h[n - 1:n - 1 + len(answer)]).float().log_softmax(-1)
            known[i] = bool((logp.argmax(-1) == answer).all())
            logprobs.append(logp.gather(1, answer[:, None]).sum().item())
    return known, sum(logprobs), sum(len(a) for _, a in rows)


def report(model, sp, asked, batch, device):
    known, logprob, n_tok = ask(model, sp, asked, batch, device)
    out = wilson(sum(known), len(known))
    out["by_times"] = {}
    for times in sorted({fact.times for fact, *_ in asked}):
        part = [k for k, (fact, *_) in zip(known, asked) if fact.times == times]
        out["by_times"][times] = wilson(sum(part), len(part))
    out["answer_token_perplexity"] = round(math.exp(-logprob / n_tok), 3)
    return out


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    ap.add_argument("--model", nargs="+", required=True, help="model directories or last.pt files")
    ap.add_argument("--facts", required=True, help="table of facts of demo_data.py")
    ap.add_argument("--tokenizer", help="tokenizer.model, for checkpoints")
    ap.add_argument("--n", type=int, default=2000, help="facts to ask (2000)")
    ap.add_argument("--wording", choices=("held-out", "written"), default="held-out",
                    help="the wording never written (default), or another, which was")
    ap.add_argument("--seed", type=int, default=1, help="of the choice of facts (1)")
    ap.add_argument("--batch", type=int, default=100, help="questions at once (100)")
    ap.add_argument("--threads", type=int, default=2, help="threads of PyTorch (2)")
    ap.add_argument("--device", default="cpu", help="cpu or cuda (cpu)")
    args = ap.parse_args()
    check_range(ap, args, 1, "n", "batch", "threads")
    if args.tokenizer is None and not all(map(os.path.isdir, args.model)):
        ap.error("--tokenizer is needed: a checkpoint has none beside it")
    torch.set_num_threads(args.threads)
    asked = list(questions(world.read_facts(args.facts), args.n, args.seed, args.wording))
    for path in args.model:
        folder = os.path.isdir(path)
        model = (load_model(path) if folder else load_checkpoint(path, args.tokenizer)).to(args.device)
        sp = spm.SentencePieceProcessor(
            model_file=os.path.join(path, "tokenizer.model") if folder else args.tokenizer)
        out = {"model": path, "wording": args.wording, **report(model, sp, asked, args.batch, args.device)}
        if model.memories:
            for memory in model.memories.values():
                memory.table().data.zero_()
            out["memory_zero"] = report(model, sp, asked, args.batch, args.device)
        print(json.dumps(out), flush=True)


if __name__ == "__main__":
    run(main)
