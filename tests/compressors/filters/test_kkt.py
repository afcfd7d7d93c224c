"""What the KKT filter sends and what it leaves out, against a plain oracle and through the real chain."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from commlib.codecs.filter import Chain, Content, Sending, chain
from commlib.compressors.filters.kkt import Kkt
from commlib.errors import ProtocolError

BAD = (math.nan, math.inf, -math.inf)


def sent(options: Kkt, weights: list[float], gradient: list[float], number: int) -> list[int]:
    """Oracle: places whose gradient must be sent."""
    pairs = enumerate(zip(weights, gradient, strict=True))
    whole = number % options.refresh == options.refresh - 1
    within = (1 - options.margin) * options.l1
    return [i for i, (w, g) in pairs if whole or w != 0 or not abs(g) <= within]


def draw(seed: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Weights of which two thirds are 0 (of both signs), a gradient with a bad value now and then, and some keys."""
    draws = torch.Generator().manual_seed(seed)
    weights = torch.randn(size, generator=draws)
    weights[torch.rand(size, generator=draws) < 0.4] = 0.0
    weights[torch.rand(size, generator=draws) < 0.4] = -0.0
    gradient = torch.randn(size, generator=draws)
    gradient[torch.rand(size, generator=draws) < 0.1] = BAD[seed % 3]
    return weights, gradient, (torch.rand(size, generator=draws) < 0.7).nonzero().view(-1)


def places(content: Content, size: int) -> list[int]:
    return list(range(size)) if content.keys is None else content.keys.tolist()


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.numpy().tobytes() == b.numpy().tobytes()


@given(
    seed=st.integers(0, 2**32),
    size=st.integers(0, 60),
    number=st.integers(0, 40),
    l1=st.floats(0.01, 3),
    margin=st.floats(0, 0.99),
    refresh=st.integers(1, 9),
)
def test_what_is_0_and_within_the_penalty_is_left_out_and_nothing_else(
    seed: int, size: int, number: int, l1: float, margin: float, refresh: int
) -> None:
    options = Kkt(l1, margin, refresh)
    weights, gradient, keys = draw(seed, size)
    sender, receiver = Chain([options]).sender(size, 0), Chain([options]).receiver(size)
    sender.see(weights, number)
    for content in (Content(None, gradient), Content(keys, gradient[keys])):
        came = receiver.decode(sender.encode(content))
        given_ = places(content, size)
        expected = sent(options, weights[given_].tolist(), gradient[given_].tolist(), number)
        assert places(came, size) == [given_[i] for i in expected]
        assert same_bits(came.values, gradient[places(came, size)])
        bad = [k for k in given_ if not math.isfinite(float(gradient[k]))]
        assert set(bad) <= set(places(came, size))
    assert sender.residual() is None


def test_of_so_many_pushes_the_last_leaves_nothing_out_whatever_came_between() -> None:
    sender = Chain([Kkt(1.0, refresh=3)]).sender(2, 0)
    sizes = []
    for number in (0, 1, 2, 3, 5, 6, 8):  # 4 and 7 had no gradient, or one that was not finite
        sender.see(torch.zeros(2), number)
        sizes.append(sender.encode(Content(None, torch.tensor([0.5, -0.5]))).values.numel())
    assert sizes == [0, 0, 2, 0, 2, 0, 2]


def test_while_no_values_have_been_seen_nothing_is_left_out_and_with_refresh_1_never() -> None:
    gradient = torch.zeros(3)
    blind, always = Chain([Kkt(1.0)]).sender(3, 0), Chain([Kkt(1.0, refresh=1)]).sender(3, 0)
    always.see(torch.zeros(3), 0)
    for sender in (blind, always):
        coded = sender.encode(Content(None, gradient))
        assert coded.keys is None
        assert torch.equal(coded.values, gradient)


