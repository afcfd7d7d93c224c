"""Records as one HTML file that needs nothing but itself: no script, no network, no font.

The page's style: light and dark, screen and paper, no font and no file but its own.
"""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Mapping, Sequence

from commlib.bench.results.record import Record
from commlib.bench.results.table import Row

from . import formatting
from .charts import inline
from .findings import FIT_FROM, of_group, summary
from .plots import pictures
from .recommendation import MARGIN, RACES, Finding
from .tables import COLUMNS, FITS, facts, fits, table

CSS = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #57606a; --paper: #ffffff; --line: #d0d7de; --band: #f6f8fa;
  --alarm: #a40e26; --alarm-paper: #fff0f0; --accent: #0a58a6; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8eb; --soft: #a0a8b0; --paper: #14171a; --line: #3a4148;
  --band: #1d2226; --alarm: #ff9a93; --alarm-paper: #3a1719; --accent: #7ab8ff; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem; max-width: 72rem; color: var(--ink); background: var(--paper);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", "Liberation Sans", Arial, sans-serif; }
h1 { font-size: 1.6rem; margin: 0; }
h2 { font-size: 1.2rem; margin: 2.5rem 0 .5rem; padding-top: .75rem; border-top: 1px solid var(--line); }
h3 { font-size: 1rem; margin: 1.5rem 0 .5rem; }
p, ul { margin: .5rem 0; }
li { margin: .25rem 0; }
a { color: var(--accent); }
code { font: .88em/1.4 ui-monospace, "DejaVu Sans Mono", Menlo, monospace; overflow-wrap: anywhere; }
.soft { color: var(--soft); font-size: .9rem; }
.verdict { padding: .75rem 1.25rem; border: 1px solid var(--line); border-left: .35rem solid var(--accent);
  border-radius: .4rem; background: var(--band); font-size: 1.05rem; }
.verdict h2 { margin: 0; padding: 0; border: 0; }
.alarm { color: var(--alarm); background: var(--alarm-paper); font-weight: 600; padding: .25rem .5rem;
  border-radius: .3rem; }
figure { margin: 1rem 0; padding: .5rem; background: #ffffff; border: 1px solid var(--line); border-radius: .4rem;
  overflow-x: auto; break-inside: avoid; }
