"""A bucket's exchanges: its parameters, each with its route in the step under way and what its codec remembers.

What is looked at to see whether a bucket came out finite: where codecs have scales these, not all the values again.

A value that is decoded is a scale times at most two. So where the scales are finite it is, and they are few.
"""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from commlib.codecs.base import LayerSpec, Memory, Seeds, Slot
from commlib.codecs.memory_store import MemoryStore
from commlib.ddp.known_buckets import LayerRun, LayerRuns, PlainBucket, PlainBuckets
from commlib.errors import WrongGradient
from commlib.exchange import two_level
from commlib.exchange.buffers import SpareBuffers, StepBuffers
from commlib.exchange.chunking import Routes, in_parts
from commlib.exchange.collectives import Rounds, lockstep
from commlib.exchange.factors.layers import FactorLayers
from commlib.exchange.fusion import riding
from commlib.exchange.hierarchy import Hierarchy, share
from commlib.exchange.layer_task import LayerTask, SharedMeters
from commlib.exchange.registry import EXCHANGES
from commlib.exchange.step_commit import StepCommit
from commlib.groups.world import World
from commlib.monitoring.error_norms import ErrorNorms
from commlib.planning.plan import Plan
from commlib.planning.route import Route
from commlib.runtime.layers import real
from commlib.runtime.streams import accelerator
from commlib.telemetry.stats import Meter

LARGE = 1 << 16
"""Values: of a smaller layer they are read as fast as its scales are found."""


def spans(buffer: Tensor, items: Sequence[LayerTask]) -> list[tuple[Tensor, Sequence[Tensor]]]:
    """A bucket in consecutive pieces, each with the scales that vouch for it; none if only its values can.

    Args:
        buffer: the flat bucket, exchanged.
        items: that were; their gradients are views of it.
    """
    found: list[tuple[Tensor, Sequence[Tensor]]] = []
    at = 0
    vouched = [(item.grad, item.scales) for item in items if item.scales]
    for grad, scales in sorted(vouched, key=lambda each: each[0].storage_offset()):
        start = int(grad.storage_offset() - buffer.storage_offset())
        found += [(buffer[at:start], ()), (grad, scales)]
        at = start + grad.numel()
    return [(values, scales) for values, scales in [*found, (buffer[at:], ())] if values.numel()]


def room_for_scales(grad: Tensor) -> list[Tensor] | None:
    """Where the scales of an exchanged gradient are to be noted; None where its values are looked at in any case.

    That is so of a small one; of a shorter format, which may overflow where float32 does not; and on a GPU, where to
    look at a bucket's values takes less of the host than to look at each layer's scales.
    """
    asked = grad.numel() >= LARGE and grad.dtype == torch.float32 and accelerator(grad.device) is None
    return [] if asked else None


class LogicalGradients:
    """Gradients in the order of their shape, of parameters that lie in memory in another: transposed, channels last.

    DDP's bucket has such a gradient in the order of its parameter's memory. Codecs are given it in that of its shape,
    or a matrix would be none to them, and a residual would belong to other values in a checkpoint. Those that code each
    value by itself and remember nothing are given it as it lies: that saves a copy each way.
    """

    def __init__(self) -> None:
        self._strides: dict[str, tuple[int, ...]] = {}
        self._copies: dict[str, Tensor] = {}

    def view(self, name: str, grad: Tensor, parameter: Tensor) -> Tensor:
        """View of a gradient in the bucket in which each value is where it belongs by the shape.

        Args:
            name: of the parameter.
            grad: in the bucket, as DDP gives it: the parameter's shape, but in the order of its memory.
            parameter: how it lies when it is first seen is taken to be so for good.

        Returns:
            The gradient itself if the order in memory is that of the shape.
        """
        strides = self.strides(name, parameter)
        return grad.as_strided(grad.shape, strides) if strides else grad

    def copy(self, name: str, view: Tensor) -> Tensor:
        """Copy of such a view in the order of its shape, in memory that is kept for it."""
        copy = self._copies.get(name)
        if copy is None or copy.dtype != view.dtype:
            copy = self._copies[name] = torch.empty(view.shape, dtype=view.dtype, device=view.device)
        return copy.copy_(view)

    def strides(self, name: str, parameter: Tensor) -> tuple[int, ...]:
        """A parameter's strides if it lies in another order than that of its shape, else none."""
        found = self._strides.get(name)
        if found is None:
            found = self._strides[name] = parameter.stride() if _permuted(parameter) else ()
        return found


def _permuted(x: Tensor) -> bool:
    """Whether a tensor fills its memory in another order than that of its shape; DDP lays out the others by shape."""
    room = 1
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size != 1 and stride != room:
            return False
        room *= size
    return not x.is_contiguous()


