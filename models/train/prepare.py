"""Text -> SentencePiece tokenizer and token files.

    python prepare.py --train my.txt --out ../run/data

Called once before training. Writes tokenizer.model, train.bin and valid.bin (little-endian
uint16 ids) into the output folder, and meta.json, which says of which tokenizer the ids are. They
start with </s> (id 1) and every document ends with it: a document is a work when a works table is
given, a part between blank lines with --blank-lines, otherwise the whole file.

Text is cut into lines before it is tokenised. The newline is a piece of its own that no other
piece may contain, so this gives the same ids as one call over the whole text would in exact
arithmetic, without the rounding of a score summed over a whole book.
"""
import argparse
import io
import json
import os
import random
import sys

import numpy as np
import sentencepiece as spm

from files import check_positive, check_range, copy_whole, file_hash, read_text, run, whole_file

EOS = 1


def train_tokenizer(text, vocab_size, sample_bytes, seed, out_path, n_thread):
    lines = [line for line in text.split("\n") if line]
    random.Random(seed).shuffle(lines)
    sample, size = [], 0
    for line in lines:
        if size >= sample_bytes:
            break
        sample.append(line)
        size += len(line.encode())
    model = io.BytesIO()
    try:
        spm.SentencePieceTrainer.train(
            sentence_iterator=iter(sample),
            model_writer=model,
            model_type="unigram",
            vocab_size=vocab_size,
            byte_fallback=True,
            # Exact round trip of any text: nothing is normalised, trimmed or put in front.
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            user_defined_symbols=["\n"],
            split_digits=True,
            character_coverage=0.9999,
            max_sentence_length=1 << 16,
            bos_id=0, eos_id=1, pad_id=2, unk_id=3,
            num_threads=n_thread,
            # A short text has fewer pieces worth having than were asked for.
            hard_vocab_limit=False,
            minloglevel=1,
        )
    except RuntimeError as e:
        raise SystemExit("no tokenizer can be trained on this text: it has too few characters, or more kinds of them "
                         f"than --vocab-size {vocab_size} leaves room for: {e}") from None
    with whole_file(out_path) as f:
        f.write(model.getvalue())


def read_tokenizer(path):
    """-> the tokenizer, which must be one as we train them: ids of 16 bits, documents ended by EOS, lines by a piece"""
    try:
        sp = spm.SentencePieceProcessor(model_file=path)
    except (OSError, RuntimeError):
        raise SystemExit(f"{path}: no SentencePiece model, or no such file") from None
    if sp.vocab_size() > 1 << 16 or sp.is_unknown(sp.piece_to_id("\n")) or sp.id_to_piece(EOS) != "</s>":
        raise SystemExit(f"{path}: at most 65536 pieces are needed, \"\\n\" one of them, and </s> as that of id {EOS}, as "
                         "prepare.py makes them; leave --tokenizer out, and train anew")
    return sp


def write_ids(path, ids):
    """Writes a file of tokens, which is there when it is whole."""
    with whole_file(path) as f:
        f.write(np.asarray(ids, "<u2").tobytes())


def write_meta(folder, sp):
    """Says which tokenizer the tokens are of. Written last: train.py compares it with tokenizer.model, so tokens of the
    one before, which a preparation that was killed has left, are not taken for those of this one."""
    meta = {"vocab_size": sp.vocab_size(), "tokenizer_sha256": file_hash(os.path.join(folder, "tokenizer.model"))}
    with whole_file(os.path.join(folder, "meta.json"), "w") as f:
        json.dump(meta, f)


def encode(sp, text, n_thread=1):
    """Ids of a text; sp.decode(encode(sp, text)) == text unless it holds U+2581 or NUL."""
    newline = sp.piece_to_id("\n")
    lines = text.split("\n")
    ids = []
    for i, line in enumerate(sp.encode(lines, num_threads=n_thread)):
        if i > 0:
            ids.append(newline)
        ids.extend(line)
    return ids


