"""Rows as HTML tables: columns a reader knows, with their units, every text escaped."""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Callable, Iterable, Mapping, Sequence

from commlib.bench.results.table import Row, cell

from . import formatting


@dataclasses.dataclass(frozen=True)
class Column:
    """Column of a table: which field it shows, what stands above it, and how a number is written.

    Args:
        name: field of the row.
        head: heading, with the unit.
        show: for numbers; other values are written as the terminal has them.
        long: a text that may take several lines.
    """

    name: str
    head: str
    show: Callable[[float], str] | None = None
    long: bool = False


def _scaled(scale: float) -> Callable[[float], str]:
    return lambda v: (
        f"{v * scale:,.4g}"
        if 1 <= abs(v * scale) < 1e4
        else f"{v * scale:.3g}"
        if abs(v * scale) < 1
        else f"{v * scale:,.0f}"
    )


def _delta(value: float) -> str:
    """Near 1 the distance from it is what tells fp16 from a copy."""
    return f"1 − {1 - value:.0e}" if 0 < 1 - value < 1e-3 else f"{value:.3g}"


_MS, _PLAIN, _WHOLE = _scaled(1e3), _scaled(1), "{:,.0f}".format
_SPREAD = Column("spread", "spread", formatting.percent)


def _race(baseline: str, name: str) -> tuple[Column, ...]:
    """Columns of training steps, beside those of a baseline of that name."""
    return (
        Column("route", "route"),
        Column("by", "by"),
        Column("step_s", "step, ms", _MS),
        _SPREAD,
        Column(f"vs_{baseline}", f"{name}’s over this", formatting.times),
        Column("steps", "steps", _WHOLE),
        Column("socket_bytes", "sent a step", formatting.nbytes),
        Column("times_fewer", "times fewer", formatting.times),
        Column("loss", "loss", _PLAIN),
        Column(f"loss_of_{baseline}", f"{name}’s loss", _PLAIN),
        Column("loss_ok", "loss right?"),
        Column("status", "status", long=True),
    )


COLUMNS: Mapping[str, Sequence[Column]] = {
    "train": _race("ddp", "DDP"),
    "fsdp2": _race("fsdp2", "FSDP2"),
    "exchange": (
        Column("exchange", "exchange"),
        Column("codec", "codec"),
        Column("step_s", "step, ms", _MS),
        _SPREAD,
        Column("vs_dense", "dense over this", formatting.times),
        Column("compress_s", "compress, ms", _MS),
        Column("wire_s", "wire, ms, summed", _MS),
        Column("decompress_s", "decom­press, ms", _MS),
        Column("accounted_bytes", "sent, as accounted", formatting.nbytes),
        Column("overhead", "at sockets", formatting.signed),
        Column("interface_bytes", "at interface", formatting.nbytes),
        Column("times_fewer", "times fewer", formatting.times),
        Column("wire_gbit_s", "Gbit/s", _PLAIN),
        Column("of_line", "of the line", formatting.percent),
    ),
    "link": (
        Column("backend", "backend"),
        Column("op", "collective"),
        Column("bytes", "bytes", _WHOLE),
        Column("reps", "times", _WHOLE),
        Column("seconds", "ms", _MS),
        _SPREAD,
        Column("bus_gbit_s", "bus, Gbit/s", _PLAIN),
        Column("of_line", "of the line", formatting.percent),
        Column("predicted_s", "α + β · bytes, ms", _MS),
        Column("off", "predicted over measured", formatting.signed),
    ),
    "codec": (
        Column("codec", "codec"),
        Column("op", "operation"),
        Column("numel", "values", _WHOLE),
        Column("dtype", "dtype"),
        Column("device", "device"),
        Column("kernels", "kernels"),
        Column("seconds", "ms", _MS),
        Column("gb_per_s", "GB/s", _PLAIN),
        Column("copy_multiple", "time over a copy's", formatting.times),
        Column("error", "δ of one shot (1: lossless)", _delta),
        Column("bits_per_value", "bits a value", _PLAIN),
    ),
}
FITS = (
    Column("backend", "backend"),
    Column("op", "collective"),
    Column("alpha_us", "α, µs", _PLAIN),
    Column("beta_gbit_s", "1/β, bus Gbit/s", _PLAIN),
    Column("largest", "largest message, bytes", _WHOLE),
    Column("of_line", "of the line with it", formatting.percent),
    Column("off", "worst prediction from 64 kB on", formatting.signed),
)


def table(rows: Sequence[Row], columns: Iterable[Column], *, bold: Callable[[Row], bool] = lambda _: False) -> str:
    """The rows as a table; a column that is empty in all of them is left out.

    Args:
        rows: at least one.
        columns: in this order; a field that is no column is not shown.
        bold: which rows stand out.
    """
    shown = [c for c in columns if any(r.get(c.name) is not None for r in rows)]
    numeric = {c.name for c in shown if all(r.get(c.name) is None or _is_number(r.get(c.name)) for r in rows)}
    mark = {c.name: ' class="figure"' if c.name in numeric else ' class="long"' if c.long else "" for c in shown}
    head = "".join(f"<th{mark[c.name]}>{html.escape(c.head)}</th>" for c in shown)
    body = []
    for row in rows:
        cells = "".join(f"<td{mark[c.name]}>{html.escape(_text(row.get(c.name), c))}</td>" for c in shown)
        body.append(f'<tr class="baseline">{cells}</tr>' if bold(row) else f"<tr>{cells}</tr>")
    return f'<div class="table"><table><thead><tr>{head}</tr></thead><tbody>{"".join(body)}</tbody></table></div>'


def facts(entries: Mapping[str, object]) -> str:
    """Names and values, a line each."""
    lines = (
        f"<tr><th>{html.escape(name.replace('_', ' '))}</th><td>{html.escape(cell(value))}</td></tr>"
        for name, value in entries.items()
        if value is not None
    )
    return f'<div class="table"><table class="facts"><tbody>{"".join(lines)}</tbody></table></div>'


def fits(rows: Iterable[Row], fit_from: float) -> list[Row]:
    """Rows for each (backend, collective) of a link record: α, 1/β, its largest message, its worst prediction.

    Args:
        rows: of the record.
        fit_from: bytes; predictions of shorter messages are not judged.
    """
    found: dict[tuple[object, object], list[Row]] = {}
    for row in rows:
        found.setdefault((row.get("backend"), row.get("op")), []).append(row)
    return [_fit(mine, fit_from) for mine in found.values()]


def _fit(rows: Sequence[Row], fit_from: float) -> Row:
    last = max(rows, key=lambda r: formatting.number(r.get("bytes")) or 0.0)
    offs = [
        o
        for r in rows
        if (formatting.number(r.get("bytes")) or 0.0) >= fit_from and (o := formatting.number(r.get("off")))
    ]
    shared = {name: last.get(name) for name in ("backend", "op", "alpha_us", "beta_gbit_s", "of_line")}
    return {**shared, "largest": last.get("bytes"), "off": max(offs, key=abs, default=None)}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _text(value: object, column: Column) -> str:
    figure = formatting.number(value)
    return cell(value) if figure is None or column.show is None else column.show(figure)
