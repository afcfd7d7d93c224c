"""The bytes of rows: what is written is read, whatever codec there is between."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from commlib.codecs.registry import make
from commlib.exchange.factors.guard import DTYPES
from commlib.exchange.factors.payload import RowCapacity, RowPayload, refuse
from commlib.exchange.factors.tap import Rows

EXACT = "fp32"
CODECS = {EXACT: 0.0, "bf16": 2**-8, "fp16": 2**-10, "int8:ef=off": 2**-7, "natural": 1.0}
SEEDS = (5, 6)


def payload(n: int, m: int, codec: str) -> RowPayload:
    return RowPayload(n, m, None if codec == EXACT else make(codec).inner if codec in ("bf16", "fp16") else make(codec))  # type: ignore[attr-defined]


def calls(n: int, m: int, counts: list[int]) -> list[Rows]:
    gen = torch.Generator().manual_seed(1)
    return [(torch.randn(k, m, generator=gen), torch.randn(k, n, generator=gen)) for k in counts]


def written(p: RowPayload, room: RowCapacity, rows: list[Rows]) -> Tensor:
    body = torch.zeros(p.nbytes(room), dtype=torch.uint8)
    p.write(body, room, rows, SEEDS)
    return body


@pytest.mark.parametrize("codec", CODECS)
@given(
    n=st.integers(1, 9), m=st.integers(1, 9), counts=st.lists(st.integers(0, 4), max_size=3), spare=st.integers(0, 3)
)
def test_rows_of_all_calls_come_back_in_order(codec: str, n: int, m: int, counts: list[int], spare: int) -> None:
    p, rows, room = payload(n, m, codec), calls(n, m, counts), RowCapacity(sum(counts) + spare)
    body = written(p, room, rows)
    assert len(body) % 8 == 0
    u, v = p.read(body, room, sum(counts))
    for found, i, width in ((u, 0, m), (v, 1, n)):
        there = torch.cat([r[i] for r in rows]) if rows else torch.empty(0, width)
        assert found.shape == there.shape
        torch.testing.assert_close(found, there, rtol=CODECS[codec], atol=CODECS[codec] * 4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_travel_in_their_own_dtype_unless_a_codec_wants_float32(dtype: torch.dtype) -> None:
    rows = [(u.to(dtype), v.to(dtype)) for u, v in calls(3, 2, [4])]
    exact, coded = RowPayload(3, 2), RowPayload(3, 2, make("natural"))
    assert exact.dtype(rows, torch.float16) is dtype
    assert exact.dtype([], torch.float16) is torch.float16
    assert coded.dtype(rows, torch.float16) is torch.float32
    u, v = exact.read(written(exact, RowCapacity(4, dtype), rows), RowCapacity(4, dtype), 4)
    assert torch.equal(u, rows[0][0])
    assert torch.equal(v, rows[0][1])


def test_compressed_rows_take_the_bytes_that_the_codec_says() -> None:
    assert RowPayload(16, 8).nbytes(RowCapacity(4)) == 4 * 24 * 4
    assert RowPayload(16, 8, make("fp16").inner).nbytes(RowCapacity(4)) == 4 * 24 * 2  # type: ignore[attr-defined]


def test_inputs_and_gradients_draw_from_seeds_of_their_own() -> None:
    p, room = RowPayload(4, 4, make("qsgd:levels=1")), RowCapacity(50)
    same = torch.rand(50, 4, generator=torch.Generator().manual_seed(0))
    u, v = p.read(written(p, room, [(same, same)]), room, 50)
    assert not torch.equal(u, v)
    again = p.read(written(p, room, [(same, same)]), room, 50)
    assert torch.equal(u, again[0])


@pytest.mark.parametrize(
    ("codec", "words"),
    [("none", None), ("qsgd", None), ("int8:ef=off", None), ("int8", "memory"), ("powersgd", "memory")],
)
def test_what_keeps_a_memory_is_refused(codec: str, words: str | None) -> None:
    reason = refuse(make(codec))
    assert (reason is None) if words is None else (reason is not None and words in reason)


def test_what_draws_the_same_on_all_ranks_is_refused() -> None:
    reason = refuse(make("randomk:ef=off"))
    assert reason is not None
    assert "independently" in reason
