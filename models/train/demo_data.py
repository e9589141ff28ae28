"""The demo models' training text: short stories, the encyclopedia of world.py, and a few books.

Writes what prepare.py writes, tokenizer.model, meta.json, train.bin and valid.bin, and facts.tsv.xz,
the table of facts. An epoch is one permutation of documents, each ended by </s>: the stories
--story-times over, --book-mb of books, and of each fact --wordings of those that are not held out and
--entries of its subject, all as often as `times` says. Stories are divided by blank lines.

valid.bin holds the held-out stories, valid-facts.bin two thousand held-out wordings.
"""
import argparse
import os

import numpy as np

import world
from files import check_range, read_text, run
from prepare import EOS, documents, encode, read_tokenizer, train_tokenizer, write_ids, write_meta

BOOK_LINES = 4  # paragraphs of a book to a document


def book_parts(path, n_byte):
    """Paragraphs from the beginnings of equal parts of the text, so that many works have a share."""
    lines = [line for line in read_text(path).split("\n") if line]
    parts, size = [], 0
    groups = [lines[i:i + BOOK_LINES] for i in range(0, len(lines), BOOK_LINES)]
    step = max(1, sum(len(line) for line in lines) // max(1, n_byte))
    for group in groups[::step]:
        parts.append("\n".join(group))
        size += len(parts[-1].encode())
        if size >= n_byte:
            break
    return parts


def encode_all(sp, texts, n_thread):
    """-> ids of each text, ended by </s>"""
    if any("\n" in text for text in texts):
        found = (encode(sp, text) for text in texts)
    else:
        found = sp.encode(texts, num_threads=n_thread)
    return [np.array(ids + [EOS], "<u2") for ids in found]


def fact_documents(facts, args, sp):
    """-> encoded sentences and entries, and how often each is written in an epoch"""
    draw, texts, times = world.Draw(args.seed + 1), [], []
    for group in world.by_subject(facts).values():
        for fact in group:
            sentences = list(fact.sentences())
            written = [0] * len(sentences)
            for _ in range(fact.times):
                order = list(range(len(sentences)))
                draw.shuffle(order)
                for i in order[:args.wordings]:
                    written[i] += 1
            texts += sentences
            times += written
        for _ in range(args.entries):
            texts.append(world.entry(draw, group))
            times.append(group[0].times)
    return encode_all(sp, texts, args.threads), times


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    ap.add_argument("--stories", required=True, help="folder with train.txt.xz and valid.txt")
    ap.add_argument("--books", required=True, help="folder with train.txt.xz")
    ap.add_argument("--out", required=True, help="output folder")
    ap.add_argument("--vocab-size", type=int, default=4096, help="pieces of the tokenizer (4096)")
    ap.add_argument("--people", type=int, default=2600, help="people in the world (2600)")
    ap.add_argument("--things", type=int, default=1300, help="things in the world (1300)")
    ap.add_argument("--wordings", type=int, default=4, help="sentences of a fact, each time it is written (4)")
    ap.add_argument("--entries", type=int, default=4, help="entries of a subject, each time (4)")
    ap.add_argument("--story-times", type=int, default=2, help="how often an epoch has each story (2)")
    ap.add_argument("--book-mb", type=float, default=1.0, help="megabytes of books in an epoch (1)")
    ap.add_argument("--seed", type=int, default=1, help="of the world and of the order (1)")
    ap.add_argument("--threads", type=int, default=2, help="threads of the tokenizer (2)")
    args = ap.parse_args()
    check_range(ap, args, 1, "people", "things", "wordings", "threads")
    check_range(ap, args, 0, "entries", "story_times", "book_mb", "seed")

    os.makedirs(args.out, exist_ok=True)
    facts = world.build(args.seed, args.people, args.things)
    world.write_facts(os.path.join(args.out, "facts.tsv.xz"), facts)
    tales = documents(read_text(os.path.join(args.stories, "train.txt.xz")), None, "train", True)
    books = book_parts(os.path.join(args.books, "train.txt.xz"), int(args.book_mb * 1e6))
    model_path = os.path.join(args.out, "tokenizer.model")
    if not os.path.exists(model_path):
        groups = list(world.by_subject(facts).values())[::3]
        sentences = [s for group in groups for x in group for s in list(x.sentences())[::3]]
        sentences += [world.entry(world.Draw(i), group) for i, group in enumerate(groups)]
        sample = "\n".join(tales[::2] + sentences + books[::8])
        train_tokenizer(sample, args.vocab_size, len(sample) * 4, args.seed, model_path, args.threads)
    sp = read_tokenizer(model_path)

    kinds = {"stories": (encode_all(sp, tales, args.threads), args.story_times),
             "books": (encode_all(sp, books, args.threads), 1)}
    encoded, order = [], []
    for name, (ids, times) in kinds.items():
        print(f"{name}: {len(ids)} documents, {sum(map(len, ids)) * times} tokens in an epoch")
        order.append(np.tile(np.arange(len(ids)) + len(encoded), times))
        encoded += ids
    ids, times = fact_documents(facts, args, sp)
    print(f"world: {len(facts)} facts, {len(ids)} sentences and entries, "
          f"{sum(len(x) * n for x, n in zip(ids, times))} tokens in an epoch")
    order.append(np.repeat(np.arange(len(ids)) + len(encoded), times))
    encoded += ids
    order = np.random.default_rng(args.seed).permutation(np.concatenate(order))
    train = np.concatenate([np.array([EOS], "<u2")] + [encoded[i] for i in order])

    held_out = ["".join(fact.question(fact.held_out)) for fact in facts]
    world.Draw(args.seed + 2).shuffle(held_out)
    for name, texts in (("valid.bin", documents(read_text(os.path.join(args.stories, "valid.txt")), None,
                                       "valid", True)),
                        ("valid-facts.bin", held_out[:2000])):
        ids = np.concatenate([np.array([EOS], "<u2")] + encode_all(sp, texts, args.threads))
        write_ids(os.path.join(args.out, name), ids)
        print(f"{name}: {len(ids)} tokens")
    write_ids(os.path.join(args.out, "train.bin"), train)
    print(f"train.bin: {len(train)} tokens")
    write_meta(args.out, sp)  # The last, by which demo.sh knows that all are there.


if __name__ == "__main__":
    run(main)