def _gradients(bucket: Any) -> Sequence[Tensor]:
    """A bucket's gradients as real values. Complex ones come so, but DDP's own views of them are of other places."""
    parameters = bucket.parameters()
    if not parameters[0].is_complex():
        found: Sequence[Tensor] = bucket.gradients()
        return found
    parts = torch.split(bucket.buffer(), [2 * p.numel() for p in parameters])
    return [part.view(*p.shape, 2) for part, p in zip(parts, parameters, strict=True)]


def _returned(rounds: Rounds, copies: Sequence[tuple[Tensor, Tensor]]) -> Rounds:
    """A bucket's last exchange, at whose end gradients go back to where DDP has them."""
    yield from rounds
    for home, grad in copies:
        home.copy_(grad)


class _Recipe(NamedTuple):
    """Parts of a layer's task that are the same in every step, while plan, route and dtype are.

    Attributes:
        plan, route: that it follows from.
        spec: of the gradient as it comes.
        slots: its codec's, of what this rank codes of it.
        prefix, start: of these slots.
        owned: the codec's slots for the stripe that this rank owns, if it does.
        first: row at which that begins.
    """

    plan: Plan
    route: Route
    spec: LayerSpec
    slots: Mapping[str, Slot]
    prefix: str
    start: int
    owned: Mapping[str, Slot] | None
    first: int


