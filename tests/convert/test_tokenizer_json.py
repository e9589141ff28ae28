"""What a tokenizer.json may ask for: what is not served, converter and server both refuse, by its name.

Rerun one: /usr/bin/python3 -m pytest tests/convert/test_tokenizer_json.py -k Lowercase
"""

import copy
import json
import os
import subprocess
from pathlib import Path

import hf_writer as hw
import pytest
from convert_harness import ROOT, convert

BPE = ROOT / "tests" / "golden" / "byte-bpe"
PROGRAM = ROOT / Path(os.environ.get("PKMSERVE", "build/pkmserve"))
SIZES = {"gpt2": 1001, "llama3": 1305, "qwen2": 1607}
OTHER = "a SentencePiece tokenizer in Hugging Face's form"


def sequence(key, *steps):
    return {"type": "Sequence", key: list(steps)}


def step(kind, **more):
    return {"type": kind, **more}


LEVEL = step("ByteLevel", add_prefix_space=False, trim_offsets=True, use_regex=True)
INNER = {**LEVEL, "use_regex": False}
SPACE = "▁"
REPLACE = step("Replace", pattern={"String": " "}, content=SPACE)
TEXT, TOKEN = {"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "x", "type_id": 0}}
FALLBACK = ["Replace", "ByteFallback", "Fuse", "Strip"]

# What is put into GPT-2's file, by place; what both messages name.
REFUSED = [
    ({"normalizer": step("Lowercase")}, "normalizer is", "Lowercase"),
    ({"normalizer": step("NFKC")}, "normalizer is", "NFKC"),
    ({"normalizer": step("NFD")}, "normalizer is", "NFD"),
    ({"normalizer": step("Strip", strip_left=True, strip_right=True)}, "normalizer is", "Strip"),
    ({"normalizer": step("BertNormalizer", lowercase=True)}, "normalizer is", "BertNormalizer"),
    ({"normalizer": step("Precompiled", precompiled_charsmap="AAAA")}, "normalizer is", "Precompiled"),
    ({"normalizer": REPLACE}, "normalizer is", "Replace"),
    ({"normalizer": step("Prepend", prepend=SPACE)}, "normalizer is", "Prepend"),
    ({"normalizer": sequence("normalizers", step("NFC"), step("Lowercase"))}, "normalizer is", "Lowercase"),
    ({"normalizer": sequence("normalizers", sequence("normalizers", step("NFC")))}, "normalizer is", "Sequence"),
    ({"normalizer": "NFC"}, "normalizer is", "NFC"),
    ({"normalizer": []}, "normalizer is []", "null or NFC"),
    ({"pre_tokenizer": None}, "pre_tokenizer is", "ByteLevel"),
    ({"pre_tokenizer": step("Whitespace")}, "pre_tokenizer is", "Whitespace"),
    ({"pre_tokenizer": step("WhitespaceSplit")}, "pre_tokenizer is", "WhitespaceSplit"),
    ({"pre_tokenizer": step("BertPreTokenizer")}, "pre_tokenizer is", "BertPreTokenizer"),
    ({"pre_tokenizer": sequence("pretokenizers")}, "pre_tokenizer is", "ByteLevel"),
    ({"pre_tokenizer": sequence("pretokenizers", step("Punctuation"), INNER)}, "pre_tokenizer is", "Punctuation"),
    ({"pre_tokenizer": sequence("pretokenizers", step("Digits", individual_digits=False), LEVEL)},
     "pre_tokenizer is", "Digits"),
    ({"pre_tokenizer": sequence("pretokenizers", step("Digits", individual_digits=True), INNER)},
     "pre_tokenizer.use_regex is", "true"),
    ({"pre_tokenizer": sequence("pretokenizers", step("Digits"), LEVEL, LEVEL)}, "pre_tokenizer is", "Digits"),
    ({"pre_tokenizer": sequence("pretokenizers", step("Split", pattern={"String": " "}, behavior="Isolated"),
                                INNER)}, "pre_tokenizer is", "String"),
    ({"pre_tokenizer": {**LEVEL, "add_prefix_space": True}}, "pre_tokenizer.add_prefix_space is", "false"),
    ({"pre_tokenizer": INNER}, "pre_tokenizer.use_regex is", "true"),
    ({"decoder": None}, "decoder is", "ByteLevel"),
    ({"decoder": step("WordPiece", prefix="##")}, "decoder is", "WordPiece"),
    ({"decoder": step("BPEDecoder", suffix="</w>")}, "decoder is", "BPEDecoder"),
    ({"decoder": step("Metaspace", replacement=SPACE)}, "decoder is", "Metaspace"),
    ({"decoder": sequence("decoders", *map(step, FALLBACK))}, "decoder is", "ByteFallback"),
    ({"post_processor": step("BertProcessing", sep=["a", 0], cls=["b", 1])}, "post_processor is", "BertProcessing"),
    ({"post_processor": step("RobertaProcessing")}, "post_processor is", "RobertaProcessing"),
    ({"post_processor": step("TemplateProcessing", single=[TEXT, TOKEN])}, "post_processor is", "at most one"),
    ({"post_processor": step("TemplateProcessing", single=[TOKEN, TOKEN, TEXT])}, "post_processor is",
     "at most one"),
    ({"post_processor": step("TemplateProcessing", single=[])}, "post_processor is", "at most one"),
    ({"model.type": "WordPiece"}, "model.type is", "WordPiece"),
    ({"model.type": "WordLevel"}, "model.type is", "WordLevel"),
    ({"model.dropout": 0.1}, "model.dropout is", "0.1"),
    ({"model.unk_token": "<unk>"}, "model.unk_token is", "<unk>"),
    ({"model.fuse_unk": True}, "model.fuse_unk is", "null, false"),
    ({"model.end_of_word_suffix": "</w>"}, "model.end_of_word_suffix is", "</w>"),
    ({"model.continuing_subword_prefix": "##"}, "model.continuing_subword_prefix is", "##"),
    ({"model.ignore_merges": 1}, "ignore_merges", "1"),
    ({"model.new_key": 1}, "model has the key", "new_key"),
    ({"model.merges": {}}, "model.merges", "a list"),
    ({"model.vocab": []}, "model.vocab", "an object"),
    ({"new_key": 1}, "the file has the key", "new_key"),
    ({"added_tokens.0.new_key": 1}, "an added token has the key", "new_key"),
    ({"added_tokens.0.lstrip": 0}, "lstrip of an added token is", "0"),
    ({"added_tokens.0.content": "!"}, "has the id 1000", "0 in model.vocab"),
    ({"model.vocab.!": 1.5}, "the id of token", "1.5"),
    # SentencePiece's, whole or by one of its signs: both messages say what is needed.
    ({"model.type": "Unigram"}, "Unigram", OTHER),
    ({"model.byte_fallback": True}, "model.byte_fallback", OTHER),
    ({"pre_tokenizer": step("Metaspace", replacement=SPACE, prepend_scheme="first", split=False)}, "Metaspace", OTHER),
    ({"pre_tokenizer": sequence("pretokenizers", step("WhitespaceSplit"), step("Metaspace"))}, "Metaspace", OTHER),
    ({"normalizer": sequence("normalizers", step("Prepend", prepend=SPACE), REPLACE), "pre_tokenizer": None,
      "decoder": sequence("decoders", *map(step, FALLBACK)), "model.byte_fallback": True, "model.fuse_unk": True,
      "model.unk_token": "<unk>"}, "model.byte_fallback", OTHER),
]
QWEN2 = [
    ("behavior", "Removed", "Removed"), ("behavior", "MergedWithNext", "MergedWithNext"),
    ("invert", True, "Split"), ("pattern", {"Regex": r"\p{L}+"}, "Regex"), ("pattern", {"String": "x"}, "String"),
    ("pattern", None, "Split"), ("type", "Punctuation", "Punctuation"),
]


def changed(case, changes):
    root = copy.deepcopy(json.loads((BPE / case / "tokenizer.json").read_text()))
    for place, value in changes.items():
        *parts, key = place.split(".")
        at = root
        for part in parts:
            at = at[int(part) if isinstance(at, list) else part]
        at[int(key) if isinstance(at, list) else key] = value
    return json.dumps(root)


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """{case: (a directory in Hugging Face form, its model directory)}, with the tokenizers as they are."""
    made = {}
    for case, n in SIZES.items():
        source, model = tmp_path_factory.mktemp(case), tmp_path_factory.mktemp(case) / "model"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(hw, "VOCAB", n)
            hw.tiny(source, changes={"vocab_size": n})
        (source / "tokenizer.json").write_bytes((BPE / case / "tokenizer.json").read_bytes())
        got = convert(source, "--output", model)
        assert got.status == 0, got.err
        made[case] = source, model
    return made


def inspect(model):
    done = subprocess.run([str(PROGRAM), "inspect", "--model", str(model)], capture_output=True, text=True,
                          timeout=60)
    return done.returncode, done.stderr


def both(sources, case, changes):
    """What the converter and the server say to the case's changed file: [(status, error)]."""
    source, model = sources[case]
    text = changed(case, changes)
    (source / "tokenizer.json").write_text(text)
    (model / "tokenizer.json").write_text(text)
    got = convert(source, "--output", source / "out")
    assert got.status == 0 or not (source / "out").exists()
    for path in (source / "out").glob("*"):
        path.unlink()
    if (source / "out").exists():
        (source / "out").rmdir()
    return [(got.status, got.err), inspect(model)]


def check(sources, case, changes, *words):
    for status, err in both(sources, case, changes):
        assert status == 1 and "Traceback" not in err, err
        assert err.count("\n") == 1, "one line: %r" % err
        for word in ("tokenizer.json", *words):
            assert word in err, "%r expected in %r" % (word, err)


@pytest.mark.parametrize("changes, name, found", REFUSED, ids=lambda value: json.dumps(value)[:70])
def test_what_is_not_served_is_refused_by_name(changes, name, found, sources):
    check(sources, "gpt2", changes, name, found)


@pytest.mark.parametrize("key, value, found", QWEN2)
def test_other_splits_are_refused(key, value, found, sources):
    check(sources, "qwen2", {"pre_tokenizer.pretokenizers.0." + key: value}, "pre_tokenizer is", found)


def test_a_split_that_is_split_again_is_refused(sources):
    check(sources, "qwen2", {"pre_tokenizer.pretokenizers.1.use_regex": True}, "use_regex behind a Split")


FIRST = "post_processor.processors.1.single.0"
FIRST_IDS = "post_processor.processors.1.special_tokens.<|begin_of_text|>.ids"


@pytest.mark.parametrize("place, value", [
    *((FIRST_IDS, [id]) for id in (-5, 1305, 2**40, True, "1299", None)), (FIRST_IDS, []), (FIRST_IDS, [1299, 1300]),
    *((FIRST, {"SpecialToken": token}) for token in ("x", {"id": ["x"]}, {"id": "x"}, {})), (FIRST, 5)])
def test_the_token_before_a_text_is_one_of_the_vocabulary(place, value, sources, tmp_path):
    source = sources["llama3"][0]
    (source / "tokenizer.json").write_text(changed("llama3", {place: value}))
    got = convert(source, "--output", tmp_path / "model")
    assert got.status == 1 and got.err.count("\n") == 1 and not (tmp_path / "model").exists()
    for word in ("tokenizer.json", "post_processor puts", "special_tokens", "0..1304"):
        assert word in got.err, got.err


def test_white_space_may_precede_the_object(sources, tmp_path):
    source = sources["gpt2"][0]
    (source / "tokenizer.json").write_text("\n " + changed("gpt2", {}))
    got = convert(source, "--output", tmp_path / "model")
    assert (got.status, got.err, inspect(tmp_path / "model")) == (0, "", (0, ""))


@pytest.mark.parametrize("case, changes", [
    *((case, {}) for case in SIZES),
    ("gpt2", {"normalizer": step("NFC")}), ("gpt2", {"normalizer": sequence("normalizers")}),
    ("gpt2", {"normalizer": sequence("normalizers", step("NFC"))}),
    ("gpt2", {"pre_tokenizer": sequence("pretokenizers", step("Digits", individual_digits=True), LEVEL)}),
    ("gpt2", {"pre_tokenizer": sequence("pretokenizers", LEVEL)}), ("gpt2", {"post_processor": None}),
    ("gpt2", {"decoder": sequence("decoders", step("ByteLevel")), "model.unk_token": ""}),
    ("gpt2", {"truncation": {"max_length": 8}, "model.ignore_merges": True}),
    *(("qwen2", {"pre_tokenizer.pretokenizers.0.pattern.Regex": pattern}) for pattern in (
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"))])
def test_what_is_served_is_taken_by_both(case, changes, sources):
    assert both(sources, case, changes) == [(0, ""), (0, "")]
