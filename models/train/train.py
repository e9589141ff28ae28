"""Trains one model, which a config.json describes: a transformer with product-key memories, its dense
twin (--dense), a decoder with "Memory+" layers, or the all-attention network on a stream of bytes.

    python train.py --data ../run/data --config configs/small.json --out ../run/model --minutes 5

The learning rate rises, stays, and falls linearly to zero, in the last fifth of --minutes or between
--decay-start and --total-steps. These may be given anew at each resumption, so that the end can be
chosen once the speed is known. Twins with the same arguments see the same tokens in the same order.

Writes into --out: last.pt (everything needed to go on exactly where it stopped, also after SIGINT or
SIGTERM), log.jsonl, and curves.svg at each validation. The same command resumes.
"""
import argparse
import filecmp
import os
import signal
import sys
import time

import torch

import checkpoint
import config as configuration
from all_attention import AllAttention
from blocks import PRECISIONS
from export import load_model, read_checkpoint
from files import check_positive, check_range, run
from memory_llama import MemoryLlama
from model import Transformer
from muon import Muon
from report import Reporter
from streams import Streams
from windows import Windows, read_meta

FAMILIES = {"pkm_transformer": (Transformer, Windows), "memory_llama": (MemoryLlama, Windows),
            "all_attention": (AllAttention, Streams)}
SHIPPED = {"pkm": "demo", "memory-plus": "memory-plus", "all-attention": "bytes"}
WARMUP_SHARE, DECAY_SHARE = 0.1, 0.2  # of --minutes, and the latter of --total-steps
SAME = ("batch", "n_tok", "seed")  # What the order of the tokens depends on, besides the text.


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
        self.muon = Muon(linear, lr=args.lr, weight_decay=args.weight_decay, dtype=PRECISIONS[args.precision])

    def step(self, step, share):
        """share: of the peak learning rate"""
        lr = self.args.lr * share
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
        checkpoint.load_moments(self.adam, state["adam"])
        checkpoint.load_moments(self.muon, state["muon"])


class Schedule:
    """When to stop, and the share of the peak learning rate until then."""

    def __init__(self, args):
        self.args, self.t0 = args, time.monotonic()

    def left(self):
        """Share of --minutes that is left."""
        return 1 - (time.monotonic() - self.t0) / (60 * self.args.minutes)

    def over(self, step):
        return self.left() <= 0 if self.args.minutes else step >= self.args.total_steps

    def rate(self, step):
        a = self.args
        up = min(1.0, (step + 1) / a.warmup)
        if a.minutes:
            left = self.left()
            return min(max(up, (1 - left) / WARMUP_SHARE), 1.0, max(0.0, left / DECAY_SHARE))
        if step < a.decay_start:
            return up
        return up * max(0.0, (a.total_steps - step) / max(1, a.total_steps - a.decay_start))


def has_bf16(kind):
    """Whether the device has matrix products in bf16; without them each operand is converted to fp32."""
    if kind != "cpu":
        return True
    features = torch.cpu.get_capabilities()
    return bool(features.get("amx_bf16") or features.get("avx512_bf16") or features.get("bf16"))


def autocast(args):
    return torch.autocast(args.kind, torch.bfloat16, enabled=args.precision == "bf16")


def validate(task, args):
    task.model.eval()
    with torch.no_grad(), autocast(args):
        found = task.validate()
    task.model.train()
    return found


def save(path, task, optimizer, step, args, norms):
    state = {"model": task.model.state_dict(), "optimizer": optimizer.state_dict(), "step": step,
             "config": task.model.config, "task": task.state_dict(), "rng": torch.get_rng_state(), "args": vars(args)}
    checkpoint.save(path, state, norms, "Give a lower --lr or --value-lr, or a longer --warmup")


