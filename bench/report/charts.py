"""Parts of the pictures: rows of bars, the words at them, a key, a time axis.

Colours are those of Okabe and Ito, which differ for every common kind of colour blindness; what a colour
says is also written at the bar.

A matplotlib figure as SVG that can stand in the middle of an HTML page.
"""

from __future__ import annotations

import html
import io
import re
import textwrap
from collections.abc import Callable, Sequence

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

from . import formatting
from .recommendation import MeasuredRoute, find_baseline, judge

BLUE, ORANGE, GREEN, RED, GREY, INK = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#8c8c8c", "#222222"
_WIDTH = 9.0  # inches, at 9 points a letter: on the page letters come out at the size of its text
_ROW = 0.3  # inches a bar
_PAPER = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}  # behind words that cross a line


def bar_rows(
    count: int, title: str, *, columns: tuple[float, ...] = (1.0,), below: int = 0, row: float = _ROW
) -> tuple[Figure, list[Axes]]:
    """A figure with places for bars below each other, the first on top.

    Args:
        count: of bars.
        title: says what the picture shows; it is broken into lines.
        columns: relative widths of the axes beside each other; more than one leave room at the right.
        below: lines of a note to leave free at the foot.
        row: inches a bar.
    """
    lines = textwrap.wrap(title, 95)
    top, foot = 0.5 + 0.2 * len(lines) + (0.2 if len(columns) > 1 else 0.0), 0.5 + 0.18 * below
    height = top + foot + row * (count + 0.4)
    figure = Figure(figsize=(_WIDTH, height), facecolor="white")
    figure.text(0.01, 1 - 0.08 / height, "\n".join(lines), va="top", fontsize=11, fontweight="bold", color=INK)
    axes = list(figure.subplots(1, len(columns), squeeze=False, width_ratios=columns)[0])
    figure.subplots_adjust(left=0.24, right=0.98 if len(columns) == 1 else 0.785, wspace=0.06)
    figure.subplots_adjust(top=1 - top / height, bottom=foot / height)
    for a in axes:
        a.set_ylim(count - 0.3, -0.7)
        a.spines[["top", "right", "left"]].set_visible(False)
        a.tick_params(length=0, labelsize=9)
        a.tick_params(axis="x", length=3)
        a.grid(axis="x", color="#e3e3e3", linewidth=0.7)
        a.set_axisbelow(True)
    return figure, axes


def step_times(axes: Axes, shown: Sequence[MeasuredRoute], colours: Sequence[str], baseline: str, room: float) -> None:
    """Step times with their spread, and at each bar the time and the ratio to the baseline.

    Args:
        axes: of :func:`bar_rows`.
        shown: a bar each, the first on top.
        colours: of the bars.
        baseline: what to call the dashed line.
        room: the axis's length over the longest bar's, for the words at that bar.
    """
    base = find_baseline(shown)
    longest = max((c.step_s or 0.0) * (1 + (c.spread or 0.0) / 2) for c in shown)
    unit, scale = time_unit(longest)
    for y, (c, colour) in enumerate(zip(shown, colours, strict=True)):
        length = scale * (c.step_s or 0.0)
        half = length * (c.spread or 0.0) / 2
        wrong = c.loss_ok is False
        fill, hatch = ("white", "///") if wrong else (colour, None)
        axes.barh(y, length, color=fill, edgecolor=colour, hatch=hatch, height=0.66)
        axes.plot([max(0.0, length - half), length + half], [y, y], color=INK, linewidth=1.2, solid_capstyle="butt")
        text = f"{formatting.seconds(c.step_s or 0.0)}{_compared(c, base)}" + ("; WRONG RESULT" if wrong else "")
        beside(axes, text, length + half, y, colour=RED if wrong else INK)
    if base is not None and base.step_s is not None:
        axes.axvline(scale * base.step_s, color=INK, linewidth=0.8, linestyle=(0, (4, 3)), zorder=0.5)
    axes.set_xlabel(f"{unit} a step (thin line: the middle half; dashed: {baseline})", fontsize=8, loc="left")
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.set_xlim(0, scale * longest * room)


def time_unit(longest: float) -> tuple[str, float]:
    """The unit of a time axis as long as so many seconds, and what to multiply seconds with."""
    return ("s", 1.0) if longest >= 2 else ("ms", 1e3) if longest >= 2e-3 else ("µs", 1e6)


def beside(axes: Axes, text: str, x: float, y: float, *, colour: str = INK, size: float = 9) -> None:
    """Words right of a point."""
    axes.annotate(
        text, (x, y), (5, 0), textcoords="offset points", va="center", color=colour, fontsize=size, bbox=_PAPER
    )


def name_rows(axes: Axes, names: Sequence[str]) -> None:
    """Name each row, at its left."""
    axes.set_yticks(range(len(names)), [n if len(n) <= 34 else f"{n[:33]}…" for n in names])


def key(figure: Figure, entries: Sequence[tuple[str, str, str]]) -> None:
    """Under the title: (mark, its colour, what it stands for), side by side."""
    x, height = 0.01, figure.get_figheight()
    y = 1 - (0.36 + 0.2 * (len(figure.texts[0].get_text().splitlines()) - 1)) / height
    for mark, colour, text in entries:
        figure.text(x, y, mark, color=colour, va="top", fontsize=10, fontweight="bold")
        figure.text(x + 0.018, y, text, color=INK, va="top", fontsize=9)
        x += 0.0082 * len(text) + 0.04


def note(figure: Figure, lines: Sequence[str]) -> None:
    """Note what the picture does not show, at its foot."""
    text = "\n".join(textwrap.shorten(line, 130, placeholder=" …") for line in lines)
    figure.text(0.01, 0.06 / figure.get_figheight(), text, va="bottom", fontsize=8, color=RED)


def log_axis(axes: Axes, show: Callable[[float], str]) -> None:
    """A logarithmic x axis whose ticks are written by ``show``."""
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda v, _: show(v)))
    axes.xaxis.set_minor_formatter(NullFormatter())


def _compared(c: MeasuredRoute, base: MeasuredRoute | None) -> str:
    if c.baseline or c.versus is None or base is None:
        return ""
    judgement = judge(c, base)
    if judgement == "same":
        return ", no difference"
    if judgement == "unknown":
        return f" ({formatting.times(c.versus)}, no spread)"
    return f", {formatting.times(c.versus)} faster" if c.versus >= 1 else f", {formatting.times(1 / c.versus)} slower"


_NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))  # None drops an entry
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_ID = re.compile(r'(\bid="|\bhref="#|url\(#)')
_SIZE = re.compile(r' (?:width|height)="[^"]*"')


def inline(figure: Figure, name: str, says: str) -> str:
    """The ``<svg>`` element, as wide as what it stands in.

    Args:
        figure: whatever canvas it has is replaced.
        name: unlike that of every other figure on the page; its ids begin with it.
        says: what the picture shows, for those who cannot see it.
    """
    out = io.StringIO()
    # Letters become outlines: a page looks the same where the fonts are missing, and no label runs into another.
    with matplotlib.rc_context({"svg.fonttype": "path", "svg.hashsalt": name}):
        FigureCanvasSVG(figure)
        figure.savefig(out, format="svg", metadata=_NO_METADATA)
    text = out.getvalue()
    text = _COMMENT.sub("", text[text.index("<svg") :])  # no XML declaration or document type in HTML
    root, _, rest = _ID.sub(rf"\g<1>{name}-", text).partition(">")
    label = f'<svg role="img" aria-label="{html.escape(says)}"'
    return f"{_SIZE.sub('', root).replace('<svg', label)}>{rest}".strip()
