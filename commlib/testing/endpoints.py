"""The contract of a transport's endpoints as tests that anyone can run on theirs; part of :mod:`commlib.testing`.

``check_endpoint(make)`` raises AssertionError, saying which promise was broken, unless (each has its own function):

=======================  ==========================================================================
``check_frames``         every field and part comes as it was sent, empty ones and large ones too
``check_order``          of each peer in the order sent, whichever threads send and receive
``check_buffers``        what is written to a part once it may be changes nothing that was sent
``check_back_pressure``  a peer that takes nothing is named at the deadline; then nothing is missing
``check_deadline``       a peer that says nothing is named at the deadline
``check_close``          what was sent comes before goodbye; a closed endpoint says that it is
``check_abort``          the peer is told why
``check_stranger``       one of another job, or that pretends to be a peer, is refused and disturbs nobody
=======================  ==========================================================================

``make(rank, **options)`` gives a new endpoint with the options of :class:`~commlib.messaging.endpoint.Endpoint`;
``join(a, b)`` connects a to b, if more than an address is needed for that.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from commlib.errors import CommlibError, PeerLost
from commlib.messaging.endpoint import Endpoint

Make = Callable[..., Endpoint]
Join = Callable[[Endpoint, Endpoint], None]
_SOON_S, _LATE_S = 0.3, 60.0  # a deadline that is to pass; one that is not


def join(a: Endpoint, b: Endpoint) -> None:
    """Connects an endpoint to another by its address."""
    a.connect(b.rank, b.address)


def check_endpoint(make: Make, join: Join = join) -> None:
    """Check every promise.

    Raises:
        AssertionError: one is broken.
    """
    check_frames(make, join)
    check_order(make, join)
    check_buffers(make, join)
    check_back_pressure(make, join)
    check_deadline(make, join)
    check_close(make, join)
    check_abort(make, join)
    check_stranger(make, join)


def check_frames(make: Make, join: Join = join) -> None:
    """Every field and part comes as it was sent."""
    fields: dict[str, Any] = {"clock": 9, "keys": ("a", "fc.weight"), "codec": "onebit", "flags": 5, "note": "héllo"}
    with _two(make, join) as (a, b):
        for sizes in ((), (0,), (1,), (0, 7, 0), (1 << 20, 3), ((8 << 20) + 1,)):
            parts = tuple(bytes(range(256)) * (n // 256) + bytes(range(n % 256)) for n in sizes)
            a.send(1, parts=parts, **fields)
            came = b.recv(0)
            for name, sent in fields.items():
                _require(getattr(came, name) == sent, f"{name} {sent!r} came as {getattr(came, name)!r}")
            _require(tuple(map(bytes, came.parts)) == parts, f"parts of {sizes} bytes came otherwise")
        a.send(1, dtype="float32", shape=(2, 3), parts=(bytes(24),))
        came = b.recv()
        _require((came.sender, came.dtype, came.shape) == (0, "float32", (2, 3)), "sender, dtype or shape is another")


def check_order(make: Make, join: Join = join, *, threads: int = 4, frames: int = 200) -> None:
    """Several threads send, several receive, both ways: each frame comes once, and those of a thread in their order."""
    with _two(make, join) as ends, ThreadPoolExecutor(4 * threads) as pool:

        def send(end: Endpoint, thread: int) -> None:
            for i in range(frames):
                end.send(1 - end.rank, clock=i, flags=thread, parts=(bytes(i % 7),))

        def receive(end: Endpoint) -> list[tuple[int, int]]:
            came = [end.recv(1 - end.rank) for _ in range(frames)]
            return [(f.flags, f.clock) for f in came]

        sending = [pool.submit(send, end, t) for end in ends for t in range(threads)]
        receiving = {end.rank: [pool.submit(receive, end) for _ in range(threads)] for end in ends}
        for done in sending:
            done.result()
        for rank, each in receiving.items():
            came = [done.result() for done in each]
            everything = sorted(pair for one in came for pair in one)
            _require(everything == [(t, i) for t in range(threads) for i in range(frames)], f"rank {rank} lacks frames")
            for one in came:
                for t in range(threads):
                    clocks = [clock for flags, clock in one if flags == t]
                    _require(clocks == sorted(clocks), f"rank {rank} got a thread's frames in another order")


def check_buffers(make: Make, join: Join = join) -> None:
    """A part may be written to as soon as ``Sent.wait`` says so."""
    with _two(make, join) as (a, b):
        for n in (100, 3 << 20):
            part = bytearray(b"\x01" * n)
            sent = a.send(1, parts=(part,))
            came = b.recv(0) if n > 100 else None
            _require(sent.wait(_LATE_S), f"a part of {n} bytes that came is never free")
            part[:] = bytes(n)
            came = came or b.recv(0)
            _require(bytes(came.parts[0]) == b"\x01" * n, f"a part of {n} bytes changed after it was free")


def check_back_pressure(make: Make, join: Join = join) -> None:
    """A peer that takes nothing stops the sender, who names it; once it takes, all comes in order."""
    with _two(make, join, window=1 << 20) as (a, b):
        sent = 0
        try:
            while sent < 1000:
                a.send(1, clock=sent, parts=(bytes(100_000),), timeout=_SOON_S)
                sent += 1
        except PeerLost as e:
            _require("rank 1" in str(e), f"who takes nothing is not named: {e}")
        _require(0 < sent < 100, f"{sent} frames of 100 kB are on their way, where 1 MiB may be")
        _require(a.offer(1, parts=(bytes(100_000),)) is None, "a frame goes to a peer that has no room")
        full = {1: 100_000}
        _require("rank 1" in _lost(lambda: a.await_room(full, timeout=_SOON_S)), "who makes no room is not named")
        b.send(0, clock=5)
        came = a.await_room(full, or_of=1, timeout=_LATE_S)
        _require(came is not None and came.clock == 5, "a frame does not end a wait for room")
        with ThreadPoolExecutor(1) as pool:
            rest = pool.submit(lambda: [a.send(1, clock=sent + i, parts=(bytes(100_000),)) for i in range(50)])
            clocks = [b.recv(0).clock for _ in range(sent + 50)]
            rest.result()
        _require(clocks == list(range(sent + 50)), "frames are missing, or came in another order")
        _require(a.await_room(full, timeout=_LATE_S) is None, "room that there is is not told of")
        a.send(1, parts=(bytes(4 << 20),), timeout=_LATE_S)
        _require(b.recv(0).nbytes == 4 << 20, "a frame larger than the window did not come")


def check_deadline(make: Make, join: Join = join) -> None:
    """Check that a silent peer is named, in time, and that another thread's wait goes on."""
    with _two(make, join) as (a, b), ThreadPoolExecutor(1) as pool:
        patient = pool.submit(a.recv, 1)
        began = time.monotonic()
        message = _lost(lambda: a.recv(1, timeout=_SOON_S))
        took = time.monotonic() - began
        _require(took >= _SOON_S, f"a deadline of {_SOON_S} s took {took:.2f} s")
        _require(not patient.done(), f"a deadline of {_SOON_S} s took as long as that of another thread, {_LATE_S} s")
        _require("rank 1" in message, f"who says nothing is not named: {message}")
        b.send(0, clock=7)
        _require(patient.result(_LATE_S).clock == 7, "the thread that waited longer got nothing")
        _require("any rank" in _lost(lambda: a.recv(timeout=0.01)), "a wait for any rank does not say so")


