"""Which layers shall leave dense, given what each way costs. Pure.

Figures as the manager says them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from commlib.messaging.link_model import Link
from commlib.planning.cost.overlap import TrainingPass, finish
from commlib.planning.cost.route_cost import Candidate


def ms(seconds: float) -> str:
    """Format seconds as ``12.3 ms``."""
    return f"{seconds * 1e3:.3g} ms"


def mbit(link: Link) -> str:
    """Rate of a link in words: ``200 Mbit/s``."""
    beta = link.all_reduce.beta
    return f"{8e-6 / beta:.3g} Mbit/s" if beta else "no limit that shows"


def some(names: Sequence[str]) -> str:
    """The first three, and how many more."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


MARGIN = 0.02
"""A change that shortens a step by a smaller share is not worth making."""
WORTH = 0.05
"""A plan that does so is not worth trying: steps vary by as much, and a trial would be won or lost by chance."""


@dataclasses.dataclass(frozen=True)
class RouteChoice:
    """A way for every layer.

    Args:
        ways: layer → what it takes.
        dense: layer → its dense way.
        reasons: layer → why, in words.
        dense_s: predicted seconds of a step with all layers dense.
        seconds: predicted seconds of a step.
    """

    ways: Mapping[str, Candidate]
    dense: Mapping[str, Candidate]
    reasons: Mapping[str, str]
    dense_s: float
    seconds: float


def choose(
    p: TrainingPass,
    dense: Mapping[str, Candidate],
    others: Mapping[str, Sequence[Candidate]],
    margin: float = MARGIN,
    worth: float | None = None,
    *,
    frugal: bool = False,
) -> RouteChoice:
    """Ways that come within ``margin`` of the shortest step found; all dense, if that comes within ``worth``.

    Of those the one that costs link and cores least, by what layers cost by themselves; or, if ``frugal``, one with
    as few changes as possible, for ways that lose something: then a layer whose transfer hides behind the backward
    pass stays dense. No step is predicted longer than a dense one.

    A layer's best other way is the one that costs least by itself. Layers are changed in the order of what that
    saves, as far as it shortens the step; then each alone is looked at once more.

    Args:
        p: a step that was all dense.
        dense: every layer's dense way.
        others: what else a layer may take; a layer may be missing.
        margin: share of the shortest step's time.
        worth: the same, for leaving all dense; None: the margin.
        frugal: whether a change is worth making only for the step's time.

    Raises:
        KeyError: as :func:`commlib.planning.cost.overlap.finish`.
    """
    best = {name: min(ways, key=lambda w: w.alone_s) for name, ways in others.items() if ways}
    gains = {name: dense[name].alone_s - way.alone_s for name, way in best.items()}
    order = sorted((n for n, gain in gains.items() if gain > 0), key=lambda n: -gains[n])

    def seconds(changed: Sequence[str]) -> float:
        return finish(p, {**dense, **{n: best[n] for n in changed}})

    times = [seconds(order[:count]) for count in range(len(order) + 1)]
    shortest = min(times)
    changed = order[: times.index(shortest)]
    for name in order:
        other = [n for n in changed if n != name] if name in changed else [*changed, name]
        if (t := seconds(other)) < shortest:
            shortest, changed = t, other
    limit = (1 + margin) * shortest
    if times[0] <= (limit if worth is None else (1 + worth) * shortest):
        changed = []
    elif frugal:
        for name in sorted(changed, key=lambda n: gains[n]):
            fewer = [n for n in changed if n != name]
            changed = fewer if seconds(fewer) <= limit else changed
    else:
        for name in order:
            more = [*changed, name]
            changed = more if name not in changed and seconds(more) <= limit else changed
    ways = {**dense, **{name: best[name] for name in changed}}
    reasons = {n: _why(dense[n], best.get(n), n in changed) for n in dense}
    return RouteChoice(ways, dense, reasons, times[0], seconds(changed))


def compress_too(
    p: TrainingPass,
    exact: RouteChoice,
    others: Mapping[str, Sequence[Candidate]],
    margin: float = MARGIN,
    worth: float | None = None,
) -> RouteChoice:
    """An exact choice with as few layers compressed as come within ``margin`` of the shortest step there is then.

    Args:
        p: a step that was all dense.
        exact: of :func:`choose`.
        others: layer → compressed ways.
        margin, worth: as there; what is exact takes the part of what is dense.
    """
    found = choose(p, exact.ways, others, margin, worth, frugal=True)
    reasons = {}
    for name, way in found.ways.items():
        compressed, dense = way != exact.ways[name], way == exact.dense[name]
        of = found if compressed or (dense and others.get(name)) else exact
        reasons[name] = of.reasons[name]
    return dataclasses.replace(found, dense=exact.dense, reasons=reasons, dense_s=exact.dense_s)


def _why(dense: Candidate, best: Candidate | None, changed: bool) -> str:
    if best is None:
        return "has no other way"
    costs = f"{best.route} would cost {ms(best.alone_s)}, {dense.route} costs {ms(dense.alone_s)}"
    if changed:
        return f"costs {ms(best.alone_s)}, {dense.route} would cost {ms(dense.alone_s)}"
    if best.alone_s >= dense.alone_s:
        return costs
    return f"{costs}, but that hides behind the backward pass, or too little would be saved"
