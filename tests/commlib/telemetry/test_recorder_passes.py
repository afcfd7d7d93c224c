"""Passes in a trace: when they begin and end, whatever the model returns, and nothing that stays with it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from commlib.telemetry.recorder import PassRecorder
from commlib.telemetry.trace import Trace
from tests.support.trace_reader import Clock, shown


class Net(nn.Module):
    """Returns what ``like`` makes of its outputs; a second passes in its forward pass, and two in its backward one."""

    def __init__(self, clock: Clock, like: Any = lambda y: y) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.clock, self.like = clock, like
        self.fails = False

    def forward(self, x: Tensor) -> Any:
        self.clock.now += 1
        y = self.layer(x)
        if y.requires_grad:
            y.register_hook(self.back)
        if self.fails:
            raise KeyError("x")
        return self.like(y * 2)

    def back(self, grad: Tensor) -> None:
        self.clock.now += 2


def recorded(trace: Trace, folder: Path) -> list[tuple[str, float, float | None]]:
    """Name, begin and seconds."""
    trace.save(folder / "t.json")
    return [(name, at / 1e6, None if s is None else s / 1e6) for _, name, at, s, _ in shown(folder / "t.json")]


LIKE: dict[str, tuple[Any, Any]] = {
    "a tensor": (lambda y: y, lambda out: out),
    "a tuple": (lambda y: (1, y), lambda out: out[1]),
    "nested": (lambda y: {"a": [None, {"y": y}], "b": "text"}, lambda out: out["a"][1]["y"]),
    "several": (lambda y: (y, y + 1), lambda out: out[0] + out[1]),
}


@pytest.mark.parametrize("like", LIKE)
def test_passes_begin_and_end_when_the_model_computes(tmp_path: Path, like: str) -> None:
    clock = Clock()
    make, pick = LIKE[like]
    net = Net(clock, make)
    trace = Trace(clock=clock)
    passes = PassRecorder(net, trace)
    for _ in range(2):
        out = net(torch.ones(3))
        clock.now += 10  # the loss
        pick(out).sum().backward()
        clock.now += 20  # the optimizer
    assert recorded(trace, tmp_path) == [
        ("forward", 0, 1),
        ("backward", 11, 2),
        ("forward", 33, 1),
        ("backward", 44, 2),
    ]
    passes.remove()


def test_a_forward_pass_without_gradients_has_no_backward_pass_and_one_that_failed_is_none(tmp_path: Path) -> None:
    clock = Clock()
    net = Net(clock)
    trace = Trace(clock=clock)
    passes = PassRecorder(net, trace)
    with torch.no_grad():
        net(torch.ones(3))
    net.fails = True
    with pytest.raises(KeyError):
        net(torch.ones(3))
    net.fails = False
    net(torch.ones(3)).sum().backward()
    assert recorded(trace, tmp_path) == [("forward", 0, 1), ("forward", 2, 1), ("backward", 3, 2)]
    passes.remove()


def test_one_that_is_backed_twice_has_two_backward_passes(tmp_path: Path) -> None:
    clock = Clock()
    net = Net(clock)
    trace = Trace(clock=clock)
    passes = PassRecorder(net, trace)
    loss = net(torch.ones(3)).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    assert recorded(trace, tmp_path) == [("forward", 0, 1), ("backward", 1, 2), ("backward", 3, 2)]
    passes.remove()


def test_afterwards_the_model_has_no_hooks_and_its_copies_never_tell(tmp_path: Path) -> None:
    clock = Clock()
    net: Any = Net(clock)
    trace = Trace(clock=clock)
    passes = PassRecorder(net, trace)
    twin = copy.deepcopy(net)
    twin(torch.ones(3)).sum().backward()
    passes.remove()
    net(torch.ones(3)).sum().backward()
    assert recorded(trace, tmp_path) == []
    assert not net._forward_pre_hooks
    assert not net._forward_hooks
