"""The raw line between two ranks: one TCP connection, without any backend.

Whatever anything else reaches is a share of this. It needs nothing but sockets and a store.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import itertools
import json
import math
import select
import socket
import statistics
import struct
import time
from collections.abc import Callable, Sequence
from typing import Any

from commlib.errors import PeerLost, StoreSilent
from commlib.groups.handshake import named
from commlib.groups.world import World

_PINGS = 50
_PINGS_FIRST = 5  # not counted: ARP, and a connection that has just been made
_SETTLE_S = 0.15  # of the stream, not counted: slow start, and the token bucket of a lab or a cloud
_CHUNK = 64 << 10
_UNSENT = 64 << 10  # bytes the sender's kernel may hold: on a slow line more would take long to drain
_WINDOW_S = 0.02
_PATIENCE_S = 30.0  # for one socket call
_STORE_S = 120.0  # for a rank that comes late
_ENOUGH = b"e"
_RESULT = struct.Struct("!d")
Clock = Callable[[], float]  # seconds


@dataclasses.dataclass(frozen=True)
class Stream:
    """Figures of one TCP connection between two ranks.

    Attributes:
        gbit_s: payload, one way, from the lower rank to the higher.
        latency_s: half of a ping-pong of one byte.
    """

    gbit_s: float
    latency_s: float


def measure(
    store: Any, key: str, world: World, address: str, seconds: float = 0.3, clock: Clock = time.perf_counter
) -> Stream | None:
    """Measures the line from rank 0 to the first rank of another host (rank 1, if all are on one).

    Collective over the ranks of a store; every rank gets the same figures. Both ranks should do nothing else meanwhile.

    Args:
        store: of torch.distributed.
        key: what is said of this goes below it; nobody else's.
        world: this rank's.
        address: of this rank's machine, IPv4 or IPv6, at which the other can reach it.
        seconds: of the stream, apart from the part that is not counted.
        clock: by which it is measured.

    Returns:
        None if there is one rank.

    Raises:
        ValueError: ``seconds`` is not positive.
        PeerLost: the two ranks could not connect or one of them stopped answering; every rank raises it.
    """
    if not 0 < seconds < math.inf:
        raise ValueError(f"a stream lasts more than 0 seconds, got {seconds!r}")
    if world.size == 1:
        return None
    addresses = [f"{key}/address/{r}" for r in range(world.size)]
    store.set(addresses[world.rank], address)
    if world.rank == 0:
        outcome = _from(store, key, world.size, seconds, clock)
        store.set(f"{key}/outcome", json.dumps(outcome))
    elif world.rank == int(_ask(store, f"{key}/peer", 0, addresses)):
        _towards(store, key, world.rank, address, seconds, clock)
    outcome = json.loads(_ask(store, f"{key}/outcome", 0, addresses))
    if "error" in outcome:
        raise PeerLost(outcome["error"])
    return Stream(**outcome)


def choose_peer(addresses: Sequence[str]) -> int:
    """The first rank with another address than rank 0; 1 if there is none.

    >>> choose_peer(["10.0.0.1", "10.0.0.1", "10.0.0.2"])
    2
    """
    return next((r for r, a in enumerate(addresses) if a != addresses[0]), 1)


def _from(store: Any, key: str, size: int, seconds: float, clock: Clock) -> dict[str, Any]:
    """Rank 0's part: choose the peer, connect, send; the figures, or {"error": what happened}."""
    peer: int | None = None
    try:
        addresses = [_ask(store, f"{key}/address/{r}", r) for r in range(size)]
        peer = choose_peer(addresses)
        store.set(f"{key}/peer", str(peer))
        port = json.loads(_ask(store, f"{key}/port", peer))
        if isinstance(port, str):
            return {"error": port}
        with socket.create_connection((addresses[peer], port), _PATIENCE_S) as s:
            s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            latency = ping(s, clock)
            gbit_s = send_stream(s, seconds, clock)
    except PeerLost as e:
        if peer is None:
            store.set(f"{key}/peer", "0")  # nobody's: the others go straight to the outcome
        return {"error": str(e)}
    except OSError as e:
        return {"error": f"no TCP stream from rank 0 to rank {peer} ({addresses[peer or 0]}): {e}"}
    return dataclasses.asdict(Stream(gbit_s, latency))


