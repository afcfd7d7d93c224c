"""``commlib bench server``: how fast a parameter server's steps are, against the line and against what is foretold."""

from __future__ import annotations

import statistics
from typing import Annotated

import typer

from commlib.bench.lab import parse_rate
from commlib.bench.launch.processes import RankFailed, sigterm_raises
from commlib.bench.options import Hosts, Json, Ranks, Rate
from commlib.bench.results.record import Record, emit, facts
from commlib.bench.results.table import Row
from commlib.bench.targets import place
from commlib.errors import CommlibError
from commlib.planning.cost.overlap import first_first_seconds, just_in_time_seconds, step_seconds
from commlib.server.job.consistency import make

from .worker import ServerBenchmarkJob, ServerFigures, ServerTrial, main


def server(
    ranks: Ranks = None,
    hosts: Hosts = None,
    rate: Rate = None,
    rule: Annotated[str, typer.Option(help="Of consistency: bsp, ssp:3, asp …")] = "bsp",
    megabytes: Annotated[float, typer.Option("--mb", min=0.1, help="Of the model's parameters.")] = 48.0,
    layers: Annotated[int, typer.Option(min=1, help="That they are in.")] = 12,
    forward: Annotated[float | None, typer.Option(min=0.0, help="Seconds of a forward pass. [half a transfer]")] = None,
    backward: Annotated[float | None, typer.Option(min=0.0, help="Seconds of a backward pass. [a transfer]")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Timed, in each visit.")] = 5,
    rounds: Annotated[int, typer.Option(min=1, help="Visits to each way, in turn.")] = 3,
    chunk: Annotated[
        float | None, typer.Option("--chunk-kb", min=1.0, help="KiB of a chunk, at most. [what fits the link]")
    ] = None,
    as_json: Json = False,
) -> None:
    """Train a model of equal layers, that computes by sleeping, with a shard on each host.

    bare: gradients and values alone; of_line: what they need of each host's link, 2(P - 1)/P of the model each way,
    over what raw TCP streams get when all ranks send and receive at once, as these bytes do (line all; the
    mean of ranks; line: one stream, all others quiet). by layer: each layer waits for its own values; joined: the first
    waits for all; first first: by layer, and what the next forward pass needs first is sent first.
    foretold: by the recursion of wait-free backpropagation, with the rate of all at once. cores: busy share of the
    cores of rank 0's machine, whoever kept them so.
    """
    make(rule)
    nbytes = int(1e6 * megabytes)
    try:
        with sigterm_raises(), place(ranks, hosts, rate, 1) as where:
            gbit_s = parse(rate) if rate else 8.0
            share = 2 * (where.world_size - 1) / where.world_size
            wire = share * nbytes * 8e-9 / gbit_s
            computes = (wire / 2 if forward is None else forward, wire if backward is None else backward)
            job = ServerBenchmarkJob(
                rule, layers, nbytes, *computes, steps, rounds, None if chunk is None else int(1024 * chunk)
            )
            found: ServerFigures | None = where.run(main, (job,))
            told = facts(**where.facts(), **(lines(found) if found else {}), rule=rule, mb=megabytes)
    except RankFailed as e:
        if isinstance(e.error, ValueError | CommlibError):
            raise e.error from None
        raise
    if found is None:
        return  # rank 0 of torchrun has the figures
    told |= {"chunk_kb": found.chunk / 1024, "layers": layers, "forward_s": job.forward_s, "backward_s": job.backward_s}
    title = (
        f"{told['ranks']} ranks, {told['rate'] or 'no limit'}, {rule}, {megabytes:g} MB in {layers} layers, "
        f"chunks of {found.chunk / 1024:g} KiB; "
        f"{words(found)}forward {job.forward_s:.2f} s, backward {job.backward_s:.2f} s"
    )
    emit(Record("server", told, rows(job, found, share)), title=title, as_json=as_json, save=None)


def lines(found: ServerFigures) -> dict[str, object]:
    """Facts of the raw streams; None for what one rank has not."""
    ring = found.ring
    return {
        "line_gbit_s": found.line_gbit_s,
        "line_all_gbit_s": ring.gbit_s if ring else None,
        "cores_line_all": ring.cores if ring else None,
    }


def words(found: ServerFigures) -> str:
    """The same for the title."""
    if found.line_gbit_s is None or found.ring is None:
        return ""
    busy = "" if found.ring.cores is None else f" with {found.ring.cores:.0%} of the cores"
    return f"line {found.line_gbit_s:.3f} Gbit/s, all at once {found.ring.gbit_s:.3f}{busy}; "


def rows(job: ServerBenchmarkJob, found: ServerFigures, share: float) -> list[Row]:
    """A row for each way.

    Args:
        job: what was measured.
        found: figures.
        share: bytes that leave a host in a step, and come to it, over the model's; 0 for one rank.
    """
    wire = share * job.nbytes * 8e-9 / found.ring.gbit_s if found.ring else 0.0
    forward, backward, c = ([x / job.layers] * job.layers for x in (job.forward_s, job.backward_s, wire))
    foretold = {
        "bare": (found.bare, wire),
        "by layer": (found.by_layer, just_in_time_seconds(forward, backward, c)),
        "first first": (found.first_first, first_first_seconds(forward, backward, c)),
        "joined": (found.joined, step_seconds(job.forward_s, backward, c)),
    }
    return [row(way, visits, told) for way, (visits, told) in foretold.items()]


def row(way: str, visits: list[ServerTrial], foretold: float) -> Row:
    """Row of a way, by the median of its visits, beside the seconds a step that are foretold for it."""
    seen = statistics.median(v.step_s for v in visits)
    cores = [v.cores for v in visits if v.cores is not None]
    return {
        "way": way,
        "step_s": seen,
        "foretold_s": foretold,
        "over_foretold": seen / foretold if foretold else None,
        "of_line": foretold / seen if way == "bare" and foretold else None,
        "cores": statistics.median(cores) if cores else None,
        "visits": " ".join(f"{v.step_s:.3f}" for v in visits),
    }


def parse(rate: str) -> float:
    """Read a rate in Gbit/s."""
    return parse_rate(rate) * 1e-9
