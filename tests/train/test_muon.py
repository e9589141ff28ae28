"""Muon in fp32 takes the steps of PyTorch's own, which computes them in bf16."""

import sys

import pytest

from conftest import TRAIN

torch = pytest.importorskip("torch")
sys.path.append(str(TRAIN))

import muon  # noqa: E402

SHAPES = ((24, 24), (24, 24), (24, 64), (64, 24))


def matrices():
    generator = torch.Generator().manual_seed(3)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


@pytest.mark.parametrize("shape", SHAPES)
def test_all_singular_values_come_near_one(shape):
    stack = torch.randn(3, *shape, generator=torch.Generator().manual_seed(1))
    values = torch.linalg.svdvals(muon.orthogonal(stack, 5))
    assert values.min() > 0.5 and values.max() < 1.3


def test_steps_are_those_of_pytorch():
    ours, theirs = matrices(), matrices()
    mine = muon.Muon(ours, lr=0.02, weight_decay=0.1, n_step=5)
    own = torch.optim.Muon(theirs, lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    before = matrices()
    for step in range(3):
        for p, q in zip(ours, theirs):
            gradient = torch.randn(p.shape, generator=torch.Generator().manual_seed(step))
            p.grad, q.grad = gradient.clone(), gradient.clone()
        mine.step()
        own.step()
    for p, q, start in zip(ours, theirs, before):
        moved = (q - start).norm()
        assert moved > 0 and (p - q).norm() < 0.02 * moved


def test_a_matrix_without_a_gradient_stays():
    p = matrices()[0]
    before = p.detach().clone()
    muon.Muon([p], lr=0.1).step()
    assert torch.equal(p, before)
