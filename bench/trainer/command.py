"""``commlib train``: train with each codec in turn, with real processes, and compare."""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import torch.distributed as dist
import typer

from commlib.bench.launch.processes import RankFailed, Terminated, run_ranks
from commlib.bench.options import Levels, Limit, Plot
from commlib.bench.progress import Bar
from commlib.bench.sparse_logistic import command as sparse
from commlib.errors import CheckpointMismatch, CommlibError, MissingDependency

from . import plot as plots
from . import report, worker
from .settings import TrainSettings, check_ranks
from .tasks import BadInput


def train(
    task: Annotated[
        str, typer.Option(help="digits, text or cifar (needs --data); or sparse-logistic, see below.")
    ] = "digits",
    comm: Annotated[
        list[str] | None,
        typer.Option(metavar="SPEC", help="A codec, e.g. onebit or topk:ratio=0.01; repeatable. [none]"),
    ] = None,
    ranks: Annotated[int | None, typer.Option(help="Local ranks to start; under torchrun it decides. [2]")] = None,
    steps: Annotated[int | None, typer.Option(help="Training steps. [the task's]")] = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over the data, instead of --steps.")] = None,
    batch: Annotated[int | None, typer.Option(help="Examples per rank and step. [the task's]")] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate. [the task's]")] = None,
    optimizer: Annotated[str | None, typer.Option(help="sgd (momentum 0.9) or adam. [the task's]")] = None,
    seeds: Annotated[int | None, typer.Option(help="Train with seeds 0…N-1 and show mean ± sd.")] = None,
    seed: Annotated[int, typer.Option(help="The seed of a single run.")] = 0,
    hidden: Annotated[int | None, typer.Option(help="Width of the hidden layers. [the task's]")] = None,
    data: Annotated[
        Path | None, typer.Option(help="A text (text), an .npz of JPEGs (cifar), LIBSVM's lines (sparse-logistic).")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    dense_steps: Annotated[int, typer.Option(help="First steps sent uncompressed.")] = 0,
    min_size: Annotated[
        int | None,
        typer.Option(help="Layers with fewer values are sent uncompressed. [1024; with fp16 and bf16 none]"),
    ] = None,
    amp: Annotated[bool, typer.Option("--amp", help="Mixed precision with a GradScaler.")] = False,
    json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout instead of the table.")] = False,
    checkpoint: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Write checkpoints there.")] = None,
    checkpoint_every: Annotated[int | None, typer.Option(help="Steps between checkpoints. [only at the end]")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the checkpoints in the folder.")] = False,
    bucket_cap_mb: Annotated[float | None, typer.Option(help="Size of DDP's buckets in MiB. [DDP's]")] = None,
    limit: Limit = None,
    hierarchy: Levels = False,
    server: Annotated[
        list[str] | None,
        typer.Option(
            metavar="RULE",
            help="With a parameter server: bsp, ssp:3, asp …, or 'ssp:3 push=onebit pull=int8 background'; repeatable.",
        ),
    ] = None,
    local: Annotated[
        list[str] | None,
        typer.Option(
            metavar="RULE",
            help="By local steps: average, diloco, …, or 'diloco tau=auto codec=int8 times=2'; repeatable.",
        ),
    ] = None,
    curve: Annotated[
        int | None, typer.Option(metavar="STEPS", help="Test loss every so many steps on the way.")
    ] = None,
    plot: Plot = None,
    step_time: Annotated[float, typer.Option(help="Seconds that each step takes besides: a slower device.")] = 0.0,
    pauses: Annotated[float, typer.Option(help="Share of the steps that take ten times --step-time, by rank.")] = 0.0,
    servers_count: Annotated[int | None, typer.Option(help="sparse-logistic: servers. [2]")] = None,
    filters: Annotated[
        str | None, typer.Option(metavar="SPEC", help=f"sparse-logistic: of gradients, or none. [{sparse.FILTERS}]")
    ] = None,
    kkt: Annotated[bool | None, typer.Option(help="sparse-logistic: the KKT filter. [on]")] = None,
    l1: Annotated[float | None, typer.Option(help="sparse-logistic: λ, beside the sum of losses. [1]")] = None,
    delay: Annotated[int | None, typer.Option(help="sparse-logistic: blocks ahead of the slowest. [0]")] = None,
    passes: Annotated[int | None, typer.Option(help="sparse-logistic: over all blocks, at most. [100]")] = None,
) -> None:
    """Train with each codec in turn, from the same weights and in the same order of data, and compare.

    Starts its own local ranks; under torchrun it is one of torchrun's. --hierarchy needs several nodes of several
    ranks, as torchrun or `commlib bench lab --ranks-per-host 2` makes them: elsewhere it is flat, and says why.

    --task sparse-logistic trains no network: it solves L1-regularised logistic regression with a parameter server,
    --ranks workers and --servers-count shards, without filters and with them, and compares the bytes.
    """
    if sparse.takes_over(train, locals()):
        return
    if plot is not None:
        plots.check(plot)
        if curve is None:
            raise BadInput("--plot draws losses on the way: add --curve STEPS")
    settings = TrainSettings(
        task=task,
        comms=tuple(comm or ["none"]),
        servers=tuple(server or ()),
        local=tuple(local or ()),
        curve=curve,
        seeds=(seed,) if seeds is None else tuple(range(seeds)),
        steps=steps,
        epochs=epochs,
        batch=batch,
        lr=lr,
        optimizer=optimizer,
        hidden=hidden,
        data=data,
        device=device,
        dense_steps=dense_steps,
        min_size=min_size,
        bucket_cap_mb=bucket_cap_mb,
        limit=limit,
        hierarchy=hierarchy,
        amp=amp,
        checkpoint=checkpoint,
        every=checkpoint_every,
        resume=resume,
        step_time=step_time,
        pauses=pauses,
    )
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        result = _as_one_rank(settings, ranks)
    else:
        result = _with_local_ranks(settings, 2 if ranks is None else ranks)
    if result is None:
        return
    if plot is not None:
        plots.save(result, plot)
    if json:
        print(report.to_json(result))
    else:
        report.show(result)


def _as_one_rank(settings: TrainSettings, ranks: int | None) -> dict[str, Any] | None:
    """Under torchrun: this rank's part; only rank 0 has something to show."""
    world_size = int(os.environ["WORLD_SIZE"])
    if ranks not in (None, world_size):
        raise BadInput(f"--ranks {ranks}, but torchrun started {world_size}: leave --ranks out")
    try:
        result = worker.main(settings)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    first = dist.get_rank() == 0
    gc.collect()  # DDP is a cycle: Gloo threads that outlive the group abort at exit (pytorch#179291)
    dist.destroy_process_group()
    return result if first else None


def _with_local_ranks(settings: TrainSettings, ranks: int) -> dict[str, Any]:
    check_ranks(ranks)
    try:
        with Bar("starting the ranks") as bar:

            def show(_: int, message: object) -> None:
                if isinstance(message, worker.RunProgress):
                    bar.show(done=message.step, total=message.total, text=_what(settings, message))

            results: list[dict[str, Any]] = run_ranks(worker.main, ranks, (settings,), on_message=show)
    except KeyboardInterrupt:
        raise _stopped("interrupted", 130, settings) from None
    except Terminated:
        raise _stopped("told to stop (SIGTERM)", 143, settings) from None
    except RankFailed as e:
        if isinstance(e.error, (BadInput, MissingDependency, CheckpointMismatch)):
            raise e.error from None
        trace = "" if isinstance(e.error, CommlibError) else e.trace
        print(f"{trace}error: {e}; the other ranks were ended", file=sys.stderr)
        raise typer.Exit(1) from None
    return results[0]


def _what(settings: TrainSettings, now: worker.RunProgress) -> str:
    """Which of the runs is under way."""
    runs = [(c, s) for c in settings.runs for s in settings.seeds]
    seed = f" seed {now.seed}" if len(settings.seeds) > 1 else ""
    return f"[{runs.index((now.comm, now.seed)) + 1}/{len(runs)}] {now.comm}{seed}"


def _stopped(why: str, code: int, settings: TrainSettings) -> typer.Exit:
    hint = "; go on with --resume" if settings.checkpoint is not None else ""
    print(f"{why}: all ranks were ended{hint}", file=sys.stderr)
    return typer.Exit(code)
