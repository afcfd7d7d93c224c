"""Rows of a training record, from the visits."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from commlib.bench.results.record import Record
from commlib.bench.results.table import Row, cell

from .configurations import Configuration
from .correctness import judge
from .schedule import Schedule, TrialOutcome


def rows(schedule: Schedule, contenders: Sequence[Configuration], *, model: str, parameters: int) -> list[Row]:
    """Rows, one a configuration, in their order. Columns: docs/benchmarks.md."""
    name = schedule.baseline
    base = schedule.of(name)
    found = [_row(c, schedule.of(c.name), base, schedule.dropped.get(c.name), name) for c in contenders]
    return [{"model": model, "parameters": parameters, **row} for row in found]


def _row(
    contender: Configuration,
    own: Sequence[TrialOutcome],
    base: Sequence[TrialOutcome],
    error: str | None,
    baseline: str,
) -> Row:
    times = [t for o in own for t in o.steps_s]
    sent, base_sent = _sent(own), _sent(base)
    evidence = [o.evidence for o in own if o.evidence is not None]
    reference = [o.evidence for o in base if o.evidence is not None]
    return {
        "route": contender.name,
        "by": contender.by,
        "step_s": statistics.median(times) if times else None,
        "spread": spread(times) if times else None,
        f"vs_{baseline}": versus(own, base),
        "predicted_s": _median([o.predicted_s for o in own]),
        "limit": contender.limit,
        "levels": next((o.levels for o in own if o.levels is not None), None),
        "steps": len(times),
        "socket_bytes": sent,
        "times_fewer": base_sent / sent if sent and base_sent else None,
        "loss": _median([e.last for e in evidence]),
        f"loss_of_{baseline}": _median([e.last for e in reference]),
        "loss_ok": judge(evidence, reference, exact=contender.exact),
        "status": error or "ok",
    }


def versus(own: Sequence[TrialOutcome], base: Sequence[TrialOutcome]) -> float | None:
    """How many times faster than the baseline: the median of the rounds' ratios.

    A round's ratio compares what ran within the same minute; a slow minute cancels out.
    """
    reference = {o.visit.round: statistics.median(o.steps_s) for o in base}
    ratios = [reference[o.visit.round] / statistics.median(o.steps_s) for o in own if o.visit.round in reference]
    return statistics.median(ratios) if ratios else None


def spread(values: Sequence[float]) -> float:
    """(q75 − q25)/median."""
    if len(values) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return (high - low) / middle


def _sent(outcomes: Sequence[TrialOutcome]) -> float | None:
    value = _median([o.sent_bytes for o in outcomes])
    return None if value is None else round(value)


def _median(values: Sequence[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    if not known or not all(math.isfinite(v) for v in known):
        return None  # JSON has no word for anything else
    return statistics.median(known)


# What a narrow table leaves out, the least missed first; the sentences below it name what failed.
_DISPENSABLE = (
    "loss_of_ddp",
    "loss_of_fsdp2",
    "status",
    "levels",
    "limit",
    "by",
    "steps",
    "loss",
    "spread",
    "socket_bytes",
    "predicted_s",
)


def hidden(table: Sequence[Row], width: int) -> tuple[str, ...]:
    """Columns to leave out so that a table fits into ``width`` characters."""
    one_model = len({row["model"] for row in table}) == 1
    fine = all(row["status"] == "ok" for row in table)
    out = [c for c, drop in (("model", one_model), ("parameters", True), ("status", fine)) if drop]
    out += [c for c in table[0] if c not in out and all(row[c] is None for row in table)]
    sizes = {c: 3 + max(len(c), *(len(cell(row[c])) for row in table)) for c in table[0]}
    for c in _DISPENSABLE:
        if 1 + sum(n for name, n in sizes.items() if name not in out) <= width:
            break
        if c not in out:
            out.append(c)
    return tuple(out)


def title(record: Record) -> str:
    """Title of the table: model, ranks, links, and how often it was measured."""
    run = record.run
    models = {str(row["model"]): row["parameters"] for row in record.rows}
    named = ", ".join(f"{m} ({n:,} parameters)" for m, n in models.items())
    by = "FSDP2, " if record.kind == "fsdp2" else ""
    at = "" if run["hosts"] is None else f" on {run['hosts']} hosts at {run['rate'] or 'full speed'}"
    line = "" if run["line_gbit_s"] is None else f", line {cell(run['line_gbit_s'])} Gbit/s"
    return (
        f"{named}, {by}{run['compute']} compute · {run['ranks']} ranks{at}, {run['backend']}{line} · "
        f"medians of {run['rounds']} × {run['steps_per_visit']} steps{_only_ours(record)}"
    )


def _only_ours(record: Record) -> str:
    """Options that hold for commlib's routes and not for those they are compared with."""
    limit, asked = record.run.get("limit"), record.run.get("hierarchy")
    levels = next((row["levels"] for row in record.rows if row.get("levels")), "no route came so far")
    said = [f"at most {limit} from each rank"] if limit else []
    said += [f"hierarchy: {levels}"] if asked else []
    return f" · commlib's routes alone: {'; '.join(said)}" if said else ""
