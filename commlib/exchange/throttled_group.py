"""Process groups behind valves: what they send together keeps a limit.

A :class:`ThrottledGroup` stands in for a process group. Its methods return at once; a thread of its own takes the
collectives first in, first out, cuts each into pieces, and for each piece waits for the pacer that all valves share,
issues it, and waits until it is through.

Why the order stays safe:

* A valve is a queue in front of one process group, and one thread fills it, in an order that is alike on all ranks
  (:mod:`commlib.exchange.sequencer`, :mod:`commlib.exchange.factors.layers`). Pieces are cut alike on all ranks. So the
  group sees the same sequence everywhere, as it would without the valve.
* The group must carry nothing else: DDP issues collectives of its own on the model's group (the map of used
  parameters), from the backward thread, which does not wait for the valve. So round 0, too, gets a group of its own.
* A valve's thread waits for its nap, which is finite whatever other ranks do (the pacer reserves; nobody holds it while
  he waits for a peer), and for the piece it has issued, which each other rank issues after *earlier* pieces of the same
  group only. So there is no cycle of waits, and each wait ends: at the process group's deadline, if a rank is gone.

Why the limit holds on the wire and not only when pieces are granted: a byte leaves between its piece's grant and its
end, and a valve has at most one piece under way. So in any window there leave what is granted within it, at most
``rate · window`` and one bucket, and what was under way when it began, at most one piece a valve. With v valves and
pieces and bucket of ``burst / (v + 1)``, that is ``rate · window + burst``.

A collective in pieces, so that no more than a limit's burst is under way at once.

All ranks must cut alike. So the number of pieces follows from what all of them know: the length of an all-reduced
tensor or of one rank's payload; in an all-to-all, the lengths of all stripes.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from commlib.errors import CommlibError
from commlib.exchange.buffers import rows
from commlib.exchange.rate_limit import RateLimit, TokenBucket


def _nothing() -> None: ...


@dataclasses.dataclass(frozen=True)
class CollectivePiece:
    """A part of a collective that leaves at once.

    Args:
        sent: payload bytes this rank sends.
        start: issues it; returns the Work.
        finish: once the work is done, brings what came where it belongs.
    """

    sent: float
    start: Callable[[], Any]
    finish: Callable[[], None] = _nothing


def all_reduce(group: Any, tensor: Tensor, most: float, *options: Any) -> Iterator[CollectivePiece]:
    """Slices of ``tensor`` (contiguous), each summed in place.

    An all-reduce adds in an order that depends on a value's place, so between three or more ranks a slice's sum may
    differ in its last bits from the whole's; never from rank to rank.

    Args:
        group: process group.
        tensor: any shape and dtype.
        most: bytes that a piece may send; what cannot be cut so small sends more.
        *options: of the process group's ``allreduce``.
    """
    world = group.size()
    share = 2 * (world - 1) / world
    flat = tensor.view(-1)
    for a, b in _cuts(len(flat), share * tensor.nbytes, most):
        part = flat[a:b]
        yield CollectivePiece(share * part.nbytes, functools.partial(group.allreduce, [part], *options))


def all_gather(group: Any, out: Tensor, tensor: Tensor, most: float) -> Iterator[CollectivePiece]:
    """Slices of every rank's ``tensor``, shape (n,), into ``out``, shape (P·n,).

    A slice of all ranks does not lie in one place of ``out``: it is copied there when it has come.
    """
    world = group.size()
    wholes = rows(out, world)
    cuts = _cuts(len(tensor), (world - 1) * tensor.nbytes, most)
    for a, b in cuts:
        part = tensor[a:b]
        got = out if len(cuts) == 1 else torch.empty(world * (b - a), dtype=out.dtype, device=out.device)
        start = functools.partial(group._allgather_base, got, part)
        places = [] if len(cuts) == 1 else [whole[a:b] for whole in wholes]
        yield CollectivePiece((world - 1) * part.nbytes, start, functools.partial(_place, rows(got, world), places))


def all_to_all(
    group: Any, out: Tensor, tensor: Tensor, out_splits: Sequence[int], splits: Sequence[int], most: float
) -> Iterator[CollectivePiece]:
    """The same share of every rank's part at a time. ``splits`` must be the same on every rank."""
    own = group.rank()
    outgoing, incoming = torch.split(tensor, list(splits)), torch.split(out, list(out_splits))
    count = _count(max(splits), (sum(splits) - min(splits)) * tensor.itemsize, most)
    for j in range(count):
        sends, places = ([_share(part, j, count) for part in parts] for parts in (outgoing, incoming))
        sizes, got_sizes = [len(s) for s in sends], [len(p) for p in places]
        send = tensor if count == 1 else torch.cat(sends)
        got = out if count == 1 else torch.empty(sum(got_sizes), dtype=out.dtype, device=out.device)
        start = functools.partial(group.alltoall_base, got, send, got_sizes, sizes)
        sent = (sum(sizes) - sizes[own]) * tensor.itemsize
        parts = [] if count == 1 else list(torch.split(got, got_sizes))
        yield CollectivePiece(sent, start, functools.partial(_place, parts, places if parts else []))


def _count(length: int, sent: float, most: float) -> int:
    """Pieces to cut something of this length into, of which the busiest rank sends so many bytes."""
    return max(1, min(length, math.ceil(sent / most)))


