"""What the command shows: facts and one table, or one JSON object."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from .partition import SparsePartition
from .processes import Measured
from .rows import Rows, objective


def make(
    task: str, source: str, rows: Rows, plans: Sequence[SparsePartition], runs: Sequence[Measured]
) -> dict[str, Any]:
    """Facts, ``runs``, and, where there are two, ``compared``: the second with the first, which has no filters."""
    first = plans[0]
    common = ("servers", "workers", "l1", "blocks", "delay", "tolerance", "seed")
    return {
        "task": task,
        "data": source,
        "examples": len(rows),
        "features": rows.features,
        "entries": rows.keys.numel(),
        **{name: getattr(first, name) for name in common},
        "eta": first.step,
        "torch": torch.__version__,
        "runs": [_run(rows, p, m) for p, m in zip(plans, runs, strict=True)],
        "compared": _compared(runs[0], runs[1]) if len(runs) == 2 else None,
    }


def _run(rows: Rows, plan: SparsePartition, measured: Measured) -> dict[str, Any]:
    outcome = measured.outcome
    sent = [w + s for w, s in zip(outcome.worker_bytes, outcome.server_bytes, strict=True)]
    return {
        "filters": str(plan.chain()),
        "kkt": plan.kkt,
        "objective": objective(rows, outcome.weights, plan.l1),
        "nonzero": int(outcome.weights.count_nonzero()),
        "passes": len(outcome.passes),
        "converged": outcome.converged,
        "worker_bytes": measured.worker_bytes,
        "server_bytes": measured.server_bytes,
        "bytes": measured.bytes,
        "seconds": measured.seconds,
        "keys_asked_for": outcome.asked,
        "course": [{**dataclasses.asdict(p), "bytes": b} for p, b in zip(outcome.passes, sent, strict=True)],
    }


def _compared(plain: Measured, filtered: Measured) -> dict[str, Any]:
    """Bytes of a run without filters and of one with them, until each stops, and until both are equally far."""
    ends = [m.outcome.passes[-1].objective for m in (plain, filtered)]
    far = max(ends)
    reached = [m.outcome.reached(far) for m in (plain, filtered)]
    return {
        "ratio": plain.bytes / filtered.bytes,
        "worker_ratio": plain.worker_bytes / filtered.worker_bytes,
        "server_ratio": plain.server_bytes / filtered.server_bytes,
        "objective_difference": (ends[1] - ends[0]) / abs(ends[0]),
        "equal_objective": far,
        "bytes_to_equal_objective": reached,
        "ratio_to_equal_objective": reached[0] / reached[1] if reached[0] and reached[1] else None,
    }


def show(report: Mapping[str, Any]) -> None:
    """Print the facts and the table to stdout; into a file or a pipe it is never cut."""
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, 160)
    r = report
    lines = [
        f"task {r['task']}, {r['data']}: {r['examples']:,} examples, {r['features']:,} features, "
        f"{r['entries']:,} values",
        f"{_some(r['workers'], 'worker')} and {_some(r['servers'], 'server')} over ZeroMQ on loopback, "
        f"λ {r['l1']:g}, {r['blocks']} blocks, delay {r['delay']}, η {r['eta']:g}, torch {r['torch']}",
    ]
    console.print(*lines, sep="\n", highlight=False, soft_wrap=True)
    console.print(table(r["runs"]))
    console.print(*_words(r), sep="\n", highlight=False, soft_wrap=True)


def _some(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def table(runs: Sequence[Mapping[str, Any]]) -> Table:
    """Runs as rows, what they cost and came to as columns."""
    t = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    t.add_column("filters", no_wrap=True)
    t.add_column("KKT", no_wrap=True)
    for head in ("objective", "not 0", "passes", "bytes of\nworkers", "bytes of\nservers", "seconds", "×"):
        t.add_column(head, justify="right", no_wrap=True)
    for run in runs:
        t.add_row(
            run["filters"],
            "on" if run["kkt"] else "off",
            f"{run['objective']:,.3f}",
            f"{run['nonzero']:,}",
            f"{run['passes']}" + ("" if run["converged"] else " (all)"),
            f"{run['worker_bytes']:,}",
            f"{run['server_bytes']:,}",
            f"{run['seconds']:.1f}",
            f"{runs[0]['bytes'] / run['bytes']:.1f}",
        )
    return t


def _words(r: Mapping[str, Any]) -> list[str]:
    said = [
        "objective: Σ log(1 + exp(-y·x·w)) + λ·Σ|w| of all examples at the servers' weights; bytes: of all frames with",
        f"their headers; ×: how many times fewer. All stop when a pass changes the objective by {r['tolerance']:g} or "
        "less of itself;",
        "with KKT all weights are then active for one more pass, and it must be so again.",
    ]
    c = r["compared"]
    if c is not None and c["ratio_to_equal_objective"]:
        a, b = c["bytes_to_equal_objective"]
        said.append(
            f"at equal objective ({c['equal_objective']:,.3f} or below): {a:,} against {b:,} bytes, "
            f"{c['ratio_to_equal_objective']:.1f} times fewer; at the end the objectives differ by "
            f"{c['objective_difference']:+.1e} of the first"
        )
    short = [run["filters"] + (" with KKT" if run["kkt"] else "") for run in r["runs"] if not run["converged"]]
    if short:
        said.append(f"not converged, the passes were used up: {'; '.join(short)}: give more --passes")
    return said
