"""``commlib trace``: several ranks' traces as one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from commlib.telemetry.trace import merge as merged

app = typer.Typer(help="Traces that comm.trace(path) has recorded.", no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def _commands() -> None:
    pass  # or one command would be the whole


@app.command()
def merge(
    files: Annotated[list[Path], typer.Argument(help="One of each rank.", show_default=False)],
    into: Annotated[Path, typer.Option("--into", metavar="FILE", help="Where to; may be one of them.")],
) -> None:
    """Merge the traces of several ranks into one file, on one time: as their hosts' clocks have it."""
    merged(files, into)
    print(f"{into}: {len(files)} traces; https://ui.perfetto.dev opens it")
