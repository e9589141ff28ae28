"""What train.py asks of the model with a memory and of its dense twin: loss and validation on windows.
"""
import json
import math
import os

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


class Windows:
    """The twins' task: windows of tokens, each on its own."""

    def __init__(self, args, config):
        if config is None:
            with open(os.path.join(args.data, "meta.json")) as f:
                vocab_size = json.load(f)["vocab_size"]
            config = default_config(vocab_size, memory=not args.dense)
        self.args = args
        self.model = Transformer(config).to(args.device)
        make = lambda split: Batches(os.path.join(args.data, split + ".bin"), args.n_tok, args.batch,
                                     config["bos_token_id"], args.seed)
        self.batches, self.held_out = make("train"), make("valid")

    def loss(self, step):
        return self.batch_loss(*self.batches.train(step))

    def batch_loss(self, ids, targets, count=None):
        device = self.args.device
        hidden = self.model(ids.to(device), count)
        return output_loss(self.model.pred_layer.proj, hidden, targets.to(device))

    def validate(self):
        nll = torch.zeros((), dtype=torch.float64)
        n_tok = 0
        memories = self.model.config["memories"]
        count = SlotCount(memories[0]["n_slot"]) if memories else None
        for ids, targets in self.held_out.valid(self.args.valid_windows):
            nll += self.batch_loss(ids, targets, count).double().cpu() * targets.numel()
            n_tok += targets.numel()
        out = {"valid_loss": float(nll) / n_tok, "valid_ppl": math.exp(float(nll) / n_tok)}
        if count:
            out.update(usage=count.usage(), kl=count.kl())
        return out

    def stepped(self):
        """After the optimizer's step."""

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        """There is none: a batch depends on the step alone."""
