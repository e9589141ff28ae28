"""Perplexities of model directories, use of their memories, learned spans, and the parity fixture.

Works on exported weights, widened to fp32 and computed in fp32, so that the figures are those of
the files that are shipped. A text is tokenised whole. With positions it is scored in windows of
max_position tokens: each token exactly once, the first after bos, every later window after one
token of context, and the last window extended to the left until it is full. A model of bytes
without positions reads it as one stream, whose first token has no probability.

Prints one JSON object per model and text. Perplexity is exp(nll / count), where the count is of
tokens, of words (one more than there are runs of white space) or of UTF-8 bytes.
"""
import argparse
import json
import math
import os
import re
import time

import sentencepiece as spm
import torch

from all_attention import AllAttention
from export import load_model
from files import check_range, read_text, run
from logprobs import logprobs, stream_logprobs
from windows import count_figures, slot_counts


def rolling_windows(ids, prefix, size):
    """-> (input, targets) pairs; targets belong to the last positions of their input"""
    done = min(size, len(ids))
    yield [prefix] + ids[:done - 1], ids[:done]
    while done < len(ids):
        end = done + min(size, len(ids) - done)
        yield ids[end - size - 1:end - 1], ids[done:end]
        done = end


def score(model, ids, n_seq, counts):
    """-> sum of negative log-probabilities over a text"""
    config = model.config
    nll, batch = 0.0, []

    def flush():
        inputs, targets = zip(*batch)
        batch.clear()
        return -float(logprobs(model, inputs, targets, counts).double().sum())

    for window in rolling_windows(ids, config["bos_token_id"], config["max_position"]):
        if batch and (len(batch) == n_seq or len(batch[0][0]) != len(window[0])):
            nll += flush()
        batch.append(window)
    return nll + flush()


def evaluate_stream(model, folder, path):
    text, start = read_text(path), time.time()
    ids = list(text.encode())
    if len(ids) < 2:
        raise SystemExit(f"{path}: {len(ids)} bytes; the first of a text has no probability, so two are needed")
    nll = -float(stream_logprobs(model, ids).double().sum())
    return {"model": folder, "text": path, "nll": nll, "tokens": len(ids) - 1,
            "bits_per_byte": nll / (len(ids) - 1) / math.log(2),
            "spans": [[round(z) for z in layer] for layer in model.spans().tolist()],
            "windows": [layer.window() for layer in model.layers],
            "seconds": round(time.time() - start, 1)}


def evaluate(folder, path, n_seq, zero_memory):
    model = load_model(folder)
    if isinstance(model, AllAttention):
        return evaluate_stream(model, folder, path)
    for memory in model.memories.values() if zero_memory else ():
        memory.table().data.zero_()
    sp = spm.SentencePieceProcessor(model_file=os.path.join(folder, "tokenizer.model"))
    text, start = read_text(path), time.time()
    ids = sp.encode(text)
    if not ids:
        raise SystemExit(f"{path}: the text is empty")
    counts = slot_counts(model)
    nll = score(model, ids, n_seq, counts)
    n_word, n_byte = len(re.split(r"\s+", text)), len(text.encode())
    out = {"model": folder, "text": path, "nll": nll, "tokens": len(ids), "words": n_word,
           "bytes": n_byte, "token_perplexity": math.exp(nll / len(ids)),
           "word_perplexity": math.exp(nll / n_word), "byte_perplexity": math.exp(nll / n_byte)}
    out.update(count_figures(counts))
    if zero_memory:
        out["memory"] = "zero"
    out["seconds"] = round(time.time() - start, 1)
    return out


def parity_windows(model, folder, text):
    """Lines until they have 300 tokens, and one of 15 to 40."""
    sp = spm.SentencePieceProcessor(model_file=os.path.join(folder, "tokenizer.model"))
    lines = text.split("\n")
    long, n_line = "", 0
    while len(sp.encode(long)) < 300 and n_line < len(lines):
        long += lines[n_line] + "\n"
        n_line += 1
    short = next((line for line in lines[n_line:] if 15 <= len(sp.encode(line)) <= 40), None)
    if short is None:
        raise SystemExit("--parity: the text must have lines of 300 tokens together, and behind them one of 15 to 40")
    for passage in (long, short):
        ids = [model.config["bos_token_id"]] + sp.encode(passage)
        if len(ids) > model.config["max_position"]:
            raise SystemExit(f"a passage of {len(ids)} tokens is longer than one window")
        yield passage, ids, logprobs(model, [ids[:-1]], [ids[1:]])


def parity_stream(model, text):
    """Characters enough to leave the longest window behind, and some of several bytes."""
    n_char = max(layer.window() for layer in model.layers) + 128
    for passage in (text[:n_char], "\ncaf\u00e9 \u2014 \u65e5\u672c\u8a9e\n"):
        ids = list(passage.encode())
        yield passage, ids, stream_logprobs(model, ids)


def parity(folder, path, out_path):
    """Passages, and the log-probability of each of their tokens."""
    model, text = load_model(folder), read_text(path)
    found = parity_stream(model, text) if isinstance(model, AllAttention) else \
        parity_windows(model, folder, text)
    cases = [{"text": passage, "ids": ids, "logprobs": [round(float(v), 6) for v in values]}
             for passage, ids, values in found]
    with open(out_path, "w") as f:
        json.dump({"cases": cases}, f, indent=1)
        f.write("\n")


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    ap.add_argument("--model", nargs="+", required=True, help="model directories")
    ap.add_argument("--text", nargs="+", required=True, help="text files, .txt or .txt.xz")
    ap.add_argument("--batch", type=int, default=8, help="windows at once (8)")
    ap.add_argument("--zero-memory", action="store_true",
                    help="with the values of all memories set to zero: what is lost without them")
    ap.add_argument("--threads", type=int, default=2, help="threads of PyTorch (2)")
    ap.add_argument("--parity", help="only write this fixture, from the first model and text")
    args = ap.parse_args()
    check_range(ap, args, 1, "batch", "threads")
    torch.set_num_threads(args.threads)
    if args.parity:
        parity(args.model[0], args.text[0], args.parity)
        return
    for path in args.text:
        for folder in args.model:
            print(json.dumps(evaluate(folder, path, args.batch, args.zero_memory)), flush=True)


if __name__ == "__main__":
    run(main)
