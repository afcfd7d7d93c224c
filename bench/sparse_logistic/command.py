"""``commlib train --task sparse-logistic``: without filters and with them, and what each sends."""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import typer

from commlib.bench.launch.processes import RankFailed, Terminated
from commlib.bench.progress import Bar
from commlib.errors import CommlibError

from . import processes, report
from .generate import Generated
from .settings import SparseSettings
from .solve import Solved

TASK = "sparse-logistic"
FILTERS = "key_cache+fixed_float+lossless"
_OWN = frozenset({"servers_count", "filters", "kkt", "l1", "delay", "passes"})
_SHARED = frozenset({"task", "data", "ranks", "lr", "seed", "json"})


@dataclasses.dataclass(frozen=True)
class Flags:
    """As the command has them; None is the default, which is said there.

    Args:
        data: a LIBSVM file; None generates a problem.
        workers, servers: processes of each kind.
        filters, kkt, l1, lr, delay, passes: as :class:`.settings.SparseSettings`.
        seed: of the generated problem, and of the order of blocks.
        json: print one JSON object.
    """

    data: Path | None = None
    workers: int | None = None
    servers: int | None = None
    filters: str | None = None
    kkt: bool | None = None
    l1: float | None = None
    lr: float | None = None
    delay: int | None = None
    passes: int | None = None
    seed: int = 0
    json: bool = False


def takes_over(train: Callable[..., None], given: Mapping[str, Any]) -> bool:
    """Runs the command if this is its task; else nothing, and false.

    Args:
        train: the command of all tasks, whose defaults tell which options were given.
        given: its arguments.

    Raises:
        ValueError: an option that the task does not have, or a value that cannot be.
    """
    defaults = {name: p.default for name, p in inspect.signature(train).parameters.items()}
    changed = {name for name, value in given.items() if value != defaults[name]}
    if given["task"] != TASK:
        for name in sorted(changed & _OWN):
            raise ValueError(f"{_flag(name)} is an option of --task {TASK}, and --task {given['task']} has none such")
        return False
    for name in sorted(changed - _OWN - _SHARED):
        raise ValueError(
            f"--task {TASK} has no {_flag(name)}: it takes {', '.join(map(_flag, sorted(_OWN | _SHARED)))}"
        )
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        raise ValueError(f"--task {TASK} starts its own processes: run it without torchrun")
    own = {name: given[name] for name in ("data", "filters", "kkt", "l1", "lr", "delay", "passes", "seed", "json")}
    run(Flags(workers=given["ranks"], servers=given["servers_count"], **own))
    return True


def run(flags: Flags) -> None:
    """Solves it, first without filters, then with them, and shows both.

    Raises:
        ValueError: a flag or a file that cannot be; the message says which.
    """
    if flags.data is not None and not flags.data.is_file():
        raise ValueError(f"--data {flags.data}: no such file")
    source = flags.data if flags.data is not None else Generated(seed=flags.seed)
    rows = processes.examples(source)
    plain = SparseSettings(features=max(1, rows.features), seed=flags.seed, **_given(flags))
    if plain.workers > len(rows):
        raise ValueError(f"--ranks {plain.workers}, and there are only {len(rows)} examples: each worker needs one")
    wanted = dataclasses.replace(
        plain,
        filters=FILTERS if flags.filters is None else flags.filters.strip(),
        kkt=flags.kkt is None or flags.kkt,
    )
    runs = (plain,) if wanted == plain else (plain, wanted)
    made = report.make(TASK, source.name if isinstance(source, Path) else "generated", rows, runs, _run(source, runs))
    if flags.json:
        print(json.dumps(made, indent=2))
    else:
        report.show(made)


def _given(flags: Flags) -> dict[str, Any]:
    """Settings that were given, the number of ranks as their flags call them."""
    for flag, value, least in (
        ("--ranks", flags.workers, 1),
        ("--servers-count", flags.servers, 1),
        ("--passes", flags.passes, 1),
        ("--delay", flags.delay, 0),
    ):
        if value is not None and value < least:
            raise ValueError(f"{flag} must be at least {least}, got {value}")
    for flag, number in (("--l1", flags.l1), ("--lr", flags.lr)):
        if number is not None and not 0 < number < float("inf"):
            raise ValueError(f"{flag} must be above 0, got {number:g}")
    names = ("workers", "servers", "l1", "lr", "delay", "passes")
    return {name: value for name in names if (value := getattr(flags, name)) is not None}


def _run(source: Path | Generated, runs: tuple[SparseSettings, ...]) -> list[Solved]:
    try:
        with Bar("starting the ranks", total=len(runs)) as bar:

            def on_run(number: int) -> None:
                bar.show(done=number, text=f"push {runs[number].push}, pull {runs[number].pull}")

            return processes.in_processes(source, runs, on_run)
    except KeyboardInterrupt:
        raise _stopped("interrupted", 130) from None
    except Terminated:
        raise _stopped("told to stop (SIGTERM)", 143) from None
    except RankFailed as e:
        trace = "" if isinstance(e.error, CommlibError) else e.trace
        print(f"{trace}error: {e}; the other ranks were ended", file=sys.stderr)
        raise typer.Exit(1) from None


def _stopped(why: str, code: int) -> typer.Exit:
    print(f"{why}: all ranks were ended", file=sys.stderr)
    return typer.Exit(code)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
