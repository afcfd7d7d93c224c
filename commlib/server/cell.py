"""One chunk at its shard: its values, the optimizer that updates them, and whose pushes are in. Pure: no network.

A replica is a cell, too, which is given what its owner applied, in the same order: the same numbers go into the same
optimizer, so its values and state are the owner's to the last bit.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from commlib.consistency import Threshold
from commlib.errors import ProtocolError
from commlib.ledger import Ledger


@dataclasses.dataclass(frozen=True)
class Applied:
    """What went into the values as one.

    Args:
        number: 0, 1, … of the cell's.
        stamps: worker → stamp of its push.
        gradient: (n,), as the optimizer got it; None if all of these pushes were refused.
        refused: workers whose push was not finite.
    """

    number: int
    stamps: Mapping[int, int]
    gradient: Tensor | None
    refused: frozenset[int] = frozenset()


class Cell:
    """A cell.

    Args:
        values: (n,), to begin with; its own from now on.
        optimizer: makes that of a parameter.
        workers: those that push.
        threshold: the server's.
        mean: pushes count 1/P each, P being the workers there are, as DDP's do; else 1.
    """

    def __init__(
        self,
        values: Tensor,
        optimizer: Callable[[torch.nn.Parameter], Optimizer],
        workers: Iterable[int],
        threshold: Threshold,
        *,
        mean: bool = True,
    ) -> None:
        self._parameter = torch.nn.Parameter(values)
        self.optimizer = optimizer(self._parameter)
        self._ledger: Ledger[tuple[int, Tensor | None]] = Ledger(workers, threshold)
        self._mean, self._number = mean, 0

    @property
    def values(self) -> Tensor:
        """(n,), as they are now; changed in place by the next push."""
        return self._parameter.data

    @property
    def included(self) -> Mapping[int, int]:
        """Worker → its pushes that are in."""
        return self._ledger.included

    @property
    def furthest(self) -> int:
        """The highest clock that any worker has had."""
        return self._ledger.furthest

    @property
    def number(self) -> int:
        """How often they were updated."""
        return self._number

    def due(self, worker: int) -> int:
        """The stamp of a worker's next push."""
        return self._ledger.due(worker)

    def push(self, worker: int, stamp: int, gradient: Tensor) -> list[Applied]:
        """What is applied now. A push that is here already: nothing.

        A gradient that is not finite is refused: it goes into no value, and the step is the others'.

        Args:
            worker: who.
            stamp: the how-manieth of its pushes.
            gradient: (n,), of the values' dtype; not changed, and may be kept.

        Raises:
            ProtocolError: another shape or dtype, an unknown worker, or one of its pushes before this is missing.
        """
        if gradient.shape != self.values.shape or gradient.dtype != self.values.dtype:
            raise ProtocolError(
                f"worker {worker} pushes {gradient.dtype} of shape {tuple(gradient.shape)} to values of "
                f"{self.values.dtype} of shape {tuple(self.values.shape)}: its model is another"
            )
        good = gradient if finite(gradient) else None
        return [self._apply(group) for group in self._ledger.push(worker, stamp, (stamp, good))]

    def read(self, worker: int, clock: int) -> Tensor | None:
        """The values, or None as long as they are too old for a worker at this clock."""
        return self.values if self._ledger.may_read(worker, clock) else None

    def join(self, worker: int, clock: int) -> None:
        """A worker comes, or comes back, and begins with the push of this stamp."""
        self._ledger.join(worker, clock)

    def leave(self, worker: int) -> list[Applied]:
        """A worker is gone; returns what is applied now without it."""
        return [self._apply(group) for group in self._ledger.leave(worker)]

    def follow(self, applied: Applied) -> None:
        """Does what the owner did. One that was done already: nothing.

        Raises:
            ProtocolError: one before this is missing.
        """
        if applied.number > self._number:
            raise ProtocolError(f"update {applied.number} of a replica that has {self._number}: one is missing")
        if applied.number == self._number:
            self._ledger.follow(applied.stamps)
            self._step(applied.gradient)

    def state_dict(self) -> dict[str, Any]:
        """Values, the optimizer's state, and whose pushes are in: copies."""
        return {
            "values": self.values.clone(),
            "optimizer": copy.deepcopy(self.optimizer.state_dict()),
            "ledger": self._ledger.state_dict(),
            "number": self._number,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As it was, with its workers.

        Raises:
            ValueError: values of another shape or dtype.
        """
        values: Tensor = state["values"]
        if values.shape != self.values.shape or values.dtype != self.values.dtype:
            raise ValueError(
                f"a state with {values.dtype} of shape {tuple(values.shape)}, for values of {self.values.dtype} of "
                f"shape {tuple(self.values.shape)}"
            )
        self.values.copy_(values)
        self.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))  # it keeps the tensors it is given
        self._ledger.load_state_dict(state["ledger"])
        self._number = state["number"]

    def _apply(self, group: Mapping[int, tuple[int, Tensor | None]]) -> Applied:
        gradients = [g for _, g in group.values() if g is not None]
        total = gradients[0].clone() if gradients else None
        if total is not None:
            for each in gradients[1:]:  # in the order of workers
                total.add_(each)
            if self._mean:  # in bulk over those that are in it, else each counts as one of all that there are
                total.div_(len(gradients) if len(group) > 1 else max(1, len(self.included)))
        stamps = {worker: stamp for worker, (stamp, _) in group.items()}
        applied = Applied(self._number, stamps, total, frozenset(w for w, (_, g) in group.items() if g is None))
        self._step(total)
        return applied

    def _step(self, gradient: Tensor | None) -> None:
        self._number += 1
        if gradient is not None:
            self._parameter.grad = gradient
            self.optimizer.step()
            self._parameter.grad = None


def finite(values: Tensor) -> bool:
    """Whether all are."""
    return not values.is_floating_point() or bool(torch.isfinite(values.sum()) or values.isfinite().all())
