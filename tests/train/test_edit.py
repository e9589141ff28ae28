"""models/train/edit.py: changes of rows are read as a changed table would be, and files name their model."""

import json
import os
import struct
import subprocess

import pytest

from conftest import ROOT

torch = pytest.importorskip("torch")
pytest.importorskip("sentencepiece")

import edit  # noqa: E402
import export  # noqa: E402
from memory import Memory  # noqa: E402

PROGRAM = os.environ.get("PKMSERVE", str(ROOT / "build" / "pkmserve"))
SHAPE = {"n_head": 2, "k_top": 3, "n_key": 4, "d_key": 4, "n_slot": 16}


def test_changed_rows_are_read_as_a_changed_table_is():
    torch.manual_seed(1)
    memory, x, slots = Memory(6, SHAPE).eval(), torch.randn(5, 6), torch.arange(0, 16, 2)
    changes = edit.Edit(memory.values.weight.data, slots)
    assert torch.equal(changes.rows(), memory.values.weight.data[slots])
    before = memory(x)
    memory.edit = (changes,)
    assert torch.allclose(memory(x), before)
    with torch.no_grad():
        changes.change.normal_()
    for parameter in memory.parameters():
        parameter.requires_grad_(False)
    got = memory(x)
    got.square().sum().backward()
    assert memory.values.weight.grad is None and changes.change.grad.abs().sum() > 0
    memory.edit = ()
    memory.values.weight.data[slots] = changes.rows().detach()
    assert torch.allclose(memory(x), got.detach(), atol=1e-5)


def test_lists_of_slots_of_another_model_are_refused(tmp_path):
    demo, text, counts, slots = ROOT / "models/demo", tmp_path / "t", tmp_path / "c", tmp_path / "s"
    text.write_text("A dark night.")
    (tmp_path / "b").write_text("It is a truth.")
    for out, path in ((counts, text), (tmp_path / "d", tmp_path / "b")):
        subprocess.run([PROGRAM, "memory", "count", "--model", demo, path, "-o", out], check=True, capture_output=True)
    subprocess.run([PROGRAM, "memory", "rank", counts, "--background", tmp_path / "d", "--top", "9", "-o", slots],
                   check=True, capture_output=True)
    listed = edit.read_slots(str(slots), edit.identity(edit.open_safetensors(demo / "model.safetensors")))
    assert sum(map(len, listed.values())) == 9
    with pytest.raises(SystemExit, match="of another model"):
        edit.read_slots(str(slots), "0" * 64)
    with pytest.raises(SystemExit, match="no list of slots"):
        edit.read_slots(str(counts), "0" * 64)


def safetensors(header, data=b"", size=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if size is None else size) + text + data


