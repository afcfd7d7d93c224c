"""dgc and its dense form: momentum before the exchange."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from commlib.codecs.base import LayerSpec, Memory
from commlib.codecs.error_feedback import ErrorFeedback
from commlib.compressors.dgc import DGC, HeavyBall
from tests.support.hypothesis_strategies import encode, roundtrip


def gradients(steps: int, n: int) -> list[torch.Tensor]:
    gen = torch.Generator().manual_seed(11)
    return [torch.randn(n, generator=gen) for _ in range(steps)]


def oracle(
    grads: list[np.ndarray], k: int, m: float, nesterov: bool
) -> tuple[list[np.ndarray], np.ndarray, np.ndarray]:
    """(what is sent each step, u, v) by the paper's Algorithm 4, in doubles."""
    u, v = np.zeros_like(grads[0]), np.zeros_like(grads[0])
    sent = []
    for g in grads:
        u = m * u + g
        v = v + (g + m * u if nesterov else u)
        mask = np.zeros(len(v), dtype=bool)
        mask[np.argsort(-np.abs(v))[:k]] = True
        sent.append(np.where(mask, v, 0))
        u[mask] = v[mask] = 0
    return sent, u, v


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("nesterov", [False, True])
def test_follows_the_papers_algorithm(momentum: float, nesterov: bool) -> None:
    grads = gradients(12, 60)
    codec = DGC(0.1, momentum, nesterov=nesterov)
    memory = Memory.zeros(codec, LayerSpec("w", (60,)))
    sent, u, v = oracle([g.double().numpy() for g in grads], 6, momentum, nesterov)
    for g, wanted in zip(grads, sent, strict=True):
        assert np.allclose(roundtrip(codec, g, memory=memory).numpy(), wanted, atol=1e-5)
    assert np.allclose(memory.new["residual"].numpy(), v, atol=1e-5)
    if momentum:
        assert np.allclose(memory.new["momentum"].numpy(), u, atol=1e-5)


def test_keeps_no_momentum_slot_without_momentum() -> None:
    spec = LayerSpec("w", (3, 4))
    assert set(DGC(momentum=0).slots(spec)) == {"residual"}
    assert {k: s.role for k, s in DGC().slots(spec).items()} == {"momentum": "local", "residual": "pending"}
    with pytest.raises(ValueError, match="residual of its own"):
        ErrorFeedback(DGC())


def test_lossy_values_leave_what_they_lose_in_the_residual() -> None:
    (g,) = gradients(1, 100)
    codec = DGC(0.1, values="int4")
    memory = Memory.zeros(codec, LayerSpec.of(g))
    decoded = roundtrip(codec, g, memory=memory)
    assert torch.allclose(decoded + memory.new["residual"], g, atol=1e-6)
    assert (memory.new["residual"][decoded != 0] != 0).any()
    assert (memory.new["momentum"][decoded != 0] == 0).all()
    assert int((memory.new["momentum"] == 0).sum()) == 10


@pytest.mark.parametrize("size", [1e-20, 1.0, 1e25])
def test_clip_scales_the_gradient_to_the_norm_if_longer(size: float) -> None:
    (g,) = gradients(1, 50)
    g = g * size
    norm = float(g.double().norm())
    assert torch.allclose(roundtrip(DGC(1.0, clip=norm / 4), g), g / 4, rtol=1e-5, atol=0)
    assert torch.allclose(roundtrip(DGC(1.0, clip=norm * 1.01), g), g, rtol=1e-5, atol=0)
    assert torch.equal(roundtrip(DGC(1.0), g), g)
    assert not roundtrip(DGC(1.0, clip=1.0), torch.zeros(5)).any()


def test_warm_up_goes_through_the_papers_ratios() -> None:
    codec = DGC(ratio=0.001, warmup_steps=100)
    ratios = [vars(codec.at(step))["ratio"] for step in (0, 24, 25, 50, 75, 99)]
    assert ratios == pytest.approx([0.2512, 0.2512, 0.0631, 0.01585, 0.00398, 0.00398], rel=1e-2)
    assert codec.at(100) is codec
    assert DGC().at(0) == DGC()
    assert codec.at(0).slots(LayerSpec("w", (9,))) == codec.slots(LayerSpec("w", (9,)))


def test_dense_form_is_the_momentum_under_the_same_options() -> None:
    assert DGC().dense_form() == HeavyBall(0.9)
    assert DGC(momentum=0.5, nesterov=True, clip=2.0).dense_form() == HeavyBall(0.5, True, 2.0)
    assert DGC(momentum=0).dense_form() is None


@pytest.mark.parametrize("nesterov", [False, True])
def test_heavy_ball_equals_torchs_sgd(nesterov: bool) -> None:
    grads = gradients(8, 20)
    weight = torch.nn.Parameter(torch.zeros(20))
    sgd = torch.optim.SGD([weight], lr=1.0, momentum=0.9, nesterov=nesterov)
    codec = HeavyBall(0.9, nesterov)
    memory = Memory.zeros(codec, LayerSpec("w", (20,)))
    moved = torch.zeros(20)
    for g in grads:
        weight.grad = g.clone()
        sgd.step()
        moved -= roundtrip(codec, g, memory=memory)
    assert torch.allclose(weight.detach(), moved, atol=1e-5)


def test_the_mean_of_heavy_balls_is_the_heavy_ball_of_the_mean() -> None:
    codec, spec = HeavyBall(0.9), LayerSpec("w", (20,))
    memories = [Memory.zeros(codec, spec) for _ in range(3)]
    grads = gradients(6, 20)
    for a, b in zip(grads[::2], grads[1::2], strict=True):
        total = sum(encode(codec, g, memory=m).view(torch.float32) for g, m in zip((a, b), memories[:2], strict=True))
        mean = roundtrip(codec, (a + b) / 2, memory=memories[2])
        assert torch.allclose(torch.as_tensor(total) / 2, mean, atol=1e-6)


def test_heavy_ball_speaks_the_gradients_dtype_and_remembers_in_float32() -> None:
    spec = LayerSpec("w", (5,), dtype=torch.bfloat16)
    codec = HeavyBall()
    memory = Memory.zeros(codec, spec)
    x = torch.randn(5).bfloat16()
    payload = torch.zeros(codec.nbytes(spec), dtype=torch.uint8)
    codec.compress(x, payload, memory=memory)
    assert payload.numel() == 10
    assert codec.reduce_dtype(spec) == torch.bfloat16
    assert torch.equal(payload.view(torch.bfloat16), x)
    assert memory.new["momentum"].dtype == torch.float32


@pytest.mark.parametrize("codec", [DGC(1.0, clip=1.0), HeavyBall(clip=1.0)], ids=str)
def test_clipping_hides_no_infinity(codec: DGC | HeavyBall) -> None:
    x = torch.ones(5)
    x[2] = math.inf
    assert not roundtrip(codec, x).isfinite().all()
