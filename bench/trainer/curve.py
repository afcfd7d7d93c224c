"""Held-out loss over a run's own time: the clock stands while a model is evaluated."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

import torch.distributed as dist


class Curve:
    """Of one run, on one rank. :meth:`look` is collective.

    Args:
        every: steps between two looks; None: only the clock is of use.
        loss: evaluates the model, on all ranks together.
    """

    def __init__(self, every: int | None, loss: Callable[[], float]) -> None:
        self._every, self._loss = every, loss
        self._begun, self._stood, self._looked = 0.0, 0.0, 0
        self.points: list[tuple[float, int, float, int]] = []
        """(seconds, steps, loss, bytes that this rank had sent)."""
        self.wall = 0.0
        """Seconds of all steps."""

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """The clock runs inside; :attr:`wall` is set at the end."""
        self._begun = time.perf_counter()
        yield
        self.wall = self._seconds()

    def look(self, step: int, sent: int, *, last: bool = False) -> None:
        """The loss after so many steps, if it is time; all ranks call it after the same ones."""
        if self._every is None or step - self._looked < (1 if last else self._every):
            return
        seconds = self._seconds() if self.wall == 0.0 else self.wall
        began = time.perf_counter()
        self._looked = step
        self.points.append((seconds, step, self._loss(), sent))
        dist.barrier()  # nobody's clock runs while another is still evaluating
        self._stood += time.perf_counter() - began

    def _seconds(self) -> float:
        return time.perf_counter() - self._begun - self._stood
