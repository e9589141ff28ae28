"""models/train/windows.py and streams.py: where windows and streams begin, and what is measured of them."""

import math
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
np = pytest.importorskip("numpy")

import streams  # noqa: E402
import windows  # noqa: E402


def test_every_second_window_is_moved_on_to_the_next_document(tmp_path):
    """Ids are places, but for bos, so a row tells where it was read."""
    ids = np.arange(1000) + 2
    ends = np.arange(0, 1000, 37)
    ids[ends] = 1
    ids.astype("<u2").tofile(tmp_path / "train.bin")
    batches = windows.Batches(tmp_path / "train.bin", 16, 4, 1, 7, 16, "cpu")
    moved, plain = [], []
    for step in range(60):
        rows, _ = batches.train(step)
        for n, row in enumerate(rows.tolist()):
            (moved if n % 2 else plain).append((row[0], row[1] - 3))
    assert {place % 16 for _, place in plain} == {0}
    assert all(first == (1 if place % 37 == 0 else place + 2) for first, place in plain)
    assert {first for first, _ in moved} == {1}
    for _, place in moved:  # At a document's end, or at a window's start behind which none is near.
        assert place % 37 == 0 or place % 16 == 0 and -place % 37 >= 16
    assert len({place for _, place in moved}) > 20


@pytest.mark.parametrize("n_id, n_window", [(48, 2), (49, 3), (64, 3)])
def test_held_out_windows_are_all_that_have_a_target_for_each_token(tmp_path, n_id, n_window):
    np.arange(n_id, dtype="<u2").tofile(tmp_path / "valid.bin")
    batches = windows.Batches(tmp_path / "valid.bin", 16, 2, 1, 7, 16, "cpu")
    rows, targets = map(torch.cat, zip(*batches.valid(99)))
    assert rows.flatten().tolist() == list(range(16 * n_window)) and torch.equal(targets, rows + 1)


@pytest.mark.parametrize("n_pos, longest", [(16, None), (31, 16), (32, None), (64, 32)])
def test_positions_that_no_window_reaches_are_named(tmp_path, capsys, n_pos, longest):
    for name in ("train.bin", "valid.bin"):
        np.ones(100, "<u2").tofile(tmp_path / name)
    args = SimpleNamespace(data=str(tmp_path), n_tok=16, batch=3, seed=1, device="cpu")
    windows.Windows(args, SimpleNamespace(config={"max_position": n_pos, "bos_token_id": 1, "vocab_size": 2}))
    said = capsys.readouterr().err
    assert said == "" if longest is None else f"positions from {longest} to {n_pos - 1} are not trained" in said


class Frequencies(torch.nn.Module):
    """A model for which what was before tells nothing."""

    config = {"max_position": 16, "bos_token_id": 1, "vocab_size": 5}
    memories = {}

    def __init__(self):
        super().__init__()
        self.output = torch.nn.Linear(4, 5)
        torch.nn.init.zeros_(self.output.weight)

    def output_layer(self):
        return self.output

    def forward(self, ids, counts):
        return torch.zeros(*ids.shape, 4)


def test_a_validations_loss_is_the_mean_of_all_tokens_of_each_text(tmp_path):
    rng = np.random.default_rng(2)
    for name in ("train.bin", "valid.bin", "valid-facts.bin"):
        rng.integers(5, size=16 * 4 + 1).astype("<u2").tofile(tmp_path / name)
    args = SimpleNamespace(data=str(tmp_path), n_tok=16, batch=3, seed=1, device="cpu", valid_windows=9)
    model = Frequencies()
    with torch.no_grad():
        found = windows.Windows(args, model).validate()
    assert found.keys() == {"valid_loss", "valid_ppl", "valid_facts_loss", "valid_facts_ppl"}
    for name in ("valid", "valid-facts"):
        targets = np.fromfile(tmp_path / f"{name}.bin", "<u2")[1:].astype(int)
        due = -float(model.output.bias.detach().log_softmax(0)[targets].mean())
        key = name.replace("-", "_")
        assert (found[f"{key}_loss"], found[f"{key}_ppl"]) == (pytest.approx(due), pytest.approx(math.exp(due)))