class BucketPlanner:
    """Makes exchanges of buckets.

    Args:
        specs: of all trained parameters.
        world: this rank.
        levels: nodes, if there are some.
        store: what codecs remember.
        steps: the step under way.
        dense_steps: the first so many steps go uncompressed.
        seed: of the random codecs.
        verify: in one of so many steps a layer, drawn by lot, is held to its contract; 0: never.

    Attributes:
        meters: of the parameters, by name.
        gauge: of what is not sent.
        faults: what verified exchanges of the step under way have found.
    """

    def __init__(
        self,
        specs: Sequence[LayerSpec],
        world: World,
        levels: Hierarchy | None,
        store: MemoryStore,
        steps: StepCommit,
        *,
        dense_steps: int,
        seed: int,
        verify: int = 0,
    ) -> None:
        self._verify, self._drawn = verify, (-1, "")
        self.faults: list[WrongGradient] = []
        self._specs = {s.name: s for s in specs}
        self._world, self._levels, self._store, self._steps = world, levels, store, steps
        self.gauge = ErrorNorms(store)
        self._shared = SharedMeters()
        self._plain = PlainBuckets(self._shared)
        self._logical = LogicalGradients()
        self._runs = LayerRuns(self._specs, self._logical.strides)
        self.meters = {s.name: Meter(s.device, s.name) for s in specs}
        self._nodes = world.size if levels is None else levels.inter.size
        self._dense_steps, self._seed = dense_steps, seed
        self._spare = SpareBuffers()
        self._parts: dict[tuple[Meter, int], Meter] = {}
        self._recipes: dict[str, _Recipe] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers of exchanges that are not under way."""
        return self._spare.nbytes

    def plain(self, bucket: Any, plan: Plan) -> PlainBucket | None:
        """Plain bucket for a bucket that need not be sorted: all of it goes uncompressed, and nothing is held back."""
        return self._plain.find(bucket, plan) if self._store.empty else None

    def rounds(self, bucket: Any, names: Sequence[str], plan: Plan, factors: FactorLayers | None) -> list[Rounds]:
        """The exchanges of a bucket, whose parameters may go by several routes: one, or some that are to follow it.

        When the last is through, all are.

        Args:
            bucket: DDP's.
            names: of its parameters.
            plan: in force.
            factors: where rows are caught, if they are.
        """
        buffer = bucket.buffer()
        if buffer.is_sparse:
            return [self.checked(self._sparse(names[0], buffer, plan), buffer)]
        routes: dict[str, list[LayerTask]] = {}
        copies: list[tuple[Tensor, Tensor]] = []
        runs = self._runs.of(bucket, names, plan, self.meters) if self._in_runs() else []
        for run in runs:
            routes.setdefault(run.route.exchange, []).append(self._as_one(run, buffer))
        alone = sorted({*range(len(names))}.difference(*(run.indices for run in runs)))
        gradients, parameters = (_gradients(bucket), bucket.parameters()) if alone else ((), ())
        for name, grad, p in ((names[i], gradients[i], parameters[i]) for i in alone):
            route = self._route(plan, name)
            view = self._logical.view(name, grad, real(p))
            if view is not grad and not route.in_any_order(self._specs[name]):
                grad = self._logical.copy(name, view)
                copies.append((view, grad))
                view = grad
            routes.setdefault(route.exchange, []).append(self._item(plan, name, route, grad, view, factors))
        if self._levels is not None:
            trip = self._lending(two_levels(routes, plan, self._world, self._levels), routes)
            return [self.checked(_returned(trip, copies), buffer)]
        if list(routes) == ["dense"] and not runs:
            self._plain.note(bucket, plan, routes["dense"])
        trips = in_parts(routes, self._own)
        whole = buffer if len(routes) == len(trips) == 1 and not copies else None
        go = functools.partial(self._exchange, whole=whole)
        *parts, last = [self._lending(riding(trip, self._world, self._shared.of, go), trip) for trip in trips]
        copied = {id(grad) for _, grad in copies}
        items = [item for items in routes.values() for item in items if id(item.grad) not in copied]
        return [*parts, self.checked(_returned(last, copies), buffer, items)]

    def checked(self, rounds: Rounds, buffer: Tensor, items: Sequence[LayerTask] = ()) -> Rounds:
        """A bucket's last exchange, at whose end it is seen whether all of the bucket is finite, if that matters."""
        yield from rounds
        if self._steps.watched:
            for values, scales in spans(buffer._values() if buffer.is_sparse else buffer, items):
                self._steps.check(values, scales)

    def with_factors(self) -> bool:
        """Whether the step whose forward pass is under way exchanges factors: it is past the dense ones."""
        if self._dense_steps:
            self._steps.settle()
        return self._steps.count >= self._dense_steps

    def verified(self) -> str:
        """Name of the parameter whose exchange is to be verified in the step under way; empty in most steps.

        All ranks draw the same one: among all that are planned, the larger the likelier.
        """
        if not self._verify:
            return ""
        count = self._steps.count
        if self._drawn[0] != count:
            drawn = ""
            if count % self._verify == self._verify - 1:
                sizes = [spec.numel for spec in self._specs.values()]
                (drawn,) = random.Random(f"{self._seed} {count}").choices(list(self._specs), sizes)
            self._drawn = count, drawn
        return self._drawn[1]

    def verified_rows(self) -> str:
        """Linear layer whose rows are to be verified in the step whose forward pass begins; empty in most steps."""
        if self._verify:
            self._steps.settle()
        name = self.verified()
        return self._specs[name].layer or "" if name else ""

    def row_seeds(self, layer: str, /) -> Seeds:
        """Seeds of a linear layer's codec, for the rows of the step under way."""
        self._steps.settle()
        return Seeds(self._seed, self._steps.count, layer)

    def _sparse(self, name: str, grad: Tensor, plan: Plan) -> Rounds:
        """DDP gives every sparse gradient a bucket of its own."""
        spec, route = self._specs[name], self._route(plan, name)
        self._store.memory(spec, {})
        seeds, none = Seeds(self._seed, self._steps.count, name), Memory({}, {})
        item = LayerTask(spec, route.codec, grad, none, seeds, self.meters[name], none)
        yield from EXCHANGES[route.exchange].rounds([item], self._world, None)

    def _exchange(self, routes: Routes, *, whole: Tensor | None) -> Rounds:
        return lockstep([EXCHANGES[name].rounds(items, self._world, whole) for name, items in routes.items()])

    def _lending(self, rounds: Rounds, routes: Routes) -> Rounds:
        """An exchange that gives its layers' memory back; one that breaks off does not: it may be in use."""
        yield from rounds
        for item in (i for items in routes.values() for i in items):
            self._spare.take_back((item.spec.name, item.part.index), item.arena, self._steps.count)

    def _own(self, item: LayerTask, part: int) -> tuple[StepBuffers, Meter]:
        """Buffers and meter of a part, for good: threads may be at work on several parts of a layer, and a meter is one
        thread's."""
        whole = item.meter
        if (whole, part) not in self._parts:
            self._parts[whole, part] = Meter.of_all(whole.device, [(whole, 1)])
        return self._arena(item.spec.name, part), self._parts[whole, part]

    def _arena(self, layer: str, part: int) -> StepBuffers:
        return self._spare.lend((layer, part), self._steps.count)

    def _route(self, plan: Plan, name: str) -> Route:
        planned, step = plan.layers[name], self._steps.count
        if step < self._dense_steps:
            return planned.dense
        codec = planned.route.codec.at(step - self._dense_steps)
        return planned.route if codec is planned.route.codec else Route(planned.route.exchange, codec)

    def _item(
        self, plan: Plan, name: str, route: Route, grad: Tensor, view: Tensor, factors: FactorLayers | None
    ) -> LayerTask:
        known = self._recipes.get(name)
        if known is None or known.route is not route or known.plan is not plan or known.spec.dtype != grad.dtype:
            known = self._recipes[name] = self._recipe(plan, name, route, grad)
        spec, codec, meter, owner = known.spec, route.codec, self.meters[name], Memory({}, {})
        meter.would_send(spec.nbytes, self._world.size)
        if known.owned is not None:
            owner = self._store.owner(spec, known.owned, known.first)
        memory = self._store.memory(spec, known.slots, prefix=known.prefix, start=known.start)
        trip = None
        if route.by_rows and factors is not None and spec.layer is not None:
            trip = factors.trip(spec.layer)
        if self._store.drain(spec, view, self._world.size, self._nodes) and trip is not None:
            trip.late = True  # what was added is in no rows
        if self.gauge.on:
            self.gauge.note(name, codec, grad, memory, self._steps.count)
        seeds = Seeds(self._seed, self._steps.count, name)
        faults = self.faults if self._verifies(spec, route) else None
        arena = self._arena(name, 0)
        return LayerTask(
            spec, codec, grad, memory, seeds, meter, owner, trip, arena, scales=room_for_scales(grad), faults=faults,
            overwrite=True,
        )  # fmt: skip

    def _recipe(self, plan: Plan, name: str, route: Route, grad: Tensor) -> _Recipe:
        spec = self._specs[name]
        if spec.dtype != grad.dtype:  # DDP's mixed precision reduces in another dtype
            spec = dataclasses.replace(spec, dtype=grad.dtype)
        part = share(plan.layers[name].route, spec, self._world, self._levels)
        stripe = route.carrier().owned(route.codec, part.spec, part.world)
        owned, first = (None, 0) if stripe is None else (route.codec.slots(stripe.spec), part.start + stripe.start)
        slots = route.codec.slots(part.spec)
        return _Recipe(plan, route, spec, slots, part.prefix, part.start, owned, first)

    def _in_runs(self) -> bool:
        """Whether layers may be coded as one in this step: none is cut by nodes, and all go by plan."""
        return self._levels is None and self._steps.count >= self._dense_steps

    def _as_one(self, run: LayerRun, buffer: Tensor) -> LayerTask:
        codec, grad, whole, count = run.route.codec, run.of(buffer), run.whole, self._steps.count
        if whole.dtype != grad.dtype:
            whole = dataclasses.replace(whole, dtype=grad.dtype)
        run.meter.would_send(whole.nbytes, self._world.size)
        slots = codec.slots(whole)
        memory = self._store.run(run.names, run.specs, slots)
        for i in self._store.crowded(run.names, slots):
            self._store.drain(run.specs[i], run.part(grad, i), self._world.size, self._nodes)
        if self.gauge.on:
            for i, (start, name) in enumerate(run.layers):
                rows = memory.rows(start, start + run.specs[i].numel)
                self.gauge.note(name, codec, run.part(grad, i), rows, count)
        faults = self.faults if self.verified() in run.names else None
        seeds, arena, none = Seeds(self._seed, count, whole.name), self._arena(whole.name, 0), Memory({}, {})
        return LayerTask(
            whole, codec, grad, memory, seeds, run.meter, none, None, arena, scales=room_for_scales(grad),
            faults=faults, layers=run.layers, overwrite=True,
        )  # fmt: skip

    def _verifies(self, spec: LayerSpec, route: Route) -> bool:
        """Whether a parameter is verified in this step: it has been drawn, or goes by the rows of a layer that has."""
        drawn = self._specs.get(self.verified())
        return drawn is not None and (spec.name == drawn.name or (route.by_rows and spec.layer == drawn.layer))


def two_levels(routes: Mapping[str, Sequence[LayerTask]], plan: Plan, world: World, hierarchy: Hierarchy) -> Rounds:
    """A bucket's rounds under a hierarchy; the plan is looked at before the first, and may change once all are through.

    Args:
        routes: exchange → its items.
        plan: what is in force, of which a dense step may make an exception: its layers are cut as the plan has them.
        world: this rank.
        hierarchy: nodes.
    """
    planned = [plan.layers[item.spec.name] for items in routes.values() for item in items]
    # What is planned flat has no stripes; in a dense step its gradient is cut as any that is dense.
    codecs = {p.spec.name: (p.dense if p.route.by_rows else p.route).codec for p in planned}
    cuts = {p.spec.name: hierarchy.cut(codecs[p.spec.name], p.spec) for p in planned}
    yield from two_level.rounds(routes, cuts, world, hierarchy.local, hierarchy.inter)
