"""Probes of the manager: the link's collectives, and the products that factors need."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from commlib.codecs.memory_store import MemoryStore
from commlib.exchange.collectives import Scope, scope_of
from commlib.exchange.hierarchy import Hierarchy
from commlib.exchange.rate_limit import RateLimit
from commlib.groups.world import World
from commlib.messaging.link_model import AlphaBeta, AlphaBetaFit, Link, fit
from commlib.planning.route import resolve
from commlib.planning.simulate import part
from commlib.runtime.scratch import give_back, zeros
from commlib.runtime.streams import accelerator, when_done

_SIZES = (16 << 10, 1 << 20, 8 << 20)  # bytes a rank sends
_SERVED = (16 << 10, 4 << 20, 32 << 20)  # the same to servers, where a chunk has some megabytes
_LONGEST = (2.0, 0.3)  # seconds: the second and third are left out if they would take longer, by what the last took
_WARM, _TIMES = 3, 5  # repetitions; fewer where they take long
_BESIDE_S, _BESIDE_TIMES = 0.06, 3  # seconds of a transfer with products beside it


@dataclasses.dataclass(frozen=True)
class LinkProbe:
    """Probe that measures a link.

    Args:
        group: a process group of all ranks.
        world: this rank.
        device: where gradients are.
        limit: that the groups keep. A short message may leave at once; no price counts on that.
        hierarchy: nodes, if dense gradients go over two levels.
        groups: of each scope of these, and of servers. Like ``group``, they carry nothing else meanwhile.
    """

    group: Any
    world: World
    device: torch.device
    limit: RateLimit | None = None
    hierarchy: Hierarchy | None = None
    groups: Mapping[Scope, Any] = dataclasses.field(default_factory=dict)

    def link(self) -> Link:
        """α and β of the dense exchange and of all-gathers, as the slowest rank sees them, and the former's drag.

        And α and β of pushes and pulls, if there are servers. Collective; at most about two seconds and a half, and two
        more for these. A slow limit takes longer: three messages of 16 KiB for each, and no larger ones that would take
        over two seconds.

        Under a hierarchy the first line is of the two-level exchange as a whole, with its copies. Its bytes are those
        of a flat ring, 2(P−1)/P of the gradient, for a rank sends as many: 2(L−1)/L of it inside its node and, of a
        stripe, 2(N−1)/N to others. Under a limit only the latter are held up, one in (P−1)/(N−1).
        """
        held = 1.0 if self.hierarchy is None else (self.hierarchy.inter.size - 1) / (self.world.size - 1)
        reduce = self._reduce if self.hierarchy is None else functools.partial(self._two_levels, self.hierarchy)
        lines = self._line(reduce, held), self._line(self._gather, 1.0)
        sent = min(_SIZES[-1], int(_BESIDE_S / lines[0].beta)) if lines[0].beta else _SIZES[-1]
        drag = self._drag(reduce(max(sent, 1)))
        found = Link(self.world.size, *lines, drag=drag, push_pull=self._push_pull(self.groups.get("servers")))
        give_back()  # Gloo takes room for its own for each of these messages, which are larger than a small model's
        return found

    def _reduce(self, sent: int) -> Callable[[], None]:
        tensor = zeros((self._values(sent),), torch.float32, self.device)
        return lambda: self.group.allreduce([tensor]).wait()

    def _two_levels(self, hierarchy: Hierarchy, sent: int) -> Callable[[], None]:
        """The exchange itself, round by round: each is issued, alike on all ranks, once the one before is through."""
        grad = zeros((self._values(sent),), torch.float32, self.device)
        route, store = resolve("none", 2), MemoryStore()

        def through() -> None:
            for batch in part(route, grad, store, self.world, hierarchy, step=0, seed=0):
                for work in [call.issue(self.groups[scope_of(call)]) for call in batch]:
                    work.wait()

        return through

    def _gather(self, sent: int) -> Callable[[], None]:
        tensor = zeros((max(1, sent // (self.world.size - 1)),), torch.uint8, self.device)
        out = zeros((self.world.size * len(tensor),), torch.uint8, self.device)
        return lambda: self.group._allgather_base(out, tensor).wait()

    def _values(self, sent: int) -> int:
        """So many float32 make a rank send so many bytes in an all-reduce."""
        return max(1, sent * self.world.size // (2 * (self.world.size - 1)) // 4)

    def _line(self, start: Callable[[int], Callable[[], None]], held: float) -> AlphaBeta:
        """Fit a line to what ``start`` makes for a number of bytes, of which the limit holds up this share."""
        least = 0.0 if self.limit is None else held / self.limit.bytes_s  # seconds a byte
        found = self._fitted(lambda sent: (sent, start(sent)), _SIZES, least)
        return AlphaBeta(found.alpha, max(found.beta, least))

    def _push_pull(self, servers: Any) -> AlphaBeta | None:
        """Fit a line to gradients to servers and back, by the bytes of the gradients: those that a rank sends."""
        if servers is None:
            return None
        found = self._fitted(servers.trial, _SERVED)
        return AlphaBeta(found.alpha, found.beta)

    def _fitted(
        self, start: Callable[[int], tuple[int, Callable[[], None]]], sizes: Sequence[int], least: float = 0.0
    ) -> AlphaBetaFit:
        """The line through what ``start`` makes for a number of bytes, with those that it really is.

        Args:
            start: makes one of about so many bytes.
            sizes: to try; the larger ones are left out if they would take long.
            least: seconds a byte.
        """
        points: dict[float, float] = {}
        for size, longest in zip(sizes, (math.inf, *_LONGEST), strict=True):
            sent, through = start(size)
            expected = max([least * sent, *(t * sent / n for n, t in list(points.items())[-1:])])
            if expected > longest or sent in points:
                break
            short = expected < 0.03
            for _ in range(_WARM if short else 1):
                through()
            times = [_timed(through, self.device) for _ in range(_TIMES if short else 2)]
            points[float(sent)] = max(self._agreed(min(times)), 1e-9)  # what takes longer is not the link
        return fit(list(points.items()))

    def _drag(self, through: Callable[[], None]) -> float:
        """How many times as long products take while something is ``through`` beside them; all ranks' common one."""
        if accelerator(self.device) is not None:
            return 1.0
        counts = torch.zeros(2, 2, dtype=torch.float64)  # alone, beside it; products, seconds
        with concurrent.futures.ThreadPoolExecutor(1, "commlib-probe") as others:
            for _ in range(_BESIDE_TIMES):
                self._agreed(0.0)  # all ranks begin together
                beside = _products_beside(others.submit(through))
                self._agreed(0.0)
                alone = _products_while(lambda seconds: seconds < _BESIDE_S)
                counts += torch.tensor([alone, beside], dtype=torch.float64)
        self.group.allreduce([counts]).wait()
        alone_s, beside_s = (counts[:, 1] / counts[:, 0]).tolist()
        return max(1.0, float(beside_s / alone_s))

    def _agreed(self, seconds: float) -> float:
        """The slowest rank's, to all."""
        one = torch.full((1,), seconds, dtype=torch.float32, device=self.device)
        options = torch.distributed.AllreduceOptions()
        options.reduceOp = torch.distributed.ReduceOp.MAX  # type: ignore[assignment]  # its stub is not its type
        self.group.allreduce([one], options).wait()
        return float(one)


