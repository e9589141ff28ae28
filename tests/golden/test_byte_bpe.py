"""Byte-level BPE through the server: /tokenize and /detokenize give the package's ids and texts, a stream
of tokens that cut characters is the whole text, /score reads text as its ids. The models' weights are
random: every token is as likely as any other, so that answers are full of halves of characters."""

import json
import shutil

import golden_harness as gh
import numpy as np
import pytest

FILES = gh.ROOT / "tests" / "golden" / "byte-bpe"
FOLDERS = ["gpt2", "llama3", "qwen2", "flags"]
WIDTH = 8


def load(path):
    return json.loads((FILES / path).read_text(encoding="utf-8"))


def write_model(directory, n_vocab, bos):
    """A model of one layer that hardly says anything."""
    rng = np.random.default_rng(1)
    shapes = {"embeddings.weight": (n_vocab, WIDTH), "norm.weight": (WIDTH,),
              "layers.0.attention_norm.weight": (WIDTH,), "layers.0.ffn_norm.weight": (WIDTH,),
              **{"layers.0.attention.%s.weight" % name: (WIDTH, WIDTH)
                 for name in ("query", "key", "value", "out")},
              "layers.0.ffn.gate.weight": (WIDTH, WIDTH), "layers.0.ffn.up.weight": (WIDTH, WIDTH),
              "layers.0.ffn.down.weight": (WIDTH, WIDTH)}
    config = {"model_type": "memory_llama", "vocab_size": n_vocab, "d_model": WIDTH, "n_layer": 1,
              "n_head": 2, "d_ff": WIDTH, "max_position": 16384, "rope_theta": 10000.0,
              "norm_eps": 1e-5, "tie_output": True}
    if bos is not None:
        config.update(bos_token_id=bos, add_bos=True)
    gh.write_model(directory, {name: rng.normal(0, 0.3, shape).astype(np.float32)
                               for name, shape in shapes.items()}, config)


@pytest.fixture(scope="module", params=FOLDERS)
def case(request, tmp_path_factory):
    """(server, expected.json); of gpt2 there are 23 rows more than tokens."""
    directory = tmp_path_factory.mktemp(request.param)
    due = {"folder": request.param, **load(request.param + "/expected.json")}
    template = due["with_template"]["ids"][0]
    write_model(directory, due["vocab_size"] + (23 if request.param == "gpt2" else 0),
                template if request.param == "llama3" else None)
    shutil.copy(FILES / request.param / "tokenizer.json", directory)
    server = gh.Server(directory)
    yield server, due
    server.stop()


def tokenize(server, text, **more):
    return server.post("/tokenize", {"prompt": text, "add_special_tokens": False, **more})["tokens"]


def test_texts_are_the_packages_ids(case):
    server, due = case
    for i, (row, ids) in enumerate(zip(load("texts.json"), due["ids"], strict=True)):
        if i % 4 == 0 or str(i) in due["ids_special_as_text"]:  # tests/engine has them all
            assert tokenize(server, row["text"]) == ids
            assert tokenize(server, row["text"], parse_special=False) == \
                due["ids_special_as_text"].get(str(i), ids)


def test_the_template_puts_its_token_first(case):
    server, due = case
    got = server.post("/tokenize", {"prompt": due["with_template"]["text"]})["tokens"]
    assert got == due["with_template"]["ids"]


def test_ids_are_the_packages_text(case):
    server, due = case
    n_vocab = due["vocab_size"]
    for row in due["decode"]:
        ids = [i for i in row["ids"] if i < n_vocab]
        assert server.post("/detokenize", {"tokens": ids})["prompt"] == \
            row.get("text_skip_special", row["text"])


