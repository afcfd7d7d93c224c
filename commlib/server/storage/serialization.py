"""A shard's cells as bytes, and back. Sans-IO.

::

    b"cml-snap"  version (1 byte)  lengths of head and tensors (2 × u64, big-endian)
    head         msgpack [shard, number, about, cells]; a tensor is an extension: [dtype, shape]
    tensors      their bytes, in that order, one behind the other
    blake2b      32 bytes: of all before it; in every version the last

There is no pickle: what is read is numbers, texts, lists and maps of these, and tensors, which are together as large as
the file. A tuple comes back as a list, as it does over the wire; torch's optimizers take both.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import struct
from collections.abc import Mapping
from typing import Any

import msgpack
import torch
from torch import Tensor

from commlib.messaging.frame import DTYPES, Buffer, from_buffer, to_buffer

_MAGIC, _VERSION = b"cml-snap", 1
_START = struct.Struct(">8sBQQ")
_DIGEST = 32
_TENSOR = 1
_LIST = 1 << 12  # msgpack makes room for what a list claims: nested 1000 deep, these are 32 MB at most


class Torn(Exception):
    """Fault of bytes that should be a snapshot."""


class OtherVersion(Exception):
    """A snapshot that another commlib wrote."""


def pack(shard: str, number: int, about: Mapping[str, Any], cells: Mapping[str, Mapping[str, Any]]) -> list[Buffer]:
    """The bytes, in parts; the cells must stay as they are until these are written.

    Raises:
        ValueError, TypeError: what cannot be saved, by name.
    """
    wrong = [key for key, state in cells.items() if not _is_state(state)]
    if wrong:
        raise ValueError(f"what is to be saved as {wrong[0]!r} is not what Cell.state_dict() gives")
    tensors: list[Tensor] = []
    head = msgpack.packb([shard, number, _plain(about, "about", tensors), _plain(cells, "cells", tensors)])
    rows = [to_buffer(t.view(-1)) for t in tensors if t.numel()]
    parts: list[Buffer] = [_START.pack(_MAGIC, _VERSION, len(head), sum(map(len, rows))), head, *rows]
    digest = hashlib.blake2b(digest_size=_DIGEST)
    for part in parts:
        digest.update(part)
    return [*parts, digest.digest()]


def unpack(data: memoryview, shard: str, number: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """What it is about, and its cells.

    Raises:
        Torn: what is wrong with it.
        OtherVersion: it is whole, and not of this version.
        Exception: msgpack and torch raise many; of bytes all mean the same.
    """
    if len(data) < _START.size + _DIGEST:
        raise Torn(f"it is cut off after {len(data)} bytes")
    magic, version, head, held = _START.unpack_from(data)
    due = _START.size + head + held + _DIGEST
    if magic == _MAGIC and version == _VERSION and len(data) != due:
        raise Torn(f"it has {len(data)} bytes, and should have {due}")
    if magic != _MAGIC or hashlib.blake2b(data[:-_DIGEST], digest_size=_DIGEST).digest() != data[-_DIGEST:]:
        raise Torn("its checksum is wrong")
    if version != _VERSION:
        raise OtherVersion(f"version {version}, this commlib reads {_VERSION}: take that which wrote it")
    rest = data[_START.size + head : -_DIGEST]

    def tensor(code: int, given: bytes) -> Tensor:
        nonlocal rest
        name, shape = msgpack.unpackb(given)
        if code != _TENSOR or name not in DTYPES or not all(type(n) is int and n >= 0 for n in shape):
            raise Torn("a tensor's dtype or shape is none")
        nbytes = math.prod(shape) * DTYPES[name]
        if nbytes > len(rest):
            raise Torn(f"a tensor has {nbytes} bytes, of which {len(rest)} are there")
        own, rest, dtype = bytearray(rest[:nbytes]), rest[nbytes:], getattr(torch, name)
        return from_buffer(own, dtype).view(shape) if nbytes else torch.empty(shape, dtype=dtype)

    packed = data[_START.size : -held - _DIGEST]
    name, its, about, cells = msgpack.unpackb(packed, ext_hook=tensor, strict_map_key=False, max_array_len=_LIST)
    if (name, its) != (shard, number) or rest:
        raise Torn(f"it is snapshot {its!r:.40} of shard {name!r:.80}, with {len(rest)} bytes that no tensor needs")
    if not all(map(_is_state, cells.values())) or not all(type(key) is str for key in (*about, *cells)):
        raise Torn("it has what are no states of cells")
    return about, cells


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


def _is_state(state: Any) -> bool:
    """Whether it is what ``Cell.state_dict`` gives."""
    with contextlib.suppress(KeyError, TypeError, AttributeError):
        values, ledger, optimizer = state["values"], state["ledger"], state["optimizer"]
        clocks = (state["number"], ledger["furthest"], *ledger["included"], *ledger["included"].values())
        good = optimizer.keys() >= {"state", "param_groups"} and all(type(n) is int and n >= 0 for n in clocks)
        return isinstance(values, Tensor) and values.dim() == 1 and good
    return False
