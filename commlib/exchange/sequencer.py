"""Issues every round of every bucket in the same order on every rank.

The trap: a second round launched when the first one *completes* is launched in an order that differs from
rank to rank, and collectives that do not match hang or corrupt. So:

* Round 0 is issued by the thread that runs the hook. DDP calls hooks in bucket order, alike on all ranks.
* Round i ≥ 1 is issued by lane i: one thread, one first-in-first-out queue, one process group of its own. Lane 1
  receives buckets in the order in which round 0 was issued, lane 2 in the order in which lane 1 issued, and so on:
  by induction every process group sees the same sequence everywhere, whatever completes first.
* A lane blocks on nothing but the works of the round before, which are already issued on this rank and, on
  each other rank, are issued by a thread that waits for this rank only in *earlier* rounds. So there is no cycle.

Nothing waits in a callback, and the autograd thread waits for nothing but what DDP has issued by itself
(:meth:`Sequencer.join`), all of it, before that pass ends. A bucket that is one collective, with nothing to compute
after it, ends in the backend's own callback, without a lane: whoever waits for it is woken by one thread, not by one
that had to be woken first. Its one round was issued like any other, so nothing changes in what groups see.
Times go to the meters of its own layers, and a layer is in one bucket under way at a time: no other thread writes them
then. On CUDA it goes by a lane, whose ``wait`` makes streams wait for what Gloo copies back; a callback would not.

With a hierarchy a round's collectives are of other ranks (``Scope``), and a lane has one process group for each scope
it may meet: a node's ranks, counterparts, and all ranks for what goes flat beside them. Both arguments still hold:

* A process group belongs to one lane of each of its ranks, and to the same one: lanes and groups are made alike. Which
  buckets ask for which scope in round i follows from the routes, which all ranks share. So each group still sees one
  sequence, that of the buckets, less those that do not need it: the same on all its ranks.
* Groups overlap, so a rank waits for others that wait for third ones. But for bucket b's round i to be issued, on
  whatever rank, only its round i − 1 must complete and the lane be past bucket b − 1; and it completes once the ranks
  of its groups have issued it, and what these groups had before. Every such step goes to a smaller i, or to a smaller
  b with the same i. So a chain of waits has an end and is no cycle, whichever ranks are in which group.
* One round may ask for several scopes: its collectives are issued in one go, in an order alike on all ranks, before any
  of them is waited for. Rows that have left already (``First``) were issued by the thread of the backward pass, on a
  group of their own and in an order of their own, and wait for nothing (:mod:`commlib.exchange.factors.layers`). Over
  NCCL they are between the buckets, on the same communicator (:mod:`commlib.exchange.factors.order`).

What goes by servers has no order to keep: a push waits for nobody, and its sum for other ranks' pushes of the same
layer only, which they make in round 0, too (:mod:`commlib.server.worker.push_pull`).

Where waiting is not blocking (NCCL: ``wait`` makes the current stream wait), no lanes are needed: the hook's
thread enqueues all rounds of a bucket on a side stream at once, on one communicator a scope, in bucket order. With one
scope there are two such streams, which buckets take in turn: so one is coded while the one before travels, and no more
than two have memory at work. The communicator has a stream and an order of its own. With several scopes one stream
keeps their communicators from being in flight at once: each collective comes behind the one before, whoever's it is.

The process groups that rounds go over, and how many bytes have gone over each.
"""

from __future__ import annotations

import contextlib
import functools
import queue
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from commlib.exchange.collectives import Collective, Scope, scope_of
from commlib.exchange.in_flight import InFlightBucket, reason, through
from commlib.runtime import streams
from commlib.runtime.autograd import LOOK_S
from commlib.telemetry.stats import Meter, ranged
from commlib.telemetry.trace import NONE, Trace


class GroupTable:
    """Process groups for each round, by scope.

    Args:
        groups: to begin with.
    """

    def __init__(self, groups: Sequence[Mapping[Scope, Any]]) -> None:
        self._groups: list[dict[Scope, Any]] = []
        self._sent: list[dict[Scope, float]] = []  # bytes by round: each is written by one thread only
        self.extend(groups)

    def __len__(self) -> int:
        return len(self._groups)

    def extend(self, more: Sequence[Mapping[Scope, Any]]) -> None:
        """More of them, by round; alike on all ranks, while no bucket is under way."""
        for i, groups in enumerate(more):
            if i == len(self._groups):
                self._groups.append({})
                self._sent.append({})
            self._groups[i].update(groups)
            self._sent[i].update(dict.fromkeys(groups, 0.0))

    @property
    def scopes(self) -> list[Collection[Scope]]:
        """Scopes that there is a process group for, by round."""
        return [list(groups) for groups in self._groups]

    def first(self) -> dict[Scope, Any]:
        """A process group of each scope, for whoever issues alike on all ranks while no bucket is under way.

        The first there is. Every rank has issued all that its buckets asked of it before it finds none under way, so
        that comes first in the sequence of each group, on all of its ranks.
        """
        return {scope: group for groups in reversed(self._groups) for scope, group in groups.items()}

    def issue(self, collective: Collective, round_: int) -> Any:
        """Starts a collective of a round; returns the Work."""
        return collective.issue(self._groups[round_][scope_of(collective)])

    def count(self, collective: Collective, round_: int) -> None:
        """Count the bytes of a collective that has been issued."""
        scope = scope_of(collective)
        sent = collective.wire_bytes(self._groups[round_][scope].size())
        self._sent[round_][scope] += sent
        total = sum(n for _, n in collective.payers) or 1
        for meter, n in collective.payers:
            meter.add_sent(sent * n / total)

    @property
    def wire_bytes(self) -> float:
        """Bytes this rank has sent."""
        return sum(sum(sent.values()) for sent in self._sent)

    @property
    def inter_bytes(self) -> float | None:
        """Bytes sent to this rank's counterparts on other nodes; None if no round knows of nodes."""
        known = [sent["inter"] for sent in self._sent if "inter" in sent]
        return sum(known) if known else None


