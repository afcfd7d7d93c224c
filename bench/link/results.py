"""Rows of what was measured: one a size for the record, one an operation for the reader."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from commlib.bench.results.record import Record
from commlib.bench.results.table import Row
from commlib.messaging.link_model import FROM, AlphaBetaFit, fit

from .collectives import OPS
from .sweep import share_needed, show_size
from .worker import LinkMeasured, LinkPoint

_SHOWN = (64_000, 1_000_000)  # bytes whose bandwidth the summary has, besides the largest


def rows(measured: LinkMeasured, ranks: int) -> list[Row]:
    """A row for every operation at every size, in the columns docs/benchmarks.md describes."""
    line = measured.line.gbit_s if measured.line else None
    fits = _fits(measured.points)
    return [_row(point, fits.get((point.backend, point.op)), ranks, line) for point in measured.points]


def _row(point: LinkPoint, fitted: AlphaBetaFit | None, ranks: int, line: float | None) -> Row:
    factor = OPS[point.op].factor(ranks)
    bus = factor * point.bytes * 8e-9 / point.median if fitted else None
    predicted = fitted.predict(point.bytes) if fitted else None
    return {
        "backend": point.backend,
        "op": point.op,
        "bytes": point.bytes,
        "reps": len(point.seconds),
        "seconds": point.median,
        "spread": point.spread,
        "bus_gbit_s": bus,
        "of_line": None if bus is None or line is None else bus / line,
        "alpha_us": (fitted.alpha if fitted else point.median) * 1e6,
        "beta_gbit_s": factor * 8e-9 / fitted.beta if fitted and fitted.beta else None,
        "predicted_s": predicted,
        "off": None if predicted is None else predicted / point.median - 1,
    }


def _fits(points: Sequence[LinkPoint]) -> dict[tuple[str, str], AlphaBetaFit]:
    """A line for every operation that has sizes: all but the barrier."""
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for p in points:
        if p.bytes:
            found.setdefault((p.backend, p.op), []).append((p.bytes, p.median))
    return {key: fit(measured) for key, measured in found.items()}


def summary(record: Record) -> list[Row]:
    """A row for every operation: its line, how well it fits, and the bus bandwidth at a few sizes."""
    found: dict[tuple[object, object], list[Row]] = {}
    for row in record.rows:
        found.setdefault((row["backend"], row["op"]), []).append(row)
    line = record.run.get("line_gbit_s")
    several = len({backend for backend, _ in found}) > 1
    return [
        {**({"backend": backend} if several else {}), "op": op, **_summed(its, line)}
        for (backend, op), its in found.items()
    ]


def _summed(its: Sequence[Row], line: object) -> dict[str, object]:
    sized = [r for r in its if _number(r, "bytes")]
    beta = _number(its[0], "beta_gbit_s")
    judged = [abs(_number(r, "off")) for r in sized if _number(r, "bytes") >= FROM]
    last = sized[-1] if sized else None
    return {
        "α µs": round(_number(its[0], "alpha_us")),
        "1/β Gbit/s": beta or None,
        "of line": f"{beta / line:.0%}" if beta and isinstance(line, float) else None,
        "off": f"{max(judged):.1%}" if judged else None,
        **{f"at {show_size(size)}": _bus_at(sized, size) for size in _SHOWN},
        "largest": _bus_of(last) if last else None,
    }


def _bus_at(its: Sequence[Row], size: int) -> float | None:
    """Bus bandwidth of the row whose bytes are those, or just above for being rounded up."""
    return next((_number(r, "bus_gbit_s") for r in its if size <= _number(r, "bytes") <= 1.01 * size), None)


def _bus_of(row: Row) -> str:
    return f"{_number(row, 'bus_gbit_s'):.4g} at {show_size(int(_number(row, 'bytes')))}"


def _number(row: Mapping[str, object], column: str) -> float:
    value = row[column]
    return float(value) if isinstance(value, int | float) else 0.0


def title(run: Mapping[str, object]) -> str:
    """Above the table: where, over what, and the raw line."""
    ranks, hosts, rate = run.get("ranks"), run.get("hosts"), run.get("rate")
    where = f" on {hosts} emulated hosts, {f'links at {rate}' if rate else 'links without a limit'}" if hosts else ""
    return (
        f"{run.get('backend')}, {ranks} ranks{where}; raw TCP line {run.get('line_gbit_s'):.4g} Gbit/s, "
        f"{run.get('line_latency_us'):.0f} µs; bandwidths in Gbit/s, "
        f"off: worst error of α + β·bytes from {show_size(FROM)} on"
    )


def seconds_needed(measured: LinkMeasured, pairs: int) -> float:
    """``--seconds`` with which nothing would be left out, by the times that were measured."""
    shares = []
    for (backend, op), missing in measured.left_out.items():
        times = [p.median for p in measured.points if (p.backend, p.op) == (backend, op)]
        last = [p for p in measured.points if (p.backend, p.op) == (backend, op)][-1]
        shares.append(share_needed([*times, *(last.median * size / last.bytes for size in missing)]))
    return pairs * max(shares, default=0.0)


def notes(measured: LinkMeasured, pairs: int) -> list[str]:
    """Notes on what is not in the table, why, and how to get it."""
    said = [f"{backend} cannot {op}: {why}" for (backend, op), why in measured.cannot.items()]
    if measured.left_out:
        several = len({backend for backend, _ in measured.left_out}) > 1
        which: dict[str, list[str]] = {}
        for (backend, op), missing in measured.left_out.items():
            which.setdefault(show_size(missing[0]), []).append(f"{backend} {op}" if several else op)
        listed = "; ".join(f"from {size} on: {', '.join(names)}" for size, names in which.items())
        needed = 1.2 * seconds_needed(measured, pairs)
        said.append(f"left out for time, {listed}. --seconds {_round_up(needed)} brings them in; --op measures fewer.")
    return said


def _round_up(seconds: float) -> int:
    step = 10 if seconds < 300 else 100
    return int(-(-seconds // step) * step)
