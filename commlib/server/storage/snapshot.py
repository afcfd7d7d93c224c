"""Snapshots of a shard's cells on disk: whole or not there, and read back as the newest that is whole.

::

    FOLDER/<shard>-<number>.snapshot    in the shard's name, %xx for what is no letter, digit, "_", "-" or "~"
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

from commlib.errors import CheckpointMismatch, CommlibError
from commlib.messaging.frame import Buffer
from commlib.server.storage.serialization import OtherVersion, Torn, pack, unpack

_log = logging.getLogger("commlib")
_LOOKS = 20  # at a folder whose files go while they are read
_FILE = re.compile(r"(?P<shard>[\w%~-]+)-(?P<number>[0-9]{1,19})\.snapshot(?P<part>\.[0-9a-f]{32}\.part)?", re.ASCII)


class SnapshotFailed(CommlibError):
    """A snapshot that cannot be written, or none that can be read; it says which, why, and what to do."""


class Loaded(NamedTuple):
    """Content of snapshots that were read.

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
    parts = pack(shard, number, about, cells)
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
            f"{sum(map(len, parts))} bytes, {free} are free: make room or take another folder; old ones stay"
        ) from e
    _tidy(folder, shard, keep)
    return folder / name


def contents(folder: str | os.PathLike[str]) -> dict[int, list[str]]:
    """Numbers of all snapshots there → the shards that have one; empty if there is no folder."""
    found: dict[int, list[str]] = {}
    with contextlib.suppress(OSError):
        for shard, paths in sorted(_files(Path(folder))[0].items()):
            for number in paths:
                found.setdefault(number, []).append(shard)
    return found


def load(folder: str | os.PathLike[str], shard: str | None = None, at: int | None = None) -> Loaded:
    """The newest whole snapshot of every shard, as one. Of a key that several have, the state with the most updates.

    Args:
        folder: where they are; it may be one that is being saved to.
        shard: only this one's.
        at: only those of this number, and of shards that have one.

    Raises:
        SnapshotFailed: there are none, or none of some shard's is whole: which files, and why.
        CheckpointMismatch: they are of several models or plans.
    """
    for _ in range(_LOOKS):
        with contextlib.suppress(FileNotFoundError):  # a newer one came, and this one went: look again
            return _load(Path(folder), shard, at)
    raise SnapshotFailed(f"snapshots in {os.fspath(folder)} go while they are read: stop what saves there")


def _load(folder: Path, shard: str | None, at: int | None) -> Loaded:
    try:
        files, _ = _files(folder)
        if at is not None:
            files = {name: {at: paths[at]} for name, paths in files.items() if at in paths}
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
            return path, *unpack(memoryview(path.read_bytes()), shard, number)
        except FileNotFoundError:
            raise
        except OtherVersion as e:
            raise SnapshotFailed(f"{path} has {e}") from e
        except Exception as e:  # msgpack and torch raise many; of bytes all mean the same
            why = str(e) if isinstance(e, Torn | OSError) else f"it makes no sense ({type(e).__name__})"
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
    try:
        with part.open("xb") as file:
            for each in parts:
                file.write(each)
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
