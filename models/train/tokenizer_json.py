"""tokenizer.model of SentencePiece -> tokenizer.json and tokenizer_config.json, for the transformers library.

    python tokenizer_json.py --model ../demo

The server goes on reading tokenizer.model; these two are for clients that count or cut tokens with
AutoTokenizer.from_pretrained. For unigram models that normalise nothing and put nothing in front, as
prepare.py makes them: others are refused. A text that spells one of the special pieces, such as "</s>"
or "<0x41>", is read as that piece by transformers, and as plain characters by the server.
"""
import argparse
import json
import os
import struct

from files import read_object, run, whole_file

# Of the converter: files has its folder among those of modules.
import protobuf

NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
UNIGRAM = 1
SPACE = "\u2581"


def read_model(path):
    """-> pieces [(text, score, type)], or SystemExit for a kind of model that is not foreseen"""
    with open(path, "rb") as f:
        data = f.read()
    pieces, kind, normaliser = [], UNIGRAM, {}
    try:
        for number, value in protobuf.fields(data):
            if number == 1:
                entry = dict(protobuf.fields(value))
                score, = struct.unpack("<f", entry[2]) if 2 in entry else (0.0,)
                pieces.append((entry[1].decode(), score, entry.get(3, NORMAL)))
            elif number == 2:
                kind = dict(protobuf.fields(value)).get(3, UNIGRAM)
            elif number == 3:
                normaliser = dict(protobuf.fields(value))
    except (IndexError, KeyError, TypeError, ValueError, struct.error):
        raise SystemExit(f"{path}: no SentencePiece model") from None
    # normalizer_spec: 1 name, 2 character map, 3 add_dummy_prefix, 4 remove_extra_whitespaces.
    if kind != UNIGRAM or normaliser.get(2) or normaliser.get(3, 1) or normaliser.get(4, 1):
        raise SystemExit(f"{path}: only unigram models without normalisation and dummy prefix are foreseen")
    return pieces


def tokenizer(pieces, config):
    """-> the content of tokenizer.json"""
    unknown = next(i for i, (_, _, kind) in enumerate(pieces) if kind == UNKNOWN)
    added = [{"id": i, "content": text, "single_word": False, "lstrip": False, "rstrip": False,
              "normalized": False, "special": kind != USER}
             for i, (text, _, kind) in enumerate(pieces) if kind in (UNKNOWN, CONTROL, USER)]
    out = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added,
           "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": SPACE},
           "pre_tokenizer": None, "post_processor": None,
           "decoder": {"type": "Sequence", "decoders": [
               {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
               {"type": "ByteFallback"}, {"type": "Fuse"}]},
           "model": {"type": "Unigram", "unk_id": unknown,
                     "vocab": [[text, score] for text, score, _ in pieces],
                     "byte_fallback": any(kind == BYTE for *_, kind in pieces)}}
    if config.get("add_bos"):
        bos = pieces[config["bos_token_id"]][0]
        one, two = ([{"SpecialToken": {"id": bos, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
                    [{"Sequence": {"id": "B", "type_id": 0}}])
        out["post_processor"] = {
            "type": "TemplateProcessing", "single": one, "pair": one + two,
            "special_tokens": {bos: {"id": bos, "ids": [config["bos_token_id"]], "tokens": [bos]}}}
    return out


def tokenizer_config(pieces, config):
    """-> the content of tokenizer_config.json"""
    out = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False,
           "model_max_length": config["max_position"]}
    for name in ("bos", "eos", "pad", "unk"):
        number = config.get(f"{name}_token_id", -1)
        if number >= 0:
            out[f"{name}_token"] = pieces[number][0]
    return out


def write(folder):
    """Both files of a model directory, from its tokenizer.model and config.json."""
    config = read_object(os.path.join(folder, "config.json"))
    pieces = read_model(os.path.join(folder, "tokenizer.model"))
    for name, content in (("tokenizer.json", tokenizer(pieces, config)),
                          ("tokenizer_config.json", tokenizer_config(pieces, config))):
        with whole_file(os.path.join(folder, name), "w", encoding="utf-8") as f:
            json.dump(content, f, ensure_ascii=False, indent=1 if name == "tokenizer_config.json" else None)
            f.write("\n")


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    ap.add_argument("--model", required=True, help="model directory with config.json and tokenizer.model")
    write(ap.parse_args().model)


if __name__ == "__main__":
    run(main)
