"""States out of a distributed checkpoint (``torch.distributed.checkpoint``), for as many ranks as there are now.

Saving needs nothing from here: ``dcp.save({"model": …, "comm": comm.state_dict()}, checkpoint_id=folder)`` keeps every
rank's residuals, for their keys differ. ``dcp.load`` fills what a state dict has already, and a new run has no
residuals to be filled: so they are read from here.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import torch

from commlib.checkpoint.state_dict import StateDict
from commlib.errors import CheckpointMismatch
from commlib.groups.world import World

_Path = tuple[Any, ...]


class Attached(Protocol):
    """Attached model's state: what ``attach`` has returned."""

    world: World


def read_state(source: str | os.PathLike[str] | Any, comm: Attached, *, key: str = "comm") -> StateDict:
    """Read what was saved of ``comm.state_dict()``: for ``comm.load_state_dict``. Asks no other rank.

    With as many ranks as there were this reads this rank's own residuals; with other ranks those of all old ones, since
    each takes over a part of all (:func:`commlib.merge_state_dicts`).

    Args:
        source: the checkpoint's folder, or a ``StorageReader`` of it.
        comm: what is attached now.
        key: under which it was saved.

    Raises:
        CheckpointMismatch: there is no checkpoint, or it has no such key, or what is there is none of our states.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemReader  # takes a while to import

    reader = FileSystemReader(source) if isinstance(source, (str, os.PathLike)) else source
    try:
        about = reader.read_metadata()
    except (OSError, AttributeError) as e:
        raise CheckpointMismatch(f"{source} has no distributed checkpoint that can be read: {e}") from e
    paths: dict[str, _Path] = {name: tuple(path) for name, path in (about.planner_data or {}).items()}
    ours = {name: path[1:] for name, path in paths.items() if path and path[0] == key}
    if not any(path == ("world_size",) for path in ours.values()):
        known = sorted({str(path[0]) for path in paths.values() if path}) or "nothing"
        raise CheckpointMismatch(
            f"{source} has no state of commlib under {key!r} (it has: {known}): key=… names another"
        )
    size = _read(reader, about, key, ours, lambda path: path == ("world_size",))["world_size"]
    own = str(comm.world.rank) if size == comm.world.size else None
    found = _read(reader, about, key, ours, lambda path: path[0] != "ranks" or own in (None, str(path[1])))
    ranks: dict[str, Any] = found.setdefault("ranks", {})
    for rank in [own] if own is not None else map(str, range(size)):
        ranks.setdefault(rank, {})  # one that held nothing back has left no key
    return found


def _read(
    reader: Any, about: Any, key: str, paths: Mapping[str, _Path], wanted: Callable[[_Path], bool]
) -> dict[str, Any]:
    """The part of a nested dict whose paths are wanted."""
    from torch.distributed.checkpoint.state_dict_loader import load

    room: dict[str, Any] = {}
    for name, path in paths.items():
        if wanted(path):
            _put(room, path, _empty(about.state_dict_metadata[name]))
    whole = {key: room}
    load(whole, storage_reader=reader, no_dist=True)
    return whole[key]


def _empty(about: Any) -> Any:
    """Room for a value: a tensor's, or anything else's."""
    size = getattr(about, "size", None)
    return 0 if size is None else torch.empty(tuple(size), dtype=about.properties.dtype)


def _put(nested: dict[Any, Any], path: Iterable[Any], value: Any) -> None:
    *outer, last = path
    for part in outer:
        nested = nested.setdefault(part, {})
    nested[last] = value
