"""Training by local steps, in a loop that stays as it is but for one line.

What local steps are asked to do, checked before anybody waits.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from commlib.ddp.state import HookState
from commlib.errors import CheckpointMismatch, CommlibError
from commlib.groups.coordinator import Coordinator
from commlib.groups.handshake import agree, meeting_place
from commlib.groups.process_groups import begin_alike, group_of
from commlib.local_sgd.fragments import Fragment, cut
from commlib.local_sgd.outer_optimizers import OuterOptimizer, make
from commlib.local_sgd.sync_schedule import SyncSchedule
from commlib.planning.policy import policy_of
from commlib.planning.route import Rules
from commlib.runtime.amp import mend
from commlib.runtime.layers import SubModel, inside, refuse_complex, refuse_sparse, trained_parameters
from commlib.runtime.streams import accelerator
from commlib.telemetry.stats import Stats


def apart(model: nn.Module, state: HookState, ranks: int) -> int:
    """How many take steps of their own: ranks; or nodes, if each is one DDP."""
    if not isinstance(model, DistributedDataParallel):
        return ranks
    levels, together = state._levels, dist.get_process_group_ranks(model.process_group)
    if levels is None or len(together) != len(levels.local_ranks):
        size = 1 if levels is None else len(levels.local_ranks)
        raise ValueError(f"a node has {size} rank(s), and DDP has {len(together)}: give it a process group of a node's")
    return levels.inter.size


def check_delay(pace: SyncSchedule, fragments: int, delay: int, mix: float, rule: OuterOptimizer) -> None:
    if not 0 <= delay < pace.tau:
        raise ValueError(f"delay is 0 steps or more, and less than tau={pace.tau}, got {delay}")
    if not 0 <= mix < 1:
        raise ValueError(f"mix must be in [0, 1), got {mix}")
    if pace.auto and (delay or fragments > 1):
        raise ValueError("tau=auto measures meetings of the whole model: fragments and delay need a number of steps")
    if rule.apart and delay:
        raise ValueError(f"{rule.name} keeps ranks apart by itself: it has no delay")


_log = logging.getLogger("commlib")
_WARM = 3  # first steps of a run, which are slow


class LocalSteps:
    """Ranks train by themselves, and meet every so many steps::

        optimizer = torch.optim.AdamW(model.parameters())
        with commlib.LocalSteps(model, "diloco", tau=100, optimizer=optimizer) as local:
            for x, y in batches:
                optimizer.zero_grad()
                loss_fn(model(x), y).backward()
                optimizer.step()
                local.step()

    All ranks begin with the parameters and buffers of the first. At a meeting they exchange how far each has gone, by
    any codec with its residual, and go on from where the rule says (:mod:`commlib.local_sgd.outer_optimizers`);
    optimizers, and buffers such as batch norm's, stay each rank's own. A difference that is not finite changes nothing:
    all ranks go back to where they met last (:attr:`refused`).

    With ``fragments`` parts of the model meet one after another within τ steps, and with ``delay`` ranks go on while
    one is under way (streaming DiLoCo: Douillard et al., arXiv 2501.18512).

    Making one is collective, and so is a meeting: every rank must come to it, after the same number of steps.

    Args:
        model: not wrapped in DDP; or, with ``hierarchy``, in one whose ranks are those of a node.
        rule: a spec: ``average`` (SparkNet), ``bmuf``, ``diloco``, ``sparseloco``, ``elastic``; or a Rule.
        compressor: how differences travel: a spec string, a Compressor, a Route, or rules by layer. Default: as they
            are; with ``sparseloco`` 64 of every 4096 values, 2 bits each, and a residual that decays by 0.95.
        tau: τ, steps between two meetings; ``auto``, or ``auto:share=0.1``: the fewest of which meetings are no more
            than a share (1/6) of all time, by what ranks measure.
        fragments: of the model, of about as many bytes each.
        delay: steps that a rank goes on while a fragment is under way, less than τ.
        mix: of its own values a rank keeps so much when what was under way arrives; without delay nothing.
        optimizer: of this rank. What is not finite in its state is set to zero when a meeting is refused.
        hierarchy: True (nodes by torchrun's environment) or a DeviceMesh: ranks of a node have the same values, by a
            DDP of theirs, and nodes take local steps (docs/hierarchy.md).
        process_group: of the ranks; by default all.
        min_size: layers with fewer values are sent as they are; None: as in :class:`commlib.HookState`.
        seed: of the random codecs.
        timeout: seconds to wait for the other ranks here.

    Raises:
        ValueError, TypeError: a bad option, rule or model.
        PlanMismatch: another rank has another model, rule or τ; every rank raises it.
        PeerLost: a rank did not come in time.
    """

    def __init__(
        self,
        model: nn.Module,
        rule: str | OuterOptimizer = "average",
        compressor: Rules | None = None,
        *,
        tau: int | str = 50,
        fragments: int = 1,
        delay: int = 0,
        mix: float = 0.5,
        optimizer: Optimizer | None = None,
        hierarchy: Any = None,
        process_group: Any = None,
        min_size: int | None = None,
        seed: int = 0,
        timeout: float = 300.0,
    ) -> None:
        self._rule = make(rule)
        compressor = self._rule.codec if compressor is None else compressor
        if isinstance(model, DistributedDataParallel) and hierarchy is None:
            raise TypeError("the model is wrapped in DDP, which exchanges every step: give the module that it wraps")
        if policy_of(compressor) is not None:
            raise TypeError(f"{compressor} chooses by backward passes, which are not exchanged here: name a codec")
        refuse_sparse(inside(model), "LocalSteps")
        refuse_complex(inside(model), "LocalSteps")
        group = group_of(inside(model), process_group)
        ranks = dist.get_world_size(group)
        self._pace = SyncSchedule(tau, ranks, fragments)
        check_delay(self._pace, fragments, delay, mix, self._rule)
        self._delay, self._mix, self._optimizer = delay, mix if delay else 0.0, optimizer
        options: dict[str, Any] = {"process_group": group, "min_size": min_size, "seed": seed, "timeout": timeout}
        self._fragments: list[Fragment] = []
        for part in cut(trained_parameters(inside(model)), fragments):
            own = inside(model) if fragments == 1 else SubModel(inside(model), list(part))
            state = HookState(own, compressor, hierarchy=hierarchy, **options)
            count = apart(model, state, ranks)
            self._rule.check(count)
            self._fragments.append(Fragment(part, state, self._rule, count))
        self.world, self._closed = self._fragments[0].state.world, False
        place = f"{meeting_place(group, self.world)}/local"
        terms = {"rule": str(self._rule), "tau": self._pace.told, "streaming": f"{fragments}, {delay}, {self._mix:g}"}
        agree(group, place, terms, self.world, timeout)
        self._board = Coordinator(group, place, self.world, timeout) if self._pace.auto else None
        begin_alike(inside(model), group)
        for fragment in self._fragments:
            for block in fragment.blocks:
                block.take()
        self.steps = self.meetings = self.refused = 0
        self._mark: tuple[float, int] | None = None  # when steps began to be timed, and after how many

    def step(self) -> bool:
        """Count a local step; whether this was a meeting, or the end of one.

        Raises:
            PeerLost: a rank did not come to it.
        """
        self._check_open()
        self.steps += 1
        landed = self._land(self.steps)
        due = [self._fragments[f] for f in self._pace.step()]
        if self._mark is None and self.steps >= min(_WARM, self._pace.tau - 1):
            self._mark = time.monotonic(), self.steps
        if not due:
            return landed
        began = 0.0 if self._board is None else self._ready()
        for fragment in due:
            fragment.begin(self.steps, self._delay)
        landed |= self._land(self.steps)
        if self._board is not None:
            self._learn(began, self._board)
        return landed

    def meet(self) -> bool:
        """A meeting of all now, whenever the last one was; whether it counted.

        Raises:
            PeerLost: a rank did not come to it.
        """
        self._check_open()
        before = self.refused
        self._land(None)
        for fragment in self._fragments:
            fragment.begin(self.steps)
        self._land(None)
        self._pace.since = 0
        return self.refused == before

    @torch.no_grad()
    def take_shared(self) -> None:
        """Gives this rank's model the shared values, for good."""
        for fragment in self._fragments:
            fragment.go_back()

    @contextlib.contextmanager
    def shared(self) -> Iterator[None]:
        """Inside, this rank's model has the shared values, to evaluate them; afterwards its own again."""
        parameters = [p for fragment in self._fragments for block in fragment.blocks for p in block.parameters()]
        own = [p.detach().clone() for p in parameters]
        self.take_shared()
        try:
            yield
        finally:
            with torch.no_grad():
                for p, kept in zip(parameters, own, strict=True):
                    p.copy_(kept)

    @property
    def tau(self) -> int:
        """Steps between two meetings, now."""
        return self._pace.tau

    @property
    def pace(self) -> str:
        """Words that say when ranks meet, why, and what that gains by SparkNet's model."""
        return str(self._pace)

    @property
    def stats(self) -> list[Stats]:
        """Bytes and seconds of meetings, for each fragment."""
        return [fragment.state.stats() for fragment in self._fragments]

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has sent in all meetings."""
        return round(sum(s.wire_bytes for s in self.stats))

    def state_dict(self) -> dict[str, Any]:
        """All that a run needs to go on bit for bit, besides model and optimizer; each rank's is its own.

        Waits for what is under way.
        """
        return {
            "terms": self._terms(),
            "pace": self._pace.state_dict(),
            "counts": [self.steps, self.meetings, self.refused],
            "fragments": [fragment.state_dict() for fragment in self._fragments],
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over a state of the same rank.

        Raises:
            CheckpointMismatch: of another model, rule, τ or fragments.
        """
        for what, mine in self._terms().items():
            if state["terms"][what] != mine:
                raise CheckpointMismatch(f"this run has {what} {mine}, and the checkpoint is of {state['terms'][what]}")
        for fragment, kept in zip(self._fragments, state["fragments"], strict=True):
            fragment.load_state_dict(kept)
        self._pace.load_state_dict(state["pace"])
        self.steps, self.meetings, self.refused = state["counts"]
        self._mark = None

    def __enter__(self) -> LocalSteps:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close(meet=error is None)

    def close(self, *, meet: bool = True) -> None:
        """A last meeting, if there were steps since the one before, and the exchange ends. Again: nothing.

        Args:
            meet: without one after an error, when others may not come.
        """
        if self._closed:
            return
        try:
            if meet and any(f.lands is not None or f.left < self.steps for f in self._fragments):
                self.meet()
        finally:
            self._closed = True
            for fragment in self._fragments:
                fragment.state.close()

    @torch.no_grad()
    def _land(self, now: int | None) -> bool:
        """Apply what lands after this step, or (None) all that is under way; whether there was any."""
        there = [f for f in self._fragments if f.lands is not None and (now is None or f.lands <= now)]
        fit = [fragment.land(self._mix if now is not None else 0.0) for fragment in there]
        self.meetings += len(there)
        self.refused += fit.count(False)
        if not all(fit):
            self.take_shared()
            mend(self._optimizer)
            _log.warning("step %d: a rank's values are not finite: all go back to where they met last", self.steps)
        return bool(there)

    def _ready(self) -> float:
        """When this rank is ready to meet, and its device has done what it was told."""
        for block in self._fragments[0].blocks[:1]:
            if (by := accelerator(block.shared.device)) is not None:
                by.wait(block.shared.device)
        return time.monotonic()

    def _learn(self, began: float, board: Coordinator) -> None:
        """A round is over: how long is the next?"""
        now, (since, steps) = time.monotonic(), self._mark or (began, self.steps)
        self._pace.met((began - since) / max(1, self.steps - steps), now - began)
        if self._pace.follow(board.review(self._pace.mine(), self._pace.decide)) and self.world.rank == 0:
            _log.info("%s", self._pace)
        self._mark = time.monotonic(), self.steps

    def _terms(self) -> dict[str, str]:
        return {
            "rule": str(self._rule),
            "tau": self._pace.told,
            "fragments": str(len(self._fragments)),
            "delay": str(self._delay),
        }

    def _check_open(self) -> None:
        if self._closed:
            raise CommlibError("this has been closed: make new LocalSteps")
