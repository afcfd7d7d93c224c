"""In which order layers' factors leave: the same on every rank. A pure state machine.

Layers become ready in whatever order the backward pass meets them, and a layer that a rank does not use becomes
ready only when DDP asks for its bucket. They are issued in one fixed order, each as soon as it and all before it are
ready. At the end of a backward pass every layer is ready, for DDP has asked for every bucket; so all are issued, and
on every rank in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence


class Order:
    """One step after another.

    Args:
        names: all layers, in the order in which they are issued.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = list(names)
        self._known = set(names)
        self._ready: set[str] = set()
        self._issued = 0

    def ready(self, name: str) -> list[str]:
        """A layer has become ready (more than once does no harm): those to issue now, in order.

        Raises:
            KeyError: there is no such layer.
        """
        if name not in self._known:
            raise KeyError(name)
        self._ready.add(name)
        start = self._issued
        while self._issued < len(self.names) and self.names[self._issued] in self._ready:
            self._issued += 1
        return self.names[start : self._issued]

    def restart(self) -> None:
        """The next step begins."""
        self._ready.clear()
        self._issued = 0
