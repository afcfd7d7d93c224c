"""A progress bar on stderr; nothing where stderr is no terminal."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from .rank import Progress as Step
from .settings import Settings


class Bar:
    """Shows the run in progress and how many are done; a context manager."""

    def __init__(self, settings: Settings) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._bar = Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True)
        self._runs = [(c, s) for c in settings.comms for s in settings.seeds]
        self._tasks: dict[tuple[str, int], TaskID] = {}

    def __enter__(self) -> Bar:
        self._bar.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def __call__(self, rank: int, message: object) -> None:
        """A message of a rank."""
        if not isinstance(message, Step):
            return
        run = (message.comm, message.seed)
        if run not in self._tasks:
            seed = f" seed {message.seed}" if len({s for _, s in self._runs}) > 1 else ""
            number = f"[{self._runs.index(run) + 1}/{len(self._runs)}]"
            self._tasks[run] = self._bar.add_task(f"\\{number} {message.comm}{seed}", total=message.total)
        self._bar.update(self._tasks[run], completed=message.step)
