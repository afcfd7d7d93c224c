"""How long a member may be silent before it is given up: by how regularly it was heard of. Pure.

As TCP judges how long to wait for an acknowledgement (Jacobson, SIGCOMM 1988): by the mean of the intervals and their
mean deviation. What is late on a busy machine every now and then makes the deadline longer, and not the member dead.
"""

from __future__ import annotations

_MEAN, _DEVIATION, _TIMES = 1 / 8, 1 / 4, 4.0


class FailureDetector:
    """Detector of one member's silence.

    Args:
        now: seconds; it is taken to have just been heard of.
        patience: seconds of silence that are always allowed.
    """

    def __init__(self, now: float, patience: float) -> None:
        self._patience, self._heard, self._last = patience, now, ""
        self._mean = self._deviation = 0.0

    @property
    def deadline(self) -> float:
        """Seconds of silence that are allowed."""
        return self._patience + _TIMES * (self._mean + _TIMES * self._deviation)

    def silent(self, now: float) -> float:
        """Seconds for which nothing was heard."""
        return now - self._heard

    def hear(self, now: float, beat: str) -> None:
        """Note a member's last word; the same as before is nothing new."""
        if beat == self._last:
            return
        if self._last:
            interval = now - self._heard
            self._deviation += _DEVIATION * (abs(interval - self._mean) - self._deviation)
            self._mean += _MEAN * (interval - self._mean)
        self._heard, self._last = now, beat

    def late(self, now: float) -> bool:
        """Whether it is given up."""
        return self.silent(now) > self.deadline

    def excuse(self, seconds: float) -> None:
        """Leave out so many seconds in which whoever listens was away itself: what it did not hear then says nothing.

        Only these: on a busy machine it may be away before each look, and a member that is dead is silent nevertheless.
        """
        self._heard += seconds
