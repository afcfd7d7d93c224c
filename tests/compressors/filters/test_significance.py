"""What is below the threshold waits, is added up, and is never lost."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from commlib.codecs.filter import Chain, Content, Sending
from commlib.compressors.filters.significance import Significance
from commlib.errors import ProtocolError


def sender(size: int, threshold: float, decay: bool = False) -> Sending:
    return Chain([Significance(threshold, decay)]).sender(size, 0)


def residual(sending: Sending) -> Tensor:
    owed = sending.residual()
    assert owed is not None
    return owed.clone()


def test_a_value_is_sent_once_it_has_added_up() -> None:
    sending = sender(3, 1.0)
    first = sending.encode(Content(None, torch.tensor([0.5, -1.0, 0.25])))
    assert first.keys is not None
    assert (first.keys.dtype, first.keys.tolist(), first.values.tolist()) == (torch.int64, [1], [-1.0])
    assert residual(sending).tolist() == [0.5, 0.0, 0.25]
    second = sending.encode(Content(torch.tensor([0, 2]), torch.tensor([0.5, 0.25])))
    assert second.keys is not None
    assert (second.keys.tolist(), second.values.tolist()) == ([0], [1.0])
    assert residual(sending).tolist() == [0.0, 0.0, 0.5]


def test_where_nothing_is_left_out_no_keys_are_made() -> None:
    sent = sender(2, 1.0).encode(Content(None, torch.tensor([1.0, -2.0])))
    assert sent.keys is None


def test_with_decay_the_threshold_of_the_t_th_message_is_a_t_th() -> None:
    sending = sender(1, 1.0, decay=True)
    numbers = []
    for value in (0.9, -0.45, 0.0, 0.24):  # with what waits: 0.9 < 1; 0.45 < 1/2; 0.45 ≥ 1/3; 0.24 < 1/4
        sent = sending.encode(Content(None, torch.tensor([value])))
        numbers.append([round(v, 6) for v in sent.values.tolist()])
    assert numbers == [[], [], [0.45], []]
    assert sending.encode(Content(None, torch.tensor([0.0]))).values.tolist() == pytest.approx([0.24])  # ≥ 1/5


@given(st.floats(0, 3), st.booleans(), st.integers(0, 2**32), st.integers(1, 200), st.integers(1, 12))
def test_sent_and_residual_are_what_was_given_and_what_waits_is_below_the_threshold(
    threshold: float, decay: bool, seed: int, size: int, messages: int
) -> None:
    draws = torch.Generator().manual_seed(seed)
    sending, receiver = sender(size, threshold, decay), Chain([Significance(threshold, decay)]).receiver(size)
    total, came = torch.zeros(size).double(), torch.zeros(size).double()
    for t in range(1, messages + 1):
        keys = (torch.rand(size, generator=draws) < 0.7).nonzero().view(-1)
        values = torch.randn(len(keys), generator=draws)
        total[keys] += values
        sent = receiver.decode(sending.encode(Content(keys, values)))
        assert sent.keys is not None
        came[sent.keys] += sent.values
        now = torch.tensor(threshold / (t if decay else 1))
        assert bool((sent.values.abs() >= now).all())
        waits = residual(sending)[keys]
        assert bool(((waits.abs() < now) | (waits == 0)).all())
    assert torch.allclose(came + residual(sending), total, rtol=0, atol=1e-5)


def test_threshold_0_sends_all_and_a_high_one_nothing() -> None:
    x = torch.tensor([0.0, 1e-45, -3.0])
    assert torch.equal(sender(3, 0.0).encode(Content(None, x)).values, x)
    nothing = sender(3, 1e30).encode(Content(None, x))
    assert nothing.keys is not None
    assert (nothing.keys.numel(), nothing.values.numel()) == (0, 0)


def test_residuals_of_two_peers_do_not_mix() -> None:
    one, other = sender(1, 1.0), sender(1, 1.0)
    one.encode(Content(None, torch.tensor([0.75])))
    assert other.encode(Content(None, torch.tensor([0.5]))).values.tolist() == []
    assert one.encode(Content(None, torch.tensor([0.5]))).values.tolist() == [1.25]
    assert residual(other).tolist() == [0.5]


def test_a_sum_that_is_not_finite_is_refused_and_nothing_has_changed() -> None:
    sending = sender(1, 3.2e38)
    sending.encode(Content(None, torch.tensor([3e38])))
    with pytest.raises(ValueError, match="not finite, or becomes so with what was not sent before"):
        sending.encode(Content(None, torch.tensor([3e38])))
    assert residual(sending).tolist() == torch.tensor([3e38]).tolist()


@pytest.mark.parametrize("threshold", [-0.1, math.inf, math.nan])
def test_thresholds_that_are_none_are_refused(threshold: float) -> None:
    with pytest.raises(ValueError, match=r"threshold must be in \[0, inf\)"):
        Significance(threshold)


@pytest.mark.parametrize("note", [0, "", [], [0.5], b"x", False])
def test_a_note_of_something_else_is_refused(note: object) -> None:
    with pytest.raises(ProtocolError, match="significance leaves None as its note"):
        Chain([Significance(1.0)]).receiver(1).decode(Content(None, torch.zeros(1), (note,)))
