"""Which examples a rank sees when: a pure function of (seed, epoch, rank)."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from .tasks import BadInput


@dataclasses.dataclass
class Shards:
    """Walks through the examples, epoch by epoch, the same number of batches on every rank.

    All ranks shuffle alike and each takes its slice of every global batch; what does not fill a global
    batch at the end of an epoch is left out. The position counts examples of all ranks, so it keeps its
    meaning when a run goes on with another number of ranks.

    Args:
        examples: how many there are.
        batch: examples per rank and step.
        rank: this rank.
        ranks: how many share the data.
        seed: of the shuffles.
        epoch, consumed: the position: epochs done, and examples of all ranks seen in this one.

    Raises:
        BadInput: not even one global batch.
    """

    examples: int
    batch: int
    rank: int
    ranks: int
    seed: int
    epoch: int = 0
    consumed: int = 0

    def __post_init__(self) -> None:
        if self.examples < self.global_batch:
            raise BadInput(
                f"{self.examples} examples do not fill one step of {self.ranks} ranks × --batch {self.batch}: "
                "lower --batch or --ranks"
            )
        self._order = self._shuffle()

    @property
    def global_batch(self) -> int:
        """Examples of all ranks in one step."""
        return self.batch * self.ranks

    @property
    def steps_per_epoch(self) -> int:
        """Steps in a whole epoch."""
        return self.examples // self.global_batch

    def steps_until(self, epochs: int) -> int:
        """Steps from here to the end of so many epochs."""
        left = (self.examples - self.consumed) // self.global_batch
        return max(0, (epochs - self.epoch - 1) * self.steps_per_epoch + left)

    def next(self) -> Tensor:
        """This rank's example numbers for one step, int64 of shape (batch,)."""
        if self.consumed + self.global_batch > self.examples:
            self.epoch, self.consumed = self.epoch + 1, 0
            self._order = self._shuffle()
        start = self.consumed + self.rank * self.batch
        self.consumed += self.global_batch
        return self._order[start : start + self.batch]

    def _shuffle(self) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        return torch.randperm(self.examples, generator=generator)
