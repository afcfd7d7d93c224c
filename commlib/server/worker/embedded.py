"""Shards that a training brings along: a process on each machine, and a meeting place at the first worker.

Under torchrun the workers find each other by the process group's store, and the first tells there where to meet.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgpack
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.distributed.rendezvous import rendezvous as torch_rendezvous

from commlib.errors import CommlibError, PeerLost
from commlib.groups.handshake import wait_for_all
from commlib.groups.store import DeadlineStore, store_of
from commlib.groups.world import World
from commlib.messaging.network import address_of, address_towards, machine, store_host
from commlib.messaging.throughput import measure
from commlib.server.job.chunks import NBYTES, fitting
from commlib.server.membership import rendezvous
from commlib.server.storage.snapshot_policy import Snapshots

_log = logging.getLogger("commlib")
_GRACE_S = 10.0
_LEFT: list[subprocess.Popen[bytes]] = []  # that go on without their worker; held, or Popen would complain


class Embedded:
    """Embedded servers of one worker: maybe the rendezvous, maybe shards. :meth:`close` when all workers have gone.

    Args:
        each: shards on each machine.
        endpoint: how members are reached.
        timeout: seconds that anything waits.
        snapshots: where shards save their state; a folder that all machines see.
        world: of the workers. Without a process group several of them need torchrun's environment. Default: the group.
        group: process group of the workers. Default: of all ranks, if there is one.
        measures: whether the link between two machines is measured.
        total: shards in all instead, spread evenly over the machines.

    Attributes:
        address: where members meet.
        name: of the job there.
        shards: how many there are in all.
        keeps: whether the meeting place is here.
        nbytes: of a chunk that fits the link, as far as it was measured; the same for all workers.

    Raises:
        ValueError: several workers who do not know of each other, or another number than there are.
        PeerLost: another worker does not come.
        CommlibError: nobody could meet here.
    """

    def __init__(
        self,
        each: int,
        endpoint: str,
        timeout: float,
        snapshots: Snapshots | None = None,
        world: World | None = None,
        group: Any = None,
        *,
        measures: bool = False,
        total: int | None = None,
    ) -> None:
        self._children: list[subprocess.Popen[bytes]] = []
        self._store: c10d.TCPStore | None = None
        shared, world = _shared(world, timeout, group)
        # Without torchrun's agent it is kept here, and others may yet have to read it.
        self._shared: DeadlineStore | None = shared
        self.name = f"embedded-{shared.add(f'commlib/server/count/{world.rank}', 1)}"
        key = f"commlib/server/{self.name}"
        machines = _told(shared, f"{key}/machine", world, machine(), timeout)
        firsts = sorted({machines.index(m) for m in machines})  # the first rank of each machine
        self.shards, self.keeps = each * len(firsts) if total is None else total, world.rank == 0
        if self.keeps:
            self._store = rendezvous.keep(_host(shared, len(firsts) == 1))
            shared.set(f"{key}/at", f"{_named(self._store.host)}:{self._store.port}")
        missing = [] if self.keeps or shared.check([f"{key}/at"]) else _wait(shared, f"{key}/at", timeout)
        if missing:
            raise PeerLost(f"rank 0 has not said for {timeout:g} s where the parameter server's members meet")
        self.address = shared.get(f"{key}/at").decode()
        self.nbytes = NBYTES
        if measures and len(firsts) > 1:
            self.nbytes = _fitting(shared, f"{key}/line", world)
        if world.rank in firsts:
            i, n = firsts.index(world.rank), len(firsts)
            mine = range(i * self.shards // n, (i + 1) * self.shards // n)
            self._children = [_shard(self.address, self.name, endpoint, timeout, snapshots, number) for number in mine]

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
        self._children, self._store, self._shared = [], None, None


def _shared(world: World | None, timeout: float, group: Any) -> tuple[DeadlineStore, World]:
    """Where all workers can read and write, and who they are."""
    if dist.is_initialized():
        group = group if group is not None else dist.group.WORLD
        there = World(dist.get_rank(group), dist.get_world_size(group))
        if world not in (None, there):
            raise ValueError(f"embedded servers serve the process group's {there.size} ranks: leave workers= out")
        return (store_of(group) if there.size > 1 else DeadlineStore(c10d.HashStore())), there
    if world is None or world.size == 1:
        return DeadlineStore(c10d.HashStore()), World(0, 1)
    told = tuple(os.environ.get(name) for name in ("RANK", "WORLD_SIZE"))
    if told != (str(world.rank), str(world.size)) or "MASTER_ADDR" not in os.environ:
        raise ValueError(
            f"embedded servers of {world.size} workers need a process group, or torchrun; "
            "else let them meet at HOST:PORT (commlib server meet)"
        )
    try:
        store, _, _ = next(iter(torch_rendezvous("env://", timeout=datetime.timedelta(seconds=timeout))))
    except RuntimeError as e:
        where = f"{os.environ['MASTER_ADDR']}:{os.environ.get('MASTER_PORT')}"
        raise PeerLost(f"the other workers are not to be found by the store at {where}: {e}") from e
    return DeadlineStore(c10d.PrefixStore("commlib", store)), world


def _told(store: DeadlineStore, key: str, world: World, mine: Any, timeout: float) -> list[Any]:
    store.set(f"{key}/{world.rank}", msgpack.packb(mine))
    missing = wait_for_all(store, key, world, timeout)
    if missing:
        raise PeerLost(f"ranks {', '.join(map(str, missing))} have not come to the parameter server for {timeout:g} s")
    return [msgpack.unpackb(store.get(f"{key}/{r}")) for r in range(world.size)]


def _wait(store: DeadlineStore, key: str, timeout: float) -> list[str]:
    end = time.monotonic() + timeout
    while not store.check([key]):
        if time.monotonic() > end:
            return [key]
        time.sleep(0.02)
    return []


def _fitting(shared: Any, key: str, world: World) -> int:
    """Bytes of a chunk, by the link between the first worker's machine and another."""
    try:
        line = measure(shared, key, world, _host(shared, alone=False))
    except PeerLost as e:
        _log.warning("the link is not measured, and chunks have %d KiB: %s", NBYTES >> 10, e)
        return NBYTES
    found = fitting(line.gbit_s) if line is not None else NBYTES
    if line is not None and world.rank == 0:
        _log.info("a stream between two machines has %.3f Gbit/s: chunks of %d KiB", line.gbit_s, found >> 10)
    return found


def _host(shared: Any, alone: bool) -> str:
    wanted, there = os.environ.get("COMMLIB_HOST"), store_host(shared)
    if wanted:
        return address_of(wanted)
    return "127.0.0.1" if alone or there is None else address_towards(there)


def _named(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _shard(
    address: str, name: str, endpoint: str, timeout: float, snapshots: Snapshots | None, number: int
) -> subprocess.Popen[bytes]:
    """A shard that outlives what becomes of this worker, and ends when the job is over or the meeting place gone."""
    command = [sys.executable, "-m", "commlib", "server", "run", "--at", address, "--job", name]
    command += ["--embedded", str(number), "--endpoint", endpoint, "--timeout", str(timeout)]
    if snapshots is not None:
        command += ["--snapshots", snapshots.folder, "--every", str(snapshots.every)]
        command += ["--restore"] * snapshots.restore
    env = {**os.environ, "OMP_NUM_THREADS": os.environ.get("COMMLIB_SERVER_THREADS", "1")}
    return start(command, env)


def start(command: Sequence[str], env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Begin a process that outlives this one, in a session of its own: Ctrl-C is the workers', who leave in order."""
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, env=env, start_new_session=True)
