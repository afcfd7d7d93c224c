"""Rows as bytes: exact ones come as they were, coded ones within the codec's error; what makes no sense is refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from commlib.messaging.link_model import AlphaBeta, Link
from commlib.placement.choose import PlaceableLinear, placed_way
from commlib.placement.communication import RowCoder

DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float64])


def rows(seed: int, n: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(n, width, generator=torch.Generator().manual_seed(seed)).to(dtype)


@given(st.integers(0, 1 << 31), st.integers(0, 5), st.integers(1, 9), DTYPES)
def test_without_a_codec_rows_come_as_they_were(seed: int, n: int, width: int, dtype: torch.dtype) -> None:
    coder, x = RowCoder(), rows(seed, n, width, dtype)
    payload = coder.encode(x[:, : max(1, width - 1)])
    assert len(payload) == coder.nbytes(n, max(1, width - 1), dtype)
    assert torch.equal(coder.decode(payload, n, max(1, width - 1), dtype), x[:, : max(1, width - 1)])


@given(
    st.integers(0, 1 << 31), st.integers(0, 5), st.integers(1, 40), DTYPES,
    st.sampled_from([("fp16", 1e-3), ("bf16", 8e-3), ("int8", 1e-2), ("qsgd:levels=127", 0.2), ("onebit", 1.0)]),
)  # fmt: skip
def test_coded_rows_come_in_their_shape_and_dtype_within_the_codecs_error(
    seed: int, n: int, width: int, dtype: torch.dtype, codec: tuple[str, float]
) -> None:
    spec, most = codec
    coder, x = RowCoder(spec), rows(seed, n, width, dtype)
    payload = coder.encode(x)
    found = coder.decode(payload, n, width, dtype)
    assert len(payload) == coder.nbytes(n, width, dtype)
    assert len(payload) % 8 == 0
    assert (found.shape, found.dtype) == (x.shape, dtype)
    assert (found.float() - x.float()).norm() <= (most + 0.01) * x.float().norm()


def test_what_is_drawn_is_torchs_and_nothing_is_drawn_without_need() -> None:
    x = rows(1, 4, 64, torch.float32)
    torch.manual_seed(5)
    first = RowCoder("qsgd").encode(x)
    second = RowCoder("qsgd").encode(x)
    torch.manual_seed(5)
    assert torch.equal(RowCoder("qsgd").encode(x), first)  # as dropout: what is computed once more is the same
    assert not torch.equal(first, second)
    before = torch.get_rng_state()
    RowCoder("int8").encode(x)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        ("int8:ef=on", "nothing to feed back"),
        ("dgc", "from step to step"),
        ("powersgd", "from step to step|same seed"),
        ("randomk", "same seed"),
        ("int9", "did you mean 'int8'"),
        ("int8:block=0", "block"),
    ],
)
def test_codecs_that_remember_or_share_a_seed_are_refused(spec: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        RowCoder(spec)


@pytest.mark.parametrize("spec", ["none", "int8", "onebit", "fp16"])
def test_it_is_named_as_it_was_given(spec: str) -> None:
    assert str(RowCoder(spec)) == spec
    assert RowCoder(spec).exact == (spec == "none")


def test_auto_prices_a_placed_layer_by_the_bytes_that_it_sends() -> None:
    link = Link(4, AlphaBeta(0.0, 1e-7), AlphaBeta(0.0, 1e-7))
    layer = PlaceableLinear(1000, 2000, 8, True, 0.0, 0.0, 0.0, 0.0, 0.0)
    exact, coded = placed_way(layer, link), placed_way(layer, link, RowCoder("int8"))
    assert 3.7 < exact.sent / coded.sent < 4.0
    assert coded.alone_s < exact.alone_s
