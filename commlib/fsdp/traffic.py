"""What a sharded model sends: gradients to their owners, or between replicas; values to all; and the verdict on a step.

Ordering: FSDP2 asks for all of these itself, one after another and in the same order on every rank (else it would hang
without us, too): on the CPU each is through before the next is asked for; on a GPU all go to one communicator by one
side stream. The verdict comes last in a backward pass, from the end of it, which all ranks reach by the same path. What
goes between replicas has process groups of its own.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from commlib.backward import at_end_of_backward, wait
from commlib.collective import AllGather, Rounds, Scope, lockstep
from commlib.compressor import Compressor, LayerSpec, Memory
from commlib.errors import CommlibError, PeerLost
from commlib.exchange import EXCHANGES, reduce_scatter
from commlib.exchange.arena import Arena
from commlib.exchange.item import Item, Seeds, World
from commlib.exchange.sequencer import Sequencer
from commlib.exchange.valve import Throttle
from commlib.fsdp import values
from commlib.fsdp.plan import Replicas
from commlib.fsdp.units import Unit
from commlib.handshake import answer_roll_call, roll_call
from commlib.hierarchy import share
from commlib.lanes import Siblings, lay, make_sequencer, scopes
from commlib.loss_scale import LossScale
from commlib.memory import MemoryStore
from commlib.route import Plan, Route
from commlib.stats import Meter
from commlib.steps import Steps

_MEAN, _SUM = dist.ReduceOp.AVG, dist.ReduceOp.SUM


class Traffic:
    """Of one model.

    Args:
        units: of it.
        plan: for gradients.
        shard: this rank among those that share the parameters out.
        replicas: under HSDP.
        key: that all ranks share, for a roll call.
        scale: of the loss.
        dense_steps: the first so many steps go uncompressed.
        seed: of random codecs.
        codecs: parameter → how its values come from its owner; others come as they are.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        plan: Plan,
        shard: World,
        replicas: Replicas | None,
        key: str,
        scale: LossScale,
        dense_steps: int,
        seed: int,
        codecs: Mapping[str, Compressor],
    ) -> None:
        self._plan, self._shard, self._replicas, self._scale = plan, shard, replicas, scale
        self._world = shard if replicas is None else World(replicas.rank, shard.size * replicas.inter.size)
        self._dense_steps, self._seed, self._codecs = dense_steps, seed, codecs
        self._group, self._lost_key = units[0].shard_group, f"{key}/lost"
        self.device = units[0].inner.device
        self.store = MemoryStore()
        self.steps = Steps(self.store)
        names = [name for unit in units for name in unit.names]
        self.meters = {name: Meter(self.device) for name in names}
        self.value_meters = {name: Meter(self.device) for name in names}
        self._made: dict[object, Arena] = {}
        self._flags: list[Tensor] = []
        self._open = False
        self._sequencer = self._sequenced(self._group, shard, [("world",)])
        self._between = self._sequencer
        if replicas is not None:
            lanes = scopes({"dense", *(p.route.exchange for p in plan)}, None)
            self._between = self._sequenced(units[0].replicate_group, replicas.inter, lanes)

    @property
    def sent(self) -> float:
        """Payload bytes of gradients that this rank sent."""
        return sum(meter.sent() for meter in self.meters.values())

    def plain(self, unit: Unit) -> bool:
        """Whether all of a unit's gradients go as they are in this step, and nothing is held back of them."""
        self._begin()
        return all(self._route(name).plain and not self.store.holds(name) for name in unit.present)

    def reduced(self, unit: Unit, table: Tensor, out: Tensor) -> None:
        """FSDP2's own collective has done it."""
        for name in unit.present:
            nbytes = unit.specs[name].numel * table.dtype.itemsize / 2  # a reduce-scatter is half an all-reduce
            self.meters[name].would_send(nbytes, self._shard.size)
            self.meters[name].add_sent(2 * (self._shard.size - 1) / self._shard.size * nbytes)
        self._seen(out)

    def to_owners(self, unit: Unit, table: Tensor, out: Tensor, op: Any) -> None:
        """A unit's gradients, (P·n,), of which ``out``, (n,), gets this rank's mean or sum.

        Raises:
            PeerLost: a rank did not come.
            CommlibError: a parameter has a gradient that had none when commlib was attached.
        """
        self._begin()
        scale = {_MEAN: 1 / self._shard.size, _SUM: 1.0}.get(_kind(op))
        items, table = self._items(unit, table.view(self._shard.size, -1)), table.view(self._shard.size, -1)
        trip = reduce_scatter.rounds(items, table, out, self._shard, self._factor(scale, op))
        self._go(self._sequencer, unit, trip, out)
        self._seen(out)

    def across(self, unit: Unit, flat: Tensor, op: Any) -> None:
        """A unit's shard, (n,), already reduced inside a replica, becomes the mean or sum over all replicas."""
        assert self._replicas is not None
        self._begin()
        between = self._replicas.inter
        factor = self._factor({_MEAN: 1.0, _SUM: float(between.size)}.get(_kind(op)), op)
        routes: dict[str, list[Item]] = {}
        for item, exchange in self._shards(unit, flat, self._replicas):
            routes.setdefault(exchange, []).append(item)
        trip = lockstep([EXCHANGES[name].rounds(items, between, None) for name, items in routes.items()])
        self._go(self._between, unit, trip, flat)
        if factor != 1.0:
            flat.mul_(factor)
        self._seen(flat)

    def values(self, unit: Unit, part: Tensor, out: Tensor) -> None:
        """This rank's chunks of a unit's parameters, (n,), to all: ``out``, (P·n,), the same bits on every rank."""
        specs = [LayerSpec(s.name, s.shape, part.dtype, self.device) for s in unit.gathered()]
        meters, arena = [self.value_meters[s.name] for s in specs], self._arena(("values", unit.name))
        codecs = [self._codecs.get(s.name) for s in specs]
        trip = values.rounds(specs, codecs, part, out, self._shard, meters, arena)
        self._go(self._sequencer, unit, trip, out, "parameters of ")

    def own(self, unit: Unit, what: str, call: Callable[[], Any]) -> Any:
        """FSDP2's own collective of a unit; if it fails, with an error that names who is missing."""
        try:
            return call()
        except RuntimeError as e:
            who = roll_call(self._group, self._lost_key, self._shard, timeout=5.0)
            me = f"rank {self._shard.rank} of {self._shard.size}"
            lost = PeerLost(f"{me} could not exchange {what} of {unit.name} in step {self.steps.count}: {e}; {who}")
            raise self._sequencer.give_up(lost) from e

    def codec_of(self, name: str) -> str:
        """By which a parameter's values come, as text; empty: as they are."""
        return str(self._codecs.get(name, ""))

    def close(self) -> None:
        """Ends the threads."""
        self._sequencer.close()
        self._between.close()

    def parts(self) -> tuple[Any, ...]:
        """What a trace records."""
        return (self._sequencer, *([self._between] if self._replicas else []), self.steps)

    # -- a step ---------------------------------------------------------------------------------

    def _begin(self) -> None:
        if not self._open:
            self.steps.begin(remembers=self._plan.remembers or self._dense_steps > 0)
            self.store.rescale(self._scale.now())
            self._flags = []
            self._open = at_end_of_backward(self._end)
            if not self._open:
                raise CommlibError(
                    "FSDP2 reduces gradients outside of a backward pass: commlib cannot tell steps apart"
                )

    def _seen(self, out: Tensor) -> None:
        """Whether this part of the step is finite, as a number that is 0 or NaN, without waiting for the device."""
        if self.steps.watched:
            ends = torch.stack(torch.aminmax(out)) if out.numel() else out.new_zeros(1)
            self._flags.append((ends.float() * 0).sum())

    def _end(self) -> None:
        """The backward pass has ended: all ranks hear of each other's parts."""
        self._open = False
        if not self.steps.watched:
            self.steps.submitted(_done(self.device), last=True)
            return
        mine = torch.stack(self._flags).sum().view(1)
        heard = torch.empty(self._shard.size, device=self.device)
        call = AllGather(heard.view(torch.uint8), mine.view(torch.uint8))
        future = self._sequencer.submit(f"the verdict on step {self.steps.count}", iter([[call]]), heard)
        wait(future, self._meanwhile)
        self.steps.check(heard)
        self.steps.submitted(future, last=True)

    def _route(self, name: str) -> Route:
        if name not in self._plan.layers:
            raise CommlibError(
                f"{name} has a gradient, and had none when commlib was attached: freeze parameters before that"
            )
        planned, step = self._plan.layers[name], self.steps.count
        if step < self._dense_steps:
            return planned.dense
        codec = planned.route.codec.at(step - self._dense_steps)
        return planned.route if codec is planned.route.codec else Route(planned.route.exchange, codec)

    def _items(self, unit: Unit, table: Tensor) -> list[Item]:
        """For owners; what earlier routes have held back is added to the gradients in the table."""
        arena, items = self._arena(("to owners", unit.name)), []
        world = self._shard.size
        for name in unit.present:
            route, spec = self._route(name), unit.specs[name]
            memory = self.store.memory(spec, route.codec.slots(spec))
            sent = LayerSpec(name, spec.shape, table.dtype, self.device, spec.kind)
            self.meters[name].would_send(sent.nbytes / 2, world)  # a reduce-scatter is half an all-reduce
            seeds = Seeds(self._seed, self.steps.count, name)
            items.append(Item(sent, route.codec, table, memory, seeds, self.meters[name], Memory({}, {}), None, arena))
        row = reduce_scatter.Row.of([item.spec for item in items], world)
        if row.length != table.shape[1]:
            raise CommlibError(
                f"{unit.name}: FSDP2 reduces {table.shape[1]} values a rank, and {', '.join(unit.present)} have "
                f"{row.length}: this torch ({torch.__version__}) lays them out otherwise"
            )
        for item, start in zip(items, row.starts, strict=True):
            if self.store.holds(item.spec.name):
                late = torch.zeros(item.spec.shape, device=self.device)
                self.store.drain(unit.specs[item.spec.name], late, world, world)
                for p, stripe in enumerate(reduce_scatter.chunks(item.spec, world)):
                    table[p, start : start + stripe.spec.numel] += late[stripe.start : stripe.stop].flatten()
        return items

    def _shards(self, unit: Unit, flat: Tensor, replicas: Replicas) -> list[tuple[Item, str]]:
        """For replicas: this rank's rows of every layer, with the exchange by which they go."""
        found, start = [], 0
        for name in unit.present:
            route, spec = self._route(name), unit.specs[name]
            part = share(self._plan.layers[name].route, spec, self._world, replicas)
            length = reduce_scatter.chunks(spec, self._shard.size)[0].spec.numel  # with what pads the last ones
            grad, start = flat[start : start + part.spec.numel], start + length
            if not part.spec.numel:
                continue
            codec, meter, owner = route.codec, self.meters[name], Memory({}, {})
            stripe = route.carrier().owned(codec, part.spec, part.world)
            if stripe is not None:
                owner = self.store.owner(spec, codec.slots(stripe.spec), part.start + stripe.start)
            memory = self.store.memory(spec, codec.slots(part.spec), prefix=part.prefix, start=part.start)
            if self.store.holds(name):
                late = torch.zeros(spec.shape, device=self.device)
                self.store.drain(spec, late, self._world.size, replicas.inter.size)
                grad += late[part.start : part.start + part.spec.shape[0]].flatten()
            sent = LayerSpec(name, part.spec.shape, flat.dtype, self.device, spec.kind)
            meter.would_send(sent.nbytes, replicas.inter.size)
            seeds, arena = Seeds(self._seed, self.steps.count, name), self._arena(("across", name))
            item = Item(sent, codec, grad.view(sent.shape), memory, seeds, meter, owner, None, arena)
            found.append((item, route.exchange))
        return found

    def _arena(self, key: object) -> Arena:
        """What one exchange holds, again in every step: each is through before it is asked for the next time."""
        arena = self._made.setdefault(key, Arena())
        arena.rewind()
        return arena

    # -- the process group ----------------------------------------------------------------------

    def _sequenced(self, group: Any, world: World, lanes: Sequence[tuple[Scope, ...]]) -> Sequencer:
        made = make_sequencer(group, self._lost_key, world, self.device)
        lay(made, lanes, group, Siblings(group, self.device), Throttle(None, 0))
        weakref.finalize(self, made.close, wait=False)
        return made

    def _go(self, sequencer: Sequencer, unit: Unit, rounds: Rounds, result: Tensor, what: str = "") -> None:
        label = f"{what}{unit.name} of step {self.steps.count}"
        wait(sequencer.submit(label, rounds, result), self._meanwhile)

    def _meanwhile(self) -> None:
        found = answer_roll_call(self._group, self._lost_key, self._shard)
        if found:
            me = f"rank {self._shard.rank} of {self._shard.size}"
            raise self._sequencer.give_up(PeerLost(f"{me} could not go on: another rank has given up; {found}"))

    def _factor(self, factor: float | None, op: Any) -> float:
        if factor is None:
            raise CommlibError(
                f"FSDP2 asks for {op}, as after set_gradient_divide_factor(): call "
                "set_force_sum_reduction_for_comms(True) on the same modules, and it divides by itself"
            )
        return factor


def _kind(op: Any) -> Any:
    return getattr(op, "op", op)  # a ReduceOp, or what it is of


def _done(device: torch.device) -> torch.futures.Future[Tensor]:
    future: torch.futures.Future[Tensor] = torch.futures.Future(devices=[device] if device.type == "cuda" else [])
    future.set_result(torch.empty(0, device=device))
    return future
