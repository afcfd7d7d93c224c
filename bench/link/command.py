"""``commlib bench link``: latency and bandwidth of every collective by message size, against the raw line."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from commlib.bench.launch.processes import RankFailed, Terminated
from commlib.bench.options import Hosts, Json, PerHost, Plot, Ranks, Rate, Save
from commlib.bench.progress import Bar
from commlib.bench.results.record import Record, emit, facts, write
from commlib.bench.results.table import print_rows
from commlib.bench.targets import Target, place
from commlib.errors import CommlibError, PeerLost, unknown

from . import plot as plots
from . import results, worker
from .collectives import OPS
from .sweep import ladder, parse_size, show_size
from .worker import LinkMeasured, LinkProgress, LinkSettings, choose

_SECONDS, _QUICK = 60.0, 5.0
_MAX, _QUICK_MAX = "256MB", "4MB"
_START_S = 120.0  # for the ranks to start, and for the sizes that are measured whatever they take


def link(
    ranks: Ranks = None,
    hosts: Hosts = None,
    rate: Rate = None,
    ranks_per_host: PerHost = 1,
    backend: Annotated[
        list[str] | None, typer.Option(help="gloo, nccl or one registered with torch; repeat it. [what works here]")
    ] = None,
    op: Annotated[list[str] | None, typer.Option(help="all_reduce, broadcast …; repeat it. [all]")] = None,
    smallest: Annotated[str, typer.Option("--min", help="Smallest message.")] = "1kB",
    largest: Annotated[
        str | None, typer.Option("--max", help="Largest; where time ends sooner, it is said. [256MB]")
    ] = None,
    seconds: Annotated[float | None, typer.Option(help="For all measurements together. [60]")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="5 seconds, up to 4MB, where not said otherwise.")] = False,
    show_all: Annotated[bool, typer.Option("--all", help="A row for every size.")] = False,
    plot: Plot = None,
    as_json: Json = False,
    save: Save = None,
) -> None:
    """Latency and bandwidth of every collective by message size, against the raw TCP line.

    Bytes are those of the largest buffer a rank holds, as in nccl-tests: of all parts together for all_gather,
    reduce_scatter, all_to_all, gather and scatter. Bus bandwidth counts what must cross the busiest link:
    2(P−1)/P times the bytes for all_reduce, (P−1)/P for those five, 1 for broadcast, reduce, send_recv. A time is
    the median over repetitions of the slowest rank's; every repetition starts in step.

    α and β are of the line t = α + β·bytes, fitted to the sizes from 64 kB on; off is the largest error there.
    """
    names = tuple(dict.fromkeys(op or OPS))
    for name in names:
        if name not in OPS:
            raise ValueError(unknown("operation", name, OPS))
    sizes = tuple(ladder(parse_size(smallest), parse_size(largest or (_QUICK_MAX if quick else _MAX))))
    budget = (_QUICK if quick else _SECONDS) if seconds is None else seconds
    if not 1 <= budget <= 86400:
        raise ValueError(f"--seconds must be from 1 to 86400, got {budget:g}")
    if plot is not None:
        plots.check(plot)
    with place(ranks, hosts, rate, ranks_per_host) as where:
        if where.world_size < 2:
            raise ValueError("a link has two ends: bench link needs at least 2 ranks (--ranks 2, or --hosts 2)")
        about = where.facts()
        here = where.world_size if where.launches else int(str(about["ranks_per_host"]))
        settings = LinkSettings(choose(backend or (), here), names, sizes, budget)
        measured = _run(where, settings)
    if measured is None:
        return  # torchrun's other ranks
    record = make_record(measured, settings, about)
    for note in results.notes(measured, len(settings.backends) * len(names)):
        typer.echo(note, err=True)
    if plot is not None:
        plots.save(record, plot)
    title = results.title(record.run)
    if as_json or show_all:
        emit(record, title=title, as_json=as_json, save=save)
        return
    if save is not None:
        write(record, save)
    print_rows(results.summary(record), title=title)


def make_record(measured: LinkMeasured, settings: LinkSettings, about: dict[str, object]) -> Record:
    """Record that is printed, saved and drawn."""
    line = measured.line
    run = facts(
        **about,
        backend=", ".join(settings.backends),
        line_gbit_s=line.gbit_s if line else None,
        line_latency_us=line.latency_s * 1e6 if line else None,
        seconds=settings.seconds,
        left_out={f"{b} {op}": list(sizes) for (b, op), sizes in measured.left_out.items()},
    )
    return Record("link", run, results.rows(measured, int(str(about["ranks"]))))


def _run(where: Target, settings: LinkSettings) -> LinkMeasured | None:
    """Measure, with a progress bar; what goes wrong on a rank is said in one line where we know what it means."""
    limit = _START_S + 3 * settings.seconds
    try:
        with Bar("the raw line", len(settings.backends) * len(settings.ops)) as bar:

            def show(rank: int, message: object) -> None:
                if isinstance(message, LinkProgress):
                    size = show_size(message.bytes) if message.bytes else ""
                    bar.show(done=message.done, text=f"{message.backend} {message.op} {size}".rstrip())

            found: LinkMeasured | None = where.run(worker.main, (settings,), on_message=show, timeout=limit)
    except Terminated:
        print("told to stop (SIGTERM): all ranks were ended", file=sys.stderr)
        raise typer.Exit(143) from None
    except TimeoutError as e:
        raise PeerLost(f"{e} ({limit:g} s); is the link that slow? --max takes smaller messages") from None
    except RankFailed as e:
        if isinstance(e.error, CommlibError | ValueError):
            raise e.error from None
        if not e.trace:
            raise
        print(f"{e.trace}error: {e}; the other ranks were ended", file=sys.stderr)
        raise typer.Exit(1) from None
    return found
