"""A bucket under way, and what is to be known of its works."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from commlib.exchange.collectives import Among, Collective
from commlib.runtime.streams import complete
from commlib.telemetry.trace import NONE, Trace


@dataclasses.dataclass
class InFlightBucket:
    """Exchange of one bucket that is under way.

    Args:
        label: for errors.
        rounds: its exchange, as far as it has not been issued.
        result: what that fills.
        future: of the result, or of an error.
        works: the round that was issued last: work, collective, when, by the trace's clock.
        trace: what is recorded of it, in a row of its own: from here to its end, and inside that its rounds.
    """

    label: str
    rounds: Iterator[list[Collective]]
    result: Tensor
    future: torch.futures.Future[Tensor] = dataclasses.field(default_factory=torch.futures.Future)
    works: list[tuple[Any, Collective, float]] = dataclasses.field(default_factory=list)

    trace: Trace = NONE
    issued: int = 0

    def __post_init__(self) -> None:
        self._began = self.trace.now()

    def advance(self) -> list[Collective] | None:
        """Computes up to its next round; None: that was all."""
        began = self.trace.now()
        batch = next(self.rounds, None)
        if self.trace.enabled:
            what = ["decompress"] * (self.issued > 0) + ["compress"] * (batch is not None)
            self._note(", ".join(what) or "nothing", began)
        return batch

    def came(self, collective: Collective, start: float) -> None:
        """A collective that was issued at ``start`` is through: tells the meters of those whose bytes it carried."""
        seconds, total = self.trace.now() - start, 0
        for _, n in collective.payers:
            total += n
        for meter, n in collective.payers:
            meter.add_wire(seconds * n / (total or 1))
        if self.trace.enabled:
            call = collective.call if isinstance(collective, Among) else collective
            self._note(
                getattr(call, "what", "wire"), start, round=self.issued, collective=type(call).__name__, payload=total
            )

    def end(self) -> None:
        """Complete the bucket's future: the exchange is through."""
        if self.trace.enabled:
            self._note(self._row, self._began, about=self.label)
        complete(self.future, self.result, self.result.device)

    def fail(self, error: BaseException) -> None:
        """Complete the bucket's future with this error."""
        if self.trace.enabled:
            self._note(self._row, self._began, about=self.label, error=type(error).__name__)
        self.future.set_exception(error)  # type: ignore[arg-type]  # its stub asks for a result

    @property
    def _row(self) -> str:
        """The bucket, without what is in it and of which step it is."""
        return self.label.partition(" of step")[0].partition(" (")[0]

    def _note(self, what: str, began: float, **details: object) -> None:
        self.trace.span(self._row, what, began, self.trace.now(), **details)


def reason(work: Any, error: BaseException) -> BaseException:
    """Error of a work that has failed; its future may not know of which type that was."""
    try:
        work.wait()
    except Exception as e:
        return e
    return error


def through(work: Any, seconds: float) -> bool:
    """Whether a work of Gloo's is through within so many seconds; raises its error."""
    try:
        work.wait(datetime.timedelta(seconds=seconds))
    except RuntimeError:
        if not work.is_completed():  # that was but the time
            return False
        work.wait()
    return True
