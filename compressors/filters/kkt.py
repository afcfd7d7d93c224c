"""``kkt``: of a model with an L1 penalty, weights that are 0 and will very likely stay so are not sent."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from commlib.codecs.filter import Content, Filter, Receiving, Sending
from commlib.compressors.filters.significance import Nothing


@dataclasses.dataclass(frozen=True)
class Kkt(Filter):
    """A weight's gradient is left out where the weight is 0 and this worker's gradient is within the penalty.

    At the smallest loss + λ·Σ|w| a weight is 0 where the loss's gradient is within λ (the Karush-Kuhn-Tucker
    conditions), and a proximal step leaves a weight that is 0 where it is as long as that holds: such a gradient need
    not be sent. A worker knows its own gradient alone, and takes that as its estimate of what all will have together:
    so this is lossy, and what is left out is lost, not kept for later (a residual would grow for ever: at the optimum
    these gradients are no zeros).

    Two kinds of damage. A weight that should move stays 0, as long as too few workers see so: until the next push in
    which nothing is left out, one of ``refresh``. From then on it is not 0, and all gradients of it are sent. And a
    weight that should stay 0 moves, where one worker's large gradient comes without the others' that would have made
    up for it: by one step, after which all of them are sent, and it comes back. A larger ``margin`` makes both rarer.
    With ``refresh=1``, or while no values have been seen, nothing is left out. What is believed at the end is to follow
    a push that left nothing out. A gradient that is not finite is never left out: the shard is to see and refuse it.

    The optimizer has to put weights to exactly 0 (:class:`commlib.runtime.proximal.ProximalAdagrad`), all that are sent
    this way with the same penalty; and values have to come so that 0 stays 0: as they are, or by ``lossless``.

    KKT filter of Li et al. (OSDI 2014), whose workers estimate by what they know, too; that all is sent again now and
    then is after the shrinking of LIBLINEAR.

    Args:
        l1: λ, above 0, in units of what one worker pushes: the optimizer's own where the server takes the mean, and a
            P-th of that where it takes the sum of P workers.
        margin: share of λ by which a gradient must be below it to be left out, in [0, 1).
        refresh: of so many pushes of a key, the last leaves nothing out; counted alike by all workers; 1 or more.
    """

    l1: float
    margin: float = 0.1
    refresh: int = 8

    name = "kkt"
    reads = frozenset({"keys", "values"})
    sees = True

    def __post_init__(self) -> None:
        if not 0 < self.l1 < math.inf:
            raise ValueError(f"kkt: l1 must be in (0, inf), got {self.l1!r}")
        if not 0 <= self.margin < 1:
            raise ValueError(f"kkt: margin must be in [0, 1), got {self.margin!r}")
        if self.refresh < 1:
            raise ValueError(f"kkt: refresh must be at least 1, got {self.refresh}")

    def sender(self, size: int, seed: int) -> Sending:
        return _Resting(self)

    def receiver(self, size: int) -> Receiving:
        return Nothing(self.name)


class _Resting(Sending):
    def __init__(self, options: Kkt) -> None:
        self._options = options
        self._within = (1 - options.margin) * options.l1
        self._zero: Tensor | None = None  # bool (size,): weights that may be left out

    def see(self, values: Tensor, number: int) -> None:
        self._zero = None if (number + 1) % self._options.refresh == 0 else values == 0

    def encode(self, content: Content) -> Content:
        if self._zero is None:
            return content.push(None)
        zero = self._zero if content.keys is None else self._zero[content.keys]
        rests = zero & (content.values.abs() <= at_most(self._within, content.values.dtype))  # of a NaN this is false
        return content.only(~rests).push(None)


def at_most(bound: float, dtype: torch.dtype) -> Tensor:
    """The largest number of this format that is not above the bound: to the nearest, what is above it would pass."""
    nearest = torch.tensor(bound, dtype=dtype)
    return nearest if float(nearest) <= bound else nearest.nextafter(torch.tensor(-math.inf, dtype=dtype))
