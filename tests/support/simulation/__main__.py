"""``make simulate``: histories of a seed and those after it, on each core a process.

make simulate ARGS="--histories 10000"           # or --minutes 60
make simulate ARGS="--seed 4711 --histories 1 --show"   # one again, with what happened in it
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import faulthandler
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from typing import Any

from tests.support.simulation import primitives
from tests.support.simulation.histories import run
from tests.support.simulation.jobs import JOBS
from tests.support.simulation.world import Violation

_STUCK_S = 120.0
"""Real seconds that a history may take, on a busy machine, too."""
_SHARE = 200
"""Histories of one process: what C++ keeps of each, processes that were killed most of all, goes with it. It runs one
of each kind before them."""


def several(seeds: list[int], kind: str | None, show: bool, until: float, tell: Connection | None = None) -> list[str]:
    """Run the histories of these seeds; returns what went wrong. A process of its own tells of each."""
    wrong = []
    for seed in seeds:
        if time.monotonic() > until:
            break
        faulthandler.dump_traceback_later(_STUCK_S, exit=True)  # something waits for real
        try:
            history = run(seed, kind)
            said: tuple[str, str] = (history.job.kind, "\n".join(history.lines) if show else "")
        except Violation as e:
            wrong.append(str(e))
            said = "wrong", str(e)
        if tell is not None:
            tell.send(said)
    faulthandler.cancel_dump_traceback_later()
    return wrong


@contextlib.contextmanager
def on_one_core(which: int) -> Iterator[None]:
    """One core for this process: threads that take turns do so in half the time there."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, [sorted(cores)[which % len(cores)]])
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def _share(place: int, seeds: list[int], kind: str | None, show: bool, until: float, tell: Connection) -> None:
    with on_one_core(place):
        several(seeds, kind, show, until, tell)


def main() -> int:
    parser = argparse.ArgumentParser(prog="make simulate", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0, help="of the first history")
    parser.add_argument("--histories", type=int, default=None, help="how many; 1000, or as many as there is time for")
    parser.add_argument("--minutes", type=float, default=None, help="until no more is begun")
    parser.add_argument("--job", choices=list(JOBS), help="of one kind only")
    parser.add_argument("--show", action="store_true", help="print what happened in each")
    given = parser.parse_args()
    if os.environ.get("PYTHONHASHSEED") != "0":  # a set of names has another order otherwise, in each process
        os.execve(
            sys.executable,
            [sys.executable, "-m", __package__ or "", *sys.argv[1:]],
            {**os.environ, "PYTHONHASHSEED": "0"},
        )
    began = time.monotonic()
    until = began + 60 * given.minutes if given.minutes is not None else float("inf")
    count = given.histories or (1000 if given.minutes is None else 1 << 24)
    primitives.places()  # imported here, and not once more in each process
    cores = len(os.sched_getaffinity(0))
    context = multiprocessing.get_context("fork")
    shares = iter(range(given.seed, given.seed + count, _SHARE))
    going: dict[Any, Any] = {}
    found: collections.Counter[str] = collections.Counter()

    def begin(place: int) -> None:
        """Start a process for the next share, if there is one."""
        if time.monotonic() > until or (first := next(shares, None)) is None:
            return
        ours, theirs = context.Pipe(duplex=False)
        seeds = list(range(first, min(first + _SHARE, given.seed + count)))
        process = context.Process(target=_share, args=(place, seeds, given.job, given.show, until, theirs))
        process.start()
        theirs.close()
        going[ours] = process, place

    for place in range(cores):
        begin(place)
    while going:
        ready: list[Any] = wait(list(going))
        for pipe in ready:
            try:
                kind, text = pipe.recv()
            except EOFError:
                process, place = going.pop(pipe)
                process.join()
                found["wrong"] += bool(process.exitcode)  # it says on stderr where it stood
                begin(place)
                continue
            found[kind] += 1
            if text:
                print(text, flush=True)
    kinds = ", ".join(f"{n} {kind}" for kind, n in sorted(found.items()) if n)
    print(f"{sum(found.values())} histories ({kinds}) from seed {given.seed}, {time.monotonic() - began:.0f} s")
    return 1 if found["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
