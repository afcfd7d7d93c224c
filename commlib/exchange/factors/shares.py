"""Which part of a linear layer's gradient each rank makes, where the work is shared out."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Shares:
    """Of a layer with weight (N, M): the larger dimension in P blocks, as equal as can be, the low ranks' being larger.

    That is the dimension to cut: a rank's rows go to each owner as K·(the other + block) values. A rank's block may be
    empty, of a dimension smaller than P; its share of the bias is then empty too.

    Args:
        n: outputs, N.
        m: inputs, M.
        size: ranks, P.
    """

    n: int
    m: int
    size: int

    @property
    def by_outputs(self) -> bool:
        """Whether blocks are of outputs (rows of the weight), and not of inputs."""
        return self.n >= self.m

    def outputs(self, rank: int) -> slice:
        """Rows of the weight, and columns of V that its block is made of."""
        return block(self.n, self.size, rank) if self.by_outputs else slice(0, self.n)

    def inputs(self, rank: int) -> slice:
        """Columns of the weight, and of U."""
        return slice(0, self.m) if self.by_outputs else block(self.m, self.size, rank)

    def bias(self, rank: int) -> slice:
        """Of the bias, whichever dimension of the weight is cut."""
        return block(self.n, self.size, rank)

    @property
    def longest(self) -> int:
        """Length of the longest block."""
        return -(-max(self.n, self.m) // self.size)

    @property
    def largest(self) -> int:
        """Values of the largest block."""
        return self.longest * min(self.n, self.m)


def block(length: int, size: int, rank: int) -> slice:
    """One rank's of a dimension in ``size`` blocks as equal as can be, the low ranks' being larger."""
    part, more = divmod(length, size)
    start = rank * part + min(rank, more)
    return slice(start, start + part + (rank < more))
