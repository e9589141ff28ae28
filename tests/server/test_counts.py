"""GET /memory/counts: what all traffic has read, slot by slot, at the admin port alone."""

import base64
import json
import struct
import subprocess

import numpy
import pytest
import requests

from server_harness import DEMO, PATIENCE, PROGRAM, Server, error_of, eventually, free_port

TEXTS = ["It is a truth universally acknowledged.", "A dark night, and a storm.", "A truth."]


@pytest.fixture(scope="module")
def counting():
    """A server that counts, and the address of its admin port."""
    port = free_port()
    with Server("--admin-port", str(port), "--memory-counts", "on", wait=False) as server:
        server.port = eventually(lambda: server.find_port(other_than=port), "the other port")
        server.url = "http://127.0.0.1:%d" % server.port
        server.wait_ready()
        yield server, "http://127.0.0.1:%d" % port


def counts(admin):
    """-> tensors by name, metadata"""
    answer = requests.get(admin + "/memory/counts", timeout=PATIENCE)
    assert answer.status_code == 200 and answer.headers["content-type"] == "application/octet-stream"
    n, = struct.unpack("<Q", answer.content[:8])
    header, data = json.loads(answer.content[8:8 + n]), answer.content[8 + n:]
    metadata = header.pop("__metadata__")
    assert max(entry["data_offsets"][1] for entry in header.values()) == len(data)
    kinds = {"I64": "<i8", "F64": "<f8"}
    return {name: numpy.frombuffer(data[slice(*entry["data_offsets"])], kinds[entry["dtype"]])
            for name, entry in header.items()}, metadata


def hits(answer):
    """The slots and weights that "memory": "slots" told of one text, of memory 0."""
    block = answer["slots"][0]
    assert block["memories"] == [0]
    return [numpy.frombuffer(base64.b64decode(block[name]), kind)
            for name, kind in (("indices", "<i4"), ("weights", "<f4"))]


def test_counts_are_the_look_ups_of_all_traffic(counting, tmp_path):
    server, admin = counting
    before, start = counts(admin)
    told = server.ok("/score", {"text": TEXTS, "memory": "slots"})["results"]
    told += server.ok("/generate", {"prompt": TEXTS[0], "n": 2, "seed": 1, "max_tokens": 5, "ignore_eos": True,
                                    "memory": "slots"})["choices"]
    after, metadata = counts(admin)
    wanted = [numpy.array(before["memories.0." + name]) for name in ("reads", "weight", "documents")]
    n_position = 0
    for answer in told:
        slots, weights = hits(answer["memory"])
        n_position += answer["memory"]["slots"][0]["n_position"]
        numpy.add.at(wanted[0], slots, 1)
        numpy.add.at(wanted[1], slots, weights.astype("f8"))
        wanted[2][numpy.unique(slots)] += 1
    assert (after["memories.0.reads"] == wanted[0]).all() and (after["memories.0.documents"] == wanted[2]).all()
    assert abs(after["memories.0.weight"] - wanted[1]).max() < 1e-9
    assert int(metadata["documents"]) - int(start["documents"]) == len(told) == 5
    assert int(metadata["positions"]) - int(start["positions"]) == n_position


def test_the_commands_read_them_and_know_whose_they_are(counting, tmp_path):
    server, admin = counting
    server.ok("/score", {"text": TEXTS[1]})
    (tmp_path / "live").write_bytes(requests.get(admin + "/memory/counts", timeout=PATIENCE).content)
    (tmp_path / "text").write_text(TEXTS[2])
    for arguments in (["count", "--model", DEMO, tmp_path / "text", "-o", tmp_path / "task"],
                      ["add", tmp_path / "task", tmp_path / "live", "-o", tmp_path / "sum"],
                      ["hot", tmp_path / "sum"]):
        subprocess.run([PROGRAM, "memory", *map(str, arguments)], check=True, stdout=subprocess.DEVNULL)


def test_they_are_at_the_admin_port_and_only_read(counting):
    server, admin = counting
    error_of(server.get("/memory/counts"), 404, "route_not_found")
    error_of(requests.post(admin + "/memory/counts", timeout=PATIENCE), 405, "method_not_allowed")
    assert requests.head(admin + "/memory/counts", timeout=PATIENCE).status_code == 200
    assert server.get("/info").json()["defaults"]["memory_counts"] is True


def test_without_being_asked_nothing_is_counted():
    port = free_port()
    with Server("--admin-port", str(port), wait=False) as server:
        server.port = eventually(lambda: server.find_port(other_than=port), "the other port")
        server.url = "http://127.0.0.1:%d" % server.port
        server.wait_ready()
        answer = requests.get("http://127.0.0.1:%d/memory/counts" % port, timeout=PATIENCE)
        assert "--memory-counts on" in error_of(answer, 404, "counts_disabled")
