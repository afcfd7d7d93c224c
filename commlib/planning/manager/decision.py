"""Decision of rank 0 at a review, which every rank then carries out."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Decision:
    """Decision that holds from the next step on, until the next review.

    Attributes:
        routes: unit → its route, for those that are not dense; in the order in which factors leave. A unit is a
            linear layer, or a parameter that is of none.
        rows: linear layer → rows to have room for.
        steps: exchanges until the next review.
        skip: so many of them are not counted: the first with new routes is never a usual one.
        watch: note when the backward pass comes to linear layers, and with how many rows.
        probe: at the next review, measure the link and the products before posting.
        why: unit → in words.
        predicted: unit → seconds of its exchange by itself.
        step_s: predicted seconds of a step and of one that is all dense; None: nothing is known yet.
        phase: watch, proof (rows leave, but gradients are dense still, and both are compared), trial, dense again,
            steady or failed.
        said: what has happened, for the log; empty if nothing has.
    """

    routes: Mapping[str, str] = dataclasses.field(default_factory=dict)
    rows: Mapping[str, int] = dataclasses.field(default_factory=dict)
    steps: int = 3  # DDP makes its buckets in the first and takes them into use in the second
    skip: int = 2
    watch: bool = True
    probe: bool = True
    why: Mapping[str, str] = dataclasses.field(default_factory=dict)
    predicted: Mapping[str, float] = dataclasses.field(default_factory=dict)
    step_s: tuple[float, float] | None = None
    phase: str = "watch"
    said: str = ""

    def plans_as(self, other: Decision) -> bool:
        """Whether both say the same of the plan, whatever they say of when and how to look at it."""
        mine, others = ((d.routes, d.rows, d.why, d.predicted, d.step_s, d.phase) for d in (self, other))
        return mine == others

    def to_wire(self) -> dict[str, Any]:
        """Decision as plain values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_wire(cls, x: Mapping[str, Any]) -> Decision:
        """Read a decision from :meth:`to_wire`, through msgpack."""
        return cls(**{**x, "step_s": None if x["step_s"] is None else (x["step_s"][0], x["step_s"][1])})
