"""State of compression for a model that ``fully_shard`` was called on."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

from torch import nn

from commlib.__version__ import __version__
from commlib.checkpoint.state_dict import StateDict, from_state, to_state
from commlib.codecs.registry import warm
from commlib.errors import check_numbers
from commlib.fsdp.chooser import CodecChooser
from commlib.fsdp.collectives import GradientReduceScatter, ParameterAllGather, ReplicaGroup
from commlib.fsdp.communicator import FsdpCommunicator
from commlib.fsdp.param_groups import units_of
from commlib.fsdp.plan import Replicas, choice_of
from commlib.groups.coordinator import Coordinator
from commlib.groups.handshake import agree, meeting_place, publish_failure
from commlib.groups.world import World
from commlib.monitoring.log import Log, Monitor
from commlib.planning.plan import Plan
from commlib.planning.policy import Exact, Policy
from commlib.planning.route import Rules
from commlib.runtime.amp import LossScale
from commlib.telemetry.recorder import Recording, Tracer
from commlib.telemetry.stats import HeldBytes, Stats


class ShardedState:
    """The state of compression for FSDP2 and ``replicate``: plan, residuals, statistics::

        for block in model.layers:
            fully_shard(block)
        fully_shard(model)
        comm = commlib.attach(model, "onebit", parameters="int8")

    Gradients go to the ranks that own them by the plan's codecs, with residuals by parameter name; under HSDP (a mesh
    of two dimensions) they are reduced as they are inside a replica, and go between replicas by the plan. Of a model
    that ``replicate`` was called on, DDP's successor, they go between all ranks. A unit whose layers all go as they are
    keeps FSDP2's own collective. Making one is collective.

    A codec with error feedback keeps, on each rank, two float32 values for each value of the *whole* model: what
    FSDP2 saves, such a codec takes again. Under HSDP it is of the rank's own shard only. ``ef=off`` keeps nothing.

    Args:
        model: ``fully_shard`` was called on it and on whatever inside; the root of all that is trained with it.
        compressor: a spec string (``"onebit"``, ``"int8:ef=off"``), a Compressor, or rules by layer. By default
            (:class:`commlib.Exact`) commlib chooses what loses nothing: bf16 for gradients that are computed in bf16
            and summed in float32, where that makes steps shorter. :class:`commlib.Lossy` names codecs that may be
            chosen as well, unit by unit.
        parameters: the codec by which values come from their owners in forward and backward passes, or rules by layer:
            ``"bf16"``, ``"int8"``; :class:`commlib.Lossy` has it chosen, for all units or none. Owners keep them as
            they are. None: as they are.
        scaler: the GradScaler in use, so that residuals follow when its scale moves.
        dense_steps: gradients of the first so many steps go uncompressed.
        min_size: layers with fewer values are not compressed; None: as in :class:`commlib.HookState`.
        seed: of random codecs.
        timeout: seconds to wait for the other ranks here.

    Raises:
        ValueError, TypeError: a bad option, rule or model.
        PlanMismatch: another rank attached something else; every rank raises it.
        PeerLost: a rank did not come in time.
        CommlibError: this PyTorch's FSDP2 cannot be given a communication.
    """

    def __init__(
        self,
        model: nn.Module,
        compressor: Rules | Policy | Plan = Exact(),
        *,
        parameters: Rules | Policy | None = None,
        scaler: Any = None,
        dense_steps: int = 0,
        min_size: int | None = None,
        seed: int = 0,
        timeout: float = 300.0,
    ) -> None:
        units = units_of(model)
        group = units[0].shard_group
        between = units[0].replicate_group
        shard = World(group.rank(), group.size())
        replicas = None if between is None else Replicas.of(shard, World(between.rank(), between.size()))
        meetings = [(g, meeting_place(g, w), w) for g, w in _groups(group, between, shard, replicas)]
        try:
            check_numbers(timeout, dense_steps=dense_steps, min_size=0 if min_size is None else min_size, seed=seed)
            specs = [spec for unit in units for spec in unit.specs.values()]
            chunks = [spec for unit in units for spec in unit.gathered()]
            if parameters is not None and units[0].alone is not None:
                raise ValueError("parameters: every rank has them all (replicate), and none are gathered: leave it out")
            halves = [unit.name for unit in units if unit.halves]
            given: dict[str, Any] = {"world": shard.size, "min_size": min_size, "replicas": replicas, "halves": halves}
            choice = choice_of(specs, chunks, compressor, parameters, **given)
            warm(choice.codecs(), units[0].inner.device)
            scale = LossScale(scaler, model)
        except Exception as e:
            for g, key, w in meetings:
                publish_failure(g, key, w, e)
            raise
        terms = {"commlib": __version__, "dense_steps": str(dense_steps), "seed": str(seed)}
        terms |= {"scaler": str(scaler is not None), "parameters": str({n: str(c) for n, c in choice.kept.items()})}
        terms |= {"policy": choice.policy, "choice": ", ".join([*choice.gradients, *choice.values])}
        for g, key, w in meetings:
            agree(g, key, terms | choice.plain.describe(), w, timeout)
        keys = [key for _, key, _ in meetings]
        chooser = None
        if choice.any:
            # Ranks of a replica wait for their first one, and that for those of other replicas.
            times = [timeout] if replicas is None else [2 * timeout, timeout]
            boards = [Coordinator(g, key, w, t) for (g, key, w), t in zip(meetings, times, strict=True)]
            chooser = CodecChooser(units, choice, boards, units[0].inner.device)
        kept: dict[str, Any] = {"dense_steps": dense_steps, "seed": seed, "codecs": choice.kept, "chooser": chooser}
        self._traffic = FsdpCommunicator(units, choice.plain, shard, replicas, keys, scale, **kept)
        self._replicas = replicas
        self.world = shard if replicas is None else World(replicas.rank, shard.size * replicas.inter.size)
        self._units, self._undo = units, list[Callable[[], None]]()
        self._steps = self._traffic.steps
        self._tracer = Tracer(model, self.world.rank, *self._traffic.parts())
        self._monitor = Monitor(self, self._tracer, self._traffic.device, self._traffic.gauge)
        self._traffic.told(self._monitor)
        if choice.kept or choice.any or not choice.plain.plain:
            self._follow()

    @property
    def plan(self) -> Plan:
        """Layer by layer, how gradients travel. Prints as a table."""
        return self._plan

    @property
    def settled(self) -> bool:
        """Whether the codecs are chosen: at once by rule, by measurement after some steps. The same on all ranks."""
        return self._traffic.settled

    @property
    def predicted_s(self) -> float | None:
        """Seconds that a step took with what was chosen by measurement, as the trials had it; None without."""
        return self._traffic.predicted_s

    def stats(self) -> Stats:
        """Gradients: bytes and seconds since attach, on this rank; ``dense_bytes`` is what FSDP2 would have sent.

        Under HSDP it is what goes between replicas. With nothing to compress nothing is attached, nor counted before
        :meth:`log_to`.
        """
        traffic, routes = self._traffic, {p.spec.name: (str(p.route), p.spec.numel) for p in self._plan}
        traffic.steps.settle()
        steps = traffic.steps
        return Stats.of(steps.count, steps.skipped, traffic.sent, routes, traffic.meters, memory=traffic.memory)

    def memory(self) -> HeldBytes:
        """As :meth:`commlib.HookState.memory`; what parameters travel in is among the buffers."""
        self._traffic.steps.settle()
        return self._traffic.memory

    def parameter_stats(self) -> Stats:
        """The same for what parameters cost: those of units of which any goes by a codec."""
        traffic, meters = self._traffic, self._traffic.value_meters
        traffic.steps.settle()
        routes = {n: (traffic.codec_of(n) or "none", 0) for n in meters}
        sent = sum(meter.sent() for meter in meters.values())
        return Stats.of(traffic.steps.count, traffic.steps.skipped, sent, routes, meters)

    def log_to(self, *targets: Any, every: int = 10) -> Log:
        """As :meth:`commlib.HookState.log_to`: of gradients. All that is exchanged is exposed, parameters too."""
        log = self._monitor.start(targets, every)
        if not self._undo:
            self._follow()  # everything goes as it is, and is seen
        return log

    def trace(self, path: str | os.PathLike[str]) -> Recording:
        """Record what this rank does from now on, as :meth:`commlib.HookState.trace`.

        Raises:
            TraceFailed: the file cannot be written. Nothing is recorded then.
            ValueError: a recording runs already.
        """
        return self._tracer.start(path)

    def state_dict(self) -> StateDict:
        """This rank's residuals and step count: copies in unscaled units, valid at any time between steps.

        Every rank has its own. ``torch.distributed.checkpoint`` saves all of them, and :func:`commlib.read_state`
        reads what this rank needs; with ``torch.save``, :func:`commlib.merge_state_dicts` makes one of all.
        """
        self._traffic.steps.settle()
        return to_state(self._plan, self._traffic.store, self.world, self._traffic.steps.count, self._replicas)

    def load_state_dict(self, state: StateDict, *, drop_residuals: bool = False) -> None:
        """Takes over a state: this rank's own (same mesh and codecs), or a merged one (any).

        Args:
            state: from :meth:`state_dict`, :func:`commlib.read_state` or :func:`commlib.merge_state_dicts`.
            drop_residuals: take only the step count; gradient that was not sent yet is lost.

        Raises:
            CheckpointMismatch: another model, or ranks missing; nothing is changed then.
        """
        traffic = self._traffic
        traffic.steps.settle()
        plan, store = self._plan, traffic.store
        count = from_state(state, plan, store, self.world, self._replicas, drop_residuals=drop_residuals)
        traffic.steps.resume(count)
        if not store.empty and not self._undo:
            self._follow()  # what is held back goes out, though everything goes as it is
        traffic.peers.why = "has loaded a state" if self._undo else ""

    def discard_step(self) -> None:
        """Declares that the optimizer will not apply the step just exchanged: it leaves no trace in any residual.

        Non-finite steps are discarded without it. Call it on every rank, before the next backward pass.
        """
        if self._traffic.steps.discard():
            self._traffic.peers.why = "has discarded a step"

    def detach(self) -> None:
        """Gives the model back to FSDP2's own collectives, and ends the threads; :meth:`state_dict` still works.

        ``commlib.attach`` may then be called again. On every rank, between two steps.
        """
        for undo in reversed(self._undo):
            undo()
        self._undo = []
        self.close()

    def close(self) -> None:
        """Ends the threads, and a trace. (A further backward pass would start threads again.)"""
        self._traffic.close()
        self._monitor.end()

    @property
    def _plan(self) -> Plan:
        return self._traffic.plan

    def _follow(self) -> None:
        """Every unit's gradients go by here, or are seen: a step leaves nothing behind unless all of it is finite."""
        for unit in self._units:
            self._undo += [
                unit.watch(),
                unit.to_owners(functools.partial(GradientReduceScatter, self._traffic, unit)),
                unit.to_all(functools.partial(ParameterAllGather, self._traffic, unit)),
            ]
            if self._replicas is not None:
                self._undo.append(unit.across(functools.partial(ReplicaGroup, self._traffic, unit)))


def _groups(group: Any, between: Any, shard: World, replicas: Replicas | None) -> list[tuple[Any, World]]:
    """Where ranks meet: over the shards, and over the replicas; so all of a mesh agree."""
    return [(group, shard), *([] if replicas is None else [(between, replicas.inter)])]
