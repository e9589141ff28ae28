"""What the server asks of the files that it reads text with, asked before they are published.

convert.py calls check_words for vocab.txt, check_codes for fastBPE's codes and read_tokenizer for a
SentencePiece model or the files of byte-level BPE (bpe_files.py); each refuses what engine/vocab.c, bpe.c
and tokenizer_spm.cc would refuse at the start, the last one as far as that can be seen without
SentencePiece.
"""

from types import SimpleNamespace

import bpe_files
import protobuf
from fault import Refused, show
from xlm_params import SPECIAL_WORDS

WORD_BYTES_MAX = 4096
CODES_BYTES_MAX, RULES_MAX = 256 << 20, 1 << 22
TOKENIZER_BYTES_MAX = 64 << 20
WORD_END = "</w>"  # fastBPE's mark of the last part of a word
SPM_UNKNOWN, SPM_CONTROL = 2, 3  # types of pieces: for what has no other; never text
SPM_SPECIAL = {"bos_token_id": (46, b"<s>"), "eos_token_id": (47, b"</s>")}  # settings, defaults


def _is_byte(word):
    """Whether a word is the number of a byte, other than the line feed, which is <eos>."""
    return len(word) <= 3 and word.isascii() and word.isdigit() and str(int(word)) == word \
        and int(word) <= 255 and int(word) != 10


# By kind: what a word must be that is not <eos> or <unk>.
KINDS = {"char": (lambda word: len(word) == 1, "one character"),
         "byte": (_is_byte, "a byte's number, 0 to 255 without 10,")}


def check_words(vocab, source, kind):
    """vocab: the bytes of vocab.txt, which are UTF-8. source: how messages call it."""
    words = vocab.decode().split("\n")
    for index, word in enumerate(SPECIAL_WORDS if kind == "xlm" else ()):
        if words[index] != word:
            raise Refused("%s: line %d: '%s' expected, got %s"
                          % (source, index + 1, word, show(words[index])))
    fits, due = KINDS.get(kind, (lambda word: True, ""))
    lines = {}
    for index, word in enumerate(words[:-1] if words[-1] == "" else words):
        if not word or "\r" in word or "\0" in word or lines.setdefault(word, index) != index:
            raise Refused("%s: line %d: a word of its own expected, got %s"
                          % (source, index + 1, show(word)))
        if len(word.encode()) > WORD_BYTES_MAX:
            raise Refused("%s: line %d: a word of %d bytes, the limit is %d"
                          % (source, index + 1, len(word.encode()), WORD_BYTES_MAX))
        if not fits(word) and word not in ("<eos>", "<unk>"):
            raise Refused("%s: line %d: %s expected with vocab_kind=%s, got %s"
                          % (source, index + 1, due, kind, show(word)))


def _read(path, option, bytes_max):
    with open(path, "rb") as file:
        data = file.read(bytes_max + 1)
    if len(data) > bytes_max:
        raise Refused("%s %s: longer than the limit of %d bytes" % (option, path, bytes_max))
    return data


def check_codes(path):
    """Each line is "left right count"; left and right are characters, or made by lines before."""
    lines = _read(path, "--codes", CODES_BYTES_MAX).split(b"\n")
    if lines[-1] == b"":
        lines.pop()
    if len(lines) > RULES_MAX:
        raise Refused("--codes %s: %d lines, the limit is %d" % (path, len(lines), RULES_MAX))
    made, seen = set(), set()
    for number, line in enumerate(lines, 1):
        try:
            left, right, count = line.decode().split(" ")
        except ValueError:  # another number of parts, or not UTF-8
            left = right = count = ""
        if not left or not right or not (count.isascii() and count.isdigit()):
            raise Refused("--codes %s: line %d: 'left right count' expected, got %s"
                          % (path, number, show(line)))
        for part in (left, right):
            if len(part) > 1 and part[1:] != WORD_END and part not in made:
                raise Refused("--codes %s: line %d joins %s, neither a character nor made by an"
                              " earlier line" % (path, number, show(part)))
        if (left, right) in seen:
            raise Refused("--codes %s: line %d repeats an earlier one" % (path, number))
        seen.add((left, right))
        made.update((left, right, left + right))


def check_tokenizer(path, n_vocab, source="--tokenizer"):
    """The pieces are the model's words in the order of their ids; where none of these means what has
    no piece, SentencePiece's own for it stands behind the last one, and text never becomes it.
    source: how messages call the file. Returns the ids of what begins a text, ends it, and is
    unknown, by their names in config.json, as far as it has them."""
    try:
        fields = list(protobuf.fields(_read(path, source, TOKENIZER_BYTES_MAX)))
        pieces = [dict(protobuf.fields(value)) for number, value in fields if number == 1]
        settings = dict(field for number, value in fields if number == 2 for field in protobuf.fields(value))
    except (ValueError, IndexError, TypeError):
        pieces = []
    unknown = [index for index, piece in enumerate(pieces) if piece.get(3) == SPM_UNKNOWN]
    if len(unknown) != 1:
        raise Refused("%s %s: not a SentencePiece model: pieces expected of which one is the"
                      " unknown, got %d and %d" % (source, path, len(pieces), len(unknown)))
    if len(pieces) != n_vocab and (len(pieces), unknown[0]) != (n_vocab + 1, n_vocab):
        raise Refused("%s %s: %d pieces, but the vocabulary has %d words"
                      % (source, path, len(pieces), n_vocab))
    ids = {"unk_token_id": unknown[0]} if unknown[0] < n_vocab else {}
    for key, (number, default) in SPM_SPECIAL.items():
        text = settings.get(number) or default
        found = [index for index, piece in enumerate(pieces)
                 if piece.get(1) == text and piece.get(3) == SPM_CONTROL]
        ids.update((key, index) for index in found[:1])
    return ids


def read_tokenizer(path, n_vocab, source="--tokenizer"):
    """.files [(path, name in the model directory)], .ids {key of config.json: id}, .how for the summary.
    source: how messages call the file."""
    if bpe_files.kind(path) is not None:
        found = bpe_files.read(path, n_vocab, "%s %s" % (source, path))
        return SimpleNamespace(files=found.files, ids=found.ids, how="text by byte-level BPE")
    return SimpleNamespace(files=[(path, "tokenizer.model")], how="text by SentencePiece",
                           ids=check_tokenizer(path, n_vocab, source))
