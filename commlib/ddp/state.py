"""The communication hook: what it keeps between steps, and a step, bucket by bucket."""

# No `from __future__ import annotations` here: DDP compares the hook's annotations with the types themselves.
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from commlib.checkpoint.state_dict import StateDict, from_state, to_state
from commlib.codecs.memory_store import MemoryStore
from commlib.ddp.buckets import BucketPlanner
from commlib.ddp.compat import CopiedState, nobody
from commlib.ddp.hook_slot import HookSlot, give
from commlib.ddp.live import LiveChanges
from commlib.ddp.observer import Buckets, Fence, PassiveObserver, visible
from commlib.ddp.resources import Resources
from commlib.errors import PeerLost, check_numbers
from commlib.exchange.rate_limit import RateLimit, check_limit
from commlib.exchange.step_commit import StepCommit
from commlib.groups.handshake import agree, answer_roll_call, meeting_place, publish_failure
from commlib.groups.process_groups import deadline, group_of
from commlib.groups.world import World
from commlib.planning.node_hierarchy import find
from commlib.planning.plan import Plan
from commlib.planning.policy import Exact, Policy
from commlib.planning.route import Rules
from commlib.runtime.amp import LossScale
from commlib.runtime.autograd import at_end_of_backward, untraced, wait
from commlib.runtime.layers import inside, name_of, trained_parameters
from commlib.server.worker.push_pull import Servers
from commlib.telemetry.stats import Meter, Stats


