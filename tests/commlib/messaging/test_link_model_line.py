"""t(n) = α + β·n: what is put in comes out."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from commlib.messaging.link_model import FROM, fit

ALPHAS = st.floats(1e-6, 1e-2)
BETAS = st.floats(1e-11, 1e-6)
SIZES = st.lists(st.integers(1000, 1 << 28), min_size=2, max_size=9, unique=True)
POINTS = st.lists(st.tuples(st.integers(4, 1 << 30), st.floats(1e-6, 1e3)), min_size=1, max_size=9)


def line(alpha: float, beta: float, sizes: list[int]) -> list[tuple[float, float]]:
    return [(n, alpha + beta * n) for n in sizes]


@given(ALPHAS, BETAS, SIZES)
def test_every_point_of_a_line_is_predicted(alpha: float, beta: float, sizes: list[int]) -> None:
    assume(max(sizes) > 2 * min(sizes))
    found = fit(line(alpha, beta, sizes))
    assert found.worst < 1e-3
    for n, t in line(alpha, beta, sizes):
        assert found.predict(n) == pytest.approx(t, rel=1e-2)


@given(st.floats(1e-4, 1e-2), st.floats(1e-9, 1e-7), st.randoms(use_true_random=False))
def test_noise_moves_the_line_little(alpha: float, beta: float, chance: object) -> None:
    sizes = [64_000 * 4**k for k in range(7)]
    noisy = [(n, t * (1 + chance.uniform(-0.05, 0.05))) for n, t in line(alpha, beta, sizes)]  # type: ignore[attr-defined]
    found = fit(noisy)
    assert found.beta == pytest.approx(beta, rel=0.1)
    assert abs(found.alpha - alpha) < 0.15 * (alpha + beta * sizes[0])
    assert found.worst < 0.12


def test_two_points_are_met_exactly() -> None:
    found = fit([(100_000, 0.003), (1_000_000, 0.012)])
    assert found.alpha == pytest.approx(0.002)
    assert found.beta == pytest.approx(1e-8)
    assert found.worst == pytest.approx(0, abs=1e-9)
    assert found.rms == pytest.approx(0, abs=1e-9)


@given(POINTS)
def test_nothing_is_ever_negative(points: list[tuple[float, float]]) -> None:
    found = fit(points)
    assert found.alpha >= 0
    assert found.beta >= 0
    assert found.alpha + found.beta > 0
    assert 0 <= found.rms <= found.worst * (1 + 1e-9)


@given(POINTS, st.randoms(use_true_random=False))
def test_the_order_does_not_matter(points: list[tuple[float, float]], chance: object) -> None:
    shuffled = list(points)
    chance.shuffle(shuffled)  # type: ignore[attr-defined]
    assert fit(shuffled).predict(1e6) == pytest.approx(fit(points).predict(1e6), rel=1e-6)


@given(POINTS, st.floats(1e-3, 1e3))
def test_a_slower_clock_scales_the_line(points: list[tuple[float, float]], factor: float) -> None:
    one, other = fit(points), fit([(n, t * factor) for n, t in points])
    for n, _ in points:
        assert other.predict(n) == pytest.approx(factor * one.predict(n), rel=1e-4)


def test_small_messages_only_settle_what_large_ones_leave_open() -> None:
    large = line(0.001, 1e-8, [64_000, 1_000_000, 16_000_000])
    disturbed = fit([(1000, 0.02), (4000, 0.02), *large])  # twenty times what the line says
    assert disturbed.worst < 0.05
    alone = fit([(1000, 0.001), (1_000_000, 0.011)])
    assert alone.alpha == pytest.approx(0.00099, rel=0.01)


def test_small_messages_are_judged_only_among_themselves() -> None:
    points = [(1000, 0.02), (100_000, 0.001), (1_000_000, 0.01)]
    assert fit(points).worst < 0.05
    assert fit([(n / 1000, t) for n, t in points]).worst > 0.2
    assert FROM == 64_000


def test_times_that_do_not_grow_have_no_beta() -> None:
    found = fit([(1000, 0.003), (4000, 0.002), (16000, 0.001)])
    assert found.beta == 0
    assert 0.001 < found.alpha < 0.003


@pytest.mark.parametrize("points", [[], [(0, 1.0)], [(1000, 0.0)], [(1000, -1.0)], [(1000, float("nan"))]])
def test_what_is_no_measurement_is_refused(points: list[tuple[float, float]]) -> None:
    with pytest.raises(ValueError, match=r"at least one point|must be positive"):
        fit(points)
