"""A part of a model that meets by itself: its exchange, what all ranks share of it, and what is under way.

Order: every rank begins and ends the meetings of its fragments after the same steps. Each fragment has an exchange of
its own (a process group, a thread), so what several have under way at once may pass each other.

Parameters in rows: what all ranks share of them, how far this one has gone, and back.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.futures import Future

from commlib.ddp.state import HookState
from commlib.errors import CheckpointMismatch
from commlib.local_sgd.outer_optimizers import OuterOptimizer
from commlib.runtime.amp import finite

NBYTES = 25 << 20
"""Of a row, about: as DDP's buckets."""


@dataclasses.dataclass(frozen=True, eq=False)
class ParameterBlock:
    """Parameters of one dtype on one device.

    It is to an exchange what a bucket of DDP's is to a communication hook (``torch.distributed.GradBucket``).

    Attributes:
        number: of blocks.
        last: whether it is the last one.
        members: names and parameters.
        shared: (n,), values of all, one after another.
        delta: (n,), how far this rank has gone from them; an exchange makes the mean of all ranks' of it.
        slots: (n,) each, what a rule remembers.
    """

    number: int
    last: bool
    members: Mapping[str, nn.Parameter]
    shared: Tensor
    delta: Tensor
    slots: Mapping[str, Tensor]

    def index(self) -> int:
        """Number of the block."""
        return self.number

    def is_last(self) -> bool:
        """Whether it is the last one."""
        return self.last

    def buffer(self) -> Tensor:
        """The differences, (n,)."""
        return self.delta

    def gradients(self) -> list[Tensor]:
        """The differences, like parameters; parts of :meth:`buffer`."""
        return [part for _, part in self.views(self.delta)]

    def parameters(self) -> list[nn.Parameter]:
        """Parameters of the block, in the same order."""
        return list(self.members.values())

    def views(self, row: Tensor) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Parameters, and their parts of a row, (n,), in their shapes."""
        begin = 0
        for p in self.members.values():
            yield p, row[begin : begin + p.numel()].view(p.shape)
            begin += p.numel()

    def take(self) -> None:
        """Copy this rank's values into those that all ranks share."""
        for p, shared in self.views(self.shared):
            shared.copy_(p.detach())

    @torch.no_grad()
    def measure(self) -> None:
        """How far this rank has gone."""
        for (p, delta), (_, shared) in zip(self.views(self.delta), self.views(self.shared), strict=True):
            torch.sub(shared, p.detach(), out=delta)


def blocks_of(
    parameters: Mapping[str, nn.Parameter], slots: tuple[str, ...], nbytes: int = NBYTES
) -> list[ParameterBlock]:
    """All parameters, in their order for each dtype and device; shared is what this rank has."""
    rows: list[dict[str, nn.Parameter]] = []
    open_: dict[tuple[torch.dtype, torch.device], dict[str, nn.Parameter]] = {}
    for name, p in parameters.items():
        row = open_.get((p.dtype, p.device))
        if row is None or sum(q.nbytes for q in row.values()) + p.nbytes > nbytes:
            row = open_[p.dtype, p.device] = {}
            rows.append(row)
        row[name] = p
    return [_block(i, i == len(rows) - 1, row, slots) for i, row in enumerate(rows)]


def _block(number: int, last: bool, members: Mapping[str, nn.Parameter], slots: tuple[str, ...]) -> ParameterBlock:
    shared = torch.cat([p.detach().reshape(-1) for p in members.values()])
    kept = {name: torch.zeros_like(shared) for name in slots}
    return ParameterBlock(number, last, members, shared, torch.zeros_like(shared), kept)


