"""When a shard's keys are saved, and what a job begins with that goes on from there.

All that belongs to a step is saved at that step: the state of each key when all workers' pushes of so many steps are in
it and no others, if workers go in step. So with BSP a job that goes on does what it would have done.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Collection, Mapping
from typing import Any

from commlib.errors import CheckpointMismatch
from commlib.server.shard.chunk_state import ChunkState
from commlib.server.storage.snapshot import SnapshotFailed, load, numbers

_log = logging.getLogger("commlib")


class SnapshotPolicy:
    """Policy of what a shard has to save. Pure.

    Args:
        every: steps between two snapshots.
        begun: steps that the job had done before it began anew.
    """

    def __init__(self, every: int, begun: int = 0) -> None:
        self._every, self._begun = every, begun
        self._states: dict[int, dict[str, dict[str, Any]]] = {}  # step → key → state
        self._last: dict[str, int] = {}  # key → the last step at which it was taken

    def note(self, key: str, cell: ChunkState) -> None:
        """A cell has been updated."""
        done = self._begun + min(cell.included.values(), default=0)
        step = done - done % self._every
        if step > self._last.get(key, self._begun):
            self._last[key] = step
            self._states.setdefault(step, {})[key] = cell.state_dict()

    def due(self, owned: Collection[str]) -> tuple[int, dict[str, dict[str, Any]]] | None:
        """A step, and the state of all that the shard owns then: once; None as long as some key has not come so far."""
        whole = [step for step, states in self._states.items() if states.keys() >= set(owned)]
        if not whole or not owned:
            return None
        step = max(whole)
        states = self._states[step]
        self._states = {later: held for later, held in self._states.items() if later > step}
        return step, {key: states[key] for key in owned}


def restore(folder: str, keys: Collection[str], fingerprint: str) -> tuple[int, Mapping[str, Mapping[str, Any]]]:
    """The last step of which every key was saved, and their states.

    Raises:
        SnapshotFailed: there is no such step.
        CheckpointMismatch: they are of another model or optimizer.
    """
    lacking = torn = ""
    for step in sorted(numbers(folder), reverse=True):
        try:
            found = load(folder, at=step)
        except SnapshotFailed as e:
            _log.warning("step %d is passed over: %s", step, e)
            torn = torn or str(e)
            continue
        marks = {about.get("fingerprint") for about in found.abouts.values()}
        if marks != {fingerprint}:
            raise CheckpointMismatch(f"the snapshots in {folder} are of another model or optimizer than this job's")
        missing = sorted(set(keys) - found.cells.keys())
        if not missing:
            return step, {key: found.cells[key] for key in keys}
        lacking = f"of step {step}, {folder} lacks {missing[0]}" + (
            f" and {len(missing) - 1} more" * (len(missing) > 1)
        )
    why = lacking or torn or f"{folder} has no snapshots"
    raise SnapshotFailed(f"nothing to go on from: {why}; each shard's snapshots must be in the folder that all read")


@dataclasses.dataclass(frozen=True)
class Snapshots:
    """Where and when a shard's state is saved.

    Args:
        folder: all shards' are there.
        every: steps between two.
        restore: go on from those that are there.
    """

    folder: str
    every: int = 1000
    restore: bool = False

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ValueError(f"steps between snapshots must be 1 or more, got {self.every}")