def _towards(store: Any, key: str, rank: int, address: str, seconds: float, clock: Clock) -> None:
    """The peer's part: listen, answer, receive. A failure reaches rank 0 as a closed connection."""
    try:
        listener = socket.create_server((address, 0), family=_family(address))
    except OSError as e:
        store.set(f"{key}/port", json.dumps(f"rank {rank} cannot listen on {address}: {e}"))
        return
    with contextlib.suppress(OSError), listener:
        listener.settimeout(_PATIENCE_S)
        store.set(f"{key}/port", json.dumps(listener.getsockname()[1]))
        connection, _ = listener.accept()
        with connection:
            connection.settimeout(_PATIENCE_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            answer_pings(connection)
            receive_stream(connection, _SETTLE_S + seconds + _PATIENCE_S, clock)


def ping(s: socket.socket, clock: Clock = time.perf_counter) -> float:
    """Median seconds of half a ping-pong of one byte; the other end runs :func:`answer_pings`."""
    seconds = []
    for _ in range(_PINGS_FIRST + _PINGS):
        start = clock()
        s.sendall(b"p")
        _read(s, 1)
        seconds.append(clock() - start)
    return statistics.median(seconds[_PINGS_FIRST:]) / 2


def answer_pings(s: socket.socket) -> None:
    """The other end of :func:`ping`, which need not be who it should be: it ends in any case."""
    end = time.monotonic() + _PATIENCE_S
    for _ in range(_PINGS_FIRST + _PINGS):
        _check(end)
        _read(s, 1)
        s.sendall(b"p")


def send_stream(
    s: socket.socket, seconds: float, clock: Clock = time.perf_counter, within: float = _PATIENCE_S
) -> float:
    """Send for so long (and a little more, to get up to speed); Gbit/s as :func:`receive_stream` saw them.

    Goes on until the other end has seen enough to tell a rate: its process may have had to wait for a core meanwhile.

    Args:
        s: connected to the other end.
        seconds: of the stream.
        clock: by which it is measured.
        within: seconds besides, after which an end that takes everything and says nothing is given up.

    Raises:
        OSError: the connection broke, or the other end could tell no rate in time.
    """
    if hasattr(socket, "TCP_NOTSENT_LOWAT"):
        s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT)
    else:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * _UNSENT)
    chunk = memoryview(bytes(_CHUNK))
    end, enough = clock() + _SETTLE_S + seconds, False
    give_up = time.monotonic() + _SETTLE_S + seconds + within
    while clock() < end or not enough:
        if time.monotonic() > give_up:
            raise TimeoutError(f"the other end took bytes for {_SETTLE_S + seconds + within:g} s, and told no rate")
        s.send(chunk)
        enough = enough or (_readable(s) and _read(s, 1) == _ENOUGH)
    s.shutdown(socket.SHUT_WR)
    (rate,) = _RESULT.unpack(_read(s, _RESULT.size))
    if not 0 < rate < math.inf:
        raise OSError(f"the other end says that {rate!r} Gbit/s arrived")
    return float(rate)


def receive_stream(s: socket.socket, within: float = _PATIENCE_S, clock: Clock = time.perf_counter) -> float:
    """Read to the end of the stream, for so many seconds at most, and answer with its Gbit/s (:func:`typical_rate`).

    Says on the way when it has seen enough for that; the end comes after.
    """
    end = time.monotonic() + within
    buffer = memoryview(bytearray(1 << 20))
    settled = clock() + _SETTLE_S
    received = 0
    samples: list[tuple[float, int]] = []
    while n := s.recv_into(buffer):
        _check(end)
        received += n
        now = clock()
        if now >= settled and (not samples or now - samples[-1][0] >= _WINDOW_S):
            samples.append((now, received))
            if len(samples) == 2:
                s.sendall(_ENOUGH)
    rate = typical_rate(samples) * 8e-9
    s.sendall(_RESULT.pack(rate))
    return rate


def typical_rate(samples: Sequence[tuple[float, int]]) -> float:
    """Median bytes a second between neighbouring samples of (seconds, bytes so far); 0 for fewer than two.

    A median, because a process that has to wait for a core reads nothing for a while and then much at once.
    """
    rates = [(b - a) / (t - s) for (s, a), (t, b) in itertools.pairwise(samples)]
    return statistics.median(rates) if rates else 0.0


def _check(end: float) -> None:
    if time.monotonic() > end:
        raise TimeoutError("the other end goes on for too long")


def _readable(s: socket.socket) -> bool:
    poll = select.poll()
    poll.register(s, select.POLLIN)
    return bool(poll.poll(0))


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _read(s: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = s.recv(size - len(data))
        if not part:
            raise ConnectionError("the other end closed the connection")
        data += part
    return data


def _ask(store: Any, key: str, rank: int, addresses: Sequence[str] = ()) -> str:
    """Value that a rank has published, or will soon: once all have told their addresses, if these are given."""
    try:
        store.wait([key], datetime.timedelta(seconds=_STORE_S))
        return str(store.get(key).decode())
    except StoreSilent:
        raise
    except RuntimeError as e:  # the deadline
        missing = [rank]
        with contextlib.suppress(RuntimeError):
            missing = [r for r, at in enumerate(addresses) if not store.check([at])] or missing
        raise PeerLost(f"{named(missing)} said nothing for {_STORE_S:g} s while the line was measured") from e
