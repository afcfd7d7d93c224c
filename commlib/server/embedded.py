"""Shards that a training brings along: a process on each machine, and a meeting place at the first worker.

Under torchrun the workers find each other by the process group's store, and the first tells there where to meet.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from typing import Any

import msgpack
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from commlib.errors import CommlibError, PeerLost
from commlib.exchange.item import World
from commlib.handshake import store_of, wait_for_all
from commlib.server import meeting
from commlib.server.saver import Snapshots
from commlib.where import address_of, address_towards, machine, store_host

_GRACE_S = 10.0
_LEFT: list[subprocess.Popen[bytes]] = []  # that go on without their worker; held, or Popen would complain


class Embedded:
    """What one worker brings: maybe the meeting place, maybe shards. :meth:`close` when all workers have gone.

    Args:
        each: shards on each machine.
        endpoint: how members are reached.
        timeout: seconds that anything waits.
        snapshots: where shards save their state; a folder that all machines see.

    Attributes:
        address: where members meet.
        name: of the job there.
        shards: how many there are in all.
        keeps: whether the meeting place is here.

    Raises:
        PeerLost: a rank of the process group does not come.
        CommlibError: nobody could meet here.
    """

    def __init__(self, each: int, endpoint: str, timeout: float, snapshots: Snapshots | None = None) -> None:
        self._children: list[subprocess.Popen[bytes]] = []
        self._store: c10d.TCPStore | None = None
        world = World(dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else World(0, 1)
        shared = store_of(dist.group.WORLD) if world.size > 1 else c10d.HashStore()
        self.name = f"embedded-{shared.add(f'commlib/server/count/{world.rank}', 1)}"
        key = f"commlib/server/{self.name}"
        machines = _told(shared, f"{key}/machine", world, machine(), timeout)
        self.shards, self.keeps = each * len(set(machines)), world.rank == 0
        if self.keeps:
            self._store = meeting.keep(_host(shared, len(set(machines)) == 1))
            shared.set(f"{key}/at", f"{_named(self._store.host)}:{self._store.port}")
        missing = [] if self.keeps or shared.check([f"{key}/at"]) else _wait(shared, f"{key}/at", timeout)
        if missing:
            raise PeerLost(f"rank 0 has not said for {timeout:g} s where the parameter server's members meet")
        self.address = shared.get(f"{key}/at").decode()
        if machines.index(machines[world.rank]) == world.rank:  # the first of its machine
            self._children = [_start(self.address, self.name, endpoint, timeout, snapshots) for _ in range(each)]

    def check(self) -> None:
        """That the shards started here run.

        Raises:
            CommlibError: one has ended.
        """
        ended = [child.returncode for child in self._children if child.poll() is not None]
        if ended:
            raise CommlibError(f"a shard's process ended with status {ended[0]} before the job began: see its output")

    def close(self) -> None:
        """When all workers have gone: waits until the shards have ended, and ends them if they do not.

        Where the meeting place is not kept, others may still train with the shards: they end by themselves when all
        is over, or the meeting place gone.
        """
        if not self.keeps:
            _LEFT.extend(self._children)
            self._children = []
        end = time.monotonic() + _GRACE_S
        for child in self._children:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(max(0.0, end - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        """Ends what still runs here, and the meeting place if it is here: the job."""
        for child in self._children:
            if child.poll() is None:
                child.kill()
                child.wait()
        self._children, self._store = [], None


def _told(store: Any, key: str, world: World, mine: Any, timeout: float) -> list[Any]:
    store.set(f"{key}/{world.rank}", msgpack.packb(mine))
    missing = wait_for_all(store, key, world, timeout)
    if missing:
        raise PeerLost(f"ranks {', '.join(map(str, missing))} have not come to the parameter server for {timeout:g} s")
    return [msgpack.unpackb(store.get(f"{key}/{r}")) for r in range(world.size)]


def _wait(store: Any, key: str, timeout: float) -> list[str]:
    end = time.monotonic() + timeout
    while not store.check([key]):
        if time.monotonic() > end:
            return [key]
        time.sleep(0.02)
    return []


def _host(shared: Any, alone: bool) -> str:
    wanted, there = os.environ.get("COMMLIB_HOST"), store_host(shared)
    if wanted:
        return address_of(wanted)
    return "127.0.0.1" if alone or there is None else address_towards(there)


def _named(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _start(
    address: str, name: str, endpoint: str, timeout: float, snapshots: Snapshots | None
) -> subprocess.Popen[bytes]:
    """A shard that outlives what becomes of this worker, and ends when the job is over or the meeting place gone."""
    command = [sys.executable, "-m", "commlib", "server", "run", "--at", address, "--job", name, "--embedded"]
    command += ["--endpoint", endpoint, "--timeout", str(timeout)]
    if snapshots is not None:
        command += ["--snapshots", snapshots.folder, "--every", str(snapshots.every)]
        command += ["--restore"] * snapshots.restore
    env = {**os.environ, "OMP_NUM_THREADS": os.environ.get("COMMLIB_SERVER_THREADS", "1")}
    # A session of its own: Ctrl-C is the workers' to see, who leave in order then.
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, env=env, start_new_session=True)
