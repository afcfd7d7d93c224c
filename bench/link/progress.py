"""A progress bar on stderr; nothing where stderr is no terminal."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from .rank import Progress as Step
from .sizes import show_size


class Bar:
    """Shows what is being measured and how many operations are done; a context manager."""

    def __init__(self, total: int) -> None:
        columns = (TextColumn("{task.description:32}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._bar = Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True)
        self._task = self._bar.add_task("the raw line", total=total)

    def __enter__(self) -> Bar:
        self._bar.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def __call__(self, rank: int, message: object) -> None:
        """A message of a rank."""
        if isinstance(message, Step):
            size = show_size(message.bytes) if message.bytes else ""
            self._bar.update(
                self._task, completed=message.done, description=f"{message.backend} {message.op} {size}".rstrip()
            )
