"""Rules of local steps, against what each must be equal to."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from commlib.local_sgd.outer_optimizers import (
    RULES,
    Average,
    BlockMomentum,
    DiLoCo,
    Elastic,
    OuterOptimizer,
    SparseLoCo,
    make,
)

DIM = 5
Local = Callable[[Tensor, int, int], Tensor]
seeds = st.integers(0, 2**31)


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


class Ranks:
    """All ranks in one place: what each has, and the shared values, which are the same for all."""

    def __init__(self, rule: OuterOptimizer, world: int, start: Tensor) -> None:
        rule.check(world)
        self.rule, self.world, self.shared = rule, world, start.clone()
        self.own = [start.clone() for _ in range(world)]
        self.slots = {name: torch.zeros_like(start) for name in rule.slots}

    def meet(self) -> None:
        deltas = [self.shared - own for own in self.own]
        mean = torch.stack(deltas).mean(0)
        self.rule.move(self.shared, mean, self.world, self.slots)
        for own, delta in zip(self.own, deltas, strict=True):
            self.rule.rejoin(own, self.shared, delta, self.world)


def problem(seed: int, rows: int) -> tuple[Tensor, Tensor]:
    """Least squares: rows of one example each, and what they should give."""
    return draw(seed, rows, DIM), draw(seed + 1, rows)


def gradient(values: Tensor, rows: Tensor, wanted: Tensor) -> Tensor:
    return rows.T @ (rows @ values - wanted) / len(wanted)


@given(seeds, st.integers(1, 5), st.floats(0, 0.9), st.floats(0, 0.1))
def test_averaging_after_every_step_is_serial_sgd_of_all_examples_even_with_local_momentum(
    seed: int, world: int, momentum: float, decay: float
) -> None:
    rows, wanted = problem(seed, 4 * world)
    serial = torch.nn.Parameter(draw(seed + 2, DIM))
    ranks = Ranks(Average(), world, serial.detach())
    parameters = [torch.nn.Parameter(own) for own in ranks.own]
    optimizers = [torch.optim.SGD([p], lr=0.05, momentum=momentum, weight_decay=decay) for p in [serial, *parameters]]
    for _ in range(6):
        serial.grad = gradient(serial.detach(), rows, wanted)
        for i, p in enumerate(parameters):
            part = slice(4 * i, 4 * (i + 1))
            p.grad = gradient(p.detach(), rows[part], wanted[part])
        for optimizer in optimizers:
            optimizer.step()
        with torch.no_grad():
            ranks.meet()
        torch.testing.assert_close(ranks.shared, serial.detach(), rtol=1e-11, atol=1e-11)
    assert all(torch.equal(own, ranks.shared) for own in ranks.own)


@given(seeds, st.integers(1, 6))
def test_a_first_block_without_nesterov_is_plain_averaging(seed: int, world: int) -> None:
    blocks, plain = (Ranks(r, world, draw(seed, DIM)) for r in (BlockMomentum(nesterov=False), Average()))
    for i in range(world):
        blocks.own[i] += draw(seed + i, DIM)
        plain.own[i].copy_(blocks.own[i])
    blocks.meet()
    plain.meet()
    torch.testing.assert_close(blocks.shared, plain.shared, rtol=1e-12, atol=1e-12)


@given(seeds, st.booleans())
def test_block_momentum_of_one_rank_leaves_it_alone(seed: int, nesterov: bool) -> None:
    one = Ranks(BlockMomentum(nesterov=nesterov), 1, draw(seed, DIM))
    for step in range(4):
        one.own[0] += draw(seed + step, DIM)
        alone = one.own[0].clone()
        one.meet()
        torch.testing.assert_close(one.own[0], alone, rtol=1e-12, atol=1e-12)


@given(seeds, st.integers(1, 5), st.floats(0, 0.99), st.floats(0.1, 2), st.booleans())
def test_block_momentum_is_its_published_recursion(
    seed: int, world: int, mu: float, rate: float, nesterov: bool
) -> None:
    ranks = Ranks(BlockMomentum(mu, rate, nesterov), world, draw(seed, DIM))
    before, block = ranks.shared.clone(), torch.zeros(DIM, dtype=torch.float64)
    for step in range(5):
        for i in range(world):
            ranks.own[i] += draw(seed + 31 * step + i, DIM)
        total = sum((before - own for own in ranks.own), torch.zeros(DIM, dtype=torch.float64))
        block = mu * block + (1 - mu) * rate * total
        before = before - block - (mu * block if nesterov else 0)
        ranks.meet()
        torch.testing.assert_close(ranks.shared, before, rtol=1e-10, atol=1e-10)


@given(seeds, st.integers(1, 5), st.floats(0.05, 1.5), st.floats(0, 0.95))
def test_the_outer_step_is_torchs_sgd_with_nesterov_on_the_mean_difference(
    seed: int, world: int, rate: float, momentum: float
) -> None:
    ranks = Ranks(DiLoCo(rate, momentum), world, draw(seed, DIM))
    outer = torch.nn.Parameter(ranks.shared.clone())
    optimizer = torch.optim.SGD([outer], lr=rate, momentum=momentum, nesterov=momentum > 0)
    for step in range(5):
        for i in range(world):
            ranks.own[i] += draw(seed + 17 * step + i, DIM)
        outer.grad = torch.stack([ranks.shared - own for own in ranks.own]).mean(0)
        optimizer.step()
        ranks.meet()
        torch.testing.assert_close(ranks.shared, outer.detach(), rtol=1e-12, atol=1e-12)


@given(seeds, st.integers(1, 5))
def test_one_inner_sgd_step_and_an_outer_one_of_rate_1_are_data_parallelism(seed: int, world: int) -> None:
    rows, wanted = problem(seed, 3 * world)
    ranks, serial = Ranks(DiLoCo(1.0, 0.0), world, draw(seed + 2, DIM)), draw(seed + 2, DIM)
    for _ in range(5):
        for i, own in enumerate(ranks.own):
            own -= 0.05 * gradient(own, rows[3 * i : 3 * i + 3], wanted[3 * i : 3 * i + 3])
        ranks.meet()
        serial = serial - 0.05 * gradient(serial, rows, wanted)
        torch.testing.assert_close(ranks.shared, serial, rtol=1e-11, atol=1e-11)


@given(seeds, st.integers(1, 5))
def test_sparseloco_that_sends_all_at_rate_1_is_plain_averaging(seed: int, world: int) -> None:
    sparse, plain = (Ranks(r, world, draw(seed, DIM)) for r in (SparseLoCo(), Average()))
    for i in range(world):
        sparse.own[i] += draw(seed + i, DIM)
        plain.own[i].copy_(sparse.own[i])
    sparse.meet()
    plain.meet()
    assert torch.equal(sparse.shared, plain.shared)


@given(seeds, st.integers(1, 8), st.floats(0.01, 0.99))
def test_pulls_conserve_the_sum_of_all_values_and_the_centre_and_bring_ranks_nearer(
    seed: int, world: int, part: float
) -> None:
    alpha = part * 2 / (world + 1)
    ranks = Ranks(Elastic(alpha), world, draw(seed, DIM))
    for i in range(world):
        ranks.own[i] += draw(seed + 1 + i, DIM)
    total = sum(ranks.own, ranks.shared.clone())
    gap = torch.stack(ranks.own).mean(0) - ranks.shared
    apart = ranks.own[0] - ranks.own[-1]
    ranks.meet()
    torch.testing.assert_close(sum(ranks.own, ranks.shared.clone()), total, rtol=1e-11, atol=1e-11)
    now = torch.stack(ranks.own).mean(0) - ranks.shared
    torch.testing.assert_close(now, gap * (1 - alpha * (world + 1)), rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(ranks.own[0] - ranks.own[-1], apart * (1 - alpha), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(("alpha", "world"), [(0.2, 9), (0.2, 10), (0.4, 8), (1.0, 1)])
def test_pulls_that_would_swing_ever_further_are_refused_and_do(alpha: float, world: int) -> None:
    with pytest.raises(ValueError, match=r"alpha must be below 2/\(P \+ 1\)"):
        Elastic(alpha).check(world)
    ranks = Ranks.__new__(Ranks)
    start = torch.zeros(1, dtype=torch.float64)
    ranks.rule, ranks.world, ranks.shared, ranks.slots = Elastic(alpha), world, start, {}
    ranks.own = [torch.ones(1, dtype=torch.float64) for _ in range(world)]
    for _ in range(50):
        ranks.meet()
    assert abs(float(ranks.own[0] - ranks.shared)) >= 1 - 1e-9


@pytest.mark.parametrize("name", sorted(RULES))
def test_nobody_is_too_few(name: str) -> None:
    with pytest.raises(ValueError, match="1 rank or more, got 0"):
        make(name).check(0)


@pytest.mark.parametrize("world", [1, 2, 9, 1000])
def test_the_default_pull_is_stable_for_any_number_of_ranks(world: int) -> None:
    Elastic().check(world)


@pytest.mark.parametrize(
    "spec", ["average", "bmuf", "bmuf:0.9", "diloco:rate=0.5,momentum=0.0", "sparseloco:0.8", "elastic:0.1"]
)
def test_a_rule_is_what_its_text_says_and_says_it(spec: str) -> None:
    rule = make(spec)
    assert isinstance(rule, RULES[spec.partition(":")[0]])
    assert make(str(rule)) == rule == make(rule)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("avrage", "did you mean 'average'"),
        ("bmuf:1.0", "momentum must be in"),
        ("bmuf:rate=0", "rate must be above 0"),
        ("diloco:momentum=-0.1", "momentum must be in"),
        ("diloco:rate=nan", "rate must be above 0"),
        ("elastic:-1", "alpha must be above 0"),
        ("sparseloco:rate=inf", "rate must be above 0"),
        ("average:0.5", "average"),
    ],
)
def test_bad_rules_are_refused(spec: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make(spec)


@given(seeds, st.sampled_from(sorted(RULES)), st.integers(1, 4))
def test_all_ranks_that_see_the_same_have_the_same_bits(seed: int, name: str, world: int) -> None:
    rule, results = make(name), []
    for _ in range(2):
        shared, slots = draw(seed, DIM).float(), {s: draw(seed + 1, DIM).float() for s in make(name).slots}
        rule.move(shared, draw(seed + 2, DIM).float(), world, slots)
        results.append((shared, *slots.values()))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert not any(math.isnan(float(v.sum())) for v in results[0])


@given(st.integers(0, 999))
def test_demo_goes_one_size_of_step_in_every_direction_and_stays_where_there_is_none(seed: int) -> None:
    mean = torch.randn(50, generator=torch.Generator().manual_seed(seed)).mul(2).round()
    shared = torch.zeros(50)
    make("demo:0.5").move(shared, mean.clone(), 4, {})
    assert torch.equal(shared, -0.5 * torch.sign(mean))
