"""What the manager measures on purpose: the link's collectives, and the products that factors need."""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from commlib.exchange.item import World
from commlib.line import fit
from commlib.link import Line, Link
from commlib.pace import RateLimit

_SIZES = (16 << 10, 1 << 20, 8 << 20)  # bytes a rank sends
_LONGEST = (2.0, 0.3)  # seconds: the second and third are left out if they would take longer, by what the last took
_WARM, _TIMES = 3, 5  # repetitions; fewer where they take long


def measure_link(group: Any, world: World, device: torch.device, limit: RateLimit | None = None) -> Link:
    """α and β of all-reduce and all-gather, as this rank sees them. Collective; at most about two seconds.

    A slow limit takes longer: three messages of 16 KiB for each, and no larger ones that would take over two seconds.

    Args:
        group: a process group that carries nothing else meanwhile.
        world: this rank.
        device: where gradients are.
        limit: that the group keeps. A short message may leave at once; no price counts on that.
    """
    everyone, one = world.size, torch.zeros(1, device=device)

    def reduce(sent: int) -> Callable[[], Any]:
        tensor = torch.zeros(max(1, sent * everyone // (2 * (everyone - 1)) // 4), device=device)
        return lambda: group.allreduce([tensor])

    def gather(sent: int) -> Callable[[], Any]:
        tensor = torch.zeros(max(1, sent // (everyone - 1)), dtype=torch.uint8, device=device)
        out = torch.empty(everyone * len(tensor), dtype=torch.uint8, device=device)
        return lambda: group._allgather_base(out, tensor)

    def agreed(seconds: float) -> float:
        """The slowest rank's, to all."""
        one.fill_(seconds)
        options = torch.distributed.AllreduceOptions()
        options.reduceOp = torch.distributed.ReduceOp.MAX  # type: ignore[assignment]  # its stub is not its type
        group.allreduce([one], options).wait()
        return float(one)

    lines = [_line(start, agreed, limit) for start in (reduce, gather)]
    link = Link(everyone, *lines)
    return link if limit is None else link.capped(limit.bytes_s)


def _line(start: Callable[[int], Callable[[], Any]], agreed: Callable[[float], float], limit: RateLimit | None) -> Line:
    points: list[tuple[float, float]] = []
    for sent, longest in zip(_SIZES, (math.inf, *_LONGEST), strict=True):
        slowest = 0.0 if limit is None else limit.seconds(sent)
        expected = max(slowest, points[-1][1] * sent / points[-1][0] if points else 0.0)
        if expected > longest:
            break
        issue, short = start(sent), expected < 0.03
        for _ in range(_WARM if short else 1):
            issue().wait()
        times = [_timed(functools.partial(_through, issue)) for _ in range(_TIMES if short else 2)]
        points.append((float(sent), max(agreed(min(times)), 1e-9)))  # what takes longer is not the link
    found = fit(points)
    return Line(found.alpha, found.beta)


def _through(issue: Callable[[], Any]) -> None:
    issue().wait()


def measure_product(n: int, m: int, rows: int, dtype: torch.dtype, device: torch.device) -> float:
    """Seconds of (N × rows)·(rows × M) on this rank, written to memory that is there."""
    if rows == 0:
        return 0.0
    u, v = torch.ones(rows, m, dtype=dtype, device=device), torch.ones(rows, n, dtype=dtype, device=device)
    out = torch.empty(n, m, dtype=dtype, device=device)
    with torch.no_grad():
        times = [_timed(lambda: _product(u, v, out)) for _ in range(2)]
        while len(times) < 4 and sum(times) < 0.2:
            times.append(_timed(lambda: _product(u, v, out)))
    return statistics.median(times[1:])


def _product(u: Tensor, v: Tensor, out: Tensor) -> None:
    torch.mm(v.t(), u, out=out)


def _timed(what: Callable[[], Any]) -> float:
    start = time.perf_counter()
    what()
    return time.perf_counter() - start
