"""A shard's snapshots, on disk: what it begins with, and what it saves as it goes."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Mapping
from typing import Any

from commlib.errors import CommlibError
from commlib.server.job.job import ServerJob
from commlib.server.membership.registry import MembershipStore
from commlib.server.shard.node import ShardNode
from commlib.server.storage.snapshot import SnapshotFailed, contents, save
from commlib.server.storage.snapshot_policy import SnapshotPolicy, Snapshots, restore

_log = logging.getLogger("commlib")
_LOOK_S = 0.5


class Saver:
    """Saver of one shard's snapshots.

    Args:
        snapshots: where and when.
        job: whose.
        shard: its name; others of that name in other runs are others.
    """

    def __init__(self, snapshots: Snapshots, job: ServerJob, shard: str) -> None:
        self._run = secrets.token_hex(4)
        self._snapshots, self._job, self._shard = snapshots, job, f"{shard}.{self._run}"
        self._next = 0.0
        self.keeper: SnapshotPolicy | None = None

    def begin(self, roll: MembershipStore, *, fresh: bool) -> Mapping[str, Mapping[str, Any]] | None:
        """The states of all keys to begin with, if the job goes on from snapshots.

        Args:
            roll: where shards agree on the step.
            fresh: the job begins with this shard; else others have it, and tell.

        Raises:
            SnapshotFailed: there is nothing to go on from.
            CheckpointMismatch: the snapshots are of another model or optimizer.
            CommlibError: snapshots are there, and nobody said what to do with them; or others have another step.
        """
        folder, states, step = self._snapshots.folder, None, 0
        if fresh and self._snapshots.restore:
            step, states = restore(folder, self._job.chunks, self._job.model)
        elif fresh and contents(folder):
            raise CommlibError(f"{folder} has snapshots: go on from them (restore), or name another folder")
        said, self._run = roll.begin_at(step, self._run) if fresh else roll.begun()
        if fresh and said != step:
            raise CommlibError(f"another shard goes on from step {said}, and this one from {step}: see {folder}")
        self.keeper = SnapshotPolicy(self._snapshots.every, said)
        return states

    def save(self, node: ShardNode) -> None:
        """Write the snapshot that is due; a disk that is full is no reason to stop training, and logged."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + _LOOK_S
        due = node.call(lambda shard: shard.due)
        if due is None:
            return
        step, states = due
        about = {"fingerprint": self._job.model, "run": self._run, "step": step, "time": time.time()}
        try:
            save(self._snapshots.folder, self._shard, step, about, states)
            _log.info("shard %s: step %d is saved in %s", self._shard, step, self._snapshots.folder)
        except SnapshotFailed as e:
            _log.error("shard %s: %s", self._shard, str(e))  # not e: who keeps records would keep our frames
