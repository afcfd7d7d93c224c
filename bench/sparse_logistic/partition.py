"""What all ranks of a run agree on: the problem's size, who owns which features, and the order of blocks."""

from __future__ import annotations

import dataclasses

import torch

from commlib.codecs.filter import Chain, Content, chain


@dataclasses.dataclass(frozen=True, kw_only=True)
class SparsePartition:
    """Ranks 0 … servers-1 are servers, of which 0 leads; those after them are workers.

    Server s owns a contiguous range of the features, and its b-th slice belongs to block b: so every block is spread
    over all servers. A task is one block in one pass, numbered from 0; all ranks draw the same order of blocks.

    Args:
        features, examples: of all workers together.
        servers, workers: how many, at least 1 each.
        l1: λ, above 0, in units of the sum of losses.
        filters: spec of the chain in each direction.
        kkt: whether the KKT filter is on.
        blocks: at least 1.
        passes: over all blocks, at most.
        tolerance: of the relative change of the objective in one pass, for the end.
        ratio: of the KKT filter.
        delay: τ: task t waits for every task up to t - τ - 1. Within a pass: at its end all are waited for.
        eta: η, by which curvatures are divided; None: 1/(1 + τ), as τ + 1 blocks may move at
            once, and 1/blocks at least.
        seed: of the order of blocks, and of what filters draw.
        timeout: seconds that anything waits.

    Raises:
        ValueError: a number that cannot be, or a bad spec.
    """

    features: int
    examples: int
    servers: int = 2
    workers: int = 2
    l1: float = 1.0
    filters: str = "none"
    kkt: bool = False
    blocks: int = 16
    passes: int = 100
    tolerance: float = 1e-4
    ratio: float = 10.0
    delay: int = 0
    eta: float | None = None
    seed: int = 0
    timeout: float = 60.0

    def __post_init__(self) -> None:
        for name in ("features", "examples", "servers", "workers", "blocks", "passes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("l1", "tolerance", "ratio", "timeout", "eta"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ValueError(f"{name} must be above 0 and finite, got {value}")
        if self.delay < 0:
            raise ValueError(f"delay must not be negative, got {self.delay}")
        if self.workers > self.examples:
            raise ValueError(f"{self.workers} workers have only {self.examples} examples: each needs one")
        found = self.chain()
        if not _keeps_all(found):
            raise ValueError(
                f"filters {found} leave entries out, and here every key must come: take key_cache, "
                "fixed_float and lossless, of which each keeps all; the KKT filter is what leaves some out"
            )

    def chain(self) -> Chain:
        """The filters of one direction."""
        return chain(self.filters)

    @property
    def ranks(self) -> int:
        return self.servers + self.workers

    @property
    def step(self) -> float:
        """Step size η of the proximal gradient."""
        return 1 / (1 + min(self.delay, self.blocks - 1)) if self.eta is None else self.eta

    def peers(self, rank: int) -> tuple[int, ...]:
        """Whom a rank talks to: workers to servers; servers to workers, and to the one that leads."""
        if rank >= self.servers:
            return tuple(range(self.servers))
        return (*range(1 if rank == 0 else 0, self.servers if rank == 0 else min(rank, 1)), *self.worker_ranks)

    @property
    def worker_ranks(self) -> range:
        return range(self.servers, self.ranks)

    def owned(self, server: int) -> tuple[int, int]:
        """Features of a server: [low, high)."""
        return self.features * server // self.servers, self.features * (server + 1) // self.servers

    def slice(self, server: int, block: int) -> tuple[int, int]:
        """Features of a block that a server owns: [low, high)."""
        low, high = self.owned(server)
        return low + (high - low) * block // self.blocks, low + (high - low) * (block + 1) // self.blocks

    def draws(self, rank: int, peer: int) -> int:
        """Seed of what a rank's filters draw for a peer."""
        return (self.seed * self.ranks + rank) * self.ranks + peer

    def order(self, number: int) -> list[int]:
        """Blocks in the order of a pass, which is numbered from 0."""
        draws = torch.Generator().manual_seed((self.seed << 20) + number & (1 << 63) - 1)
        return torch.randperm(self.blocks, generator=draws).tolist()


def _keeps_all(filters: Chain) -> bool:
    """Whether what comes out has the keys that went in, tried with many and values of 0."""
    keys = torch.arange(0, 1024, 2)
    coded = filters.sender(1024, 0).encode(Content(keys, torch.zeros(keys.numel())))
    out = filters.receiver(1024).decode(coded).keys
    return out is not None and torch.equal(out, keys)
