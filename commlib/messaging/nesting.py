"""Nesting of msgpack from elsewhere: how deep, and how much, before anything is made of it.

msgpack makes room for as many entries as a list or map says it has, before they come, and follows lists in lists for a
thousand levels. So some thousand bytes can ask for tens of megabytes. This walks over the bytes and makes nothing. It
takes about a microsecond an item, so what is too short to do harm is let through.
"""

from __future__ import annotations

import struct

from commlib.errors import ProtocolError

SHORT = 128
"""Bytes that are let through: in so many no list is nested deeper than this, and none is longer."""

_SIZES: dict[int, int] = {  # bytes behind the first one, of a fixed number
    **dict.fromkeys((0xC0, 0xC2, 0xC3), 0), 0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2,
    0xD2: 4, 0xD3: 8, 0xD4: 2, 0xD5: 3, 0xD6: 5, 0xD7: 9, 0xD8: 17,
}  # fmt: skip
_LENGTHS: dict[int, tuple[str, int, int]] = {  # how the length is written, and what is behind it: bytes, items an entry
    0xC4: (">B", 1, 0), 0xC5: (">H", 1, 0), 0xC6: (">I", 1, 0), 0xC7: (">B", 1, 0), 0xC8: (">H", 1, 0),
    0xC9: (">I", 1, 0), 0xD9: (">B", 1, 0), 0xDA: (">H", 1, 0), 0xDB: (">I", 1, 0), 0xDC: (">H", 0, 1),
    0xDD: (">I", 0, 1), 0xDE: (">H", 0, 2), 0xDF: (">I", 0, 2),
}  # fmt: skip
_EXTENSIONS = (0xC7, 0xC8, 0xC9)  # with a byte more, of their type


def check_nesting(data: memoryview | bytes, *, depth: int, items: int) -> None:
    """That one msgpack value nests no deeper, and has no more items in all, nor says so.

    Args:
        data: the value; bytes behind it are msgpack's to complain of.
        depth: levels of lists and maps.
        items: numbers, texts, lists, maps and so on.

    Raises:
        ProtocolError: it does, or it is cut off or no msgpack.
    """
    if len(data) <= SHORT:
        return
    try:
        _walk(bytes(data), depth, items)
    except (IndexError, struct.error):
        raise ProtocolError("it may be cut off") from None


def _walk(data: bytes, depth: int, items: int) -> None:
    at, left = 0, [1]  # items that are still to come, level by level
    while left:
        if left[-1] == 0:
            left.pop()
            continue
        left[-1] -= 1
        code, at = data[at], at + 1
        if code < 0x80 or code >= 0xE0:
            continue
        if code < 0xA0:
            size, more = 0, (code & 15) * (2 if code < 0x90 else 1)
        elif code < 0xC0:
            size, more = code & 31, 0
        elif code in _SIZES:
            size, more = _SIZES[code], 0
        elif code in _LENGTHS:
            form, nbytes, each = _LENGTHS[code]
            (length,) = struct.unpack_from(form, data, at)
            at += struct.calcsize(form) + (code in _EXTENSIONS)
            size, more = length * nbytes, length * each
        else:
            raise ProtocolError(f"byte {code:#x} begins no value")
        at += size
        if at > len(data) or more > len(data) - at:
            raise ProtocolError("it may be cut off")
        if more:
            items -= more
            if items < 0:
                raise ProtocolError("it has too many items")
            if len(left) > depth:
                raise ProtocolError(f"it nests deeper than {depth} levels")
            left.append(more)
