"""Trains one model: with a memory, or its twin with an FFN in that place (--dense), on windows of
tokens; or the all-attention network (--family all-attention) on streams of bytes.

Run once per twin with the same arguments; both then see the same tokens in the same order. The
learning rate rises, stays, and falls linearly to zero between --decay-start and --total-steps.
Both may be given anew at each resumption, so that the end can be chosen once the speed is known.

Writes into --out: last.pt (everything needed to go on exactly where it stopped, also after
SIGINT or SIGTERM) and log.jsonl.
"""
import argparse
import json
import math
import os
import signal
import sys
import time

import torch

from streams import Streams
from windows import Windows

# A task has a model, gives the losses, and saves what of it depends on more than the step.
TASKS = {"pkm": Windows, "all-attention": Streams}


class Optimizers:
    """AdamW for everything, and from step --muon-from on Muon in its place for the linear maps.

    Weight decay is for the linear maps. Each value of a memory sees few tokens per step, hence a
    higher rate for the table, as in the paper; so do persistent vectors and positions.
    """

    def __init__(self, model, args):
        linear, values, spans, rest = [], [], [], []
        for name, p in model.named_parameters():
            if name.endswith(model.VALUES):
                values.append(p)
            elif name.endswith(model.LINEAR):
                linear.append(p)
            elif name.endswith(".spans"):
                spans.append(p)
            else:
                rest.append(p)
        groups = [{"params": linear, "weight_decay": args.weight_decay, "scale": 1.0},
                  {"params": rest, "weight_decay": 0.0, "scale": 1.0},
                  {"params": values, "weight_decay": 0.0, "scale": args.value_lr / args.lr},
                  {"params": spans, "weight_decay": 0.0, "scale": args.span_lr / args.lr}]
        groups = [group for group in groups if group["params"]]
        self.args = args
        self.adam = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.98), eps=1e-8, fused=True)
        # With this adjustment a step is as long as AdamW's, so both take the same rate.
        self.muon = torch.optim.Muon(linear, lr=args.lr, weight_decay=args.weight_decay,
                                     adjust_lr_fn="match_rms_adamw")

    def step(self, step):
        lr = self.args.lr * rate(step, self.args)
        for group in self.adam.param_groups + self.muon.param_groups:
            group["lr"] = lr * group.get("scale", 1.0)
        if step >= self.args.muon_from:
            self.muon.step()
            self.muon.zero_grad()  # AdamW passes over parameters without a gradient.
        self.adam.step()
        self.adam.zero_grad()
        return lr

    def state_dict(self):
        return {"adam": self.adam.state_dict(), "muon": self.muon.state_dict()}

    def load_state_dict(self, state):
        self.adam.load_state_dict(state["adam"])
        self.muon.load_state_dict(state["muon"])


def rate(step, args):
    """Share of the peak learning rate at a step."""
    up = min(1.0, (step + 1) / args.warmup)
    if step < args.decay_start:
        return up
    return up * max(0.0, (args.total_steps - step) / max(1, args.total_steps - args.decay_start))


class Reporter:
    """A progress bar on a terminal, a line now and then elsewhere, and everything in log.jsonl."""

    def __init__(self, path, step, args):
        self.log = open(path, "a", buffering=1)
        self.args, self.loss, self.n = args, 0.0, 0
        self.t0, self.step0 = time.time(), step
        self.live = sys.stderr.isatty()

    def record(self, **fields):
        self.log.write(json.dumps(fields) + "\n")

    def step(self, step, loss, norm, lr):
        a = self.args
        self.loss, self.n = self.loss + loss, self.n + 1
        full = (step + 1) % a.log_every == 0
        if not (full or self.live):
            return
        elapsed = time.time() - self.t0
        speed = (step + 1 - self.step0) * a.batch * a.n_tok / elapsed
        left = (a.total_steps - step - 1) * a.batch * a.n_tok / speed
        done = (step + 1) / a.total_steps
        bar = "#" * int(20 * done) + "." * (20 - int(20 * done))
        line = (f"[{bar}] {step + 1}/{a.total_steps} loss {self.loss / self.n:.4f} lr {lr:.2e} "
                f"{speed:.0f} tok/s eta {int(left) // 3600}:{int(left) // 60 % 60:02}:{int(left) % 60:02}")
        print("\r" + line if self.live else line, end="" if self.live else "\n",
              file=sys.stderr, flush=True)
        if full:
            self.record(step=step + 1, loss=self.loss / self.n, grad_norm=norm, lr=lr,
                        tok_per_s=speed, seconds=elapsed)
            self.loss, self.n = 0.0, 0


