"""What ``--server`` says: a rule of consistency, and how messages are coded."""

from __future__ import annotations

import dataclasses

from commlib.server.job.consistency import make
from commlib.server.protocol.value_coding import way, way_of_values

PREFIX = "server "
"""Of such a run's name."""


@dataclasses.dataclass(frozen=True)
class Served:
    """``RULE [push=SPEC] [pull=SPEC] [background]``.

    Args:
        rule: of consistency.
        push, pull: how gradients and values are coded.
        background: whether they are moved in the background.
    """

    rule: str
    push: str = "none"
    pull: str = "none"
    background: bool = False

    @staticmethod
    def of(text: str) -> Served:
        """From what was written.

        Raises:
            ValueError: it cannot be read; or there is no such rule, codec or filter.
        """
        rule, *words = text.split() or [""]
        given = dict(word.split("=", 1) for word in words if word.startswith(("push=", "pull=")))
        background = "background" in words
        if len(given) + background < len(words):
            raise ValueError("write RULE, or 'RULE push=SPEC pull=SPEC background'")
        served = Served(rule, background=background, **given)
        make(served.rule)
        way(served.push)
        way_of_values(served.pull)
        return served
