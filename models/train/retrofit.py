#!/usr/bin/env python3
"""Adds memory layers to a model in Hugging Face form and trains them alone on a text.

    python3 models/train/retrofit.py BASE --text my.txt --out OUT [--layers 4,8] [--place after]
    python3 models/convert/convert.py BASE --from hf --output MODEL \\
        --memory OUT/memory.safetensors --memory-config OUT/memory.json

The base stays as it is, to the bit; OUT gets what the converter takes. The last tenth of the text is
never trained on: its loss is printed for the base and while the memories learn. With each such line OUT gets
the memories as they are then, and last.pt, from which the same command goes on exactly where it stopped,
also after SIGINT or SIGTERM. Needs PyTorch, transformers and safetensors.
"""
import argparse
import json
import os
import signal
import sys
import zlib

import safetensors.torch
import torch
import torch.nn as nn
import transformers
from safetensors import SafetensorError

import checkpoint
from files import check_positive, check_range, read_text, run, whole_file
from memory import Memory

VALUE_RATE = 3  # of the tables' learning rate and the others': each row gets few gradients
PLACES = ("replace", "beside", "after")
STATE = {"memories", "optimizer", "step", "rng", "base", "text", "made", "args"}  # what last.pt has
MADE = ("seed", "layers", "place", "gate", "n_key", "n_head", "k_top", "d_key", "plus", "d_value", "shared")
SAME = ("batch", "length")  # What the order of the windows depends on, besides the seed and the text.


class Retrofit(nn.Module):
    """A memory with a norm of its own where it reads the residual stream, and a gate. Memories that are
    added begin with a scalar gate of 0, so that training starts from the base."""

    def __init__(self, config, m, place, gate, owner=None):
        super().__init__()
        d = config.hidden_size
        if place == "after":
            self.norm = nn.RMSNorm(d, eps=config.rms_norm_eps)
        self.memory = Memory(d, m, owner)
        if gate == "scalar":
            self.gate = nn.Parameter(torch.zeros(()))

    def forward(self, x):
        y = self.memory(self.norm(x) if hasattr(self, "norm") else x).to(x.dtype)
        return y * self.gate if hasattr(self, "gate") else y

    def tensors(self, prefix):
        """As convert.py's plain names have them."""
        return {prefix + name.removeprefix("memory."): tensor.detach().cpu().float().contiguous()
                for name, tensor in self.state_dict().items() if not name.endswith("num_batches_tracked")}


