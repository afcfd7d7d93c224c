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
from commlib.server.storage.snapshot import SnapshotFailed, contents, load

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
    """The last step of which every key was saved in one run of the job, and their states.

    A run that broke off may have saved a step in part, and the next one came to that step by other gradients. What two
    runs have saved is never put together; of two that have the same step whole, the later one counts.

    Raises:
        SnapshotFailed: there is no such step.
        CheckpointMismatch: they are of another model or optimizer.
    """
    lacking = torn = ""
    there = contents(folder)
    for step in sorted(there, reverse=True):
        runs: dict[str, _Run] = {}
        for shard in there[step]:
            try:
                found = load(folder, shard, step)
            except SnapshotFailed as e:
                _log.warning("step %d of shard %s is passed over: %s", step, shard, e)
                torn = torn or str(e)
                continue
            about = found.abouts[shard]
            if about.get("fingerprint") != fingerprint:
                raise CheckpointMismatch(f"the snapshots in {folder} are of another model or optimizer than this job's")
            run = runs.setdefault(str(about.get("run", "")), _Run())
            for key, state in found.cells.items():
                if key not in run.states or state["number"] > run.states[key]["number"]:
                    run.states[key] = state
            run.time = max(run.time, float(about.get("time", 0.0)))
        for run in sorted(runs.values(), key=lambda run: run.time, reverse=True):
            missing = sorted(set(keys) - run.states.keys())
            if not missing:
                return step, {key: run.states[key] for key in keys}
            lacking = lacking or f"of step {step}, {folder} lacks {missing[0]}" + (
                f" and {len(missing) - 1} more" * (len(missing) > 1)
            )
    why = lacking or torn or f"{folder} has no snapshots"
    raise SnapshotFailed(f"nothing to go on from: {why}; each shard's snapshots must be in the folder that all read")


@dataclasses.dataclass
class _Run:
    states: dict[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    time: float = 0.0


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
