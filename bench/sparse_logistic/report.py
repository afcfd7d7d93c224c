"""Output of the command: facts and one table, or one JSON object."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from .rows import Rows, objective
from .settings import SparseSettings
from .solve import Solved


def make(
    task: str, source: str, rows: Rows, settings: Sequence[SparseSettings], runs: Sequence[Solved]
) -> dict[str, Any]:
    """Facts, ``runs``, and, where there are two, ``compared``: the second with the first, which has no filters."""
    common = ("servers", "workers", "l1", "lr", "delay", "tolerance", "seed")
    made = [_run(rows, s, run) for s, run in zip(settings, runs, strict=True)]
    return {
        "task": task,
        "data": source,
        "examples": len(rows),
        "features": rows.features,
        "entries": rows.keys.numel(),
        **{name: getattr(settings[0], name) for name in common},
        "blocks": len(settings[0].edges),
        "torch": torch.__version__,
        "runs": made,
        "compared": _compared(*made) if len(made) == 2 else None,
    }


def _run(rows: Rows, settings: SparseSettings, run: Solved) -> dict[str, Any]:
    last = run.passes[-1]
    return {
        "filters": settings.filters,
        "kkt": settings.kkt,
        "push": settings.push,
        "pull": settings.pull,
        "objective": objective(rows, run.weights, settings.l1),
        "nonzero": int(run.weights.count_nonzero()),
        "passes": len(run.passes),
        "converged": run.converged,
        "worker_bytes": last.sent,
        "server_bytes": last.received,
        "bytes": last.sent + last.received,
        "seconds": last.seconds,
        "course": [dataclasses.asdict(p) for p in run.passes],
    }


def _compared(plain: Mapping[str, Any], filtered: Mapping[str, Any]) -> dict[str, Any]:
    """Bytes of a run without filters and of one with them, until each stops, and until both are equally far."""
    far = max(run["course"][-1]["objective"] for run in (plain, filtered))
    reached = [next(p for p in run["course"] if p["objective"] <= far) for run in (plain, filtered)]
    used = [p["sent"] + p["received"] for p in reached]
    return {
        **{name.replace("bytes", "ratio"): plain[name] / filtered[name] for name in ("worker_bytes", "server_bytes")},
        "ratio": plain["bytes"] / filtered["bytes"],
        "objective_difference": (filtered["objective"] - plain["objective"]) / abs(plain["objective"]),
        "equal_objective": far,
        "bytes_to_equal_objective": used,
        "ratio_to_equal_objective": used[0] / used[1],
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
        f"λ {r['l1']:g}, {_some(r['blocks'], 'block')}, delay {r['delay']}, lr {r['lr']:g}, torch {r['torch']}",
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
        "objective: Σ log(1 + exp(-y·x·w)) + λ·Σ|w| of all examples at the servers' weights; bytes: of all messages "
        "from the first",
        f"gradient on; ×: how many times fewer. All stop when passes change the objective by {r['tolerance']:g} or "
        "less of itself each;",
        "with KKT that is looked at after every pass that leaves nothing out.",
    ]
    c = r["compared"]
    if c is not None:
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
