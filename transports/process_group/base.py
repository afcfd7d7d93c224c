"""A process group that carries out calls, and has none yet: what they have in common.

All ranks' copies of a call are made alike: which schedule, from what all of them know; and a text of it that every
message bears.
"""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Callable, Sequence
from typing import Any

from commlib.messaging.link_model import Line
from commlib.transports.process_group.algorithms.steps import Place, Schedule

from .arguments import Parts
from .engine import Call, Engine
from .host_tensors import Held
from .identity import Identity
from .work import Work


@dataclasses.dataclass(frozen=True)
class Part:
    """A collective: its text, this rank's schedule, what that reads and what it fills."""

    what: str
    schedule: Schedule
    reads: Sequence[Held]
    fills: Sequence[Held]


class Calls(Identity):
    """A process group.

    Args:
        store: of the group.
        place: this rank among the others.
        timeout: of its calls, where they have none of their own.
        engine: carries out collectives.
        line: α and β of a message, the same on all ranks.
        shut: called at the end.
    """

    def __init__(
        self,
        store: Any,
        place: Place,
        timeout: datetime.timedelta,
        engine: Engine,
        line: Line,
        shut: Callable[[], None],
    ) -> None:
        super().__init__(store, place, timeout)
        self.line = line
        self._engine, self._shut, self._place = engine, shut, place

    def _get_sequence_number_for_group(self) -> int:
        return self._engine.count

    def shutdown(self) -> None:
        """Ends it; what is not through fails. Again: nothing."""
        self._shut()

    abort = shutdown

    def _call(self, parts: Sequence[Part], result: Parts, opts: Any) -> Work:
        """One call of these collectives, one after another."""

        def schedule() -> Schedule:
            for part in parts:
                for held in part.reads:
                    held.ready()
                yield from part.schedule

        def done() -> None:
            for part in parts:
                for held in part.fills:
                    held.back()

        what = parts[0].what if len(parts) == 1 else f"{len(parts)} collectives, first {parts[0].what}"
        staged = [s for p in parts for held in p.fills for s in held.staged]
        work = Work(what, result, self._engine.help, staged)
        call = Call(work, schedule(), done, self._seconds(opts))
        return self._engine.submit(call, waited_for=not getattr(opts, "asyncOp", True))

    def _seconds(self, opts: Any) -> float:
        given: datetime.timedelta | None = getattr(opts, "timeout", None)
        own = given if given is not None and given.total_seconds() > 0 else self.options._timeout
        return float(own.total_seconds())
