"""Which frame of a peer may follow which. Pure state machines, one for each direction.

::

    hello ──▶ data, taken, data, … ──▶ bye
      │            │
      └────────────┴────▶ error (why it gives up)

``taken`` tells how much has been taken of what came the other way (:mod:`commlib.messaging.flow_control`).

:class:`Outgoing` numbers one side's frames, :class:`Incoming` holds the other's against this picture: a frame that is
truncated, too large, of another version, out of order, repeated or missing is a :class:`ProtocolError` that says which.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from commlib.errors import ProtocolError
from commlib.messaging.frame import DEFAULT, Buffer, Frame, Limits, decode, encode

_OPEN = frozenset({"hello", "data", "taken"})
_AFTER: Mapping[str, frozenset[str]] = {
    "hello": frozenset({""}),
    "data": _OPEN,
    "taken": _OPEN,
    "bye": _OPEN,
    "error": _OPEN | {""},
}
"""Kind → those that may stand before it; ``""`` is the beginning."""


class Outgoing:
    """Frames of one side to one peer.

    Args:
        sender: this rank.
        limits: the peer's.
        session: its mark, in every frame.
    """

    def __init__(self, sender: int, limits: Limits = DEFAULT, *, session: int = 0) -> None:
        self._sender, self._limits, self._session = sender, limits, session
        self._order = _Order()

    def frame(self, kind: str, **fields: Any) -> list[Buffer]:
        """The buffers of the next frame; ``fields`` as :class:`Frame` has them.

        Raises:
            ValueError: the frame is bad, or its kind may not come now.
        """
        frame = Frame(kind, self._sender, self._order.count, session=self._session, **fields)
        buffers = encode(frame, self._limits)
        wrong = self._order.wrong(frame)
        if wrong:
            raise ValueError(f"this frame cannot be sent: {wrong}")
        self._order.take(frame)
        return buffers


class Incoming:
    """A peer's frames, one after another. After an error it takes nothing more.

    Args:
        sender: the peer's rank.
        limits: of a frame.
    """

    def __init__(self, sender: int, limits: Limits = DEFAULT) -> None:
        self._sender, self._limits = sender, limits
        self._order = _Order()
        self._session: int | None = None
        self._failed: str | None = None

    def awaits(self, frame: Frame) -> bool:
        """Whether this may well be the next one, over whatever connection it came."""
        return (frame.session, frame.number) == (self._session, self._order.count)

    def missed(self, frame: Frame) -> str | None:
        """In words, if a frame is this peer's, and some before it have not come: they never will."""
        if frame.session != self._session or frame.number <= self._order.count:
            return None
        return self._order.wrong(frame)

    def take(self, buffers: Sequence[Buffer]) -> Frame:
        """The next frame.

        Raises:
            ProtocolError: these buffers are not the next frame of this peer, or those before were not.
        """
        if self._failed is not None:
            raise ProtocolError(f"rank {self._sender} is not listened to any more: {self._failed}")
        try:
            frame = decode(buffers, self._limits)
            if frame.sender != self._sender:
                raise ProtocolError(f"a frame of rank {frame.sender}")
            if self._session is None:
                self._session = frame.session
            if frame.session != self._session:
                raise ProtocolError("a frame of another session")
            wrong = self._order.wrong(frame)
            if wrong:
                raise ProtocolError(wrong)
        except ProtocolError as e:
            self._failed = str(e)
            raise ProtocolError(f"from rank {self._sender}: {e}") from None
        self._order.take(frame)
        return frame


class _Order:
    """How far a side is: the picture above."""

    def __init__(self) -> None:
        self.count, self.last = 0, ""

    def wrong(self, frame: Frame) -> str | None:
        if frame.number < self.count:
            return f"frame {frame.number} once more, where {self.count} is due: it was repeated, or overtaken"
        if frame.number > self.count:
            missing = f"{self.count}" if frame.number == self.count + 1 else f"{self.count} to {frame.number - 1}"
            return f"frame {frame.number} without {missing}"
        if self.last not in _AFTER[frame.kind]:
            return f"a {frame.kind!r} frame {f'after {self.last!r}' if self.last else 'at the beginning'}"
        return None

    def take(self, frame: Frame) -> None:
        self.count, self.last = self.count + 1, frame.kind
