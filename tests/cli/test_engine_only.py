"""pkmserve-engine, the program without HTTP, and its variant without SentencePiece."""

import json
import re

import pytest

import cli_harness
from cli_harness import MODEL, PROGRAM, fails, ok, run

ENGINE = PROGRAM.parent / "pkmserve-engine"
IDS_ONLY = PROGRAM.parent / "pkmserve-ids"
IDS = "1 321 816 1066 269 310 3041 295 357"


@pytest.fixture
def program(monkeypatch):
    """Makes the harness run another program."""
    return lambda path: monkeypatch.setattr(cli_harness, "PROGRAM", path)


def score(*arguments):
    return json.loads(ok("score", "--json", *arguments))["aggregate"]


def test_scores_as_the_whole_program_does(program, tmp_path):
    ids, text = tmp_path / "ids", tmp_path / "text"
    ids.write_text(IDS)
    text.write_text("It was a dark night.")
    whole = score("--ids", ids), score(text)
    program(ENGINE)
    assert (score("--ids", ids), score(text)) == whole
    program(IDS_ONLY)
    without = score("--ids", ids)  # and without a tokenizer, nobody knows the text's bytes
    assert without["sum_logprob"] == whole[0]["sum_logprob"] and without["n_bytes"] is None


def test_serve_says_that_there_is_no_http_and_help_does_not_list_it(program):
    serve = re.compile(r"^  serve .*\n", re.M)
    whole = ok("help")
    assert serve.search(whole)
    program(ENGINE)
    assert "every command but serve" in fails(1, "serve", "--port", "0")
    assert ok("help") == serve.sub("", whole)


@pytest.mark.parametrize("kind", ["man", "bash", "zsh", "fish"])
def test_its_manual_page_and_completions_do_not_name_serve(program, kind):
    names = re.compile(r"\bserve\b|overload.{1,2}status")  # the command, and an option that it alone has
    whole = ok("help", kind)
    assert len(names.findall(whole)) >= 3
    program(ENGINE)
    here = ok("help", kind).replace("serve also loads", "")  # of --check, whose help is the same everywhere
    assert not names.search(here), names.search(here)
    for word in ("examples", "bptt", "resume"):
        assert here.count(word) == whole.count(word) > 0


def test_without_sentencepiece_text_and_tokenizers_are_refused(program, tmp_path):
    program(IDS_ONLY)
    named = fails(1, "score", "--tokenizer", MODEL / "tokenizer.model", "--ids", tmp_path)
    assert "without SentencePiece" in named and "--ids" in named
    done = run("generate", "--max-tokens", "2", "a text")
    assert done.returncode == 1 and "--ids" in done.stderr.splitlines()[-1]
    assert "event=tokenizer_unused" in done.stderr and "tokenizer.model" in done.stderr


def test_without_sentencepiece_ids_are_generated(program):
    program(IDS_ONLY)
    done = run("generate", "--ids", "--temperature", "0", "--max-tokens", "5", IDS)
    assert done.returncode == 0 and len(done.stdout.split()) == 5, done.stderr
