"""Snapshots of a shard's cells on disk: whole or not there, and read back as the newest that is whole.

::

    FOLDER/<shard>-<number>.snapshot    in the shard's name, %xx for what is no letter, digit, "_", "-" or "~"

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
import logging
import math
import os
import re
import shutil
import struct
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

import msgpack
import torch
from torch import Tensor

from commlib.buffers import from_buffer, to_buffer
from commlib.errors import CheckpointMismatch, CommlibError
from commlib.frame import DTYPES, Buffer

_log = logging.getLogger("commlib")
_MAGIC, _VERSION = b"cml-snap", 1
_START = struct.Struct(">8sBQQ")
_DIGEST = 32
_TENSOR = 1
_LIST = 1 << 12  # msgpack makes room for what a list claims: nested 1000 deep, these are 32 MB at most
_LOOKS = 20  # at a folder whose files go while they are read
_FILE = re.compile(r"(?P<shard>[\w%~-]+)-(?P<number>[0-9]{1,19})\.snapshot(?P<part>\.[0-9a-f]{32}\.part)?", re.ASCII)


class SnapshotFailed(CommlibError):
    """A snapshot that cannot be written, or none that can be read; it says which, why, and what to do."""


class _Torn(Exception):
    """What is wrong with a file."""


class Loaded(NamedTuple):
    """What snapshots had.

    Args:
        cells: key → state, as ``Cell.state_dict`` gives it; its tensors are on the CPU and nobody else's.
        abouts: shard → what its snapshot was saved with.
        numbers: shard → the highest number there is of it, torn ones too: the next to be saved has a higher one.
    """

    cells: dict[str, dict[str, Any]]
    abouts: dict[str, dict[str, Any]]
    numbers: dict[str, int]


def save(
    folder: str | os.PathLike[str],
    shard: str,
    number: int,
    about: Mapping[str, Any],
    cells: Mapping[str, Mapping[str, Any]],
    keep: int = 2,
) -> Path:
    """Puts a snapshot there at once; it is on the disk when this returns. One writer for each shard.

    Args:
        folder: made if it is not there.
        shard: its name.
        number: 0, 1, … of its snapshots: higher than all that are there.
        about: numbers and texts; ``fingerprint`` is of the model and plan, and the same for all shards.
        cells: key → state, which must stay as it is meanwhile.
        keep: how many of this shard's stay, this one included.

    Returns:
        The file.

    Raises:
        ValueError, TypeError: what cannot be saved, by name; or a snapshot of this number, or a higher one, is there.
        SnapshotFailed: it cannot be written; those before are still there.
    """
    if keep < 1:
        raise ValueError(f"keep must be at least 1, got {keep}")
    name, folder = _name(shard, number), Path(folder)
    if not shard or len(name) > 200:  # of 255 that a file's name may have, with the rest of a temporary one's
        raise ValueError(f"a shard's name must have 1 to some 150 letters, got {shard!r:.80}")
    wrong = [key for key, state in cells.items() if not _is_state(state)]
    if wrong:
        raise ValueError(f"what is to be saved as {wrong[0]!r} is not what Cell.state_dict() gives")
    tensors: list[Tensor] = []
    head = msgpack.packb([shard, number, _plain(about, "about", tensors), _plain(cells, "cells", tensors)])
    rows = [to_buffer(t.view(-1)) for t in tensors if t.numel()]
    parts: list[Buffer] = [_START.pack(_MAGIC, _VERSION, len(head), sum(map(len, rows))), head, *rows]
    try:
        if not folder.is_dir():
            folder.mkdir(parents=True)
            _sync(folder.parent)
        last = max(_files(folder)[0].get(shard, {-1: folder}))
        if number <= last:
            raise ValueError(f"snapshot {number} of shard {shard!r}: {folder} has {last} already; count on from there")
        _write(folder, name, parts)
    except OSError as e:
        free = shutil.disk_usage(folder).free if folder.is_dir() else "no"
        raise SnapshotFailed(
            f"no snapshot of shard {shard!r} could be written to {folder}: {e.strerror}. It needs "
            f"{sum(map(len, parts)) + _DIGEST} bytes, {free} are free: make room or take another folder; old ones stay"
        ) from e
    _tidy(folder, shard, keep)
    return folder / name


def load(folder: str | os.PathLike[str], shard: str | None = None) -> Loaded:
    """The newest whole snapshot of every shard, as one. Of a key that several have, the state with the most updates.

    Args:
        folder: where they are; it may be one that is being saved to.
        shard: only this one's.

    Raises:
        SnapshotFailed: there are none, or none of some shard's is whole: which files, and why.
        CheckpointMismatch: they are of several models or plans.
    """
    for _ in range(_LOOKS):
        with contextlib.suppress(FileNotFoundError):  # a newer one came, and this one went: look again
            return _load(Path(folder), shard)
    raise SnapshotFailed(
        f"snapshots in {os.fspath(folder)} go while they are read: stop what saves there, or keep more"
    )


def _load(folder: Path, shard: str | None) -> Loaded:
    try:
        files, _ = _files(folder)
    except OSError as e:
        raise SnapshotFailed(f"no snapshots can be read in {folder}: {e.strerror}; it must be what was saved to") from e
    if not files or shard not in (None, *files):
        what = f"no snapshot of shard {shard!r}" if files else "no snapshots"
        known = ", ".join(sorted(files)) or "none"
        raise SnapshotFailed(f"{folder} has {what} (known: {known}): it must be the folder that was saved to")
    found, marks = Loaded({}, {}, {}), dict[str, object]()
    for name in sorted(files) if shard is None else [shard]:
        path, found.abouts[name], cells = _newest(folder, name, files[name])
        found.numbers[name], marks[path.name] = max(files[name]), found.abouts[name].get("fingerprint")
        for key, state in cells.items():
            if key not in found.cells or state["number"] > found.cells[key]["number"]:
                found.cells[key] = state
    if len({repr(mark) for mark in marks.values()}) > 1:
        said = "; ".join(f"{name}: {mark!r:.80}" for name, mark in marks.items())
        raise CheckpointMismatch(f"snapshots in {folder} are of several models or plans ({said}): leave but one run's")
    return found


def _newest(folder: Path, shard: str, files: Mapping[int, Path]) -> tuple[Path, dict[str, Any], dict[str, Any]]:
    torn = []
    for number, path in sorted(files.items(), reverse=True):
        try:
            return path, *_unpacked(path, shard, number)
        except (SnapshotFailed, FileNotFoundError):
            raise
        except Exception as e:  # msgpack and torch raise many; of bytes all mean the same
            why = str(e) if isinstance(e, _Torn | OSError) else f"it makes no sense ({type(e).__name__})"
            _log.warning("snapshot %s is passed over: %s", path, why)
            torn.append(f"{path.name}: {why}")
    raise SnapshotFailed(
        f"no snapshot of shard {shard!r} in {folder} is whole ({'; '.join(torn)}): bring back a copy, or move these "
        "away and do without the shard"
    )


def _name(shard: str, number: int) -> str:
    if type(number) is not int or not 0 <= number < 1 << 63:
        raise ValueError(f"the number of a snapshot must be a whole number from 0 to 2⁶³ - 1, got {number!r}")
    return f"{quote(shard, safe='').replace('.', '%2E')}-{number}.snapshot"


def _files(folder: Path) -> tuple[dict[str, dict[int, Path]], list[tuple[str, Path]]]:
    """Shard → number → path; and shard and path of what is not finished."""
    whole: dict[str, dict[int, Path]] = {}
    parts = []
    for path in folder.iterdir():
        match = _FILE.fullmatch(path.name)
        if match and path.is_file():
            shard, number = unquote(match["shard"]), int(match["number"])
            if match["part"]:
                parts.append((shard, path))
            elif number < 1 << 63 and path.name == _name(shard, number):
                whole.setdefault(shard, {})[number] = path
    return whole, parts


def _tidy(folder: Path, shard: str, keep: int) -> None:
    """Removes what is old, and what a writer that was killed has left. The new one is safe already."""
    try:
        whole, parts = _files(folder)
        for path in [*(whole[shard][n] for n in sorted(whole[shard])[:-keep]), *(p for s, p in parts if s == shard)]:
            path.unlink()
    except OSError as e:
        _log.warning("old snapshots of shard %r stay in %s: %s", shard, folder, e.strerror)


def _write(folder: Path, name: str, parts: list[Buffer]) -> None:
    part = folder / f"{name}.{uuid.uuid4().hex}.part"
    digest = hashlib.blake2b(digest_size=_DIGEST)
    try:
        with part.open("xb") as file:
            for each in parts:
                digest.update(each)
                file.write(each)
            file.write(digest.digest())
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, folder / name)
    finally:
        with contextlib.suppress(OSError):
            part.unlink()
    _sync(folder)


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


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


def _unpacked(path: Path, shard: str, number: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """What it is about, and its cells. Raises what may be raised of bytes: anything."""
    data = memoryview(path.read_bytes())
    if len(data) < _START.size + _DIGEST:
        raise _Torn(f"it is cut off after {len(data)} bytes")
    magic, version, head, held = _START.unpack_from(data)
    due = _START.size + head + held + _DIGEST
    if magic == _MAGIC and version == _VERSION and len(data) != due:
        raise _Torn(f"it has {len(data)} bytes, and should have {due}")
    if magic != _MAGIC or hashlib.blake2b(data[:-_DIGEST], digest_size=_DIGEST).digest() != data[-_DIGEST:]:
        raise _Torn("its checksum is wrong")
    if version != _VERSION:
        raise SnapshotFailed(f"{path} has version {version}, this commlib reads {_VERSION}: take that which wrote it")
    rest = data[_START.size + head : -_DIGEST]

    def tensor(code: int, given: bytes) -> Tensor:
        nonlocal rest
        name, shape = msgpack.unpackb(given)
        if code != _TENSOR or name not in DTYPES or not all(type(n) is int and n >= 0 for n in shape):
            raise _Torn("a tensor's dtype or shape is none")
        nbytes = math.prod(shape) * DTYPES[name]
        if nbytes > len(rest):
            raise _Torn(f"a tensor has {nbytes} bytes, of which {len(rest)} are there")
        own, rest, dtype = bytearray(rest[:nbytes]), rest[nbytes:], getattr(torch, name)
        return from_buffer(own, dtype).view(shape) if nbytes else torch.empty(shape, dtype=dtype)

    packed = data[_START.size : -held - _DIGEST]
    name, its, about, cells = msgpack.unpackb(packed, ext_hook=tensor, strict_map_key=False, max_array_len=_LIST)
    if (name, its) != (shard, number) or rest:
        raise _Torn(f"it is snapshot {its!r:.40} of shard {name!r:.80}, with {len(rest)} bytes that no tensor needs")
    if not all(map(_is_state, cells.values())) or not all(type(key) is str for key in (*about, *cells)):
        raise _Torn("it has what are no states of cells")
    return about, cells