def arguments(argv):
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    ap.add_argument("base", metavar="BASE", help="directory of a Hugging Face model with model.layers and RMS norms, such\n"
                    "as llama, mistral and qwen3; it is not changed")
    ap.add_argument("--text", required=True, metavar="FILE", help="what to learn: .txt or .txt.xz in UTF-8, read with the\nmodel's tokenizer")
    ap.add_argument("--out", required=True, metavar="OUT", help="folder of the memories; resumed if it has last.pt")
    memory = ap.add_argument_group("memories", "A resumed training keeps all of these.")
    memory.add_argument("--layers", default="", metavar="LIST",
                        help="layers that get one: numbers from 0, ascending, by commas (the middle layer)")
    memory.add_argument("--place", choices=PLACES, default="after",
                        help="replace: in place of the layer's network; beside: added to it, on the same input;\n"
                        "after: added behind the block (after)")
    memory.add_argument("--gate", choices=("none", "scalar", "linear"),
                        help="of what a memory gives: scalar, a number that begins at 0; linear, the sigmoid of a\n"
                        "linear layer (scalar; none with --place replace)")
    memory.add_argument("--n-key", type=int, default=128, help="keys of each half; slots are its square (128)")
    memory.add_argument("--n-head", type=int, default=4, help="heads (4)")
    memory.add_argument("--k-top", type=int, default=16, help="slots that each head reads, at most --n-key (16)")
    memory.add_argument("--d-key", type=int, default=128, help="width of a head's query, even (128)")
    memory.add_argument("--plus", action="store_true", help="gated and projected values (Memory+)")
    memory.add_argument("--d-value", type=int, help="columns of a table, with --plus (the model's width)")
    memory.add_argument("--shared", action="store_true", help="one table for all layers")
    memory.add_argument("--seed", type=int, default=0, help="of the first weights and of the order of the windows (0)")
    rate = ap.add_argument_group("learning")
    rate.add_argument("--steps", type=int, default=1000, help="steps at which training ends (1000)")
    rate.add_argument("--length", type=int, default=256, help="tokens per window (256)")
    rate.add_argument("--batch", type=int, default=8, help="windows per step (8)")
    rate.add_argument("--rate", type=float, default=1e-3,
                      help="learning rate; tables have %d times as much (0.001)" % VALUE_RATE)
    rate.add_argument("--every", type=int, default=100, help="steps between validations and checkpoints (100)")
    rate.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu",
                      help="cpu, cuda or cuda:N (cuda if there is one)")
    args = ap.parse_args(argv)
    check_range(ap, args, 1, "n_key", "n_head", "k_top", "steps", "length", "batch", "every", "d_value")
    check_range(ap, args, 2, "d_key")
    check_positive(ap, args, "rate")
    if args.d_key % 2:
        ap.error("--d-key is %d, but must be even: it has two halves" % args.d_key)
    if args.k_top > args.n_key:
        ap.error("--k-top is %d, but --n-key is only %d" % (args.k_top, args.n_key))
    if args.d_value and not args.plus:
        ap.error("--d-value goes with --plus")
    if not all(i.strip().isdecimal() for i in args.layers.split(",")) and args.layers:
        ap.error("--layers is %r, but must be numbers from 0, by commas" % args.layers)
    if not os.path.isfile(os.path.join(args.base, "config.json")):
        ap.error("BASE %s: no directory of a model, with a config.json" % args.base)
    try:
        torch.empty(0, device=args.device)
    except (AssertionError, RuntimeError) as fault:
        ap.error("--device %s: %s" % (args.device, str(fault).splitlines()[0]))
    args.gate = args.gate or ("none" if args.place == "replace" else "scalar")
    return args


def from_base(what, base, **how):
    """What transformers makes of the files in a directory, or what it says against them in one line."""
    try:
        return what.from_pretrained(base, **how)
    except (OSError, ValueError, SafetensorError) as fault:
        sys.exit("retrofit: BASE %s: %s" % (base, " ".join(str(fault).split())))


def read_ids(base, path):
    tokenizer = from_base(transformers.AutoTokenizer, base)
    return torch.tensor(tokenizer(read_text(path, newline=None), add_special_tokens=False)["input_ids"])