ONE = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize("content, said", [
    (b"", "shorter than the 8 bytes"),
    (safetensors(b"{}", size=1 << 60), "a header of 1152921504606846976 bytes"),
    (safetensors(b"{"), "not JSON"),
    (safetensors(b"[" * 100000), "not JSON"),
    (safetensors([ONE]), "no object"),
    (safetensors(b'{"a": %s, "a": %s}' % ((json.dumps(ONE).encode(),) * 2), bytes(8)), "a key twice"),
    (safetensors({"__metadata__": {"format": 3}}), "no object of texts"),
    (safetensors({"__metadata__": "x"}), "no object of texts"),
    (safetensors({"a": [1]}), r"counts below 2\^63 expected"),
    (safetensors({"a": ONE | {"dtype": ["F32"]}}, bytes(8)), "no type of safetensors"),
    (safetensors({"a": ONE | {"shape": [-2]}}, bytes(8)), r"counts below 2\^63 expected"),
    (safetensors({"a": ONE | {"shape": [1 << 62, 1 << 62]}}, bytes(8)), "data_offsets are"),
    (safetensors({"a": ONE | {"data_offsets": [8, 0]}}, bytes(8)), "data_offsets are"),
    (safetensors({"a": ONE, "b": ONE}, bytes(8)), "begins at byte 0"),
    (safetensors({"a": ONE | {"data_offsets": [8, 16]}}, bytes(16)), "begins at byte 8"),
    (safetensors({"a": ONE}, bytes(7)), "but 7 are there"),
    (safetensors({"a": ONE}, bytes(9)), "but 9 are there"),
])
def test_hostile_headers_are_refused(tmp_path, content, said):
    """By both who read weights and who reads lists of slots."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    for read in (export.load_safetensors, lambda path: edit.read_slots(path, "0" * 64)):
        with pytest.raises(SystemExit, match="model.safetensors: no safetensors file that can be read: .*" + said):
            read(path)


@pytest.mark.parametrize("header, n_byte, said", [
    ({"a": ONE | {"dtype": "F64", "shape": [1]}}, 8, "'a' is of type F64"),
    ({"a.scale": ONE}, 8, "'a' is missing"),
    ({"a.scale": ONE, "a": {"dtype": "I8", "shape": [3, 1], "data_offsets": [8, 11]}}, 11, "'a' has others"),
])
def test_tensors_that_are_not_read_are_named(tmp_path, header, n_byte, said):
    (tmp_path / "m").write_bytes(safetensors(header, bytes(n_byte)))
    with pytest.raises(SystemExit, match=said):
        export.load_safetensors(tmp_path / "m")


def test_types_are_widened(tmp_path):
    header = {"f": ONE, "h": {"dtype": "F16", "shape": [1], "data_offsets": [8, 10]},
              "b": {"dtype": "BF16", "shape": [1, 1], "data_offsets": [10, 12]},
              "i.scale": {"dtype": "F32", "shape": [2], "data_offsets": [12, 20]},
              "i": {"dtype": "I8", "shape": [2, 1], "data_offsets": [20, 22]},
              "e": {"dtype": "F32", "shape": [0, 3], "data_offsets": [22, 22]}}
    data = struct.pack("<2f", 1.5, -2) + struct.pack("<e", 0.25) + b"\x40\x40" + struct.pack("<2f2b", 0.5, 2, -3, 4)
    (tmp_path / "m").write_bytes(safetensors(header, data))
    found = {name: tensor.tolist() for name, tensor in export.load_safetensors(tmp_path / "m").items()}
    assert found == {"f": [1.5, -2], "h": [0.25], "b": [[3.0]], "i": [[-1.5], [8.0]], "e": []}


@pytest.mark.parametrize("slots, more, said", [
    ([2, 2], {}, "ascending slots from 0 to 15"), ([3, 1], {}, "ascending slots"), ([-1, 3], {}, "ascending slots"),
    ([3, 16], {}, "ascending slots from 0 to 15"), ([3, 4], {"dtype": "F32"}, "of F32 with 1 dimensions"),
    ([3, 4], {"shape": [1, 2]}, "of I32 with 2 dimensions"), ([3, 4], None, "a list without slots"),
])
def test_slots_that_no_overlay_can_have_are_refused(tmp_path, slots, more, said):
    header = {"__metadata__": {"format": edit.SLOTS_FORMAT, "model": "m"}}
    if more is not None:
        header["memories.0.slots"] = ONE | {"dtype": "I32"} | more
    (tmp_path / "s").write_bytes(safetensors(header, struct.pack("<2i", *slots) if more is not None else b""))
    model = torch.nn.Module()
    model.memories = {"0_in": Memory(6, SHAPE)}
    with pytest.raises(SystemExit, match=said):
        edit.add_edits(model, edit.read_slots(tmp_path / "s", "m"))


def test_rows_of_zeros_alone_are_refused():
    """A step of theirs would be none, and the share by which they change no number."""
    model = torch.nn.Module()
    model.memories = {"0_in": Memory(6, SHAPE)}
    table = model.memories["0_in"].values.weight.data
    table[:3] = 0
    with pytest.raises(SystemExit, match="memory 0: all listed rows are zeros"):
        edit.add_edits(model, {0: torch.arange(3)})
    assert len(edit.add_edits(model, {0: torch.arange(4)})[0].rows()) == 4


def test_a_prompt_is_read_and_not_learned(tmp_path):
    class Uniform(torch.nn.Module):
        """Every id is as likely; tells what it read."""
        config = {"bos_token_id": 1, "max_position": 512}

        def output_layer(self):
            return torch.nn.Identity()

        def forward(self, inputs):
            self.read = inputs
            return torch.zeros(*inputs.shape, 8192)

    path, demo = tmp_path / "texts.jsonl", str(ROOT / "models/demo")
    path.write_text('{"text": "The lamp is made of gold.", "prompt": "The lamp is made of"}\n'
                    '{"text": "A dark night."}\n')
    texts = edit.read_texts([str(path)])
    assert texts == [("The lamp is made of gold.", "The lamp is made of"), ("A dark night.", "")]
    model, plain = Uniform(), edit.lessons(Uniform, demo, [(text, "") for text, _ in texts])
    taught = edit.lessons(model, demo, texts)
    assert [each.ids for each in taught] == [each.ids for each in plain]
    n = len(edit.lessons(model, demo, [("The lamp is made of", "")])[0].ids)
    assert [each.given for each in plain] == [1, 1] and [each.given for each in taught] == [n, 1]
    assert len(edit.losses(model, taught)) == sum(each.n_learned() for each in taught)
    assert len(edit.losses(model, plain)) - len(edit.losses(model, taught)) == n - 1
    assert taught[0].ids[:-1] in model.read.tolist()
    path.write_text('{"text": "The lamp is gold.", "prompt": "A lamp"}\n')
    with pytest.raises(SystemExit, match="must begin with its prompt"):
        edit.read_texts([str(path)])
    with pytest.raises(SystemExit, match="no tokens to learn"):
        edit.lessons(model, demo, [("The lamp", "The lamp")])


def test_texts_are_read_as_the_program_reads_them(tmp_path):
    """`pkmserve memory count` keeps line ends, so rows of the tokens that it counts are trained."""
    (tmp_path / "t.txt").write_bytes(b"One\r\ntwo\rthree\n")
    (tmp_path / "t.jsonl").write_bytes('{"text": "a\u2028\\r\\nb"}\r\n\r\n{"text": "c"}'.encode())
    assert edit.read_texts([str(tmp_path / "t.txt"), str(tmp_path / "t.jsonl")]) == [
        ("One\r\ntwo\rthree\n", ""), ("a\u2028\r\nb", ""), ("c", "")]
    for name in ("x.txt", "x.jsonl", "x.txt.xz"):
        (tmp_path / name).write_bytes(b"a\xff\n")
        with pytest.raises(SystemExit, match=f"{name}: no text in UTF-8"):
            edit.read_texts([str(tmp_path / name)])


def test_texts_and_lists_that_are_none_are_named(tmp_path, capsys):
    (tmp_path / "t.jsonl").write_text('{"text": "a"}\n{"text": 3}\n')
    with pytest.raises(SystemExit, match="t.jsonl:2: an object is expected"):
        edit.read_texts([str(tmp_path / "t.jsonl")])
    for content in (b"", b"some text that is long enough"):
        (tmp_path / "slots").write_bytes(content)
        with pytest.raises(SystemExit, match="slots: no safetensors file that can be read"):
            edit.read_slots(str(tmp_path / "slots"), "0" * 64)

    class Short:
        config = {"bos_token_id": 1, "max_position": 8}

    found = edit.lessons(Short, str(ROOT / "models/demo"), [("One day a small boat came down the river to us.", "")])
    assert len(found[0].ids) == 8 and "texts longer than the model's 8 positions: 1 of 1" in capsys.readouterr().err


def test_a_step_is_as_long_as_the_rows_are():
    """The first step of Adam moves each number by its rate: that share of the rows' numbers."""
    torch.manual_seed(2)
    model = torch.nn.Module()
    model.memory, x = Memory(6, SHAPE | {"k_top": 4}).eval(), torch.randn(40, 6)
    changes = edit.Edit(100 * model.memory.values.weight.data, torch.arange(16))
    model.memory.edit = (changes,)

    class Taught:
        ids = [1, 2]

        def n_learned(self):
            return 1

    losses, edit.losses = edit.losses, lambda model, batch: model.memory(x).square().sum()[None]
    try:
        edit.train(model, {0: changes}, [Taught()], 1, 0.1, 0, 10)
    finally:
        edit.losses = losses
    moved = changes.change.detach().abs()
    typical = float(changes.base.square().mean().sqrt())
    assert float(moved[moved > 0].median()) == pytest.approx(0.1 * typical, rel=0.01)
