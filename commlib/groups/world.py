"""A rank's place among the ranks of a process group."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class World:
    """This rank's number, from 0, and how many ranks its process group has.

    Args:
        rank: from 0 to ``size`` − 1.
        size: the number of ranks.
    """

    rank: int
    size: int
