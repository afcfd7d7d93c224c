"""Process group that carries out calls, and has none yet: what :class:`~.group.ZmqGroup` inherits.

All ranks' copies of a call are made alike: which schedule, from what all of them know; and a text of it that every
message bears. Besides its calls torch.distributed asks a process group for names, the store and the time-out.
"""

from __future__ import annotations

import collections
import dataclasses
import datetime
import types
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.autograd.profiler as profiler
import torch.distributed as dist
from torch import Tensor

from commlib.messaging.link_model import AlphaBeta
from commlib.runtime.autograd import untraced
from commlib.transports.process_group.algorithms.steps import Position, Schedule

from .arguments import Parts
from .engine import Engine, EngineCall
from .host_tensors import HostTensors
from .work import CollectiveWork

_ProcessGroup: Any = dist.ProcessGroup  # its calls have two forms each
_KEPT, _SMALL = 256, 4096  # works, and bytes of each result
C = TypeVar("C", bound=type)


def never_compiled(group: C) -> C:
    """Keep ``torch.compile`` out of a class's calls: they hand tensors to threads, and run as they are written."""
    for name, member in list(vars(group).items()):
        if not name.startswith("_") and callable(member):
            setattr(group, name, untraced(member))
    return group


class GroupIdentity(_ProcessGroup):  # type: ignore[misc]
    """A process group without calls. It is its own backend: PyTorch's would look for one of each device.

    Args:
        store: it was made by.
        place: this rank among the others.
        timeout: of its calls, where they have none of their own.
    """

    def __init__(self, store: Any, place: Position, timeout: datetime.timedelta) -> None:
        super().__init__(place.rank, place.size)  # its form with a store makes none that Python may add to
        self._store, self._name, self._desc = store, "", ""
        self.options = types.SimpleNamespace(_timeout=timeout)

    def getBackendName(self) -> str:  # PyTorch's
        """Name of the backend."""
        return "zmq"

    name = getBackendName

    def setGroupName(self, name: str) -> None:  # PyTorch's
        """As torch.distributed calls it."""
        self._name = name

    def getGroupName(self) -> str:  # PyTorch's
        """As torch.distributed calls it."""
        return self._name

    _set_group_name, group_name = setGroupName, property(getGroupName)

    def setGroupDesc(self, text: str) -> None:  # PyTorch's
        """Set the group's description."""
        self._desc = text

    def getGroupDesc(self) -> str:  # PyTorch's
        """Description of the group."""
        return self._desc

    _set_group_desc, group_desc = setGroupDesc, property(getGroupDesc)

    def get_group_store(self) -> Any:
        """The one it was made by."""
        return self._store

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        """Set the time-out of calls from now on that have none of their own."""
        self.options._timeout = timeout

    _set_default_timeout = set_timeout

    def _get_backend(self, device: torch.device) -> GroupIdentity:
        return self

    def _set_sequence_number_for_group(self) -> None: ...


@dataclasses.dataclass(frozen=True)
class ScheduledCollective:
    """A collective: its text, this rank's schedule, what that reads and what it fills."""

    what: str
    schedule: Schedule
    reads: Sequence[HostTensors]
    fills: Sequence[HostTensors]


class GroupCalls(GroupIdentity):
    """A process group.

    Args:
        store: of the group.
        place: this rank among the others.
        timeout: of its calls, where they have none of their own.
        engine: carries out collectives.
        line: α and β of a message, the same on all ranks.
        shut: called at the end.
    """

    def __init__(
        self,
        store: Any,
        place: Position,
        timeout: datetime.timedelta,
        engine: Engine,
        line: AlphaBeta,
        shut: Callable[[], None],
    ) -> None:
        super().__init__(store, place, timeout)
        self.line = line
        self._engine, self._shut, self._place = engine, shut, place
        # C++ may hold a work of which Python holds nothing any more, and then finds its calls gone: DDP does so in a
        # Join that divides by the ranks that are left, from a forward pass to its backward pass.
        self._kept: collections.deque[CollectiveWork] = collections.deque(maxlen=_KEPT)

    def _get_sequence_number_for_group(self) -> int:
        return self._engine.count

    def peers_gone(self) -> dict[int, str]:
        """Ranks that are gone, and why, as far as that is known while no call waits for them; it takes an instant."""
        return self._engine.gone()

    def shutdown(self) -> None:
        """Ends it; what is not through fails. Again: nothing."""
        self._shut()

    abort = shutdown

    def _call(self, parts: Sequence[ScheduledCollective], result: Parts, opts: Any) -> CollectiveWork:
        """Start these collectives as one call, one after another."""

        def schedule() -> Schedule:
            for part in parts:
                for held in part.reads:
                    held.ready()
                yield from part.schedule

        def done() -> None:
            for part in parts:
                for held in part.fills:
                    held.back()

        what = parts[0].what if len(parts) == 1 else f"{len(parts)} collectives, first {parts[0].what}"
        kind = parts[0].what.partition("(")[0]
        staged = [s for p in parts for held in p.fills for s in held.staged]
        work = CollectiveWork(what, result, self._engine.help, staged)
        call = EngineCall(work, schedule(), done, self._seconds(opts))
        waited_for = not getattr(opts, "asyncOp", True)
        if not waited_for and all(map(_small, result)):
            self._kept.append(work)
        return self._shown(kind, lambda: self._engine.submit(call, waited_for=waited_for))

    def _shown(self, name: str, begin: Callable[[], CollectiveWork]) -> CollectiveWork:
        """Begin a call, which a profiler that runs sees; what is waited for it, too (:meth:`CollectiveWork.wait`).

        Both in this thread. A span until the call is through would be ended by the engine's thread, and PyTorch's
        profiler ends the process by a segmentation fault where that happens while it is stopped.
        """
        if not profiler._is_profiler_enabled:
            return begin()
        with profiler.record_function(f"zmq:{name}"):
            return begin()

    def _seconds(self, opts: Any) -> float:
        given: datetime.timedelta | None = getattr(opts, "timeout", None)
        own = given if given is not None and given.total_seconds() > 0 else self.options._timeout
        return float(own.total_seconds())


def _small(result: Tensor) -> bool:
    """Whether a result keeps little alive: its storage, and no graph."""
    return result.grad_fn is None and not result.is_sparse and result.untyped_storage().nbytes() <= _SMALL
