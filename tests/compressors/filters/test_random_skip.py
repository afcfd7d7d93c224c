"""Each value is sent with its probability: unbiased when scaled, nothing lost with error feedback."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from commlib.codecs.filter import Chain, Content, Sending
from commlib.compressors.filters.random_skip import RandomSkip
from commlib.errors import ProtocolError

SIGMAS = 6.0  # standard errors; fixed seeds, so a test that passes always passes
KEEPS = [0.01, 0.25, 0.5, 0.9]


def sender(size: int, keep: float, *, ef: bool = False, seed: int = 0) -> Sending:
    return Chain([RandomSkip(keep, ef)]).sender(size, seed)


def dense(content: Content, size: int) -> Tensor:
    out = torch.zeros(size).double()
    out[torch.arange(size) if content.keys is None else content.keys] = content.values.double()
    return out


@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("ef", [False, True])
def test_as_many_are_sent_as_the_probability_says(keep: float, ef: bool) -> None:
    n = 50_000
    sent = sender(n, keep, ef=ef).encode(Content(None, torch.ones(n)))
    assert abs(sent.values.numel() / n - keep) < SIGMAS * math.sqrt(keep * (1 - keep) / n)


@pytest.mark.parametrize("keep", KEEPS)
def test_scaled_values_are_unbiased_with_a_variance_of_omega(keep: float) -> None:
    n = 50_000
    x = torch.randn(n, generator=torch.Generator().manual_seed(3))
    error = dense(sender(n, keep).encode(Content(None, x)), n) - x.double()
    energy, omega = float(x.double().square().sum()), 1 / keep - 1
    along = float((error * x.double()).sum())  # Σ x²(b/keep - 1): variance ω Σ x⁴
    assert abs(along) < SIGMAS * math.sqrt(omega * float(x.double().pow(4).sum()))
    # x²(b/keep - 1)² is x² with 1 - keep, x²ω² with keep: the variance of its sum is at most Σ x⁴ (1 - keep + keep·ω⁴)
    spread = math.sqrt(float(x.double().pow(4).sum()) * (1 - keep + keep * omega**4))
    assert abs(float(error.square().sum()) - omega * energy) < SIGMAS * spread


def test_what_is_sent_is_scaled_or_with_feedback_as_it_is() -> None:
    x = torch.arange(1.0, 101.0)
    scaled, plain = (sender(100, 0.25, ef=ef).encode(Content(None, x)) for ef in (False, True))
    assert scaled.keys is not None
    assert plain.keys is not None
    assert scaled.keys.dtype == torch.int64
    assert torch.equal(scaled.keys, plain.keys)  # the same seed draws the same
    assert torch.equal(scaled.values, 4 * x[scaled.keys])
    assert torch.equal(plain.values, x[plain.keys])


def test_with_feedback_a_value_is_added_to_the_next_of_its_key() -> None:
    sending = sender(2, 0.5, ef=True)
    given_, came = 0.0, 0.0
    for _ in range(50):
        sent = dense(sending.encode(Content(torch.tensor([1]), torch.ones(1))), 2)
        given_ += 1
        if float(sent[1]):
            assert float(sent[1]) == given_ - came  # all that had waited, at once
        came += float(sent[1])
    assert 0 < came <= given_


@given(st.sampled_from(KEEPS), st.integers(0, 2**32), st.integers(0, 200), st.integers(1, 12))
def test_with_feedback_sent_and_residual_are_what_was_given(keep: float, seed: int, size: int, messages: int) -> None:
    draws = torch.Generator().manual_seed(seed)
    sending, receiver = sender(size, keep, ef=True, seed=seed), Chain([RandomSkip(keep, True)]).receiver(size)
    total, came = torch.zeros(size).double(), torch.zeros(size).double()
    for _ in range(messages):
        keys = (torch.rand(size, generator=draws) < 0.7).nonzero().view(-1)
        values = torch.randn(len(keys), generator=draws)
        total[keys] += values
        came += dense(receiver.decode(sending.encode(Content(keys, values))), size)
    owed = sending.residual()
    assert owed is not None
    assert torch.allclose(came + owed, total, rtol=0, atol=1e-5)


def test_without_feedback_nothing_is_owed() -> None:
    assert sender(4, 0.5).residual() is None


@pytest.mark.parametrize("ef", [False, True])
def test_all_are_kept_with_probability_1_and_no_keys_are_made(ef: bool) -> None:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    sent = sender(1000, 1.0, ef=ef).encode(Content(None, x))
    assert sent.keys is None
    assert torch.equal(sent.values, x)


@pytest.mark.parametrize("ef", [False, True])
def test_the_seed_decides_what_is_sent_and_each_message_draws_anew(ef: bool) -> None:
    runs = [sender(200, 0.5, ef=ef, seed=s) for s in (1, 1, 2)]
    first, second = ([dense(r.encode(Content(None, torch.ones(200))), 200) != 0 for r in runs] for _ in range(2))
    assert torch.equal(first[0], first[1])
    assert torch.equal(second[0], second[1])
    assert not torch.equal(first[0], second[0])
    assert not torch.equal(first[0], first[2])


def test_a_value_that_scaling_makes_infinite_is_refused() -> None:
    with pytest.raises(ValueError, match="random_skip: a value is not finite"):
        sender(1, 0.01).encode(Content(None, torch.tensor([3e38])))


@pytest.mark.parametrize("keep", [0.0, -0.5, 1.01, math.nan, math.inf])
def test_probabilities_that_are_none_are_refused(keep: float) -> None:
    with pytest.raises(ValueError, match=r"keep must be in \(0, 1\]"):
        RandomSkip(keep)


@pytest.mark.parametrize("note", [0, "", [], [0.5], b"x", True])
def test_a_note_of_something_else_is_refused(note: object) -> None:
    with pytest.raises(ProtocolError, match="random_skip leaves None as its note"):
        Chain([RandomSkip()]).receiver(1).decode(Content(None, torch.zeros(1), (note,)))
