"""Statistics of exchanges: bytes and seconds, per layer and in all.

Ranges for ``torch.profiler``, by the names of layers; nothing while nobody profiles.

The profiler sees what happens in the thread that began it and in autograd's, which is where DDP's hook runs. Lanes
(:mod:`commlib.exchange.sequencer`) are threads that were there before: it sees them only when it is asked for all
threads (docs/watching.md). So the flag of its module is asked for here, which is the same in every thread, and not
``torch._C._autograd._profiler_enabled()``, which is this thread's, and False throughout with ``profile_all_threads``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.autograd.profiler as profiler

from commlib.runtime.streams import Accelerator, accelerator

_NOTHING: contextlib.AbstractContextManager[object] = contextlib.nullcontext()


def ranged(what: str, about: str) -> contextlib.AbstractContextManager[object]:
    """``commlib::compress fc1.weight``, from entering to leaving, in one thread.

    Args:
        what: is done.
        about: the layer or bucket it is done to. Of which step is left out, so that steps add up.
    """
    if not profiler._is_profiler_enabled:
        return _NOTHING
    return profiler.record_function(f"commlib::{what} {about.partition(' of step ')[0]}")


def within(
    inner: contextlib.AbstractContextManager[None], what: str, about: str
) -> contextlib.AbstractContextManager[None]:
    """``inner``, and around it such a range, if somebody profiles."""
    return _around(inner, ranged(what, about)) if profiler._is_profiler_enabled else inner


@contextlib.contextmanager
def _around(
    inner: contextlib.AbstractContextManager[None], outer: contextlib.AbstractContextManager[object]
) -> Iterator[None]:
    with outer, inner:
        yield


PHASES = ("compress", "wire", "decompress")
SAMPLED = 8
"""Calls of a phase on CUDA of which one is timed."""


@dataclasses.dataclass
class LayerStats:
    """Totals of one layer since ``attach``; bytes are those this rank sent, ``dense_bytes`` what plain DDP would
    have."""

    route: str
    numel: int
    wire_bytes: int
    dense_bytes: int
    seconds: dict[str, float]


@dataclasses.dataclass(frozen=True)
class HeldBytes:
    """Bytes of memory that a rank holds between two steps for its routes, by kind.

    Args:
        residuals: what was not sent yet, in both buffers: of the last step that counted and of the one under way.
        state: what else codecs remember, as a momentum or a basis; likewise.
        buffers: what exchanges are made in. It is used again in the next step.
    """

    residuals: int = 0
    state: int = 0
    buffers: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return self.residuals + self.state + self.buffers


@dataclasses.dataclass
class Stats:
    """Totals of this rank since ``attach``, but for ``steps``.

    Args:
        steps: steps that count, those before a loaded checkpoint included.
        skipped: steps that came out non-finite (or were discarded) and left no trace; their bytes count.
        wire_bytes: payload bytes this rank sent, by the ring or pairwise algorithm
            (:mod:`commlib.exchange.collectives`).
        dense_bytes: what a ring all-reduce of the same gradients would have sent.
        seconds: by phase. ``wire`` runs from issue to completion, so it includes waiting for slower
            ranks and for the link, and the wires of several buckets may overlap in time.
        layers: by parameter name.
        inter_bytes: those of ``wire_bytes`` that went to other nodes; None without a hierarchy, for nobody knows. Rows
            are not counted there: they go flat, and which of them leave a node is for the transport to say.
        memory: what is held now; None where that is not counted.
    """

    steps: int
    skipped: int
    wire_bytes: int
    dense_bytes: int
    seconds: dict[str, float]
    layers: dict[str, LayerStats]
    inter_bytes: int | None = None
    memory: HeldBytes | None = None

    @property
    def ratio(self) -> float:
        """How many times fewer bytes than dense; infinite if nothing was sent."""
        return self.dense_bytes / self.wire_bytes if self.wire_bytes else float("inf")

    @classmethod
    def of(
        cls,
        steps: int,
        skipped: int,
        wire_bytes: float,
        routes: Mapping[str, tuple[str, int]],
        meters: Mapping[str, Meter],
        inter_bytes: float | None = None,
        memory: HeldBytes | None = None,
    ) -> Stats:
        """Make totals from what was counted.

        Args:
            steps: that count.
            skipped: that do not.
            wire_bytes: sent.
            routes: layer → its route and number of values.
            meters: by the same names.
            inter_bytes: sent to other nodes, if that is known.
            memory: held, if that is known.
        """
        layers = {}
        for name, (route, numel) in routes.items():
            meter = meters[name]
            layers[name] = LayerStats(route, numel, round(meter.sent()), round(meter.dense()), meter.seconds())
        seconds = {phase: sum(layer.seconds[phase] for layer in layers.values()) for phase in PHASES}
        dense = round(sum(m.dense() for m in meters.values()))
        inter = None if inter_bytes is None else round(inter_bytes)
        return cls(steps, skipped, round(wire_bytes), dense, seconds, layers, inter, memory)


class _Elapsed(contextlib.AbstractContextManager[None]):
    """Time spent inside, added to a phase. (A generator would take as long as a small layer's codec.)"""

    __slots__ = ("_name", "_seconds", "_start")

    def __init__(self, seconds: dict[str, float], name: str) -> None:
        self._seconds, self._name = seconds, name

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        self._seconds[self._name] += time.perf_counter() - self._start


class Meter:
    """Counts for one layer, or for a bucket of which layers have shares.

    On CUDA the phases are timed by events, read only when asked for. Two events take the host as long as a codec's
    kernels, so the first of a phase is timed and then one in :data:`SAMPLED`, which stands for those before it.

    Args:
        device: where it is exchanged.
        label: whose it is, for a profiler.
    """

    def __init__(self, device: torch.device, label: str = "") -> None:
        self.label = label
        self._sent = self._dense = 0.0
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._shares: list[tuple[Meter, float]] = []
        self.device = device
        self._by = accelerator(device)
        self._calls = dict.fromkeys(PHASES, 0)
        self._events: list[tuple[str, int, Any, Any]] = []

    @classmethod
    def of_all(cls, device: torch.device, parts: Sequence[tuple[Meter, int]]) -> Meter:
        """Make a meter for many layers, in which each has a share by its number of values."""
        labels = dict.fromkeys((parts[0][0].label, parts[-1][0].label)) if parts else ()
        whole, values = cls(device, " … ".join(labels)), sum(n for _, n in parts) or 1
        for meter, n in parts:
            meter.has_share(whole, n / values)
        return whole

    def phase(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Adds the time spent inside to a phase, which a profiler sees."""
        return within(self.timed(name), name, self.label)

    def timed(self, name: str) -> contextlib.AbstractContextManager[None]:
        """The same, unseen."""
        return _Elapsed(self._seconds, name) if self._by is None else self._sampled(self._by, name)

    @contextlib.contextmanager
    def _sampled(self, by: Accelerator, name: str) -> Iterator[None]:
        self._calls[name] += 1
        stands_for = 1 if self._calls[name] == 1 else SAMPLED
        if self._calls[name] % SAMPLED != 1:
            yield
            return
        begin, end = by.event(timing=True), by.event(timing=True)
        begin.record()
        yield
        end.record()
        self._events.append((name, stands_for, begin, end))
        if len(self._events) > 64:  # a long run must not pile them up; old ones are done
            self._drain(wait=False)

    def would_send(self, nbytes: float, world: int) -> None:
        """Counts what plain DDP would send of a gradient of so many bytes: a ring all-reduce among ``world`` ranks."""
        self._dense += 2 * (world - 1) / world * nbytes

    def would_gather(self, nbytes: int, world: int) -> None:
        """The same of a sparse gradient: an all-gather of so many bytes among ``world`` ranks."""
        self._dense += (world - 1) * nbytes

    def add_sent(self, nbytes: float) -> None:
        """Counts bytes that this rank sends."""
        self._sent += nbytes

    def add_wire(self, seconds: float) -> None:
        """Adds time spent on the wire."""
        self._seconds["wire"] += seconds

    def has_share(self, whole: Meter, share: float) -> None:
        """This one counts such a part (of 1) of whatever another counts, too: one count for many layers."""
        self._shares.append((whole, share))

    def sent(self) -> float:
        """Bytes that this rank has sent."""
        return self._sent + sum(share * whole.sent() for whole, share in self._shares)

    def dense(self) -> float:
        """Bytes that plain DDP would have sent."""
        return self._dense + sum(share * whole.dense() for whole, share in self._shares)

    def seconds(self) -> dict[str, float]:
        """Seconds by phase; on CUDA an estimate, and it waits for the work that was timed."""
        self._drain(wait=True)
        shares = [(whole.seconds(), share) for whole, share in self._shares]
        return {phase: own + sum(share * of[phase] for of, share in shares) for phase, own in self._seconds.items()}

    def _drain(self, *, wait: bool) -> None:
        while self._events and (wait or self._events[0][3].query()):
            name, stands_for, begin, end = self._events.pop(0)
            end.synchronize()
            self._seconds[name] += stands_for * begin.elapsed_time(end) / 1e3