def _cuts(length: int, sent: float, most: float) -> list[tuple[int, int]]:
    count = _count(length, sent, most)
    return list(pairwise(length * j // count for j in range(count + 1)))


def _share(part: Tensor, j: int, count: int) -> Tensor:
    return part[len(part) * j // count : len(part) * (j + 1) // count]


def _place(parts: Sequence[Tensor], places: Sequence[Tensor]) -> None:
    for part, place in zip(parts, places, strict=False):  # no places: it has come where it belongs
        place.copy_(part)


class Throttle:
    """Keeps a limit over several process groups; without a limit it does nothing.

    Args:
        limit: or None.
        groups: how many process groups will be passed through.
    """

    def __init__(self, limit: RateLimit | None, groups: int) -> None:
        self.limit = limit
        self._valves: list[ThrottledGroup] = []
        self._lock = threading.Lock()
        if limit is not None:
            self.piece = limit.at_once / (groups + 1)
            self._pacer = TokenBucket(limit.bytes_s, self.piece)

    def through(self, group: Any) -> Any:
        """The process group behind a valve, if there is a limit: it must carry nothing else."""
        if self.limit is None:
            return group
        self._valves.append(ThrottledGroup(group, self))
        return self._valves[-1]

    def fit(self) -> None:
        """More groups have come than were thought of: pieces are smaller from now on. With nothing under way."""
        if self.limit is not None:
            self.piece = self._pacer.depth = min(self.piece, self.limit.at_once / (len(self._valves) + 1))

    def take(self, nbytes: float) -> float:
        """Seconds to wait before so many bytes may leave. By any thread; in the order in which they ask."""
        with self._lock:
            return self._pacer.take(time.monotonic(), nbytes)

    def close(self, *, wait: bool = True) -> None:
        """Ends the valves' threads; what has not left fails. With ``wait`` stays until they have ended, at most 5 s."""
        for valve in self._valves:
            valve.close()
        for valve in self._valves if wait else ():
            valve.join(timeout=5.0)


class ThrottledWork:
    """A collective under way, as far as anybody waits for it."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self._error: BaseException | None = None

    def wait(self) -> None:
        """Wait until it is through, raising what went wrong. The valve's thread ends it, by the group's deadline."""
        self._done.wait()
        if self._error is not None:
            raise self._error

    def end(self, error: BaseException | None) -> None:
        """Mark as through, or as failed for good."""
        self._error = error
        self._done.set()


class ThrottledGroup:
    """A process group of which no more leaves than the throttle allows. One thread may fill it at a time.

    It has those methods of a process group that exchanges and probes use; they return a :class:`ThrottledWork` at once.
    """

    def __init__(self, group: Any, throttle: Throttle) -> None:
        self._group, self._throttle = group, throttle
        self._thread: _Thread | None = None
        self._old: _Thread | None = None
        self._lock = threading.Lock()  # nothing is put behind the end of a queue, where it would wait for ever

    def size(self) -> int:
        """Number of ranks."""
        return int(self._group.size())

    def allreduce(self, tensors: Sequence[Tensor], *options: Any) -> ThrottledWork:
        """As the process group's, of one tensor."""
        (tensor,) = tensors
        return self._submit(all_reduce(self._group, tensor, self._throttle.piece, *options))

    def _allgather_base(self, out: Tensor, tensor: Tensor) -> ThrottledWork:
        """As the process group's."""
        return self._submit(all_gather(self._group, out, tensor, self._throttle.piece))

    def alltoall_base(
        self, out: Tensor, tensor: Tensor, out_splits: Sequence[int], splits: Sequence[int]
    ) -> ThrottledWork:
        """As the process group's."""
        most = self._throttle.piece
        return self._submit(all_to_all(self._group, out, tensor, out_splits, splits, most))

    def close(self) -> None:
        """Wakes its thread and ends it. (A further collective would start another.)"""
        with self._lock:
            thread, self._thread = self._thread, None
            if thread is not None:
                self._old = thread
                thread.stop.set()
                thread.jobs.put(None)

    def join(self, timeout: float) -> None:
        """Wait until the thread that was closed has ended, or so many seconds have passed."""
        if self._old is not None:
            self._old.join(timeout)

    def _submit(self, parts: Iterator[CollectivePiece]) -> ThrottledWork:
        work = ThrottledWork()
        with self._lock:
            if self._thread is None:
                self._thread = _Thread(self._throttle)
                self._thread.start()
            self._thread.jobs.put((parts, work))
        return work


class _Thread(threading.Thread):
    """Carries out one collective after another, piece by piece."""

    def __init__(self, throttle: Throttle) -> None:
        super().__init__(name="commlib-valve", daemon=True)
        self.jobs: queue.SimpleQueue[tuple[Iterator[CollectivePiece], ThrottledWork] | None] = queue.SimpleQueue()
        self.stop = threading.Event()
        self._throttle = throttle

    def run(self) -> None:
        failed: BaseException | None = None  # after one failure the ranks are out of step: nothing more is issued
        while (job := self.jobs.get()) is not None:
            parts, work = job
            if failed is None:
                try:
                    self._carry_out(parts)
                except BaseException as e:
                    failed = e
            work.end(failed)
            del job, parts, work  # or they would keep the tensors until the next one comes

    def _carry_out(self, parts: Iterator[CollectivePiece]) -> None:
        for piece in parts:
            if self.stop.wait(self._throttle.take(piece.sent)):
                raise CommlibError("the hook was closed before this could leave")
            piece.start().wait()
            piece.finish()
