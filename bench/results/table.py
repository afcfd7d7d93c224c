"""How every benchmark prints: a table for people, JSON lines for programs.

A row is a mapping of column name to value. Both forms come from the same rows, so that what is
read on the screen is what is stored.
"""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import TextIO

from rich.console import Console
from rich.table import Table

Row = Mapping[str, object]
_PIPED_WIDTH = 160  # columns of a table that is not printed on a terminal: nothing is cut off


def print_rows(rows: Sequence[Row], *, title: str = "", as_json: bool = False, file: TextIO | None = None) -> None:
    """Print rows that all have the columns of the first.

    Args:
        rows: column name → value; floats are shown with four significant digits in the table.
        title: above the table.
        as_json: one JSON object a line instead, every digit kept.
        file: standard output by default.

    Raises:
        ValueError: rows with different columns.
    """
    out = file or sys.stdout
    columns = list(rows[0]) if rows else []
    for row in rows:
        if list(row) != columns:
            raise ValueError(f"rows of one report need the same columns: {', '.join(columns)}; got {', '.join(row)}")
    if as_json:
        for row in rows:
            print(json.dumps(row), file=out)
        return
    table = Table(title=title or None)
    for name in columns:
        numeric = all(isinstance(r[name], int | float | None) for r in rows)
        heading = "\n".join(heading_lines(name, [r[name] for r in rows]))
        table.add_column(heading, justify="right" if numeric else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(cell(v) for v in row.values()))
    console(out).print(table)


def heading_lines(column: str, values: Iterable[object]) -> list[str]:
    """A column's name, in as many lines as keep it no wider than its values (or eight letters)."""
    width = max([8, *(len(cell(v)) for v in values)])
    return textwrap.wrap(column.replace("_", " "), width, break_long_words=False)


def table_width(rows: Sequence[Row]) -> int:
    """Characters that the table of these rows takes in a line."""
    widths = []
    for name in rows[0] if rows else ():
        values = [r[name] for r in rows]
        widths.append(max(map(len, [*heading_lines(name, values), *map(cell, values)])))
    return 1 + sum(w + 3 for w in widths)


def cell(value: object) -> str:
    """A value as the table shows it."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)


def console(file: TextIO) -> Console:
    """A rich console that does not fold tables when they are piped into a file."""
    return Console(file=file, width=None if file.isatty() else _PIPED_WIDTH, highlight=False, markup=False)
