"""A guarded optimizer is stepped by its guard only."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import commlib
from commlib.runtime.optimizers import StepGuard


def test_its_user_cannot_step_it_until_the_guard_goes_not_even_after_one_of_its_steps_has_failed() -> None:
    p = nn.Parameter(torch.zeros(()))
    p.grad = torch.ones(())
    optimizer = torch.optim.SGD([p], lr=1.0)
    guard = StepGuard(optimizer)
    with pytest.raises(commlib.CommlibError, match=r"call server\.step\(\), not optimizer\.step\(\)"):
        optimizer.step()
    assert p.item() == 0.0
    guard.step()
    assert p.item() == -1.0
    fails = optimizer.register_step_pre_hook(lambda *_: 1 // 0)  # type: ignore[arg-type]
    with pytest.raises(ZeroDivisionError):
        guard.step()
    fails.remove()
    with pytest.raises(commlib.CommlibError):
        optimizer.step()
    guard.remove()
    optimizer.step()
    assert p.item() == -2.0
