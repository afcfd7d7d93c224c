"""powersgd: one power iteration a step."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from commlib.codecs.base import LayerSpec, Memory
from commlib.compressors.powersgd import PowerSGD
from tests.support.hypothesis_strategies import encode, floats_of, roundtrip


def matrix(m: int, n: int, rank: int, seed: int = 0) -> torch.Tensor:
    gen = torch.Generator().manual_seed(seed)
    return torch.randn(m, rank, generator=gen) @ torch.randn(rank, n, generator=gen)


@pytest.mark.parametrize("shape", [(30, 20), (20, 30), (64, 8, 3, 3)])
@pytest.mark.parametrize("rank", [1, 3])
def test_a_matrix_of_its_rank_comes_back(shape: tuple[int, ...], rank: int) -> None:
    x = matrix(shape[0], math.prod(shape[1:]), rank).view(shape)
    assert torch.allclose(roundtrip(PowerSGD(rank), x), x, atol=1e-4)


def test_decodes_to_the_projection_on_the_range_of_m_times_basis() -> None:
    codec, x = PowerSGD(3), matrix(20, 30, 20)
    memory = Memory.zeros(codec, LayerSpec.of(x))
    p, _ = np.linalg.qr(x.double().numpy() @ memory.old["basis"].double().numpy())
    decoded = roundtrip(codec, x, memory=memory)
    assert np.allclose(decoded.numpy(), p @ p.T @ x.double().numpy(), atol=1e-3)
    assert decoded.norm() <= x.norm()


def test_payload_is_an_orthonormal_p_then_q() -> None:
    x = matrix(20, 30, 20)
    payload = encode(PowerSGD(3), x)
    p = np.array(floats_of(payload[: 4 * 60])).reshape(20, 3)
    q = np.array(floats_of(payload[4 * 60 :])).reshape(30, 3)
    assert np.allclose(p.T @ p, np.eye(3), atol=1e-5)
    assert np.allclose(q, x.numpy().T @ p, atol=1e-4)


def test_steps_on_the_same_matrix_approach_its_best_approximation() -> None:
    codec, x = PowerSGD(2), matrix(40, 30, 30)
    memory = Memory.zeros(codec, LayerSpec.of(x))
    errors = [float((roundtrip(codec, x, memory=memory) - x).norm()) for _ in range(60)]
    best = float(torch.linalg.svdvals(x)[2:].square().sum().sqrt())
    assert errors[-1] < errors[0]
    assert errors[-1] == pytest.approx(best, rel=1e-2)


@pytest.mark.parametrize("rank", [1, 4])
def test_recovers_from_zero_gradients_even_if_the_first_rows_stay_zero(rank: int) -> None:
    """QR of zeros gives the first unit vectors: a basis taken from them would stay zero for ever."""
    codec = PowerSGD(rank)
    x = matrix(30, 20, rank)
    x[:10] = 0
    memory = Memory.zeros(codec, LayerSpec.of(x))
    assert not roundtrip(codec, torch.zeros_like(x), memory=memory).any()
    assert memory.new["basis"].isfinite().all()
    for _ in range(3):
        decoded = roundtrip(codec, x, memory=memory)
    assert torch.allclose(decoded, x, atol=1e-4)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_recovers_from_a_non_finite_gradient_in_place(bad: float) -> None:
    codec, x = PowerSGD(2), matrix(30, 20, 2)
    memory = Memory.zeros(codec, LayerSpec.of(x))
    broken = x.clone()
    broken[3, 5] = bad
    assert not roundtrip(codec, broken, memory=memory).isfinite().all()
    for _ in range(3):
        decoded = roundtrip(codec, x, memory=memory)
    assert torch.allclose(decoded, x, atol=1e-4)


@pytest.mark.parametrize("size", [1e-30, 1e-20, 1e20, 1e30])
def test_the_basis_has_no_unit_so_small_and_large_gradients_survive_many_steps(size: float) -> None:
    codec, x = PowerSGD(2), matrix(30, 20, 2) * size
    memory = Memory.zeros(codec, LayerSpec.of(x))
    for _ in range(5):
        decoded = roundtrip(codec, x, memory=memory)
    assert torch.allclose(decoded / size, x / size, atol=1e-4)
    assert 0.5 <= float(memory.new["basis"].abs().max()) < 2


def test_orthogonalise_gives_a_full_basis_for_any_columns() -> None:
    codec = PowerSGD(3)
    p = matrix(20, 3, 1)  # all columns parallel
    p[:, 2] = 0
    for each in (p, torch.zeros(20, 3), torch.full((20, 3), math.nan), torch.full((20, 3), 1e38)):
        basis = each.clone()
        codec.orthogonalise(basis)
        assert torch.allclose(basis.T @ basis, torch.eye(3), atol=1e-5)


@pytest.mark.parametrize(
    ("shape", "reason"),
    [((), "no matrix"), ((100,), "no matrix"), ((5, 4), "rank 4 of a 5 x 4 matrix takes 36"), ((8, 8), "no fewer")],
)
def test_refuses_in_words_what_it_cannot_shrink(shape: tuple[int, ...], reason: str) -> None:
    assert reason in str(PowerSGD(4).refuse(LayerSpec("w", shape)))


def test_accepts_where_it_saves_one_value() -> None:
    assert PowerSGD(1).refuse(LayerSpec("w", (2, 2))) is not None  # 4 of 4
    assert PowerSGD(1).refuse(LayerSpec("w", (2, 3))) is None  # 5 of 6


def test_rank_slot_and_size() -> None:
    spec = LayerSpec("w", (64, 3, 3, 3))
    assert PowerSGD(4).rank_of(spec) == 4
    assert PowerSGD(100).rank_of(spec) == 27
    assert PowerSGD(4).nbytes(spec) == 4 * 4 * (64 + 27)
    (slot,) = PowerSGD(4).slots(spec).values()
    assert (slot.shape, slot.role, slot.init) == ((27, 4), "replicated", "normal")


@pytest.mark.parametrize("shape", [(), (1,), (7,), (2, 2), (1, 9), (0, 4), (4, 0)])
def test_works_on_what_it_refuses_too(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    assert torch.allclose(roundtrip(PowerSGD(4), x), x, atol=1e-5)