def parse_args(argv=None):
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    model = ap.add_argument_group("model and data")
    model.add_argument("--data", required=True,
                       help="folder of prepare.py; for a model of bytes, of train.txt and valid.txt")
    model.add_argument("--out", required=True, help="folder of this model; resumed if it has last.pt")
    model.add_argument("--config", help="config.json of the model (models/FORMAT.md explains its keys);\n"
                       "a resumed model keeps its own")
    model.add_argument("--init", metavar="MODEL", help="model directory whose weights to begin with; it must have the same\n"
                       "tokenizer as the data")
    model.add_argument("--family", choices=sorted(SHIPPED), default="pkm",
                       help="without --config: one of configs/, demo.json (pkm, the default),\n"
                       "memory-plus.json or bytes.json (all-attention)")
    model.add_argument("--dense", action="store_true",
                       help="train the dense twin: networks in place of the memories")
    size = ap.add_argument_group("size of a step")
    size.add_argument("--batch", type=int, default=16, help="windows per step, or streams (16)")
    size.add_argument("--n-tok", type=int, default=256,
                      help="tokens per window, or per step of a stream (256)")
    rate = ap.add_argument_group("learning")
    rate.add_argument("--lr", type=float, default=1e-3, help="peak learning rate (0.001)")
    rate.add_argument("--value-lr", type=float, default=3e-3,
                      help="peak rate of the values of memories, persistent vectors and positions\n(0.003)")
    rate.add_argument("--weight-decay", type=float, default=0.1, help="of linear maps (0.1)")
    rate.add_argument("--muon-from", type=int, default=0,
                      help="first step at which Muon trains the linear maps, AdamW before (0)")
    rate.add_argument("--clip", type=float, default=1.0, help="longest gradient (1)")
    rate.add_argument("--warmup", type=int, default=200, help="steps until the peak rate (200); with --minutes a tenth of\nthese at the latest")
    rate.add_argument("--minutes", type=float, help="end after so many minutes of this run")
    rate.add_argument("--decay-start", type=int,
                      help="without --minutes: step at which the rate begins to fall (four fifths of\n--total-steps)")
    rate.add_argument("--total-steps", type=int, default=5000,
                      help="without --minutes: step at which it is zero, and training ends (5000)")
    rate.add_argument("--seed", type=int, default=1,
                      help="of the first weights and of the order of the tokens (1)")
    streams = ap.add_argument_group("all-attention")
    streams.add_argument("--span-lr", type=float, default=3e-4, help="peak rate of spans (0.0003)")
    streams.add_argument("--span-init", type=int, default=64,
                         help="distances that heads see in full to begin with (64)")
    streams.add_argument("--span-cost", type=float, default=2e-6,
                         help="loss per distance and layer that heads see, on average (2e-6)")
    streams.add_argument("--stream-blocks", type=int, default=16,
                         help="steps of a stream, on average, before it begins anew (16)")
    machine = ap.add_argument_group("machine and reports")
    machine.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu",
                         help="cpu, cuda or cuda:N (cuda if there is one)")
    machine.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)),
                         help="threads on a CPU (all cores); give 1 to each of two runs side by side")
    machine.add_argument("--precision", choices=sorted(PRECISIONS),
                         help="type of the matrix products (bf16, or f32 on a processor without bf16)")
    machine.add_argument("--compile", action="store_true",
                         help="torch.compile the model: for a GPU; on a CPU it gained nothing")
    machine.add_argument("--log-every", type=int, default=20, help="steps between reports (20)")
    machine.add_argument("--save-every", type=int, default=250, help="steps between checkpoints (250)")
    machine.add_argument("--valid-every", type=int, default=250, help="steps between validations (250)")
    machine.add_argument("--valid-windows", type=int, default=96,
                         help="windows of a validation, from the start of each held-out file (96)")
    args = ap.parse_args(argv)
    check_range(ap, args, 1, "batch", "n_tok", "warmup", "log_every", "save_every", "valid_every",
                "valid_windows", "threads", "stream_blocks")
    check_range(ap, args, 0, "value_lr", "span_lr", "span_init", "span_cost", "weight_decay", "muon_from", "seed",
                "decay_start", "total_steps")
    check_positive(ap, args, "minutes", "lr", "clip")
    if args.decay_start is None:
        args.decay_start = int(args.total_steps * (1 - DECAY_SHARE))
    try:
        args.kind = torch.empty(0, device=args.device).device.type
    except (AssertionError, RuntimeError) as e:
        ap.error(f"--device {args.device}: {str(e).splitlines()[0]}")
    args.precision = args.precision or ("bf16" if has_bf16(args.kind) else "f32")
    return args


