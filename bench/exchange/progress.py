"""Which visit is under way, on stderr: a bar on a terminal, else nothing."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from .rank import Doing


class Bar:
    """A context manager; called before each visit."""

    def __init__(self) -> None:
        columns = (
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}", markup=False),
        )
        self._bar = Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True)
        self._task = self._bar.add_task("starting the ranks, measuring the line", total=None)

    def __enter__(self) -> Bar:
        self._bar.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def __call__(self, doing: Doing) -> None:
        self._bar.update(self._task, description=str(doing.pair), completed=doing.number, total=doing.total)
