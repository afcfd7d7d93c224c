"""Figures and facts as a reader says them: ``12.3 ms``, ``4 ranks on 4 emulated hosts at 200 Mbit/s``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from commlib.bench.lab import parse_rate
from commlib.bench.results.record import Record
from commlib.bench.results.table import Row

_EXACT = ("ddp", "none", "dense", "factors", "owners", "auto", "placed")
_RATES = ((1e9, "Gbit/s"), (1e6, "Mbit/s"), (1e3, "kbit/s"))


def number(value: object) -> float | None:
    """The finite number a column holds; None for anything else (JSON has NaN, and None is "unknown")."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def positive(value: object) -> float | None:
    """As :func:`number`, and None for what is not above nought."""
    found = number(value)
    return found if found is not None and found > 0 else None


def seconds(value: float) -> str:
    """``0.0123`` → ``12.3 ms``."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if value >= size or unit == "µs":
            return f"{_three(value / size)} {unit}"
    raise AssertionError("unreachable")


def nbytes(value: float) -> str:
    """``1.5e6`` → ``1.5 MB``; decimal units, as links have them."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= size:
            return f"{_three(value / size)} {unit}"
    return f"{value:.0f} B"


def count(value: float) -> str:
    """``3.7e6`` → ``3.7 M``."""
    for unit, size in ((" G", 1e9), (" M", 1e6), (" k", 1e3)):
        if value >= size:
            return f"{_three(value / size)}{unit}"
    return f"{value:.0f}"


def percent(share: float) -> str:
    """``0.714`` → ``71 %``, ``0.034`` → ``3.4 %``."""
    value = 100 * share
    return f"{value:,.0f} %" if abs(value) >= 10 else f"{value:.2g} %"


def signed(share: float) -> str:
    """``0.052`` → ``+5.2 %``."""
    return f"{'+' if share >= 0 else '−'}{percent(abs(share))}"


def times(ratio: float) -> str:
    """``3.42`` → ``3.4×``; two digits behind the point near one, where they matter."""
    return f"{ratio:.2f}×" if ratio < 2 else f"{_three(ratio)}×" if ratio < 100 else f"{ratio:.0f}×"


def join(words: Sequence[str]) -> str:
    """``a, b and c``."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}" if words else ""


def rate(text: str) -> str:
    """``"200mbit"`` → ``200 Mbit/s``; a text that is no rate stays as it is."""
    try:
        value = parse_rate(text)
    except ValueError:
        return text
    return next(f"{value / size:g} {unit}" for size, unit in (*_RATES, (1.0, "bit/s")) if value >= size)


def place(run: Mapping[str, object]) -> str:
    """Where the ranks of a run were; empty for a run that had none."""
    ranks, hosts, each = (number(run.get(k)) for k in ("ranks", "hosts", "ranks_per_host"))
    if ranks is None:
        return ""
    text = f"{ranks:.0f} rank{'' if ranks == 1 else 's'}"
    if hosts is not None:
        limit = run.get("rate")
        at = f"at {rate(str(limit))}" if limit else "without a rate limit"
        return f"{text} on {hosts:.0f} emulated host{'' if hosts == 1 else 's'} {at}"
    if each is None or each == ranks:
        return f"{text} on one machine"
    return f"{text}, {each:.0f} on each host"


def setting(run: Mapping[str, object]) -> str:
    """:func:`place` and how the backward pass was made, where a benchmark says it."""
    compute = str(run.get("compute") or "real")
    kind, _, ms = compute.partition(":")
    made = "" if compute == "real" else f"a simulated backward of {ms} ms" if ms else f"{kind} compute"
    return ", ".join(filter(None, (place(run), made)))


def model(row: Row) -> str:
    """``gpt (3.7 M parameters)``."""
    parameters = positive(row.get("parameters"))
    return f"{row.get('model')}" + (f" ({count(parameters)} parameters)" if parameters else "")


def exact(row: Row) -> bool:
    """Whether a route hands over the true mean gradient: DDP's or FSDP2's own, ``none``, placed layers; no other."""
    if "codec" in row:
        return _head(row.get("codec")) in ("none", "dense")
    if "vs_fsdp2" in row:  # GRADIENTS+PARAMETERS
        return all(_head(part) in ("fsdp2", "none", "dense") for part in str(row.get("route")).split("+"))
    return _head(row.get("route")) in (_EXACT if row.get("by") == "commlib" else ("ddp",))


def groups(record: Record) -> list[tuple[str, list[Row]]]:
    """Rows by what may be drawn side by side: the model, or the gradient of a codec's rows."""
    found: dict[str, list[Row]] = {}
    for row in record.rows:
        found.setdefault(_group(record.kind, row), []).append(row)
    return list(found.items())


def _group(kind: str, row: Row) -> str:
    match kind:
        case "codec":
            values = number(row.get("numel"))
            return f"{'?' if values is None else count(values)} values of {row.get('dtype')} on {row.get('device')}"
        case "link":
            return str(row.get("backend"))
        case _:
            return model(row)


def _head(spec: object) -> str:
    return str(spec).partition("@")[0].partition(":")[0].strip()


def _three(value: float) -> str:
    """Three significant digits, never with an exponent below a million."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
