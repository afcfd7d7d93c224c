"""Frames: what is sent is what comes, for every kind; the bytes stay what they were; nothing bad is taken for good."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import msgpack
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from commlib.errors import ProtocolError
from commlib.messaging.frame import DEFAULT, DTYPES, KINDS, MAGIC, VERSION, Frame, Limits, decode, encode
from tests.support.frame_samples import FRAMES, frames, mutated, survives

FIXTURES = Path(__file__).with_name(f"frames_v{VERSION}.txt")


@given(frames())
def test_a_frame_comes_as_it_was_sent_and_its_parts_are_not_copied(frame: Frame) -> None:
    buffers = encode(frame)
    got = decode(buffers)
    assert got._replace(parts=()) == frame._replace(parts=())
    assert all(a is b for a, b in zip(got.parts, frame.parts, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_the_bytes_of_every_kind_are_those_that_this_version_has_always_had(kind: str) -> None:
    stored = dict(line.split() for line in FIXTURES.read_text().splitlines())
    frame = FRAMES[kind]
    assert encode(frame)[0] == bytes.fromhex(stored[kind])
    assert decode([bytes.fromhex(stored[kind]), *frame.parts]) == frame


def test_values_have_the_sizes_that_torch_gives_them() -> None:
    assert {name: getattr(torch, name).itemsize for name in DTYPES} == DTYPES


def header(*values: object, version: int = VERSION) -> bytes:
    packed: bytes = msgpack.packb(list(values))
    return MAGIC + bytes([version]) + packed


GOOD: tuple[object, ...] = (1, 0, 0, 0, [], "", [], "", 0, "", 0)


def test_the_header_that_the_bad_ones_below_differ_from_is_good() -> None:
    assert decode([header(*GOOD)]) == Frame("data", 0)


@pytest.mark.parametrize(
    ("buffers", "said"),
    [
        ([], "an empty message"),
        ([b""], "not commlib's"),
        ([b"GET / HTTP/1.1\r\n\r\n"], "not commlib's: it begins with b'GET '"),
        ([MAGIC], "version none"),
        ([MAGIC + b"\x07 and whatever that has"], "version 07 of the wire format"),  # before it is read as this one
        ([header(*GOOD, version=2)], "version 02 of the wire format, this is 01: install the same commlib"),
        ([header(*GOOD)[:-1]], "cannot be read"),
        ([header(*GOOD) + b"\0"], "cannot be read"),
        ([MAGIC + bytes([VERSION])], "cannot be read"),
        ([MAGIC + bytes([VERSION]) + b"\xdd\xff\xff\xff\xff"], "cannot be read"),  # a list of 4 G fields
        ([MAGIC + bytes([VERSION]) + b"\x91" * 60_000], "cannot be read"),  # lists in lists
        ([header(*GOOD[:-1])], "no list of 11 fields"),
        ([MAGIC + bytes([VERSION]) + msgpack.packb(5)], "no list of 11 fields"),
        ([bytes(DEFAULT.header + 1)], "a header of 65537 bytes, of which 65536 are allowed"),
        ([header(9, *GOOD[1:])], "unknown kind 9 (known: hello, data, bye, error, taken)"),
        ([header(True, *GOOD[1:])], "unknown kind True"),
        ([header("data", *GOOD[1:])], "unknown kind 'data'"),
        ([header(1, -1, *GOOD[2:])], "its sender -1 is no whole number from 0 to 2147483647"),
        ([header(1, True, *GOOD[2:])], "its sender True"),
        ([header(1, 0, 1.0, *GOOD[3:])], "its number 1.0"),
        ([header(1, 0, 0, "late", *GOOD[4:])], "its clock 'late'"),
        ([header(1, 0, 0, 0, ["a", 1], *GOOD[5:])], "its keys ('a', 1) is no text up to 256"),
        ([header(1, 0, 0, 0, [["a"]], *GOOD[5:])], "is no text up to 256"),
        ([header(1, 0, 0, 0, ["a"] * 1025, *GOOD[5:])], "is no list of up to 1024"),
        ([header(1, 0, 0, 0, [], "float31", *GOOD[6:])], "its dtype 'float31' is not one of bool"),
        ([header(1, 0, 0, 0, [], "", [1] * 17, *GOOD[7:])], "is no list of up to 16"),
        ([header(1, 0, 0, 0, [], "", [-1], *GOOD[7:])], "its shape (-1,) is no whole number"),
        ([header(*GOOD[:7], "x" * 257, *GOOD[8:])], "is no text up to 256"),
        ([header(*GOOD[:8], 1 << 32, *GOOD[9:])], "its flags 4294967296"),
        ([header(*GOOD[:9], "x" * 4097, 0)], "is no text up to 4096"),
        ([header(*GOOD[:10], 1 << 63)], "its session 9223372036854775808"),
        ([header(*GOOD), *[b""] * 9], "it has 9 parts, of which 8 are allowed"),
        ([header(2, *GOOD[1:]), b""], "a bad 'bye' frame: it has 1 parts, of which 0 are allowed"),
        ([header(1, 0, 0, 0, [], "float32", [3], "", 0, "", 0), b"12345678901"], "are 12 bytes, and 11 came"),
        ([header(1, 0, 0, 0, [], "float32", [3], "", 0, "", 0)], "are 12 bytes, and 0 came"),
        ([header(1, 0, 0, 0, [], "uint8", [1 << 48] * 16, "", 0, "", 0), b"1"], "and 1 came"),
    ],
)
def test_what_is_no_frame_is_refused_in_words_that_say_why(buffers: list[bytes], said: str) -> None:
    with pytest.raises(ProtocolError) as e:
        decode(buffers)
    assert said in str(e.value)
    assert len(str(e.value)) < 400


def test_limits_hold_to_the_byte() -> None:
    frame = Frame("data", 3, keys=("a" * 5,), note="why", shape=(1, 1), parts=(b"123", b"4567"))
    size = len(encode(frame)[0])
    exact = Limits(header=size, keys=1, key=5, note=3, dims=2, nbytes=7)
    assert decode(encode(frame, exact), exact) == frame
    for name in ("header", "keys", "key", "note", "dims", "nbytes"):
        below = dataclasses.replace(exact, **{name: getattr(exact, name) - 1})
        with pytest.raises(ProtocolError):
            decode(encode(frame), below)
        with pytest.raises(ValueError, match="cannot be sent"):
            encode(frame, below)


@given(frames(), st.randoms(use_true_random=False))
def test_a_mutated_message_is_a_frame_or_a_protocol_error(frame: Frame, rng: random.Random) -> None:
    for _ in range(20):
        survives(mutated(encode(frame), rng))
