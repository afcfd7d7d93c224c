"""State of the communication hook: what it keeps between steps, a step bucket by bucket, and live changes."""

# No `from __future__ import annotations` here: DDP compares the hook's annotations with the types themselves.
import dataclasses
import logging
import os
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from commlib.checkpoint.state_dict import StateDict, from_state, needed_slots, to_state
from commlib.codecs.memory_store import MemoryStore
from commlib.codecs.registry import warm
from commlib.ddp.buckets import BucketPlanner
from commlib.ddp.compat import CommHooks, CopiedState, nobody
from commlib.ddp.config import AttachConfig
from commlib.ddp.hook_slot import HookSlot, give
from commlib.ddp.observer import Buckets, PassiveObserver, visible
from commlib.ddp.resources import Resources
from commlib.errors import PeerLost, check_numbers
from commlib.exchange.factors.layers import FactorLayers
from commlib.exchange.peer_wait import PeerWait
from commlib.exchange.rate_limit import RateLimit, check_limit
from commlib.exchange.sequencer import Sequencer
from commlib.exchange.step_commit import StepCommit
from commlib.groups.handshake import agree, announce, meeting_place, publish_failure
from commlib.groups.process_groups import deadline, group_of
from commlib.groups.world import World
from commlib.monitoring.log import Log, Monitor
from commlib.monitoring.replica_check import DriftGuard
from commlib.planning.manager.manager import Manager
from commlib.planning.node_hierarchy import find, fit
from commlib.planning.plan import Plan
from commlib.planning.policy import Exact, Policy
from commlib.planning.route import Rules
from commlib.runtime.amp import LossScale
from commlib.runtime.autograd import at_end_of_backward, untraced, wait
from commlib.runtime.exit import close_at_exit
from commlib.runtime.layers import inside, name_of, trained_parameters
from commlib.runtime.streams import Moment
from commlib.server.worker.push_pull import Servers
from commlib.telemetry.recorder import Recording, Tracer
from commlib.telemetry.stats import HeldBytes, Meter, Stats

_log = logging.getLogger("commlib")
_NONE = 1 << 62
"""Index above that of any bucket."""


