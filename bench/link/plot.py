"""The figures of a link record as a picture: times with their lines, bandwidth under the raw line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from commlib.bench.results.record import Record
from commlib.bench.results.table import Row
from commlib.errors import MissingDependency
from commlib.messaging.link_model import FROM

from .results import title
from .sweep import show_size

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SUFFIXES = (".png", ".svg", ".pdf")
_MARKS = "osD^v"  # by backend
_STROKES = ("-", "--", ":", "-.")


def check(path: Path) -> None:
    """Whether a picture could be written there, before anything is measured for it.

    Raises:
        ValueError: a kind of file we do not draw, or a folder that is not there.
        MissingDependency: no matplotlib.
    """
    if path.suffix.lower() not in _SUFFIXES:
        raise ValueError(f"--plot writes {', '.join(_SUFFIXES)}; got {str(path)!r}")
    if not path.parent.is_dir():
        raise ValueError(f"--plot: there is no folder {str(path.parent)!r}")
    _figure_class()


def save(record: Record, path: Path) -> None:
    """Draw a record into a file whose suffix says the kind."""
    figure(record).savefig(path, dpi=150)


def figure(record: Record) -> Figure:
    """Two panels over the message size: seconds with the fitted lines, bus bandwidth with the raw line.

    Raises:
        MissingDependency: no matplotlib.
    """
    drawn = _figure_class()(figsize=(12, 5.4), layout="constrained")
    times, speeds = drawn.subplots(1, 2)
    operations = list(dict.fromkeys(str(r["op"]) for r in record.rows if r["bytes"]))
    backends = list(dict.fromkeys(str(r["backend"]) for r in record.rows))
    for b, backend in enumerate(backends):
        for o, op in enumerate(operations):
            its = [r for r in record.rows if r["backend"] == backend and r["op"] == op]
            if its:
                label = op if len(backends) == 1 else f"{backend} {op}"
                style = {"color": f"C{o}", "marker": _MARKS[b % len(_MARKS)], "markersize": 4}
                _draw(times, speeds, its, label, style, _STROKES[b % len(_STROKES)])
    line = record.run.get("line_gbit_s")
    if isinstance(line, float):
        speeds.axhline(line, color="black", linestyle=(0, (6, 3)), linewidth=1.2, label=f"raw TCP line {line:.3g}")
    times.set(
        xscale="log",
        yscale="log",
        ylabel="seconds",
        title=f"Time; lines are α + β·bytes, fitted from {show_size(FROM)} on",
    )
    speeds.set(xscale="log", ylabel="bus bandwidth, Gbit/s", title="Bandwidth of the busiest link")
    speeds.set_ylim(bottom=0)
    sizes = sorted({int(str(r["bytes"])) for r in record.rows if r["bytes"]})
    for axes in (times, speeds):
        axes.set_xlabel("message size")
        axes.set_xticks(sizes, [show_size(s) for s in sizes], rotation=45, ha="right")
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    handles, labels = speeds.get_legend_handles_labels()
    drawn.legend(handles, labels, loc="outside right center", frameon=False)
    drawn.suptitle(title(record.run).partition("; bandwidths")[0], fontsize=11)
    return drawn


def _draw(times: Any, speeds: Any, its: Sequence[Row], label: str, style: dict[str, Any], stroke: str) -> None:
    sizes = [r["bytes"] for r in its]
    times.plot(sizes, [r["seconds"] for r in its], linestyle="none", **style)
    fitted = [r for r in its if float(str(r["bytes"])) >= FROM]
    fitted = fitted if len(fitted) > 1 else list(its)
    predicted = [r["predicted_s"] for r in fitted]
    times.plot([r["bytes"] for r in fitted], predicted, color=style["color"], linestyle=stroke, linewidth=1)
    speeds.plot(sizes, [r["bus_gbit_s"] for r in its], label=label, linestyle=stroke, linewidth=1, **style)


def _figure_class() -> type[Figure]:
    try:
        from matplotlib.figure import Figure
    except ImportError as e:
        raise MissingDependency("a picture needs matplotlib: pip install matplotlib") from e
    return Figure
