"""Pictures of a record: each can be read without the text around it."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Sequence

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from commlib.bench.results.record import Record
from commlib.bench.results.table import Row

from . import formatting
from .charts import (
    BLUE,
    GREEN,
    GREY,
    INK,
    ORANGE,
    RED,
    bar_rows,
    beside,
    key,
    log_axis,
    name_rows,
    note,
    step_times,
    time_unit,
)
from .findings import BASELINE
from .recommendation import MeasuredRoute, contenders

_BY = {"baseline": (GREY, ""), "commlib": (BLUE, "commlib"), "pytorch": (ORANGE, "PyTorch's own hooks")}
_PHASES = (("compress", BLUE), ("decompress", GREEN), ("the rest: wire and waiting", "#cfcfcf"))
_COUNTS = (  # column, what it is, colour, marker, its size, the marker as a letter
    ("accounted_bytes", "accounted for", BLUE, "o", 5.0, "●"),
    ("socket_bytes", "at the sockets", ORANGE, "|", 11.0, "|"),
    ("interface_bytes", "at the network interface", RED, "x", 6.0, "×"),
)
_LINK_PLOT = "commlib.bench.link.plot"


@dataclasses.dataclass(frozen=True)
class Picture:
    """A figure and what it shows, in one sentence."""

    figure: Figure
    says: str


def pictures(record: Record, title: str, rows: list[Row]) -> list[Picture]:
    """The pictures of some rows of a record; none if there is nothing to draw.

    Args:
        record: what they are of.
        title, rows: as :func:`commlib.bench.report.formatting.groups` gives them.
    """
    if record.kind == "link":
        return _link(dataclasses.replace(record, rows=rows))
    with matplotlib.rc_context({"text.parse_math": False, "font.size": 9}):  # a "$" in a name is a "$"
        match record.kind:
            case "train" | "fsdp2":
                made = [_train(record, title, rows)]
            case "exchange":
                made = [_exchange(record, title, rows), _phases(record, title, rows)]
            case _:
                made = [_codec(title, rows)]
    return [p for p in made if p is not None]


def _train(record: Record, title: str, rows: Sequence[Row]) -> Picture | None:
    """Bars of step time, a route each."""
    baseline = BASELINE[record.kind]
    by = {str(r.get("route")): str(r.get("by")) for r in rows}
    field = contenders(record.kind, rows)
    shown = [c for c in field if not c.failure and c.step_s]
    if not shown:
        return None
    failed = [f"not shown, failed: {c.name}: {c.failure}" for c in field if c.failure]
    says = f"Time of a training step: {title}, {formatting.setting(record.run)}; shorter is better"
    figure, (axes,) = bar_rows(len(shown), says, below=len(failed))
    sorts = ["baseline" if c.baseline else by[c.name] for c in shown]
    room = 1.8 if any(c.loss_ok is False for c in shown) else 1.5
    step_times(axes, shown, [_BY.get(s, (INK, ""))[0] for s in sorts], baseline, room)
    name_rows(axes, [c.name + _remark(c) for c in shown])
    key(figure, [("■", colour, what or baseline) for sort, (colour, what) in _BY.items() if sort in sorts])
    note(figure, failed)
    return Picture(figure, says)


def _exchange(record: Record, title: str, rows: Sequence[Row]) -> Picture | None:
    """Step time beside the bytes that were sent for it."""
    shown, rows = _timed(rows)
    if not shown:
        return None
    says = f"Exchanging the gradients of {title}: {formatting.setting(record.run)}"
    figure, (left, right) = bar_rows(len(shown), says, columns=(3.0, 1.5))
    step_times(left, shown, [GREY if c.baseline else BLUE for c in shown], "dense", 2.0)
    name_rows(left, [c.name + _remark(c) for c in shown])
    left.set_title("time of a step; shorter is better", fontsize=9, color=INK)
    _sent(right, rows)
    drawn = [c for c in _COUNTS if any(formatting.positive(r.get(c[0])) for r in rows)]
    key(figure, [(letter, colour, f"bytes {what}") for _, what, colour, _, _, letter in drawn])
    return Picture(figure, says)


def _sent(axes: Axes, rows: Sequence[Row]) -> None:
    """A point for each way of counting bytes, and in words what a logarithmic axis hides."""
    for column, _, colour, marker, size, _ in _COUNTS:
        points = [(v, y) for y, r in enumerate(rows) if (v := formatting.positive(r.get(column)))]
        axes.plot(
            [x for x, _ in points],
            [y for _, y in points],
            linestyle="",
            marker=marker,
            markersize=size,
            markeredgewidth=1.5,
            color=colour,
        )
    log_axis(axes, formatting.nbytes)
    axes.set_xlabel("a rank, a step (logarithmic)", fontsize=8)
    axes.set_title("bytes sent; further left is fewer", fontsize=9, color=INK)
    axes.set_yticks([])
    for y, row in enumerate(rows):
        axes.annotate(_in_words(row), (1.03, y), xycoords=axes.get_yaxis_transform(), va="center", fontsize=8)


def _in_words(row: Row) -> str:
    """``28.1× fewer; interface +5.2 %``."""
    fewer, accounted = formatting.positive(row.get("times_fewer")), formatting.positive(row.get("accounted_bytes"))
    place = "interface" if formatting.positive(row.get("interface_bytes")) else "sockets"
    seen = formatting.positive(row.get("interface_bytes")) or formatting.positive(row.get("socket_bytes"))
    parts = []
    if fewer is not None and abs(fewer - 1) < 0.005:
        parts.append("as dense")
    elif fewer is not None:
        parts.append(f"{formatting.times(fewer)} fewer" if fewer > 1 else f"{formatting.times(1 / fewer)} more")
    if accounted and seen:
        parts.append(f"{place} {formatting.signed(seen / accounted - 1)}")
    return "; ".join(parts)


def _phases(record: Record, title: str, rows: Sequence[Row]) -> Picture | None:
    """Picture of a codec's part of a step. Not ``wire_s``: buckets under way at the same time would count twice."""
    shown, rows = _timed(rows)
    spent = [[formatting.positive(r.get(column)) or 0.0 for column in ("compress_s", "decompress_s")] for r in rows]
    if not any(map(sum, spent)):
        return None
    parts = [[*s, max(0.0, (c.step_s or 0.0) - sum(s))] for c, s in zip(shown, spent, strict=True)]
    longest = max(map(sum, parts))
    says = f"What of a step the codec takes: gradients of {title}, {formatting.setting(record.run)}"
    figure, (axes,) = bar_rows(len(shown), says)
    unit, scale = time_unit(longest)
    for y, lengths in enumerate(parts):
        start = 0.0
        for seconds, (_, colour) in zip(lengths, _PHASES, strict=True):
            axes.barh(y, scale * seconds, left=scale * start, color=colour, height=0.66)
            start += seconds
        codec = sum(lengths[:2])
        beside(axes, f"{formatting.seconds(codec)}, {formatting.percent(codec / start)} of it", scale * start, y)
    name_rows(axes, [c.name for c in shown])
    axes.set_xlabel(f"{unit} a step; at the bar: compress and decompress together, summed over buckets")
    axes.set_xlim(0, scale * longest * 1.3)
    key(figure, [("■", colour, label) for label, colour in _PHASES])
    return Picture(figure, says)


