"""What train.py asks of the all-attention network: loss and validation on streams of bytes.
"""
import math
import os
import sys
import zlib

import numpy as np
import torch
import torch.nn as nn

from blocks import PRECISIONS, output_loss

LINE_END = 10


class Pieces:
    """Where each of n_seq streams reads: pieces of a text, of 1 to 2 * mean blocks, one after another.

    A piece begins with an empty past, as a prompt does: a third of them anywhere, a third at a line's
    end, which stands for an empty prompt, and a third behind one. The n-th piece of a stream depends
    on the seed alone.
    """

    def __init__(self, data, n_tok, n_seq, mean, seed):
        self.data, self.n_tok, self.mean, self.seed = data, n_tok, mean, seed
        # [n_seq, 3]: the piece's number, its place in the text, blocks left of it
        self.at = np.zeros((n_seq, 3), np.int64)

    def begin(self, row):
        rng = np.random.default_rng([self.seed, row, self.at[row, 0]])
        n_block = int(rng.integers(1, 2 * self.mean + 1))
        start = int(rng.integers(len(self.data) - (n_block + 2) * self.n_tok))
        kind = int(rng.integers(3))
        ends = np.flatnonzero(self.data[start:start + self.n_tok] == LINE_END)
        if kind > 0 and len(ends) > 0:
            start += int(ends[0]) + kind - 1
        self.at[row] = self.at[row, 0] + 1, start, n_block

    def next(self):
        """-> ids and targets, each [n_seq, n_tok], and the streams that begin"""
        begun = [row for row in range(len(self.at)) if self.at[row, 2] == 0]
        for row in begun:
            self.begin(row)
        rows = np.stack([self.data[at:at + self.n_tok + 1] for at in self.at[:, 1]])
        self.at += [0, self.n_tok, -1]
        rows = torch.from_numpy(rows.astype(np.int64))
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous(), begun


class Streams:
    """The all-attention network's task."""

    def __init__(self, args, model):
        self.args, self.model = args, model
        for layer in model.layers:
            nn.init.constant_(layer.spans, min(1.0, args.span_init / layer.max_span))
        self.n_block = max(1, args.valid_windows // args.batch)
        text = self.read("train", 2 * args.stream_blocks + 3)
        self.checksum = zlib.crc32(text)
        self.pieces = Pieces(text, args.n_tok, args.batch, args.stream_blocks, args.seed)
        self.held_out = self.read("valid", args.batch * (self.n_block + 1))
        self.past = self.model.start(args.batch, PRECISIONS[args.precision])

    def read(self, split, n_block):
        """The bytes of a text, of n_block blocks at least."""
        path = os.path.join(self.args.data, split + ".txt")
        n_byte = os.path.getsize(path)
        if n_byte < n_block * self.args.n_tok:
            raise SystemExit(f"{path}: {n_byte} bytes, but at least {n_block * self.args.n_tok} are "
                             "needed: give a longer text, or lower --n-tok, --stream-blocks or "
                             "--valid-windows")
        return np.memmap(path, np.uint8, mode="r")

    def block_loss(self, ids, targets, past):
        device = self.args.device
        hidden = self.model(ids.to(device), past)
        return output_loss(self.model.output, hidden, targets.to(device), ids.numel())

    def loss(self, step):
        ids, targets, begun = self.pieces.next()
        self.past[:, begun] = 0
        return self.block_loss(ids, targets, self.past) + \
            self.args.span_cost * self.model.spans().mean(1).sum()

    def validate(self):
        """The beginnings of as many equal parts of the text as there are streams."""
        n_tok, n_seq = self.args.n_tok, self.args.batch
        starts = np.arange(n_seq) * (len(self.held_out) // n_seq)
        past = self.model.start(n_seq, PRECISIONS[self.args.precision])
        nll = 0.0
        for i in range(self.n_block):
            rows = np.stack([self.held_out[a:a + n_tok + 1] for a in starts + i * n_tok])
            rows = torch.from_numpy(rows.astype(np.int64))
            nll += float(self.block_loss(rows[:, :-1], rows[:, 1:], past)) / self.n_block
        spans = self.model.spans()
        return {"valid_loss": nll, "valid_bits": nll / math.log(2),
                "span_mean": float(spans.mean()), "span_max": float(spans.max())}

    def stepped(self):
        with torch.no_grad():
            for layer in self.model.layers:
                layer.spans.clamp_(0, 1)

    def state_dict(self):
        return {"at": torch.from_numpy(self.pieces.at), "past": self.past, "train": self.checksum}

    def load_state_dict(self, state):
        at, n_tok, data = state["at"].numpy(), self.args.n_tok, self.args.data
        if len(at) != self.args.batch:
            raise SystemExit(f"--batch is {self.args.batch}, but the run was begun with {len(at)} streams: give that "
                             "number, or another --out")
        if int((at[:, 1] + at[:, 2] * n_tok).max()) >= len(self.pieces.data):
            raise SystemExit(f"{data}: train.txt ends before a stream does: give the text and the --n-tok that the run "
                             "was begun with, or another --out")
        if state.get("train", self.checksum) != self.checksum:
            print(f"  {data}: train.txt is another text than the run was begun with", file=sys.stderr)
        self.pieces.at[:] = at
        self.past.copy_(state["past"])
