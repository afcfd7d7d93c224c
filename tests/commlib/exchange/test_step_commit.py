"""Which steps must be looked at for what is not finite: those that may read, or leave, something."""

from __future__ import annotations

import math

import pytest
import torch

from commlib.codecs.memory_store import MemoryStore
from commlib.exchange.step_commit import StepCommit


def step(steps: StepCommit, *, remembers: bool, value: float = 1.0) -> bool:
    """One, of one bucket. Whether it was watched."""
    steps.begin(remembers=remembers)
    if steps.watched:
        steps.check(torch.tensor([value]))
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(torch.zeros(1))
    steps.submitted(done, last=True)
    return steps.watched


def test_routes_without_memory_need_no_watching() -> None:
    steps = StepCommit(MemoryStore())
    assert [step(steps, remembers=False, value=v) for v in (1.0, math.nan, 1.0)] == [False] * 3
    steps.settle()
    assert (steps.count, steps.skipped) == (3, 0)


@pytest.mark.parametrize("last", [1.0, math.inf])
def test_what_was_left_is_watched_until_a_step_has_counted_in_which_it_went_out(last: float) -> None:
    steps = StepCommit(MemoryStore())
    assert [step(steps, remembers=True, value=v) for v in (1.0, 1.0, last)] == [True] * 3
    assert step(steps, remembers=False, value=math.nan)  # it did not go out
    assert step(steps, remembers=False, value=1.0)
    later = [step(steps, remembers=False) for _ in range(3)]
    assert later[1:] == [False, False]
    assert later[0] == (last != 1.0)  # the step that did not count is not told from one that did
    steps.settle()
    assert steps.count + steps.skipped == 8


def test_a_step_discarded_afterwards_has_not_taken_anything_out() -> None:
    steps = StepCommit(MemoryStore())
    step(steps, remembers=True)
    assert step(steps, remembers=False)
    steps.settle()
    steps.discard()
    assert step(steps, remembers=False)
    assert not step(steps, remembers=False)


def test_after_a_state_was_loaded_the_first_step_is_watched() -> None:
    steps = StepCommit(MemoryStore())
    step(steps, remembers=False)
    steps.settle()
    steps.resume(7)
    assert step(steps, remembers=False, value=math.nan)
    assert [step(steps, remembers=False) for _ in range(4)] == [True, True, False, False]
    steps.settle()
    assert steps.count == 11


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("value", [0.0, 3e4, math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("at", [0, 3000])
def test_one_value_that_is_not_finite_is_seen_wherever_it_is(dtype: torch.dtype, value: float, at: int) -> None:
    steps = StepCommit(MemoryStore())
    for values in (torch.ones(5000), torch.ones(5000), torch.zeros(0)):
        steps.begin(remembers=True)
        values[at : at + 1] = value
        steps.check(values.to(dtype))
        steps.check(torch.ones(3, dtype=dtype))
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(values)
        steps.submitted(done, last=True)
        steps.settle()
    good = math.isfinite(value)
    assert (steps.count, steps.skipped) == ((3, 0) if good else (1, 2))


def test_finite_values_whose_squares_are_not_are_finite() -> None:
    steps = StepCommit(MemoryStore())
    assert step(steps, remembers=True, value=-3e38)
    steps.settle()
    assert steps.count == 1


@pytest.mark.parametrize(
    ("scales", "value", "counts"),
    [
        ([1.0, 2.0], 1.0, True),
        ([1e30], 1.0, True),  # its square is not finite: the values are looked at
        ([math.inf], 1.0, True),
        ([math.nan, 1.0], math.nan, False),
        ([1.0, math.inf], math.inf, False),
        ([3e38], math.inf, False),
    ],
)
def test_scales_stand_for_values_while_they_are_of_an_ordinary_size(
    scales: list[float], value: float, counts: bool
) -> None:
    steps = StepCommit(MemoryStore())
    steps.begin(remembers=True)
    values = torch.full((10,), value)
    steps.check(values, [torch.tensor([s]) for s in scales])
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(values)
    steps.submitted(done, last=True)
    steps.settle()
    assert (steps.count, steps.skipped) == ((1, 0) if counts else (0, 1))
