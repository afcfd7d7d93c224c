"""How much may be on its way to a peer that does not take it: back-pressure, counted by both sides. Pure.

The sender holds back what does not fit into the window. The receiver tells from time to time how much it has taken in
all: whenever that is a quarter of the window more than it told before. So a sender that counts less than a quarter as
waiting may have all of it taken without being told; a frame larger than the window goes then. What a slow reader has
yet to read is bounded, whatever lies between the two, and nothing is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence

from commlib.errors import ProtocolError
from commlib.messaging.frame import Buffer

WINDOW = 64 << 20
"""Bytes that may be on their way to one peer; a larger frame goes when most of that has been taken."""
_EACH = 1024  # so much a frame costs besides its parts: many empty ones fill a window, too


def _step(window: int) -> int:
    """The receiver tells of so many bytes."""
    return max(1, window // 4)


def _fits(waiting: int, cost: int, window: int) -> bool:
    # What the receiver knows to wait is never more than the sender does: so who keeps this is never accused.
    return waiting < _step(window) or waiting + cost <= window


def cost(parts: Sequence[Buffer]) -> int:
    """Bytes of the window that a frame of these parts takes."""
    return cost_of(sum(memoryview(p).nbytes for p in parts))


def cost_of(nbytes: int) -> int:
    """Bytes of the window that a frame of so many bytes takes."""
    return nbytes + _EACH


class CreditSender:
    """Credit for frames to one peer.

    Args:
        window: bytes.
    """

    def __init__(self, window: int = WINDOW) -> None:
        self._window, self._sent, self._taken = window, 0, 0

    @property
    def waiting(self) -> int:
        """Bytes that the peer has not told of having taken."""
        return self._sent - self._taken

    def admits(self, cost: int) -> bool:
        """Whether it may go now."""
        return _fits(self.waiting, cost, self._window)

    def sent(self, cost: int) -> None:
        """Count a frame that leaves."""
        self._sent += cost

    def kept(self, cost: int) -> None:
        """Take back a frame that did not leave after all."""
        self._sent -= cost

    def taken(self, total: int) -> None:
        """The peer has taken so much since the beginning.

        Raises:
            ProtocolError: that is more than was sent, or less than it has told before.
        """
        if not self._taken <= total <= self._sent:
            raise ProtocolError(f"it has taken {total} bytes, of {self._sent}, after {self._taken}")
        self._taken = total


class CreditReceiver:
    """Credit for a peer's frames.

    Args:
        window: the sender's, bytes.
    """

    def __init__(self, window: int = WINDOW) -> None:
        self._window, self._came, self._taken, self._told = window, 0, 0, 0

    def came(self, cost: int) -> None:
        """Count a frame that has come and waits to be taken.

        Raises:
            ProtocolError: its sender had no credit for it.
        """
        waiting = self._came - self._taken
        if not _fits(waiting, cost, self._window):
            raise ProtocolError(f"it sends on, with {waiting} bytes that have not been taken: {self._window} may wait")
        self._came += cost

    def take(self, cost: int) -> int | None:
        """Count a frame that is taken. Returns the total to tell the sender of, if it is time to."""
        self._taken += cost
        if self._taken - self._told < _step(self._window):
            return None
        self._told = self._taken
        return self._told
