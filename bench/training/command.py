"""``commlib bench train``: train with every route in turn, beside plain DDP and PyTorch's own hooks, or plain FSDP2.

``--compute``: whether the cores do the arithmetic, or only wait as long as an accelerator would need.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from commlib.bench.launch.processes import RankFailed, sigterm_raises
from commlib.bench.link.plot import check as check_plot
from commlib.bench.options import Backend, BucketCap, Hosts, Json, Levels, Limit, PerHost, Plot, Ranks, Rate, Save
from commlib.bench.progress import Bar
from commlib.bench.report.findings import findings
from commlib.bench.report.formatting import groups
from commlib.bench.results.record import Record, emit, facts
from commlib.bench.results.table import Row, console
from commlib.bench.targets import Target, check_peers, place
from commlib.errors import CommlibError, unknown
from commlib.exchange.rate_limit import RateLimit

from . import fsdp
from .configurations import COMMLIB, Configuration, choose
from .models import MODELS
from .results import hidden, rows, title
from .runner import race
from .schedule import Schedule, TrainingTrial
from .trial import WARM_UP, TrainingJob
from .workloads import shapes


def parse_compute(text: str) -> float | None:
    """Seconds of the simulated backward pass; None for ``real``.

    Raises:
        ValueError: neither ``real`` nor ``simulated:MS``.

    >>> parse_compute("simulated:50")
    0.05
    """
    kind, colon, number = text.partition(":")
    if text == "real":
        return None
    if kind != "simulated" or not colon:
        raise ValueError(f"--compute is real or simulated:MS (as simulated:50), got {text!r}")
    try:
        milliseconds = float(number)
    except ValueError:
        raise ValueError(f"--compute simulated:MS takes a number of milliseconds, got {number!r}") from None
    if not 0 <= milliseconds <= 60_000:
        raise ValueError(f"--compute simulated:MS takes 0 to 60000 milliseconds, got {number}")
    return milliseconds / 1e3


_LEAST_S, _LEAST_S_PER_VALUE = 15.0, 2e-6  # any visit may take so long: codecs of 2 µs a value and visit exist
_LIMITED_STEPS = 30  # dense ones under a limit that any visit may take: a manager may want so many to make up its mind


def train(
    model: Annotated[
        list[str] | None, typer.Option(help=f"{', '.join(MODELS)}, or all; repeat it. [gpt; gpt-small with --quick]")
    ] = None,
    compute: Annotated[
        str, typer.Option(metavar="real|simulated:MS", help="Simulated: the backward pass sleeps, the cores are free.")
    ] = "real",
    comm: Annotated[
        list[str] | None,
        typer.Option(metavar="SPEC", help=f"commlib's routes instead of {', '.join(COMMLIB)}; repeat it."),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Of all only this one (and the baseline); repeat it."),
    ] = None,
    fsdp2: Annotated[
        bool,
        typer.Option(
            "--fsdp2",
            help="Beside plain FSDP2; --comm is then GRADIENTS or GRADIENTS+PARAMETERS, codecs or lossy:CODEC+CODEC, "
            f"instead of {', '.join(fsdp.COMMLIB)}.",
        ),
    ] = False,
    ranks: Ranks = None,
    hosts: Hosts = None,
    rate: Rate = None,
    ranks_per_host: PerHost = 1,
    backend: Backend = "gloo",
    limit: Limit = None,
    hierarchy: Levels = False,
    batch: Annotated[int | None, typer.Option(min=1, help="Examples for each rank and step. [the model's]")] = None,
    steps: Annotated[
        int,
        typer.Option(
            min=1, help=f"Timed steps in a visit, after {WARM_UP} not timed; up to three times as many for fast routes."
        ),
    ] = 3,
    rounds: Annotated[
        int | None, typer.Option(min=1, help="Visits to each route. [what --seconds allow, 5 to 15; 1 with --quick]")
    ] = None,
    seconds: Annotated[float, typer.Option(min=1.0, help="For the visits to the routes of one model.")] = 120.0,
    bucket_cap_mb: BucketCap = None,
    gradient_as_bucket_view: Annotated[
        bool, typer.Option("--gradient-as-bucket-view", help="As DDP's argument, for all routes: no copies.")
    ] = False,
    quick: Annotated[bool, typer.Option("--quick", help="A small model, few routes, one round.")] = False,
    as_json: Json = False,
    save: Save = None,
    plot: Plot = None,
) -> None:
    """Would compression help here? Trains with every route in turn and compares it with plain DDP, or FSDP2.

    The routes: ddp (DDP's own all-reduce), torch-fp16, torch-bf16, torch-int8 and torch-powersgd (the hooks PyTorch
    comes with; torch-allreduce and torch-powersgd:rank=2 too, by --only), and commlib's. Every route is visited once a
    round with the same weights and the same examples, in turn, so that a machine that slows down slows all of them. A
    step's time is that of the slowest rank.

    vs_ddp: DDP's step over the route's, the median of the rounds' ratios; above 1 is faster than DDP. spread: of the
    steps, (q75 − q25)/median. socket_bytes: what rank 0's TCP sockets sent a step; times_fewer: DDP's over it.

    loss_ok: the loss on examples nobody trained on, after a visit's steps from the same start. All ranks must agree on
    it; an exact route must reach DDP's loss (to 1e-5, or thrice what DDP's own visits differ by), a lossy one must have
    come down by at least a tenth of what DDP has. With simulated compute the averaged gradient itself is checked: it
    must be the ranks' mean, or from a lossy route point the mean's way.

    --comm placed lets commlib choose linear layers that stay put (docs/placement.md), --comm placed:first+head.* names
    them; what is left goes as by auto, or as it is.

    With --fsdp2 the baseline is fsdp2: fully_shard on each block or large layer, then on the root. Others hand
    gradients, and after a plus parameters too, to a codec of commlib's. The column is vs_fsdp2 then, and DDP is FSDP2
    in all that is said above; bytes are those of gradients and parameters. What is of DDP only is refused.

    --limit and --hierarchy are for commlib's routes: ddp and torch-… go on as they are, and the title says so. All
    ranks on one node, or one on each (a lab without --ranks-per-host): flat, and the title says why.

    A route that fails or hangs is reported and left out; the others go on.
    """
    backward_s = parse_compute(compute)
    if limit is not None and backend == "nccl":
        raise ValueError("--limit is kept on the host, which NCCL passes by: use --backend gloo, or leave --limit out")
    buckets: dict[str, Any] = {"bucket_cap_mb": bucket_cap_mb, "gradient_as_bucket_view": gradient_as_bucket_view}
    if fsdp2:
        fsdp.check_options(backward_s=backward_s, limit=limit, hierarchy=hierarchy, buckets=buckets)
    models = _models(model, quick)
    if plot is not None:
        check_plot(plot)
        if len(models) > 1:
            raise ValueError(f"--plot draws one model, and these are {', '.join(models)}: name one by --model")
    if rounds is None and quick:
        rounds = 1
    measured: list[Row] = []
    try:
        with sigterm_raises(), place(ranks, hosts, rate, ranks_per_host) as where:
            check_peers(where, backend)
            ours: dict[str, Any] = {"limit": limit, "hierarchy": hierarchy}
            asked = (comm or (), only or (), where.world_size)
            contenders = fsdp.choose(*asked, quick=quick) if fsdp2 else choose(*asked, quick=quick, **ours)
            run = facts(**where.facts(), backend=backend, line_gbit_s=None, line_latency_us=None)
            run |= {"compute": compute, "batch": batch, "steps_per_visit": steps} | buckets | ours
            for name in models:
                size = batch or MODELS[name].batch
                job = TrainingJob(name, contenders, steps, size, backward_s, backend, buckets)
                measured += _race(where, job, rounds, seconds, run)
    except RankFailed as e:
        if isinstance(e.error, ValueError | CommlibError):
            raise e.error from None
        print(e.trace, file=sys.stderr, end="")
        raise
    if not measured:
        return  # rank 0 of torchrun has the figures
    record = Record("fsdp2" if fsdp2 else "train", run, measured)
    width = console(sys.stdout).width
    emit(record, title=title(record), as_json=as_json, save=save, hide=hidden(measured, width))
    if plot is not None:
        _draw(record, plot)
    for finding in findings(record):
        print(finding.text, file=sys.stderr if as_json else sys.stdout)


def _draw(record: Record, path: Path) -> None:
    from commlib.bench.report.plots import pictures  # not before: it needs matplotlib

    (group,) = groups(record)
    for picture in pictures(record, *group):
        picture.figure.savefig(path, dpi=150)


def _models(names: Sequence[str] | None, quick: bool) -> list[str]:
    if not names:
        return ["gpt-small" if quick else "gpt"]
    for name in names:
        if name != "all" and name not in MODELS:
            raise ValueError(unknown("model", name, [*MODELS, "all"]))
    wanted = MODELS if "all" in names else names
    return [n for n in MODELS if n in wanted and not ("all" in names and n == "gpt-small")]


def _race(where: Target, job: TrainingJob, rounds: int | None, seconds: float, run: dict[str, object]) -> list[Row]:
    """Rows of one model; the line goes into ``run``."""
    parameters = sum(math.prod(shape) for _, shape in shapes(job.model))
    contenders: Sequence[Configuration] = job.contenders
    least_s = _LEAST_S + _LEAST_S_PER_VALUE * parameters
    limit = RateLimit.of(next((c.limit for c in contenders if c.limit is not None), None))
    if limit is not None:  # which the baseline, whose visit is the measure of others, does not know
        least_s += (_LIMITED_STEPS + 3 * job.steps) * limit.seconds(2 * 4 * parameters)
    managed = frozenset(c.name for c in contenders if c.managed)
    schedule = Schedule([c.name for c in contenders], rounds, job.steps, seconds, least_s, least_s, managed)
    with Bar(f"{job.model}: starting the ranks, measuring the line") as bar:

        def show(visit: TrainingTrial | None, now: Schedule) -> None:
            done = len(now.outcomes)
            text = f"{job.model}: round {visit.round + 1} of {now.planned_rounds()}, {visit.name}" if visit else None
            bar.show(done=done, total=done + now.visits_left(), text=text)

        result = race(where, job, schedule, show)
    if result is None:
        return []
    done, line = result
    if line is not None and run["line_gbit_s"] is None:
        run |= {"line_gbit_s": line.gbit_s, "line_latency_us": line.latency_s * 1e6}
    run["rounds"] = done.planned_rounds()
    return rows(done, contenders, model=job.model, parameters=parameters)
