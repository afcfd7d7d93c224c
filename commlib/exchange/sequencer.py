"""Issues every round of every bucket in the same order on every rank.

The trap: a second round launched when the first one *completes* is launched in an order that differs from
rank to rank, and collectives that do not match hang or corrupt. So:

* Round 0 is issued by the thread that runs the hook. DDP calls hooks in bucket order, alike on all ranks.
* Round i ≥ 1 is issued by lane i: one thread, one first-in-first-out queue, one process group of its own. Lane 1
  receives buckets in the order in which round 0 was issued, lane 2 in the order in which lane 1 issued, and so on:
  by induction every process group sees the same sequence everywhere, whatever completes first.
* A lane blocks on nothing but the works of the round before, which are already issued on this rank and, on
  each other rank, are issued by a thread that waits for this rank only in *earlier* rounds. So there is no cycle.

Nothing waits in a callback, and the autograd thread waits for nothing.

Where waiting is not blocking (NCCL: ``wait`` makes the current stream wait), no lanes are needed: the hook's
thread enqueues all rounds of a bucket on a side stream at once, on one communicator, in bucket order.
"""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from commlib.collective import Collective, Rounds


@dataclasses.dataclass
class _Trip:
    """One bucket under way."""

    label: str
    rounds: Rounds
    result: Tensor
    future: torch.futures.Future[Tensor]
    works: list[tuple[Any, Collective, float]] = dataclasses.field(default_factory=list)


class Sequencer:
    """Drives exchanges to their end.

    Args:
        groups: one process group a round; with one group only, all rounds are issued inline (NCCL).
        world: number of ranks.
        lost: turns a failed collective into the error to raise, given (what, the backend's error).
    """

    def __init__(
        self, groups: Sequence[Any], world: int, lost: Callable[[str, BaseException], BaseException], *, inline: bool
    ) -> None:
        self._groups = list(groups)
        self._world = world
        self._lost = lost
        self._inline = inline
        self._queues: list[queue.SimpleQueue[_Trip | None]] = []
        self._threads: list[threading.Thread] = []
        self._streams: dict[torch.device, Any] = {}
        self._failed: BaseException | None = None
        self._failing = threading.Lock()
        self._sent = [0.0] * len(self._groups)  # bytes by lane: each is written by one thread only

    def submit(self, label: str, rounds: Rounds, result: Tensor) -> torch.futures.Future[Tensor]:
        """Starts an exchange; returns at once (on a blocking backend) with a future of ``result``.

        Must be called in the same order on every rank. An error, on this rank or met while waiting for the
        others, is the future's.
        """
        cuda = result.device.type == "cuda"
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=[result.device] if cuda else [])
        trip = _Trip(label, rounds, result, future)
        if cuda:
            stream = self._stream(result.device)
            stream.wait_stream(torch.cuda.current_stream(result.device))
            result.record_stream(stream)
        if not self._inline and not self._threads:
            self._start()
        with self._on_stream(result.device):
            self._advance(trip, 0)
            while self._inline and trip.works:
                self._finish_round(trip)
                self._advance(trip, 0)
        if trip.works:
            self._queues[0].put(trip)
        return future

    def close(self, *, wait: bool = True) -> None:
        """Ends the lanes once their buckets are through; with ``wait``, stays until they have ended, at most 5 s."""
        for q in self._queues[:1]:  # a lane passes the end on, behind the buckets it has passed on
            q.put(None)
        for t in self._threads if wait else ():
            t.join(timeout=5.0)  # one that waits for a lost rank ends at the group's own deadline
        self._queues, self._threads = [], []

    @property
    def wire_bytes(self) -> float:
        """Bytes this rank has sent."""
        return sum(self._sent)

    # -- lanes ----------------------------------------------------------------------------------

    def _start(self) -> None:
        self._queues = [queue.SimpleQueue() for _ in self._groups]
        self._threads = [
            threading.Thread(target=self._lane, args=(i, self._queues), name=f"commlib-lane-{i}", daemon=True)
            for i in range(1, len(self._queues) + 1)
        ]
        for t in self._threads:
            t.start()

    def _lane(self, lane: int, queues: Sequence[queue.SimpleQueue[_Trip | None]]) -> None:
        while (trip := queues[lane - 1].get()) is not None:
            with self._on_stream(trip.result.device):
                self._finish_round(trip)
                self._advance(trip, lane)
            if trip.works:
                queues[lane].put(trip)
            del trip  # or it would keep the bucket until the next one comes
        for q in queues[lane : lane + 1]:
            q.put(None)

    def _finish_round(self, trip: _Trip) -> None:
        """Waits for the works of the last round; a failure becomes the trip's."""
        works, trip.works = trip.works, []
        for work, collective, start in works:
            try:
                work.wait()
            except Exception as e:
                self._fail(trip, e)
                return
            seconds = time.perf_counter() - start
            total = sum(n for _, n in collective.payers) or 1
            for meter, n in collective.payers:
                meter.add_wire(seconds * n / total)

    def _advance(self, trip: _Trip, lane: int) -> None:
        """Computes up to the trip's next round and issues it, or ends the trip."""
        if trip.future.done():  # it failed
            return
        if self._failed is not None:
            _set_error(trip, self._failed)
            return
        try:
            batch = next(trip.rounds)
        except StopIteration:
            trip.future.set_result(trip.result)
            return
        except Exception as e:
            self._failed = e
            _set_error(trip, e)
            return
        group = self._groups[0 if self._inline else lane]
        try:
            trip.works = [(c.issue(group), c, time.perf_counter()) for c in batch]
        except Exception as e:
            self._fail(trip, e)
            return
        for c in batch:
            self._count(c, lane)

    def _count(self, c: Collective, lane: int) -> None:
        sent = c.wire_bytes(self._world)
        self._sent[lane] += sent
        total = sum(n for _, n in c.payers) or 1
        for meter, n in c.payers:
            meter.wire += sent * n / total

    def _fail(self, trip: _Trip, error: BaseException) -> None:
        """After one failure the ranks are out of step for good: every later bucket fails with the same error."""
        with self._failing:  # hook and lanes may fail at once: one roll call is enough
            if self._failed is None:
                self._failed = self._lost(trip.label, error)
        _set_error(trip, self._failed)

    # -- streams --------------------------------------------------------------------------------

    def _stream(self, device: torch.device) -> Any:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return self._streams[device]

    @contextlib.contextmanager
    def _on_stream(self, device: torch.device) -> Iterator[None]:
        """One side stream for all of a device's exchanges, in hook and lanes alike; nothing on the CPU."""
        stream = torch.cuda.stream(self._stream(device)) if device.type == "cuda" else contextlib.nullcontext()
        with stream, torch.no_grad():
            yield


def _set_error(trip: _Trip, error: BaseException) -> None:
    trip.future.set_exception(error)  # type: ignore[arg-type]  # its stub asks for a result
