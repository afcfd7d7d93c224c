"""The raw line of all ranks at once: each sends to the next, and receives from the one before, round a ring.

A parameter server's bytes go like that: all hosts send and receive at the same time. Where cores are scarce, as in a
lab whose hosts share a few, that is less than one stream gets while all others are quiet (commlib.bench.link.worker).

What share of the machine's cores was busy meanwhile: whoever kept them so, in whichever emulated host.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch.distributed as dist

from commlib.bench.link.worker import own_address
from commlib.errors import PeerLost
from commlib.groups.handshake import wait_for_all
from commlib.groups.store import store_of
from commlib.groups.world import World

_FIELDS = 8  # user nice system idle iowait irq softirq steal; guests, which follow, are in user and nice already
_IDLE = (3, 4)


@dataclasses.dataclass(frozen=True)
class Ticks:
    """Ticks of all cores since the machine was started.

    Attributes:
        busy: all but idle and waiting for disks; what a virtual machine's host took away is busy too.
        all: in all.
    """

    busy: int
    all: int


def ticks() -> Ticks | None:
    """Now; None where the system does not say (Linux does)."""
    try:
        with open("/proc/stat", encoding="ascii") as f:
            return parse(f.readline())
    except OSError:
        return None


def parse(line: str) -> Ticks | None:
    """Ticks from the first line of /proc/stat; None if it is not what Linux writes there.

    >>> parse("cpu  30 0 20 940 10 0 0 0 0 0")
    Ticks(busy=50, all=1000)
    """
    name, *counts = line.split() or [""]
    if name != "cpu" or len(counts) < max(_IDLE) + 1 or not all(c.isdecimal() for c in counts):
        return None
    numbers = [int(c) for c in counts[:_FIELDS]]
    return Ticks(sum(numbers) - sum(numbers[i] for i in _IDLE), sum(numbers))


def busy_share(before: Ticks | None, after: Ticks | None) -> float | None:
    """Share of the cores that was busy between two looks; None where one is missing, or no tick has gone by."""
    if before is None or after is None or after.all <= before.all:
        return None
    # Waiting for disks may be counted back (proc(5)), so a share could come out of its bounds by a tick.
    return min(1.0, max(0.0, (after.busy - before.busy) / (after.all - before.all)))


_SETTLE_S = 0.25  # not counted: slow start, a lab's token bucket, and ranks that begin a little later
_TAIL_S = 0.5  # sent for others that still count
_CHUNK = 64 << 10
_UNSENT = 512 << 10  # bytes for the kernel to hold: enough not to be woken often, and not long to drain
_LATE_S = 120.0  # for a rank that comes late


@dataclasses.dataclass(frozen=True)
class RingBenchmark:
    """Figures of all ranks that send at once.

    Attributes:
        gbit_s: payload, each way, the mean of the ranks: which of them had the cores for a second is chance, and in a
            step the bytes of all are the same. All bytes over all of the time: what is lost by waiting for a core
            belongs to it.
        cores: busy share of the cores of rank 0's machine meanwhile; None where that is not to be had.
    """

    gbit_s: float
    cores: float | None


def measure_ring(seconds: float = 1.0, *, patience: float = 30.0) -> RingBenchmark | None:
    """Let all ranks stream at once; collective over the default process group, every rank gets the same figures.

    Args:
        seconds: that are counted.
        patience: seconds for one socket call.

    Returns:
        None in a group of one rank.

    Raises:
        ValueError: ``seconds`` is not positive.
        PeerLost: a rank did not come, could not connect or stopped; every rank that is left raises it, and says who.
    """
    if not 0 < seconds < math.inf:
        raise ValueError(f"a stream lasts more than 0 seconds, got {seconds!r}")
    world = World(dist.get_rank(), dist.get_world_size())
    if world.size == 1:
        return None
    meeting = _Meeting(world)
    with _Neighbours(world, patience) as neighbours:
        addresses = meeting.all_do("listening", neighbours.listen, _LATE_S)
        meeting.all_do("connecting", lambda: neighbours.connect(addresses), 3 * patience)
        within = _SETTLE_S + seconds + _TAIL_S + 2 * patience
        seen = meeting.all_do("streaming", lambda: neighbours.stream(seconds), within)
    return RingBenchmark(statistics.fmean(gbit_s for gbit_s, _ in seen), seen[0][1])


class _Meeting:
    """Where all ranks say, part by part, how they fared."""

    def __init__(self, world: World) -> None:
        self._world, self._store = world, store_of(dist.group.WORLD)
        self._key = f"commlib/ring/{self._store.add(f'commlib/ring/count/{world.rank}', 1)}"

    def all_do(self, what: str, part: Callable[[], Any], within: float) -> list[Any]:
        """Do this rank's part; what came of everybody's, by rank, at most so many seconds later.

        Raises:
            PeerLost: somebody's part failed, or somebody did not say; all are named.
        """
        try:
            outcome = {"well": part()}
        except OSError as e:
            outcome = {"error": str(e)}
        try:
            return self._hear(what, outcome, within)
        except PeerLost:
            raise
        except RuntimeError as e:  # DistStoreError: the store is gone
            raise PeerLost(f"the process group's store does not answer while all ranks stream at once ({e})") from e

    def _hear(self, what: str, mine: dict[str, Any], within: float) -> list[Any]:
        key = f"{self._key}/{what}"
        self._store.set(f"{key}/{self._world.rank}", json.dumps(mine))
        missing = wait_for_all(self._store, key, self._world, within)
        there = [r for r in range(self._world.size) if r not in missing]
        said = {r: json.loads(self._store.get(f"{key}/{r}")) for r in there}
        words = [f"rank {r} did not say within {within:g} s how its {what} went" for r in missing]
        words += [f"rank {r} {s['error']}" for r, s in said.items() if "error" in s]
        if words:
            error = PeerLost(f"no stream of all {self._world.size} ranks at once: {'; '.join(words)}")
            error.rank = missing[0] if len(missing) == 1 else None
            raise error
        return [s["well"] for s in said.values()]


class _Neighbours:
    """This rank's connections: to the next rank, and from the one before. Errors are OSErrors in words."""

    def __init__(self, world: World, patience: float) -> None:
        self._next, self._before = (world.rank + 1) % world.size, (world.rank - 1) % world.size
        self._patience = patience
        self._sockets = contextlib.ExitStack()

    def __enter__(self) -> _Neighbours:
        return self

    def __exit__(self, *error: object) -> None:
        self._sockets.close()

    def listen(self) -> tuple[str, int]:
        """Where the rank before may connect to."""
        address = own_address()
        try:
            self._listener = self._sockets.enter_context(socket.create_server((address, 0)))
        except OSError as e:
            raise OSError(f"cannot listen on {address}: {e}") from e
        self._listener.settimeout(self._patience)
        return address, self._listener.getsockname()[1]

    def connect(self, addresses: Sequence[tuple[str, int]]) -> None:
        """Connect to the neighbours once all listen."""
        address, port = addresses[self._next]
        try:
            to = socket.create_connection((address, port), self._patience)
        except OSError as e:
            raise OSError(f"cannot connect to rank {self._next} at {address}: {e}") from e
        self._to = self._sockets.enter_context(to)
        to.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNSENT)
        try:
            connection, _ = self._listener.accept()
        except OSError as e:
            raise OSError(f"was not connected to by rank {self._before}: {e}") from e
        self._from = self._sockets.enter_context(connection)
        connection.settimeout(self._patience)

    def stream(self, seconds: float) -> tuple[float, float | None]:
        """Send and receive at once; Gbit/s that came, and the cores' busy share."""
        with ThreadPoolExecutor(1) as sender:
            sent = sender.submit(self._send, _SETTLE_S + seconds + _TAIL_S)
            seen = self._receive(seconds)
            sent.result()
        return seen

    def _send(self, seconds: float) -> None:
        chunk = memoryview(bytes(_CHUNK))
        end = time.monotonic() + seconds
        try:
            while time.monotonic() < end:
                self._to.sendall(chunk)
            self._to.shutdown(socket.SHUT_WR)
        except OSError as e:
            raise OSError(f"could not send to rank {self._next}: {e}") from e

    def _receive(self, seconds: float) -> tuple[float, float | None]:
        """Counts what comes for ``seconds`` after settling; reads the rest too, for the sender's sake."""
        buffer = memoryview(bytearray(1 << 20))
        try:
            self._from.recv_into(buffer)
            settled = time.perf_counter() + _SETTLE_S
            while (begun := time.perf_counter()) < settled and self._from.recv_into(buffer):
                pass
            before, received, now = ticks(), 0, begun
            while now - begun < seconds and (n := self._from.recv_into(buffer)):
                received, now = received + n, time.perf_counter()
            after = ticks()
            while self._from.recv_into(buffer):
                pass
        except OSError as e:
            raise OSError(f"could not receive from rank {self._before}: {e}") from e
        # Ranks that do not begin at once may lose a little of the end, never most of it.
        if now - begun < seconds / 2:
            raise OSError(f"had no more from rank {self._before} after {now - begun:.2g} s of {seconds:g}")
        return received * 8e-9 / (now - begun), busy_share(before, after)