class HookState(LiveChanges):
    """The state of commlib's DDP communication hook: plan, residuals, statistics.

    ``commlib.attach(ddp, …)`` makes one and registers it; in PyTorch's own style::

        ddp.register_comm_hook(commlib.HookState(ddp, "onebit"), commlib.hook)

    Making one is collective: every rank of the group must do it, in the same order for several models.

    Args:
        module: the DDP module, or the module inside it.
        compressor: :class:`Exact` (or ``"auto"``) or :class:`Lossy`, which choose a route for each layer by
            measurement; or a spec string (``"onebit"``, ``"topk:ratio=0.01@gather"``), a Compressor, a Route, or rules:
            a mapping from name patterns to those (the first that matches decides, no match is dense); or a Plan.
        process_group: the DDP's own, or one of the same ranks; by default the DDP's (the default group, if
            ``module`` is not wrapped).
        scaler: the GradScaler in use, so that residuals follow when its scale moves.
        dense_steps: the first so many steps are exchanged uncompressed.
        min_size: layers with fewer values stay dense.
        seed: of the random codecs.
        timeout: seconds to wait for the other ranks here.
        limit: of what this rank sends, as ``"50mbit"`` or a :class:`RateLimit`; the same on every rank. CPU, Gloo.
        hierarchy: True (nodes by torchrun's environment) or a DeviceMesh of dimensions (nodes, local): gradients are
            summed inside a node, and routes go between nodes (docs/hierarchy.md). None: flat.
        servers: for the route ``push_pull``: ``"HOST:PORT"``, ``"embedded"`` or a :class:`Servers` (docs/server.md).
        check_replicas: every so many steps compare all ranks' parameters, bit for bit; a backward pass may raise
            ReplicasDiverged then, on all ranks (docs/watching.md). 0: never.

    Raises:
        ValueError, TypeError: a bad option, rule or model.
        PlanMismatch: another rank attached something else; every rank raises it.
        PeerLost: a rank did not come in time.
    """

    def __init__(
        self,
        module: nn.Module,
        compressor: Rules | Policy | Plan = Exact(),
        *,
        process_group: Any = None,
        scaler: Any = None,
        dense_steps: int = 0,
        min_size: int = 1024,
        seed: int = 0,
        timeout: float = 300.0,
        limit: RateLimit | str | None = None,
        hierarchy: Any = None,
        servers: Servers | str | None = None,
        check_replicas: int = 0,
    ) -> None:
        self._group = group_of(module, process_group)
        self.world = World(dist.get_rank(self._group), dist.get_world_size(self._group))
        self._key = meeting_place(self._group, self.world)
        self._timeout, self._min_size, self._dense_steps, self._shadow = timeout, min_size, dense_steps, False
        self._traces(module, self.world.rank)
        try:
            check_numbers(timeout, dense_steps=dense_steps, min_size=min_size, seed=seed, check_replicas=check_replicas)
            limit, self._servers = RateLimit.of(limit), Servers.of(servers, limited=limit is not None)
            self._levels, self._about = find(hierarchy, self._group, self._key, self.world, timeout)
            setup = self._setup(module, compressor)
            check_limit(limit, setup.device, deadline(self._group, setup.device))
            self._scale, self._store = LossScale(scaler, module), MemoryStore()
            self._steps = StepCommit(self._store)
            kept: dict[str, Any] = {"dense_steps": dense_steps, "seed": seed}
            self._sorter = BucketPlanner(setup.specs, self.world, self._levels, self._store, self._steps, **kept)
            factors = self._layers(module, setup)
        except Exception as e:
            publish_failure(self._group, self._key, self.world, e)
            raise
        given = {"scaler": None if scaler is None else "given", "limit": limit, "servers": self._servers}
        self._terms = kept | given | {"check_replicas": check_replicas}
        agree(self._group, self._key, setup.terms(factors, self._terms), self.world, timeout)
        self._names = {id(p): n for n, p in trained_parameters(inside(module)).items()}
        where = self._group, self._key, self.world, setup.device, self._levels, self._about
        self._wiring = Resources(*where, limit, self._servers, timeout)
        weakref.finalize(self, self._wiring.close, wait=False)
        self._turn(setup, factors, self._key)
        self._shows(module, self._group, f"{self._key}/lost", setup.device, self._sorter.gauge, check_replicas)
        own = module.process_group if isinstance(module, DistributedDataParallel) else self._group
        self.door, self.untraced = HookSlot(own, self), untraced(HookState.reduce)

    def follow(self, ddp: DistributedDataParallel) -> None:
        """Have this DDP model exchange by this state: it gets the hook as soon as there is something for that to do.

        Until then DDP goes on as if nothing were attached, and its exchanges are only counted (docs/adr/0012).
        """
        self.door = give(ddp, self.door)
        self.door.attached = self
        if any(getattr(state, "door", None) is self.door for _, state in ddp._comm_hooks):
            return  # it is registered already
        if self._idle() and self._group is ddp.process_group and visible(ddp):
            told = self._fence, self._exchanged, (self.door, hook)
            self._lookout = PassiveObserver(ddp, self._sorter.meters, self.world, *told)
            self._parts += (self._lookout,)
            self._hook_if_needed()
        else:
            ddp.register_comm_hook(self.door, hook)

    # -- what a user calls ----------------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        """Layer by layer, how gradients travel now. Prints as a table."""
        return self._plan if self._manager is None else self._manager.measured(self._plan)

    @property
    def settled(self) -> bool:
        """Whether the routes are chosen: at once by rule, by measurement after some steps. The same on all ranks."""
        return self._manager is None or self._manager.settled

    @property
    def predicted_s(self) -> float | None:
        """Seconds a step should take, all between two steps included; None if nobody has predicted it."""
        return None if self._manager is None else self._manager.predicted_s

    def stats(self) -> Stats:
        """Bytes and seconds since attach, on this rank. On CUDA waits for what was timed."""
        self._steps.settle()
        routes = {p.spec.name: (str(p.route), p.spec.numel) for p in self._plan}
        steps, tracks = self._steps, self._sequencer.tracks
        sent = tracks.wire_bytes + (self._lookout.sent if self._lookout else 0.0)
        return Stats.of(steps.count, steps.skipped, sent, routes, self._sorter.meters, tracks.inter_bytes)

    def state_dict(self) -> StateDict:
        """This rank's residuals and step count: copies in unscaled units, valid at any time between steps.

        Every rank has its own; save them all. :func:`commlib.merge_state_dicts` makes one of them.
        """
        self._steps.settle()
        return to_state(self._plan, self._store, self.world, self._steps.count, self._levels)

    def load_state_dict(self, state: StateDict, *, drop_residuals: bool = False) -> None:
        """Takes over a state: this rank's own (same world size and routes), or a merged one (any).

        Args:
            state: from :meth:`state_dict` or :func:`commlib.merge_state_dicts`.
            drop_residuals: take only the step count; gradient that was not sent yet is lost.

        Raises:
            CheckpointMismatch: another model, or ranks missing; nothing is changed then.
        """
        self._steps.settle()
        count = from_state(state, self._plan, self._store, self.world, self._levels, drop_residuals=drop_residuals)
        self._steps.resume(count)
        self._hook_if_needed()

    def discard_step(self) -> None:
        """Declares that the optimizer will not apply the step just exchanged: it leaves no trace in any residual.

        Non-finite steps are discarded without it. Call it on every rank, before the next backward pass.
        """
        self._steps.discard()

    def __reduce__(self) -> tuple[Callable[[], CopiedState], tuple[()]]:
        """A copy of the model, or a pickle, is plain."""
        return nobody, ()

    # -- without a hook -------------------------------------------------------------------------

    def _idle(self) -> bool:
        """Whether a hook would have nothing to do: all goes as it is, by the shortest way, and nothing is held back."""
        return not (self._wiring.throttle.limit or self._levels) and self._store.empty and self._plan.plain

    def _fence(self, meter: Meter) -> None:
        """DDP has issued all it has to exchange, by itself. One value behind it shows who does not come.

        DDP waits in C++, where nobody could say so.
        """
        self._steps.begin(remembers=False)
        label, value = f"buckets of step {self._steps.count}", torch.zeros(1)
        one = Fence(value, [(meter, value.nbytes)])
        done = self._sequencer.here(label, one, value, self._meanwhile)
        self._steps.submitted(done, last=True)
        done.wait()

    def _exchanged(self, ended: float, buckets: Buckets) -> None:
        """That exchange is through."""
        self._waited_since(ended)
        if self._factors is not None:
            self._factors.end_step()
        if self._manager is not None:
            self._manager.saw(ended, buckets)
            self._replan()
        self._hook_if_needed()
        self._exchanged_all(self._steps.count, joined=False)

    def _hook_if_needed(self) -> None:
        if self._lookout is not None and not self._idle():
            self._lookout.leave()
        elif self._lookout is not None:
            self._lookout.watch(self._manager is not None and self._manager.decision.watch)

    # -- a step, bucket by bucket ---------------------------------------------------------------

    def reduce(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """Exchanges one bucket; DDP calls this (through :func:`hook`) in bucket order on every rank."""
        return self.door.reduce(bucket)

    def exchange(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """:meth:`reduce` while this is attached."""
        if bucket.index() == 0:
            self._steps.begin(remembers=self._plan.remembers or self._dense_steps > 0)
            self._store.rescale(self._scale.now())
            self._shadow = not at_end_of_backward(self._finish)
        buffer = bucket.buffer()
        plain = self._sorter.plain(bucket, self._plan)
        names = [name_of(p, self._names) for p in bucket.parameters()] if plain is None else plain.names
        if self._manager is not None:
            self._manager.bucket(names)
        label = f"bucket {bucket.index()} ({names[0]} … {names[-1]}) of step {self._steps.count}"
        if plain is not None and not self._steps.watched:
            future = self._sequencer.single(label, plain.mean(buffer, self.world), buffer)
        else:
            if plain is None:
                trips = self._sorter.rounds(bucket, names, self._plan, self._factors)
            else:
                trips = [self._sorter.checked(plain.rounds(buffer, self.world), buffer)]
            parts = [label] if len(trips) == 1 else [f"part {i} of {label}" for i in range(len(trips))]
            *_, future = [self._sequencer.submit(p, trip, buffer) for p, trip in zip(parts, trips, strict=True)]
        self._steps.submitted(future, last=bucket.is_last())
        if bucket.is_last() and self._factors is not None:
            self._factors.end_step()
        if bucket.is_last() and self._shadow:
            self._review()
        return future

    def _finish(self) -> None:
        """Runs at the end of the backward pass, before DDP asks for the buckets: there our errors keep their type.

        (DDP reads futures in C++, where a Python exception is a value that is no tensor.)
        """
        if self._manager is not None:
            self._manager.backward_ended()
        with self._waiting():
            for future in self._steps.under_way():
                wait(future, self._meanwhile)
        self._review()

    def _meanwhile(self) -> None:
        found = answer_roll_call(self._group, f"{self._key}/lost", self.world)
        if found:
            what = f"rank {self.world.rank} of {self.world.size} could not exchange buckets of step {self._steps.count}"
            raise self._sequencer.give_up(PeerLost(f"{what}: another rank has given up; {found}"))

    def _review(self) -> None:
        """Between two steps: routes may change now. (A rank that has joined comes here once it has issued its part.)"""
        if self._steps.complete:
            self._replan()
            self._exchanged_all(self._steps.count, joined=self._shadow)

    def _replan(self) -> None:
        """An exchange has come through: the manager may have another plan."""
        if self._manager is not None and self._manager.exchanged():
            self._plan = self._manager.plan(self._plan)


def hook(state: HookState | HookSlot, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
    """The communication hook: ``ddp.register_comm_hook(commlib.HookState(ddp, …), commlib.hook)``."""
    future: torch.futures.Future[torch.Tensor] = state.untraced(state, bucket)
    return future
