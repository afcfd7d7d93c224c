"""``commlib bench exchange``: a DDP step with each exchange and codec, at the shapes of a real model."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from typing import Annotated

import typer

from commlib.bench.launch.processes import sigterm_raises
from commlib.bench.models.shapes import MODELS, layers
from commlib.bench.options import Backend, BucketCap, Hosts, Json, PerHost, Ranks, Rate, Save
from commlib.bench.progress import Bar
from commlib.bench.results.record import Record, emit, facts
from commlib.bench.results.table import Row, cell, console
from commlib.bench.targets import Target, check_peers, place

from .combinations import DEFAULT, QUICK, Pair, cheapest_first, choose
from .results import hidden, rows
from .runner import measure
from .trial import TrialSetting
from .worker import Doing, ExchangeJob, ExchangeOutcome


def exchange(
    codecs: Annotated[
        list[str] | None,
        typer.Option("--codec", help=f"onebit, int8@gather, or all; repeat it. [{', '.join(DEFAULT)}]"),
    ] = None,
    exchanges: Annotated[
        list[str] | None, typer.Option("--exchange", help="Repeat it. [every one that can carry the codec]")
    ] = None,
    model: Annotated[str, typer.Option(help=f"{', '.join(MODELS)}, or module:factory of your own.")] = "resnet50",
    ranks: Ranks = None,
    hosts: Hosts = None,
    rate: Rate = None,
    ranks_per_host: PerHost = 1,
    backend: Backend = "gloo",
    rounds: Annotated[int | None, typer.Option(min=1, help="How often each pair is visited. [3]")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Timed in one visit at most; 1 leaves out the warm-up.")] = 10,
    seconds: Annotated[float | None, typer.Option(min=0.0, help="Begin no visit later than this. [80]")] = None,
    bucket_cap_mb: BucketCap = None,
    min_size: Annotated[
        int | None,
        typer.Option(min=0, help="Layers with fewer values are sent uncompressed. [1024; with fp16 and bf16 none]"),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help=f"The same model, one round of 12 s at most: {', '.join(QUICK)}.")
    ] = False,
    as_json: Json = False,
    save: Save = None,
) -> None:
    """Measure what a DDP step costs with each exchange and codec, at the shapes of a real model.

    The model computes nothing: its backward pass hands out prepared gradients, so a step is the exchange and
    what DDP adds to it. Every pair is visited once a round (attached anew, two steps not timed, then up to --steps
    timed; one step alone where that takes all the time there is), so that a machine that slows down slows all of them.

    accounted_bytes is what commlib says a rank sends a step, socket_bytes what its TCP sockets sent,
    interface_bytes (with --hosts) what left the host, headers and acknowledgements included. wire_s runs from
    issue to completion: it includes waiting for slower ranks, and the buckets' wires overlap, so that the phases
    may add up to more than step_s. of_line is socket_bytes over step_s against a plain TCP stream; vs_dense the
    speed against none@dense, above 1 is faster.
    """
    shapes = layers(model)
    choice = choose(codecs or (QUICK if quick else DEFAULT), exchanges or ())
    with sigterm_raises(), place(ranks, hosts, rate, ranks_per_host) as where:
        check_peers(where, backend)
        job = ExchangeJob(
            TrialSetting(shapes, bucket_cap_mb=bucket_cap_mb, min_size=min_size, steps=steps),
            cheapest_first(choice.pairs, shapes, where.world_size, min_size),
            rounds or (1 if quick else 3),
            (12.0 if quick else 80.0) if seconds is None else seconds,
            backend,
        )
        with Bar("starting the ranks, measuring the line") as bar:

            def show(doing: Doing) -> None:
                bar.show(done=doing.number, total=doing.total, text=str(doing.pair))

            outcome, error = measure(where, job, show)
    if outcome is None:
        return  # rank 0 of torchrun has the figures
    late = [] if error is not None else _unvisited(job, outcome)
    for note in [
        *choice.left_out,
        *outcome.left_out.values(),
        *(f"{x}: --seconds {job.seconds:g} were over" for x in late),
    ]:
        print(f"left out: {note}", file=sys.stderr)
    run, table = _record(outcome, job, choice.pairs, where, model)
    title, hide = _title(run, table[0], model), hidden(table, console(sys.stdout).width)
    emit(Record("exchange", run, table), title=title, as_json=as_json, save=save, hide=hide)
    if error is not None:
        raise error


def _unvisited(job: ExchangeJob, outcome: ExchangeOutcome) -> list[str]:
    """Pairs that the time did not suffice for, in words."""
    pairs = [p for p in job.pairs if p not in outcome.left_out]
    planned, done = len(pairs) * job.rounds, len(outcome.visits)
    if done >= planned:
        return []
    seen = {v.pair for v in outcome.visits}
    unseen = ", ".join(str(p) for p in pairs if p not in seen)
    return [f"{planned - done} of {planned} visits" + (f", and so all of {unseen}" if unseen else "")]


def _record(
    outcome: ExchangeOutcome, job: ExchangeJob, pairs: Sequence[Pair], where: Target, model: str
) -> tuple[dict[str, object], list[Row]]:
    parameters = sum(math.prod(shape) for _, shape in job.setting.layers)
    gbit_s = None if outcome.line is None else outcome.line.gbit_s
    run = facts(
        **where.facts(),
        backend=job.backend,
        line_gbit_s=gbit_s,
        line_latency_us=None if outcome.line is None else outcome.line.latency_s * 1e6,
        model=model,
        bucket_cap_mb=job.setting.bucket_cap_mb,
        min_size=job.setting.min_size,
        rounds=job.rounds,
        seconds=job.seconds,
        visits=len(outcome.visits),
        steps=sum(v.steps for v in outcome.visits),
    )
    return run, rows(outcome.visits, pairs, model=model, parameters=parameters, line_gbit_s=gbit_s)


def _title(run: Mapping[str, object], first: Row, model: str) -> str:
    hosts, rate, line = run["hosts"], run["rate"], run["line_gbit_s"]
    at = "" if hosts is None else f" on {hosts} hosts at {rate or 'full speed'}"
    known = "" if line is None else f", line {cell(line)} Gbit/s"
    return (
        f"{model}, {first['parameters']:,} parameters, dense {first['dense_bytes']:,} bytes a step · "
        f"{run['ranks']} ranks{at}, {run['backend']}{known}"
    )
