"""Which rank of how many."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class World:
    """Which rank of how many."""

    rank: int
    size: int
