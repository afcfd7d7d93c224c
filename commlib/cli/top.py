"""``commlib top``: a run that goes on, seen by the files that its ranks write (:meth:`commlib.HookState.log_to`)."""

from __future__ import annotations

import json as _json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from commlib.monitoring.top import LogTails, picture

_WIDE = 160


class _Column(NamedTuple):
    head: str
    width: int
    show: Callable[[Mapping[str, Any]], str]


def _number(key: str, form: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda row: "–" if row[key] is None else format(row[key], form)


_RANKS = (  # what there is room for, the first ones first
    _Column("rank", 4, lambda row: str(row["rank"])),
    _Column("step", 7, _number("step", ",")),
    _Column("exposed ms", 10, _number("exposed_ms", ".1f")),
    _Column("steps/s", 7, _number("steps_per_s", ".2f")),
    _Column("state", 5, lambda row: row["state"]),
    _Column("bytes/step", 11, _number("bytes_per_step", ",.0f")),
    _Column("of dense", 8, lambda row: "–" if not row["ratio"] else f"1/{row['ratio']:.1f}"),
    _Column("error", 5, _number("error", ".3f")),
    _Column("skipped", 7, _number("skipped", ",")),
    _Column("replicas", 11, lambda row: _replicas(row["replicas"])),
    _Column("host", 8, lambda row: str(row["host"])),
)
_LAYERS = (
    _Column("layer", 18, lambda row: str(row["layer"])),
    _Column("error", 5, _number("error", ".3f")),
    _Column("residual", 8, _number("residual", ".3g")),
    _Column("rank", 4, lambda row: str(row["rank"])),
    _Column("route", 16, lambda row: str(row["route"])),
)
_CHANGES = (
    _Column("step", 7, _number("step", ",")),
    _Column("layer", 12, lambda row: str(row["layer"])),
    _Column("from → to", 22, lambda row: f"{row['from']} → {row['to']}"),
    _Column("why", 20, lambda row: str(row["reason"])),
)
_WORDS = ("layer", "route", "host", "from → to", "why", "state")


def top(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[PATH]...", help="What log_to wrote: files, or a folder of them. [this folder]"),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Show it once.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Once, as a JSON object.")] = False,
    every: Annotated[float, typer.Option(metavar="SECONDS", help="Between two looks.")] = 1.0,
    layers: Annotated[int, typer.Option(help="So many of the layers with the largest errors.")] = 5,
) -> None:
    """A run that goes on: its ranks, the layers that lose most, what has changed. Ctrl-C ends it, not the run.

    The run writes with comm.log_to("run.jsonl") on each rank. A rank that writes nothing more is named.
    """
    if not every > 0:
        raise ValueError(f"--every must be a number of seconds > 0, got {every}")
    if layers < 0:
        raise ValueError(f"--layers must not be negative, got {layers}")
    places = paths or [Path()]
    tails = LogTails(places)

    def now() -> dict[str, Any]:
        accounts, notes = tails.read()
        seen = picture(accounts, layers=layers)
        return {**seen, "notes": [*notes, *seen["notes"]]}

    if once or json:
        seen = now()
        if not seen["ranks"]:
            said = "; ".join(seen["notes"]) or "there is no .jsonl file in it"
            raise ValueError(f"no log in {', '.join(map(str, paths)) if paths else 'this folder'}: {said}")
        if json:
            print(_json.dumps(seen, indent=2))
        else:
            console = Console()
            if not console.is_terminal:
                console.width = max(console.width, _WIDE)
            console.print(view(seen, console.width))
        return
    _follow(now, every)


def _follow(now: Callable[[], dict[str, Any]], every: float) -> None:
    console = Console(file=sys.stdout)
    try:
        with Live(console=console, auto_refresh=False, screen=False, vertical_overflow="crop") as live:
            while True:
                live.update(view(now(), console.width), refresh=True)
                time.sleep(every)
    except KeyboardInterrupt:
        pass  # that is how it ends


def view(seen: Mapping[str, Any], width: int) -> RenderableType:
    """Tables of the members seen, for a terminal of so many columns: the least important ones go first.

    Args:
        seen: of :func:`commlib.monitoring.top.picture`.
        width: in characters.
    """
    parts: list[RenderableType] = []
    if seen["ranks"]:
        parts.append(_table(_RANKS, seen["ranks"], width))
    else:
        parts.append(Text("no rank has written anything yet"))
    if seen["layers"]:
        parts += [Text(), _table(_LAYERS, seen["layers"], width)]
    if seen["changes"]:
        parts += [Text(), _table(_CHANGES, seen["changes"], width)]
    parts += [Text(f"\n! {note}", style="bold") for note in seen["notes"]]
    return Group(*parts)


def _table(columns: tuple[_Column, ...], rows: list[dict[str, Any]], width: int) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1))
    room, shown = width, list[tuple[_Column, list[str]]]()
    for column in columns:
        cells = [column.show(row) for row in rows]
        needed = max(len(column.head), min(column.width, max(map(len, cells)))) + 3
        if shown and needed > room:
            break
        room -= needed
        shown.append((column, cells))
    for column, _ in shown:
        words = column.head in _WORDS
        table.add_column(column.head, justify="left" if words else "right", no_wrap=True, overflow="ellipsis")
    for row in zip(*(cells for _, cells in shown), strict=True):
        table.add_row(*map(Text, row))
    return table


def _replicas(found: Any) -> str:
    if found is None:
        return "–"
    return str(found) if found == "differ" else f"same @{found}"
