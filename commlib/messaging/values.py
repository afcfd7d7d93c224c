"""Values as bytes, and back, without pickle: numbers, texts, lists and maps of these, and dense tensors. Sans-IO.

The head is msgpack; in it a tensor is an extension: [dtype, shape]. The tensors' bytes follow in the same order. What
is read is as large as what came: a head that claims more is refused before anything is allocated for it. A tuple comes
back as a list.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgpack
import torch
from torch import Tensor

from commlib.errors import ProtocolError
from commlib.messaging.frame import DTYPES, Buffer, from_buffer, to_buffer
from commlib.messaging.nesting import check_nesting

_TENSOR = 1
_LIST = 1 << 12
_DEPTH, _ITEMS = 64, 1 << 24


class Unreadable(ValueError):
    """Fault of bytes that are no values."""


def pack(named: Mapping[str, Any]) -> tuple[bytes, list[Buffer]]:
    """(head, the bytes of the tensors) of several values, which must stay as they are until these are written.

    Args:
        named: name, which is for errors and is not packed, → value.

    Raises:
        TypeError: what cannot be packed, by name.
    """
    tensors: list[Tensor] = []
    head: bytes = msgpack.packb([_plain(value, name, tensors) for name, value in named.items()])
    return head, [to_buffer(t.view(-1)) for t in tensors if t.numel()]


def unpack(head: memoryview | bytes, tensors: memoryview) -> list[Any]:
    """The values, in order; their tensors have memory of their own.

    Raises:
        Unreadable: what is wrong with the bytes.
    """
    try:
        return _read(head, tensors)
    except Unreadable:
        raise
    except ProtocolError as e:
        raise Unreadable(str(e)) from e
    except Exception as e:  # msgpack and torch raise many; of bytes all mean the same
        raise Unreadable(f"{type(e).__name__}: {e}") from e


def _read(head: memoryview | bytes, rest: memoryview) -> list[Any]:

    def tensor(code: int, given: bytes) -> Tensor:
        nonlocal rest
        name, shape = msgpack.unpackb(given)
        if code != _TENSOR or name not in DTYPES or not all(type(n) is int and n >= 0 for n in shape):
            raise Unreadable("a tensor's dtype or shape is none")
        nbytes = math.prod(shape) * DTYPES[name]
        if nbytes > len(rest):
            raise Unreadable(f"a tensor has {nbytes} bytes, of which {len(rest)} are there")
        own, rest, dtype = bytearray(rest[:nbytes]), rest[nbytes:], getattr(torch, name)
        return from_buffer(own, dtype).view(shape) if nbytes else torch.empty(shape, dtype=dtype)

    check_nesting(head, depth=_DEPTH, items=_ITEMS)
    values = msgpack.unpackb(head, ext_hook=tensor, strict_map_key=False, max_array_len=_LIST)
    if not isinstance(values, list):
        raise Unreadable("it is no list of values")
    if rest:
        raise Unreadable(f"there are {len(rest)} bytes that no tensor needs")
    return values


def _plain(value: Any, where: str, tensors: list[Tensor]) -> object:
    """As msgpack has it; its tensors go to the end of the list."""
    if isinstance(value, Mapping) and all(isinstance(key, int | str) for key in value):
        return {key: _plain(each, f"{where}[{key!r}]", tensors) for key, each in value.items()}
    if isinstance(value, list | tuple) and len(value) <= _LIST:
        return [_plain(each, f"{where}[{i}]", tensors) for i, each in enumerate(value)]
    if isinstance(value, Tensor) and value.layout == torch.strided and (name := str(value.dtype)[6:]) in DTYPES:
        tensors.append(value.detach().cpu().contiguous())
        return msgpack.ExtType(_TENSOR, msgpack.packb([name, list(value.shape)]))
    if value is None or isinstance(value, float | str) or (isinstance(value, int) and -(1 << 63) <= value < 1 << 64):
        return value
    what = f"number of up to 64 bits, text, dense tensor, list of up to {_LIST}, or map of these by texts and numbers"
    raise TypeError(f"{where} cannot be saved: {type(value).__name__} {value!r:.60} is no {what}")
