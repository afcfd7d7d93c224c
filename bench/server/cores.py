"""What share of the machine's cores was busy meanwhile: whoever kept them so, in whichever emulated host."""

from __future__ import annotations

import dataclasses

_FIELDS = 8  # user nice system idle iowait irq softirq steal; guests, which follow, are in user and nice already
_IDLE = (3, 4)


@dataclasses.dataclass(frozen=True)
class Ticks:
    """Of all cores since the machine was started.

    Attributes:
        busy: all but idle and waiting for disks; what a virtual machine's host took away is busy too.
        all: in all.
    """

    busy: int
    all: int


def ticks() -> Ticks | None:
    """Now; None where the system does not say (Linux does)."""
    try:
        with open("/proc/stat", encoding="ascii") as f:
            return parse(f.readline())
    except OSError:
        return None


def parse(line: str) -> Ticks | None:
    """Of the first line of /proc/stat; None if it is not what Linux writes there.

    >>> parse("cpu  30 0 20 940 10 0 0 0 0 0")
    Ticks(busy=50, all=1000)
    """
    name, *counts = line.split() or [""]
    if name != "cpu" or len(counts) < max(_IDLE) + 1 or not all(c.isdecimal() for c in counts):
        return None
    numbers = [int(c) for c in counts[:_FIELDS]]
    return Ticks(sum(numbers) - sum(numbers[i] for i in _IDLE), sum(numbers))


def busy_share(before: Ticks | None, after: Ticks | None) -> float | None:
    """Of the cores, between two looks; None where one is missing, or no tick has gone by."""
    if before is None or after is None or after.all <= before.all:
        return None
    # Waiting for disks may be counted back (proc(5)), so a share could come out of its bounds by a tick.
    return min(1.0, max(0.0, (after.busy - before.busy) / (after.all - before.all)))
