"""A bucket under way, and what is to be known of its works."""

from __future__ import annotations

import dataclasses
import datetime
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from commlib.collective import Collective


@dataclasses.dataclass
class Trip:
    """One bucket under way.

    Args:
        label: for errors.
        rounds: its exchange, as far as it has not been issued.
        result: what that fills.
        future: of the result, or of an error.
        works: the round that was issued last: work, collective, when (:func:`time.perf_counter`).
    """

    label: str
    rounds: Iterator[list[Collective]]
    result: Tensor
    future: torch.futures.Future[Tensor] = dataclasses.field(default_factory=torch.futures.Future)
    works: list[tuple[Any, Collective, float]] = dataclasses.field(default_factory=list)

    def fail(self, error: BaseException) -> None:
        """It ends so."""
        self.future.set_exception(error)  # type: ignore[arg-type]  # its stub asks for a result


def through(work: Any, seconds: float) -> bool:
    """Whether a work of Gloo's is through within so many seconds; raises its error."""
    try:
        work.wait(datetime.timedelta(seconds=seconds))
    except RuntimeError:
        if not work.is_completed():  # that was but the time
            return False
        work.wait()
    return True


def add_wire(collective: Collective, start: float) -> None:
    """A collective that was issued at ``start`` is through: tells the meters of those whose bytes it carried."""
    seconds = time.perf_counter() - start
    total = sum(n for _, n in collective.payers) or 1
    for meter, n in collective.payers:
        meter.add_wire(seconds * n / total)
