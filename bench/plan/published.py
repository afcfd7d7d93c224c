"""Reports of Poseidon's authors, beside this plan's predictions for their set-up.

No constant here, or anywhere in the plan, was chosen to meet these points.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from commlib.bench.results.table import Row

from .assumptions import Assumptions
from .known_models import known
from .schemes import outcomes

_DOCS = "documentation of Poseidon-TF 0.10; that its link is 40 GbE, from summaries of ATC 2017"
_SUMMARY = "third-party summary of Zhang et al., USENIX ATC 2017; the paper itself was not read"
TFLOPS = (3.0, 6.0)
"""A Titan X (Maxwell) has 6.1 TFLOP/s of float32 at most. Half of it, and about all of it."""
LATENCY_US, BATCH = 20.0, 32


@dataclasses.dataclass(frozen=True)
class PublishedPoint:
    """Speed-up that a paper has published.

    Args:
        system: what was measured.
        model: one of :data:`commlib.bench.plan.known_models.MODELS`.
        ranks: machines, of one GPU each.
        gbit: of a machine's link, Gbit/s.
        speedup: examples a second over those of one machine.
        scheme: the nearest of :data:`commlib.bench.plan.schemes.SCHEMES`.
        source: where it was found.
    """

    system: str
    model: str
    ranks: int
    gbit: float
    speedup: float
    scheme: str
    source: str


POINTS = (
    PublishedPoint("Poseidon", "inception-v3", 32, 40.0, 31.5, "auto", _DOCS),
    PublishedPoint("TensorFlow", "inception-v3", 32, 40.0, 20.0, "no overlap", _DOCS),
    PublishedPoint("Poseidon", "vgg19-22k", 32, 40.0, 30.0, "auto", _DOCS),
    PublishedPoint("Poseidon", "vgg19-22k", 16, 10.0, 15.5, "auto", _SUMMARY),
)


def predicted(point: PublishedPoint, tflops: float) -> float:
    """Speed-up by the point's scheme, in its set-up."""
    found = outcomes(known(point.model), Assumptions(point.gbit, LATENCY_US, tflops, BATCH), point.ranks)
    return next(o.speedup for o in found if o.scheme == point.scheme)


def rows(model: str | None = None, ranks: tuple[int, ...] = ()) -> list[Row]:
    """Published and predicted, a row a point.

    Args:
        model: only the points of this one, at these ``ranks``; None for all.
        ranks: P.
    """
    return [
        {
            "system": x.system,
            "model": x.model,
            "ranks": x.ranks,
            "gbit": x.gbit,
            "published": x.speedup,
            "scheme": x.scheme,
            **{f"at_{t:g}_tflops": predicted(x, t) for t in TFLOPS},
            "source": x.source,
        }
        for x in POINTS
        if model is None or (x.model == model and x.ranks in ranks)
    ]


def for_people(row: Row) -> Row:
    """Narrow form of a row of :func:`rows`."""
    low, high = sorted(float(str(row[f"at_{t:g}_tflops"])) for t in TFLOPS)
    return {
        "system": row["system"],
        "model": row["model"],
        "nodes": row["ranks"],
        "Gb/s": row["gbit"],
        "reported": row["published"],
        "scheme": row["scheme"],
        "predicted": f"{low:.1f}–{high:.1f}",
    }


def assumed(shown: Sequence[Row]) -> list[str]:
    """Assumptions behind the predictions of these rows, in sentences."""
    said = [
        f"Predicted with batch {BATCH}, {LATENCY_US:g} µs and {TFLOPS[0]:g} to {TFLOPS[1]:g} TFLOP/s: "
        "a Titan X (Maxwell) has 6.1 at most."
    ]
    if any(row["system"] != "Poseidon" for row in shown):
        said.append("TensorFlow stands beside the nearest scheme, which is not its own.")
    return said


def sources() -> list[str]:
    """Where the points were found, a line each."""
    return list(dict.fromkeys(f"{p.model}, {p.ranks} nodes: {p.source}." for p in POINTS))
