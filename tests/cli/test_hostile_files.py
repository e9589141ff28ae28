"""Files that were made to do harm: refused at the start, in one line that names them."""

import json
import os
import shutil
import struct
import subprocess
import time

import pytest

from cli_harness import LIMIT_S, MODEL, PROGRAM, fails, ok

BYTE_BPE = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "golden", "byte-bpe", "gpt2")


def varint(n):
    out = b""
    while n > 127:
        out, n = out + bytes([n & 127 | 128]), n >> 7
    return out + bytes([n])


def field(number, data):
    return varint(number << 3 | 2) + varint(len(data)) + data


def unit(offset=0, leaf=False, label=0):
    return struct.pack("<I", offset << 10 | leaf << 8 | label)


def charsmap(units, strings=b"abc\0", size=None):
    trie = b"".join(units) + unit() * (256 - len(units))
    return struct.pack("<I", len(trie) if size is None else size) + trie + strings


def model(tmp_path, tokenizer):
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        os.symlink(MODEL / name, folder / name)
    (folder / "tokenizer.model").write_bytes(tokenizer)
    return folder


# "A" (65) at the root's children: unit 0 has offset 0, so unit 65 is its child, whose value is at 65 ^ offset.
CHILD = [unit()] + [unit(label=255)] * 64 + [unit(1, leaf=True, label=65)]

CHARSMAPS = {
    "no trie": b"\0\0\0\0abc\0",
    "one unit": charsmap([], size=4)[:8] + b"abc\0",
    "a trie longer than the file": charsmap([], size=1 << 30),
    "a size that is no multiple": charsmap([], size=1022),
    "a root that leads out": charsmap([unit(1 << 20)]),
    "a value behind the strings": charsmap(CHILD[:64] + [struct.pack("<I", 1 << 31 | 4)] + CHILD[65:]),
    "strings without an end": charsmap([], b"abc"),
    "strings of no characters": charsmap([], b"\xff\0"),
}


@pytest.mark.parametrize("name", CHARSMAPS)
def test_a_map_of_characters_that_leads_out_of_itself(tmp_path, name):
    spec = field(3, field(1, b"x") + field(2, CHARSMAPS[name]))
    folder = model(tmp_path, (MODEL / "tokenizer.model").read_bytes() + spec)
    line = fails(1, "score", "--model", folder, "-", stdin="Aa hello")
    assert "tokenizer.model: normalizer_spec.precompiled_charsmap" in line and "damaged" in line


def test_a_map_of_characters_that_is_whole(tmp_path):
    """What those above are spoilt from: "A" is read as "abc"."""
    units = CHILD[:64] + [struct.pack("<I", 1 << 31)] + CHILD[65:]
    spec = field(3, field(1, b"x") + field(2, charsmap(units)) + b"\x18\0\x20\0")
    folder = model(tmp_path, (MODEL / "tokenizer.model").read_bytes() + spec)
    scored = [json.loads(ok("score", "--model", folder, "--json", "-", stdin=text))["results"][0]["n_tokens"]
              for text in ("A", "abc")]
    assert scored[0] == scored[1]


@pytest.mark.parametrize("bytes_, status", [(4096, 0), (4097, 1), (1 << 20, 1)])
def test_a_piece_of_many_bytes(tmp_path, bytes_, status):
    plain = (MODEL / "tokenizer.model").read_bytes()
    at, last = 0, None
    while plain[at] == 0x0a:  # field 1, the pieces, come first
        last, n, shift, at = at, 0, 0, at + 1
        while True:
            n |= (plain[at] & 127) << shift
            shift, at = shift + 7, at + 1
            if plain[at - 1] < 128:
                break
        at += n
    long = plain[:last] + field(1, field(1, b"a" * bytes_) + b"\x15" + struct.pack("<f", -9)) + plain[at:]
    folder = model(tmp_path, long)
    if status == 0:
        ok("score", "--model", folder, "-", stdin="hello")
    else:
        line = fails(1, "score", "--model", folder, "-", stdin="hello")
        assert "piece 4095 has %d bytes, the limit is 4096" % bytes_ in line


@pytest.mark.parametrize("damage, says", [
    ({"added_tokens": True}, "added_tokens"), ({"added_tokens": {}}, "added_tokens"),
    ({"added_tokens": "</s>"}, "added_tokens"), ({"model": [0, 0]}, "model"),
    ({"normalizer": {"type": "Sequence", "normalizers": {}}}, "normalizer"),
    ({"post_processor": {"type": "Sequence", "processors": {}}}, "post_processor")])
def test_lists_of_a_tokenizer_that_are_none(tmp_path, damage, says):
    """They are not taken for empty ones, which would give other ids without a word."""
    with open(os.path.join(BYTE_BPE, "tokenizer.json"), encoding="utf-8") as file:
        content = json.load(file)
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({**content, **damage}))
    assert "tokenizer.json: " + says in fails(1, "inspect", MODEL, "--tokenizer", path)


def test_links_to_nothing_are_not_files_that_are_missing(tmp_path):
    for name in ("model.sha256", "generation_config.json", "tokenizer.model", "model.safetensors.index.json"):
        folder = tmp_path / name
        shutil.copytree(MODEL, folder)
        (folder / name).unlink(missing_ok=True)
        os.symlink("/nowhere", folder / name)
        line = fails(1, "serve", "--check", "full", "--model", folder)
        assert name in line, line


def test_check_looks_at_who_may_ask(tmp_path):
    assert "33" in fails(2, "serve", "--check", "on", "--model", MODEL, "--trusted-proxies", "10.0.0.0/33")
    assert "nokeys" in fails(1, "serve", "--check", "on", "--model", MODEL, "--api-key-file", tmp_path / "nokeys")


def test_a_pipe_of_keys_that_nobody_writes_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "keys")
    line = fails(1, "serve", "--model", MODEL, "--port", "0", "--api-key-file", tmp_path / "keys")
    assert "no key in it" in line
    command = "exec %s serve --model %s --port 0 --check on --api-key-file <(sleep 1; echo secret)" % (PROGRAM, MODEL)
    begun = time.monotonic()
    done = subprocess.run(["bash", "-c", command], stdout=subprocess.PIPE, timeout=LIMIT_S, check=True)
    assert json.loads(done.stdout)["model"] and time.monotonic() - begun >= 1


def test_names_in_messages_are_one_line_of_characters(tmp_path):
    header = json.dumps({"a\nb\x1b[31m\x7f\u0085\u009b\u2028\u202eé": {"dtype": "F99", "shape": [1],
                                                                     "data_offsets": [0, 4]}}).encode()
    path = tmp_path / "odd.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 4)
    line = fails(1, "memory", "inspect", path)
    assert not any(ord(c) < 32 or 0x7f <= ord(c) < 0xa0 or c in "\u2028\u202e" for c in line) and "é" in line, line
