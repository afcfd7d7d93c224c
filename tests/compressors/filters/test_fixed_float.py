"""Codes of 1 to 4 bytes: true stochastic rounding, exact where it can be, and damaged ones refused."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from commlib.codecs.filter import Chain, Content
from commlib.compressors.filters.fixed_float import FixedFloat
from commlib.errors import ProtocolError
from tests.support.hypothesis_strategies import tensors

WIDTHS = [1, 2, 3, 4]
SIGMAS = 6.0  # standard errors; fixed seeds, so a test that passes always passes


def coded(x: Tensor, nbytes: int, seed: int = 0) -> Content:
    return Chain([FixedFloat(nbytes)]).sender(len(x), seed).encode(Content(None, x))


def decoded(content: Content, nbytes: int, size: int) -> Tensor:
    return Chain([FixedFloat(nbytes)]).receiver(size).decode(content).values


def roundtrip(x: Tensor, nbytes: int, seed: int = 0) -> Tensor:
    return decoded(coded(x, nbytes, seed), nbytes, len(x))


@example(torch.tensor([-2.6e-27, -4.2e26]), 1, 0)  # min + (max - min) is 0, more than max
@given(tensors(st.sampled_from([(0,), (1,), (2,), (257,)]), largest=3e38), st.sampled_from(WIDTHS), st.integers(0, 99))
def test_no_value_errs_by_more_than_a_bin_and_none_leaves_the_range(x: Tensor, nbytes: int, seed: int) -> None:
    content = coded(x, nbytes, seed)
    assert content.values.dtype == torch.uint8
    assert content.values.numel() == nbytes * x.numel()
    came = decoded(content, nbytes, len(x))
    assert (came.dtype, came.shape) == (torch.float32, x.shape)
    if x.numel():
        low, high = float(x.min()), float(x.max())
        rounding = max(2**-24 * max(-low, high), 2**-150)  # to float32, subnormal ones too
        assert float((came.double() - x).abs().max()) <= (high - low) / (256**nbytes - 2) * (1 + 1e-9) + rounding
        assert low <= float(came.min()) <= float(came.max()) <= high
        assert float(came[x.argmin()]) == low


@pytest.mark.parametrize("nbytes", WIDTHS)
def test_codes_are_little_endian_and_reach_from_0_to_the_top(nbytes: int) -> None:
    content = coded(torch.tensor([-1.0, 3.0]), nbytes)
    top = (256**nbytes - 2).to_bytes(nbytes, "little")
    assert content.values.numpy().tobytes() == bytes(nbytes) + top
    assert content.notes == ([-1.0, 3.0],)
    assert decoded(content, nbytes, 2).tolist() == [-1.0, 3.0]


@pytest.mark.parametrize("nbytes", WIDTHS)
@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, -2.7, 1e-45, -3e38, 0.1])
@pytest.mark.parametrize("n", [0, 1, 1000])
def test_values_that_are_all_the_same_come_back_exactly(nbytes: int, value: float, n: int) -> None:
    x = torch.full((n,), value)
    assert torch.equal(roundtrip(x, nbytes).view(torch.int32), x.view(torch.int32))


@pytest.mark.parametrize("fraction", [0.01, 0.25, 0.5, 0.9])
@pytest.mark.parametrize("nbytes", [1, 2])
def test_each_value_is_rounded_up_as_often_as_its_fraction_says(nbytes: int, fraction: float) -> None:
    """A coin instead, as in the code first released, would be off by ½ - fraction."""
    n, top = 50_000, 256**nbytes - 2
    x = torch.full((n,), 100 + fraction)  # float32 holds it to 2⁻¹⁸ of a bin
    x[0], x[1] = 0, top
    steps = coded(x, nbytes).values.view(n, nbytes).long()[2:]
    codes = (steps << torch.arange(0, 8 * nbytes, 8)).sum(1)
    assert set(codes.tolist()) == {100, 101}
    mean = float((codes - 100).double().mean())
    assert abs(mean - fraction) < SIGMAS * math.sqrt(fraction * (1 - fraction) / n) + 2**-17


@pytest.mark.parametrize("nbytes", [1, 2])
def test_values_spread_evenly_err_by_nothing_on_average_and_by_a_sixth_of_a_bin_squared(nbytes: int) -> None:
    n = 200_000
    x = torch.rand(n, generator=torch.Generator().manual_seed(5))
    error = (roundtrip(x, nbytes).double() - x.double()) / ((float(x.max()) - float(x.min())) / (256**nbytes - 2))
    assert abs(float(error.mean())) < SIGMAS * math.sqrt(1 / 6 / n)
    spread = math.sqrt(1 / 15 - 1 / 36)  # of the squared error: its mean square is ∫(1-f)f⁴ + f(1-f)⁴ = 1/15
    assert abs(float(error.square().mean()) - 1 / 6) < SIGMAS * spread / math.sqrt(n)


def test_four_bytes_are_as_good_as_float32() -> None:
    x = torch.rand(10_000, generator=torch.Generator().manual_seed(1)) * 2 - 1
    assert float((roundtrip(x, 4) - x).abs().max()) <= 2 / (2**32 - 2) + 2**-25


def test_messages_of_one_sender_are_rounded_by_different_draws_and_the_seed_decides_them() -> None:
    x = torch.rand(100, generator=torch.Generator().manual_seed(1))
    runs = [Chain([FixedFloat(1)]).sender(100, seed) for seed in (4, 4, 5)]
    first, second = ([r.encode(Content(None, x)).values.tolist() for r in runs] for _ in range(2))
    assert first[0] == first[1]
    assert second[0] == second[1]
    assert first[0] != second[0]
    assert first[0] != first[2]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="fixed_float: a value is not finite"):
        coded(torch.tensor([0.0, bad]), 3)


@pytest.mark.parametrize("nbytes", [-1, 0, 5, 8])
def test_other_numbers_of_bytes_are_refused(nbytes: int) -> None:
    with pytest.raises(ValueError, match=r"nbytes must be in \[1, 4\]"):
        FixedFloat(nbytes)


@pytest.mark.parametrize(
    "note",
    [
        *(None, 3, 1.0, "range", b"1234567890123456", [], [0.0], [0.0, 1.0, 2.0], [0, 1], ["0", "1"], [[0.0], [1.0]]),
        *([math.nan, 1.0], [0.0, math.nan], [0.0, math.inf], [-math.inf, 0.0], [1.0, 0.0], [0.0, 3.5e38], [-1e99, 0.0]),
    ],
)
def test_a_note_that_is_no_range_is_refused(note: object) -> None:
    content = coded(torch.tensor([0.0, 0.5, 1.0]), 2)
    with pytest.raises(ProtocolError, match="no range"):
        decoded(dataclasses.replace(content, notes=(note,)), 2, 3)


def test_codes_of_another_length_number_or_size_are_refused() -> None:
    content = coded(torch.tensor([0.0, 0.5, 1.0]), 2)

    def said(values: Tensor, size: int = 3) -> str:
        with pytest.raises(ProtocolError) as e:
            decoded(dataclasses.replace(content, values=values), 2, size)
        return str(e.value)

    assert "5 of torch.uint8 are no codes of 2 bytes" in said(content.values[:5])
    assert "3 of torch.float32 are no codes" in said(torch.zeros(3))
    assert "4 codes for 3 keys" in said(torch.zeros(8, dtype=torch.uint8))
    assert "2 values without keys, 3 are due" in said(content.values[:4])
    beyond = content.values.clone()
    beyond[2:4] = 255
    assert "code 65535 is beyond the largest, 65534" in said(beyond)
