"""Single state dict of all ranks, and back: for frameworks whose checkpoint is one file, which rank 0 writes."""

from __future__ import annotations

import contextlib
import os
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import msgpack
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from commlib.checkpoint.state_dict import StateDict, merge_state_dicts
from commlib.errors import CheckpointMismatch, PeerLost, ProtocolError
from commlib.groups.handshake import meeting_place, named, tell, wait_for_all, within
from commlib.groups.process_groups import between_hosts
from commlib.groups.store import store_of
from commlib.groups.world import World
from commlib.messaging import values
from commlib.messaging.frame import to_buffer

_STEP, _FOUND, _PROBLEM = "step", "found", "problem"  # what ranks tell each other
_LEAST, _PER_VALUE = 1 << 24, 64  # bytes of a rank's state: what is more than that, and so many a value, is refused


class Stateful(Protocol):
    """An attached model's state on this rank: the part of :class:`commlib.HookState` that a :class:`Collector` uses."""

    @property
    def world(self) -> World:
        """This rank, and how many there are."""

    def state_dict(self) -> StateDict:
        """Return this rank's state."""

    def load_state_dict(self, state: StateDict, *, drop_residuals: bool = False) -> None:
        """Go on from a state, this rank's or a merged one."""


class Collector:
    """Collects the states of all ranks of an attached model on rank 0, and gives each its own again.

    Making one is collective, and so is every method: all ranks call it, in the same order. One that does not is named
    when the deadline is over, before anything has been sent.

    Args:
        ddp: the model.
        comm: what :func:`commlib.attach` returned for it.
        timeout: seconds to wait for the other ranks.
    """

    def __init__(self, ddp: DistributedDataParallel, comm: Stateful, timeout: float = 300.0) -> None:
        self._comm, self._world, self._timeout = comm, comm.world, timeout
        self._group: Any = ddp.process_group
        self._device = next(ddp.parameters()).device
        self._most = _LEAST + _PER_VALUE * sum(p.numel() for p in ddp.parameters())
        self._key, self._meetings = meeting_place(self._group, self._world), 0
        self._wire: Any = None

    def collect(self, timeout: float | None = None) -> StateDict | None:
        """The merged state on rank 0, on the host; None on the others.

        Args:
            timeout: seconds to wait, if not as usual.

        Raises:
            PeerLost: a rank did not come in time.
            CheckpointMismatch: ranks are in different steps; all that came raise it.
            ProtocolError: what a rank sent is no state, or larger than any; on rank 0.
        """
        mine: StateDict = _on_host(self._comm.state_dict())
        said = self._meet({_STEP: str(mine["step"])}, "save a checkpoint", timeout)
        steps = [rank[_STEP] for rank in said]
        if len(set(steps)) > 1:
            raise CheckpointMismatch(
                f"ranks would save different moments: they have done {', '.join(steps)} steps, in rank order; "
                "save between the same two steps on all"
            )
        if self._world.size == 1:
            return mine
        if self._wire is None:
            self._wire = between_hosts(self._group, self._device)
        members = dist.get_process_group_ranks(self._group)
        if self._world.rank > 0:
            _send(mine, members[0], self._wire)
            return None
        # One after the other, so that only one is there twice.
        parts = [_receive(rank, members[rank], self._wire, self._most) for rank in range(1, self._world.size)]
        return merge_state_dicts([mine, *parts])

    def restore(self, read: Callable[[], StateDict | None]) -> bool:
        """Takes over a state, of any number of ranks: bit for bit if there are as many now.

        Args:
            read: gives the collected state; None if there is none. One without any rank's residuals leaves them zero.

        Returns:
            Whether there is one.

        Raises:
            CheckpointMismatch: a rank cannot use it, or finds none where others do; every rank raises it.
        """
        problem: Exception | None = None
        state: StateDict | None = None
        try:
            state = read()
            if state is not None:
                self._comm.load_state_dict(state, drop_residuals=not state.get("ranks"))
        except Exception as e:
            problem = e
        mine = {_PROBLEM: str(problem)} if problem is not None else {_FOUND: "no" if state is None else "yes"}
        said = self._meet(mine, "load a checkpoint")
        if problem is not None:
            raise problem
        for rank, words in enumerate(said):
            if _PROBLEM in words:
                raise CheckpointMismatch(f"rank {rank} could not load commlib's state: {words[_PROBLEM]}")
        without = [str(rank) for rank, words in enumerate(said) if words[_FOUND] == "no"]
        if 0 < len(without) < len(said):
            raise CheckpointMismatch(
                f"rank {', '.join(without)} of {len(said)} found no state of commlib, and the others did: "
                "all ranks must see the same checkpoint"
            )
        return state is not None

    def save(self, path: Path) -> None:
        """:meth:`collect`, and rank 0 writes it there: all of it, or nothing."""
        state = self.collect()
        if state is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            beside = path.with_name(f".{path.name}.{os.getpid()}")
            torch.save(state, beside)
            beside.replace(path)

    def load(self, path: Path) -> bool:
        """:meth:`restore` from what :meth:`save` wrote; False if there is no such file."""
        return self.restore(lambda: _read(path))

    def close(self) -> None:
        """Ends its process group."""
        if self._wire is not None:
            with contextlib.suppress(Exception):  # all groups may have been ended already
                dist.destroy_process_group(self._wire)
        self._wire = None

    def _meet(self, mine: Mapping[str, str], what: str, timeout: float | None = None) -> list[dict[str, str]]:
        """Words of every rank, in rank order, once all have come."""
        timeout = self._timeout if timeout is None else timeout
        # Of its own count: one that a rank has held alone, after an exception, must not lead later attachments astray.
        self._meetings += 1
        key, store = f"{self._key}/{self._meetings}", store_of(self._group)
        tell(self._group, key, mine, self._world)
        missing = wait_for_all(store, f"{key}/self", self._world, timeout, self._group)
        if missing:
            raise PeerLost(
                f"{named(missing)} of {self._world.size} did not come {within(self._group, missing, timeout)} "
                f"to {what} (this is rank {self._world.rank}): commlib's state is on all ranks, "
                "so every rank must make the call"
            )
        return [msgpack.unpackb(store.get(f"{key}/self/{r}")) for r in range(self._world.size)]


