"""A forward pass with the weights of now, and its backward pass after they have changed."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from commlib.pipeline.hetpipe import output_of, stashed


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))


def grads(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


@torch.no_grad()
def change(model: nn.Module) -> None:
    for p in model.parameters():
        p.mul_(2.0)


def test_the_gradient_is_that_of_the_weights_it_was_computed_with_to_the_last_bit() -> None:
    x, model, other = torch.randn(4, 5), make(), make()
    other(x).square().sum().backward()
    y = stashed(model, x).square().sum()
    change(model)
    y.backward()
    assert all(torch.equal(a, b) for a, b in zip(grads(model), grads(other), strict=True))
    assert len(grads(model)) == 4


def test_without_it_autograd_refuses() -> None:
    model = make()
    y = model(torch.randn(4, 5)).square().sum()
    change(model)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_hooks_of_parameters_and_modules_are_called_as_ever() -> None:
    model, told = make(), list[str]()
    first: Any = model[0]
    first.register_forward_pre_hook(lambda *_: told.append("forward"))
    first.weight.register_post_accumulate_grad_hook(lambda p: told.append("gradient"))
    stashed(model, torch.randn(4, 5)).sum().backward()
    assert told == ["forward", "gradient"]


def test_stages_that_torch_splits_off_a_model_are_computed_as_the_whole_is_to_the_last_bit() -> None:
    from torch.distributed.pipelining import SplitPoint, pipeline

    x, model, other = torch.randn(4, 5), make(), make()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's own
        split = pipeline(model, (x,), split_spec={"2": SplitPoint.BEGINNING})
    stages = [split.get_stage_module(i) for i in range(2)]
    hidden = stashed(stages[0], x)
    between = hidden.detach().requires_grad_()
    y = stashed(stages[1], between).square().sum()
    for stage in stages:
        change(stage)
    y.backward()
    hidden.backward(between.grad)
    other(x).square().sum().backward()
    assert [n for stage in stages for n, _ in stage.named_parameters()] == [n for n, _ in other.named_parameters()]
    found = [g for stage in stages for g in grads(stage)]
    assert all(torch.equal(a, b) for a, b in zip(found, grads(other), strict=True))


def test_what_cannot_go_between_stages_is_refused_with_the_stages_name() -> None:
    with pytest.raises(TypeError, match="stage 1 makes tuple: between stages"):
        output_of("stage 1", (torch.ones(2),))
    with pytest.raises(ValueError, match="what stage 1 makes needs no gradient"):
        output_of("stage 1", torch.ones(2))