def test_what_is_left_out_does_not_come_later() -> None:
    sender = Chain([Kkt(1.0)]).sender(1, 0)
    sender.see(torch.zeros(1), 0)
    assert sender.encode(Content(None, torch.tensor([0.8]))).values.tolist() == []
    sender.see(torch.zeros(1), 1)
    assert sender.encode(Content(None, torch.tensor([-2.0]))).values.tolist() == [-2.0]


def test_zeros_are_those_that_were_seen_and_not_what_became_of_the_tensor() -> None:
    weights, sender = torch.tensor([0.0, 1.0]), Chain([Kkt(1.0)]).sender(2, 0)
    sender.see(weights, 0)
    weights.fill_(0.0)
    assert places(sender.encode(Content(None, torch.zeros(2))), 2) == [1]


@given(seed=st.integers(0, 2**32), refresh=st.integers(2, 4))
@example(seed=1027440, refresh=2)  # a gradient is the float32 next to the penalty, above it
def test_through_the_whole_chain_what_is_sent_comes_to_within_a_bin(seed: int, refresh: int) -> None:
    whole = chain(f"kkt:l1=0.8,refresh={refresh}+key_cache+fixed_float+lossless")
    sender, receiver, size = whole.sender(400, 1), whole.receiver(400), 400
    for number in range(5):
        weights, gradient, _ = draw(seed + number, size)
        gradient = gradient.nan_to_num(0.1, 0.1, 0.1)
        sender.see(weights, number)
        came = receiver.decode(sender.encode(Content(None, gradient)))
        expected = sent(Kkt(0.8, refresh=refresh), weights.tolist(), gradient.tolist(), number)
        assert places(came, size) == expected
        kept = gradient[expected]
        bin_ = float(kept.max() - kept.min()) / (2**24 - 2)
        assert torch.allclose(came.values, kept, rtol=0, atol=1.01 * bin_ + 1e-6)


def test_a_sparse_gradient_takes_fewer_bytes() -> None:
    def nbytes(sender: Sending) -> int:
        draws, total = torch.Generator().manual_seed(0), 0
        for number in range(7):  # but for the eighth
            sender.see(torch.zeros(5000), number)
            coded = sender.encode(Content(None, torch.randn(5000, generator=draws) * 0.3))
            total += coded.values.nbytes + (0 if coded.keys is None else coded.keys.nbytes)
        return total

    coded = "key_cache+fixed_float+lossless"
    assert nbytes(chain(f"kkt:l1=1+{coded}").sender(5000, 0)) < nbytes(chain(coded).sender(5000, 0)) / 100


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"l1": 0.0}, r"kkt: l1 must be in \(0, inf\), got 0.0"),
        ({"l1": math.nan}, r"kkt: l1 must be in \(0, inf\), got nan"),
        ({"l1": math.inf}, r"kkt: l1 must be in \(0, inf\), got inf"),
        ({"l1": 1.0, "margin": 1.0}, r"kkt: margin must be in \[0, 1\), got 1.0"),
        ({"l1": 1.0, "margin": -0.1}, r"kkt: margin must be in \[0, 1\), got -0.1"),
        ({"l1": 1.0, "refresh": 0}, "kkt: refresh must be at least 1, got 0"),
    ],
)
def test_numbers_that_cannot_be_are_refused(options: dict[str, float], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Kkt(**options)  # type: ignore[arg-type]


def test_it_must_come_before_what_makes_bytes_and_its_l1_must_be_said() -> None:
    with pytest.raises(ValueError, match="kkt must come before key_cache, which codes the keys it reads"):
        chain("key_cache+kkt:l1=1")
    with pytest.raises(ValueError, match="filter 'kkt' needs l1: write kkt:l1=…"):
        chain("kkt")


@pytest.mark.parametrize("note", [0, "", [], b"x", False])
def test_a_note_of_something_else_is_refused(note: object) -> None:
    with pytest.raises(ProtocolError, match="kkt leaves None as its note"):
        Chain([Kkt(1.0)]).receiver(1).decode(Content(None, torch.zeros(1), (note,)))