class Sequencer:
    """Drives exchanges to their end.

    Args:
        groups: for each round, scope → process group; inline there is one entry for all rounds.
        lost: turns a failed collective into the error to raise, given (what, the backend's error).
        inline: waiting does not block (NCCL).
        side: streams that buckets take in turn, inline.

    Attributes:
        inline: as given.
        tracks: the process groups, by lane.
    """

    def __init__(
        self,
        groups: Sequence[Mapping[Scope, Any]],
        lost: Callable[[str, BaseException], BaseException],
        *,
        inline: bool,
        side: int = 1,
    ) -> None:
        self.trace: Trace = NONE
        self.tracks = GroupTable(groups)
        self._lost = lost
        self.inline = inline
        self._queues: list[queue.SimpleQueue[InFlightBucket | None]] = []
        self._threads: list[threading.Thread] = []
        self._streams: dict[torch.device, list[Any]] = {}
        self._side, self._turn = side if inline else 1, 0
        self._failed: BaseException | None = None
        self._failing = threading.Lock()

    def submit(self, label: str, rounds: Iterator[list[Collective]], result: Tensor) -> torch.futures.Future[Tensor]:
        """Starts an exchange; returns at once (on a blocking backend) with a future of ``result``.

        Must be called in the same order on every rank. An error, on this rank or met while waiting for the
        others, is the future's.

        Args:
            label: of the bucket, for errors.
            rounds: the exchange.
            result: what it fills.
        """
        future: torch.futures.Future[Tensor] = streams.future(result.device)
        self._turn = (self._turn + 1) % self._side
        trip = InFlightBucket(label, rounds, result, future, trace=self.trace)
        if (by := streams.accelerator(result.device)) is not None:
            stream = self._stream(by, result.device)
            stream.wait_stream(by.current(result.device))
            by.keep(result._values() if result.is_sparse else result, stream)
        self._start()
        with self._on_stream(result.device):
            self._advance(trip, 0)
            while self.inline and trip.works:
                self._finish_round(trip)
                self._advance(trip, 0)
        if trip.works:
            self._queues[0].put(trip)
        return future

    def single(self, label: str, collective: Collective, result: Tensor) -> torch.futures.Future[Tensor]:
        """Like :meth:`submit`, of a bucket that is one collective of all ranks, with nothing to compute after it."""
        if self.inline or streams.accelerator(result.device) is not None or self._failed is not None:
            return self.submit(label, iter([[collective]]), result)
        trip = InFlightBucket(label, iter(()), result, trace=self.trace)
        self._issue(trip, [collective], 0)
        if trip.works:
            work = trip.works[0][0]
            if hasattr(work, "get_future"):
                work.get_future().add_done_callback(functools.partial(self._ended, trip))
            else:  # a valve's
                self._start()
                self._queues[0].put(trip)
        return trip.future

    def join(
        self, label: str, works: Sequence[Any], meter: Meter, meanwhile: Callable[[], None], every: float = LOOK_S
    ) -> torch.futures.Future[Tensor]:
        """Wait here, in C++, for works that somebody else has issued alike on all ranks. On the CPU.

        Args:
            label: of what they exchange, for errors.
            works: all-reduces of Gloo's; none where no thread waits (NCCL).
            meter: is told how long it took.
            meanwhile: called every so many seconds; what it raises, the exchange fails with.
            every: seconds.

        Returns:
            A future that is done.
        """
        trip = InFlightBucket(label, iter(()), torch.empty(0), trace=self.trace)
        if self._failed is not None:
            trip.fail(self._failed)
            return trip.future
        began = time.monotonic()
        try:
            with ranged("wire", label):
                for work in works:
                    while not through(work, every):
                        meanwhile()
        except Exception as e:
            self._fail(trip, e)
            return trip.future
        if works:
            meter.add_wire(time.monotonic() - began)
        trip.future.set_result(trip.result)
        return trip.future

    def give_up(self, error: BaseException) -> BaseException:
        """Nothing more is issued. Returns what every later bucket fails with: ``error``, or one that came before."""
        with self._failing:
            self._failed = self._failed or error
        return self._failed

    @property
    def failed(self) -> BaseException | None:
        """Why nothing is issued any more."""
        return self._failed

    def extend(self, more: Sequence[Mapping[Scope, Any]]) -> None:
        """More process groups, as :meth:`GroupTable.extend`."""
        if len(more) > len(self.tracks):
            self.close()  # as many threads as there will be lanes start with the next bucket
        self.tracks.extend(more)

    def close(self, *, wait: bool = True) -> None:
        """Ends the lanes once their buckets are through; with ``wait``, stays until they have ended, at most 5 s."""
        for q in self._queues[:1]:  # a lane passes the end on, behind the buckets it has passed on
            q.put(None)
        end = time.monotonic() + 5.0
        for t in self._threads if wait else ():
            t.join(max(0.0, end - time.monotonic()))  # one that waits for a lost rank ends at its group's deadline
        self._queues, self._threads = [], []

    # -- lanes ----------------------------------------------------------------------------------

    def _start(self) -> None:
        if self.inline or self._threads:
            return
        self._queues = [queue.SimpleQueue() for _ in range(len(self.tracks))]
        self._threads = [
            threading.Thread(target=self._lane, args=(i, self._queues), name=f"commlib-lane-{i}", daemon=True)
            for i in range(1, len(self._queues) + 1)
        ]
        for t in self._threads:
            t.start()

    def _lane(self, lane: int, queues: Sequence[queue.SimpleQueue[InFlightBucket | None]]) -> None:
        torch.get_num_threads()  # a thread takes PyTorch's setting over when it asks; products before it has other bits
        while (trip := queues[lane - 1].get()) is not None:
            with self._on_stream(trip.result.device):
                self._finish_round(trip)
                self._advance(trip, lane)
            if trip.works:
                queues[lane].put(trip)
            del trip  # or it would keep the bucket until the next one comes
        for q in queues[lane : lane + 1]:
            q.put(None)

    def _finish_round(self, trip: InFlightBucket) -> None:
        """Waits for the works of the last round; a failure becomes the trip's."""
        works, trip.works = trip.works, []
        for work, collective, start in works:
            try:
                with ranged("wire", trip.label):
                    work.wait()
            except Exception as e:
                self._fail(trip, e)
                return
            trip.came(collective, start)

    def _ended(self, trip: InFlightBucket, done: Any) -> None:
        """Complete a bucket, in the backend's thread: its only collective is through. (The work has not ended: no
        waiting for that.)"""
        try:
            done.value()
        except Exception as e:  # to ask who is lost takes time, which a callback has not; lanes may be closed
            threading.Thread(target=self._ended_badly, args=(trip, e), name="commlib-roll-call", daemon=True).start()
            return
        works, trip.works = trip.works, []
        trip.came(*works[0][1:])
        trip.end()

    def _ended_badly(self, trip: InFlightBucket, error: BaseException) -> None:
        self._fail(trip, reason(trip.works[0][0], error))

    def _advance(self, trip: InFlightBucket, lane: int) -> None:
        """Computes up to the trip's next round and issues it, or ends the trip."""
        if trip.future.done():  # it failed
            return
        if self._failed is not None:
            trip.fail(self._failed)
            return
        try:
            batch = trip.advance()
        except Exception as e:
            self._failed = e
            trip.fail(e)
            return
        if batch is None:
            trip.end()
            return
        self._issue(trip, batch, 0 if self.inline else lane)

    def _issue(self, trip: InFlightBucket, batch: Sequence[Collective], lane: int) -> None:
        """Starts a round's collectives."""
        try:
            trip.works = [(self.tracks.issue(c, lane), c, trip.trace.now()) for c in batch]
            trip.issued += 1
        except Exception as e:
            self._fail(trip, e)
            return
        for c in batch:
            self.tracks.count(c, lane)

    def _fail(self, trip: InFlightBucket, error: BaseException) -> None:
        """After one failure the ranks are out of step for good: every later bucket fails with the same error."""
        with self._failing:  # hook and lanes may fail at once: one roll call is enough
            if self._failed is None:
                self._failed = self._lost(trip.label, error)
        trip.fail(self._failed)

    # -- streams --------------------------------------------------------------------------------

    def _stream(self, by: streams.Accelerator, device: torch.device) -> Any:
        if device not in self._streams:
            self._streams[device] = [by.stream(device) for _ in range(self._side)]
        return self._streams[device][self._turn]

    @contextlib.contextmanager
    def _on_stream(self, device: torch.device) -> Iterator[None]:
        """The bucket's side stream, in hook and lanes alike; nothing on the CPU."""
        by = streams.accelerator(device)
        stream = contextlib.nullcontext() if by is None else by.use(self._stream(by, device))
        with stream, torch.no_grad():
            yield
