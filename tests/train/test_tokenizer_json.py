"""tokenizer.json beside tokenizer.model: made from it, and the same to the transformers library."""

import json

import pytest

import tokenizer_json
from conftest import ROOT

DEMO = ROOT / "models" / "demo"


def test_the_shipped_files_are_those_of_the_tokenizer():
    pieces = tokenizer_json.read_model(DEMO / "tokenizer.model")
    config = json.loads((DEMO / "config.json").read_text())
    assert len(pieces) == config["vocab_size"]
    made = json.loads(json.dumps(tokenizer_json.tokenizer(pieces, config)))
    assert json.loads((DEMO / "tokenizer.json").read_text()) == made
    assert json.loads((DEMO / "tokenizer_config.json").read_text()) == \
        tokenizer_json.tokenizer_config(pieces, config)


def test_pieces_and_special_tokens():
    pieces = tokenizer_json.read_model(DEMO / "tokenizer.model")
    made = tokenizer_json.tokenizer(pieces, {"add_bos": True, "bos_token_id": 1})
    assert [text for text, *_ in pieces[:4]] == ["<s>", "</s>", "<pad>", "<unk>"]
    assert {x["content"] for x in made["added_tokens"] if x["special"]} == {"<s>", "</s>", "<pad>", "<unk>"}
    assert [x["content"] for x in made["added_tokens"] if not x["special"]] == ["\n"]
    assert made["model"]["byte_fallback"] and made["model"]["unk_id"] == 3
    assert made["post_processor"]["special_tokens"]["</s>"]["ids"] == [1]
    assert tokenizer_json.tokenizer(pieces, {})["post_processor"] is None
    made = tokenizer_json.tokenizer_config(pieces, {"max_position": 64, "eos_token_id": 1, "pad_token_id": 0})
    assert {key: value for key, value in made.items() if key.endswith("_token")} == {
        "eos_token": "</s>", "pad_token": "<s>"}, "a token that the model has not is not named"


@pytest.mark.parametrize("content", [b"", b"\xff" * 20, b"\x0a\x05\x0a\x03abc", b"{}"])
def test_what_is_no_such_model_is_refused_by_name(tmp_path, content):
    path = tmp_path / "tokenizer.model"
    path.write_bytes(content)
    with pytest.raises(SystemExit, match="tokenizer.model: (no SentencePiece|only unigram)"):
        tokenizer_json.read_model(path)


def test_transformers_reads_the_same_tokens():
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(DEMO))
    cases = json.loads((DEMO / "parity.json").read_text())["cases"]
    assert len(cases) > 0
    for case in cases:
        assert tokenizer(case["text"])["input_ids"] == case["ids"]
        assert tokenizer.decode(case["ids"], skip_special_tokens=True) == case["text"]
    for text in ("caf\u00e9 \u65e5\u672c\u8a9e \U0001f600", "  two  spaces ", "a\n\nb\n", ""):
        assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == text
