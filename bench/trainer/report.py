"""Output of the command: facts and one table, or one JSON object."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from . import loss_curve
from .result import BIG_LAYER

Runs = Sequence[Mapping[str, Any]]


@dataclasses.dataclass(frozen=True)
class Spread:
    """Mean and standard deviation (n − 1) of one figure over the seeds; sd is None for one seed."""

    mean: float
    sd: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Spread of at least one value."""
        return cls(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None)

    def show(self, digits: int) -> str:
        """``97.22`` or ``97.22 ± 0.31``."""
        return f"{self.mean:.{digits}f}" + (f" ± {self.sd:.{digits}f}" if self.sd is not None else "")


def summary(runs: Runs) -> list[dict[str, Any]]:
    """Summary with an entry per codec, in the order trained: means and spreads over its seeds."""
    comms = list(dict.fromkeys(r["comm"] for r in runs))
    return [_summary_of(comm, [r for r in runs if r["comm"] == comm]) for comm in comms]


def to_json(report: Mapping[str, Any]) -> str:
    """JSON object of the facts, ``runs`` and ``summary``."""
    return json.dumps(
        {**report, "summary": summary(report["runs"]), "until": loss_curve.rows(report["runs"])}, indent=2
    )


def show(report: Mapping[str, Any]) -> None:
    """Print the facts and the table to stdout; into a file or a pipe it is never cut."""
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, 160)
    r = report
    plural = "s" if r["ranks"] > 1 else ""
    console.print(
        f"task {r['task']}: {r['train_examples']:,} training and {r['test_examples']:,} test examples, "
        f"model of {r['parameters']:,} parameters",
        f"{r['ranks']} rank{plural} over {r['backend']} on {r['device']} (threads: {r['threads_per_rank']} each), "
        f"{r['steps']:,} steps of {r['batch_per_rank']} × {r['ranks']} examples, torch {r['torch']}{_way(r)}",
        sep="\n",
        highlight=False,
        soft_wrap=True,
    )
    console.print(table(r["runs"]))
    if any(run["curve"] for run in r["runs"]):
        console.print(loss_curve.table(r["runs"]))
    for run in r["runs"]:
        if run["note"]:
            console.print(f"{run['comm']}: {run['note']}", highlight=False, soft_wrap=True)
    console.print(
        "bytes: measured, sent by one rank per step; ×: how many times fewer than plain DDP;\n"
        f"big layers: those of at least {BIG_LAYER:,} values",
        highlight=False,
        soft_wrap=True,
    )


def _way(report: Mapping[str, Any]) -> str:
    """The limit and the levels of all runs, if they were asked for."""
    limit, levels = report["limit"], report["runs"][0]["levels"]
    return (f", at most {limit} from each rank" if limit else "") + (f", hierarchy: {levels}" if levels else "")


def table(runs: Runs) -> Table:
    """Codecs as rows, what they cost and gave as columns."""
    t = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    t.add_column("comm", no_wrap=True)
    for head in ("test\nacc %", "test\nloss", "ms\n/step", "s in\nall", "bytes\n/step", "×", "big\nlayers ×"):
        t.add_column(head, justify="right", no_wrap=True)
    for s in summary(runs):
        t.add_row(
            s["comm"],
            Spread(**s["accuracy"]).show(2),
            Spread(**s["loss"]).show(3),
            _number(s["ms_per_step"], 1),
            _number(s["seconds"], 1),
            _number(s["wire_bytes_per_step"], 0),
            _number(s["ratio"], 1),
            _number(s["big_ratio"], 1),
        )
    return t


def _number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"


def _summary_of(comm: str, runs: Runs) -> dict[str, Any]:
    """All seeds of one codec; bytes do not depend on the seed."""
    times = [r["ms_per_step"] for r in runs if r["ms_per_step"] is not None]
    return {
        "comm": comm,
        "seeds": [r["seed"] for r in runs],
        "accuracy": dataclasses.asdict(Spread.of([r["accuracy"] for r in runs])),
        "loss": dataclasses.asdict(Spread.of([r["loss"] for r in runs])),
        "ms_per_step": statistics.median(times) if times else None,
        "seconds": statistics.median(r.get("seconds", 0.0) for r in runs),
        "wire_bytes_per_step": statistics.fmean(r["wire_bytes_per_step"] for r in runs),
        "ratio": statistics.fmean(r["ratio"] for r in runs),
        "big_ratio": None if runs[0]["big_ratio"] is None else statistics.fmean(r["big_ratio"] for r in runs),
        "replicas_equal": all(r["replicas_equal"] for r in runs),
    }
