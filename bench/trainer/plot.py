"""Test loss over time and over bytes, of all runs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from commlib.bench.link.plot import check

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["check", "figure", "save"]

_COLOURS = ("#000000", "#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_MARKS = "osDv^P*"


def save(report: Mapping[str, Any], path: Path) -> None:
    """Draw what ``commlib train --curve`` found into a file whose suffix says the kind.

    Raises:
        ValueError: it cannot be written there.
    """
    try:
        figure(report).savefig(path, dpi=150)
    except OSError as e:
        raise ValueError(f"--plot: {str(path)!r} cannot be written ({e.strerror or e})") from e


def figure(report: Mapping[str, Any]) -> Figure:
    """Two panels: loss over seconds, and over bytes; a dotted line where the first run ended."""
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(11, 5), layout="constrained")
    panels = drawn.subplots(1, 2, sharey=True)
    names = list(dict.fromkeys(run["comm"] for run in report["runs"]))
    for run in report["runs"]:
        seconds, _, losses, sent = zip(*run["curve"], strict=True)
        which = names.index(run["comm"])
        style: dict[str, Any] = {"color": _COLOURS[which % len(_COLOURS)], "marker": _MARKS[which % len(_MARKS)]}
        style |= {"markersize": 4, "linewidth": 1.6, "label": run["comm"] if run["seed"] == _first(report) else None}
        panels[0].plot(seconds, losses, **style)
        panels[1].plot([max(b, 1) / 1e6 for b in sent], losses, **style)
    last = report["runs"][0]["curve"][-1][2]
    for axes, what in zip(panels, ("seconds", "MB that a rank sent"), strict=True):
        axes.axhline(last, color="#8c8c8c", linestyle=":", linewidth=1)
        axes.set(xscale="log", xlabel=what)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("test loss, nats")
    handles, labels = panels[0].get_legend_handles_labels()
    drawn.legend(handles, labels, loc="outside right center", frameon=False)
    r = report
    drawn.suptitle(
        f"{r['task']}: {r['parameters']:,} parameters, {r['ranks']} ranks of {r['batch_per_rank']} examples a step, "
        f"{r['backend']} on {r['device']}",
        fontsize=10,
    )
    return drawn


def _first(report: Mapping[str, Any]) -> int:
    seed: int = report["runs"][0]["seed"]
    return seed
