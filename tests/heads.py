"""A manager's head that decides at once, so that tests need not wait until links are measured."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from commlib.manager import manager
from commlib.manager.decision import Decision
from commlib.manager.sheet import Figures


class Head:
    """Dense for the first few exchanges, then all rows by factors."""

    def __init__(self, model: Any, dense: int) -> None:
        self.layers = [u.name for u in model.units.values() if u.shape is not None][::-1]
        self.dense, self.seen = dense, list[Figures]()

    def first(self) -> Decision:
        return Decision(steps=self.dense, probe=False, skip=0)

    def review(self, f: Figures) -> Decision:
        self.seen.append(f)
        routes = dict.fromkeys(self.layers, "factors")
        return Decision(routes, dict.fromkeys(routes, 8), steps=1000, probe=False, phase="steady")


@contextlib.contextmanager
def head(dense: int) -> Iterator[list[Head]]:
    """What attach() finds as the manager's head."""
    made: list[Head] = []

    def make(model: Any) -> Head:
        made.append(Head(model, dense))
        return made[-1]

    original, vars(manager)["Pilot"] = vars(manager)["Pilot"], make
    try:
        yield made
    finally:
        vars(manager)["Pilot"] = original
