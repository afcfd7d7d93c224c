"""Schedule of a pipeline: which rank is which stage, and in which order a stage computes. Pure.

A virtual worker has N = s_local + 1 minibatches under way: its first stage N, stage i N − i of them, and at least one.
With d of them a stage computes, for p = 0, 1, …: the backward pass of minibatch p − d, if there is one, and its local
update; then the forward pass of p. So p is computed with all local updates of minibatches ≤ p − d, and p − N ≤ p − d:
HetPipe's rule (USENIX ATC 2020, section 4). The first stage has exactly what the rule asks for, later ones are newer.

*No stage waits for ever.* Forward pass p stands at (p, 0), backward pass p at (p + d − 1, 1): that is a stage's own
order. A forward pass waits for the same one a stage before, at the same place; a backward pass for the same one a stage
behind, where d is no larger, at the same place or before. With ties broken by stage, rising for forward passes and
falling for backward ones, that is one order of all passes in which each waits for earlier ones only. Sends wait for
nobody.

*It stays full*: with N ≥ S stages the order is that of 1F1B (PipeDream) without its end: no stage is idle once the
pipeline is full, if passes take equally long. torch's schedules (``torch.distributed.pipelining``) empty the pipeline
after every call.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Literal


@dataclasses.dataclass(frozen=True)
class StagePlace:
    """Place of one rank among stages and virtual workers.

    Args:
        stage: of its virtual worker's, from 0.
        worker: the virtual worker.
        stages: of each.
        workers: virtual ones.
    """

    stage: int
    worker: int
    stages: int
    workers: int

    @property
    def first(self) -> bool:
        """Whether it takes the inputs."""
        return self.stage == 0

    @property
    def last(self) -> bool:
        """Whether it has the loss."""
        return self.stage == self.stages - 1

    @property
    def pipeline(self) -> list[int]:
        """Ranks of this virtual worker, by stage."""
        return [self.worker * self.stages + i for i in range(self.stages)]

    @property
    def peers(self) -> list[int]:
        """Ranks of this stage, by virtual worker."""
        return [i * self.stages + self.stage for i in range(self.workers)]

    def name(self, stage: int) -> str:
        """A stage of this virtual worker, for people."""
        return f"stage {stage} of virtual worker {self.worker} (rank {self.pipeline[stage]})"


def place(rank: int, size: int, stages: int) -> StagePlace:
    """Where a rank is: a virtual worker's stages are neighbouring ranks.

    Raises:
        ValueError: so many ranks are not whole virtual workers.
    """
    if stages < 1:
        raise ValueError(f"stages is 1 or more, got {stages}")
    if size % stages:
        raise ValueError(
            f"{size} ranks are no whole virtual workers of {stages} stages: start a multiple of {stages}, or split the "
            "model into another number of stages"
        )
    return StagePlace(rank % stages, rank // stages, stages, size // stages)


Pass = tuple[Literal["forward", "backward"], int]


def depth(stage: int, local: int) -> int:
    """Minibatches that a stage has under way, at most.

    Args:
        stage: from 0.
        local: s_local.
    """
    return max(1, local + 1 - stage)


def passes(first: int, count: int, under_way: int, most: int) -> Iterator[Pass]:
    """A stage's passes until ``count`` more minibatches, from ``first``, have gone forward.

    Args:
        first: of these minibatches.
        count: how many.
        under_way: those right before ``first`` whose backward pass is still to come.
        most: :func:`depth`.
    """
    for p in range(first, first + count):
        if under_way == most:
            yield "backward", p - under_way
            under_way -= 1
        yield "forward", p
        under_way += 1
