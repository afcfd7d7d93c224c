"""Soak: does a rank's resident memory grow with the number of its steps?

    python -m tests.support.soak STEPS [BACKEND] [ROUTE …]

prints a table, for every route over Gloo and over zmq: the resident memory of the rank that grew most, in MB, after the
first 500 steps (or a third of them, if that is less), a quarter, and all of them. Exits with 1 if it grew by more than
5 MB after the first ones. Two ranks train a model of some 7,000 values; they are forked from this process, which has
imported PyTorch.
"""

from __future__ import annotations

import datetime
import gc
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from tests.support import script_ranks, stopped_ranks
from tests.support.leaks import resident

RANKS = 2
MOST_BYTES = 5_000_000
_FIRST = 500


ROUTES = {**stopped_ranks.ROUTES, "server": stopped_ranks.server}
"""Route → what makes a rank's model, and its step."""


def looks(steps: int) -> list[int]:
    """After how many steps memory is looked at."""
    first = min(_FIRST, steps // 3)
    return sorted({first, max(first, steps // 4), steps})


def _train(rank: int, backend: str, route: str, steps: int, folder: Path) -> None:
    torch.set_num_threads(1)
    stopped_ranks.WIDTHS[:] = 32, 64, 64
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=300))
    step, found = ROUTES[route](), []
    for number in range(1, steps + 1):
        step()
        if number in looks(steps):
            gc.collect()
            found.append(resident())
    (folder / str(rank)).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()  # or what this rank has sent last would be lost with it
    os._exit(0)  # the folder is the parent's


def memory(backend: str, route: str, steps: int) -> list[int]:
    """Bytes of the rank that grew most, at each look.

    Raises:
        RuntimeError: a rank did not come to its end.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        codes = script_ranks.run(RANKS, lambda rank: _train(rank, backend, route, steps, folder))
        if codes is None or any(codes):
            raise RuntimeError(f"{route} over {backend}: ranks ended with {codes}")
        found: list[list[int]] = [json.loads((folder / str(rank)).read_text()) for rank in range(RANKS)]
    return max(found, key=lambda at: at[-1] - at[0])


def main(steps: int, backends: Sequence[str], routes: Sequence[str]) -> int:
    """Print the table; returns the exit status."""
    print(f"| backend | route | {' | '.join(f'{n:,}' for n in looks(steps))} | grew by |", flush=True)
    grew = 0
    for backend in backends:
        for route in routes:
            at = memory(backend, route, steps)
            grew = max(grew, at[-1] - at[0])
            cells = " | ".join(f"{n / 1e6:.1f}" for n in [*at, at[-1] - at[0]])
            print(f"| {backend} | {route} | {cells} |", flush=True)
    return int(grew > MOST_BYTES)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:3] or ("gloo", "zmq"), sys.argv[3:] or list(ROUTES)))
