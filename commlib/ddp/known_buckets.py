"""Buckets that are known: what of them is alike in every step, so that it is not worked out anew in each.

To sort a bucket's parameters by route takes time for each of them, in the thread of the backward pass: of a small model
on a fast link that is what can be lost against plain DDP. So a bucket that goes as it is goes at once. And where a
codec does the same with every value (``fp16``, ``bf16``), layers that lie side by side are coded as one: a call of it
for a hundred layers, and on a GPU so many kernels fewer. What goes into such a run follows from plan and shapes alone,
hence is the same on every rank. Decoded values and residuals are those that the layers by themselves would have.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from commlib.codecs.base import LayerSpec
from commlib.exchange import dense
from commlib.exchange.collectives import AllReduce, Payers, Rounds
from commlib.exchange.layer_task import LayerTask, SharedMeters
from commlib.groups.world import World
from commlib.planning.plan import Plan
from commlib.planning.route import Route
from commlib.telemetry.stats import Meter


@dataclasses.dataclass(frozen=True)
class PlainBucket:
    """Bucket of DDP's, all of whose parameters are sent as they are by plan.

    Attributes:
        plan: in force.
        parameters: their ``id``s, in order.
        dtype: of the gradients.
        names: of the parameters.
        payers: the meter of this bucket, of which its layers have shares.
    """

    plan: Plan
    parameters: list[int]
    dtype: torch.dtype
    names: list[str]
    payers: Payers

    def fits(self, plan: Plan, parameters: Sequence[Tensor], dtype: torch.dtype) -> bool:
        """Whether it is still what DDP hands out: it fills its buckets anew after the first step."""
        return plan is self.plan and dtype == self.dtype and [id(p) for p in parameters] == self.parameters

    def mean(self, buffer: Tensor, world: World) -> AllReduce:
        """As :func:`commlib.exchange.dense.rounds` of its items: the one collective that they are."""
        ((meter, nbytes),) = self.payers
        meter.would_send(nbytes, world.size)
        return dense.mean(buffer, world, self.payers)

    def rounds(self, buffer: Tensor, world: World) -> Rounds:
        """The same as an exchange."""
        yield [self.mean(buffer, world)]


class PlainBuckets:
    """Plain buckets that are known, by DDP's index. A bucket keeps its meter for good, through whatever plans.

    Args:
        meters: of layers that travel as one.
    """

    def __init__(self, meters: SharedMeters) -> None:
        self._known: dict[int, PlainBucket] = {}
        self._meters = meters

    def find(self, bucket: Any, plan: Plan) -> PlainBucket | None:
        """Plain bucket that is known for a bucket of DDP's; None if its parameters, dtype or plan have changed."""
        plain = self._known.get(bucket.index())
        if plain is None or not plain.fits(plan, bucket.parameters(), bucket.buffer().dtype):
            return None
        return plain

    def note(self, bucket: Any, plan: Plan, items: Sequence[LayerTask]) -> None:
        """Keep this bucket, if it is plain and will be while the plan is in force.

        Args:
            bucket: DDP's.
            plan: in force, without a hierarchy.
            items: the bucket's, as they are exchanged in this step.
        """
        self._known.pop(bucket.index(), None)
        names = [item.spec.name for item in items]
        if any(item.memory.old for item in items) or not all(plan.layers[n].route.plain for n in names):
            return
        payers = [(self._meters.of(items), sum(item.spec.nbytes for item in items))]
        parameters = [id(p) for p in bucket.parameters()]
        self._known[bucket.index()] = PlainBucket(plan, parameters, bucket.buffer().dtype, names, payers)