def documents(text, works_path, split, blank_lines):
    if blank_lines:
        return [part.strip("\n") for part in text.split("\n\n") if part.strip()]
    if not works_path:
        return [text]
    lines = text.removesuffix("\n").split("\n")
    head, *rows = [row.split("\t") for row in read_text(works_path).splitlines()] or [[]]
    if not {"split", "first_line", "last_line"} <= set(head):
        raise SystemExit(f"--works {works_path}: its first line must name the columns split, first_line and last_line")
    found = []
    for number, row in enumerate(rows, 2):
        work = dict(zip(head, row))
        if work.get("split") != split:
            continue
        try:
            first, last = int(work["first_line"]), int(work["last_line"])
        except (KeyError, ValueError):
            first = last = 0
        if not 1 <= first <= last <= len(lines):
            raise SystemExit(f"--works {works_path}: line {number}: first_line and last_line must be numbers of lines of "
                             f"the {split} text, which has {len(lines)}")
        found.append("\n".join(lines[first - 1:last]) + "\n")
    if not found:
        raise SystemExit(f"--works {works_path}: no work has the split {split}")
    return found


def hold_out(text, share=0.05):
    """-> a text's lines but the last, and the last"""
    cut = text.rfind("\n", 0, int(len(text) * (1 - share))) + 1
    if cut == 0:
        raise SystemExit("--train: a text of one line cannot be divided; give --valid")
    return text[:cut], text[cut:]


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    ap.add_argument("--train", required=True, help="training text in UTF-8, .txt or .txt.xz")
    ap.add_argument("--valid", help="validation text (the last 5 %% of --train)")
    ap.add_argument("--blank-lines", action="store_true",
                    help="blank lines divide documents, such as stories")
    ap.add_argument("--works", help="table of works, a line each, with columns divided by tabs: split (train or\nvalid), first_line and last_line in that text, from 1; needs --valid")
    ap.add_argument("--out", required=True, help="output folder")
    ap.add_argument("--tokenizer", help="tokenizer.model to use: that of the model which train.py --init continues\n"
                    "(one is trained on the text)")
    ap.add_argument("--vocab-size", type=int, default=2048, help="pieces of the tokenizer (2048)")
    ap.add_argument("--sample-mb", type=float, default=12.0,
                    help="megabytes of text that the tokenizer learns from (12)")
    ap.add_argument("--seed", type=int, default=1, help="of the choice of those (1)")
    ap.add_argument("--threads", type=int, default=2, help="threads of the tokenizer (2)")
    args = ap.parse_args()
    if not 320 <= args.vocab_size <= 65536:
        ap.error(f"--vocab-size is {args.vocab_size}, but must be from 320, for 256 of them are bytes, to 65536")
    if args.works and (args.blank_lines or not args.valid):
        ap.error("--works needs --valid, whose lines it numbers too, and goes without --blank-lines")
    check_range(ap, args, 1, "threads")
    check_positive(ap, args, "sample_mb")

    os.makedirs(args.out, exist_ok=True)
    model_path = os.path.join(args.out, "tokenizer.model")
    train_text = read_text(args.train)
    if args.valid:
        valid_text = read_text(args.valid)
    else:
        train_text, valid_text = hold_out(train_text)
    texts = (("valid", valid_text), ("train", train_text))
    for split, text in texts:
        if not text.strip():
            raise SystemExit(f"--{split} {getattr(args, split) or args.train}: the {split} text is empty")
    if args.tokenizer:
        read_tokenizer(args.tokenizer)
        copy_whole(args.tokenizer, model_path)
    elif os.path.exists(model_path):
        print(f"{model_path} is used, which was there already: delete it to have another trained", file=sys.stderr)
    else:
        train_tokenizer(train_text, args.vocab_size, int(args.sample_mb * 1e6), args.seed,
                        model_path, args.threads)
    sp = read_tokenizer(model_path)
    for split, text in texts:
        ids = [EOS]
        for document in documents(text, args.works, split, args.blank_lines):
            ids += encode(sp, document, args.threads)
            ids.append(EOS)
        write_ids(os.path.join(args.out, split + ".bin"), ids)
        print(f"{split}: {len(ids)} tokens, {len(text.encode()) / len(ids):.3f} bytes per token")
    write_meta(args.out, sp)


if __name__ == "__main__":
    run(main)
