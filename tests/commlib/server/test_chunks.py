"""Chunks: every value is in one, none is too large, and they are alike."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from commlib.server.chunks import NBYTES, cut


@given(
    st.integers(0, 200),
    st.integers(1, 100),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
)
def test_chunks_are_as_few_and_as_equal_as_can_be_and_have_every_value_once(
    numel: int, nbytes: int, dtype: torch.dtype
) -> None:
    nbytes = max(nbytes, dtype.itemsize)
    whole = torch.arange(numel).to(dtype)
    chunks = cut({"w": whole}, nbytes)["w"]
    assert torch.equal(torch.cat([c.of(whole) for c in chunks]) if chunks else whole[:0], whole)
    lengths = [c.end - c.begin for c in chunks]
    assert len(chunks) == -(-numel // (nbytes // dtype.itemsize))
    assert max(lengths, default=0) - min(lengths, default=0) <= 1
    assert all(0 < c.nbytes <= nbytes for c in chunks)


def test_keys_name_the_parameter_and_the_values() -> None:
    chunks = cut({"fc.weight": torch.zeros(1024, 1024), "fc.bias": torch.zeros(3)})
    assert [c.key for c in chunks["fc.weight"]] == ["fc.weight[0:524288]", "fc.weight[524288:1048576]"]
    assert [c.key for c in chunks["fc.bias"]] == ["fc.bias[0:3]"]
    assert chunks["fc.weight"][0].nbytes == NBYTES


def test_a_chunk_is_a_view() -> None:
    flat = torch.zeros(10)
    cut({"w": flat}, 16)["w"][1].of(flat).fill_(1)
    assert flat.sum() == 3


def test_chunks_too_small_for_a_value_are_refused() -> None:
    with pytest.raises(ValueError, match=r"a chunk of 7 bytes has no room for a value of torch\.float64"):
        cut({"w": torch.zeros(2, dtype=torch.float64)}, 7)
