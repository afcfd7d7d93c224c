"""What holds for every installed codec, and for each with its options turned."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from commlib.codecs import registry
from commlib.codecs.base import Carry, Compressor, LayerSpec, Memory
from commlib.codecs.error_feedback import ErrorFeedback
from commlib.compressors.dgc import HeavyBall
from commlib.testing import check_compressor
from tests.support.hypothesis_strategies import encode, roundtrip, tensors
from tests.support.tiers import examples, full

BUILT_IN = [
    "none", "fp16", "bf16", "onebit", "sign", "int8", "int4", "qsgd", "ternary", "natural", "topk", "randomk", "dgc",
    "powersgd", "blocks", "twobit", "dct",
]  # fmt: skip
TURNED = [
    "onebit:axis=tensor",
    "int8:block=7",
    "int4:block=1",
    "qsgd:levels=1,block=20",
    "qsgd:levels=32767",
    "ternary:block=64",
    "twobit:block=7",
    "dct:keep=3,side=5",
    "topk:ratio=1",
    "topk:ratio=0.1,chunk=32",
    "topk:ratio=0.1,values=twobit:block=4,chunk=40",
    "topk:ratio=0.1,values=int4:block=16",
    "topk:ratio=0.1,values=fp16",
    "topk:ratio=0.2,values=qsgd:levels=3;block=64",
    "randomk:ratio=0.1,scaled=on",
    "randomk:ratio=0.3,values=fp16",
    "dgc:ratio=0.1,momentum=0",
    "dgc:ratio=0.1,momentum=0,values=int8",
    "dgc:ratio=0.05,nesterov=on,clip=1,warmup_steps=8",
    "powersgd:rank=1",
    "blocks:keep=0.3,staleness=4,block=16",
    "blocks:keep=0.1,staleness=2,order=fifo,block=7",
    "blocks:keep=0.2,staleness=9,order=random,block=32",
]
ALL = BUILT_IN + TURNED


def plain(spec: str) -> Compressor:
    codec = registry.make(spec)
    return codec.inner if isinstance(codec, ErrorFeedback) else codec


def test_the_built_in_codecs_are_installed() -> None:
    assert set(BUILT_IN) <= set(registry.compressors())


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_codec_is_called_what_it_is_installed_as(name: str) -> None:
    assert registry.load(name).name == name
    assert str(registry.make(name)) == name


# As many of the others as show each kind of setting; randomk by itself keeps one value of a hundred: many draws.
SOON = (set(BUILT_IN) - {"randomk"}) | {"randomk:ratio=0.3,values=fp16", "int8:block=7", "topk:ratio=0.1,chunk=32"}


@pytest.mark.parametrize("spec", [s for s in ALL if s in SOON] + full(*(s for s in ALL if s not in SOON)))
def test_keeps_every_promise(spec: str) -> None:
    check_compressor(spec)


@pytest.mark.parametrize("codec", [HeavyBall(), HeavyBall(0.5, nesterov=True), HeavyBall(0.9, clip=0.5)], ids=str)
def test_dense_forms_keep_every_promise(codec: Compressor) -> None:
    check_compressor(codec)


@pytest.mark.parametrize("spec", [s for s in ALL if "fp16" not in s])
@settings(max_examples=examples(14))
@given(x=tensors(), seed=st.integers(0, 2**63))
def test_finite_values_of_any_size_decode_to_finite_ones(spec: str, x: torch.Tensor, seed: int) -> None:
    decoded = roundtrip(plain(spec), x, seed=seed)
    assert decoded.isfinite().all()
    if not x.any():
        assert not decoded.any()


@pytest.mark.parametrize("spec", ALL)
@settings(max_examples=examples(12))
@given(x=tensors(), bad=st.sampled_from([math.nan, math.inf, -math.inf]), data=st.data())
def test_one_non_finite_value_is_never_lost(spec: str, x: torch.Tensor, bad: float, data: st.DataObject) -> None:
    if x.numel():
        x.view(-1)[data.draw(st.integers(0, x.numel() - 1))] = bad
        assert not roundtrip(plain(spec), x, seed=data.draw(st.integers(0, 99))).isfinite().all()


@pytest.mark.parametrize("spec", ALL)
@pytest.mark.parametrize("shape", [(0,), (20, 30)])
def test_nothing_waits_for_the_device_or_depends_on_data_for_its_shape(spec: str, shape: tuple[int, ...]) -> None:
    """Fake tensors have no values: .item(), nonzero() and boolean masks fail on them."""
    codec = registry.make(spec)
    layer = LayerSpec("w", shape)
    with FakeTensorMode():
        x = torch.zeros(shape)
        slots = {k: torch.zeros(s.shape) for k, s in codec.slots(layer).items()}
        payload = torch.zeros(codec.nbytes(layer), dtype=torch.uint8)
        codec.compress(x, payload, memory=Memory(slots, slots), seed=1)
        codec.decompress(payload, x, seed=1)
        codec.decompress(payload, x, add=True, scale=0.5, seed=1)


IN_PARTS = [s for s in ALL if plain(s).part_rows(LayerSpec("w", (64, 48))) is not None]


def test_codecs_of_values_and_of_blocks_can_be_cut() -> None:
    names = {s.partition(":")[0] for s in IN_PARTS}
    assert names == {"fp16", "bf16", "onebit", "int8", "int4", "qsgd", "ternary", "twobit"}


@pytest.mark.parametrize("spec", [s for s in IN_PARTS if not plain(s).random])
@settings(max_examples=examples(20))
@given(x=tensors(largest=1e15), count=st.integers(2, 5), data=st.data())
def test_a_layer_cut_where_it_may_be_decodes_as_in_one_piece(
    spec: str, x: torch.Tensor, count: int, data: st.DataObject
) -> None:
    codec, layer = registry.make(spec), LayerSpec.of(x)
    rows = codec.part_rows(layer)
    assert rows is not None
    if x.dim():
        cuts = sorted(data.draw(st.lists(st.integers(0, 12), min_size=count, max_size=count)))
        ends = [0, *(min(len(x), rows * c) for c in cuts), len(x)]
        parts = [roundtrip(codec, x[a:b].contiguous()) for a, b in itertools.pairwise(ends)]
        assert torch.equal(torch.cat(parts), roundtrip(codec, x))


@pytest.mark.parametrize("spec", [s for s in ALL if plain(s).takes_feedback])
@settings(max_examples=examples(30))
@given(x=tensors(largest=1e15), in_place=st.booleans())
def test_fused_feedback_equals_encode_then_subtract(spec: str, x: torch.Tensor, in_place: bool) -> None:
    codec, layer = plain(spec), LayerSpec.of(x)
    memory = Memory.zeros(codec, layer)
    old = torch.linspace(-1, 1, max(1, x.numel()))[: x.numel()].view(x.shape)
    v = x + old
    payload, rest = encode(codec, v, seed=3), v.clone()
    codec.decompress(payload, rest, add=True, scale=-1.0, seed=3)
    fused, kept = torch.zeros_like(payload), old if in_place else torch.full_like(x, math.nan)
    codec.encode_feedback(x, Carry(old, kept), fused, memory=memory, seed=3)
    assert torch.equal(payload, fused)
    assert torch.equal(kept, rest)


@pytest.mark.parametrize("spec", ALL)
@settings(max_examples=examples(20))
@given(x=tensors(largest=1e15), ranks=st.integers(1, 4), scale=st.sampled_from([1.0, 0.25, 1 / 3]))
def test_payloads_decoded_at_once_are_those_decoded_one_by_one(
    spec: str, x: torch.Tensor, ranks: int, scale: float
) -> None:
    codec, seeds = plain(spec), [7] * ranks
    payloads = [encode(codec, x * (p + 1), seed=7) for p in range(ranks)]
    wide = torch.zeros(ranks, -(-len(payloads[0]) // 8) * 8 + 8, dtype=torch.uint8)  # as if other layers' lay beside
    whole = wide[:, : len(payloads[0])]
    for row, payload in zip(whole, payloads, strict=True):
        row.copy_(payload)
    out, wanted = torch.full_like(x, math.nan), torch.full_like(x, math.nan)
    codec.decompress_sum(whole, out, scale=scale, seeds=seeds)
    for p, row in enumerate(whole):  # not the payloads: a matrix product may round otherwise at another address
        codec.decompress(row, wanted, add=p > 0, scale=scale, seed=7)
    assert torch.equal(out, wanted)


def test_payloads_that_are_no_rows_at_8_byte_boundaries_are_refused() -> None:
    codec, x = plain("int8"), torch.randn(21)
    need = codec.nbytes(LayerSpec.of(x))
    assert need % 8
    wrong = [torch.zeros(2, need), torch.zeros(0, need), torch.zeros(need), torch.zeros(2, 8 * need)]
    for payloads in wrong:
        with pytest.raises(ValueError, match="payload"):
            codec.decompress_sum(payloads.to(torch.uint8), x)


@pytest.mark.parametrize("spec", ALL)
def test_a_payload_of_wrong_length_dtype_or_alignment_is_refused(spec: str) -> None:
    codec = registry.make(spec)
    x = torch.randn(20, 30)
    layer = LayerSpec.of(x)
    memory = Memory.zeros(codec, layer)
    need = codec.nbytes(layer)
    wrong = [
        torch.zeros(need + 1, dtype=torch.uint8),
        torch.zeros(need - 1, dtype=torch.uint8),
        torch.zeros(1, need, dtype=torch.uint8),
        torch.zeros(need, dtype=torch.int8),
        torch.zeros(need + 1, dtype=torch.uint8)[1:],
        torch.zeros(2 * need, dtype=torch.uint8)[::2],
    ]
    for payload in wrong:
        with pytest.raises(ValueError, match="payload of"):
            codec.compress(x, payload, memory=memory, seed=0)
        with pytest.raises(ValueError, match="payload of"):
            codec.decompress(payload, x, seed=0)


@pytest.mark.parametrize("spec", [s for s in ALL if s != "none"])
def test_other_dtypes_than_float32_are_refused(spec: str) -> None:
    x = torch.zeros(20, 30, dtype=torch.float64)
    with pytest.raises(TypeError, match="works on float32"):
        encode(registry.make(spec), x)


@pytest.mark.parametrize("spec", [s for s in ALL if plain(s).random])
def test_a_random_codec_asks_for_a_seed_and_heeds_it(spec: str) -> None:
    codec, x = plain(spec), torch.randn(20, 30, generator=torch.Generator().manual_seed(0))
    payload = torch.zeros(codec.nbytes(LayerSpec.of(x)), dtype=torch.uint8)
    with pytest.raises(ValueError, match="pass seed="):
        codec.compress(x, payload)
    assert not torch.equal(encode(codec, x, seed=1), encode(codec, x, seed=2))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("onebit:axis=row", "axis must be column or tensor, got 'row'"),
        ("int8:block=0", "int8: block must be at least 1, got 0"),
        ("int4:block=-1", "int4: block must be at least 1, got -1"),
        ("int8:block=2.5", "block must be a whole number, got '2.5'"),
        ("int8:levels=3", "unknown option 'levels'"),
        ("qsgd:levels=0", r"levels must be in \[1, 32767\], got 0"),
        ("qsgd:levels=32768", r"levels must be in \[1, 32767\], got 32768"),
        ("qsgd:block=0", "qsgd: block must be at least 1"),
        ("ternary:block=-1", "ternary: block must be at least 1, or 0"),
        ("natural:bits=9", "unknown option 'bits'"),
        ("sign:axis=column", "unknown option 'axis'"),
        ("fp16:block=1", "unknown option 'block'"),
        ("bf16:block=1", "unknown option 'block'"),
        ("topk:ratio=0", r"topk: ratio must be in \(0, 1\], got 0.0"),
        ("topk:ratio=2", r"topk: ratio must be in \(0, 1\], got 2.0"),
        ("topk:ratio=nan", r"topk: ratio must be in \(0, 1\], got nan"),
        ("topk:chunk=-1", "topk: chunk must be 1 or more"),
        ("topk:ef=1.5", r"by a factor in \(0, 1\], got ef=1.5"),
        ("topk:ef=nan", "got ef=nan"),
        ("topk:ef=perhaps", "ef must be on or off, got 'perhaps'"),
        ("none:ef=0.9", "it is lossless"),
        ("dct:keep=0", "dct: keep must be at least 1, got 0"),
        ("dct:side=0", "dct: side must be at least 1, got 0"),
        ("twobit:block=0", "twobit: block must be at least 1"),
        ("topk:values=int9", "unknown compressor 'int9'"),
        ("topk:values=int8:blok=3", "did you mean 'block'"),
        ("topk:values=powersgd", "keeps memory or shares a seed"),
        ("topk:values=dgc", "keeps memory or shares a seed"),
        ("topk:values=randomk", "keeps memory or shares a seed"),
        ("randomk:ratio=-1", r"randomk: ratio must be in \(0, 1\]"),
        ("randomk:values=int8", "values must be fp32 or fp16, got 'int8'"),
        ("randomk:scaled=2", "scaled must be on or off"),
        ("dgc:ratio=0", r"dgc: ratio must be in \(0, 1\]"),
        ("dgc:momentum=1", r"momentum must be in \[0, 1\), got 1.0"),
        ("dgc:momentum=nan", r"momentum must be in \[0, 1\)"),
        ("dgc:clip=-1", "clip must be a norm, or 0 for none, got -1.0"),
        ("dgc:clip=inf", "clip must be a norm"),
        ("dgc:warmup_steps=-1", "warmup_steps must not be negative"),
        ("powersgd:rank=0", "rank must be at least 1, got 0"),
        ("blocks:keep=0", "0"),
        ("blocks:staleness=0", "staleness must be at least 1, got 0"),
        ("blocks:block=0", "block must be at least 1, got 0"),
        ("blocks:order=size", "order must be one of magnitude, fifo, random, got 'size'"),
    ],
)
def test_a_bad_option_is_refused_by_name_and_range(spec: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        registry.make(spec)


def test_a_comma_among_the_options_of_values_is_refused() -> None:
    cls = registry.load("topk")
    with pytest.raises(ValueError, match="by ';'"):
        dataclasses.replace(cls(), values="qsgd:levels=3,block=64")  # type: ignore[type-var]