def attach(model, args):
    """Puts the memories in place. Returns them and their entries of memory.json."""
    layers = model.model.layers
    chosen = [int(i) for i in args.layers.split(",")] if args.layers else [len(layers) // 2]
    if sorted(set(chosen)) != chosen or not 0 <= chosen[0] <= chosen[-1] < len(layers):
        sys.exit("retrofit: --layers %s: ascending numbers 0 .. %d expected" % (args.layers, len(layers) - 1))
    m = {"n_head": args.n_head, "n_key": args.n_key, "k_top": args.k_top, "d_key": args.d_key,
         "n_slot": args.n_key ** 2, "query_batch_norm": True, "value_gate": args.plus,
         "value_projection": args.plus, "output_gate": args.gate == "linear"}
    m["d_value"] = args.d_value or model.config.hidden_size
    memories, entries = [], []
    for i in chosen:
        owner = memories[0].memory if args.shared and memories else None
        memory = Retrofit(model.config, m, args.place, args.gate, owner).to(model.device)
        entry = {"layer": i, "place": args.place, "query_norm": "batch", "gate": args.gate}
        entry.update((key, m[key]) for key in ("n_head", "k_top", "value_gate", "value_projection"))
        if args.place == "after":
            entry.update(input_norm="rms", input_norm_eps=model.config.rms_norm_eps)
            layers[i].register_forward_hook(lambda block, inputs, h, memory=memory: add_behind(memory, h))
        elif args.place == "beside":
            layers[i].mlp.register_forward_hook(lambda network, inputs, y, memory=memory: y + memory(inputs[0]))
        else:
            layers[i].mlp = memory
        if owner is not None:
            entry["values_of"] = 0
        memories.append(memory)
        entries.append(entry)
    return nn.ModuleList(memories), entries


def check_base(model, args, most):
    if not hasattr(getattr(model, "model", None), "layers") or not hasattr(model.config, "rms_norm_eps"):
        sys.exit("retrofit: BASE %s is of the type %s; taken here are those with model.layers and RMS norms, such as "
                 "llama, mistral and qwen3" % (args.base, model.config.model_type))
    context = getattr(model.config, "max_position_embeddings", args.length)
    if args.length > context:
        sys.exit("retrofit: --length is %d, but the base has %d positions" % (args.length, context))
    if most >= model.config.vocab_size:
        sys.exit("retrofit: BASE %s: its tokenizer makes id %d of the text, but its vocab_size is %d"
                 % (args.base, most, model.config.vocab_size))


def add_behind(memory, h):
    """What a block gives is a tensor, or in older versions of transformers a tuple that begins with it."""
    return (h[0] + memory(h[0]), *h[1:]) if isinstance(h, tuple) else h + memory(h)


def loss_of(model, rows):
    """Mean loss of windows [n, length + 1] of ids."""
    logits = model(input_ids=rows[:, :-1]).logits.float()
    return nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())


