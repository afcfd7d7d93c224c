"""Frames to test with: one of each kind whose bytes are kept, any there can be, and messages that were damaged."""

from __future__ import annotations

import random

from hypothesis import strategies as st

from commlib.errors import ProtocolError
from commlib.messaging.frame import DEFAULT, DTYPES, KINDS, Buffer, Frame, Limits, decode

FRAMES = {
    "hello": Frame("hello", 3, keys=("commlib 0.1.0", "world 4"), note="rank 3 of 4"),
    "data": Frame(
        "data",
        1,
        number=17,
        clock=1_000_000_007,
        keys=("world", "fc1.weight"),
        dtype="bfloat16",
        shape=(2, 3),
        codec="onebit",
        flags=5,
        session=0x5EC2E7,
        parts=(b"\x01\x02\x03", b""),
    ),
    "bye": Frame("bye", 0, number=1),
    "error": Frame("error", 2, number=9, clock=4, note="rank 1 did not come to all_reduce 4 within 5 s"),
    "taken": Frame("taken", 1, number=3, clock=1 << 40, session=1),
}

_texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


def frames() -> st.SearchStrategy[Frame]:
    """Any frame that can be sent."""
    return st.sampled_from(list(KINDS)).flatmap(_of_kind)


@st.composite
def _of_kind(draw: st.DrawFn, kind: str) -> Frame:
    parts = draw(st.lists(st.binary(max_size=50), max_size=KINDS[kind].parts))
    dtype, codec = "", draw(_texts)
    shape: tuple[int, ...] = tuple(draw(st.lists(st.integers(0, 1 << 48), max_size=16)))
    of_values = draw(st.booleans())
    if parts and of_values:
        dtype, codec = draw(st.sampled_from(list(DTYPES))), ""
        shape = (draw(st.integers(0, 4)), draw(st.integers(0, 4)))
        parts[0] = bytes(shape[0] * shape[1] * DTYPES[dtype])
    return Frame(
        kind,
        draw(st.integers(0, (1 << 31) - 1)),
        draw(st.integers(0, (1 << 63) - 1)),
        draw(st.integers(0, (1 << 63) - 1)),
        tuple(draw(st.lists(_texts, max_size=5))),
        dtype,
        shape,
        codec,
        draw(st.integers(0, (1 << 32) - 1)),
        draw(_texts),
        draw(st.integers(0, (1 << 63) - 1)),
        tuple(parts),
    )


def mutated(buffers: list[Buffer], rng: random.Random) -> list[Buffer]:
    """The message after one to four accidents."""
    found = [bytearray(b) for b in buffers]
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(found)) if found and rng.random() < 0.3 else 0
        what = rng.randrange(6)
        if not found:
            found = [bytearray(rng.randbytes(rng.randrange(40)))]
        elif what == 0 and found[at]:  # a bit
            found[at][rng.randrange(len(found[at]))] ^= 1 << rng.randrange(8)
        elif what == 1 and found[at]:  # any byte, often one that msgpack gives a length to follow
            found[at][rng.randrange(len(found[at]))] = rng.choice([rng.randrange(256), 0xDC, 0xDD, 0xDF, 0xDB, 0xC6])
        elif what == 2:  # cut off
            del found[at][rng.randrange(len(found[at]) + 1) :]
        elif what == 3:  # something in between
            here = rng.randrange(len(found[at]) + 1)
            found[at][here:here] = rng.randbytes(rng.randrange(1, 9))
        elif what == 4:  # a part is lost, or comes twice
            found[at : at + 1] = [] if rng.random() < 0.5 else [found[at], found[at]]
        else:  # parts change places
            rng.shuffle(found)
    return [bytes(b) for b in found]


def survives(buffers: list[Buffer], limits: Limits = DEFAULT) -> bool:
    """Whether it is still a frame; if it is none, that is said by a :class:`ProtocolError` and nothing else."""
    try:
        frame = decode(buffers, limits)
    except ProtocolError:
        return False
    assert frame.kind in KINDS
    assert frame.nbytes == sum(map(len, buffers[1:])) <= limits.nbytes
    return True
