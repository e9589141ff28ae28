"""The lines of models/convert/HF-MEMORY.md that save a module, run: what they write converts to what the module
computes, whatever options it was made with. The modules are memory_truth's, with the fields that the lines ask for."""

import re
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "golden"), str(ROOT / "tests" / "hf")]
import memory_truth as mt  # noqa: E402
import test_hf as served  # noqa: E402

SMALL = {"n_head": 2, "sizes": (5, 6, 7)}
SOFTMAX, RELU = torch.nn.Softmax(-1), torch.nn.ReLU()
PKM, PEER = {"query_norm": "layer", "place": "beside", **SMALL}, {"input_norm": "rms", "place": "replace", **SMALL}
CASES = {  # name on the page, names, options of the module, its fields
    "pkm": ("pkm", "product-key-memory", {"k_top": 3, **PKM}, {"heads": 2, "topk": 3}),
    "pkm-softmax": ("pkm", "product-key-memory", {"k_top": 3, **PKM},
                    {"heads": 2, "topk": 3, "gate_activation": SOFTMAX}),
    "pkm-relu": ("pkm", "product-key-memory", {"k_top": 3, "scores": "relu", **PKM},
                 {"heads": 2, "topk": 3, "gate_activation": RELU}),
    "peer-competing": ("peer", "peer", {"k_top": 3, **PEER},
                       {"heads": 2, "num_experts_per_head_topk": 3, "score_activation": SOFTMAX}),
    "peer": ("peer", "peer", {"k_top": 1, "scores": "relu", **PEER},
             {"heads": 2, "num_experts_per_head_topk": 1, "score_activation": RELU})}


def lines(name):
    """The program on the page that saves a module of that name, of layer 1, without the line that makes it."""
    programs = re.findall(r"(?:^    .*\n)+", (ROOT / "models/convert/HF-MEMORY.md").read_text(), re.MULTILINE)
    program, = (p for p in programs if "    %s = ..." % name in p)
    return re.sub(r'"layer": \d+', '"layer": 1', re.sub(r"(?m)^%s = .*$" % name, "", textwrap.dedent(program)))


@pytest.mark.parametrize("case", CASES)
def test_what_the_page_saves_is_what_the_module_computes(case, tmp_path, monkeypatch):
    name, names, options, fields = CASES[case]
    module = mt.MODULES[names](options)
    generator = torch.Generator().manual_seed(7)
    mt.fill(module, generator)
    for key, value in fields.items():
        setattr(module, key, value)
    monkeypatch.chdir(tmp_path)
    exec(lines(name), {name: module})
    monkeypatch.undo()
    memory = next(path for path in tmp_path.iterdir() if path.suffix in (".pt", ".safetensors"))
    model = served.converted(mt.BASES / "llama", tmp_path / "model", "--memory", memory, "--memory-config",
                             tmp_path / "memory.json", "--memory-names", names)
    base = mt.load(mt.BASES / "llama").double()
    mt.attach(base, {"layer": 1, **options}, module.double().eval())
    ids = torch.randint(0, 40, (mt.N_ID,), generator=generator).tolist()
    with torch.no_grad():
        due = base(torch.tensor([ids])).logits[0].numpy()
    got = served.logits(model, ids, tmp_path, "cpu")
    np.testing.assert_allclose(got, due, atol=served.LOGIT * max(1, abs(due).max() / 10))
