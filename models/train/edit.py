"""Trains some rows of a model's value tables on texts and writes them as an overlay, which `pkmserve` serves
beside the model (`PUT /memory/overlays/NAME`, `--overlay-dir`, `score --overlay`) or writes into it (`memory apply`).

Everything else stays as it is, so what the texts change is what these rows are read for: "Continual Learning via
Sparse Memory Finetuning" (arXiv 2510.15103) trains those that `pkmserve memory rank` lists.

    pkmserve memory count --model M --jsonl texts.jsonl -o task.counts
    pkmserve memory count --model M background.txt -o background.counts
    pkmserve memory rank task.counts --background background.counts --top 500 -o slots.safetensors
    python edit.py --model M --texts texts.jsonl --slots slots.safetensors --out edit.safetensors

A file of texts that ends in .jsonl has a text a line, in the field "text"; any other is one text. A beginning of a
text that the field "prompt" repeats is read and not learned: where all lines tell of one thing, its name would
be most of what there is to learn, and the least that is wanted. Rows have the table's type where that is a
floating type, so that the overlay gives the bits of a model with these rows, and fp32 where it is quantised.
Prints a JSON object.
"""
import argparse
import hashlib
import json
import os
import re
import struct
import sys

import numpy as np
import sentencepiece as spm
import torch
import torch.nn as nn
import torch.nn.functional as F

from export import load_model, open_safetensors
from files import check_positive, check_range, read_text, run, whole_file

# Of the converter: files has its folder among those of modules.
import safetensors_file

SLOTS_FORMAT, OVERLAY_FORMAT = "pkmserve-slots-1", "pkmserve-overlay-1"


# ---- files -----------------------------------------------------------------------------------------

def is_table(name):
    return name.startswith("memories.") and (".values." in name or ".experts." in name)


def identity(file):
    """What files of counts and lists of slots call their model (models/README.md)."""
    sum = hashlib.sha256()
    for name in sorted(file.entries):
        if not is_table(name):
            sum.update(name.encode() + b"\0")
            sum.update(file.entries[name].bytes())
    return sum.hexdigest()


def base_hash(file, table):
    """What an overlay calls the table that it is made for, as `pkmserve inspect --hash` prints it."""
    sum = hashlib.sha256(file.entries[table].bytes())
    if table + ".scale" in file.entries:
        sum.update(file.entries[table + ".scale"].bytes())
    return sum.hexdigest()


def read_slots(path, model):
    """-> {memory: its slots}; refuses a list of another model"""
    file = open_safetensors(path)
    if file.metadata.get("format") != SLOTS_FORMAT:
        raise SystemExit(f"{path}: no list of slots: its format is {file.metadata.get('format')!r}")
    if file.metadata.get("model") != model:
        raise SystemExit(f"{path}: a list of slots of another model: its SHA-256 is {file.metadata.get('model')}, "
                         f"the model's is {model}")
    slots = {}
    for name, entry in file.entries.items():
        memory = re.fullmatch(r"memories\.(\d{1,4})\.slots", name, re.ASCII)
        if memory and entry.dtype == "I32" and len(entry.shape) == 1:
            slots[int(memory[1])] = torch.from_numpy(np.frombuffer(entry.bytes(), "<i4").astype("i8"))
        elif name.endswith(".slots"):
            raise SystemExit(f"{path}: tensor '{name}' of {entry.dtype} with {len(entry.shape)} dimensions: "
                             "memories.N.slots of I32 with one is expected")
    if not slots:
        raise SystemExit(f"{path}: a list without slots")
    return slots


def read_line(where, line):
    try:
        given = json.loads(line)
        text, prompt = given["text"], given.get("prompt", "")
    except (ValueError, TypeError, KeyError, AttributeError):
        text = prompt = None
    if not isinstance(text, str) or not isinstance(prompt, str):
        raise SystemExit(f'{where}: an object is expected, with "text" and perhaps "prompt", both of them texts')
    return text, prompt


def read_texts(paths):
    """-> pairs: a text, and the beginning of it that is not learned"""
    texts = []
    for path in paths:
        text = read_text(path)
        if path.endswith(".jsonl"):
            texts += [read_line(f"{path}:{n}", line) for n, line in enumerate(text.split("\n"), 1) if line.strip()]
        else:
            texts.append((text, ""))
    for text, prompt in texts:
        if not text.startswith(prompt):
            raise SystemExit(f"a text must begin with its prompt {prompt!r}: {text!r}")
    return texts


