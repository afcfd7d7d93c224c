"""Result of a run: accuracy, time, and the bytes it really sent."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import nn

BIG_LAYER = 65_536  # values from which a layer counts for the second ratio


@dataclasses.dataclass(frozen=True)
class RunTraffic:
    """Totals of one rank over a run; those of a resumed run's parts add up.

    Args:
        wire, dense: bytes sent, and bytes plain DDP would have sent.
        big_wire, big_dense: the same over layers of at least ``BIG_LAYER`` values.
        steps: steps they were counted over.
        skipped: steps in which a gradient was not finite.
    """

    wire: int = 0
    dense: int = 0
    big_wire: int = 0
    big_dense: int = 0
    steps: int = 0
    skipped: int = 0

    @classmethod
    def of(cls, stats: Any, model: nn.Module, steps: int) -> RunTraffic:
        """Read totals from what ``comm.stats()`` says of a model's layers after so many steps."""
        sizes = {name: p.numel() for name, p in model.named_parameters()}
        big = [layer for name, layer in stats.layers.items() if sizes[name] >= BIG_LAYER]
        return cls(
            wire=stats.wire_bytes,
            dense=stats.dense_bytes,
            big_wire=sum(b.wire_bytes for b in big),
            big_dense=sum(b.dense_bytes for b in big),
            steps=steps,
            skipped=stats.skipped,
        )

    def __add__(self, other: RunTraffic) -> RunTraffic:
        return RunTraffic(*(a + b for a, b in zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)))

    def __sub__(self, other: RunTraffic) -> RunTraffic:
        return RunTraffic(*(a - b for a, b in zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)))

    def per_step(self) -> dict[str, Any]:
        """The fields of :class:`Result` that follow from it."""
        steps = max(1, self.steps)
        return {
            "wire_bytes_per_step": self.wire / steps,
            "dense_bytes_per_step": self.dense / steps,
            "ratio": self.dense / self.wire if self.wire else 1.0,
            "big_ratio": self.big_dense / self.big_wire if self.big_wire else None,
            "skipped": self.skipped,
        }


@dataclasses.dataclass(frozen=True)
class Result:
    """Result of one run, as rank 0 reports it.

    Args:
        comm, seed: which run.
        steps: optimizer steps done.
        accuracy: on the test set, in percent.
        loss: on the test set, mean cross-entropy in nats.
        ms_per_step: median wall time of rank 0's steps; None if this process did none.
        wire_bytes_per_step: measured bytes this rank sent per step.
        dense_bytes_per_step: what plain DDP would have sent.
        ratio: dense / wire.
        big_ratio: the same over layers of at least ``BIG_LAYER`` values; None if there are none.
        skipped: steps in which a gradient was not finite.
        replicas_equal: all ranks ended with the same bits (a run that did not raises instead).
        weights: SHA-256 of the final weights.
        levels: what became of a hierarchy; None if none was asked for.
        seconds: wall time of all steps of rank 0 in this process, until its last was exchanged.
        curve: (seconds, steps, loss on the test set, bytes sent) on the way, if it was asked for.
        note: what else there is to say, in words.
    """

    comm: str
    seed: int
    steps: int
    accuracy: float
    loss: float
    ms_per_step: float | None
    wire_bytes_per_step: float
    dense_bytes_per_step: float
    ratio: float
    big_ratio: float | None
    skipped: int
    replicas_equal: bool
    weights: str
    levels: str | None = None
    seconds: float = 0.0
    curve: list[tuple[float, int, float, int]] = dataclasses.field(default_factory=list)
    note: str | None = None
