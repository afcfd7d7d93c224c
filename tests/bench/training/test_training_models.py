"""The models: their size, and that they learn from their data."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from commlib.bench.training.models import MODELS
from commlib.bench.training.workloads import shapes


@pytest.mark.parametrize(
    ("name", "least", "most"), [("fc", 50e6, 60e6), ("conv", 1e6, 3e6), ("gpt", 3e6, 5e6), ("gpt-small", 0.5e6, 1e6)]
)
def test_sizes(name: str, least: float, most: float) -> None:
    found = shapes(name)
    assert least <= sum(math.prod(shape) for _, shape in found) <= most
    assert len({n for n, _ in found}) == len(found)


@pytest.mark.parametrize("name", ["conv", "gpt-small"])
def test_the_loss_falls_step_by_step(name: str) -> None:
    task = MODELS[name]
    torch.manual_seed(0)
    module = task.module()
    optimizer = torch.optim.SGD(module.parameters(), lr=task.lr)
    held_out = task.data(64, torch.Generator().manual_seed(9))

    def loss(batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return nn.functional.cross_entropy(module(batch[0]).flatten(0, -2), batch[1].flatten())

    seen = [loss(held_out).item()]
    for step in range(5):
        optimizer.zero_grad()
        loss(task.data(4 * task.batch, torch.Generator().manual_seed(step))).backward()
        optimizer.step()
        seen.append(loss(held_out).item())
    assert seen == sorted(seen, reverse=True)


@pytest.mark.parametrize("name", MODELS)
def test_the_task_is_the_same_and_the_examples_are_the_generators(name: str) -> None:
    data = MODELS[name].data
    (x, y), (x2, y2), (z, _) = (data(10, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
    assert torch.equal(x, x2)
    assert torch.equal(y, y2)
    assert not torch.equal(x, z)


def test_gpt_does_not_see_what_comes_next() -> None:
    torch.manual_seed(0)
    module = MODELS["gpt-small"].module().eval()
    tokens = torch.arange(32).view(1, 32)
    changed = tokens.clone()
    changed[0, 20:] = 7
    with torch.no_grad():
        a, b = module(tokens), module(changed)
    torch.testing.assert_close(a[:, :20], b[:, :20])
    assert not torch.allclose(a[:, 20:], b[:, 20:])
