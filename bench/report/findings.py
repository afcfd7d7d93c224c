"""Findings of a record, kind by kind, and of a folder of records in all."""

from __future__ import annotations

from collections.abc import Sequence

from commlib.bench.results.record import Record
from commlib.bench.results.table import Row

from . import formatting
from .recommendation import Finding, clause, contenders, line_share, sentences

BASELINE = {"train": "plain DDP", "fsdp2": "plain FSDP2", "exchange": "dense"}
FIT_FROM = 64_000  # bytes: below, a collective is latency, and a line through it says little
FIT_WITHIN = 0.15


def findings(record: Record) -> list[Finding]:
    """Everything to be said of one record, the most important first: results that are wrong."""
    said = [f for title, rows in formatting.groups(record) for f in of_group(record, title, rows)]
    return sorted(said, key=lambda f: not f.alarm)


def summary(records: Sequence[Record]) -> list[Finding]:
    """The page's verdict: what is wrong, then one sentence for every place that was measured."""
    alarms = [f for r in records for f in findings(r) if f.alarm]
    clauses: dict[tuple[str, str], list[str]] = {}
    for record in records:
        if record.kind in BASELINE:
            parts = clauses.setdefault((record.kind, _place(record)), [])
            parts += [_clause(record.kind, title, rows) for title, rows in formatting.groups(record)]
    what = {"train": "training", "fsdp2": "training by FSDP2", "exchange": "gradients alone"}
    said = [Finding(f"{where}, {what[kind]}: {'; '.join(dict.fromkeys(c))}.") for (kind, where), c in clauses.items()]
    rest = [next((f for f in findings(r)), None) for r in records if r.kind not in BASELINE]
    return list(dict.fromkeys([*alarms, *said, *filter(None, rest)]))


def of_group(record: Record, title: str, rows: Sequence[Row]) -> list[Finding]:
    """Findings of some rows of a record (:func:`commlib.bench.report.formatting.groups`)."""
    if record.kind == "link":
        return _link(record, title, rows)
    if record.kind == "codec":
        return _codec(title, rows)
    share = line_share(rows, record.run, record.kind)
    where = f"{title}, {_place(record)}"
    return sentences(contenders(record.kind, rows), where=where, baseline=BASELINE[record.kind], line_share=share)


def _clause(kind: str, title: str, rows: Sequence[Row]) -> str:
    return clause(contenders(kind, rows), model=title.partition(" (")[0], baseline=BASELINE[kind])


def _place(record: Record) -> str:
    return formatting.setting(record.run) or "this machine"


def _link(record: Record, backend: str, rows: Sequence[Row]) -> list[Finding]:
    line = formatting.positive(record.run.get("line_gbit_s"))
    said = []
    largest: dict[str, tuple[float, float]] = {}  # op → (bytes, share of the line)
    for row in rows:
        size, share = formatting.positive(row.get("bytes")), formatting.positive(row.get("of_line"))
        if size and share and size >= largest.get(str(row.get("op")), (0.0, 0.0))[0]:
            largest[str(row.get("op"))] = (size, share)
    where = f"{backend}, {_place(record)}"
    measured = f"the measured line of {line:.3g} Gbit/s" if line else "the line"
    if largest:
        low, high = (pick(largest, key=lambda op: largest[op][1]) for pick in (min, max))
        text = f"{where}: with its largest messages {high} reaches {formatting.percent(largest[high][1])} of {measured}"
        said.append(f"{text}, {low} {formatting.percent(largest[low][1])}." if low != high else f"{text}.")
    alphas = {str(r.get("op")): a for r in rows if (a := formatting.positive(r.get("alpha_us")))}
    if alphas:
        low, high = (pick(alphas, key=lambda op: alphas[op]) for pick in (min, max))
        least, most = (formatting.seconds(1e-6 * alphas[op]) for op in (low, high))
        span = f"from {least} ({low}) to {most} ({high})" if low != high else f"{least} ({low})"
        said.append(f"What a message costs before its bytes count (α): {span}.")
    return [Finding(text) for text in said] + _fit(rows)


def _fit(rows: Sequence[Row]) -> list[Finding]:
    """How well time = α + β · bytes holds for messages that are long enough."""
    judged = [(abs(off), off, r) for r in rows if (off := formatting.number(r.get("off"))) is not None and _long(r)]
    if not judged:
        return []
    worst, off, row = max(judged, key=lambda j: j[0])
    inside = sum(size <= FIT_WITHIN for size, _, _ in judged)
    at = f"{row.get('op')} of {formatting.nbytes(formatting.positive(row.get('bytes')) or 0.0)}"
    side = "above" if off > 0 else "below"
    share = "all" if inside == len(judged) else f"{inside} of"
    text = (
        f"α + β · bytes predicts {share} {len(judged)} times of 64 kB and more within {formatting.percent(FIT_WITHIN)}"
    )
    return [Finding(f"{text}; the worst, {at}, by {formatting.percent(worst)} {side} the measured time.")]


def _long(row: Row) -> bool:
    size = formatting.positive(row.get("bytes"))
    return size is not None and size >= FIT_FROM


def _codec(title: str, rows: Sequence[Row]) -> list[Finding]:
    """Cheapest, dearest and smallest of the codecs that change the gradient's size."""
    cost: dict[str, dict[str, float]] = {}
    bits: dict[str, float] = {}
    kept: dict[str, float | None] = {}
    for row in rows:
        copies = formatting.positive(row.get("copy_multiple"))
        size = formatting.positive(row.get("bits_per_value"))
        if copies and size and not formatting.exact(row):
            name = str(row.get("codec"))
            cost.setdefault(name, {})[str(row.get("op"))] = copies
            bits[name], kept[name] = size, formatting.number(row.get("error"))
    if not cost:
        return []
    total = {name: sum(ops.values()) for name, ops in cost.items()}
    cheap, dear, small = (
        min(total, key=lambda n: total[n]),
        max(total, key=lambda n: total[n]),
        min(bits, key=lambda n: bits[n]),
    )
    same = formatting.times(total[cheap])[:-1]
    text = f"{title}: {cheap} is the cheapest codec, there and back in the time of {same} copies"
    text += (
        f" of the gradient; {dear} takes {formatting.times(total[dear])[:-1]}."
        if dear != cheap
        else " of the gradient."
    )
    sent = f"{small} sends least, {bits[small]:.3g} bits a value"
    share = kept[small]
    keeps = (
        f", and keeps {formatting.percent(share)} of a random gradient's energy in one shot."
        if share and share > 0
        else "."
    )
    return [Finding(text), Finding(sent + keeps)]