def validate(task, args):
    task.model.eval()
    with torch.no_grad(), torch.autocast(args.device, torch.bfloat16):
        found = task.validate()
    task.model.train()
    return found


def save(path, task, optimizer, step, args):
    torch.save({"model": task.model.state_dict(), "optimizer": optimizer.state_dict(), "step": step,
                "config": task.model.config, "task": task.state_dict(),
                "rng": torch.get_rng_state(), "args": vars(args)}, path + ".part")
    os.replace(path + ".part", path)


def parse_args():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    ap.add_argument("--data", required=True, help="folder of prepare.py, or of train.txt and valid.txt")
    ap.add_argument("--out", required=True, help="folder of this model; resumed if it has last.pt")
    ap.add_argument("--family", choices=sorted(TASKS), default="pkm")
    ap.add_argument("--dense", action="store_true", help="an FFN in place of the memory")
    ap.add_argument("--batch", type=int, default=8, help="windows per step, or streams")
    ap.add_argument("--n-tok", type=int, default=512, help="tokens per window, or per step of a stream")
    ap.add_argument("--lr", type=float, default=1e-3)
    ap.add_argument("--value-lr", type=float, default=3e-3, help="peak rate of values and positions")
    ap.add_argument("--span-lr", type=float, default=3e-4, help="peak rate of spans")
    ap.add_argument("--span-init", type=int, default=64,
                    help="all-attention: distances that heads see in full to begin with")
    ap.add_argument("--span-cost", type=float, default=2e-6,
                    help="all-attention: loss per distance and layer that heads see, on average")
    ap.add_argument("--stream-blocks", type=int, default=16,
                    help="all-attention: windows of a stream, on average, before it begins anew")
    ap.add_argument("--weight-decay", type=float, default=0.1)
    ap.add_argument("--muon-from", type=int, default=0, help="first step that uses Muon")
    ap.add_argument("--clip", type=float, default=1.0)
    ap.add_argument("--warmup", type=int, default=400)
    ap.add_argument("--decay-start", type=int, default=4000)
    ap.add_argument("--total-steps", type=int, default=5000)
    ap.add_argument("--seed", type=int, default=1)
    ap.add_argument("--threads", type=int, default=1)
    ap.add_argument("--device", default="cpu")
    ap.add_argument("--log-every", type=int, default=20)
    ap.add_argument("--save-every", type=int, default=250)
    ap.add_argument("--valid-every", type=int, default=250)
    ap.add_argument("--valid-windows", type=int, default=96)
    args = ap.parse_args()
    if args.dense and args.family != "pkm":
        ap.error("--dense goes with --family pkm: there is no memory to replace")
    return args


def main():
    args = parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    os.makedirs(args.out, exist_ok=True)
    last = os.path.join(args.out, "last.pt")
    state = torch.load(last, map_location="cpu") if os.path.exists(last) else None
    task = TASKS[args.family](args, state and state["config"])
    optimizer = Optimizers(task.model, args)
    step = 0
    if state:
        task.model.load_state_dict(state["model"])
        task.load_state_dict(state["task"])
        optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["rng"])
        step = state["step"]
    report = Reporter(os.path.join(args.out, "log.jsonl"), step, args)
    report.record(start=step, args=vars(args),
                  n_param=sum(p.numel() for p in task.model.parameters()))

    stop = []
    for sig in (signal.SIGINT, signal.SIGTERM):
        signal.signal(sig, lambda *_: stop.append(True))
    task.model.train()
    while step < args.total_steps and not stop:
        with torch.autocast(args.device, torch.bfloat16):
            loss = task.loss(step)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(task.model.parameters(), args.clip)
        lr = optimizer.step(step)
        task.stepped()
        report.step(step, loss.item(), norm.item(), lr)
        step += 1
        if step % args.valid_every == 0 or step == args.total_steps:
            found = validate(task, args)
            report.record(step=step, **found)
            print("\n" * report.live + f"step {step} " + " ".join(f"{k} {v:.4f}" for k, v in found.items()),
                  file=sys.stderr, flush=True)
        if step % args.save_every == 0 and step < args.total_steps:
            save(last, task, optimizer, step, args)
    save(last, task, optimizer, step, args)


if __name__ == "__main__":
    main()