def _codec(title: str, rows: Sequence[Row]) -> Picture | None:
    """Bars that begin at the time of a plain copy."""
    ops = {"compress": (BLUE, "compress"), "decompress_add": (ORANGE, "decompress and add")}
    cost: dict[str, dict[str, float]] = {}
    bits: dict[str, float | None] = {}
    for row in rows:
        if (copies := formatting.positive(row.get("copy_multiple"))) and row.get("op") in ops:
            cost.setdefault(str(row.get("codec")), {})[str(row.get("op"))] = copies
            bits[str(row.get("codec"))] = formatting.positive(row.get("bits_per_value"))
    if not cost:
        return None
    names = sorted(cost, key=lambda n: sum(cost[n].values()))
    says = f"What a codec costs, in copies of the gradient: {title}; shorter is better"
    figure, (axes,) = bar_rows(len(names), says, row=0.42)
    for i, (op, (colour, _)) in enumerate(ops.items()):
        for y, name in enumerate(names):
            if (copies := cost[name].get(op)) is not None:
                at = y + 0.36 * (i - 0.5)
                axes.barh(at, copies - 1, left=1, height=0.34, color=colour)
                beside(axes, formatting.times(copies), max(copies, 1.0), at, size=8)
    axes.axvline(1, color=INK, linewidth=1)
    log_axis(axes, "{:g}×".format)
    low, high = min(min(c.values()) for c in cost.values()), max(max(c.values()) for c in cost.values())
    axes.set_xlim(min(low, 1.0) / 1.05, max(high, 2.0) * 1.5)
    axes.set_xlabel("time as a multiple of a plain copy's (logarithmic); bars begin at 1×, the copy")
    name_rows(axes, [n if bits[n] is None else f"{n}, {bits[n]:.3g} bits a value" for n in names])
    key(figure, [("■", colour, what) for colour, what in ops.values()])
    return Picture(figure, says)


def _link(record: Record) -> list[Picture]:
    """As the link benchmark draws itself."""
    try:
        plot = importlib.import_module(_LINK_PLOT)
    except ModuleNotFoundError as e:
        if e.name is None or not _LINK_PLOT.startswith(e.name):
            raise
        return []
    figure: Figure = plot.figure(record)
    return [Picture(figure, f"Time and bus bandwidth of collectives by message size: {formatting.setting(record.run)}")]


def _remark(c: MeasuredRoute) -> str:
    return "  (baseline)" if c.baseline else "  (exact)" if c.exact else ""


def _timed(rows: Sequence[Row]) -> tuple[list[MeasuredRoute], list[Row]]:
    """The timed routes of an exchange record, the shortest step first, and the row of each."""
    field = [c for c in contenders("exchange", rows) if not c.failure]
    of = {f"{r.get('codec')}@{r.get('exchange')}": r for r in rows}
    return field, [of[c.name] for c in field]
