"""What msgpack from elsewhere may ask for: nothing that is honest is refused, and nothing else takes room or time."""

from __future__ import annotations

import struct
import tracemalloc
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commlib.errors import ProtocolError
from commlib.messaging.frame import decode
from commlib.messaging.nesting import SHORT, check_nesting
from commlib.server.protocol import wire
from tests.support.tiers import examples

honest = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | st.text()
    | st.binary(max_size=300) | st.builds(msgpack.ExtType, st.integers(0, 127), st.binary(max_size=20)),
    lambda inner: st.lists(inner, max_size=40) | st.dictionaries(st.integers(0, 99) | st.text(), inner, max_size=20),
    max_leaves=60,
)  # fmt: skip


def levels(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if inner is None else 1 + max(map(levels, inner), default=0)


def members(value: Any) -> int:
    if isinstance(value, dict):
        return 2 * len(value) + sum(map(members, value.values()))
    return len(value) + sum(map(members, value)) if isinstance(value, list) else 0


@settings(max_examples=examples(300), deadline=None)
@given(value=honest)
def test_what_is_honest_passes_with_just_as_much_as_it_has(value: Any) -> None:
    data = msgpack.packb([value, "x" * SHORT])
    depth, items = levels([value, ""]), members([value, ""])
    check_nesting(data, depth=depth, items=items)
    with pytest.raises(ProtocolError, match="too many items"):
        check_nesting(data, depth=depth, items=items - 1)


@pytest.mark.parametrize("depth", [1, 2, 31])
def test_lists_in_lists_pass_to_the_last_level_that_is_allowed(depth: int) -> None:
    data = b"\x91" * depth + msgpack.packb("x" * SHORT)
    check_nesting(data, depth=depth, items=1000)
    with pytest.raises(ProtocolError, match=f"deeper than {depth - 1} levels"):
        check_nesting(data, depth=depth - 1, items=1000)


@given(cut=st.integers(SHORT + 1, 219))
def test_what_is_cut_off_is_said_to_be(cut: int) -> None:
    data = msgpack.packb([["a" * 60] * 3, {"b": 1.5}, b"c" * 24])
    assert len(data) == 221 or len(data) > cut
    with pytest.raises(ProtocolError, match="cut off"):
        check_nesting(data[:cut], depth=9, items=99)


def test_a_byte_that_begins_nothing_is_named() -> None:
    with pytest.raises(ProtocolError, match="byte 0xc1 begins no value"):
        check_nesting(b"\xc1" * (SHORT + 1), depth=9, items=99)


@settings(max_examples=examples(300), deadline=None)
@given(data=st.binary(min_size=SHORT + 1, max_size=400))
def test_whatever_the_bytes_what_passes_is_no_larger_than_it_may_be(data: bytes) -> None:
    try:
        check_nesting(data, depth=3, items=50)
    except ProtocolError:
        return
    unpacker = msgpack.Unpacker(strict_map_key=False)
    unpacker.feed(data)
    try:
        value = unpacker.unpack()
    except Exception:
        return
    assert levels(value) <= 3
    assert members(value) <= 50


NESTED = {
    "frames' header of lists of 60,000": b"cml\x01" + (b"\xdd" + struct.pack(">I", 60000)) * 12000,
    "frames' header of maps": b"cml\x01" + b"\x81" * 60000,
    "servers' lists of 65,535": b"\xdc\xff\xff" * 1000,
    "servers' empty lists": b"\xdc\xff\xff" + (b"\xdc\xff\xff" + b"\x90" * 65535) * 40,
    "short, and deep": b"\xdc\xff\xff" * (SHORT // 3),
}


@pytest.mark.parametrize("name", NESTED)
def test_little_from_a_stranger_takes_little_room(name: str) -> None:
    data = NESTED[name]
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError):
            decode([data]) if name.startswith("frames") else wire.unpack([data])
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()
