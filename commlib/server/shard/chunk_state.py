"""State of one chunk at its shard: values, optimizer, and the version ledger. Pure: no network.

A replica is a cell, too, which is given what its owner applied, in the same order: the same numbers go into the same
optimizer, so its values and state are the owner's to the last bit.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from commlib.errors import ProtocolError
from commlib.runtime.amp import finite
from commlib.runtime.optimizers import Replace, like
from commlib.server.job.chunks import Chunk
from commlib.server.job.consistency import Threshold
from commlib.server.job.job import ServerJob
from commlib.server.job.version_ledger import VersionLedger
from commlib.server.protocol.messages import Applied


@dataclasses.dataclass(frozen=True)
class _Given:
    """Push that waits to be applied."""

    stamp: int
    gradient: Tensor | None
    options: Mapping[str, Any]
    absent: frozenset[int]
    refused: bool


class ChunkState:
    """State of one chunk of parameters at the shard that keeps it.

    Args:
        values: (n,), to begin with; its own from now on.
        optimizer: makes that of the parameters in it.
        workers: those that push.
        threshold: the server's.
        mean: pushes count 1/P each, P being the workers there are, as DDP's do; else 1.
        shapes: of these parameters, one behind the other. Default: one of (n,).
        group: worker → its group, among which the threshold holds and the mean is of; default: all are of the same.
        takes: which workers push to this; others that come are no concern of it. Default: all.
    """

    def __init__(
        self,
        values: Tensor,
        optimizer: Callable[[Sequence[torch.nn.Parameter]], Optimizer],
        workers: Iterable[int],
        threshold: Threshold,
        *,
        mean: bool = True,
        shapes: Sequence[Sequence[int]] | None = None,
        group: Callable[[int], int] = lambda worker: 0,
        takes: Callable[[int], bool] = lambda worker: True,
    ) -> None:
        self.values = values
        """(n,), as they are now; changed in place by the next push."""
        self._shapes = [torch.Size(s) for s in shapes or [values.shape]]
        self._parameters = [torch.nn.Parameter(part) for part in self._parts(values)]
        self.optimizer = optimizer(self._parameters)
        self._takes_all = isinstance(self.optimizer, Replace)
        self._made_with = {k: v for k, v in self.optimizer.param_groups[0].items() if k != "params"}
        self._options: Mapping[str, Any] = {}
        self._threshold = threshold
        self._takes = takes
        self._ledger: VersionLedger[_Given] = VersionLedger(filter(takes, workers), threshold, group)
        self._mean, self._number = mean, 0

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

    def push(
        self,
        worker: int,
        stamp: int,
        gradient: Tensor | None,
        options: Mapping[str, Any] | None = None,
        absent: frozenset[int] = frozenset(),
        *,
        refuse: bool = False,
    ) -> list[Applied]:
        """Take a worker's push; returns the updates that are applied now. One that is here already: none.

        A gradient that is not finite is refused: it goes into no value, and the step is the others'. But not where
        gradients are only summed, by :class:`Replace`: all workers shall see it then.

        Args:
            worker: who.
            stamp: the how-manieth of its pushes.
            gradient: (n,), of the values' dtype; not changed, and may be kept. None: zeros, and if nobody has any, no
                update at all.
            options: of the optimizer from now on, where they are others than it was made with.
            absent: parameters, by their place, of which this gradient is zeros because there is none.
            refuse: it goes into no value, however good it is.

        Raises:
            ProtocolError: another shape or dtype, an option that it has not or a value that this cannot have, an
                unknown worker, or one of its pushes before this is missing.
        """
        unknown = (options or {}).keys() - self._made_with.keys()
        if unknown:
            raise ProtocolError(f"worker {worker} has an optimizer with {', '.join(sorted(unknown))}, and this has not")
        for name, value in (options or {}).items():
            if not like(value, made := self._made_with[name]):
                raise ProtocolError(
                    f"worker {worker} has {name}={value!r:.80}, which an optimizer made with {made!r} cannot take"
                )
        if gradient is not None and (gradient.shape != self.values.shape or gradient.dtype != self.values.dtype):
            raise ProtocolError(
                f"worker {worker} pushes {gradient.dtype} of shape {tuple(gradient.shape)} to values of "
                f"{self.values.dtype} of shape {tuple(self.values.shape)}: its model is another"
            )
        good = not refuse and (gradient is None or self._takes_all or finite(gradient))
        given = _Given(stamp, gradient if good else None, options or {}, absent, not good)
        return [self._apply(group) for group in self._ledger.push(worker, stamp, given)]

    def read(self, worker: int, clock: int, within: int | None = None) -> Tensor | None:
        """The values, or None as long as they are too old for a worker at this clock.

        Args:
            worker: who.
            clock: its.
            within: steps that another may be behind at most, if that is fewer than the rule allows.
        """
        return self.values if self._ledger.may_read(worker, clock, within) else None

    def start(self, values: Tensor) -> None:
        """Set the values, (n,), before any push.

        Raises:
            ProtocolError: another shape or dtype, or there was one.
        """
        if values.shape != self.values.shape or values.dtype != self.values.dtype or self._number:
            raise ProtocolError(
                f"a start with {values.dtype} of shape {tuple(values.shape)}, for values of {self.values.dtype} of "
                f"shape {tuple(self.values.shape)} after {self._number} updates"
            )
        self.values.copy_(values)

    def observe(self, metric: float) -> None:
        """Takes note of an evaluation's result, if the rule follows those."""
        self._threshold.observe(metric)

    def join(self, worker: int, clock: int) -> list[Applied]:
        """A worker comes, or comes back, and begins with the push of this stamp; returns what is applied now."""
        return [self._apply(group) for group in self._ledger.join(worker, clock)] if self._takes(worker) else []

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
            self._step(applied)

    def state_dict(self) -> dict[str, Any]:
        """Values, the optimizer's state, and whose pushes are in: copies."""
        return {
            "values": self.values.clone(),
            "optimizer": copy.deepcopy(self.optimizer.state_dict()),
            "ledger": self._ledger.state_dict(),
            "threshold": self._threshold.state_dict(),
            "number": self._number,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As it was, with its workers.

        Raises:
            ValueError: values of another shape or dtype.
        """
        self.resume(state)
        self._ledger.load_state_dict(state["ledger"])
        self._number = state["number"]

    def resume(self, state: Mapping[str, Any]) -> None:
        """The values and the optimizer as they were; its workers, and their clocks, begin anew.

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
        self._threshold.load_state_dict(state.get("threshold", {}))

    def _apply(self, group: Mapping[int, _Given]) -> Applied:
        gradients = [given.gradient for given in group.values() if given.gradient is not None]
        refused = frozenset(worker for worker, given in group.items() if given.refused)
        total = gradients[0].clone() if gradients else None
        if total is not None:
            for each in gradients[1:]:  # in the order of workers
                total.add_(each)
            if self._mean:  # in bulk over those that are in it, else each counts as one of all that there are
                peers = self._ledger.peers(next(iter(group)))
                total.div_(len(group) - len(refused) if len(group) > 1 else max(1, len(peers)))
        stamps = {worker: given.stamp for worker, given in group.items()}
        missing = [given.absent for given in group.values() if given.gradient is not None]
        absent = frozenset[int]().union(*missing).intersection(*missing)
        applied = Applied(self._number, stamps, total, refused, next(iter(group.values())).options, absent)
        self._step(applied)
        return applied

    def _step(self, applied: Applied) -> None:
        self._number += 1
        if applied.gradient is None:
            return
        if applied.options != self._options:
            self._options = applied.options
            self.optimizer.param_groups[0].update(self._made_with | dict(applied.options))
        for i, (parameter, part) in enumerate(zip(self._parameters, self._parts(applied.gradient), strict=True)):
            parameter.grad = part if i not in applied.absent else None
        self.optimizer.step()
        for parameter in self._parameters:
            parameter.grad = None

    def _parts(self, row: Tensor) -> list[Tensor]:
        """Parts of a row, (n,), that belong to the parameters in it, as views."""
        return [
            part.view(s)
            for part, s in zip(row.split_with_sizes([s.numel() for s in self._shapes]), self._shapes, strict=True)
        ]


def make_cell(job: ServerJob, chunk: Chunk, workers: Mapping[int, int]) -> ChunkState:
    """Make the state of one of a job's chunks, of zeros: what it starts with is yet to be said.

    Args:
        job: whose.
        chunk: which.
        workers: as :class:`ChunkState` has them.
    """
    recipe = job.recipes[job.chosen[chunk.pieces[0].name]]
    cut_up = recipe.by_element and len(chunk.pieces) == 1
    shapes = [(chunk.numel,)] if cut_up else [job.parameters[name][0] for name in chunk.names]
    values, rule = torch.zeros(chunk.numel, dtype=chunk.dtype), job.rule

    def takes(worker: int) -> bool:
        return chunk.group in (None, rule.server_group(worker))

    made, s = recipe.make, rule.threshold()
    return ChunkState(values, made, workers, s, mean=job.mean, shapes=shapes, group=rule.group, takes=takes)
