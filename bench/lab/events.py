"""Events that change a lab's links while a command runs in it: in time, as text and as values."""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Sequence

from .lab import Lab
from .network_commands import parse_rate, show_rate

_UNLIMITED = "unlimited"
_FORM = "SECONDS:RATE, SECONDS:HOST=RATE, or SECONDS:cut|heal|kill=HOST"


@dataclasses.dataclass(frozen=True)
class Event:
    """Change of the lab at some time.

    Args:
        at: seconds after the command was started.
        action: ``"rate"``, ``"cut"``, ``"heal"`` or ``"kill"``.
        host: whose link; None is everybody's (only of ``"rate"``).
        rate: bit/s; None is no limit.
    """

    at: float
    action: str
    host: int | None = None
    rate: float | None = None

    def apply(self, lab: Lab) -> None:
        """Carry out the change."""
        if self.action == "rate":
            lab.set_rate(self.rate, self.host)
            return
        assert self.host is not None
        if self.action == "kill":
            lab.signal(signal.SIGKILL, self.host)
        else:
            (lab.cut if self.action == "cut" else lab.heal)(self.host)

    def __str__(self) -> str:
        if self.action == "rate":
            whose = "every link" if self.host is None else f"h{self.host}"
            return f"{whose} at {_UNLIMITED if self.rate is None else show_rate(self.rate)}"
        return f"{self.action} h{self.host}"


def parse_event(text: str, hosts: int) -> Event:
    """``"10:50mbit"``, ``"10:2=50mbit"``, ``"20:cut=2"``, ``"30:heal=2"``, ``"40:kill=2"`` → an event.

    Args:
        text: as given to ``--at``; a rate may be ``unlimited``.
        hosts: how many the lab has.

    Raises:
        ValueError: not an event, or not of this lab.
    """
    when, colon, what = text.partition(":")
    try:
        at = float(when)
    except ValueError:
        at = -1.0
    if not colon or not 0 <= at < float("inf"):
        raise ValueError(f"--at is {_FORM}; got {text!r}")
    left, equals, right = what.partition("=")
    if left in ("cut", "heal", "kill"):
        return Event(at, left, _host(right, hosts, text))
    host, rate = (_host(left, hosts, text), right) if equals else (None, left)
    return Event(at, "rate", host, None if rate == _UNLIMITED else parse_rate(rate))


def parse_schedule(texts: Sequence[str], hosts: int) -> list[Event]:
    """All events in the order of time; those of one time stay in the order given."""
    return sorted((parse_event(t, hosts) for t in texts), key=lambda e: e.at)


def _host(text: str, hosts: int, whole: str) -> int:
    number = text.removeprefix("h")
    if not number.isdecimal() or int(number) >= hosts:
        raise ValueError(f"--at {whole}: there is no host {text!r}; this lab has 0 to {hosts - 1} ({_FORM})")
    return int(number)