@torch.no_grad()
def validate(model, memories, ids, args):
    memories.eval()
    n = min(len(ids) // (args.length + 1), 64)
    rows = ids[:n * (args.length + 1)].view(n, -1).split(args.batch)
    loss = sum(float(loss_of(model, part)) * len(part) for part in rows) / n
    memories.train()
    return loss


def checksum(*tensors):
    found = 0
    for tensor in tensors:
        found = zlib.crc32(tensor.contiguous().numpy(), found)
    return found


def made(args, memories, entries):
    """What memories are made of cannot change later: the options, as they were understood."""
    return {name: getattr(args, name) for name in MADE} | {
        "layers": ",".join(str(entry["layer"]) for entry in entries), "d_value": memories[0].memory.table().shape[1]}


def resume(args, state, new):
    """Refuses a checkpoint of other memories, and says what was given otherwise than at the start."""
    print("resuming %s/%s at step %d" % (args.out, checkpoint.NAME, state["step"]), flush=True)
    for name in MADE:
        if state["made"][name] != new["made"][name]:
            sys.exit("retrofit: --out %s: its %s was begun with --%s %s, not %s: give that, or another --out" % (
                args.out, checkpoint.NAME, name.replace("_", "-"), state["made"][name], new["made"][name]))
    if state["base"] != new["base"]:
        sys.exit("retrofit: --out %s: its %s was begun beside other weights than those of BASE %s: give that base, or "
                 "another --out" % (args.out, checkpoint.NAME, args.base))
    for name in SAME:
        if state["args"][name] != getattr(args, name):
            print("  --%s was %s and is %s now: the order of the windows is another one than if it had not changed"
                  % (name, state["args"][name], getattr(args, name)), file=sys.stderr)
    if state["text"] != new["text"]:
        print("  --text %s: another text than the training was begun with: its last tenth may have been trained on"
              % args.text, file=sys.stderr)
    if state["step"] >= args.steps:
        print("  there is nothing left to train: give more --steps than %d to go on" % state["step"], file=sys.stderr)


def load(args):
    """-> the base, the text's ids, and what a checkpoint says of both"""
    ids = read_ids(args.base, args.text)
    if len(ids) // 10 <= args.length:
        sys.exit("retrofit: --text %s: %d tokens, at least %d are needed for windows of %d"
                 % (args.text, len(ids), 10 * (args.length + 1), args.length))
    model = from_base(transformers.AutoModelForCausalLM, args.base, dtype=torch.float32)
    check_base(model, args, int(ids.max()))
    sums = {"base": checksum(*model.state_dict().values()), "text": checksum(ids)}
    return model.to(args.device).requires_grad_(False).eval(), ids.to(args.device), sums


def train(args, stop=()):
    """Trains and saves the memories until a signal is in `stop`, at the latest. Returns the model with its trained
    memories, these, and their entries of memory.json."""
    os.makedirs(args.out, exist_ok=True)
    with checkpoint.lock(args.out, "retrofit.py") as log:
        return train_alone(args, stop, log)


def train_alone(args, stop, log):
    last = os.path.join(args.out, checkpoint.NAME)
    state = checkpoint.read(last, STATE, "retrofit.py") if os.path.exists(last) else None
    torch.manual_seed(args.seed)
    model, ids, sums = load(args)
    n_valid = len(ids) // 10
    seen, valid = ids[:-n_valid], ids[-n_valid:]
    print("%d tokens, validation loss of the base %.4f"
          % (len(ids), validate(model, nn.ModuleList(), valid, args)), flush=True)
    memories, entries = attach(model, args)
    new = sums | {"made": made(args, memories, entries), "args": vars(args)}
    tables = [p for name, p in memories.named_parameters() if name.endswith("values.weight")]
    rest = [p for name, p in memories.named_parameters() if not name.endswith("values.weight")]
    optimizer = torch.optim.AdamW([{"params": rest}, {"params": tables, "lr": VALUE_RATE * args.rate}],
                                  lr=args.rate, weight_decay=0)
    step, norms = 0, 0.0
    if state:
        resume(args, state, new)
        memories.load_state_dict(state["memories"])
        checkpoint.load_moments(optimizer, state["optimizer"])
        torch.set_rng_state(state["rng"])
        step, state = state["step"], None
        save(memories, entries, args.out)  # Who was killed behind last.pt has older ones.
    memories.train()
    while step < args.steps:
        # Drawn on the CPU, whose generator alone is saved.
        first = torch.randint(len(seen) - args.length, (args.batch, 1)).to(args.device)
        loss = loss_of(model, seen[first + torch.arange(args.length + 1, device=args.device)])
        optimizer.zero_grad()
        loss.backward()
        norms = norms + nn.utils.clip_grad_norm_(memories.parameters(), 1)
        optimizer.step()
        step += 1
        if step % args.every == 0 or step == args.steps or stop:
            checkpoint.save(last, new | {"memories": memories.state_dict(), "optimizer": optimizer.state_dict(),
                                         "step": step, "rng": torch.get_rng_state()}, norms,
                            "Give a lower --rate than %g" % args.rate)
            save(memories, entries, args.out)
            found = {"step": step, "loss": float(loss.detach()), "valid_loss": validate(model, memories, valid, args)}
            print("step %d: loss %.4f, validation %.4f" % tuple(found.values()), flush=True)
            log.write(json.dumps(found) + "\n")
            log.flush()
        if stop:
            break
    memories.eval()
    return model, memories, entries


def save(memories, entries, out):
    """What convert.py takes."""
    tensors = {}
    for index, memory in enumerate(memories):
        tensors.update(memory.tensors("memories.%d." % index))
    with whole_file(os.path.join(out, "memory.safetensors")) as file:
        file.write(safetensors.torch.save(tensors))
    with whole_file(os.path.join(out, "memory.json"), "w", encoding="utf-8") as file:
        file.write(json.dumps({"memories": entries}, indent=1) + "\n")


def main(argv):
    args, stop = arguments(argv), []
    for sig in (signal.SIGINT, signal.SIGTERM):
        signal.signal(sig, lambda *_: stop.append(True))
    train(args, stop)
    print("%s: memory.safetensors and memory.json, for convert.py's --memory and --memory-config%s"
          % (args.out, ": stopped, the same command resumes" if stop else ""))


if __name__ == "__main__":
    run(lambda: main(sys.argv[1:]))
