"""Time to an accuracy as a picture, after SparkNet's figure 4: speed-up over S; and accuracy over time."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from commlib.bench.link.plot import check

from .convergence_model import LOCAL, NAIVE, Table, crossover, grid, seconds_to
from .time_to_accuracy import Question

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["check", "figure", "save"]

_MAPS = {"sparknet": "Blues", "easgd": "Greens", "diloco": "Oranges", "ssp": "Purples", "wsp": "RdPu"}


def save(asked: Question, table: Table, path: Path) -> None:
    """Draws it into a file whose suffix says the kind.

    Raises:
        ValueError: it cannot be written there.
    """
    try:
        figure(asked, table).savefig(path, dpi=150)
    except OSError as e:
        raise ValueError(f"--plot: {str(path)!r} cannot be written ({e.strerror or e})") from e


def figure(asked: Question, table: Table) -> Figure:
    """Left, the speed-up over one rank by S, with a dot where local steps begin to beat naive parallel SGD; right,
    accuracy by seconds for one S: the middle one of those asked for."""
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(12, 5), layout="constrained")
    left, right = drawn.subplots(1, 2)
    meeting = sorted(asked.meetings_s)[len(asked.meetings_s) // 2]
    curves = asked.curves(table)
    alone = table.serial[asked.accuracy] * asked.step_s
    for name, tau in curves:
        style = _style(name, tau, [t for n, t in curves if n == name])
        _over_s(left, asked, table, name, tau, alone, style)
        reached = seconds_to(table, name, asked.ranks, tau, asked.step_s, meeting)
        right.plot(list(reached.values()), [100 * a for a in reached], marker=".", **style)
    one_rank = [count * asked.step_s for count in table.serial.values()]
    grey = {"color": "grey", "linestyle": ":"}
    right.plot(one_rank, [100 * a for a in table.serial], marker=".", label="one rank", **grey)
    left.axhline(1, label="one rank", **grey)
    left.set(xscale="log", yscale="log", xlabel="S, seconds of an exchange", ylabel="times one rank")
    left.set_ylim(bottom=0.02)
    left.set_title(f"Speed-up to {100 * asked.accuracy:g} %")
    right.set(xscale="log", xlabel="seconds", ylabel="accuracy, %", title=f"Accuracy over time, S = {meeting:.3g} s")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    handles, labels = left.get_legend_handles_labels()
    drawn.legend(handles, labels, loc="outside right center", frameon=False)
    drawn.suptitle(
        f"{asked.ranks} ranks, C = {asked.step_s:.3g} s: rounds as measured, times by SparkNet's model",
        fontsize=10,
    )
    return drawn


def _over_s(axes: Any, asked: Question, table: Table, name: str, tau: int, alone: float, style: dict[str, Any]) -> None:
    points = [
        (s, alone / took)
        for s in grid(asked.step_s, points=121 if name in LOCAL or name == NAIVE else 25)
        if (took := seconds_to(table, name, asked.ranks, tau, asked.step_s, s).get(asked.accuracy))
    ]
    label = name if name == NAIVE else f"{name}, τ = {tau}"
    axes.plot(
        [s for s, _ in points], [y for _, y in points], label=label if points else f"{label}: not reached", **style
    )
    where = crossover(table, name, asked.ranks, tau, asked.accuracy, asked.step_s)
    if where:
        took = seconds_to(table, name, asked.ranks, tau, asked.step_s, where)[asked.accuracy]
        axes.plot([where], [alone / took], marker="o", markersize=6, color=style["color"], markeredgecolor="black")


def _style(name: str, tau: int, taus: list[int]) -> dict[str, Any]:
    """Naive in black; a hue for each algorithm, darker with τ."""
    from matplotlib import colormaps

    if name == NAIVE:
        return {"color": "black", "linewidth": 2.5, "zorder": 3}
    shade = 0.4 + 0.55 * (taus.index(tau) / max(1, len(taus) - 1) if len(taus) > 1 else 0.5)
    return {"color": colormaps[_MAPS[name]](shade), "linewidth": 1.8}
