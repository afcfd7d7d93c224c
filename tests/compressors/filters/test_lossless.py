"""Bit for bit, smaller where that is possible, and no frame from the network makes more than it may."""

from __future__ import annotations

import dataclasses
import resource
import tracemalloc

import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from commlib.codecs.filter import Chain, Content, content_fault
from commlib.compressors.filters.lossless import Lossless
from commlib.errors import ProtocolError
from tests.support.hypothesis_strategies import tensors

SIZE = 20_000


def normal(n: int) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(0))


def noise(n: int) -> Tensor:
    return torch.randint(256, (n,), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)


def through(keys: Tensor | None, values: Tensor, size: int = SIZE, level: int = 3) -> tuple[Content, Content]:
    """Coded, and decoded again: by the filter itself, which takes bytes too, as other filters leave them."""
    coded = Lossless(level).sender(size, 0).encode(Content(keys, values, ("below",)))
    return coded, Lossless(level).receiver(size).decode(coded)


def bits(part: Tensor | None) -> tuple[torch.dtype, bytes] | None:
    return None if part is None else (part.dtype, part.numpy().tobytes())


def nbytes(part: Tensor | None) -> int:
    return 0 if part is None else part.numel() * part.itemsize


# -- round trips ------------------------------------------------------------------------------------


@given(tensors(st.sampled_from([(0,), (1,), (50,), (5000,)])), st.integers(0, 2**32), st.integers(1, 6))
def test_values_and_sorted_keys_come_back_bit_for_bit(values: Tensor, seed: int, step: int) -> None:
    draws = torch.Generator().manual_seed(seed)
    keys = torch.randint(1, step + 1, values.shape, generator=draws).cumsum(0) - 1
    coded, came = through(keys, values, size=6 * 5000, level=step)
    assert (bits(came.keys), bits(came.values)) == (bits(keys), bits(values))
    assert came.notes == ("below",)
    assert nbytes(coded.keys) <= nbytes(keys)
    assert nbytes(coded.values) <= nbytes(values)


