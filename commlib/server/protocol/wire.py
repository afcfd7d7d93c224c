"""Messages of the parameter server as the parts of frames, and back. Sans-IO.

::

    part 0    msgpack [[kind, field, …], …], a message each, in the order of its fields; a tensor is an extension:
              [dtype, shape]
    part 1    the tensors' bytes, in that order, one behind the other; a frame's only one is not copied

A frame costs as much as some ten thousand bytes, so what one peer is told at a time is in as few as can be.

There is no pickle: what comes is numbers, strings, lists and maps of these, and tensors as large as what came.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgpack
import torch
from torch import Tensor

from commlib.codecs.filter import Content
from commlib.errors import ProtocolError
from commlib.messaging.frame import DTYPES, Buffer, from_buffer, to_buffer
from commlib.messaging.nesting import check_nesting
from commlib.server.protocol.messages import (
    Ack,
    Adopt,
    Agreed,
    Applied,
    Complaint,
    Keys,
    Message,
    Moved,
    Observe,
    Pull,
    Push,
    Replicate,
    Replicated,
    Start,
    Unknown,
    Values,
)

_KINDS: tuple[type[Message], ...] = (
    Push,
    Ack,
    Pull,
    Values,
    Replicate,
    Adopt,
    Replicated,
    Complaint,
    Start,
    Observe,
    Unknown,
    Keys,
    Moved,
    Agreed,
)
_HEAVY = (Push, Values, Replicate, Adopt, Start, Keys, Moved, Agreed)
_TENSOR = 1
_TEXT = 1024  # characters of a key, of a shard's name
_DEPTH, _ITEMS = 32, 1 << 16  # of all messages of a frame
_LIST = 1 << 16


def heavy(message: Message) -> bool:
    """Whether it has a tensor: two such in a frame would be copied."""
    return isinstance(message, _HEAVY) and getattr(message, "gradient", message) is not None


def pack(*messages: Message) -> tuple[Buffer, ...]:
    """The parts of a frame. A tensor must stay as it is until they have left."""
    tensors: list[Tensor] = []

    def plain(value: object) -> object:
        if isinstance(value, Tensor):
            tensors.append(value.detach().contiguous())
            return msgpack.ExtType(_TENSOR, msgpack.packb([_name(value.dtype), list(value.shape)]))
        if isinstance(value, Applied | Content):
            return _fields(value)
        if isinstance(value, frozenset):
            return sorted(value)
        raise TypeError(f"a message of the parameter server cannot have a {type(value).__name__}")

    head = msgpack.packb([[_KINDS.index(type(m)), *_fields(m)] for m in messages], default=plain)
    full = [to_buffer(t.view(-1)) for t in tensors if t.numel()]
    return (head, full[0] if len(full) == 1 else bytearray().join(full)) if full else (head,)


def unpack(parts: Sequence[Buffer]) -> list[Message]:
    """The messages; their tensors lie in the second part, where that is possible.

    Raises:
        ProtocolError: one is none; what is wrong with it.
    """
    if not 1 <= len(parts) <= 2:
        raise ProtocolError(f"a message of the parameter server in {len(parts)} parts")
    tensors = _Tensors(parts[1] if len(parts) == 2 else b"")
    try:
        check_nesting(memoryview(parts[0]).cast("B"), depth=_DEPTH, items=_ITEMS)
        found = msgpack.unpackb(parts[0], ext_hook=tensors.next, strict_map_key=False, max_array_len=_LIST)
    except ProtocolError as e:
        raise ProtocolError(f"a message that cannot be read: {e}") from None
    except Exception as e:  # msgpack raises ValueError, its own and others; of bytes all mean the same
        raise ProtocolError(f"a message that cannot be read ({type(e).__name__}); it may be cut off") from None
    if not isinstance(found, list) or not found:
        raise ProtocolError("a frame without messages")
    if tensors.left:
        raise ProtocolError(f"a message with {tensors.left} bytes that no tensor needs")
    return [_message(one) for one in found]


def _message(found: object) -> Message:
    if not isinstance(found, list) or not found or type(found[0]) is not int or not 0 <= found[0] < len(_KINDS):
        raise ProtocolError("a message of no kind that the parameter server has")
    made = _make(_KINDS[found[0]], found[1:])
    assert isinstance(made, _KINDS)
    return made


class _Tensors:
    """Tensors in a buffer, one behind the other."""

    def __init__(self, buffer: Buffer) -> None:
        self._rest = memoryview(buffer).cast("B")

    @property
    def left(self) -> int:
        return len(self._rest)

    def next(self, code: int, data: bytes) -> Tensor:
        name, shape = msgpack.unpackb(data)
        if code != _TENSOR or name not in DTYPES or not all(type(n) is int and n >= 0 for n in shape):
            raise ProtocolError("a tensor whose dtype or shape is none")
        nbytes = math.prod(shape) * DTYPES[name]
        if nbytes > self.left:
            raise ProtocolError(f"a tensor of {nbytes} bytes, of which {self.left} came")
        own, self._rest = self._rest[:nbytes], self._rest[nbytes:]
        dtype = getattr(torch, name)
        return from_buffer(own, dtype).view(shape) if nbytes else torch.empty(shape, dtype=dtype)


# -- fields, by the types that messages give them ------------------------------------------------


def _whole(value: Any) -> int:
    return value if type(value) is int and 0 <= value < 1 << 63 else _no("a whole number")


def _whole_or_none(value: Any) -> int | None:
    return None if value is None else _whole(value)


def _text(value: Any) -> str:
    return value if type(value) is str and len(value) <= _TEXT else _no(f"a text up to {_TEXT}")


def _number(value: Any) -> float:
    return value if type(value) is float else _no("a number")


def _bool(value: Any) -> bool:
    return value if type(value) is bool else _no("true or false")


def _row(value: Any) -> Tensor:
    return value if isinstance(value, Tensor) and value.dim() == 1 else _no("a row of values")


def _row_or_none(value: Any) -> Tensor | None:
    return None if value is None else _row(value)


def _coded(value: Any) -> Tensor | Content:
    if not isinstance(value, list):
        return _row(value)
    made = _make(Content, value)
    assert isinstance(made, Content)
    return made


def _coded_or_none(value: Any) -> Tensor | Content | None:
    return None if value is None else _coded(value)


def _notes(value: Any) -> tuple[object, ...]:
    return tuple(value) if isinstance(value, list) else _no("notes")


def _bytes(value: Any) -> bytes:
    return value if type(value) is bytes and len(value) <= _TEXT else _no(f"up to {_TEXT} bytes")


def _clocks(value: Any) -> dict[int, int]:
    return {_whole(k): _whole(v) for k, v in value.items()} if isinstance(value, dict) else _no("clocks of workers")


def _ranks(value: Any) -> frozenset[int]:
    return frozenset(map(_whole, value)) if isinstance(value, list) else _no("a list of ranks")


def _map(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) and all(type(k) is str for k in value) else _no("a map")


def _applied(value: Any) -> Applied:
    made = _make(Applied, value) if isinstance(value, list) else _no("an update")
    assert isinstance(made, Applied)
    return made


_READ: Mapping[str, Callable[[Any], object]] = {
    "int": _whole,
    "int | None": _whole_or_none,
    "str": _text,
    "bool": _bool,
    "float": _number,
    "Tensor": _row,
    "Tensor | None": _row_or_none,
    "Tensor | Content": _coded,
    "Tensor | Content | None": _coded_or_none,
    "tuple[object, ...]": _notes,
    "bytes": _bytes,
    "Mapping[int, int]": _clocks,
    "frozenset[int]": _ranks,
    "Mapping[str, Any]": _map,
    "Applied": _applied,
}


def _no(what: str) -> Any:
    raise ValueError(what)


def _make(cls: type[Any], values: Sequence[Any]) -> object:
    fields = dataclasses.fields(cls)
    if len(values) != len(fields):
        raise ProtocolError(f"a {cls.__name__} of {len(values)} fields, it has {len(fields)}")
    read = []
    for field, value in zip(fields, values, strict=True):
        try:
            read.append(_READ[str(field.type)](value))
        except ValueError as e:
            raise ProtocolError(f"a {cls.__name__} whose {field.name} is not {e}") from None
    return cls(*read)


def _fields(message: Any) -> list[object]:
    return [getattr(message, field.name) for field in dataclasses.fields(message)]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