figure svg { display: block; width: 100%; min-width: 40rem; height: auto; }
.table { overflow-x: auto; }
table { border-collapse: collapse; font-size: .84rem; font-variant-numeric: tabular-nums; margin: .5rem 0; }
th, td { padding: .25rem .5rem; text-align: left; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { background: var(--band); vertical-align: bottom; white-space: normal; font-weight: 600; }
td.figure, th.figure { text-align: right; }
tr.baseline td { font-weight: 600; }
td.long { white-space: normal; min-width: 9rem; }
table.facts td { white-space: normal; overflow-wrap: anywhere; }
details { margin: .75rem 0; }
summary { cursor: pointer; }
@media print { body { max-width: none; padding: 0; font-size: 10pt; } .table, figure { overflow: visible; }
  figure svg { min-width: 0; } table { font-size: 7.5pt; } th, td { padding: .15rem .3rem; } tr { break-inside: avoid; }
  h2, h3 { break-after: avoid; } details::details-content { content-visibility: visible; display: block; } }
"""


_KINDS = {"train": "Training", "fsdp2": "Training by FSDP2", "exchange": "Exchanges", "link": "Link", "codec": "Codecs"}
_MACHINE = ("cpu", "cores", "system", "torch", "python", "commlib")
_RULE = (
    "A route is called faster or slower only if its step differs from the baseline's by more than "
    f"{formatting.percent(MARGIN)} and by more than the larger of the two spreads; "
    "the spread is that of the middle half of "
    "the steps, over their median. Exact routes leave the mean gradient as it is; all others change it, and only a "
    "training run can say what that does to the model. A route that failed or whose loss is wrong is not recommended."
)
_BYTES = (
    "Bytes are those one rank sends in a step: accounted for by the exchange itself, counted by the kernel at the "
    "TCP sockets (payload), and at the network interface of an emulated host (whole frames: with the headers of TCP, "
    "IP and Ethernet, and acknowledgements)."
)


def page(records: Sequence[Record]) -> str:
    """The whole page; records of one kind stay in the order given.

    Args:
        records: at least one.
    """
    ordered = [r for kind in _KINDS for r in records if r.kind == kind]
    titles = [_title(r) for r in ordered]
    links = "".join(f'<li><a href="#r{i}">{html.escape(t)}</a></li>' for i, t in enumerate(titles))
    times = sorted(str(r.run["time"]) for r in ordered if r.run.get("time"))
    when = "" if not times else times[0] if times[0] == times[-1] else f"{times[0]} to {times[-1]}"
    body = [
        "<h1>What compression does here</h1>",
        f'<p class="soft">Benchmarks of commlib{html.escape(f", {when}" if when else "")}</p>',
        f'<section class="verdict"><h2>Verdict</h2>{_said(summary(ordered))}</section>',
        f"<nav><ul>{links}</ul></nav>",
        *(_section(i, t, r) for i, (t, r) in enumerate(zip(titles, ordered, strict=True))),
        f"<section><h2>Machine</h2>{_machines(ordered)}</section>",
        f"<section><h2>How to read it</h2><p>{html.escape(_RULE)}</p><p>{html.escape(_BYTES)}</p></section>",
    ]
    content = "\n".join(body)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>commlib benchmarks</title><style>{CSS}</style></head>\n<body>{content}</body></html>\n"
    )


def _title(record: Record) -> str:
    """``Training gpt (3.7 M parameters): 4 ranks on 4 emulated hosts at 200 Mbit/s``."""
    about = formatting.join([title for title, _ in formatting.groups(record)])
    where = formatting.setting(record.run)
    return f"{_KINDS[record.kind]}: {about}" + (f"; {where}" if where else "")


def _section(number: int, title: str, record: Record) -> str:
    parts = formatting.groups(record)
    name = f"r{number}"
    body = "".join(_part(f"{name}f{i}", record, t, rows, alone=len(parts) == 1) for i, (t, rows) in enumerate(parts))
    heading = f'<h2 id="{name}">{html.escape(title)}</h2>'
    return f"<section>{heading}{_measured(record.run)}{body}{_command(record.run)}</section>"


def _part(name: str, record: Record, title: str, rows: list[Row], *, alone: bool) -> str:
    """Part of the page for one model, gradient or backend: in words, in pictures, in figures."""
    heading = "" if alone else f"<h3>{html.escape(title)}</h3>"
    drawn = (inline(p.figure, f"{name}p{i}", p.says) for i, p in enumerate(pictures(record, title, rows)))
    figures = "".join(f"<figure>{d}</figure>" for d in drawn)
    return heading + _said(of_group(record, title, rows)) + figures + _table(record.kind, rows)


def _said(found: Iterable[Finding]) -> str:
    mark = {True: ' class="alarm"', False: ""}
    items = (f"<li{mark[f.alarm]}>{html.escape(f.text)}</li>" for f in found)
    return f"<ul>{''.join(items)}</ul>"


def _measured(run: Mapping[str, object]) -> str:
    """The line everything is measured against."""
    line, latency = formatting.positive(run.get("line_gbit_s")), formatting.positive(run.get("line_latency_us"))
    known = [f"backend {run['backend']}"] if run.get("backend") else []
    known += [f"measured line {line:.3g} Gbit/s"] if line else []
    known += [f"latency {formatting.seconds(1e-6 * latency)}"] if latency else []
    return f'<p class="soft">{html.escape(", ".join(known))}</p>' if known else ""


def _table(kind: str, rows: Sequence[Row]) -> str:
    if kind == "link":
        every = f"<details><summary>All {len(rows)} sizes</summary>{table(rows, COLUMNS[kind])}</details>"
        return table(fits(rows, FIT_FROM), FITS) + every
    if kind == "codec":
        return table(rows, COLUMNS[kind])
    ordered = sorted(rows, key=lambda r: formatting.positive(r.get("step_s")) or float("inf"))
    return table(ordered, COLUMNS[kind], bold=_is_baseline)


def _is_baseline(row: Row) -> bool:
    return row.get("route") in RACES.values() or (row.get("exchange") == "dense" and row.get("codec") == "none")


def _command(run: Mapping[str, object]) -> str:
    """How to get these figures again, and everything else the record says of its run."""
    shown = {k: v for k, v in run.items() if k not in _MACHINE and k != "command"}
    command = f"<p><code>{html.escape(str(run['command']))}</code></p>" if run.get("command") else ""
    return f"{command}<details><summary>Facts of this run</summary>{facts(shown)}</details>"


def _machines(records: Iterable[Record]) -> str:
    """Every machine and installation the records come from, once."""
    found = [{k: r.run.get(k) for k in _MACHINE} for r in records]
    distinct = {json.dumps(m, sort_keys=True, default=str): m for m in found}
    return "".join(facts(m) for m in distinct.values())