def test_use_of_a_memory_is_counted_by_weight():
    count = windows.SlotCount(8)
    count(torch.tensor([[0, 1], [0, 1]]), torch.tensor([[0.5, 0.5], [0.5, 0.5]]))
    assert count.usage() == 0.25 and count.kl() == pytest.approx(math.log(8 / 2))
    count(torch.tensor([[2, 3]]), torch.tensor([[3.0, 3.0]]))
    shares = [1 / 8, 1 / 8, 3 / 8, 3 / 8]
    assert count.kl() == pytest.approx(math.log(8) + sum(z * math.log(z) for z in shares))


def test_streams_begin_anywhere_at_a_lines_end_and_behind_one():
    text = np.frombuffer((b"abcdefg" + b"\n") * 400, np.uint8)
    pieces = streams.Pieces(text, 8, 6, 2, 5)
    first = []
    for _ in range(200):
        ids, targets, begun = pieces.next()
        assert torch.equal(ids[:, 1:], targets[:, :-1])
        first += [int(ids[row, 0]) for row in begun]
    share = [first.count(x) / len(first) for x in (ord("\n"), ord("a"))]
    # A third of each kind, and an eighth of those that begin anywhere.
    assert all(0.3 < x < 0.45 for x in share) and len(set(first)) == 8


class Recorder(torch.nn.Module):
    """A model that notes its past, and has one layer of spans."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Module()
        self.layer.spans, self.layer.max_span = torch.nn.Parameter(torch.tensor([0.5, 1.0])), 10
        self.layers, self.output, self.seen = [self.layer], torch.nn.Linear(4, 256), []

    def start(self, n_seq, dtype):
        return torch.zeros(1, n_seq, 10, 4, dtype=dtype)

    def spans(self):
        return 10 * self.layer.spans[None]

    def forward(self, ids, past):
        self.seen.append(past.clone())
        past += 1
        return torch.zeros(*ids.shape, 4, requires_grad=True)


def test_a_stream_that_begins_forgets_and_long_spans_cost(tmp_path):
    for name in ("train.txt", "valid.txt"):
        (tmp_path / name).write_bytes(b"some text\n" * 100)
    args = SimpleNamespace(data=str(tmp_path), batch=3, n_tok=8, stream_blocks=2, valid_windows=3, seed=1, device="cpu",
                           precision="f32", span_init=4, span_cost=0.01)
    task = streams.Streams(args, Recorder())
    assert task.model.layer.spans.tolist() == pytest.approx([0.4, 0.4])
    begins, inner = [], task.pieces.next

    def watched():
        found = inner()
        begins.append(found[2])
        return found

    task.pieces.next = watched
    with torch.no_grad():
        task.model.layer.spans[:] = torch.tensor([0.5, 1.0])
        task.model.output.weight.zero_()
        task.model.output.bias.zero_()
    for step in range(12):
        loss = task.loss(step)
        assert float(loss.detach()) == pytest.approx(math.log(256) + 0.01 * 7.5)
        past = task.model.seen[-1][0, :, 0, 0]
        age = [step - max(i for i, rows in enumerate(begins) if row in rows) for row in range(3)]
        assert past.tolist() == age
    assert sum(map(len, begins)) > 6
    with torch.no_grad():
        found = task.validate()
    assert (found["valid_loss"], found["valid_bits"]) == (pytest.approx(math.log(256)), pytest.approx(8))
    assert (found["span_mean"], found["span_max"]) == (pytest.approx(7.5), pytest.approx(10))
    with torch.no_grad():
        task.model.layer.spans[:] = torch.tensor([-0.1, 1.2])
    task.stepped()
    assert task.model.layer.spans.tolist() == [0, 1]
