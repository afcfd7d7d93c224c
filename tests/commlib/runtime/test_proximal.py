"""Adagrad with an L1 penalty: against a plain oracle, value by value, and in the hands of a shard."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from commlib.errors import CommlibError
from commlib.runtime.optimizers import Recipe
from commlib.runtime.proximal import ProximalAdagrad
from commlib.server.job.consistency import BSP
from commlib.server.job.job import ServerJob
from commlib.server.shard.chunk_state import ChunkState
from commlib.server.storage.serialization import pack, unpack
from tests.support.tiers import examples

RECIPE = Recipe(ProximalAdagrad, {"lr": 0.3, "l1": 0.2})


def oracle(start: list[float], gradients: list[list[float]], lr: float, l1: float) -> list[float]:
    """The same in Python's floats, one value after another: the smallest g·w + l1·|w| + (w - old)²/(2α)."""
    found = []
    for i, w in enumerate(start):
        total = 0.0
        for gradient in gradients:
            total += gradient[i] ** 2
            if not total:
                continue
            rate = lr / math.sqrt(total)
            z = w - rate * gradient[i]
            w = math.copysign(max(abs(z) - rate * l1, 0.0), z)
        found.append(w)
    return found


def drawn(seed: int, n: int, steps: int) -> list[Tensor]:
    """Gradients of which a third is 0."""
    draws = torch.Generator().manual_seed(seed)
    shape = (steps, n)
    return list(torch.randn(shape, generator=draws).mul_(torch.rand(shape, generator=draws) > 0.33))


def stepped(start: Tensor, gradients: list[Tensor], **options: float) -> Tensor:
    p = nn.Parameter(start.clone())
    optimizer = ProximalAdagrad([p], **options)
    for gradient in gradients:
        p.grad = gradient.clone()
        optimizer.step()
    return p.detach()


@given(seed=st.integers(0, 2**32), lr=st.floats(1e-3, 10), l1=st.floats(0, 3), steps=st.integers(1, 6))
def test_it_is_the_plain_method_of_every_value(seed: int, lr: float, l1: float, steps: int) -> None:
    start = torch.randn(7, generator=torch.Generator().manual_seed(seed))
    gradients = drawn(seed, 7, steps)
    found = stepped(start, gradients, lr=lr, l1=l1)
    expected = oracle(start.tolist(), [g.tolist() for g in gradients], lr, l1)
    torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-4, atol=1e-4 * lr)


def test_weights_come_to_exactly_0_and_stay_there_while_gradients_are_within_the_penalty() -> None:
    start, pull = torch.tensor([0.5, -0.5, 0.5]), torch.tensor([0.9, -0.9, -1.1])
    found = stepped(start, [pull] * 50, lr=0.5, l1=1.0)
    assert found[:2].tolist() == [0.0, 0.0]
    assert found[2] > 0.5
    assert stepped(torch.zeros(2), [torch.tensor([1.0, -1.0])], lr=0.5, l1=1.0).tolist() == [0.0, 0.0]


def test_without_a_penalty_it_is_adagrad_of_torch() -> None:
    start, gradients = torch.linspace(-1, 1, 9), drawn(3, 9, 5)
    p = nn.Parameter(start.clone())
    theirs = torch.optim.Adagrad([p], lr=0.1)
    for gradient in gradients:
        p.grad = gradient.clone()
        theirs.step()
    torch.testing.assert_close(stepped(start, gradients, lr=0.1), p.detach())


def test_a_weight_that_never_had_a_gradient_stays_as_it_is_and_so_does_a_parameter() -> None:
    assert stepped(torch.tensor([2.0, 3.0]), [torch.tensor([0.0, 1.0])], lr=1.0, l1=1.0).tolist() == [2.0, 1.0]
    p = nn.Parameter(torch.ones(2))
    optimizer = ProximalAdagrad([p], lr=1.0, l1=1.0)
    assert optimizer.step(lambda: 0.25) == 0.25
    assert p.tolist() == [1.0, 1.0]


def test_chunks_are_updated_as_the_whole_is_to_the_last_bit() -> None:
    assert RECIPE.by_element
    start = torch.linspace(-1, 1, 41)
    whole = ChunkState(start.clone(), RECIPE.make, [0], BSP().threshold())
    parts = [ChunkState(part.clone(), RECIPE.make, [0], BSP().threshold()) for part in start.split([2, 33, 6])]
    for t, pushed in enumerate(drawn(1, 41, 4)):
        whole.push(0, t, pushed)
        for part, g in zip(parts, pushed.split([2, 33, 6]), strict=True):
            part.push(0, t, g)
    assert torch.equal(torch.cat([part.values for part in parts]), whole.values)
    assert 0 < int((whole.values == 0).sum()) < 41


def test_a_shard_that_resumes_from_its_snapshot_goes_on_to_the_last_bit() -> None:
    gradients = drawn(2, 6, 6)
    one, other = (ChunkState(torch.ones(6), RECIPE.make, [0], BSP().threshold()) for _ in range(2))
    for t, pushed in enumerate(gradients[:3]):
        one.push(0, t, pushed)
    written = b"".join(pack("shard 0", 3, {}, {"w": one.state_dict()}))
    other.load_state_dict(unpack(memoryview(written), "shard 0", 3)[1]["w"])
    for t, pushed in enumerate(gradients[3:], start=3):
        one.push(0, t, pushed)
        other.push(0, t, pushed)
    assert torch.equal(one.values, other.values)


def test_a_job_names_it_from_a_table_and_what_is_not_there_is_no_optimizer() -> None:
    job = ServerJob({"w": ((3,), "float32")}, (RECIPE,), {"w": 0}, "bsp", workers=1, shards=1)
    assert b"commlib.runtime.proximal:ProximalAdagrad" in job.pack()
    assert ServerJob.unpack(job.pack()).recipes == (RECIPE,)
    forged = job.pack().replace(
        b"commlib.runtime.proximal:ProximalAdagrad", b"commlib.runtime.proximal:ProximalAdagrax"
    )
    with pytest.raises(CommlibError, match="ProximalAdagrax is none"):
        ServerJob.unpack(forged)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"lr": 0.0}, "lr must be above 0 and finite, got 0.0"),
        ({"lr": math.nan}, "lr must be above 0 and finite, got nan"),
        ({"l1": -1.0}, "l1 must be 0 or more and finite, got -1.0"),
        ({"l1": math.inf}, "l1 must be 0 or more and finite, got inf"),
    ],
)
def test_numbers_out_of_range_are_refused(options: dict[str, float], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ProximalAdagrad([nn.Parameter(torch.zeros(1))], **options)
    with pytest.raises(ValueError, match=said):
        ProximalAdagrad([{"params": [nn.Parameter(torch.zeros(1))], **options}])


@given(seed=st.integers(0, 2**32))
def test_it_comes_to_the_optimum_of_a_quadratic_loss_with_its_zeros(seed: int) -> None:
    """½·Σ c·(w - b)² + l1·Σ|w| has its smallest value at b shrunk by l1/c."""
    draws = torch.Generator().manual_seed(seed)
    b, c = 3 * torch.randn(examples(20), generator=draws), 0.5 + torch.rand(examples(20), generator=draws)
    best = b.sign() * (b.abs() - 1.0 / c).clamp(min=0.0)
    p = nn.Parameter(torch.zeros_like(b))
    optimizer = ProximalAdagrad([p], lr=1.0, l1=1.0)
    for _ in range(300):
        p.grad = c * (p.detach() - b)
        optimizer.step()
    torch.testing.assert_close(p.detach(), best, rtol=0.02, atol=0.02)
    assert torch.equal(p == 0, best == 0)
