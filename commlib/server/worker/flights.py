"""A worker's messages under way, for a trace: a push until it is acknowledged, a question until its values come."""

from __future__ import annotations

from collections.abc import Sequence

from commlib.server.protocol.messages import Ack, Message, Pull, Push, Send, Values
from commlib.telemetry.trace import NONE, Trace


class Flights:
    """Of one worker; in a trace each key has a row. For one thread at a time, but a trace may begin and end meanwhile.

    What is sent again in a new view has left when it did so first. Of a key's questions only the last is answered.
    """

    def __init__(self) -> None:
        self._trace = NONE
        self._pushes: dict[tuple[str, int], float] = {}
        self._pulls: dict[str, tuple[tuple[int, int | None], float]] = {}

    @property
    def trace(self) -> Trace:
        """Where they are recorded; another one knows of nothing that left before it."""
        return self._trace

    @trace.setter
    def trace(self, trace: Trace) -> None:
        self._trace, self._pushes, self._pulls = trace, {}, {}

    def leave(self, sends: Sequence[Send]) -> None:
        """These messages leave."""
        if not self._trace.enabled:
            return
        now = self._trace.now()
        for _, message in sends:
            if isinstance(message, Push):
                self._pushes.setdefault((message.key, message.stamp), now)
            elif isinstance(message, Pull):
                question = message.clock, message.within
                if self._pulls.get(message.key, (None,))[0] != question:
                    self._pulls[message.key] = question, now

    def came(self, message: Message) -> None:
        """This one came."""
        if not self._trace.enabled:
            return
        if isinstance(message, Ack):
            left = self._pushes.pop((message.key, message.stamp), None)
            if left is not None:
                self._note("push", message.key, left, step=message.stamp, refused=message.refused)
        elif isinstance(message, Values):
            question, asked = self._pulls.get(message.key, (None, 0.0))
            if question == (message.clock, message.within):
                self._pulls.pop(message.key, None)
                self._note("pull", message.key, asked, step=message.clock)

    def _note(self, what: str, key: str, left: float, **details: object) -> None:
        self._trace.span(key, what, left, self._trace.now(), **details)