def measure_product(n: int, m: int, rows: int, dtype: torch.dtype, device: torch.device) -> float:
    """Seconds of (N × rows)·(rows × M) on this rank, written to memory that is there."""
    if rows == 0:
        return 0.0
    u, v = torch.ones(rows, m, dtype=dtype, device=device), torch.ones(rows, n, dtype=dtype, device=device)
    out = torch.empty(n, m, dtype=dtype, device=device)
    with torch.no_grad():
        times = [_timed(lambda: _product(u, v, out), device) for _ in range(2)]
        while len(times) < 4 and sum(times) < 0.2:
            times.append(_timed(lambda: _product(u, v, out), device))
    return statistics.median(times[1:])


def _product(u: Tensor, v: Tensor, out: Tensor) -> None:
    torch.mm(v.t(), u, out=out)


def _products_beside(transfer: concurrent.futures.Future[None]) -> tuple[float, float]:
    """As :func:`_products_while`, until it is through; raises what went wrong with it."""
    counted = _products_while(lambda _: not transfer.done())
    transfer.result()
    return counted


def _products_while(going: Callable[[float], bool]) -> tuple[float, float]:
    """Small products, and the seconds they took: at least one, and on for as long as it is ``going``."""
    u, v = torch.ones(2, 128, 256, dtype=torch.float32)
    out, count = torch.empty(256, 256, dtype=torch.float32), 0
    start = time.perf_counter()
    while True:
        with torch.no_grad():
            _product(u, v, out)
        count += 1
        seconds = time.perf_counter() - start
        if not going(seconds):
            return count, seconds


def _timed(what: Callable[[], Any], device: torch.device) -> float:
    start = when_done(device)
    what()
    return when_done(device) - start