def byte_strings(folder_file):
    """What each id adds to a text, by the alphabet as GPT-2's program makes it."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    alphabet = {chr(byte): byte for byte in plain}
    alphabet.update((chr(256 + i), byte) for i, byte in enumerate(sorted(set(range(256)) - set(plain))))

    def spelled(token):
        return bytes(alphabet[c] for c in token) if set(token) <= set(alphabet) else token.encode()

    file = load(folder_file)
    found = {i: spelled(token) for token, i in file["model"]["vocab"].items()}
    found.update((t["id"], b"" if t["special"] else spelled(t["content"])) for t in file["added_tokens"])
    return found


def test_a_stream_is_the_text_of_its_ids(case):
    server, due = case
    of = byte_strings(due["folder"] + "/tokenizer.json")
    n_cut = 0
    for seed in range(6):
        body = {"prompt": due["ids"][2], "max_tokens": 200, "temperature": 1.0, "seed": seed,
                "ignore_eos": True}
        whole = server.post("/generate", body)["choices"][0]
        due_text = b"".join(of.get(i, b"") for i in whole["token_ids"]).decode("utf-8", "replace")
        assert len(whole["token_ids"]) == 200 and whole["text"] == due_text
        n_cut += due_text.count("\ufffd")
        stream = server.session.post(server.url + "/generate", json={**body, "stream": True},
                                     timeout=gh.START_S)
        parts = [json.loads(line[6:]) for line in stream.content.decode("utf-8").split("\n")
                 if line.startswith("data: {")]
        assert "".join(part.get("text", "") for part in parts) == due_text
    assert n_cut > 20  # characters were cut, or the test shows nothing


def test_a_last_token_that_begins_a_character_is_told_by_what_it_completed(case):
    server, due = case
    of = byte_strings(due["folder"] + "/tokenizer.json")
    begun = []  # tokens of whole characters and the beginning of one more
    for i, spelled in of.items():
        known = spelled.decode("utf-8", "ignore")
        if known and spelled != known.encode() and spelled.startswith(known.encode()):
            begun.append((i, known))
    assert begun
    for i, known in begun[:4]:
        body = {"inputs": "The", "parameters": {"max_new_tokens": 1, "allowed_token_ids": [i],
                                                "details": True}}
        whole = server.post("/generate", body)
        stream = server.session.post(server.url + "/generate_stream", json=body, timeout=gh.START_S)
        event = json.loads(stream.content.decode("utf-8").strip()[len("data: "):])
        assert whole["details"]["tokens"][0]["text"] == known and event["token"]["text"] == known
        assert event["generated_text"] == whole["generated_text"] == known + "\ufffd"


def test_a_text_is_scored_as_its_ids(case):
    server, due = case
    for number in (2, 30, 100):
        text, ids = load("texts.json")[number]["text"], due["ids"][number]
        by_text = server.post("/score", {"text": text, "logprobs": 0, "add_bos": False})["results"][0]
        by_ids = server.post("/score", {"tokens": ids, "logprobs": 0})["results"][0]
        assert [t["id"] for t in by_text["tokens"]] == ids
        assert [t["logprob"] for t in by_text["tokens"]] == [t["logprob"] for t in by_ids["tokens"]]


def test_special_tokens_of_a_prompt_are_text(case):
    """Whoever writes a text cannot forge the end of one."""
    server, due = case
    texts = load("texts.json")
    for number, ids in list(due["ids_special_as_text"].items())[:3]:
        got = server.post("/score", {"text": texts[int(number)]["text"], "logprobs": 0,
                                     "add_bos": False})["results"][0]
        assert [t["id"] for t in got["tokens"]] == ids


@pytest.mark.parametrize("what, found", [
    ({"normalizer": {"type": "Lowercase"}}, 'normalizer is {"type":"Lowercase"}; served is null or NFC'),
    ({"decoder": None}, "decoder is null; served is ByteLevel")])
def test_a_server_refuses_what_it_does_not_do(tmp_path, what, found):
    write_model(tmp_path, 1001, None)
    (tmp_path / "tokenizer.json").write_text(json.dumps({**load("gpt2/tokenizer.json"), **what}))
    status, _, err = gh.run_program("inspect", "--model", tmp_path)
    assert status != 0 and "tokenizer.json: " + found in err
