"""Which route to take, in words: what the figures of a training or an exchange benchmark allow one to say.

The rule: a route is faster (or slower) than the baseline only if its step differs from the baseline's by
more than 5 % *and* by more than the larger of the two spreads; anything less is "no difference". A route
that failed or whose loss is wrong is never recommended. Losses are said like wins.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from commlib.bench.results.table import Row

from . import formatting

MARGIN = 0.05  # of the baseline's step: below, nobody would change a training script for it
_BUSY, _IDLE = 0.6, 0.2  # shares of the line above and below which it does or does not decide
_IMPOSSIBLE = 1.1  # of the line: then the line was measured wrongly
RACES = {"train": "ddp", "fsdp2": "fsdp2"}
"""Kind of record → its baseline's name, in the column of routes and after ``vs_``."""

_AVOID = "Do not use it here, however fast."

Judgement = Literal["faster", "slower", "same", "unknown"]


@dataclasses.dataclass(frozen=True)
class Finding:
    """Sentence of the recommendation.

    Args:
        text: plain text, not escaped for anything.
        alarm: the reader must not overlook it: a result that is wrong.
    """

    text: str
    alarm: bool = False


@dataclasses.dataclass(frozen=True)
class MeasuredRoute:
    """Measured route of a benchmark.

    Args:
        name: as the user would write it.
        baseline: whether the others are compared with it.
        exact: whether it hands over the true mean gradient.
        step_s: median seconds a step.
        versus: the baseline's step over this one's; above 1 is faster.
        spread: (q75 − q25)/median of the steps.
        failure: why there are no figures, or None.
        loss: after the steps, where there is one.
        loss_ok: False if the loss (or the gradient) is not what it must be; None if nobody looked.
    """

    name: str
    baseline: bool
    exact: bool
    step_s: float | None
    versus: float | None
    spread: float | None
    failure: str | None = None
    loss: float | None = None
    loss_ok: bool | None = None


def contenders(kind: str, rows: Iterable[Row]) -> list[MeasuredRoute]:
    """The rows of one model of a race or an ``exchange`` record, the shortest step first, failures last."""
    made = [_from_race(kind, row) if kind in RACES else _from_exchange(row) for row in rows]
    return sorted(made, key=lambda c: (c.failure is not None, c.step_s or math.inf))


def judge(contender: MeasuredRoute, baseline: MeasuredRoute) -> Judgement:
    """The rule of this module; "unknown" where a time or a spread is missing."""
    if contender.failure or baseline.failure or contender.versus is None:
        return "unknown"
    if contender.spread is None or baseline.spread is None:
        return "unknown"
    change = 1 / contender.versus - 1
    if abs(change) <= max(MARGIN, contender.spread, baseline.spread):
        return "same"
    return "faster" if change < 0 else "slower"


def find_baseline(field: Sequence[MeasuredRoute]) -> MeasuredRoute | None:
    """The route the others are compared with, if it was timed and its own result is right."""
    return next((c for c in field if c.baseline and not c.failure and c.loss_ok is not False and c.step_s), None)


def recommend(field: Sequence[MeasuredRoute], *, exact: bool = False) -> MeasuredRoute | None:
    """The fastest route that is faster than the baseline, did not fail, and whose loss is not wrong.

    Args:
        field: all routes.
        exact: only among those that do not change the gradient.
    """
    base = find_baseline(field)
    if base is None:
        return None
    better = [c for c in field if c.loss_ok is not False and judge(c, base) == "faster" and (c.exact or not exact)]
    return max(better, key=lambda c: c.versus or 0.0, default=None)


def sentences(field: Sequence[MeasuredRoute], *, where: str, baseline: str, line_share: float | None) -> list[Finding]:
    """All there is to say of one model.

    Args:
        field: its routes (:func:`contenders`).
        where: model, ranks and rate, as ``gpt, 4 ranks on 4 emulated hosts at 200 Mbit/s``.
        baseline: what to call the route that the others are compared with.
        line_share: the part of the line's speed that the baseline reaches, averaged over its step.
    """
    wrong = [_wrong(c, field, where) for c in field if c.loss_ok is False and not c.failure]
    base = find_baseline(field)
    if base is None:
        why = next((c.failure or "its own result is wrong" for c in field if c.baseline), "it was not among the routes")
        said = [Finding(f"{where}: nothing can be compared, for {baseline} has no valid figure ({why}).")]
        return [*wrong, *said, *_failures(field)]
    said = [Finding(f"{where}: {_headline(field, base, baseline)}")]
    return [*wrong, *said, *_others(field, base, baseline), *_failures(field), *_line(line_share, baseline)]


def clause(field: Sequence[MeasuredRoute], *, model: str, baseline: str) -> str:
    """The shortest verdict: ``onebit saves 71 % for fc``."""
    base, best = find_baseline(field), recommend(field)
    if base is None:
        return f"nothing can be said for {model}"
    if best is None:
        unsure = any(judge(c, base) == "unknown" and not c.failure for c in field if c is not base)
        return f"{baseline} is best for {model}" if not unsure else f"nothing is shown to beat {baseline} for {model}"
    note = "" if best.exact else " and changes the gradient"
    return f"{best.name} saves {_saved(best)} for {model}{note}"


def line_share(rows: Iterable[Row], run: Mapping[str, object], kind: str) -> float | None:
    """The part of the measured line that the baseline reaches, averaged over its step; None if unknown."""
    row = next((r for r in rows if _is_baseline(kind, r)), None)
    if row is None:
        return None
    if "of_line" in row:
        return formatting.positive(row["of_line"])
    sent, step = formatting.positive(row.get("socket_bytes")), formatting.positive(row.get("step_s"))
    line = formatting.positive(run.get("line_gbit_s"))
    return 8e-9 * sent / step / line if sent and step and line else None