@dataclasses.dataclass(frozen=True)
class LayerRun:
    """Run of layers, two or more, that lie side by side in a bucket.

    Attributes:
        first: index in the bucket of the first.
        start: values of the bucket before it.
        route: of all of them.
        specs: theirs, in order.
        names: theirs.
        whole: all of them as one layer, of one dimension.
        layers: which begins at which value of it.
        strides: theirs, where memory has another order than that of the shape; else none.
        meter: of all, in which each has a share.
    """

    first: int
    start: int
    route: Route
    specs: list[LayerSpec]
    names: tuple[str, ...]
    whole: LayerSpec
    layers: list[tuple[int, str]]
    strides: list[tuple[int, ...]]
    meter: Meter

    @property
    def indices(self) -> range:
        """Indices of its layers in the bucket."""
        return range(self.first, self.first + len(self.specs))

    def of(self, buffer: Tensor) -> Tensor:
        """View of its part of a bucket, of one dimension."""
        return buffer[self.start : self.start + self.whole.numel]

    def part(self, flat: Tensor, i: int) -> Tensor:
        """View of one layer's part of that, of the layer's shape, each value where it belongs by it."""
        start, spec, strides = self.layers[i][0], self.specs[i], self.strides[i]
        part = flat[start : start + spec.numel]
        return part.as_strided(spec.shape, strides) if strides else part.view(spec.shape)


@dataclasses.dataclass(frozen=True)
class _Sorted:
    plan: Plan
    parameters: list[int]
    runs: list[LayerRun]


class LayerRuns:
    """Runs that are known, by DDP's index of their bucket. A run keeps its meter for good, through whatever plans.

    Args:
        specs: of all trained parameters.
        strides: of a parameter that lies in another order than that of its shape; else none.
    """

    def __init__(self, specs: dict[str, LayerSpec], strides: Callable[[str, Tensor], tuple[int, ...]]) -> None:
        self._specs, self._strides = specs, strides
        self._known: dict[int, _Sorted] = {}
        self._meters: dict[tuple[str, ...], Meter] = {}

    def of(self, bucket: Any, names: Sequence[str], plan: Plan, meters: dict[str, Meter]) -> list[LayerRun]:
        """The runs of a bucket, in order.

        Args:
            bucket: DDP's, dense.
            names: of its parameters.
            plan: in force.
            meters: of all parameters.
        """
        known, parameters = self._known.get(bucket.index()), bucket.parameters()
        ids = [id(p) for p in parameters]
        if known is None or known.plan is not plan or known.parameters != ids:
            known = _Sorted(plan, ids, self._look(parameters, names, plan, meters))
            self._known[bucket.index()] = known
        return known.runs

    def _look(
        self, parameters: Sequence[Tensor], names: Sequence[str], plan: Plan, meters: dict[str, Meter]
    ) -> list[LayerRun]:
        def kind(i: int) -> Route | None:
            route = plan.layers[names[i]].route
            fits = route.codec.elementwise and route.exchange == "dense" and not parameters[i].is_complex()
            return route if fits and (not lying(i) or route.in_any_order(self._specs[names[i]])) else None

        def lying(i: int) -> tuple[int, ...]:
            return self._strides(names[i], parameters[i])

        sizes = [self._specs[name].numel for name in names]
        starts = [0, *itertools.accumulate(sizes)]
        runs = []
        for route, group in itertools.groupby(range(len(names)), kind):
            indices = list(group)
            if route is not None and len(indices) > 1:
                specs = [self._specs[names[i]] for i in indices]
                strides = [lying(i) for i in indices]
                runs.append(self._make(indices[0], starts[indices[0]], route, specs, strides, meters))
        return runs

    def _make(
        self, first: int, start: int, route: Route, specs: list[LayerSpec], strides: list[tuple[int, ...]],
        meters: dict[str, Meter],
    ) -> LayerRun:  # fmt: skip
        sizes, names = [spec.numel for spec in specs], tuple(spec.name for spec in specs)
        starts = [0, *itertools.accumulate(sizes)]
        whole = dataclasses.replace(specs[0], name=f"{names[0]} … {names[-1]}", shape=(starts[-1],), kind="other")
        if names not in self._meters:
            parts = [(meters[name], n) for name, n in zip(names, sizes, strict=True)]
            self._meters[names] = Meter.of_all(whole.device, parts)
        layers = list(zip(starts[:-1], names, strict=True))
        return LayerRun(first, start, route, specs, names, whole, layers, strides, self._meters[names])