def check_close(make: Make, join: Join = join) -> None:
    """Closing: all that was sent comes, then goodbye; who waits at a closed endpoint is told; twice is fine."""
    with _two(make, join) as (a, b), ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(_said, lambda: a.recv(1))
        for i in range(20):
            a.send(1, clock=i, parts=(bytes(1 << 16),))
        a.close()
        a.close()
        _require("closed" in waiting.result(_LATE_S), "a thread that waits at a closed endpoint is not told that it is")
        _require([b.recv(0).clock for _ in range(20)] == list(range(20)), "what was sent before goodbye is missing")
        _require("goodbye" in _lost(lambda: b.recv(0)), "goodbye is not told to who waits for more")
        _require("goodbye" in _lost(lambda: b.send(0)), "goodbye is not told to who sends")
        for use in (lambda: a.send(1), lambda: a.recv(1), lambda: a.connect(2, b.address)):
            _require("closed" in _said(use), "a closed endpoint does not say that it is")


def check_abort(make: Make, join: Join = join) -> None:
    """The peer is told why; leaving a ``with`` by an error aborts."""
    with _two(make, join) as (a, b):
        a.abort("no space left")
        _require("no space left" in _lost(lambda: b.recv(0)), "the reason of an abort does not come")
    with _two(make, join) as (a, b):
        with contextlib.suppress(ZeroDivisionError), a:
            raise ZeroDivisionError("by zero")
        _require("by zero" in _lost(lambda: b.recv(0)), "the error that ended a with does not come")


def check_stranger(make: Make, join: Join = join) -> None:
    """Check that a peer of another job, or with a rank that is taken, is refused, and that the others go on."""
    with _two(make, join, job="ours") as (a, b):
        a.send(1, clock=1)
        _require(b.recv(0).clock == 1, "the first frame did not come")
        for rank, job in ((5, "theirs"), (0, "ours")):
            before = b.refused
            with contextlib.closing(make(rank, job=job, timeout=_LATE_S)) as stranger:
                join(stranger, b)
                stranger.send(1, clock=99)
                end = time.monotonic() + _LATE_S
                while b.refused == before and time.monotonic() < end:
                    _require("nothing came" in _lost(lambda: b.recv(0, timeout=0.05)), "a stranger disturbs a peer")
            _require(b.refused > before, f"rank {rank} of job {job!r} was not refused")
        a.send(1, clock=2)
        _require(b.recv(0).clock == 2, "after a stranger the peer's frames do not come")


@contextlib.contextmanager
def _two(make: Make, join: Join, **options: Any) -> Iterator[tuple[Endpoint, Endpoint]]:
    with contextlib.ExitStack() as stack:
        a, b = (make(rank, timeout=_LATE_S, **options) for rank in range(2))
        for end in (a, b):
            stack.callback(end.close)
        join(a, b)
        join(b, a)
        yield a, b


def _lost(call: Callable[[], object]) -> str:
    return _said(call, PeerLost)


def _said(call: Callable[[], object], kind: type[CommlibError] = CommlibError) -> str:
    """The message of the error that a call must raise."""
    try:
        call()
    except kind as e:
        return str(e)
    raise AssertionError(f"no {kind.__name__} was raised")


def _require(held: bool, broken: str) -> None:
    if not held:
        raise AssertionError(broken)
