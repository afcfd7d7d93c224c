"""Parameters in rows: what all ranks share of them, how far this one has gone, and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

NBYTES = 25 << 20
"""Of a row, about: as DDP's buckets."""


@dataclasses.dataclass(frozen=True, eq=False)
class Block:
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
        """Its number."""
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
        """In the same order."""
        return list(self.members.values())

    def views(self, row: Tensor) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Parameters, and their parts of a row, (n,), in their shapes."""
        begin = 0
        for p in self.members.values():
            yield p, row[begin : begin + p.numel()].view(p.shape)
            begin += p.numel()

    def take(self) -> None:
        """What this rank has is what all share."""
        for p, shared in self.views(self.shared):
            shared.copy_(p.detach())

    @torch.no_grad()
    def measure(self) -> None:
        """How far this rank has gone."""
        for (p, delta), (_, shared) in zip(self.views(self.delta), self.views(self.shared), strict=True):
            torch.sub(shared, p.detach(), out=delta)


def blocks_of(parameters: Mapping[str, nn.Parameter], slots: tuple[str, ...], nbytes: int = NBYTES) -> list[Block]:
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


def _block(number: int, last: bool, members: Mapping[str, nn.Parameter], slots: tuple[str, ...]) -> Block:
    shared = torch.cat([p.detach().reshape(-1) for p in members.values()])
    kept = {name: torch.zeros_like(shared) for name in slots}
    return Block(number, last, members, shared, torch.zeros_like(shared), kept)
