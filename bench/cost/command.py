"""``commlib bench cost``: what routes cost a process beyond plain DDP: memory, the first step, attaching, cores."""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Annotated

import typer

from commlib.bench.launch.processes import RankFailed, sigterm_raises
from commlib.bench.models.shapes import Layers, layers
from commlib.bench.options import BucketCap, Hosts, Json, PerHost, Ranks, Rate, Save
from commlib.bench.progress import Bar
from commlib.bench.results.record import Record, emit, facts
from commlib.bench.results.table import Row, console
from commlib.bench.targets import Target, check_peers, place
from commlib.bench.training import models, workloads
from commlib.bench.training.configurations import BASELINE, Configuration, choose
from commlib.bench.training.trial import short

from .worker import BEGIN, CostJob, CostSheet, main

ROUTES = ("none", "fp16:ef=off", "fp16", "int8", "onebit", "topk:ratio=0.01", "powersgd:rank=4")
SHORT = (
    "onebit:residual=bfloat16",
    *("int8:residual=int8", "onebit:residual=int8", "topk:ratio=0.01,residual=int8", "powersgd:rank=4,residual=int8"),
)
HOOKS = (BASELINE, "torch-fp16", "torch-powersgd")
_LIMIT_S, _LIMIT_S_PER_VALUE = 60.0, 2e-6  # of one run


def cost(
    model: Annotated[
        list[str] | None,
        typer.Option(help="fc, conv, gpt, resnet50, … or module:factory of your own; repeat it. [fc, resnet50]"),
    ] = None,
    comm: Annotated[
        list[str] | None,
        typer.Option(metavar="SPEC", help=f"commlib's routes instead of {', '.join((*ROUTES, *SHORT))}; repeat it."),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help=f"Of all only this one (and {BASELINE}); repeat it."),
    ] = None,
    ranks: Ranks = None,
    hosts: Hosts = None,
    rate: Rate = None,
    ranks_per_host: PerHost = 1,
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each route.")] = 3,
    steps: Annotated[int, typer.Option(min=1, help=f"Of a run, after {BEGIN}.")] = 9,
    bucket_cap_mb: BucketCap = None,
    quick: Annotated[bool, typer.Option("--quick", help="gpt-small, few routes, one round.")] = False,
    as_json: Json = False,
    save: Save = None,
) -> None:
    """Measure what routes cost a process beyond plain DDP: memory, the first step, attaching, time of its cores.

    Every run is of one route, in fresh processes, of one thread each: what one route has taken no other one has. Routes
    take turns in each round. The model computes nothing: its backward pass hands out prepared gradients, with the
    layers of a real one. Figures are medians of the rounds, and of the ranks' the largest.

    held_mb: memory that is a rank's process's alone after the steps, in MB; beyond_ddp_mb: less plain DDP's in the same
    round; of_gradient: that over the bytes of the gradient. numba, which loads commlib's loops on the CPU, is in it:
    some 50 MB whatever the model. attach_s: until the route is attached. first: the first step over the median of the
    later ones. cpu_us: time of the process's cores in a later step beyond DDP's, for each parameter, in µs.

    A route that fails or hangs is reported and left out; the others go on.
    """
    names = model or (["gpt-small"] if quick else ["fc", "resnet50"])
    found = [(name, _layers(name)) for name in names]
    measured: list[Row] = []
    with sigterm_raises(), place(ranks, hosts, rate, ranks_per_host) as where:
        check_peers(where, "gloo")
        if not where.launches:
            raise ValueError("each run takes processes of its own: start this without torchrun, with --ranks")
        contenders = _contenders(comm or (), only or (), where.world_size, quick=quick)
        rounds = 1 if quick else rounds
        run = facts(**where.facts(), backend="gloo", rounds=rounds, steps=steps, bucket_cap_mb=bucket_cap_mb)
        for name, shapes in found:
            jobs = [CostJob(shapes, each, steps, bucket_cap_mb) for each in contenders]
            sheets, lost = _measure(where, name, jobs, rounds)
            measured += rows(name, shapes, contenders, sheets, lost)
    runs = f"medians of {rounds} runs" if rounds > 1 else "one run"
    title = f"{run['ranks']} ranks, {runs} of {steps} steps"
    for row in measured:
        if row["status"] != "ok":
            print(f"left out: {row['route']} at {row['model']}: {row['status']}", file=sys.stderr)
    hide = ("status",) if console(sys.stdout).width >= 130 else ("status", "by", "parameters", "held_mb", "step_s")
    emit(Record("cost", run, measured), title=title, as_json=as_json, save=save, hide=hide)


