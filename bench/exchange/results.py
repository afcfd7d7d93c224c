"""Rows from the trials: bytes and seconds a step, a rank. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from commlib.bench.results.table import Row, table_width
from commlib.telemetry.stats import PHASES

from .combinations import BASELINE, Pair
from .trial import ExchangeTrial

# What a narrow table does without, the least missed first. Model and dense bytes are in the title.
_DISPENSABLE = (
    "model",
    "parameters",
    "dense_bytes",
    "spread",
    "wire_gbit_s",
    "socket_bytes",
    "interface_bytes",
    "overhead",
    "of_line",
    "decompress_s",
    "compress_s",
    "wire_s",
    "accounted_bytes",
)


def rows(
    visits: Sequence[ExchangeTrial], pairs: Sequence[Pair], *, model: str, parameters: int, line_gbit_s: float | None
) -> list[Row]:
    """A row for each pair that was visited; docs/benchmarks.md describes the columns.

    Bytes and phases are means over ranks and timed steps; a step takes as long as its slowest rank, and of all
    timed steps of all visits the median counts.

    Args:
        visits: at least one of the baseline.
        pairs: the order of the rows.
        model, parameters: repeated in every row.
        line_gbit_s: what a plain TCP stream reaches between two ranks; None if that is not known.
    """
    by_pair: dict[Pair, list[ExchangeTrial]] = {}
    for v in visits:
        by_pair.setdefault(v.pair, []).append(v)
    baseline_s = statistics.median(step_seconds(by_pair[BASELINE]))
    return [
        {"model": model, "parameters": parameters, **_row(pair, seen, line_gbit_s, baseline_s)}
        for pair in pairs
        if (seen := by_pair.get(pair))
    ]


def step_seconds(visits: Sequence[ExchangeTrial]) -> list[float]:
    """How long every timed step took on its slowest rank."""
    return [max(of_ranks) for v in visits for of_ranks in zip(*(s.seconds for s in v.shares), strict=True)]


def spread(values: Sequence[float]) -> float | None:
    """(q75 − q25)/median; None of fewer than two values."""
    if len(values) < 2:
        return None
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return (high - low) / middle


def hidden(table: Sequence[Row], width: int) -> tuple[str, ...]:
    """Columns to leave out so that a table fits into ``width`` characters: empty ones, then what is least missed."""
    columns = list(table[0])
    out = [c for c in columns if all(row[c] is None for row in table)]
    out += [c for c in ("model", "parameters") if c not in out]
    for c in _DISPENSABLE:
        if table_width([{k: v for k, v in row.items() if k not in out} for row in table]) <= width:
            break
        if c not in out:
            out.append(c)
    return tuple(out)


def _row(
    pair: Pair, visits: Sequence[ExchangeTrial], line_gbit_s: float | None, baseline_s: float
) -> Mapping[str, object]:
    shares = [s for v in visits for s in v.shares]
    per_step = sum(len(s.seconds) for s in shares)  # steps × ranks: bytes are of one rank
    accounted = sum(s.accounted for s in shares) / per_step
    dense = sum(s.dense for s in shares) / per_step
    sent = [s.sockets.sent for s in shares if s.sockets is not None]
    socket = sum(sent) / per_step if len(sent) == len(shares) else None
    at_interface = [v.interfaces.sent_bytes for v in visits if v.interfaces is not None]
    seconds = step_seconds(visits)
    step_s = statistics.median(seconds)
    gbit_s = None if socket is None else socket * 8e-9 / step_s
    return {
        "exchange": pair.exchange,
        "codec": pair.codec,
        "accounted_bytes": round(accounted),
        "socket_bytes": None if socket is None else round(socket),
        "overhead": None if socket is None else socket / accounted - 1,
        "interface_bytes": round(sum(at_interface) / per_step) if len(at_interface) == len(visits) else None,
        "dense_bytes": round(dense),
        "times_fewer": dense / accounted,
        **{f"{phase}_s": sum(s.phases[phase] for s in shares) / per_step for phase in PHASES},
        "step_s": step_s,
        "spread": spread(seconds),
        "wire_gbit_s": gbit_s,
        "of_line": None if gbit_s is None or not line_gbit_s else gbit_s / line_gbit_s,
        "vs_dense": baseline_s / step_s,
    }
