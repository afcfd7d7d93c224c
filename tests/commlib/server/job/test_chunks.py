"""Chunks: every value is in one, none is too large, and they are alike."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from commlib.server.job.chunks import NBYTES, cut, fitting


@given(
    st.lists(st.integers(0, 200), max_size=8),
    st.integers(1, 100),
    st.integers(0, 100),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
)
def test_every_value_is_in_one_chunk_and_large_parameters_are_in_as_few_equal_ones_as_can_be(
    numels: list[int], nbytes: int, small: int, dtype: torch.dtype
) -> None:
    nbytes = max(nbytes, dtype.itemsize)
    flat = {f"p{i}": torch.arange(n).to(dtype) for i, n in enumerate(numels)}
    chunks = cut(flat, nbytes, small=small)
    out = {name: torch.full_like(p, -1) for name, p in flat.items()}
    for c in chunks:
        values = c.gather(flat)
        assert len(values) == c.numel
        c.scatter(values, out)
    assert all(torch.equal(out[name], p) for name, p in flat.items())
    assert sum(c.numel for c in chunks) == sum(numels)
    assert len({c.key for c in chunks}) == len(chunks)
    assert all(0 < c.nbytes <= nbytes for c in chunks)
    for name, p in flat.items():
        own = [c for c in chunks if name in c.names]
        if p.nbytes >= min(small, nbytes):
            assert all(len(c.pieces) == 1 for c in own)
            assert len(own) == -(-len(p) // (nbytes // dtype.itemsize))
            lengths = [c.numel for c in own]
            assert max(lengths, default=0) - min(lengths, default=0) <= 1
        else:
            assert len(own) == (1 if len(p) else 0)
            assert all(c.nbytes <= small for c in own)


def test_keys_name_the_parameter_and_the_values() -> None:
    model = {"fc.weight": torch.zeros(1024, 1024), "fc.bias": torch.zeros(3), "last.bias": torch.zeros(2)}
    weight, more, biases = cut(model)
    assert (weight.key, more.key) == ("fc.weight[0:524288]", "fc.weight[524288:1048576]")
    assert weight.nbytes == NBYTES
    assert biases.key == "fc.bias[0:3]+1"
    assert biases.names == ("fc.bias", "last.bias")


def test_only_what_is_alike_shares_a_chunk() -> None:
    model = {n: torch.zeros(3, dtype=torch.float64 if n == "d" else torch.float32) for n in "abcd"}
    keys = {c.key for c in cut(model, alike=lambda name: name == "b")}
    assert keys == {"a[0:3]+1", "b[0:3]", "d[0:3]"}


def test_what_must_stay_whole_is_neither_cut_nor_shared() -> None:
    model = {"large": torch.zeros(1 << 20), "little": torch.zeros(3), "other": torch.zeros(3)}
    keys = [c.key for c in cut(model, whole=lambda n: n != "other")]
    assert keys == ["large[0:1048576]", "little[0:3]", "other[0:3]"]


def test_a_piece_of_one_parameter_is_not_copied() -> None:
    flat = torch.zeros(10)
    cut({"w": flat}, 16, small=0)[1].gather({"w": flat}).fill_(1)
    assert flat.sum() == 3


def test_chunks_too_small_for_a_value_are_refused() -> None:
    with pytest.raises(ValueError, match=r"a chunk of 7 bytes has no room for a value of torch\.float64"):
        cut({"w": torch.zeros(2, dtype=torch.float64)}, 7, small=0)


@pytest.mark.parametrize(
    ("gbit_s", "kib"),
    [(0.0, 128), (1e-3, 128), (0.05, 128), (0.136, 512), (0.2, 512), (0.42, 1024), (0.94, 2048), (25.0, 2048)],
)
def test_a_chunk_is_what_the_link_carries_in_so_many_milliseconds_within_bounds(gbit_s: float, kib: int) -> None:
    assert fitting(gbit_s) == kib << 10