def make_config(args, state):
    """The checkpoint's configuration, or that of --config, checked against the data."""
    if not os.path.isdir(args.data):
        raise SystemExit(f"--data {args.data}: no such folder; prepare.py makes it")
    given = None
    if args.config or not state:
        path = args.config or (os.path.join(args.init, "config.json") if args.init
                               else configuration.shipped(SHIPPED[args.family]))
        given = configuration.read(path, read_meta(args.data).get("vocab_size"))
        given = configuration.without_memories(given) if args.dense else given
    if state and not given and args.dense and state["config"].get("memories"):
        raise SystemExit(f"{args.out}: last.pt has memories, but --dense was given: give another --out, or leave it out")
    if state and given and given != state["config"]:
        raise SystemExit(f"{args.out}: last.pt was begun with another configuration than {args.config}"
                         f"{' --dense' if args.dense else ''}: give another --out, or leave out --config")
    return state["config"] if state else given


def begin_with(model, args):
    """Gives the model the weights of --init, whose tokenizer must be that of the data."""
    paths = [os.path.join(folder, "tokenizer.model") for folder in (args.init, args.data)]
    if model.config.get("tokenizer") != "byte" and not filecmp.cmp(*paths, shallow=False):
        raise SystemExit(f"--init {args.init}: {paths[0]} and {paths[1]} differ, so the tokens of the data mean other "
                         "words to the model: prepare the text with the model's (prepare.py --tokenizer)")
    given = load_model(args.init)
    if given.config != model.config:
        raise SystemExit(f"--init {args.init}: its config.json describes another model than "
                         f"{args.config or args.out}{' --dense' if args.dense else ''}")
    model.load_state_dict(given.state_dict())


def resume(args, state):
    """Says from where, and what was given otherwise than at the start."""
    print(f"resuming {args.out}/last.pt at step {state['step']}", file=sys.stderr)
    before = state.get("args", {})
    for name in SAME:
        if name in before and before[name] != getattr(args, name):
            print(f"  --{name.replace('_', '-')} was {before[name]} and is {getattr(args, name)} now: the "
                  "order of the tokens is another one than if it had not changed", file=sys.stderr)


def train(args):
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    os.makedirs(args.out, exist_ok=True)
    locked = checkpoint.lock(args.out, "train.py")  # noqa: F841 (as long as this function runs)
    last = os.path.join(args.out, checkpoint.NAME)
    state = read_checkpoint(last) if os.path.exists(last) else None
    config = make_config(args, state)
    make_model, make_task = FAMILIES[config["model_type"]]
    model = make_model(config).to(args.device)
    task = make_task(args, model)
    if args.init and not state:
        begin_with(model, args)
    optimizer = Optimizers(model, args)
    step = 0
    if state:
        resume(args, state)
        model.load_state_dict(state["model"])
        task.load_state_dict(state["task"])
        optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["rng"])
        step, state = state["step"], None
    if args.compile:
        model.compile(dynamic=False)
    report = Reporter(args.out, step, 0 if args.minutes else args.total_steps, args.batch * args.n_tok,
                      args.log_every)
    n_param = sum(p.numel() for p in model.parameters())
    report.record(start=step, args=vars(args), n_param=n_param)
    report.say(f"{n_param} parameters on {args.device}")

    stop = []
    for sig in (signal.SIGINT, signal.SIGTERM):
        signal.signal(sig, lambda *_: stop.append(True))
    model.train()
    schedule = Schedule(args)
    validated, norms = -1, 0.0
    while not schedule.over(step) and not stop:
        with autocast(args):
            loss = task.loss(step)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        norms = norms + norm
        lr = optimizer.step(step, schedule.rate(step))
        task.stepped()
        report.step(step, loss.detach(), norm, lr)
        step += 1
        if step % args.valid_every == 0:
            report.validated(step, validate(task, args))
            validated = step
        if step % args.save_every == 0:
            save(last, task, optimizer, step, args, norms)
    save(last, task, optimizer, step, args, norms)
    if not stop and validated != step:
        report.validated(step, validate(task, args))
    report.say(f"saved {last} at step {step}" + (": stopped, the same command resumes" if stop else ""))


def main():
    args = parse_args()
    try:
        train(args)
    except configuration.ConfigError as e:
        raise SystemExit(str(e)) from None


if __name__ == "__main__":
    run(main)
