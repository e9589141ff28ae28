"""Trains one twin: the model with a memory, or the same with an FFN in its place (--dense).

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

import numpy as np
import torch

from model import Transformer, default_config, output_loss


class Batches:
    """Windows of a token file in an order that depends on the seed alone.

    The position is the step number, so there is nothing else to save. Every second window
    starts with bos in place of its first token: a prompt starts so, while a window in the
    middle of a long text is given the token before it.
    """

    def __init__(self, path, n_tok, n_seq, bos, seed):
        self.ids = np.memmap(path, dtype="<u2", mode="r")
        self.n_tok, self.n_seq, self.bos, self.seed = n_tok, n_seq, bos, seed
        self.n_window = (len(self.ids) - 1) // n_tok
        self.epoch, self.order = -1, None

    def window(self, i):
        return self.ids[i * self.n_tok:(i + 1) * self.n_tok + 1].astype(np.int64)

    def train(self, step):
        rows = []
        for i in range(step * self.n_seq, (step + 1) * self.n_seq):
            epoch, place = divmod(i, self.n_window)
            if epoch != self.epoch:
                self.epoch = epoch
                self.order = np.random.default_rng([self.seed, epoch]).permutation(self.n_window)
            rows.append(self.window(self.order[place]))
            if i % 2:
                rows[-1][0] = self.bos
        rows = torch.from_numpy(np.stack(rows))
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    def valid(self, n_max):
        for a in range(0, min(n_max, self.n_window), self.n_seq):
            rows = [self.window(i) for i in range(a, min(a + self.n_seq, n_max, self.n_window))]
            rows = torch.from_numpy(np.stack(rows))
            yield rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


class SlotCount:
    """Weight received by each slot: how much of the memory is used, and how evenly."""

    def __init__(self, n_slot):
        self.z = torch.zeros(n_slot, dtype=torch.float64)

    def __call__(self, slot, weight):
        self.z.index_add_(0, slot.flatten().cpu(), weight.flatten().double().cpu())

    def usage(self):
        return float((self.z != 0).double().mean())

    def kl(self):
        z = self.z / self.z.sum()
        return math.log(len(z)) + float(torch.special.xlogy(z, z).sum())


class Optimizers:
    """AdamW for everything, and from step --muon-from on Muon in its place for the linear maps.

    Weight decay is for the linear maps. Each value sees few tokens per step, hence a higher rate
    for the table, as in the paper.
    """

    def __init__(self, model, args):
        linear, values, rest = [], [], []
        for name, p in model.named_parameters():
            if name.endswith("values.weight"):
                values.append(p)
            elif name.endswith(("lin.weight", "lin1.weight", "lin2.weight", "query_mlps.0.weight")):
                linear.append(p)
            else:
                rest.append(p)
        groups = [{"params": linear, "weight_decay": args.weight_decay, "scale": 1.0},
                  {"params": rest, "weight_decay": 0.0, "scale": 1.0}]
        if values:
            groups.append({"params": values, "weight_decay": 0.0, "scale": args.value_lr / args.lr})
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


def validate(model, batches, args):
    model.eval()
    nll = torch.zeros((), dtype=torch.float64)
    n_tok = 0
    memories = model.config["memories"]
    count = SlotCount(memories[0]["n_slot"]) if memories else None
    with torch.no_grad(), torch.autocast(args.device, torch.bfloat16):
        for ids, targets in batches.valid(args.valid_windows):
            ids, targets = ids.to(args.device), targets.to(args.device)
            nll += output_loss(model, model(ids, count), targets).double().cpu() * targets.numel()
            n_tok += targets.numel()
    model.train()
    out = {"valid_loss": float(nll) / n_tok, "valid_ppl": math.exp(float(nll) / n_tok)}
    if count:
        out.update(usage=count.usage(), kl=count.kl())
    return out


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


def save(path, model, optimizer, step, args):
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step,
                "config": model.config, "rng": torch.get_rng_state(), "args": vars(args)},
               path + ".part")
    os.replace(path + ".part", path)


def parse_args():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    ap.add_argument("--data", required=True, help="folder made by prepare.py")
    ap.add_argument("--out", required=True, help="folder of this twin; resumed if it has last.pt")
    ap.add_argument("--dense", action="store_true", help="an FFN in place of the memory")
    ap.add_argument("--batch", type=int, default=8, help="windows per step")
    ap.add_argument("--n-tok", type=int, default=512, help="tokens per window")
    ap.add_argument("--lr", type=float, default=1e-3)
    ap.add_argument("--value-lr", type=float, default=3e-3, help="peak rate of the value table")
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
    return ap.parse_args()


def main():
    args = parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    os.makedirs(args.out, exist_ok=True)
    last = os.path.join(args.out, "last.pt")
    state = torch.load(last, map_location="cpu") if os.path.exists(last) else None
    vocab_size = json.load(open(os.path.join(args.data, "meta.json")))["vocab_size"]
    config = state["config"] if state else default_config(vocab_size, memory=not args.dense)
    model = Transformer(config).to(args.device)
    optimizer = Optimizers(model, args)
    step = 0
    if state:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["rng"])
        step = state["step"]
    bos = config["bos_token_id"]
    batches = Batches(os.path.join(args.data, "train.bin"), args.n_tok, args.batch, bos, args.seed)
    held_out = Batches(os.path.join(args.data, "valid.bin"), args.n_tok, args.batch, bos, args.seed)
    report = Reporter(os.path.join(args.out, "log.jsonl"), step, args)
    report.record(start=step, args=vars(args), n_param=sum(p.numel() for p in model.parameters()))

    stop = []
    for sig in (signal.SIGINT, signal.SIGTERM):
        signal.signal(sig, lambda *_: stop.append(True))
    model.train()
    while step < args.total_steps and not stop:
        ids, targets = batches.train(step)
        with torch.autocast(args.device, torch.bfloat16):
            loss = output_loss(model, model(ids.to(args.device)), targets.to(args.device))
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        lr = optimizer.step(step)
        report.step(step, loss.item(), norm.item(), lr)
        step += 1
        if step % args.valid_every == 0 or step == args.total_steps:
            found = validate(model, held_out, args)
            report.record(step=step, **found)
            print("\n" * report.live + f"step {step} " + " ".join(f"{k} {v:.4f}" for k, v in found.items()),
                  file=sys.stderr, flush=True)
        if step % args.save_every == 0 and step < args.total_steps:
            save(last, model, optimizer, step, args)
    save(last, model, optimizer, step, args)


if __name__ == "__main__":
    main()
