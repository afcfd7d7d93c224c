"""Whose turn it is, on stderr: a bar on a terminal, else nothing."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from .schedule import Schedule, Visit


class Bar:
    """A context manager; called with the visit that begins, or None when one has ended."""

    def __init__(self, model: str) -> None:
        columns = (
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}", markup=False),
        )
        self._model = model
        self._bar = Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True)
        self._task = self._bar.add_task(f"{model}: starting the ranks, measuring the line", total=None)

    def __enter__(self) -> Bar:
        self._bar.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def __call__(self, visit: Visit | None, schedule: Schedule) -> None:
        done = len(schedule.outcomes)
        self._bar.update(self._task, completed=done, total=done + schedule.visits_left())
        if visit is not None:
            text = f"{self._model}: round {visit.round + 1} of {schedule.planned_rounds()}, {visit.name}"
            self._bar.update(self._task, description=text)
