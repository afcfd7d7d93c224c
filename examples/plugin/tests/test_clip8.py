"""What commlib's own codecs are held to, on this one; and what it says of itself."""

from __future__ import annotations

import pytest
import torch
from commlib_clip8 import Clip8

from commlib.codecs import registry
from commlib.codecs.base import LayerSpec
from commlib.planning.simulate import exchange_once
from commlib.testing import check_compressor


@pytest.mark.parametrize("spec", ["clip8", "topk:ratio=0.5,values=clip8"])
def test_it_keeps_every_promise_of_a_codec(spec: str) -> None:
    check_compressor(spec)


def test_it_is_found_by_its_name() -> None:
    assert "clip8" in str(registry.make("clip8"))


def test_a_value_is_off_by_a_sixteenth_of_itself_at_most_and_replicas_stay_equal() -> None:
    x = torch.tensor([[1.0, -0.3, 0.07], [0.9, 0.5, -0.01]])
    payload, out = torch.empty(Clip8().nbytes(LayerSpec.of(x)), dtype=torch.uint8), torch.empty_like(x)
    Clip8().compress(x, payload)
    Clip8().decompress(payload, out)
    assert ((out - x).abs() <= x.abs() / 16 + 2**-9).all()
    means = exchange_once("clip8@gather", [x, -x, 2 * x])
    assert all(torch.equal(mean, means[0]) for mean in means)