def rows(
    model: str,
    shapes: Layers,
    contenders: Sequence[Configuration],
    sheets: Sequence[Sequence[CostSheet]],
    lost: Mapping[str, str],
) -> list[Row]:
    """Rows of a model, one a route.

    Args:
        model: its name.
        shapes: of its layers.
        contenders: the routes; the first is plain DDP.
        sheets: of each, one a round; fewer of one that failed.
        lost: those that failed, and why.
    """
    nbytes = 4 * sum(math.prod(shape) for _, shape in shapes)
    table: list[Row] = []
    for contender, own in zip(contenders, sheets, strict=True):
        both = list(zip(own, sheets[0], strict=False))
        more = _median([a.held - b.held for a, b in both if a.held is not None and b.held is not None])
        held = _median([s.held for s in own if s.held is not None])
        cpu = _median([a.cpu_s - b.cpu_s for a, b in both])
        table.append(
            {
                "model": model,
                "parameters": nbytes // 4,
                "route": contender.name,
                "by": contender.by,
                "held_mb": None if held is None else held / 1e6,
                "beyond_ddp_mb": None if more is None else more / 1e6,
                "of_gradient": None if more is None else more / nbytes,
                "attach_s": _median([s.attach_s for s in own]),
                "step_s": _median([s.step_s for s in own]),
                "vs_ddp": _median([b.step_s / a.step_s for a, b in both]),
                "first": _median([s.first_s / s.step_s for s in own]),
                "cpu_us": None if cpu is None else cpu / len(shapes) * 1e6,
                "status": lost.get(contender.name, "ok"),
            }
        )
    return table


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _contenders(comm: Sequence[str], only: Sequence[str], ranks: int, *, quick: bool) -> list[Configuration]:
    every = choose(comm or (*ROUTES, *SHORT), only, ranks)
    wanted = {*HOOKS, *(comm or (("fp16", "onebit") if quick else (*ROUTES, *SHORT)))}
    return every if only else [each for each in every if each.name in wanted]


def _layers(model: str) -> Layers:
    return workloads.shapes(model) if model in models.MODELS else layers(model)


def _measure(
    where: Target, model: str, jobs: Sequence[CostJob], rounds: int
) -> tuple[list[list[CostSheet]], dict[str, str]]:
    """The sheets of each job, one a round; and which routes failed, and why."""
    sheets: list[list[CostSheet]] = [[] for _ in jobs]
    lost: dict[str, str] = {}
    limit = _LIMIT_S + _LIMIT_S_PER_VALUE * sum(math.prod(shape) for _, shape in jobs[0].layers)
    with Bar(f"{model}: starting the ranks") as bar:
        for number in range(rounds):
            for job, own in zip(jobs, sheets, strict=True):
                done = number * len(jobs) + sum(len(each) > number for each in sheets)
                text = f"{model}: round {number + 1} of {rounds}, {job.contender.name}"
                bar.show(done=done, total=rounds * len(jobs), text=text)
                name = job.contender.name
                if name in lost:
                    continue
                try:
                    own.append(where.run(main, (job,), timeout=limit))
                except (RankFailed, TimeoutError) as e:
                    if name == BASELINE:
                        raise
                    lost[name] = f"no result in {limit:.0f} s" if isinstance(e, TimeoutError) else short(e.error or e)
    return sheets, lost