def write_overlay(path, edits, hashes, dtypes, metadata):
    """edits: {memory: Edit}"""
    parts = []
    for memory, edit in sorted(edits.items()):
        rows, fits = safetensors_file.encode(edit.rows().detach().numpy(), dtypes[memory])
        if not fits:
            raise SystemExit(f"memory {memory}: rows have numbers beyond those of {dtypes[memory]}: lower --rate")
        parts.append((f"memories.{memory}.slots", "I32", edit.slots.numpy().astype("<i4")))
        parts.append((f"memories.{memory}.rows", dtypes[memory], rows))
    parts.sort(key=lambda part: -part[2].itemsize)  # each begins at a multiple of its element's size
    key = "base" if len(edits) == 1 else "base.{}"
    header, at = {"__metadata__": {**metadata, **{key.format(m): hashes[m] for m in edits}}}, 0
    for name, dtype, array in parts:
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [at, at + array.nbytes]}
        at += array.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with whole_file(path) as f:
        f.write(struct.pack("<Q", len(text)) + text)
        for _, _, array in parts:
            f.write(np.ascontiguousarray(array).tobytes())


# ---- training --------------------------------------------------------------------------------------

class Edit(nn.Module):
    """Changes of some rows of a table: read beside the table, so that neither it nor its gradient is copied."""

    def __init__(self, table, slots):
        super().__init__()
        self.slots = slots
        self.register_buffer("base", table[slots].clone())
        self.change = nn.Parameter(torch.zeros_like(self.base))
        place = torch.zeros(len(table), dtype=torch.long)
        place[slots] = torch.arange(1, len(slots) + 1)
        self.register_buffer("place", place)  # of a slot in the changes; 0: it has none

    def rows(self):
        return self.base + self.change

    def read(self, slot, weight):
        changes = torch.cat([self.change.new_zeros(1, self.change.shape[1]), self.change])
        return F.embedding_bag(self.place[slot], changes, per_sample_weights=weight, mode="sum")


def add_edits(model, slots):
    """Lets the model's memories read changes of the rows that are listed -> {memory: Edit}"""
    memories = list(model.memories.values())
    edits = {}
    for m, listed in slots.items():
        if m >= len(memories) or memories[m].owner:
            raise SystemExit(f"memory {m} has no table of its own in this model")
        n_slot = memories[m].n_slot
        if len(listed) == 0 or listed[0] < 0 or listed[-1] >= n_slot or not (listed[:-1] < listed[1:]).all():
            raise SystemExit(f"memory {m}: ascending slots from 0 to {n_slot - 1} are expected, at least one")
        edits[m] = Edit(memories[m].table().data, listed)
        if not edits[m].base.any():
            raise SystemExit(f"memory {m}: all listed rows are zeros, and a step is a share of their numbers, so nothing "
                             "would change: list rows that have some, too")
    for memory in memories:
        owner = memory
        while owner.owner:
            owner, = owner.owner
        edit = edits.get(memories.index(owner))
        if edit is not None:
            memory.edit = (edit,)
    return edits


class Lesson:
    """ids: of a text, behind bos; given: so many of the first are not learned, at least bos."""

    def __init__(self, ids, given):
        self.ids, self.given = ids, given

    def n_learned(self):
        return len(self.ids) - self.given


def lessons(model, folder, texts):
    """texts: pairs as read_texts gives them -> those of them in which something is left to learn"""
    tokenizer = spm.SentencePieceProcessor(model_file=os.path.join(folder, "tokenizer.model"))
    bos, context, found, n_long = model.config["bos_token_id"], model.config["max_position"], [], 0
    for text, prompt in texts:
        ids, given = [bos] + tokenizer.encode(text), 1
        n_long += len(ids) > context
        ids = ids[:context]
        for a, b in zip(ids[1:], tokenizer.encode(prompt)):
            if a != b:
                break
            given += 1
        found.append(Lesson(ids, given))
    if n_long:
        print(f"texts longer than the model's {context} positions: {n_long} of {len(texts)}; what is behind them is "
              "not learned; give such texts in parts", file=sys.stderr)
    found = [each for each in found if each.n_learned() > 0]
    if not found:
        raise SystemExit("the texts have no tokens to learn")
    return found


def batches(taught, size):
    """Lists of lessons of about as many tokens, those of like lengths together."""
    batch = []
    for each in sorted(taught, key=lambda each: len(each.ids)):
        if batch and (len(batch) + 1) * len(each.ids) > size:
            yield batch
            batch = []
        batch.append(each)
    yield batch


