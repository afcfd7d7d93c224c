"""A unit's gradients as an exchange takes them: layers with their routes in the step under way, and their memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from commlib.codecs.base import LayerSpec, Memory, Seeds
from commlib.codecs.memory_store import MemoryStore
from commlib.errors import CommlibError
from commlib.exchange import reduce_scatter
from commlib.exchange.buffers import StepBuffers
from commlib.exchange.hierarchy import share
from commlib.exchange.layer_task import LayerTask
from commlib.exchange.step_commit import StepCommit
from commlib.fsdp.param_groups import ParamGroup
from commlib.fsdp.plan import Replicas
from commlib.groups.world import World
from commlib.monitoring.error_norms import ErrorNorms
from commlib.planning.plan import Plan
from commlib.planning.route import Route
from commlib.telemetry.stats import Meter


class GradientReducer:
    """Exchanges of the gradients of one FSDP2 model.

    Args:
        plan: for gradients.
        shard: this rank among those that share the parameters out.
        store: what codecs remember.
        steps: the step under way.
        meters: of all parameters, by name.
        dense_steps: the first so many steps go uncompressed.
        seed: of random codecs.

    Attributes:
        plan: for gradients, from the next step on; between two steps another may be put there.
        gauge: of what is not sent. (Under HSDP, as under a hierarchy, it tells residuals only.)
    """

    def __init__(
        self,
        plan: Plan,
        shard: World,
        store: MemoryStore,
        steps: StepCommit,
        meters: Mapping[str, Meter],
        *,
        dense_steps: int,
        seed: int,
    ) -> None:
        self.plan, self._shard, self._store, self._steps, self._meters = plan, shard, store, steps, meters
        self._dense_steps, self._seed = dense_steps, seed
        self._made: dict[object, StepBuffers] = {}
        self.gauge = ErrorNorms(store)

    @property
    def remembers(self) -> bool:
        """Whether any step may leave something for another."""
        return self.plan.remembers or self._dense_steps > 0

    def plain(self, names: Iterable[str]) -> bool:
        """Whether all these go as they are in this step, and nothing is held back of them."""
        return all(self._route(name).plain and not self._store.holds(name) for name in names)

    def _route(self, name: str) -> Route:
        if name not in self.plan.layers:
            raise CommlibError(
                f"{name} has a gradient, and had none when commlib was attached: freeze parameters before that"
            )
        planned, step = self.plan.layers[name], self._steps.count
        if step < self._dense_steps:
            return planned.dense
        codec = planned.route.codec.at(step - self._dense_steps)
        return planned.route if codec is planned.route.codec else Route(planned.route.exchange, codec)

    def for_owners(self, unit: ParamGroup, table: Tensor) -> list[LayerTask]:
        """Tasks of all layers of a unit, (P, n); what earlier routes have held back is added to the table.

        Raises:
            CommlibError: a parameter has a gradient that had none when commlib was attached.
        """
        arena, items = self.arena(("to owners", unit.name)), []
        world = self._shard.size
        for name in unit.present:
            route, spec = self._route(name), unit.specs[name]
            memory = self._store.memory(spec, route.codec.slots(spec))
            sent = LayerSpec(name, spec.shape, table.dtype, unit.inner.device, spec.kind)
            self._meters[name].would_send(sent.nbytes / 2, world)  # a reduce-scatter is half an all-reduce
            seeds = Seeds(self._seed, self._steps.count, name)
            items.append(
                LayerTask(sent, route.codec, table, memory, seeds, self._meters[name], Memory({}, {}), None, arena)
            )
        row = reduce_scatter.ReduceScatterLayout.of([item.spec for item in items], world)
        if row.length != table.shape[1]:
            raise CommlibError(
                f"{unit.name}: FSDP2 reduces {table.shape[1]} values a rank, and {', '.join(unit.present)} have "
                f"{row.length}: this torch ({torch.__version__}) lays them out otherwise"
            )
        for item, start in zip(items, row.starts, strict=True):
            if self._store.holds(item.spec.name):
                late = torch.zeros(item.spec.shape, dtype=torch.float32, device=unit.inner.device)
                self._store.drain(unit.specs[item.spec.name], late, world, world)
                for p, stripe in enumerate(reduce_scatter.chunks(item.spec, world)):
                    table[p, start : start + stripe.spec.numel] += late[stripe.start : stripe.stop].flatten()
            if self.gauge.on:
                stripes = enumerate(reduce_scatter.chunks(item.spec, world))
                grad = torch.cat([table[p, start : start + stripe.spec.numel] for p, stripe in stripes])
                self.gauge.note(item.spec.name, item.codec, grad, item.memory, self._steps.count)
        return items

    def for_replicas(self, unit: ParamGroup, flat: Tensor, replicas: Replicas) -> dict[str, list[LayerTask]]:
        """Tasks of this rank's rows of all layers of a unit, (n,): exchange → the layers that go by it.

        Raises:
            CommlibError: as :meth:`for_owners`.
        """
        found: dict[str, list[LayerTask]] = {}
        world, start = World(replicas.rank, self._shard.size * replicas.inter.size), 0
        for name in unit.present:
            route, spec = self._route(name), unit.specs[name]
            part = share(self.plan.layers[name].route, spec, world, replicas)
            length = reduce_scatter.chunks(spec, self._shard.size)[0].spec.numel  # with what pads the last ones
            grad, start = flat[start : start + part.spec.numel], start + length
            if not part.spec.numel:
                continue
            codec, meter, owner = route.codec, self._meters[name], Memory({}, {})
            stripe = route.carrier().owned(codec, part.spec, part.world)
            if stripe is not None:
                owner = self._store.owner(spec, codec.slots(stripe.spec), part.start + stripe.start)
            memory = self._store.memory(spec, codec.slots(part.spec), prefix=part.prefix, start=part.start)
            if self._store.holds(name):
                late = torch.zeros(spec.shape, dtype=torch.float32, device=unit.inner.device)
                self._store.drain(spec, late, world.size, replicas.inter.size)
                grad += late[part.start : part.start + part.spec.shape[0]].flatten()
            sent = LayerSpec(name, part.spec.shape, flat.dtype, unit.inner.device, spec.kind)
            meter.would_send(sent.nbytes, replicas.inter.size)
            seeds, arena = Seeds(self._seed, self._steps.count, name), self.arena(("across", name))
            item = LayerTask(sent, codec, grad.view(sent.shape), memory, seeds, meter, owner, None, arena)
            found.setdefault(route.exchange, []).append(item)
        return found

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers of all exchanges."""
        return sum(arena.nbytes for arena in list(self._made.values()))

    def arena(self, key: object) -> StepBuffers:
        """Buffers of one exchange, again in every step: each is through before it is asked for the next time."""
        arena = self._made.setdefault(key, StepBuffers())
        arena.rewind()
        return arena
