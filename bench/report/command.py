"""``commlib bench report``: saved figures as one HTML page."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from commlib.bench.results.record import read
from commlib.errors import MissingDependency


def report(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where --save kept the figures.")],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="[FOLDER/report.html]", show_default=False)
    ] = None,
) -> None:
    """Saved figures as one HTML page: a verdict in words, pictures, tables, machine and commands.

    The page needs no network and no other file. Drawing needs matplotlib: pip install "torch-commlib[report]".
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file; name the folder that --save kept the figures in")
    try:
        records = read(folder)
    except (OSError, UnicodeDecodeError) as e:
        raise ValueError(f"{folder}: cannot be read: {e}") from e
    try:
        from .page import page  # draws, and so needs an optional package
    except ModuleNotFoundError as e:
        if (e.name or "").partition(".")[0] != "matplotlib":
            raise
        raise MissingDependency('bench report draws with matplotlib: pip install "torch-commlib[report]"') from e
    path = folder / "report.html" if output is None else output
    write_whole(path, page(records))
    print(path)


def write_whole(path: Path, text: str) -> None:
    """Put a file there at once: whoever reads it sees the old one or the new one, never half of it.

    Raises:
        ValueError: it cannot be written there.
    """
    if path.is_dir():
        raise ValueError(f"{path} is a folder; --output names a file")
    try:
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    except OSError as e:
        raise ValueError(f"{path} cannot be written: {e.strerror}; choose another place with --output") from e
    try:
        with os.fdopen(handle, "w", encoding="utf-8", errors="replace") as out:
            out.write(text)
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(name, 0o666 & ~umask)  # mkstemp makes it the owner's alone
        os.replace(name, path)
    except OSError as e:
        Path(name).unlink(missing_ok=True)
        raise ValueError(f"{path} cannot be written: {e.strerror}; choose another place with --output") from e
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
