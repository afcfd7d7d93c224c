"""Settings that all workers of a run share: the problem's size, its blocks and their order, how messages travel."""

from __future__ import annotations

import dataclasses

import torch

from commlib.codecs.filter import chain
from commlib.compressors.filters.kkt import Kkt
from commlib.runtime.optimizers import Recipe, Replace
from commlib.runtime.proximal import ProximalAdagrad
from commlib.server.job.chunks import Chunk
from commlib.server.job.job import FAIL, ServerJob

OBJECTIVE = "objective"
"""Name of the one value that shards sum up: the workers' shares of the objective."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SparseSettings:
    """Settings of a run, the same for all of its workers.

    Args:
        features: of all workers together; at least 1.
        workers, servers: how many, at least 1 each.
        l1: λ, above 0, in units of the sum of losses.
        filters: spec of the chain of gradients, after the KKT filter. If ``lossless`` is in it, weights come by that.
        kkt: whether the KKT filter is on.
        blocks: of features; at most as many as these are used.
        passes: over all blocks, at most.
        tolerance: of the objective's relative change in a pass, for the end.
        delay: τ: a worker computes a block while up to τ others are under way. At the end of a pass none is.
        lr: of the optimizer, in units of the weights.
        refresh: of the KKT filter: of so many passes the last leaves nothing out.
        seed: of the order of blocks.
        timeout: seconds that anything waits.

    Raises:
        ValueError: a number that cannot be, or a bad spec.
    """

    features: int
    workers: int = 2
    servers: int = 2
    l1: float = 1.0
    filters: str = "none"
    kkt: bool = False
    blocks: int = 16
    passes: int = 100
    tolerance: float = 1e-4
    delay: int = 0
    lr: float = 8.0
    refresh: int = 8
    seed: int = 0
    timeout: float = 120.0

    def __post_init__(self) -> None:
        for name in ("features", "workers", "servers", "blocks", "passes", "refresh"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("l1", "tolerance", "lr", "timeout"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name} must be above 0 and finite, got {getattr(self, name)}")
        if self.delay < 0:
            raise ValueError(f"delay must not be negative, got {self.delay}")
        chain(self.filters)  # or raises

    @property
    def push(self) -> str:
        """How gradients travel."""
        own = [str(Kkt(self.l1 / self.workers, refresh=self.refresh))] if self.kkt else []
        return "+".join([*own, *([] if self.filters == "none" else [self.filters])]) or "none"

    @property
    def pull(self) -> str:
        """How weights do: exactly, so that 0 stays 0. Most of what has not changed is squeezed out by ``lossless``."""
        return "lossless" if any(f.name == "lossless" for f in chain(self.filters).filters) else "none"

    @property
    def edges(self) -> list[tuple[int, int]]:
        """Features of each block: [low, high)."""
        n = min(self.blocks, self.features)
        return [(self.features * b // n, self.features * (b + 1) // n) for b in range(n)]

    def job(self) -> ServerJob:
        """The parameter server's: each block has clocks of its own, and its update is of all workers' gradients."""
        widths = {f"block {b}": high - low for b, (low, high) in enumerate(self.edges)}
        step = Recipe(ProximalAdagrad, {"lr": self.lr, "l1": self.l1})
        return ServerJob(
            {OBJECTIVE: ((1,), "float64")} | {name: ((width,), "float32") for name, width in widths.items()},
            (Recipe(Replace, {}), *[step] * len(widths)),  # one for each block, or small blocks would share a chunk
            {name: i for i, name in enumerate([OBJECTIVE, *widths])},
            "bsp",
            self.workers,
            self.servers,
            mean=False,
            lost=FAIL,
            push=self.push,
            pull=self.pull,
        )

    def chunks(self) -> list[list[Chunk]]:
        """Chunks of each block; the last is the objective's."""
        found = list(self.job().chunks.values())
        names = [*(f"block {b}" for b in range(len(self.edges))), OBJECTIVE]
        return [[c for c in found if c.pieces[0].name == name] for name in names]

    def order(self, number: int) -> list[int]:
        """Blocks in the order of a pass, which is numbered from 0."""
        draws = torch.Generator().manual_seed((self.seed << 20) + number & (1 << 63) - 1)
        return torch.randperm(len(self.edges), generator=draws).tolist()

    def whole(self, number: int) -> bool:
        """Whether a pass leaves nothing out."""
        return not self.kkt or (number + 1) % self.refresh == 0
