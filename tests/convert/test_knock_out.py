"""Knock-out against a forward pass in float64.

Rerun: /usr/bin/python3 -m pytest tests/convert/test_knock_out.py
"""

import json
import os
import subprocess

import numpy as np
import pytest
import torch_writer as tw
from convert_harness import ROOT, convert
from numpy_model import Model

PROGRAM = os.environ.get("PKMSERVE", str(ROOT / "build" / "pkmserve"))
IDS = [1, 14, 15, 3, 9, 7]


def score(directory, ablate):
    flags = ["--ablate", json.dumps(ablate)] if ablate else []
    done = subprocess.run([PROGRAM, "score", "--model", str(directory), "--dtype", "f32", "--ids",
                           "--add-bos", "off", "--json", *flags],
                          input=" ".join(map(str, IDS)), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["results"][0]["sum_logprob"]


def test_as_a_float64_forward_computes_it(tmp_path):
    source = tw.write_zip(tmp_path / "c.pth", tw.tiny(params=tw.tiny_params()))
    assert convert(source, "--output", tmp_path / "model").status == 0
    directory = tmp_path / "model"
    _, _, looked_up = Model(directory).forward(IDS)
    slots = next(iter(looked_up.values()))[0]
    read = [int(slot) for slot in np.unique(slots[:, 0])[:3]]
    sums = []
    for ablate in ([], [{"memory": 0}], [{"memory": 0, "head": 1}],
                   [{"memory": 0, "slots": read, "scale": 0.25}],
                   [{"memory": 0, "scale": 1.5}, {"memory": 0, "head": 0, "slots": read[:1]},
                    {"memory": 0, "head": 1, "scale": 4}]):
        logprobs = Model(directory, ablate).forward(IDS)[0]
        want = sum(logprobs[i, IDS[i + 1]] for i in range(len(IDS) - 1))
        assert score(directory, ablate) == pytest.approx(want, rel=1e-5)
        sums.append(want)
    assert min(abs(a - b) for i, a in enumerate(sums) for b in sums[:i]) > 1e-3  # each changes much
