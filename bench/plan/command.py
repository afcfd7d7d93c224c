"""``commlib plan``: how a model would scale, on paper."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from commlib.bench.options import Json, Plot, Save
from commlib.bench.results.record import Record, emit, facts, write
from commlib.bench.results.table import Row, console, print_rows

from . import convergence_model, convergence_plot, plots, published, table, time_to_accuracy
from .assumptions import Assumptions, parse_ranks
from .convergence_model import ALGORITHMS, Table
from .custom_model import own
from .known_models import MODELS, known
from .model import LayeredModel
from .schemes import SchemeOutcome, outcomes
from .time_to_accuracy import Question


def plan(
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help=f"{', '.join(MODELS)}, or your own: module:factory.")
    ] = None,
    ranks: Annotated[
        list[str] | None, typer.Option(help="Up to 4096; a list, or repeat it. [1,2,4,8,16,32]", show_default=False)
    ] = None,
    gbit: Annotated[float, typer.Option(help="What a rank can send, Gbit/s.")] = Assumptions.gbit,
    latency_us: Annotated[float, typer.Option(help="Of one message between two ranks, µs.")] = Assumptions.latency_us,
    tflops: Annotated[float, typer.Option(help="What a rank sustains, TFLOP/s.")] = Assumptions.tflops,
    batch: Annotated[
        int | None, typer.Option(help="Examples a rank. [32; 8 for gpt2 and bert-large]", show_default=False)
    ] = None,
    positions: Annotated[
        int | None, typer.Option(help="Of an example, for gpt2 [1024] and bert-large [512].", show_default=False)
    ] = None,
    example: Annotated[
        str | None,
        typer.Option(
            "--input", metavar="SHAPE", help="An example of module:factory: 3,224,224, or int:128 for tokens."
        ),
    ] = None,
    layers: Annotated[bool, typer.Option("--layers", help="Print the layer table instead.")] = False,
    show_published: Annotated[
        bool, typer.Option("--published", help="Print published speed-ups beside the predicted ones instead.")
    ] = False,
    algorithm: Annotated[
        list[str] | None, typer.Option(help=f"Time to an accuracy instead, of {', '.join(ALGORITHMS)}; repeat it.")
    ] = None,
    step_s: Annotated[
        float | None, typer.Option("--step-s", help="C, seconds of one rank's step. [the model's; else 1]")
    ] = None,
    meeting_s: Annotated[
        float | None, typer.Option("--meeting-s", help="S, seconds of an exchange. [the model's; else 0.01 C to 100 C]")
    ] = None,
    tau: Annotated[int | None, typer.Option(help="Local steps between two exchanges. [all that were measured]")] = None,
    accuracy: Annotated[float, typer.Option(help="To be reached, of 1.")] = time_to_accuracy.ACCURACY,
    rounds_table: Annotated[
        Path | None, typer.Option("--table", metavar="FILE", help="Of rounds to accuracies. [that of the digits]")
    ] = None,
    plot: Plot = None,
    as_json: Json = False,
    save: Save = None,
) -> None:
    """How a model would scale over ranks, by scheme. No GPU, no ranks: arithmetic on layers, link and TFLOP/s.

    dense: plain DDP, an all-reduce of 25 MiB buckets beside the backward pass. no overlap: after it. factors: every
    linear layer's rows travel instead of its gradient. owners: they go to whom its blocks belong, and the blocks to
    all. auto: factors, owners or dense for each, the least work that comes within 2 % of the shortest step. adam: rows
    go to the rank that owns the layer, and the matrix back.

    --algorithm: when training reaches an accuracy, from S, C and a table of rounds that was measured: naive parallel
    SGD beside local steps (sparknet, easgd, diloco) and a server's rules (ssp, wsp).

    The link is a ring; a collective takes its latencies and its bytes over --gbit. The backward pass takes twice the
    forward pass. docs/plan.md has all assumptions. What a real cluster does is for `commlib bench train` to say.
    """
    if (layers or show_published) and (save is not None or plot is not None):
        raise ValueError("--layers and --published only print: leave out --save and --plot")
    if algorithm:
        if layers or show_published or save is not None:
            raise ValueError("--algorithm prints and draws: leave out --layers, --published and --save")
        link = Assumptions(gbit, latency_us, tflops, batch or Assumptions.batch)
        found = None if model is None else _model(model, positions, example)
        counts = parse_ranks(ranks) if ranks else (time_to_accuracy.RANKS,)
        asked = Question.of(algorithm, counts, step_s, meeting_s, tau, accuracy, found, link)
        whose = "the digits" if rounds_table is None else str(rounds_table)
        _print_algorithms(asked, convergence_model.read(rounds_table), whose, plot, as_json)
        return
    if any(given is not None for given in (step_s, meeting_s, tau, rounds_table)):
        raise ValueError("--step-s, --meeting-s, --tau and --table are for --algorithm")
    if show_published:
        _print_published(as_json)
        return
    if model is None:
        raise ValueError(f"which model? One of {', '.join(MODELS)}, or your own: module:factory with --input")
    counts = parse_ranks(ranks)
    if plot is not None:
        plots.check(plot)
    found = _model(model, positions, example)
    setting = Assumptions(gbit, latency_us, tflops, found.batch if batch is None else batch)
    if layers:
        _print_layers(found, as_json)
        return
    steps = [o for p in counts for o in outcomes(found, setting, p)]
    record = make_record(found, setting, steps)
    if plot is not None:
        heading = "\n".join([*table.about(found)[:1], f"predicted, not measured; {table.of_a_rank(found, setting)}"])
        plots.save(record, heading, plot)
    if as_json:
        emit(record, title="", as_json=True, save=save)
        return
    if save is not None:
        write(record, save)
    _print(found, setting, steps)


def make_record(model: LayeredModel, setting: Assumptions, steps: Sequence[SchemeOutcome]) -> Record:
    """Record that is printed as JSON, saved and drawn."""
    ranks = _ranks(steps)
    run = facts(
        model=model.name,
        parameters=model.parameters,
        forward_flops=model.flops,
        example=model.example,
        **dataclasses.asdict(setting),
        linear_layers=table.crossovers(model, setting.batch, ranks),
        published=published.rows(model.name, ranks),
    )
    return Record("plan", run, table.record_rows(model, steps))


def _ranks(steps: Sequence[SchemeOutcome]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(o.ranks for o in steps))


def _model(name: str, positions: int | None, example: str | None) -> LayeredModel:
    if ":" not in name:
        if name in MODELS and example is not None:
            raise ValueError(f"--input is for a model of your own, module:factory; {name} has its own")
        return known(name, positions)
    if positions is not None:
        raise ValueError("--positions is for gpt2 and bert-large; --input has the shape of your own model's example")
    return own(name, example)


def _print(model: LayeredModel, setting: Assumptions, steps: Sequence[SchemeOutcome]) -> None:
    print("\n".join([*table.about(model), table.of_a_rank(model, setting), ""]))
    print_rows(table.scaling(model, steps), title=table.SCALING_TITLE)
    ranks = _ranks(steps)
    if not model.linear:
        print("No linear layer has a weight of its own, so nothing can travel as factors.")
    elif max(ranks) > 1:
        print("\n".join([table.ROUTES_TITLE, *table.routes(model, steps), ""]))
        shown = table.crossover_table(table.crossovers(model, setting.batch, ranks), console(sys.stdout).width)
        print_rows(shown, title=table.CROSSOVER_TITLE)
    beside = published.rows(model.name, ranks)
    if beside:
        _print_points(beside)


def _print_layers(model: LayeredModel, as_json: bool) -> None:
    if as_json:
        print_rows(table.layer_rows(model), as_json=True)
        return
    print("\n".join(table.about(model)))
    print_rows(table.layer_table(model, console(sys.stdout).width))


def _print_published(as_json: bool) -> None:
    if as_json:
        print_rows(published.rows(), as_json=True)
        return
    _print_points(published.rows())
    for line in published.sources():
        print(line)


def _print_algorithms(asked: Question, measured: Table, whose: str, plot: Path | None, as_json: bool) -> None:
    if plot is not None:
        convergence_plot.check(plot)
    rows = time_to_accuracy.answer(asked, measured)
    if plot is not None:
        convergence_plot.save(asked, measured, plot)
    if as_json:
        print_rows(rows, as_json=True)
        return
    about, shown = time_to_accuracy.for_people(asked, rows, whose)
    print(about)
    print_rows(shown, title="speed-up over one rank, by S")


def _print_points(rows: list[Row]) -> None:
    print_rows([published.for_people(row) for row in rows], title="published speed-ups, and those predicted there")
    for line in published.assumed(rows):
        print(line)