@given(st.binary(max_size=300), st.integers(1, 60), st.sampled_from([torch.int64, torch.float32, torch.uint8]))
def test_any_bits_of_any_dtype_come_back(raw: bytes, times: int, dtype: torch.dtype) -> None:
    whole = bytearray((raw * times)[: len(raw) * times // dtype.itemsize * dtype.itemsize])
    part = torch.frombuffer(whole, dtype=dtype) if whole else torch.empty(0, dtype=dtype)
    keys, values = (part, torch.zeros(3)) if dtype == torch.int64 else (None, part)
    _, came = through(keys, values)
    assert (bits(came.keys), bits(came.values)) == (bits(keys), bits(values))


def test_keys_that_wrap_around_come_back() -> None:
    keys = torch.tensor([2**63 - 1, -(2**63), 0, -1, 2**63 - 1] * 200)
    coded, came = through(keys, torch.zeros(1000))
    assert coded.keys is not None
    assert coded.keys.dtype == torch.uint8
    assert torch.equal(came.keys if came.keys is not None else torch.empty(0), keys)


# -- what shrinks, and what is left alone -----------------------------------------------------------


def test_sorted_keys_zeros_and_gradients_shrink() -> None:
    keys = torch.randint(1, 4, (5000,), generator=torch.Generator().manual_seed(2)).cumsum(0)
    coded, _ = through(keys, torch.zeros(5000))
    assert nbytes(coded.keys) < nbytes(keys) / 16  # a step has less than 2 bits of information, of 64
    assert nbytes(coded.values) < 100
    coded, _ = through(None, normal(SIZE))
    assert nbytes(coded.values) < 0.93 * 4 * SIZE  # sign and exponent
    assert coded.notes[-1] == [None, ["float32", SIZE]]


def test_random_bytes_are_left_alone() -> None:
    for n in (100, 4096, 8 * SIZE):
        values = noise(n)
        coded, came = through(None, values)
        assert coded.values is values
        assert came.values is values
        assert coded.notes[-1] == [None, None]


def test_what_looks_compressible_in_the_middle_but_is_not_is_left_alone() -> None:
    values = noise(8 * SIZE)
    middle = slice(4 * SIZE - 2048, 4 * SIZE + 2048)
    values[middle] = noise(4096) % 100  # shrinks, and is a small part
    sample = zstandard.ZstdCompressor(level=3).compress(values[middle].numpy().tobytes())
    assert len(sample) < 0.95 * 4096
    coded, came = through(None, values)
    assert nbytes(coded.values) <= nbytes(values)
    assert torch.equal(came.values, values)


def test_the_sample_decides_for_what_is_long() -> None:
    values = torch.zeros(8 * SIZE, dtype=torch.uint8)
    values[4 * SIZE - 2048 : 4 * SIZE + 2048] = noise(4096)
    coded, _ = through(None, values)
    assert coded.values is values


def test_each_part_is_judged_for_itself() -> None:
    coded, came = through(torch.arange(2000), noise(8000))
    assert coded.notes[-1] == [["int64", 2000], None]
    assert bits(came.keys) == bits(torch.arange(2000))


def test_a_higher_level_makes_no_more_bytes_of_text() -> None:
    text = torch.frombuffer(bytearray(b"".join(b"%d," % (i * i) for i in range(9000))), dtype=torch.uint8)
    low, high = (through(None, text, level=level)[0] for level in (1, 19))
    assert nbytes(high.values) < nbytes(low.values) < nbytes(text)


@pytest.mark.parametrize("level", [0, -1, 23])
def test_other_levels_are_refused(level: int) -> None:
    with pytest.raises(ValueError, match=r"level must be in \[1, 22\]"):
        Lossless(level)


# -- what may come from the network -----------------------------------------------------------------


def said(content: Content, size: int = SIZE) -> str:
    with pytest.raises(ProtocolError) as e:
        Chain([Lossless()]).receiver(size).decode(content)
    return str(e.value)


def frame(raw: bytes, **options: bool) -> Tensor:
    return torch.frombuffer(bytearray(zstandard.ZstdCompressor(**options).compress(raw)), dtype=torch.uint8)  # type: ignore[arg-type]


def claiming(nbytes_: int, real: int) -> Tensor:
    """A frame whose header says ``nbytes_`` (8 bytes of it), with zeros for ``real`` bytes in it."""
    raw = frame(bytes(real)).numpy().tobytes()
    header = zstandard.frame_header_size(raw)
    descriptor = bytes([0b11100000])  # content size of 8 bytes, single segment
    return torch.frombuffer(
        bytearray(raw[:4] + descriptor + nbytes_.to_bytes(8, "little") + raw[header:]), dtype=torch.uint8
    )


def test_a_bomb_is_refused_before_anything_is_allocated_for_it() -> None:
    bomb = frame(bytes(1 << 26))  # 64 MiB in 6 kB
    values = torch.zeros(SIZE)
    sizes = (SIZE, 8 * SIZE, (1 << 26) // 4, 1 << 26, 1 << 40, 1 << 63)
    lies = {claimed: claiming(claimed, 1 << 20) for n in sizes for claimed in (n, 4 * n % 2**64, 4 * SIZE)}
    tracemalloc.start()
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        for n in sizes:
            for kind in ("float32", "uint8"):
                assert "lossless: " in said(Content(None, bomb, ([None, [kind, n]],)))
                assert "lossless: " in said(Content(bomb, values, ([["uint8", n], None],)))
                for lie in lies.values():
                    assert "lossless: " in said(Content(None, lie, ([None, [kind, n]],)))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 3 * 8 * SIZE + 100_000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - resident < 16 << 10  # KiB


def test_a_frame_that_does_not_say_its_size_or_holds_another_is_refused() -> None:
    zeros = np.zeros(400, np.uint8).tobytes()
    note = ([None, ["float32", 100]],)
    good = frame(zeros)
    assert content_fault(Chain([Lossless()]).receiver(100).decode(Content(None, good, note)), 100) is None
    assert "400 are due" in said(Content(None, frame(zeros, write_content_size=False), note), 100)
    assert "a frame of 404 bytes as values, 400 are due" in said(Content(None, frame(bytes(404)), note), 100)
    for real in (0, 200, 600):
        assert "lossless: " in said(Content(None, claiming(400, real), note), 100)
    for bad in (good[:-1], good[1:], good[:0], good[:5], torch.cat([good, good]), noise(50), torch.zeros(50).byte()):
        assert "lossless: " in said(Content(None, bad, note), 100)
    skippable = b"\x50\x2a\x4d\x18" + (400).to_bytes(4, "little") + bytes(400)
    assert "lossless: " in said(Content(None, torch.frombuffer(bytearray(skippable), dtype=torch.uint8), note), 100)


@pytest.mark.parametrize(
    "note",
    [
        *(None, 3, "", b"ab", [], [None], [None, None, None], [None, 3], [None, []], [None, ["float32"]]),
        *([None, ["float32", n]] for n in (99, 101, 0, -1, 100.0, "100", None, 2**62, -(2**63))),
        *([None, [kind, 100]] for kind in ("int64", "float64", "", None, 3, b"float32", ["float32"])),
        [["int64", 100], ["float32", 100]],
    ],
)
def test_a_note_that_does_not_fit_is_refused(note: object) -> None:
    content = Chain([Lossless()]).sender(100, 0).encode(Content(None, torch.zeros(100)))
    assert content.notes == ([None, ["float32", 100]],)
    assert said(dataclasses.replace(content, notes=(note,)), 100)


def test_keys_that_decode_to_none_in_order_are_refused() -> None:
    coded = Lossless().sender(100, 0).encode(Content(torch.arange(100).flip(0), torch.zeros(100)))
    assert coded.keys is not None
    assert coded.keys.dtype == torch.uint8
    assert "keys are not ascending" in said(coded, 100)


@given(st.binary(max_size=60), st.integers(0, 500), st.data())
def test_changed_frames_are_refused_or_decode_to_as_many_values(noise_: bytes, place: int, data: st.DataObject) -> None:
    coded = Chain([Lossless()]).sender(100, 0).encode(Content(None, torch.arange(100).float()))
    raw = bytearray(coded.values.numpy().tobytes())
    at = place % len(raw)
    raw[at : at + data.draw(st.integers(0, 60))] = noise_
    bad = torch.frombuffer(raw, dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
    try:
        came = Chain([Lossless()]).receiver(100).decode(dataclasses.replace(coded, values=bad))
    except ProtocolError:
        return
    assert content_fault(came, 100) is None
