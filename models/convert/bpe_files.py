"""The files of byte-level BPE, asked what the server will ask of them (engine/tokenizer_bpe_file.c).

text_files.py calls read for a --tokenizer that is no SentencePiece model: tokenizer.json of Hugging Face,
vocab.json with merges.txt beside it (encoder.json with vocab.bpe), or a rank file of tiktoken. What
is looked at here is what belongs to a model: sizes, and the ids that begin and end its texts; what else a
tokenizer.json asks for, bpe_pipeline.py. Whether tokens and merges belong together the server says, by
name, which `pkmserve inspect` shows without serving.
"""

import os
from types import SimpleNamespace

import bpe_pipeline
from fault import Refused, show
from json_file import load

BYTES_MAX = 128 << 20
RANK_SPECIAL = 256  # ids behind the ranks of Llama 3's file
PADDING = 256  # rows of a matrix without a token are usual, up to so many or an eighth
END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>")
PAIRS = {"vocab.json": "merges.txt", "encoder.json": "vocab.bpe"}


def kind(path):
    """"json", "ranks", or None for something else. The content tells, not the name."""
    with open(path, "rb") as file:
        head = file.read(1 << 13)
    line = head.split(b"\n")[0].split(b" ")
    if head.lstrip(b" \t\r\n")[:1] == b"{":
        return "json"
    is_rank = len(line) == 2 and line[1].isdigit() and line[0] and len(line[0]) % 4 == 0 \
        and line[0].rstrip(b"=").replace(b"+", b"").replace(b"/", b"").isalnum()
    return "ranks" if is_rank else None


def _check_size(source, n_token, n_vocab):
    padding_max = max(PADDING, n_vocab // 8)
    if n_token > n_vocab or n_vocab - n_token > padding_max:
        raise Refused("%s: %d tokens, but the vocabulary has %d words%s" % (
            source, n_token, n_vocab, "" if n_token > n_vocab else
            ", of which at most %d may be without a token" % padding_max))


def _n_id(source, tokens):
    """One more than the highest id. tokens: (token, id)."""
    for token, number in tokens:
        if not isinstance(number, int) or isinstance(number, bool) or number < 0:
            raise Refused("%s: the id of token %s is %s; a whole number from 0 on is expected"
                          % (source, show(token), show(number)))
    return max((number for _, number in tokens), default=-1) + 1


def _read_json(path, n_vocab, source):
    root = load(path, BYTES_MAX)
    model = root.get("model")
    if not isinstance(model, dict):
        name = os.path.basename(path)
        beside = os.path.join(os.path.dirname(path), PAIRS.get(name, "merges.txt"))
        if not os.path.isfile(beside):
            raise Refused("%s: a vocabulary without merges: %s must stand beside it"
                          % (source, os.path.basename(beside)))
        _check_size(source, _n_id(source, root.items()), n_vocab)
        ids = {"eos_token_id": root[END_OF_TEXT[0]]} if END_OF_TEXT[0] in root else {}
        return [(path, "vocab.json"), (beside, "merges.txt")], ids
    vocab, added = model.get("vocab"), root.get("added_tokens", [])
    if not isinstance(added, list) or not all(isinstance(token, dict) for token in added):
        raise Refused("%s: added_tokens: a list of objects expected, got %s" % (source, show(added)))
    bpe_pipeline.check(root, source)
    tokens = [*vocab.items(), *((token.get("content"), token.get("id")) for token in added)]
    _check_size(source, _n_id(source, tokens), n_vocab)
    ids = {"eos_token_id": token["id"] for token in added if token.get("content") in END_OF_TEXT}
    first = bpe_pipeline.template_first(root, n_vocab, source)
    return [(path, "tokenizer.json")], {**ids, **({} if first is None else {"bos_token_id": first})}


def read(path, n_vocab, source):
    """.files [(path, name in the model directory)], .ids {key of config.json: id}. source: how messages
    call the file."""
    if kind(path) == "json":
        files, ids = _read_json(path, n_vocab, source)
        return SimpleNamespace(files=files, ids=ids)
    with open(path, "rb") as file:
        data = file.read(BYTES_MAX + 1)
    if len(data) > BYTES_MAX:
        raise Refused("%s: longer than the limit of %d bytes" % (source, BYTES_MAX))
    n_rank = data.count(b"\n") + (not data.endswith(b"\n"))
    special = {"bos_token_id": n_rank, "eos_token_id": n_rank + 1} \
        if n_vocab == n_rank + RANK_SPECIAL else {}
    _check_size(source, n_rank, n_vocab - (RANK_SPECIAL if special else 0))
    return SimpleNamespace(files=[(path, "tokenizer.model")], ids=special)