def _send(state: StateDict, to: int, group: Any) -> None:
    head, rows = values.pack({"state": state})
    data = torch.empty(len(head) + sum(map(len, rows)), dtype=torch.uint8)
    room = memoryview(to_buffer(data))
    for part in (head, *rows):
        room[: len(part)] = part
        room = room[len(part) :]
    dist.send(torch.tensor([len(head), len(data)]), to, group=group)
    dist.send(data, to, group=group)


def _receive(rank: int, source: int, group: Any, most: int) -> StateDict:
    """State that a rank sends by :func:`_send`; unlike an object list of PyTorch's, it is not pickled."""
    sizes = torch.zeros(2, dtype=torch.int64)
    dist.recv(sizes, source, group=group)
    head, total = sizes.tolist()
    if not 0 < head <= total <= most:
        raise ProtocolError(f"rank {rank} would send {total} bytes of state, {head} of them names: at most {most} fit")
    data = torch.empty(total, dtype=torch.uint8)
    dist.recv(data, source, group=group)
    read = memoryview(to_buffer(data))
    try:
        (state,) = values.unpack(read[:head], read[head:])
        if not isinstance(state, dict):
            raise values.Unreadable("it is no map")
    except ValueError as e:
        raise ProtocolError(f"what rank {rank} sent is no state of commlib ({e})") from e
    return state


def _read(path: Path) -> StateDict | None:
    if not path.exists():
        return None
    try:  # mapped: a rank reads what it uses, mostly its own
        state: StateDict = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (RuntimeError, EOFError, OSError, pickle.UnpicklingError) as e:
        raise CheckpointMismatch(f"{path} is no readable state of commlib ({e})") from e
    return state


def _on_host(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.cpu()
    return {k: _on_host(v) for k, v in value.items()} if isinstance(value, dict) else value