class Fragment:
    """Blocks of parameters, and their exchange.

    Args:
        parameters: name → parameter.
        state: the exchange.
        rule: of local steps.
        ranks: that the rule counts.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], state: HookState, rule: OuterOptimizer, ranks: int
    ) -> None:
        self.state, self._rule, self._ranks = state, rule, ranks
        self.blocks = blocks_of(parameters, rule.slots)
        self.left = 0
        """The step after which it was on its way last."""
        self.lands: int | None = None
        """The step after which what is under way counts; None if nothing is."""
        self._futures: list[Future[Tensor]] = []
        self._apart: list[Tensor] = []

    def begin(self, now: int, delay: int = 0) -> None:
        """How far this rank has gone after step ``now`` is on its way to the others."""
        for block in self.blocks:
            block.measure()
        self._apart = [block.delta.clone() for block in self.blocks] if self._rule.apart else []
        self.state.besides = {"local step": str(now)}
        self._futures, self.lands = [self.state.reduce(block) for block in self.blocks], now + delay
        self.left = now

    def settle(self) -> None:
        """Waits for what is under way.

        Raises:
            PeerLost: a rank did not come.
            PlanMismatch: ranks have taken different numbers of steps.
        """
        self.state.wait_for(self._futures)
        self._futures = []

    def land(self, mix: float) -> bool:
        """Apply the exchange that was under way to the shared and this rank's values; returns whether all was finite.

        Args:
            mix: of this rank's values that it keeps, where it has gone on since.

        Raises:
            PeerLost: a rank did not come.
        """
        self.settle()
        self.lands = None
        if not finite(*(block.delta for block in self.blocks)):  # the same bits, so the same on all ranks
            return False
        for i, block in enumerate(self.blocks):
            self._rule.move(block.shared, block.delta, self._ranks, block.slots)
            for (p, shared), (_, gone) in zip(
                block.views(block.shared), block.views(self._apart[i] if self._apart else block.shared), strict=True
            ):
                if self._apart:
                    self._rule.rejoin(p, shared, gone, self._ranks)
                elif mix:
                    p.lerp_(shared, 1 - mix)
                else:
                    p.copy_(shared)
        return True

    def go_back(self) -> None:
        """This rank's values are the shared ones."""
        for block in self.blocks:
            for p, shared in block.views(block.shared):
                p.copy_(shared)

    def state_dict(self) -> dict[str, Any]:
        """State that a run needs to go on, with what is under way."""
        self.settle()
        rows = {"shared": [b.shared for b in self.blocks], "delta": [b.delta for b in self.blocks]}
        rows |= {f"slot {s}": [b.slots[s] for b in self.blocks] for s in self._rule.slots}
        if self._apart:
            rows["apart"] = self._apart
        named = {what: self._named(of) for what, of in rows.items()}
        return {"values": named, "left": self.left, "lands": self.lands, "exchange": self.state.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a state that :meth:`state_dict` gave.

        Raises:
            CheckpointMismatch: it is of other parameters.
        """
        if state["values"]["shared"].keys() != self._named([b.shared for b in self.blocks]).keys():
            raise CheckpointMismatch("the checkpoint is of a model with other parameters, or cut in other fragments")
        self.settle()
        self.state.load_state_dict(state["exchange"])
        self.left, self.lands = state["left"], state["lands"]
        self._apart = [torch.empty_like(b.delta) for b in self.blocks] if "apart" in state["values"] else []
        for i, block in enumerate(self.blocks):
            rows = {"shared": block.shared, "delta": block.delta} | {f"slot {s}": t for s, t in block.slots.items()}
            if self._apart:
                rows["apart"] = self._apart[i]
            for what, row in rows.items():
                for name, (_, part) in zip(block.members, block.views(row), strict=True):
                    part.copy_(state["values"][what][name])

    def _named(self, rows: Sequence[Tensor]) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for block, row in zip(self.blocks, rows, strict=True):
            found |= {n: part.clone() for n, (_, part) in zip(block.members, block.views(row), strict=True)}
        return found


def cut(parameters: Mapping[str, nn.Parameter], fragments: int) -> list[dict[str, nn.Parameter]]:
    """Cut parameters, in their order, into fragments of about as many bytes each, none empty; a module's stay together.

    Raises:
        ValueError: there are fewer modules than fragments.
    """
    modules = [dict(own) for _, own in itertools.groupby(parameters.items(), lambda one: one[0].rpartition(".")[0])]
    if not 1 <= fragments <= len(modules):
        raise ValueError(f"a model of {len(modules)} layers is cut in 1 to {len(modules)} fragments, not {fragments}")
    found: list[dict[str, nn.Parameter]] = [{}]
    sizes = [sum(p.nbytes for p in own.values()) for own in modules]
    left, here = sum(sizes), 0
    for i, (own, size) in enumerate(zip(modules, sizes, strict=True)):
        more, rest = fragments - len(found), len(modules) - i
        if found[-1] and more and (rest == more or here + size / 2 > (left + here) / (more + 1)):
            found.append({})
            here = 0
        found[-1] |= own
        here, left = here + size, left - size
    return found
