"""What the bandwidth manager may choose among."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Exact:
    """Routes that lose nothing: all-reduce, or the rows that a linear layer's gradient is made of. The default.

    The first steps are all dense, while the manager measures; then it changes layers only where that makes steps
    shorter, and takes it back if it does not.
    """

    def __str__(self) -> str:
        return "exact routes, chosen by measurement"


Policy = Exact


def policy_of(what: object) -> Policy | None:
    """The policy that a user names: one, or the text ``auto``; None if it is none."""
    if isinstance(what, Policy):
        return what
    return Exact() if isinstance(what, str) and what.strip() == "auto" else None
