"""SparseLoCo: what its default message is, and what a residual that decays still owes."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from commlib.codecs import registry
from commlib.codecs.base import LayerSpec, Memory
from commlib.codecs.error_feedback import ErrorFeedback
from commlib.compressors.topk import TopK
from commlib.local_sgd.outer_optimizers import SparseLoCo
from tests.support.tiers import examples


def test_its_codec_is_64_of_every_4096_values_with_two_bits_each() -> None:
    codec, n = registry.make(SparseLoCo.codec), 100 * 4096
    assert codec == ErrorFeedback(TopK(1 / 64, "twobit", 4096), 0.95)
    sent = 100 * 64
    assert codec.nbytes(LayerSpec("w", (n,))) <= sent / 4 + 8 * sent / 64 + sent * 8.5 / 8  # values, means, places
    assert 4 * n / codec.nbytes(LayerSpec("w", (n,))) > 100


@settings(max_examples=examples(40))
@given(st.sampled_from(["topk:ratio=0.1,chunk=16", "onebit", "int8"]), st.sampled_from([0.5, 0.95]), st.integers(0, 99))
def test_what_is_held_back_is_all_that_was_not_sent_each_decayed_by_its_age(spec: str, decay: float, seed: int) -> None:
    codec = registry.make(f"{spec},ef={decay}" if ":" in spec else f"{spec}:ef={decay}")
    layer, drawn = LayerSpec("w", (6, 20)), torch.Generator().manual_seed(seed)
    memory, payload = Memory.zeros(codec, layer), torch.empty(codec.nbytes(layer), dtype=torch.uint8)
    owed, sent = torch.zeros(layer.shape, dtype=torch.float64), torch.empty(layer.shape)
    for _ in range(8):
        x = torch.randn(layer.shape, generator=drawn)
        codec.compress(x, payload, memory=memory)
        codec.decompress(payload, sent)
        owed = decay * owed + x.double() - sent.double()  # e_T = Σ β^(T−t)·(Δ_t − sent_t)
        memory = Memory(memory.new, memory.old)
    torch.testing.assert_close(memory.old["residual"].double(), owed, atol=1e-5, rtol=1e-5)


def test_all_values_without_rounding_leave_no_residual_so_it_is_plain_averaging() -> None:
    codec, x = registry.make("topk:ratio=1,chunk=8,ef=0.5"), torch.randn(50)
    memory = Memory.zeros(codec, LayerSpec.of(x))
    payload, out = torch.empty(codec.nbytes(LayerSpec.of(x)), dtype=torch.uint8), torch.empty(50)
    codec.compress(x, payload, memory=memory)
    codec.decompress(payload, out)
    assert torch.equal(out, x)
    assert not memory.new["residual"].any()