def losses(model, batch):
    """The loss of each token of the batch that is learned."""
    length = max(len(each.ids) for each in batch)
    inputs = torch.zeros(len(batch), length - 1, dtype=torch.long)  # what stands behind a text changes nothing in it
    targets = torch.full_like(inputs, -100)
    for i, each in enumerate(batch):
        ids, given = each.ids, each.given
        inputs[i, :len(ids) - 1] = torch.tensor(ids[:-1])
        targets[i, given - 1:len(ids) - 1] = torch.tensor(ids[given:])
    wanted = targets >= 0
    logits = model.output_layer()(model(inputs)[wanted]).float()
    return F.cross_entropy(logits, targets[wanted], reduction="none")


def descend(model, optimizer, taught, steps, until, size):
    """-> the mean loss of each step, the last one of the numbers as they are left"""
    parts = list(batches(taught, size))
    n_tok, course = sum(each.n_learned() for each in taught), []
    for step in range(steps + 1):
        optimizer.zero_grad()
        total = 0.0
        for part in parts:
            with torch.set_grad_enabled(step < steps):
                loss = losses(model, part).sum() / n_tok
            if step < steps:
                loss.backward()
            total += loss.item()
        course.append(total)
        if step % 10 == 0:
            print(f"step {step}: loss {total:.4f}", file=sys.stderr, flush=True)
        if not total < float("inf"):
            raise SystemExit(f"step {step}: the loss is {total}: lower the rate")
        if step == steps or total <= until:
            return course
        optimizer.step()


def train(model, edits, taught, steps, rate, until, size):
    """-> what descend says"""
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    changes = [edit.change for edit in edits.values()]
    # A step moves a number of a row by the rate's share of what such numbers are.
    scale = {change: edit.base.square().mean().sqrt() for change, edit in zip(changes, edits.values())}
    optimizer = torch.optim.Adam([{"params": [change], "lr": rate * float(scale[change])} for change in changes])
    return descend(model, optimizer, taught, steps, until, size)


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    ap.add_argument("--model", required=True, help="model directory")
    ap.add_argument("--texts", nargs="+", required=True, help="what the model is to learn")
    ap.add_argument("--slots", required=True, help="the rows, as `pkmserve memory rank` lists them")
    ap.add_argument("--out", required=True, help="the overlay")
    ap.add_argument("--steps", type=int, default=100, help="steps of all texts, at most (100)")
    ap.add_argument("--rate", type=float, default=0.1,
                    help="what a step changes at first, as a share of the rows' numbers (0.1)")
    ap.add_argument("--until", type=float, default=0.0, help="end at this mean loss, in nats a token (0)")
    ap.add_argument("--batch", type=int, default=4096, help="tokens computed at once (4096)")
    ap.add_argument("--note", default="", help="free text for the overlay's metadata")
    ap.add_argument("--threads", type=int, default=2, help="threads of PyTorch (2)")
    args = ap.parse_args()
    check_range(ap, args, 1, "steps", "batch", "threads")
    check_positive(ap, args, "rate")
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)

    weights = open_safetensors(os.path.join(args.model, "model.safetensors"))
    slots = read_slots(args.slots, identity(weights))
    model = load_model(args.model)
    taught = lessons(model, args.model, read_texts(args.texts))
    edits = add_edits(model, slots)
    course = train(model, edits, taught, args.steps, args.rate, args.until, args.batch)

    names = {m: f"memories.{list(model.memories)[m]}.values.weight" for m in edits}
    dtypes = {m: weights.entries[name].dtype for m, name in names.items()}
    dtypes = {m: dtype if dtype in ("BF16", "F16") else "F32" for m, dtype in dtypes.items()}
    hashes = {m: base_hash(weights, name) for m, name in names.items()}
    metadata = {"format": OVERLAY_FORMAT, "mode": "replace", **({"note": args.note} if args.note else {})}
    write_overlay(args.out, edits, hashes, dtypes, metadata)
    change = {m: float((edit.change.norm() / edit.base.norm()).item()) for m, edit in edits.items()}
    print(json.dumps({"out": args.out, "texts": len(taught), "rows": {m: len(e.slots) for m, e in edits.items()},
                      "numbers": sum(e.change.numel() for e in edits.values()),
                      "steps": len(course) - 1, "loss_before": round(course[0], 4), "loss_after": round(course[-1], 4),
                      "change": {m: round(share, 4) for m, share in change.items()}}))


if __name__ == "__main__":
    run(main)
