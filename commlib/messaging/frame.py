"""Frames that travel between ranks: a header and raw parts. Sans-IO: bytes in, frames out; nothing here waits or sends.

::

    buffer 0    b"cml"  version (1 byte)  msgpack [kind, sender, number, clock, keys, dtype, shape, codec, flags, note,
                                                   session]
    buffer 1 …  the parts: raw bytes, as many as the kind allows, never copied

The version stands before all that it governs, so that a peer of another one is told so. Every length has a limit, and
what a header claims is compared with what came, before anything is allocated for it. There is no pickle: a header is
numbers, strings and lists of these.

Which frame may follow which is :mod:`commlib.messaging.session`'s.

Tensors as the bytes of messages, and back.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgpack
import torch
from torch import Tensor

from commlib.errors import ProtocolError
from commlib.messaging.nesting import check_nesting

VERSION = 1
MAGIC = b"cml"

Buffer = bytes | bytearray | memoryview

DTYPES: Mapping[str, int] = {
    **dict.fromkeys(("bool", "uint8", "int8", "float8_e4m3fn", "float8_e5m2"), 1),
    **dict.fromkeys(("uint16", "int16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("uint32", "int32", "float32"), 4),
    **dict.fromkeys(("uint64", "int64", "float64", "complex64"), 8),
    "complex128": 16,
}
"""Name → bytes of a value, as PyTorch calls them."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits of what is believed of a peer.

    Args:
        header: bytes of the first buffer.
        keys: in a header.
        key: characters of a key, of a codec's spec.
        note: characters.
        dims: of a shape.
        nbytes: of all parts together.
    """

    header: int = 1 << 16
    keys: int = 1024
    key: int = 256
    note: int = 4096
    dims: int = 16
    nbytes: int = 1 << 30


DEFAULT = Limits()


@dataclasses.dataclass(frozen=True)
class FrameKind:
    """A row of :data:`KINDS`.

    Args:
        code: on the wire.
        parts: most raw parts.
    """

    code: int
    parts: int = 0


KINDS: Mapping[str, FrameKind] = {
    "hello": FrameKind(0),
    "data": FrameKind(1, parts=8),
    "bye": FrameKind(2),
    "error": FrameKind(3),
    "taken": FrameKind(4),
}
_KIND_OF = {kind.code: name for name, kind in KINDS.items()}


class Frame(NamedTuple):
    """Message as it is sent; after its kind, the fields in the order of the wire.

    Attributes:
        kind: of :data:`KINDS`.
        sender: rank.
        number: 0, 1, … of the sender's frames to this peer.
        clock: of what it belongs to, such as the n-th collective of a group.
        keys: names of what it is about.
        dtype: of the values in the first part, of :data:`DTYPES`; empty: bytes that only the receiver understands.
        shape: of these values.
        codec: spec that the first part is coded by; empty: the values themselves.
        flags: 32 bits, whose meaning is the kind's user's.
        note: words for people.
        session: of the sender's conversation with this peer: a number that it drew, and others cannot know.
        parts: raw bytes; those of a decoded frame are the buffers that came.
    """

    kind: str
    sender: int
    number: int = 0
    clock: int = 0
    keys: tuple[str, ...] = ()
    dtype: str = ""
    shape: tuple[int, ...] = ()
    codec: str = ""
    flags: int = 0
    note: str = ""
    session: int = 0
    parts: tuple[Buffer, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(memoryview(p).nbytes for p in self.parts)


def encode(frame: Frame, limits: Limits = DEFAULT) -> list[Buffer]:
    """The buffers of a frame: its header, then its parts themselves.

    Raises:
        ValueError: the frame is not one that a peer would take.
    """
    wrong = _wrong(frame, limits)
    if wrong:
        raise ValueError(f"this {frame.kind!r} frame cannot be sent: {wrong}")
    header = MAGIC + bytes([VERSION]) + msgpack.packb([KINDS[frame.kind].code, *frame[1:-1]])
    if len(header) > limits.header:
        raise ValueError(f"this {frame.kind!r} frame cannot be sent: its header has {len(header)} bytes")
    return [header, *frame.parts]


def decode(buffers: Sequence[Buffer], limits: Limits = DEFAULT) -> Frame:
    """The frame in these buffers; its parts are they, not copies.

    Raises:
        ProtocolError: it is none; what is wrong with it.
    """
    if not buffers:
        raise ProtocolError("an empty message")
    code, *values = _header(memoryview(buffers[0]).cast("B"), limits)
    kind = _KIND_OF.get(code) if type(code) is int else None
    if kind is None:
        raise ProtocolError(f"a frame of unknown kind {_short(code)} (known: {_known()})")
    given: list[Any] = [tuple(v) if type(v) is list else v for v in values]
    frame = Frame._make((kind, *given, tuple(buffers[1:])))
    wrong = _wrong(frame, limits)
    if wrong:
        raise ProtocolError(f"a bad {kind!r} frame: {wrong}")
    return frame


# -- the header, field by field -----------------------------------------------------------------


_Check = Callable[[Any, Limits], str | None]
"""What is wrong with a value; None if nothing is."""


def _whole(most: int) -> _Check:
    def wrong(value: Any, limits: Limits) -> str | None:
        return None if type(value) is int and 0 <= value <= most else f"no whole number from 0 to {most}"

    return wrong


def _text(length: Callable[[Limits], int]) -> _Check:
    def wrong(value: Any, limits: Limits) -> str | None:
        return None if type(value) is str and len(value) <= length(limits) else f"no text up to {length(limits)}"

    return wrong


def _list(each: _Check, length: Callable[[Limits], int]) -> _Check:
    def wrong(value: Any, limits: Limits) -> str | None:
        if type(value) is not tuple or len(value) > length(limits):
            return f"no list of up to {length(limits)}"
        return next((why for v in value if (why := each(v, limits))), None)

    return wrong


def _dtype(value: Any, limits: Limits) -> str | None:
    return None if type(value) is str and value in ("", *DTYPES) else f"not one of {', '.join(DTYPES)}"


_FIELDS: Mapping[str, _Check] = {
    "sender": _whole((1 << 31) - 1),
    "number": _whole((1 << 63) - 1),
    "clock": _whole((1 << 63) - 1),
    "keys": _list(_text(lambda most: most.key), lambda most: most.keys),
    "dtype": _dtype,
    "shape": _list(_whole(1 << 48), lambda most: most.dims),
    "codec": _text(lambda most: most.key),
    "flags": _whole((1 << 32) - 1),
    "note": _text(lambda most: most.note),
    "session": _whole((1 << 63) - 1),
}
"""In the order of the wire, after the kind."""


def _header(buffer: memoryview, limits: Limits) -> list[Any]:
    if len(buffer) > limits.header:
        raise ProtocolError(f"a header of {len(buffer)} bytes, of which {limits.header} are allowed")
    start, rest = bytes(buffer[: len(MAGIC) + 1]), buffer[len(MAGIC) + 1 :]
    most = 1 + len(_FIELDS) + limits.keys + limits.dims
    if start[: len(MAGIC)] != MAGIC:
        raise ProtocolError(f"not commlib's: it begins with {start!r}")
    if len(start) == len(MAGIC) or start[-1] != VERSION:
        found = start[len(MAGIC) :].hex() or "none"
        raise ProtocolError(f"version {found} of the wire format, this is {VERSION:02x}: install the same commlib")
    try:
        check_nesting(rest, depth=2, items=most)
        values = msgpack.unpackb(rest, max_array_len=most, max_ext_len=0, max_map_len=0, max_bin_len=0)
    except ProtocolError as e:
        raise ProtocolError(f"a header that cannot be read: {e}") from None
    except Exception as e:  # msgpack raises ValueError, its own and others; of bytes all mean the same
        raise ProtocolError(f"a header that cannot be read ({type(e).__name__}); it may be cut off") from None
    if type(values) is not list or len(values) != 1 + len(_FIELDS):
        raise ProtocolError(f"a header that is no list of {1 + len(_FIELDS)} fields")
    return values


def _wrong(frame: Frame, limits: Limits) -> str | None:
    """Fault of a frame, in words; None if there is none."""
    if frame.kind not in KINDS:
        return f"its kind is unknown (known: {_known()})"
    for (name, check), value in zip(_FIELDS.items(), frame[1:-1], strict=True):
        why = check(value, limits)
        if why:
            return f"its {name} {_short(value)} is {why}"
    most = KINDS[frame.kind].parts
    if len(frame.parts) > most:
        return f"it has {len(frame.parts)} parts, of which {most} are allowed"
    nbytes = frame.nbytes
    if nbytes > limits.nbytes:
        return f"it has {nbytes} bytes, of which {limits.nbytes} are allowed"
    if frame.dtype and not frame.codec:
        told = math.prod(frame.shape) * DTYPES[frame.dtype]
        came = memoryview(frame.parts[0]).nbytes if frame.parts else 0
        if told != came:
            return f"{frame.dtype} of shape {_short(frame.shape)} are {_short(told)} bytes, and {came} came"
    return None


def _known() -> str:
    return ", ".join(KINDS)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:59]}…"


def to_buffer(flat: Tensor) -> Buffer:
    """The bytes of (n,), contiguous, on the CPU; not copied."""
    if flat.stride(0) != 1:  # one value, which PyTorch calls contiguous whatever its stride is, but does not view
        flat = flat.as_strided(flat.shape, (1,))
    found: Any = flat.view(torch.uint8).numpy()
    return memoryview(found)


def from_buffer(buffer: Buffer, dtype: torch.dtype) -> Tensor:
    """(n,) in these bytes, n ≥ 1; copied only if they may not be written to, or lie where the dtype's must not."""
    if memoryview(buffer).readonly:
        buffer = bytearray(buffer)
    found = torch.frombuffer(buffer, dtype=dtype)
    if found.data_ptr() % found.itemsize:  # PyTorch's loops may be compiled for that not to be: complex128 crashed
        return torch.frombuffer(bytearray(buffer), dtype=dtype)
    return found