def _headline(field: Sequence[MeasuredRoute], base: MeasuredRoute, baseline: str) -> str:
    best, exact = recommend(field), recommend(field, exact=True)
    took = formatting.seconds(base.step_s or 0.0)
    if best is None:
        return f"no route is shown to be faster than {baseline} ({took} a step); leave it as it is."
    unsure = [c for c in field if judge(c, base) == "unknown" and c.loss_ok is not False and not c.failure]
    hidden = any(c.versus is None or c.versus > (best.versus or 0.0) for c in unsure)
    fastest = "the fastest that can be judged" if hidden else "the fastest"
    text = f"{best.name} is {fastest}, it saves {_saved(best)} of the step of {baseline} ({took})"
    text += " and leaves the gradient exact." if best.exact else " and changes the gradient."
    if best.loss_ok is None and best.loss is not None:
        text += " Its loss was not checked."
    if best.exact:
        return text
    if exact is None:
        return f"{text} No exact route is shown to be faster."
    return f"{text} The fastest exact route is {exact.name}, it saves {_saved(exact)}."


def _others(field: Sequence[MeasuredRoute], base: MeasuredRoute, baseline: str) -> list[Finding]:
    """Every route that ran, by what may be said of it; the one of the headline is there already."""
    best = recommend(field)
    ran = [c for c in field if c is not base and c is not best and not c.failure and c.loss_ok is not False]
    kinds: dict[Judgement, list[MeasuredRoute]] = {"faster": [], "slower": [], "same": [], "unknown": []}
    for c in ran:
        kinds[judge(c, base)].append(c)
    said = []
    if kinds["faster"]:
        said.append(f"Also faster: {formatting.join([f'{_label(c)} saves {_saved(c)}' for c in kinds['faster']])}.")
    if kinds["slower"]:
        added = [f"{_label(c)} adds {formatting.percent(1 / c.versus - 1)}" for c in kinds["slower"] if c.versus]
        said.append(f"Slower than {baseline}: {formatting.join(added)} to the step.")
    if kinds["same"]:
        said.append(f"No difference beyond 5 % and the spread: {_names(kinds['same'])}.")
    if kinds["unknown"]:
        said.append(f"Without a spread (timed too seldom), so that nothing is claimed: {_names(kinds['unknown'])}.")
    return [Finding(text) for text in said]


def _failures(field: Sequence[MeasuredRoute]) -> list[Finding]:
    failed = [f"{c.name} ({c.failure})" for c in field if c.failure]
    return [Finding(f"Failed, and has no figures: {formatting.join(failed)}.")] if failed else []


def _wrong(c: MeasuredRoute, field: Sequence[MeasuredRoute], where: str) -> Finding:
    reference = next((b.loss for b in field if b.baseline and b is not c), None)
    if c.loss is None or reference is None:
        return Finding(f"Wrong result: {where}: {c.name} does not give what it must. {_AVOID}", True)
    found = f"the loss came to {c.loss:.4g} with {c.name}, to {reference:.4g} with the baseline"
    return Finding(f"Wrong result: {where}: {found}. {_AVOID}", True)


def _line(share: float | None, baseline: str) -> list[Finding]:
    if share is None:
        return []
    if share > _IMPOSSIBLE:
        text = (
            f"{baseline} seems to send at {formatting.percent(share)} of the measured line, which cannot be: "
            "the line was"
        )
        return [Finding(f"What the link decides is not known: {text} busy while it was measured.")]
    text = f"{baseline[0].upper()}{baseline[1:]} uses {formatting.percent(share)} of the measured line"
    if share >= _BUSY:
        return [Finding(f"{text}: the link decides, and fewer bytes can help.")]
    # No bound on what can be saved: fewer bytes also cost the CPU less, which an unhurried line does not show.
    rest = "compute, latency, or the CPU's part of sending, which fewer bytes can shorten too"
    if share <= _IDLE:
        return [Finding(f"{text}: the link does not decide. What does is {rest}.")]
    return [Finding(f"{text}: the link alone does not explain its step. The rest is {rest}.")]


def _names(field: Sequence[MeasuredRoute]) -> str:
    return formatting.join([_label(c) for c in field])


def _label(c: MeasuredRoute) -> str:
    return f"{c.name} (exact)" if c.exact else c.name


def _saved(c: MeasuredRoute) -> str:
    return formatting.percent(1 - 1 / c.versus) if c.versus else "–"


def _is_baseline(kind: str, row: Row) -> bool:
    if kind in RACES:
        return row.get("route") == RACES[kind]
    return row.get("exchange") == "dense" and row.get("codec") == "none"


def _from_race(kind: str, row: Row) -> MeasuredRoute:
    status, ok = row.get("status"), row.get("loss_ok")
    return MeasuredRoute(
        name=str(row.get("route")),
        baseline=_is_baseline(kind, row),
        exact=formatting.exact(row),
        step_s=formatting.positive(row.get("step_s")),
        versus=formatting.positive(row.get(f"vs_{RACES[kind]}")),
        spread=formatting.number(row.get("spread")),
        failure=None if status == "ok" else str(status or "no status"),
        loss=formatting.number(row.get("loss")),
        loss_ok=ok if isinstance(ok, bool) else None,
    )


def _from_exchange(row: Row) -> MeasuredRoute:
    step = formatting.positive(row.get("step_s"))
    return MeasuredRoute(
        name=f"{row.get('codec')}@{row.get('exchange')}",
        baseline=_is_baseline("exchange", row),
        exact=formatting.exact(row),
        step_s=step,
        versus=formatting.positive(row.get("vs_dense")),
        spread=formatting.number(row.get("spread")),
        failure=None if step else "no step was timed",
    )
