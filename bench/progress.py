"""Progress of a benchmark, on standard error: a bar on a terminal, else nothing."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


class Bar:
    """A bar, the count, the time gone by and what is under way; a context manager. Gone when it ends.

    Args:
        text: what is under way at first.
        total: how much there is to do, if that is known.
    """

    def __init__(self, text: str, total: int | None = None) -> None:
        words = TextColumn("{task.description}", markup=False)
        columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), words)
        self._bar = Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True)
        self._task = self._bar.add_task(text, total=total)

    def show(self, *, done: int, total: int | None = None, text: str | None = None) -> None:
        """How much is done; a total and a text stay until there are others."""
        self._bar.update(self._task, completed=done, total=total, description=text)

    def __enter__(self) -> Bar:
        self._bar.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()
