"""Communication of a sharded model: gradients to their owners, or between replicas; values to all; the verdict on a
step.

Ordering: FSDP2 asks for all of these itself, one after another and in the same order on every rank (else it would hang
without us, too): on the CPU each is through before the next is asked for; on a GPU all go to one communicator by one
side stream. The verdict comes last in a backward pass, from the end of it, which all ranks reach by the same path. What
goes between replicas has process groups of its own.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from commlib.codecs.base import Compressor, LayerSpec
from commlib.codecs.memory_store import MemoryStore
from commlib.errors import CommlibError, PeerLost
from commlib.exchange import reduce_scatter
from commlib.exchange.collectives import AllGather, Rounds, Scope, lockstep
from commlib.exchange.in_flight import reason
from commlib.exchange.lanes import Siblings, lay, make_sequencer, scopes
from commlib.exchange.peer_wait import PeerWait
from commlib.exchange.reduce_scatter import ReduceScatter
from commlib.exchange.registry import EXCHANGES
from commlib.exchange.sequencer import Sequencer
from commlib.exchange.step_commit import StepCommit
from commlib.exchange.throttled_group import Throttle
from commlib.fsdp import parameters
from commlib.fsdp.chooser import CodecChooser
from commlib.fsdp.gradients import GradientReducer
from commlib.fsdp.param_groups import ParamGroup
from commlib.fsdp.plan import Replicas
from commlib.groups.call_thread import CallThread
from commlib.groups.handshake import explained
from commlib.groups.process_groups import waits_on_stream
from commlib.groups.world import World
from commlib.monitoring.log import Monitor
from commlib.planning.plan import Plan
from commlib.runtime import streams
from commlib.runtime.amp import LossScale
from commlib.runtime.autograd import at_end_of_backward, wait
from commlib.runtime.exit import close_at_exit
from commlib.telemetry.stats import HeldBytes, Meter

_MEAN, _SUM = dist.ReduceOp.AVG, dist.ReduceOp.SUM


class FsdpCommunicator:
    """Communication of one FSDP2 model: gradients to owners, values from them, and the verdict on a step.

    Args:
        units: of it.
        plan: for gradients.
        shard: this rank among those that share the parameters out.
        replicas: under HSDP.
        keys: for roll calls, that all ranks of a group share: of those that share out, and under HSDP of replicas.
        scale: of the loss.
        dense_steps: the first so many steps go uncompressed.
        seed: of random codecs.
        codecs: parameter → how its values come from its owner; others come as they are.
        chooser: of plan and codecs, if these are chosen by measurement.
    """

    def __init__(
        self,
        units: Sequence[ParamGroup],
        plan: Plan,
        shard: World,
        replicas: Replicas | None,
        keys: Sequence[str],
        scale: LossScale,
        dense_steps: int,
        seed: int,
        codecs: Mapping[str, Compressor],
        chooser: CodecChooser | None = None,
    ) -> None:
        self._shard, self._replicas, self._scale, self._codecs = shard, replicas, scale, codecs
        self._chooser, self._dense_steps, self._halves = chooser, dense_steps, frozenset[str]()
        groups = [units[0].shard_group, *([] if replicas is None else [units[0].replicate_group])]
        worlds = [shard, *([] if replicas is None else [replicas.inter])]
        places = list(zip(groups, keys, worlds, strict=True))
        self._calls = [(g, f"{key}/lost", w) for g, key, w in places]
        self.device = units[0].inner.device
        self.store = MemoryStore()
        self.steps = StepCommit(self.store)
        names = [name for unit in units for name in unit.names]
        self.meters = {name: Meter(self.device) for name in names}
        self.value_meters = {name: Meter(self.device) for name in names}
        kept = {"dense_steps": dense_steps, "seed": seed}
        self._reducer = GradientReducer(plan, shard, self.store, self.steps, self.meters, **kept)
        self.gauge = self._reducer.gauge
        self._monitor: Callable[[], Monitor | None] = _nobody
        self._flags: list[Tensor] = []
        self._pass = -1
        self._sequencer = self._sequenced(*self._calls[0], [("world",)])
        self._between = self._sequencer
        self._waiter = CallThread("commlib-fsdp-own")
        if replicas is not None:
            plans = [plan, *(chooser.choice.gradients.values() if chooser else ())]
            lanes = scopes({"dense", *(p.route.exchange for each in plans for p in each)}, None)
            self._between = self._sequenced(*self._calls[1], lanes)
        both = self._between, self._sequencer
        self.peers = PeerWait(places, self.device, lambda e: [s.give_up(e) for s in both][-1])

    @property
    def plan(self) -> Plan:
        """Plan of gradients as it is now."""
        return self._reducer.plan

    @property
    def memory(self) -> HeldBytes:
        """Bytes that are held between steps, by kind."""
        return HeldBytes(*self.store.nbytes, self._reducer.nbytes)

    @property
    def settled(self) -> bool:
        """Whether plan and codecs stay as they are, unless the link changes."""
        return self._chooser is None or self._chooser.settled

    @property
    def predicted_s(self) -> float | None:
        """Seconds of a step with what was chosen; None if nothing was."""
        return None if self._chooser is None else self._chooser.predicted_s

    def timed(self, unit: ParamGroup) -> contextlib.AbstractContextManager[None]:
        """A context in which a unit's gradients are exchanged."""
        return contextlib.nullcontext() if self._chooser is None else self._chooser.timed(unit.name)

    def told(self, monitor: Monitor) -> None:
        """Tell this monitor of waits and of steps from now on; it is not kept alive."""
        self._monitor = weakref.ref(monitor)

    @property
    def sent(self) -> float:
        """Payload bytes of gradients that this rank sent."""
        return sum(meter.sent() for meter in self.meters.values())

    def plain(self, unit: ParamGroup, op: Any = None) -> bool:
        """Whether all of a unit's gradients go as they are in this step, and nothing is held back of them.

        So do those of a codec that nobody has named where it would not be exact, or ``op`` is no mean or sum.
        """
        self._begin()
        # What several passes have summed is in float32, and has more bits than the codec.
        if unit.name in self._halves and (unit.summed or _kind(op) not in (None, _MEAN, _SUM)):
            return True
        return self._reducer.plain(unit.present)

    def reduced(self, unit: ParamGroup, table: Tensor, out: Tensor) -> None:
        """FSDP2's own collective has done it."""
        for name in unit.present:
            nbytes = unit.specs[name].numel * table.dtype.itemsize / 2  # a reduce-scatter is half an all-reduce
            self.meters[name].would_send(nbytes, self._shard.size)
            self.meters[name].add_sent(2 * (self._shard.size - 1) / self._shard.size * nbytes)
        self._seen(out)

    def reduced_across(self, unit: ParamGroup, flat: Tensor) -> None:
        """The same between replicas: the process group's own collective has done it, of this rank's shard."""
        assert self._replicas is not None
        size, shards = self._replicas.inter.size, self._shard.size
        for name in unit.present:
            rows = reduce_scatter.chunks(unit.specs[name], shards)[self._shard.rank]
            nbytes = rows.spec.numel * flat.dtype.itemsize
            self.meters[name].would_send(nbytes, size)
            self.meters[name].add_sent(2 * (size - 1) / size * nbytes)
        self._seen(flat)

    def to_owners(self, unit: ParamGroup, table: Tensor, out: Tensor, op: Any) -> None:
        """A unit's gradients, (P·n,), of which ``out``, (n,), gets this rank's mean or sum.

        Raises:
            PeerLost: a rank did not come.
            CommlibError: a parameter has a gradient that had none when commlib was attached.
        """
        self._begin()
        scale = {_MEAN: 1 / self._shard.size, _SUM: 1.0}.get(_kind(op))
        table = table.view(self._shard.size, -1)
        items = self._reducer.for_owners(unit, table)
        trip = ReduceScatter().rounds(items, table, out, self._shard, self._factor(scale, op))
        self.steps.submitted(self._go(self._sequencer, unit, trip, out), last=False)
        self._seen(out)

    def across(self, unit: ParamGroup, flat: Tensor, op: Any) -> None:
        """A unit's shard, (n,), already reduced inside a replica, becomes the mean or sum over all replicas."""
        assert self._replicas is not None
        self._begin()
        between = self._replicas.inter
        factor = self._factor({_MEAN: 1.0, _SUM: float(between.size)}.get(_kind(op)), op)
        routes = self._reducer.for_replicas(unit, flat, self._replicas)
        trip = lockstep([EXCHANGES[name].rounds(items, between, None) for name, items in routes.items()])
        self.steps.submitted(self._go(self._between, unit, trip, flat), last=False)
        if factor != 1.0:
            flat.mul_(factor)
        self._seen(flat)

    def values(self, unit: ParamGroup, part: Tensor, out: Tensor) -> None:
        """This rank's chunks of a unit's parameters, (n,), to all: ``out``, (P·n,), the same bits on every rank."""
        specs = [LayerSpec(s.name, s.shape, part.dtype, self.device) for s in unit.gathered()]
        meters, arena = [self.value_meters[s.name] for s in specs], self._reducer.arena(("values", unit.name))
        codecs = [self._codecs.get(s.name) for s in specs]
        trip = parameters.rounds(specs, codecs, part, out, self._shard, meters, arena)
        self._go(self._sequencer, unit, trip, out, "parameters of ")

    def own(self, unit: ParamGroup, what: str, call: Callable[[bool], Any], *, between: bool = False) -> None:
        """FSDP2's own collective of a unit is through; if it fails, with an error that names who is missing.

        Args:
            unit: its unit.
            what: it carries.
            call: makes it, given whether it shall return its work, or wait by itself.
            between: replicas, and not those that share the parameters out.
        """
        group, key, world = self._calls[between]
        looks = not waits_on_stream(group, self.device)  # else this thread does not wait
        work = None
        try:
            with self._waiting():
                work = call(looks)
                if looks and work is not None:
                    wait(self._future_of(work), self.meanwhile)
        except CommlibError:
            raise
        except RuntimeError as error:
            why = explained(group, key, world, e := error if work is None else reason(work, error))
            me = f"rank {world.rank} of {world.size}"
            lost = PeerLost(f"{me} could not exchange {what} of {unit.name} in step {self.steps.count}: {why}")
            raise self._sequencer.give_up(lost) from e

    def codec_of(self, name: str) -> str:
        """Codec by which a parameter's values come, as text; empty: as they are."""
        return str(self._codecs.get(name, ""))

    def close(self) -> None:
        """Ends the threads."""
        self._sequencer.close()
        self._between.close()

    def parts(self) -> tuple[Any, ...]:
        """Sources that a trace records."""
        return (self._sequencer, *([self._between] if self._replicas else []), self.steps)

    # -- a step ---------------------------------------------------------------------------------

    def _begin(self) -> None:
        this = torch._C._current_graph_task_id()
        if this == self._pass:
            return
        self.steps.begin(remembers=self._reducer.remembers)  # a pass before it that broke off is given up
        self.peers.number += 1
        if self.peers.why:
            self.peers.begin(*self._place())
        self.store.rescale(self._scale.now())
        self._flags, self._pass = [], this
        if not at_end_of_backward(self._end):
            raise CommlibError("FSDP2 reduces gradients outside of a backward pass: commlib cannot tell steps apart")

    def _future_of(self, work: Any) -> torch.futures.Future[Any]:
        """Future of a work; Gloo's reduce-scatter has none, knows no deadline, nor whether it is through."""
        with contextlib.suppress(RuntimeError):
            found: torch.futures.Future[Any] = work.get_future()
            return found
        future: torch.futures.Future[Any] = torch.futures.Future()

        def through() -> None:
            try:
                work.wait()
                future.set_result(None)
            except Exception as e:
                future.set_exception(e)

        self._waiter.submit(through)
        return future

    def _seen(self, out: Tensor) -> None:
        """Whether this part of the step is finite, as a number that is 0 or NaN, without waiting for the device."""
        if self.steps.watched:
            ends = torch.stack(torch.aminmax(out)) if out.numel() else out.new_zeros(1)
            self._flags.append((ends.float() * 0).sum())

    def _end(self) -> None:
        """The backward pass has ended: all ranks hear of each other's parts."""
        if self.steps.watched:
            mine = torch.stack(self._flags).sum().view(1)
            heard = torch.empty(self._shard.size, dtype=torch.float32, device=self.device)
            call = AllGather(heard.view(torch.uint8), mine.view(torch.uint8))
            future = self._sequencer.submit(f"the verdict on step {self.steps.count}", iter([[call]]), heard)
            self._wait(future)
            self.steps.check(heard)
        else:
            future = _done(self.device)
        self.steps.submitted(future, last=True)
        self.peers.check()
        if (monitor := self._monitor()) is not None:
            monitor.exchanged(self.steps.count, joined=False, meanwhile=self.meanwhile)
        if self._chooser is not None and self.steps.count >= self._dense_steps and self._chooser.exchanged():
            self._reducer.plan, self._codecs = self._chooser.plan(), self._chooser.values()
            self._halves = self._chooser.exact()

    def _waiting(self) -> contextlib.AbstractContextManager[None]:
        monitor = self._monitor()
        return contextlib.nullcontext() if monitor is None else monitor.waiting()

    def _wait(self, future: torch.futures.Future[Tensor]) -> None:
        with self._waiting():
            wait(future, self.meanwhile)

    # -- the process group ----------------------------------------------------------------------

    def _sequenced(self, group: Any, key: str, world: World, lanes: Sequence[tuple[Scope, ...]]) -> Sequencer:
        made = make_sequencer(group, key, world, self.device)
        lay(made, lanes, group, Siblings(group, self.device), Throttle(None, 0))
        close_at_exit(self, made.close)
        return made

    def _go(
        self, sequencer: Sequencer, unit: ParamGroup, rounds: Rounds, result: Tensor, what: str = ""
    ) -> torch.futures.Future[Tensor]:
        future = sequencer.submit(f"{what}{unit.name} of step {self.steps.count}", rounds, result)
        self._wait(future)
        return future

    def meanwhile(self) -> None:
        """Answers other ranks, in both groups; a wait calls it every half second.

        Raises:
            PeerLost: another rank has given up.
            PlanMismatch: ranks are at different steps.
        """
        self.peers.answer(*self._place())

    def _place(self) -> tuple[Mapping[str, str], str]:
        """Terms that must be the same on all ranks in this step, and its name in errors."""
        return {"step": str(self.steps.count)}, f"exchange gradients of step {self.steps.count}"

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
    done: torch.futures.Future[Tensor] = streams.future(device)
    streams.complete(done, torch.empty(0, dtype=torch.float32, device=device), device)
    return done


def _nobody() -> None:
    return None
