"""When each run had the loss at which the first one ended, by the losses on the way. Pure.

Held-out loss over a run's own time: the clock stands while a model is evaluated.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from rich import box
from rich.table import Table

Runs = Sequence[Mapping[str, Any]]


def rows(runs: Runs) -> list[dict[str, Any]]:
    """Rows, one for each run that has a curve, against the first kind of run with the same seed.

    ``seconds``, ``steps`` and ``bytes`` (of one rank) are those of the first look that found a loss no higher, None if
    there was none; ``times_faster`` and ``times_fewer_bytes`` compare with the whole of that first run.
    """
    firsts = {r["seed"]: r["curve"][-1] for r in runs if r["comm"] == runs[0]["comm"] and r["curve"]}
    found = []
    for r in (r for r in runs if r["curve"] and r["seed"] in firsts):
        whole = firsts[r["seed"]]
        seconds, steps, _, sent = next((point for point in r["curve"] if point[2] <= whole[2]), [None] * 4)
        found.append(
            {
                "comm": r["comm"],
                "seed": r["seed"],
                "loss": whole[2],
                "seconds": seconds,
                "steps": steps,
                "bytes": sent,
                "times_faster": None if seconds is None else whole[0] / seconds,
                "times_fewer_bytes": None if not sent else whole[3] / sent,
            }
        )
    return found


def table(runs: Runs) -> Table:
    """Table of the curves for people."""
    t = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    t.add_column("until a test loss of", no_wrap=True)
    for head in ("loss", "s", "×", "steps", "MB", "×"):
        t.add_column(head, justify="right", no_wrap=True)
    for r in rows(runs):
        if r["seconds"] is None:
            t.add_row(r["comm"], f"{r['loss']:.3f}", *["–"] * 5)
            continue
        fewer = "–" if r["times_fewer_bytes"] is None else f"{r['times_fewer_bytes']:,.1f}"
        figures = (f"{r['seconds']:,.1f}", f"{r['times_faster']:,.1f}", f"{r['steps']:,}", f"{r['bytes'] / 1e6:,.2f}")
        t.add_row(r["comm"], f"{r['loss']:.3f}", *figures, fewer)
    return t


class Curve:
    """Loss curve of one run, on one rank. :meth:`look` is collective.

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
