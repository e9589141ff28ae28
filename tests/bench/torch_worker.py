"""Measures the PyTorch model of models/train/decode.py, as `pkmserve bench --rounds 0` measures the server's:
loads and warms up, prints an empty line, then runs a round for each line of standard input and prints its
figures as a line of JSON. Run by compare.py, with a Python that has PyTorch.

    torch_worker.py MODEL --dtype f32|bf16 --threads N --rows N --positions N --max-batch N

The tokens, their order and what is wanted of each row are those of server/cli/cmd_bench.c."""

import argparse
import hashlib
import json
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "models" / "train"))

from decode import make_decoder  # noqa: E402
from export import load_model  # noqa: E402

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
DECODE_STEPS = 8  # as in server/cli/cmd_bench.c


def some_tokens(n_vocab, seqs, pos, n):
    """[seqs, n]: what some_token() of server/cli/cmd_bench.c gives for positions pos.. of sequences 0..seqs"""
    return torch.tensor([[(seq * 7919 + p + 1) * 2654435761 % 2 ** 32 % n_vocab for p in range(pos, pos + n)]
                         for seq in range(seqs)])


def batches(most):
    """1, 2, 4 .. most"""
    return [1 << i for i in range(most.bit_length())]


class Rounds:
    def __init__(self, model, dtype, rows, positions, max_batch):
        self.n_vocab = model.config["vocab_size"]
        self.rows, self.positions, self.batches = rows, positions, batches(max_batch)
        n_seq = self.batches[-1]
        self.decoder = make_decoder(model, dtype, n_seq, max(rows, positions + DECODE_STEPS))
        self.text = some_tokens(self.n_vocab, 1, 0, rows)
        self.targets = self.text[0].roll(-1)
        self.past = some_tokens(self.n_vocab, n_seq, 0, positions)
        self.next = some_tokens(self.n_vocab, n_seq, positions, DECODE_STEPS)
        for seq in range(n_seq):
            self.decoder.hidden(self.past[seq:seq + 1], seq)

    def prefill(self, n_out):
        hidden = self.decoder.hidden(self.text)[0, -n_out:]
        return self.decoder.logprobs(hidden, self.targets[-n_out:])

    def decode(self, batch):
        drawn = []
        for i in range(DECODE_STEPS):
            hidden = self.decoder.hidden(self.next[:batch, i:i + 1], 0, self.positions + i)
            drawn += self.decoder.logits(hidden[:, 0]).argmax(-1).tolist()
        return drawn

    def run(self):
        """-> what a round of pkmserve bench prints, as far as it concerns the time and the results"""
        steps, drawn = [], []

        def measure(name, rows, times, run):
            begin = time.perf_counter()
            result = run()
            steps.append({"step": name, "rows": rows, "seconds": (time.perf_counter() - begin) / times})
            return result

        measure("prefill", self.rows, 1, lambda: self.prefill(1))
        logprobs = measure("score", self.rows, 1, lambda: self.prefill(self.rows))
        for batch in self.batches:
            drawn += measure("decode", batch, DECODE_STEPS, lambda n=batch: self.decode(n))
        digest = hashlib.sha256(logprobs.numpy().tobytes() + torch.tensor(drawn).numpy().tobytes())
        return {"steps": steps, "hash": digest.hexdigest()[:16], "logprobs": logprobs.tolist()}


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("model")
    ap.add_argument("--dtype", choices=DTYPES, required=True)
    for option in ("threads", "rows", "positions", "max-batch"):
        ap.add_argument("--" + option, type=int, required=True)
    args = ap.parse_args()
    torch.set_num_threads(args.threads)
    rounds = Rounds(load_model(args.model), DTYPES[args.dtype], args.rows, args.positions, args.max_batch)
    rounds.run()
    print(flush=True)
    for _ in sys.stdin:
        print(json.dumps(rounds.run()), flush=True)


if __name__ == "__main__":
    main()
