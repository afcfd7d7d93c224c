"""A plan as a picture: speed-up and efficiency by number of ranks."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from commlib.bench.link.plot import check
from commlib.bench.results.record import Record

from .published import POINTS
from .schemes import SCHEMES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["check", "figure", "save"]

_TICKS = 13  # more numbers of ranks than that are marked by powers of two
# Okabe and Ito's colours, marks, and widths that leave something to see of what lies below.
_STYLES = {
    "dense": ("#0072B2", "o", "-", 4.0),
    "no overlap": ("#56B4E9", "v", "--", 1.6),
    "factors": ("#E69F00", "s", "-", 2.6),
    "owners": ("#009E73", "P", "-", 2.0),
    "auto": ("#D55E00", "D", "-", 1.2),
    "adam": ("#8c8c8c", "^", ":", 1.6),
}


def save(record: Record, heading: str, path: Path) -> None:
    """Draw a record into a file whose suffix says the kind.

    Raises:
        ValueError: it cannot be written there.
    """
    try:
        figure(record, heading).savefig(path, dpi=150)
    except OSError as e:
        raise ValueError(f"--plot: {str(path)!r} cannot be written ({e.strerror or e})") from e


def figure(record: Record, heading: str) -> Figure:
    """Two panels over the number of ranks: speed-up beside the ideal one, and the share of it that is reached.

    Args:
        record: as :func:`commlib.bench.plan.command.make_record` makes it.
        heading: what it was predicted for.
    """
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(11, 5), layout="constrained")
    speedups, shares = drawn.subplots(1, 2)
    ranks = sorted({int(str(r["ranks"])) for r in record.rows})
    speedups.plot(ranks, ranks, color="black", linewidth=1, linestyle=(0, (2, 3)), label="ideal")
    for scheme in SCHEMES:
        its = [r for r in record.rows if r["scheme"] == scheme]
        colour, mark, stroke, width = _STYLES[scheme]
        style = {"color": colour, "linestyle": stroke, "linewidth": width}
        style |= {"marker": mark if len(ranks) <= _TICKS else "", "markersize": 3 + 2 * width}
        style["zorder"] = 3 if scheme == "auto" else 2
        speedups.plot(ranks, [r["speedup"] for r in its], label=scheme, **style)
        shares.plot(ranks, [100 * float(str(r["efficiency"])) for r in its], **style)
    _points(speedups, shares, record)
    speedups.set(xscale="log", yscale="log", ylabel="times one rank", title="Speed-up")
    ticks = ranks if len(ranks) <= _TICKS else [1 << i for i in range(ranks[-1].bit_length())]
    lowest = min(float(str(r["speedup"])) for r in record.rows)
    heights = [2.0**i for i in range(math.floor(math.log2(lowest)), 0)] + list(map(float, ticks))
    speedups.set_yticks(heights, [f"{h:.3g}" if h < 1 else f"{h:.0f}" for h in heights])
    shares.set(xscale="log", ylabel="% of ideal", title="Efficiency")
    shares.set_ylim(0, 104)
    for axes in (speedups, shares):
        axes.set_xlabel("ranks")
        axes.set_xticks(ticks, list(map(str, ticks)))
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    handles, labels = speedups.get_legend_handles_labels()
    drawn.legend(handles, labels, loc="outside right center", frameon=False)
    drawn.suptitle(heading, fontsize=10)
    return drawn


def _points(speedups: Any, shares: Any, record: Record) -> None:
    """Published speed-ups of this model at these ranks, over a link of this speed."""
    run = record.run
    ranks = {r["ranks"] for r in record.rows}
    for p in POINTS:
        if p.model == run["model"] and p.ranks in ranks and p.gbit == run["gbit"]:
            style = {"color": "black", "linestyle": "none", "markersize": 9, "zorder": 4}
            style["marker"] = "*" if p.system == "Poseidon" else "X"
            speedups.plot(p.ranks, p.speedup, label=f"{p.system}, published", **style)
            shares.plot(p.ranks, 100 * p.speedup / p.ranks, **style)
