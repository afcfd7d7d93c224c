"""What may change while a model trains: the plan in force (``swap``), and whether there is one at all (``detach``)."""

from __future__ import annotations

import abc
import dataclasses
import logging
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from commlib.checkpoint.state_dict import needed_slots
from commlib.codecs.memory_store import MemoryStore
from commlib.codecs.registry import warm
from commlib.ddp.buckets import BucketPlanner
from commlib.ddp.config import AttachConfig
from commlib.ddp.hook_slot import HookSlot
from commlib.ddp.observer import PassiveObserver
from commlib.ddp.resources import Resources
from commlib.errors import PeerLost
from commlib.exchange.factors.layers import FactorLayers
from commlib.exchange.hierarchy import Hierarchy
from commlib.exchange.sequencer import Sequencer
from commlib.exchange.step_commit import StepCommit
from commlib.groups.handshake import agree, meeting_place, publish_failure
from commlib.groups.world import World
from commlib.monitoring.log import Loggable
from commlib.planning.manager.manager import Manager
from commlib.planning.node_hierarchy import fit
from commlib.planning.plan import Plan
from commlib.planning.policy import Policy
from commlib.planning.route import Rules
from commlib.server.worker.push_pull import Servers

_log = logging.getLogger("commlib")


class LiveChanges(Loggable):
    """The part of :class:`commlib.HookState` that can be changed between two steps."""

    world: World
    door: HookSlot
    _group: Any
    _key: str
    _timeout: float
    _min_size: int
    _levels: Hierarchy | None
    _about: str
    _servers: Servers | None
    _terms: Mapping[str, object]
    _plan: Plan
    _store: MemoryStore
    _steps: StepCommit
    _sorter: BucketPlanner
    _wiring: Resources
    _lookout: PassiveObserver | None = None

    # -- what a user calls ----------------------------------------------------------------------

    def swap(self, compressor: Rules | Policy | Plan) -> None:
        """From the next step on gradients travel otherwise. Collective; between two steps, after the same one on all.

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
            self._steps.settle()
            setup = self._setup(module, compressor, live=True)
            self._wiring.refuse(setup)
            factors = self._layers(module, setup)
        except Exception as e:
            publish_failure(self._group, key, self.world, e)
            raise
        self._meet(key, "swap", setup.terms(factors, self._terms))
        self._turn(setup, factors, key)
        self._store.forget(needed_slots(self._plan, self.world, self._levels))
        self._hook_if_needed()

    def detach(self) -> None:
        """From the next backward pass on DDP exchanges by itself. Collective, between two steps; again: nothing.

        Plan, residuals and statistics stay readable here; :meth:`state_dict` can be loaded by what is attached next.
        What is held back is not sent (a warning is logged): ``swap("none")`` and one more step before would send it.
        Ends threads, a trace and a log, and leaves servers.

        Raises:
            PlanMismatch: another rank does something else, or at another step; nothing is changed.
            PeerLost: a rank did not come in time. This model exchanges nothing more.
        """
        if self.door.attached is not self:
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
        if self._lookout is not None:
            self._lookout.remove()
        self.door.attached = None
        self._plan = self._plan.noted("detached: DDP exchanges by itself")
        self._end_trace()
        self._wiring.release()

    def close(self) -> None:
        """Ends threads, a trace and a log; leaves servers. (A further backward pass would start threads again.)"""
        self._wiring.close()
        self._end_trace()

    # -- a plan comes into force ----------------------------------------------------------------

    def _setup(self, module: nn.Module, compressor: Rules | Policy | Plan, *, live: bool = False) -> AttachConfig:
        """What the user's rules come to; nothing is touched yet."""
        setup = AttachConfig.of(module, self._group, compressor, self._min_size, self._levels, self._servers, idle=live)
        warm(setup.codecs(), setup.device)
        return dataclasses.replace(setup, plan=fit(setup.plan, self._levels, self._about))

    def _layers(self, module: nn.Module, setup: AttachConfig) -> FactorLayers | None:
        """Linear layers whose rows may be caught, without taps yet."""
        on, seeds = weakref.WeakMethod(self._sorter.with_factors), weakref.WeakMethod(self._sorter.row_seeds)
        routes, watched = setup.row_routes(), setup.chosen_later
        return FactorLayers.of(module, setup.layers, self.world, on, seeds, routes, watched=watched)

    def _turn(self, setup: AttachConfig, factors: FactorLayers | None, key: str) -> None:
        """All ranks have agreed."""
        self._wiring.turn(self, setup, factors, key, self._sorter.meters)
        self._plan = setup.plan
        self._parts = tuple(p for p in (self._sequencer, self._steps, self._manager, self._lookout) if p is not None)
        self._record(self._trace)

    def _whole(self, doing: str) -> nn.Module:
        """The model, if there is something to change, and nothing has gone wrong.

        Raises:
            ValueError: there is not.
            CommlibError: what had gone wrong.
        """
        module = self._traced_module()
        if self.door.attached is not self or module is None:
            raise ValueError(f"{doing}: this has been detached; commlib.attach(ddp, …) makes another")
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
        return self._wiring.sequencer

    @property
    def _factors(self) -> FactorLayers | None:
        return self._wiring.factors

    @property
    def _manager(self) -> Manager | None:
        return self._wiring.manager

    @abc.abstractmethod
    def exchange(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """Same contract as :meth:`commlib.ddp.hook_slot.Attachable.exchange`."""

    @abc.abstractmethod
    def _hook_if_needed(self) -> None:
        """DDP gets the hook as soon as there is something for that to do."""
