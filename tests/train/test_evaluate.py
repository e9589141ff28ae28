"""models/train/evaluate.py, decode.py and report.py on a small random model: their figures, and what they refuse."""

import json
import math
import re
import subprocess
import sys

import pytest

from conftest import ROOT, TRAIN

torch = pytest.importorskip("torch")
pytest.importorskip("sentencepiece")

import decode  # noqa: E402
import evaluate  # noqa: E402
from memory_llama import MemoryLlama  # noqa: E402
from model import Transformer  # noqa: E402
from test_trainer import FLAT, LLAMA, MEMORY, TINY  # noqa: E402

DEMO = str(ROOT / "models" / "demo")


def test_windows_have_each_token_once_and_are_full():
    for n in (1, 5, 6, 7, 12, 13, 31):
        ids, scored = list(range(100, 100 + n)), []
        for inputs, targets in evaluate.rolling_windows(ids, 1, 6):
            assert len(inputs) == min(6, n) and inputs[-len(targets) + 1:] == targets[:-1] or len(targets) == 1
            begin = targets[0] - 100
            before = ([1] + ids)[:begin + 1]
            assert inputs[:len(inputs) - len(targets) + 1] == before[-(len(inputs) - len(targets) + 1):]
            scored += targets
        assert scored == ids


def test_words_bytes_and_a_memory_of_zeros_are_counted(tmp_path):
    text = "Where is the spear of Yeldene  kept?\n\nIn the house of Quendow."
    (tmp_path / "t.txt").write_text(text)
    plain = evaluate.evaluate(DEMO, str(tmp_path / "t.txt"), 4, False)
    zero = evaluate.evaluate(DEMO, str(tmp_path / "t.txt"), 4, True)
    assert plain["words"] == len(re.findall(r"\s+", text)) + 1 and plain["bytes"] == len(text)
    assert plain["byte_perplexity"] == pytest.approx(math.exp(plain["nll"] / len(text)))
    assert zero["memory"] == "zero" and zero["nll"] > plain["nll"] + 1
    assert zero["usage"] == plain["usage"] or zero["usage"] > 0


def test_bits_of_a_stream_are_those_of_all_bytes_but_the_first(tmp_path):
    (tmp_path / "t.txt").write_text("A small boat came down the river.\n")
    found = evaluate.evaluate(DEMO + "-bytes", str(tmp_path / "t.txt"), 4, False)
    assert found["tokens"] == 33 and found["bits_per_byte"] == pytest.approx(found["nll"] / 33 / math.log(2))


@pytest.mark.parametrize("args, said", [
    (("--text", "empty.txt"), "empty.txt: the text is empty"),
    (("--text", "none.txt"), "none.txt: No such file"),
    (("--text", "short.txt", "--parity", "p.json"), "--parity: the text must have lines of 300 tokens"),
    (("--text", "short.txt", "--batch", "0"), "--batch is 0, but must be at least 1"),
])
def test_what_cannot_be_evaluated_is_named(tmp_path, args, said):
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "short.txt").write_text("A word.\n")
    done = subprocess.run([sys.executable, TRAIN / "evaluate.py", "--model", DEMO, *args], capture_output=True, text=True,
                          cwd=tmp_path)
    assert done.returncode in (1, 2) and said in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("change", [
    {"memories": [MEMORY | {"layer": 0}, MEMORY | {"layer": 1, "values_of": 0}]}, {"tie_output": False}, LLAMA])
def test_a_decoder_computes_what_the_model_does(change):
    torch.manual_seed(1)
    config = (change if "rope_theta" in change else TINY | change) | {"vocab_size": 50}
    model = (MemoryLlama if "rope_theta" in change else Transformer)(config)
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm1d):
            torch.nn.init.normal_(module.running_mean)
            torch.nn.init.uniform_(module.running_var, 0.5, 2)
    for name, p in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(p, std=0.3)
    model.eval()
    ids = torch.randint(0, 50, (2, 12))
    with torch.no_grad():
        due = model.output_layer()(model(ids))
    decoder = decode.make_decoder(model, torch.float, 2, 12)
    parts = [decoder.hidden(ids[:, :8])] + [decoder.hidden(ids[:, i:i + 1], 0, i) for i in range(8, 12)]
    torch.testing.assert_close(decoder.logits(torch.cat(parts, 1)), due, rtol=1e-4, atol=1e-4)


def test_a_memory_behind_a_layer_is_not_passed_over():
    model = Transformer(TINY | {"vocab_size": 50, "memories": [FLAT]}).eval()
    with pytest.raises(SystemExit, match="behind a layer"):
        decode.make_decoder(model, torch.float, 1, 4)


def test_runs_of_one_name_are_both_drawn_and_none_is_said(tmp_path):
    for folder in ("a/run", "b/run", "c"):
        (tmp_path / folder).mkdir(parents=True)
        lines = [json.dumps({"step": step, "loss": 3.0 / step}) for step in range(1, 5)]
        (tmp_path / folder / "log.jsonl").write_text("" if folder == "c" else "\n".join(lines))

    def draw(*runs):
        return subprocess.run([sys.executable, TRAIN / "report.py", "--runs", *runs, "--out", "x.svg"],
                              capture_output=True, text=True, cwd=tmp_path)

    assert draw("a/run", "b/run").returncode == 0
    assert all(name in (tmp_path / "x.svg").read_text() for name in ("a/run training", "b/run training"))
    for runs, said in ((["c"], "c: no losses of two steps yet"), (["none"], "none/log.jsonl: No such file")):
        done = draw(*runs)
        assert done.returncode == 1 and said in done.stderr and "Traceback" not in done.stderr
