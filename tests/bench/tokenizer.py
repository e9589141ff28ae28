#!/usr/bin/env python3
"""Byte-level BPE beside Hugging Face's package `tokenizers`, one thread each, on the same texts.

    tokenizer.py [--build build] [--vocab 32000] [--seconds 1] [TEXT ...]

Trains a tokenizer of each kind on the texts (default: the sources and documents of this repository),
has both programs encode them, and demands the same ids. Then prints a table: megabytes of text per
second, ours over the package's. The package is what is measured against; nothing is installed here.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import unicodedata

os.environ["RAYON_NUM_THREADS"] = "1"  # before the package is loaded

try:
    import tokenizers
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
except ImportError:
    sys.exit("tokenizer.py: the Python package `tokenizers` is what this compares with; install it, and"
             " name its Python: make bench-tokenizer BENCH_PYTHON=...")

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + REST
QWEN2 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + REST
QWEN35 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}" \
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
KINDS = ("gpt2", "llama3", "qwen2", "qwen3.5", "digits")


def train(kind, texts, n_vocab):
    made = Tokenizer(models.BPE(ignore_merges=kind == "llama3"))
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=kind in ("gpt2", "digits"))
    pattern = {"llama3": LLAMA3, "qwen2": QWEN2, "qwen3.5": QWEN35}.get(kind)
    first = pre_tokenizers.Digits(individual_digits=True) if kind == "digits" \
        else pre_tokenizers.Split(Regex(pattern), "isolated") if pattern else None
    made.pre_tokenizer = pre_tokenizers.Sequence([first, plain]) if first else plain
    if kind.startswith("qwen"):
        made.normalizer = normalizers.NFC()
    made.decoder = decoders.ByteLevel()
    made.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=n_vocab, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    made.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    return made


def quickest(encode, texts, seconds):
    """The package by itself, without what Python adds for a list of ids, is its encode()."""
    best, total = None, 0
    while total < seconds:
        begin = time.perf_counter()
        for text in texts:
            encode(text)
        taken = time.perf_counter() - begin
        best = taken if best is None else min(best, taken)
        total += taken
    return best


def hostile():
    """Texts of which one piece is the whole, or nearly, and characters from everywhere."""
    draw = random.Random(3)
    ranges = [(0, 0x250), (0x300, 0x370), (0x370, 0x600), (0x900, 0xe80), (0x1100, 0x1200), (0x1e00, 0x2100),
              (0x3000, 0x3100), (0x4e00, 0x9fff), (0xac00, 0xd7a4), (0x1f300, 0x1f700), (0x10000, 0x10a00)]
    some = "".join(chr(draw.randrange(*draw.choice(ranges))) for _ in range(100000))
    # The package's NFC knows no marks that are newer than Unicode 9; those of 3.2 are the same in all.
    some = "".join(c for c in some if c != "\0" and (
        not unicodedata.combining(c) or unicodedata.ucd_3_2_0.combining(c)))
    letters = " \t\n\r'sStTeErRvVlLdDmM12a.\u017f\u0301\u00e9\u3000"
    mixed = "".join(draw.choice(letters) for _ in range(100000))
    return {"one letter": ["a" * 1000000], "spaces": [" " * 1000000], "=": ["=" * 1000000],
            "any characters": [some], "contractions, spaces": [mixed]}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--build", default="build")
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--seconds", type=float, default=1)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("texts", nargs="*")
    args = parser.parse_args()
    paths = args.texts or [os.path.join(ROOT, name) for name in subprocess.run(
        ["git", "ls-files", "*.c", "*.h", "*.md", "*.py"], cwd=ROOT, check=True, capture_output=True,
        text=True).stdout.split()]
    texts = [open(path, encoding="utf-8").read().replace("\0", "") for path in paths]
    sets = {"the texts": texts, **hostile()}
    print("tokenizers %s, %d tokens; MB/s, one thread, the best of %g s of rounds\n"
          % (tokenizers.__version__, args.vocab, args.seconds))
    print("| kind | texts | MB | pkmserve | tokenizers | ratio |\n|---|---|---:|---:|---:|---:|")
    with tempfile.TemporaryDirectory() as folder:
        for kind in args.kinds.split(","):
            theirs = train(kind, texts, args.vocab)
            path = os.path.join(folder, "tokenizer.json")
            theirs.save(path)
            for name, some in sets.items():
                row(kind, name, some, theirs, path, folder, args)


def row(kind, name, texts, theirs, path, folder, args):
    source, ids = os.path.join(folder, "texts"), os.path.join(folder, "ids")
    with open(source, "wb") as file:
        file.write(b"".join(text.encode() + b"\0" for text in texts))
    ours = json.loads(subprocess.run(
        [os.path.join(args.build, "tests/bench/bench_tokenizer"), path,
         str(theirs.get_vocab_size()), source, str(args.seconds), ids],
        check=True, capture_output=True, text=True).stdout)
    with open(ids, encoding="ascii") as file:
        for text, line in zip(texts, file, strict=True):
            due = theirs.encode(text, add_special_tokens=False).ids
            if list(map(int, line.split())) != due:
                sys.exit("%s, %s: other ids than the package's" % (kind, name))
    taken = quickest(lambda text: theirs.encode(text, add_special_tokens=False), texts, args.seconds)
    size = sum(len(text.encode()) for text in texts) / 1e6
    print("| %s | %s | %.2f | %.1f | %.1f | %.1f |" % (
        kind, name, size, size / ours["seconds"], size / taken, taken / ours["seconds"]), flush=True)


main()
