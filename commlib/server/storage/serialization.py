"""A shard's cells as bytes, and back. Sans-IO.

::

    b"cml-snap"  version (1 byte)  lengths of head and tensors (2 × u64, big-endian)
    head         [shard, number, about, cells], as commlib.messaging.values has values
    tensors      their bytes
    blake2b      32 bytes: of all before it; in every version the last

There is no pickle: what is read is numbers, texts, lists and maps of these, and tensors, which are together as large as
the file. A tuple comes back as a list; torch's optimizers take both.
"""

from __future__ import annotations

import contextlib
import hashlib
import struct
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from commlib.messaging import values
from commlib.messaging.frame import Buffer

_MAGIC, _VERSION = b"cml-snap", 1
_START = struct.Struct(">8sBQQ")
_DIGEST = 32


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
    head, rows = values.pack({"shard": shard, "number": number, "about": about, "cells": cells})
    parts: list[Buffer] = [_START.pack(_MAGIC, _VERSION, len(head), sum(map(len, rows))), head, *rows]
    digest = hashlib.blake2b(digest_size=_DIGEST)
    for part in parts:
        digest.update(part)
    return [*parts, digest.digest()]


def unpack(data: memoryview, shard: str, number: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Description of a snapshot, and its cells.

    Raises:
        Torn: what is wrong with it.
        OtherVersion: it is whole, and not of this version.
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
    packed, tensors = data[_START.size : _START.size + head], data[_START.size + head : -_DIGEST]
    try:
        name, its, about, cells = values.unpack(packed, tensors)
    except values.Unreadable as e:
        raise Torn(str(e)) from e
    if (name, its) != (shard, number):
        raise Torn(f"it is snapshot {its!r:.40} of shard {name!r:.80}")
    if not all(map(_is_state, cells.values())) or not all(type(key) is str for key in (*about, *cells)):
        raise Torn("it has what are no states of cells")
    return about, cells


def _is_state(state: Any) -> bool:
    """Whether it is what ``Cell.state_dict`` gives."""
    with contextlib.suppress(KeyError, TypeError, AttributeError):
        values, ledger, optimizer = state["values"], state["ledger"], state["optimizer"]
        clocks = (state["number"], ledger["furthest"], *ledger["included"], *ledger["included"].values())
        good = optimizer.keys() >= {"state", "param_groups"} and all(type(n) is int and n >= 0 for n in clocks)
        return isinstance(values, Tensor) and values.dim() == 1 and good
    return False
