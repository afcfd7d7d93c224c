"""commlib and torch.distributed in a simulated world: their endpoints, stores and global state, by process."""

from __future__ import annotations

import contextlib
import functools
import logging
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed import distributed_c10d

from commlib.exchange import in_flight, sequencer
from commlib.groups.store import DeadlineStore
from commlib.planning.manager import manager
from commlib.runtime.autograd import wait
from commlib.server.membership import rendezvous as meetings
from commlib.server.shard import serve as shards
from commlib.server.worker import session
from commlib.transports.process_group import factory, rendezvous
from tests.support.simulation import primitives
from tests.support.simulation.job import Job
from tests.support.simulation.network import SimulatedEndpoint
from tests.support.simulation.world import World
from tests.support.tiny_ddp import Head

_c10d: Any = torch._C._distributed_c10d


class _Worlds:
    """``torch.distributed``'s global state, of the simulated process whose thread asks."""

    _NEW: Callable[[], dict[str, Any]] = staticmethod(
        lambda: {
            "default_pg": None,
            "pg_map": {},
            "pg_names": {},
            "pg_group_ranks": {},
            "pg_backend_config": {},
            "group_count": 0,
            "tags_to_pg": {},
            "pg_to_tag": {},
            "pg_coalesce_state": {},
            "comms": [],
        }
    )

    def _state(self) -> dict[str, Any]:
        found: dict[str, Any] = primitives.state().setdefault("torch.distributed", {})
        if not found:
            found.update(self._NEW())
        return found

    def __getattr__(self, name: str) -> Any:
        try:
            return self._state()[name]
        except KeyError:
            raise AttributeError(name) from None

    def __setattr__(self, name: str, value: Any) -> None:
        self._state()[name] = value


class _Noted(logging.Handler):
    """What commlib logs, among what happened."""

    def __init__(self, world: World) -> None:
        super().__init__(logging.INFO)
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        self._world.note(f"logs: {record.getMessage()}")


def _through(work: Any, seconds: float) -> bool:
    """As commlib's, and then DDP, which waits for the work's future in C++, need not: there nobody else has a turn."""
    if not in_flight.through(work, seconds):
        return False
    wait(work.get_future(), lambda: None)
    return True


@contextlib.contextmanager
def simulated(job: Job) -> Iterator[None]:
    """commlib and torch.distributed in the world of this job."""
    world, network = job.world, job.network

    def visit(address: str, name: str, timeout: float) -> DeadlineStore:
        return DeadlineStore(job.store(), timeout)

    def endpoint_kind(kind: str) -> Callable[..., SimulatedEndpoint]:
        return lambda rank, towards, **options: SimulatedEndpoint(rank, network=network, **options)

    names: list[tuple[Any, str, Any]] = [
        (rendezvous, "ZeroMQ", functools.partial(SimulatedEndpoint, network=network)),
        (factory, "_live", weakref.WeakSet()),
        (factory, "_defaults", []),
        (distributed_c10d, "_world", _Worlds()),
        (meetings, "visit", visit),
        (shards, "endpoint_kind", endpoint_kind),
        (session, "endpoint_kind", endpoint_kind),
        (sequencer, "through", _through),
        (manager, "Controller", lambda model: Head(model, 2)),
        *job.replaced(),
    ]
    log, noted = logging.getLogger("commlib"), _Noted(world)
    level, propagates = log.level, log.propagate
    before = [(module, name, getattr(module, name)) for module, name, _ in names]
    with primitives.installed(world), torch.autograd.set_multithreading_enabled(False):
        _c10d._set_thread_isolation_mode(True)
        log.addHandler(noted)
        log.setLevel(logging.INFO)
        log.propagate = False
        try:
            for module, name, value in names:
                setattr(module, name, value)
            yield
        finally:
            _c10d._set_thread_isolation_mode(False)
            log.removeHandler(noted)
            log.setLevel(level)
            log.propagate = propagates
            for module, name, value in before:
                setattr(module, name, value)