class HookState:
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
        min_size: layers with fewer values stay dense; None: 1,024, but all are compressed by fp16 and bf16.
        seed: of the random codecs.
        timeout: seconds to wait for the other ranks here.
        limit: of what this rank sends, as ``"50mbit"`` or a :class:`RateLimit`; the same on every rank. CPU, Gloo.
        hierarchy: True (nodes by torchrun's environment) or a DeviceMesh of dimensions (nodes, local): gradients are
            summed inside a node, and routes go between nodes (docs/hierarchy.md). None: flat.
        servers: for the route ``push_pull``: ``"HOST:PORT"``, ``"embedded"`` or a :class:`Servers` (docs/server.md).
        check_replicas: every so many steps compare all ranks' parameters, bit for bit; a backward pass may raise
            ReplicasDiverged then, on all ranks (docs/watching.md). 0: never.
        verify: in one of so many steps a layer, drawn by lot, is held to its contract: a gradient that its rows make is
            compared with the true one, and of a codec with a residual the sum of what is sent and held back with what
            was given. A backward pass may raise WrongGradient then (docs/guarantees.md). 0: never.

    Raises:
        ValueError, TypeError: a bad option, rule or model.
        PlanMismatch: another rank attached something else; every rank raises it.
        PeerLost: a rank did not come in time.
    """

    _plan: Plan

    def __init__(
        self,
        module: nn.Module,
        compressor: Rules | Policy | Plan = Exact(),
        *,
        process_group: Any = None,
        scaler: Any = None,
        dense_steps: int = 0,
        min_size: int | None = None,
        seed: int = 0,
        timeout: float = 300.0,
        limit: RateLimit | str | None = None,
        hierarchy: Any = None,
        servers: Servers | str | None = None,
        check_replicas: int = 0,
        verify: int = 10_000,
    ) -> None:
        self._group = group_of(module, process_group)
        self.world = World(dist.get_rank(self._group), dist.get_world_size(self._group))
        self._key = meeting_place(self._group, self.world)
        self._timeout, self._min_size, self._dense_steps, self._shadow = timeout, min_size, dense_steps, False
        self._module = weakref.ref(module)
        self._reduced_over = getattr(module, "process_group", None)
        self._skips = bool(getattr(module, "skip_all_reduce_unused_params", False))
        self._index, self._joins = _NONE, False  # of the bucket before, in this step; whether ranks may join early
        self._tracer = Tracer(module, self.world.rank)
        self._observer: PassiveObserver | None = None
        try:
            check_numbers(
                timeout,
                dense_steps=dense_steps,
                min_size=0 if min_size is None else min_size,
                seed=seed,
                check_replicas=check_replicas,
                verify=verify,
            )
            limit, self._servers = RateLimit.of(limit), Servers.of(servers, limited=limit is not None)
            self._levels, self._about = find(hierarchy, self._group, self._key, self.world, timeout)
            setup = self._setup(module, compressor)
            check_limit(limit, setup.device, deadline(self._group, setup.device))
            self._scale, self._store = LossScale(scaler, module), MemoryStore()
            self._steps = StepCommit(self._store)
            kept: dict[str, Any] = {"dense_steps": dense_steps, "seed": seed, "verify": verify}
            self._buckets = BucketPlanner(setup.specs, self.world, self._levels, self._store, self._steps, **kept)
            factors = self._layers(module, setup)
        except Exception as e:
            publish_failure(self._group, self._key, self.world, e)
            raise
        given = {"scaler": None if scaler is None else "given", "limit": limit, "servers": self._servers}
        self._terms = kept | given | {"check_replicas": check_replicas}
        agree(self._group, self._key, setup.terms(factors, self._terms), self.world, timeout)
        self._names = {id(p): n for n, p in trained_parameters(inside(module)).items()}
        where = self._group, self._key, self.world, setup.device, self._levels, self._about
        self._resources = Resources(*where, limit, self._servers, timeout)
        place = self._group, self._key, self.world
        self._peers = PeerWait([place], setup.device, self._sequencer.give_up)
        self.besides: Mapping[str, str] = {}  # what must be the same on all ranks as they exchange, besides the count
        close_at_exit(self, self._resources.close)
        self._turn(setup, factors, self._key)
        guard = None
        if check_replicas:
            lost = f"{self._key}/lost"
            guard = DriftGuard(module, self._group, self.world, lost, check_replicas, setup.device)
        self._monitor = Monitor(self, self._tracer, setup.device, self._buckets.gauge, guard)
        own = module.process_group if isinstance(module, DistributedDataParallel) else self._group
        self.slot, self.untraced = HookSlot(own, self), untraced(HookState.reduce)
        if isinstance(module, DistributedDataParallel):
            module._comm_hooks = CommHooks(module._comm_hooks)

    def follow(self, ddp: DistributedDataParallel) -> None:
        """Have this DDP model exchange by this state: it gets the hook as soon as there is something for that to do.

        Until then DDP goes on as if nothing were attached, and its exchanges are only counted (docs/adr/0012).
        """
        self.slot = give(ddp, self.slot)
        self.slot.attached = self
        try:
            self._follow(ddp)
        except BaseException:  # a model to which attaching failed is as it was
            self.slot.attached = None
            self._resources.release()
            raise

    def _follow(self, ddp: DistributedDataParallel) -> None:
        if any(getattr(state, "slot", None) is self.slot for _, state in ddp._comm_hooks):
            return  # it is registered already
        if self._idle() and self._group is ddp.process_group and visible(ddp):
            told = self._begins, self._issued, self._exchanged, self._check_group, (self.slot, hook)
            self._observer = PassiveObserver(ddp, self._buckets.meters, self.world, *told)
            self._tracer.follow(*self._tracer.sources, self._observer)
            self._hook_if_needed()
        else:
            ddp.register_comm_hook(self.slot, hook)

    # -- what a user calls ----------------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        """Layer by layer, how gradients travel now. Prints as a table."""
        plan = self._plan if self._manager is None else self._manager.measured(self._plan)
        return plan if self._factors is None else plan.remarked(self._factors.remarks)

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
        sent = tracks.wire_bytes + (self._observer.sent if self._observer else 0.0)
        meters, inter = self._buckets.meters, tracks.inter_bytes
        return Stats.of(steps.count, steps.skipped, sent, routes, meters, inter, self.memory())

    def memory(self) -> HeldBytes:
        """Bytes that routes hold on this rank beyond what DDP does, by kind: residuals, other state, buffers."""
        self._steps.settle()
        return HeldBytes(*self._store.nbytes, self._buckets.nbytes)

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
        self._peers.why = "has loaded a state"
        self._hook_if_needed()

    def discard_step(self) -> None:
        """Declares that the optimizer will not apply the step just exchanged: it leaves no trace in any residual.

        Non-finite steps are discarded without it. Call it on every rank, before the next backward pass.
        """
        if self._steps.discard():
            self._peers.why = "has discarded a step"

    def trace(self, path: str | os.PathLike[str]) -> Recording:
        """Record what this rank does from now on, for Perfetto (ui.perfetto.dev) and chrome://tracing::

            with comm.trace("trace.json"):
                ...  # some steps

        or, without a block, until ``stop()`` of what this returns, until :meth:`close`, or the end of the process.
        Begin and stop between two steps.

        Each rank records for itself, waits for nobody, and writes a file on its own machine: rank 0 the one of this
        name, rank 1 ``trace.rank1.json`` beside it, and so on; or put ``{rank}`` into the path. ``commlib trace merge``
        makes one file of them. An empty one is written at once, so that it is known that it can be; it is filled when
        the recording stops, after an error, too. Of more than 262,144 events the newest are kept.

        Args:
            path: of the file; what is there is replaced.

        Raises:
            TraceFailed: it cannot be written there. Nothing is recorded then.
            ValueError: one is being recorded already.
        """
        return self._tracer.start(path)

    def log_to(self, *targets: Any, every: int = 10) -> Log:
        """Write down every so many steps what this rank's exchanges have cost since the last time::

            comm.log_to("run.jsonl")  # rank 1: run.rank1.jsonl; `commlib top` shows them while the run goes on
            comm.log_to("run.jsonl", SummaryWriter("runs/1"), every=100)

        until ``stop()`` of what this returns, the end of a ``with`` block, :meth:`close`, or the end of the process.
        Begin and stop between two steps. Each rank that is to be seen calls it, and waits for nobody.

        A file is appended to, so a run that is resumed goes on in it. Logging never ends a training: a target that
        cannot be written any more is left, with one warning. What is in an entry: docs/watching.md.

        Args:
            *targets: paths that end in ``.jsonl``: an entry a line; rank 0's has this name, rank 1's is
                ``run.rank1.jsonl`` beside it, or put ``{rank}`` into the path. Other paths: folders for TensorBoard,
                where every rank is a run (``rank0``, …). Or a ``SummaryWriter``, which stays open.
            every: steps from an entry to the next, those that are skipped too.

        Raises:
            ValueError: it logs already; there is no target, or a file of another kind; ``every`` below 1.
            TypeError: what is no target.
            LogFailed: a target cannot be written. Nothing is logged then.
            MissingDependency: a folder, and TensorBoard is not installed.
        """
        return self._monitor.start(targets, every)

    def swap(self, compressor: Rules | Policy | Plan) -> None:
        """Change the routes from the next step on. Collective; between two steps, after the same one on all.

        What layers hold back stays with them: a codec with error feedback takes it over, and by any other route it goes
        out with the next step. A momentum or a basis that only the old codec could read is dropped. The step count goes
        on, and so do warm-ups. ``limit``, ``hierarchy``, ``servers``, ``min_size`` and ``scaler`` are as attached.

        Args:
            compressor: as :func:`commlib.attach` takes it.

        Raises:
            ValueError, TypeError: a bad rule, or nothing is attached; the old plan stays in force, on all ranks.
            PlanMismatch: another rank swaps to something else, at another step, or could not; the old plan stays.
            PeerLost: a rank did not come in time. This model exchanges nothing more, for the others may have swapped.
        """
        key = meeting_place(self._group, self.world)
        try:
            module = self._whole("swap")
            if self._observer is not None:
                self._observer.check()
            self._steps.settle()
            setup = self._setup(module, compressor, live=True)
            self._resources.refuse(setup)
            factors = self._layers(module, setup)
        except Exception as e:
            publish_failure(self._group, key, self.world, e)
            raise
        self._meet(key, "swap", setup.terms(factors, self._terms))
        self._turn(setup, factors, key)
        self._store.forget(needed_slots(self._plan, self.world, self._levels))
        self._hook_if_needed()

    def detach(self) -> None:
        """Give the model back to DDP, from the next backward pass on. Collective, between two steps; a second call does
        nothing.

        Plan, residuals and statistics stay readable here; :meth:`state_dict` can be loaded by what is attached next.
        What is held back is not sent (a warning is logged): ``swap("none")`` and one more step before would send it.
        Ends threads, a trace and a log, and leaves servers.

        Raises:
            PlanMismatch: another rank does something else, or at another step; nothing is changed.
            PeerLost: a rank did not come in time. This model exchanges nothing more.
        """
        if self.slot.attached is not self:
            return
        key = meeting_place(self._group, self.world)
        try:
            self._whole("detach")
            self._steps.settle()
        except Exception as e:
            publish_failure(self._group, key, self.world, e)
            raise
        self._meet(key, "detach", {})
        if held := list(dict.fromkeys(name for name, *_ in self._store.held())):
            some = ", ".join(held[:3]) + (", …" if len(held) > 3 else "")
            _log.warning(
                "detached while %d layers hold gradient back (%s): it is in state_dict(), and is sent only if that is "
                'loaded into what is attached next; swap("none") and one more step before detach() would have sent it',
                len(held),
                some,
            )
        if self._observer is not None:
            self._observer.remove()
        self.slot.attached = None
        vars(self._module()).pop("join_hook", None)
        self._plan = self._plan.noted("detached: DDP exchanges by itself")
        self._monitor.end()
        self._resources.release()

    def close(self) -> None:
        """Ends threads, a trace and a log; leaves servers. (A further backward pass would start threads again.)"""
        self._resources.close()
        self._monitor.end()

    def __reduce__(self) -> tuple[Callable[[], CopiedState], tuple[()]]:
        """A copy of the model, or a pickle, is plain."""
        return nobody, ()

    # -- a plan comes into force ----------------------------------------------------------------

    def _setup(self, module: nn.Module, compressor: Rules | Policy | Plan, *, live: bool = False) -> AttachConfig:
        """Configuration that the user's rules come to; nothing is touched yet."""
        setup = AttachConfig.of(module, self._group, compressor, self._min_size, self._levels, self._servers, idle=live)
        warm(setup.codecs(), setup.device, reduced=setup.reduced())
        return dataclasses.replace(setup, plan=fit(setup.plan, self._levels, self._about))

    def _layers(self, module: nn.Module, setup: AttachConfig) -> FactorLayers | None:
        """Linear layers whose rows may be caught, without taps yet."""
        on, seeds = weakref.WeakMethod(self._buckets.with_factors), weakref.WeakMethod(self._buckets.row_seeds)
        sample = weakref.WeakMethod(self._buckets.verified_rows)
        routes, watched = setup.row_routes(), setup.chosen_later
        return FactorLayers.of(module, setup.layers, self.world, on, seeds, sample, routes, watched=watched)

    def _turn(self, setup: AttachConfig, factors: FactorLayers | None, key: str) -> None:
        """All ranks have agreed."""
        self._resources.turn(self, setup, factors, key, self._buckets.meters)
        self._plan = setup.plan
        self._tracer.follow(self._sequencer, self._steps, self._manager, self._observer)

    def _whole(self, doing: str) -> nn.Module:
        """The model, if there is something to change, and nothing has gone wrong.

        Raises:
            ValueError: there is not.
            CommlibError: what had gone wrong.
        """
        module = self._module()
        if self.slot.attached is not self or module is None:
            raise ValueError(f"{doing}: this state was detached; call commlib.attach(ddp, …) again")
        if self._sequencer.failed is not None:
            raise self._sequencer.failed
        return module

    def _meet(self, key: str, doing: str, terms: Mapping[str, str]) -> None:
        mine = {"call": doing, "step": f"{self._steps.count}, {self._steps.skipped} skipped", **terms}
        try:
            agree(self._group, key, mine, self.world, self._timeout, doing)
        except PeerLost as e:  # the others may come yet, and go on without this rank
            publish_failure(self._group, key, self.world, e)
            self._sequencer.give_up(e)
            raise

    @property
    def _sequencer(self) -> Sequencer:
        return self._resources.sequencer

    @property
    def _factors(self) -> FactorLayers | None:
        return self._resources.factors

    @property
    def _manager(self) -> Manager | None:
        return self._resources.manager

    # -- without a hook -------------------------------------------------------------------------

    def _idle(self) -> bool:
        """Whether a hook would have nothing to do: all goes as it is, by the shortest way, and nothing is held back."""
        return not (self._resources.throttle.limit or self._levels) and self._store.empty and self._plan.plain

    def _begins(self) -> None:
        """DDP is about to exchange by itself."""
        self._steps.begin(remembers=False)
        self._compare_steps()

    def _issued(self, works: list[Any], meter: Meter) -> None:
        """DDP has issued all it has to exchange, by itself. Whoever does not come is named here.

        DDP waits in C++, where nobody could say so.
        """
        done = self._sequencer.join(f"buckets of step {self._steps.count}", works, meter, self._meanwhile)
        self._steps.submitted(done, last=True)
        done.wait()

    def _exchanged(self, ended: Moment, buckets: Buckets) -> None:
        """That exchange is through."""
        self._monitor.waited_since(ended.host_s)
        if self._peers.found is not None:
            self._peers.check()
        if self._factors is not None:
            self._factors.end_step()
        if self._manager is not None:
            self._manager.saw(ended, buckets)
            self._replan()
        self._hook_if_needed()
        self._monitor.exchanged(self._steps.count, joined=False, meanwhile=self._meanwhile)

    def _hook_if_needed(self) -> None:
        if self._observer is not None and not self._idle():
            self._observer.leave()
        elif self._observer is not None:
            self._observer.watch(self._manager is not None and self._manager.decision.watch)

    # -- a step, bucket by bucket ---------------------------------------------------------------

    def reduce(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """Exchanges one bucket; DDP calls this (through :func:`hook`) in bucket order on every rank."""
        return self.slot.reduce(bucket)

    def exchange(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """:meth:`reduce` while this is attached."""
        first, self._index = bucket.index() <= self._index, bucket.index()
        if first:
            self._check_group()
            self._steps.begin(remembers=self._plan.remembers or self._dense_steps > 0)
            self._compare_steps()
            self._store.rescale(self._scale.now())
            self._shadow = not at_end_of_backward(self._finish)
        buffer = bucket.buffer()
        plain = self._buckets.plain(bucket, self._plan)
        names = [name_of(p, self._names) for p in bucket.parameters()] if plain is None else plain.names
        if self._manager is not None:
            self._manager.bucket(names)
        label = f"bucket {bucket.index()} ({names[0]} … {names[-1]}) of step {self._steps.count}"
        if plain is not None and not self._steps.watched:
            future = self._sequencer.single(label, plain.mean(buffer, self.world), buffer)
        else:
            if plain is None:
                trips = self._buckets.rounds(bucket, names, self._plan, self._factors)
            else:
                trips = [self._buckets.checked(plain.rounds(buffer, self.world), buffer)]
            parts = [label] if len(trips) == 1 else [f"part {i} of {label}" for i in range(len(trips))]
            *_, future = [self._sequencer.submit(p, trip, buffer) for p, trip in zip(parts, trips, strict=True)]
        self._steps.submitted(future, last=bucket.is_last())
        if self._factors is not None:
            self._factors.passed(names)
        if bucket.is_last():
            self._all_issued()
            if self._joins and self._shadow:  # DDP would wait in C++, where nobody answers another rank
                self.wait_for(self._steps.under_way())
            if self._shadow:
                self._review()
        return future

    def _check_group(self) -> None:
        """Raises ValueError if the model exchanges over another process group than when it was attached to."""
        ddp = self._module()
        if isinstance(ddp, DistributedDataParallel) and ddp.process_group is not self._reduced_over:
            raise ValueError(
                "the DDP model has another process group (_update_process_group) than when commlib was attached to it: "
                "call comm.detach() before the change, and commlib.attach(ddp, …) after it"
            )

    def before_join(self) -> None:
        """The model comes into a ``Join``, in which ranks drop out one by one: only a hook sees that."""
        self._joins = True
        if self._observer is not None:
            self._observer.leave()

    def _all_issued(self) -> None:
        """DDP has handed over all buckets of this step."""
        self._index = _NONE
        if self._factors is not None:
            self._factors.end_step()

    def _finish(self) -> None:
        """Runs at the end of the backward pass, before DDP asks for the buckets: there our errors keep their type.

        (DDP reads futures in C++, where a Python exception is a value that is no tensor.)
        """
        if self._manager is not None:
            self._manager.backward_ended()
        if self._skips and not self._steps.complete:  # DDP leaves out buckets that no rank uses, the last one, too
            self._steps.end()
            self._all_issued()
        with self._monitor.waiting():
            self.wait_for(self._steps.under_way())
        if self._buckets.faults:
            error = self._buckets.faults[0]
            announce(self._group, f"{self._key}/lost", f"rank {self.world.rank}: {error}")
            raise self._sequencer.give_up(error)
        self._review()

    def _compare_steps(self) -> None:
        """Before anything of an exchange is issued: if it may not be so, is every rank at this one?"""
        self._peers.number += 1
        if self._peers.why:
            self._peers.begin(*self._place())

    def _place(self) -> tuple[Mapping[str, str], str]:
        """Terms that must be the same on all ranks in this exchange, and its name in errors."""
        return {"step": str(self._steps.count), **self.besides}, f"exchange buckets of step {self._steps.count}"

    def wait_for(self, futures: Iterable[torch.futures.Future[Tensor]]) -> None:
        """Wait until these parts of an exchange are through, which may be none.

        Raises:
            PeerLost: a rank did not come.
            PlanMismatch: ranks are at different steps.
        """
        try:
            for future in futures:
                wait(future, self._meanwhile)
        finally:
            if self._peers.found is not None:
                self._peers.check()

    def _meanwhile(self) -> None:
        self._peers.answer(*self._place())

    def _review(self) -> None:
        """Let routes change between two steps. (A rank that has joined comes here once it has issued its part.)"""
        if self._steps.complete:
            self._replan()
            self._monitor.exchanged(self._steps.count, joined=self._shadow, meanwhile=self._meanwhile)

    def _replan(self) -> None:
        """An exchange has come through: the manager may have another plan."""
        if self._manager is not None and self._manager.exchanged():
            self._plan = self._manager.plan(self._plan)


def hook(state: HookState | HookSlot, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
    """The communication hook: ``ddp.register_comm_hook(commlib.HookState(ddp, …), commlib.hook)``."""
    future: torch.futures.Future[torch.Tensor] = state.untraced(state, bucket)
    return future
