"""What a GradScaler has multiplied gradients by is taken out once, with its own bits, and it hears of overflows."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

import commlib
from commlib.runtime.amp import Scaled


def begin(scale: float, factor: float = 1.0, dtype: torch.dtype = torch.float32) -> tuple[Any, nn.Parameter, Any]:
    """A scaler, a parameter after a backward pass whose gradients are ``factor`` times π and more, and an optimizer."""
    p = nn.Parameter(torch.zeros(1000, dtype=dtype))
    scaler = GradScaler("cpu", init_scale=scale)
    scaler.scale((p * (factor * torch.linspace(3.1416, 31416.0, 1000).to(dtype))).sum()).backward()
    return scaler, p, torch.optim.SGD([p], lr=0.1)


def grad(p: nn.Parameter) -> Tensor:
    assert p.grad is not None
    return p.grad


def made(scaler: Any, optimizer: Any) -> Scaled:
    scaled = Scaled.of(scaler, optimizer)
    assert scaled is not None
    return scaled


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [65536.0, 3.0, 1000.1])
def test_a_copy_and_what_is_settled_are_the_bits_that_the_scaler_itself_makes(scale: float, dtype: torch.dtype) -> None:
    scaler, p, optimizer = begin(scale, dtype=dtype)
    scaled = made(scaler, optimizer)
    copy = scaled.unscale(grad(p).clone())
    assert copy is not None
    scaled.settle()
    settled = scaled.unscale(grad(p).clone())
    assert settled is not None
    other, q, itself = begin(scale, dtype=dtype)
    other.unscale_(itself)
    assert torch.equal(copy, grad(q))
    assert torch.equal(settled, grad(q))
    assert torch.equal(grad(p), grad(q))


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_of_gradients_that_have_overflowed_there_is_nothing_and_the_scale_is_halved(value: float) -> None:
    scaler, p, optimizer = begin(1024.0)
    scaled = made(scaler, optimizer)
    grad(p)[7] = value
    assert scaled.unscale(grad(p).clone()) is None
    scaled.settle()
    assert scaled.unscale(grad(p).clone()) is None
    scaler.update()
    assert scaler.get_scale() == 512.0


def test_a_scale_that_has_sunk_to_zero_overflows_like_the_scalers_own() -> None:
    scaler, p, optimizer = begin(0.0)
    assert made(scaler, optimizer).unscale(grad(p).clone()) is None


def test_each_step_has_the_scale_that_it_was_computed_with() -> None:
    scaler, p, optimizer = begin(1024.0)
    scaled = made(scaler, optimizer)
    rows = []
    for scale in (1024.0, 256.0):
        assert scaler.get_scale() == scale
        row = scaled.unscale(grad(p).clone())
        assert row is not None
        rows.append(row)
        scaled.settle()
        scaled.end_step()
        scaler.update(256.0)
        p.grad = None
        scaler.scale((p * torch.linspace(3.1416, 31416.0, 1000)).sum()).backward()
    assert torch.equal(*rows)


def test_a_step_without_any_gradient_is_on_record() -> None:
    scaler, p, optimizer = begin(1024.0)
    p.grad = None
    made(scaler, optimizer).settle()
    scaler.update()
    assert scaler.get_scale() == 1024.0


def test_without_an_update_there_is_no_second_step() -> None:
    scaler, _, optimizer = begin(1024.0)
    scaled = made(scaler, optimizer)
    scaled.settle()
    scaled.end_step()
    with pytest.raises(commlib.CommlibError, match=r"scaler\.update\(\) was not called since the step before"):
        scaled.settle()


def test_gradients_of_a_loss_that_was_not_scaled_are_refused() -> None:
    p = nn.Parameter(torch.zeros(3))
    scaled = made(GradScaler("cpu"), torch.optim.SGD([p], lr=0.1))
    scaled.settle()  # nothing is wrong as long as there is no gradient
    with pytest.raises(commlib.CommlibError, match=r"not of a scaled loss: call scaler\.scale\(loss\)\.backward\(\)"):
        scaled.unscale(torch.ones(3))


@pytest.mark.parametrize("left", [True, False])
def test_who_unscales_after_gradients_have_left_is_told_once(left: bool, caplog: pytest.LogCaptureFixture) -> None:
    scaler, p, optimizer = begin(1024.0)
    scaled = made(scaler, optimizer)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            if left:
                scaled.unscale(grad(p).clone())
            scaler.unscale_(optimizer)
            expected = grad(p).clone()
            scaled.settle()
            assert torch.equal(grad(p), expected)
            scaled.end_step()
            scaler.update()
    assert caplog.text.count("scaler.unscale_() was called before server.step(), and gradients have left") == left


def test_none_and_one_that_is_not_enabled_scale_nothing_and_others_are_no_scalers() -> None:
    _, _, optimizer = begin(1.0)
    assert Scaled.of(None, optimizer) is None
    assert Scaled.of(GradScaler("cpu", enabled=False), optimizer) is None
    for bad in (2.0, "cpu", GradScaler):
        with pytest.raises(TypeError, match=rf"scaler must be a torch\.amp\.GradScaler, got {type(bad).__name__}"):
            Scaled.of(bad, optimizer)
