"""What train.py asks of models that read windows of tokens: loss and validation.
"""
import math
import os
import sys
import zlib

import numpy as np
import torch

from blocks import output_loss
from files import file_hash, read_object


def read_meta(folder):
    """-> what prepare.py says of the tokens in a folder"""
    path = os.path.join(folder, "meta.json")
    meta = read_object(path) if os.path.exists(path) else {}
    if meta and not isinstance(meta.get("vocab_size"), int):
        raise SystemExit(f"{path}: vocab_size is expected, as prepare.py writes it: prepare the text again")
    return meta


def tokenizer_hash(folder):
    """-> the SHA-256 of the tokenizer.model that the tokens in a folder are of; None where nothing tells"""
    path, due = os.path.join(folder, "tokenizer.model"), read_meta(folder).get("tokenizer_sha256")
    found = file_hash(path) if os.path.exists(path) else due
    if due not in (None, found):
        raise SystemExit(f"{path}: the tokens beside it are of another tokenizer, as meta.json says: prepare the text again")
    return found


class Batches:
    """Windows of a token file in an order that depends on the seed alone.

    The position is the step number, so there is nothing else to save. Every second window starts
    with bos, as a prompt does: it is moved on to the next bos in the file, which ends a document,
    or has bos in place of its first token where there is none near. The others start anywhere.
    Every LONG-th step has half as many windows, rounded up, of twice the length, if there are
    positions for them: that is enough to learn the far positions, and short windows cost less.

    The tokens lie on the device, and a batch is gathered there.
    """
    LONG = 8

    def __init__(self, path, n_tok, n_seq, bos, seed, n_pos, device):
        ids = np.fromfile(path, "<u2")
        self.checksum = zlib.crc32(ids)
        ids = ids.astype(np.int32)
        self.n_tok, self.n_seq, self.bos, self.seed = n_tok, n_seq, bos, seed
        self.n_window = (len(ids) - 1) // n_tok
        # A window that is moved on, or has twice the length, reaches into the next two.
        self.n_train = self.n_window - 2
        self.has_long = 2 * n_tok <= n_pos
        starts = np.arange(self.n_window) * n_tok
        ends = np.flatnonzero(ids == bos)
        nearest = np.append(ends, len(ids))[np.searchsorted(ends, starts)]
        self.prompts = np.where(nearest < starts + n_tok, nearest, starts)
        self.ids, self.device = torch.from_numpy(ids).to(device), device
        self.epoch, self.order = -1, None

    def gather(self, starts, n_tok, begins=None):
        """-> ids and targets, each [len(starts), n_tok]; rows of begins have bos first"""
        places = torch.as_tensor(starts)
        if self.ids.is_cuda:
            places = places.pin_memory()
        places = places.to(self.device, non_blocking=True)
        rows = self.ids[places[:, None] + torch.arange(n_tok + 1, device=self.device)].long()
        if begins is not None:
            rows[begins, 0] = self.bos
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    def train(self, step):
        stride = 2 if self.has_long and step % self.LONG == self.LONG - 1 else 1
        starts = []
        for i in range(step * self.n_seq, (step + 1) * self.n_seq, stride):
            epoch, place = divmod(i, self.n_train)
            if epoch != self.epoch:
                self.epoch = epoch
                self.order = np.random.default_rng([self.seed, epoch]).permutation(self.n_train)
            window = self.order[place]
            starts.append(self.prompts[window] if i // stride % 2 else window * self.n_tok)
        first = step * self.n_seq // stride % 2
        return self.gather(starts, stride * self.n_tok, slice(1 - first, None, 2))

    def valid(self, n_max):
        n_max = min(n_max, self.n_window)
        for a in range(0, n_max, self.n_seq):
            yield self.gather(np.arange(a, min(a + self.n_seq, n_max)) * self.n_tok, self.n_tok)


class SlotCount:
    """Weight received by each slot: how much of a memory is used, and how evenly."""

    def __init__(self, n_slot):
        self.z = torch.zeros(n_slot, dtype=torch.float64)

    def __call__(self, slot, weight):
        self.z.index_add_(0, slot.flatten().cpu(), weight.flatten().double().cpu())

    def usage(self):
        return float((self.z != 0).double().mean())

    def kl(self):
        z = self.z / self.z.sum()
        return math.log(len(z)) + float(torch.special.xlogy(z, z).sum())


def slot_counts(model):
    return {name: SlotCount(memory.n_slot) for name, memory in model.memories.items()}


def count_figures(counts):
    """-> usage and kl of a memory, with its name where there are several"""
    return {(f"{key}_{name}" if len(counts) > 1 else key): value
            for name, count in counts.items()
            for key, value in (("usage", count.usage()), ("kl", count.kl()))}


class Windows:
    """The task of the families with positions: windows of tokens, each on its own."""

    def __init__(self, args, model):
        self.args, self.model = args, model
        config = model.config
        if config["max_position"] < args.n_tok:
            raise SystemExit(f"--n-tok is {args.n_tok}, but the model has {config['max_position']} positions")
        make = lambda name: Batches(os.path.join(args.data, name), args.n_tok, args.batch,
                                    config["bos_token_id"], args.seed, config["max_position"],
                                    args.device)
        self.tokenizer = tokenizer_hash(args.data)
        self.batches = make("train.bin")
        longest = args.n_tok * (2 if self.batches.has_long else 1)
        if longest < config["max_position"]:
            print(f"--n-tok is {args.n_tok}: windows have {longest} tokens at most, so the model's positions from "
                  f"{longest} to {config['max_position'] - 1} are not trained", file=sys.stderr)
        names = sorted(name for name in os.listdir(args.data)
                       if name.startswith("valid") and name.endswith(".bin"))
        if not names:
            raise SystemExit(f"{args.data}: there is no valid.bin: prepare the text again")
        self.held_out = {name[:-4].replace("-", "_"): make(name) for name in names}
        for name, batches, least in (("train", self.batches, 3),
                                     *((name, batches, 1) for name, batches in self.held_out.items())):
            if batches.n_window < least:
                raise SystemExit(f"{args.data}: {name} has {len(batches.ids)} tokens, but at least "
                                 f"{least * args.n_tok + 1} are needed: give a longer text, or lower "
                                 "--n-tok")
            if int(batches.ids.max()) >= config["vocab_size"]:
                raise SystemExit(f"{args.data}: {name} has token {int(batches.ids.max())}, but vocab_size is "
                                 f"{config['vocab_size']}: prepare the text with the model's tokenizer")

    def loss(self, step):
        return self.batch_loss(*self.batches.train(step))

    def batch_loss(self, ids, targets, counts=None):
        hidden = self.model(ids, counts)
        return output_loss(self.model.output_layer(), hidden, targets)

    def validate(self):
        out = {}
        for name, batches in self.held_out.items():
            counts, nll, n_tok = slot_counts(self.model), 0.0, 0
            for ids, targets in batches.valid(self.args.valid_windows):
                nll += float(self.batch_loss(ids, targets, counts)) * targets.numel()
                n_tok += targets.numel()
            loss = nll / n_tok
            out.update({f"{name}_loss": loss, f"{name}_ppl": math.exp(loss)})
            out.update({f"{name}_{key}": value for key, value in count_figures(counts).items()})
        return out

    def stepped(self):
        """After the optimizer's step."""

    def state_dict(self):
        """A batch depends on the step and the data alone."""
        return {"train": self.batches.checksum, "tokenizer": self.tokenizer}

    def load_state_dict(self, state):
        before = state.get("tokenizer")
        self.tokenizer = self.tokenizer or before
        if before not in (None, self.tokenizer):
            raise SystemExit(f"{self.args.data}: its tokenizer.model is another one than the run was begun with, so the "
                             "tokens mean other words to the model: prepare the text with that (prepare.py "
                             "--tokenizer), or give another --out")
        if state.get("train", self.batches.checksum) != self.batches.checksum:
            print(f"  {self.args.data}: train.bin is another text than the run was begun with", file=sys.stderr)
