"""Body of one rank of ``commlib bench link``: the raw line, then every operation of every backend there is."""

from __future__ import annotations

import dataclasses
import datetime
import math
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from commlib.bench.launch.child import tell
from commlib.bench.launch.gpus import take_gpu, visible
from commlib.errors import CommlibError, unknown
from commlib.groups.store import store_of
from commlib.groups.world import World
from commlib.messaging.network import network
from commlib.messaging.throughput import Stream, measure

from . import sweep
from .collectives import OPS, Op, Run, wrong
from .sweep import whole


def measure_line(seconds: float = 0.3) -> Stream | None:
    """The line between two hosts (:func:`commlib.messaging.throughput.measure`), over the interface that the backend
    uses.

    So it is the same under Gloo and NCCL.

    Returns:
        None in a group of one rank.

    Raises:
        ValueError, PeerLost: as there.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    if size == 1:
        return measure(None, "", World(rank, size), "", seconds)
    store = store_of(dist.group.WORLD)
    key = f"commlib/line/{store.add(f'commlib/line/count/{rank}', 1)}"
    return measure(store, key, World(rank, size), own_address(), seconds)


def own_address() -> str:
    """The IPv4 address the backend's sockets have on this machine (Gloo's choice, else NCCL's, else the loopback)."""
    found = network()
    for name in (found["gloo"], found["nccl"]):
        for address in found["interfaces"][name]["addresses"] if name in found["interfaces"] and name else []:
            if ":" not in address:
                return address
    return "127.0.0.1"


_TIMEOUT = datetime.timedelta(seconds=120)  # of one collective; a size that takes longer is not begun
_CHECKED = 64  # values a rank contributes to the check of each operation


@dataclasses.dataclass(frozen=True)
class LinkSettings:
    """Settings of a run: names and sizes in order, and how long it may take."""

    backends: tuple[str, ...]
    ops: tuple[str, ...]
    sizes: tuple[int, ...]
    seconds: float


@dataclasses.dataclass(frozen=True)
class LinkPoint:
    """Figures of one operation at one size; ``seconds`` are the slowest rank's, one for every repetition."""

    backend: str
    op: str
    bytes: int
    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """Seconds of the repetition in the middle."""
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """(q75 − q25) / median."""
        q25, _, q75 = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return (q75 - q25) / self.median


@dataclasses.dataclass(frozen=True)
class LinkProgress:
    """Progress of a run: what is being measured, and how many (backend, operation) pairs are done."""

    backend: str
    op: str
    bytes: int
    done: int


@dataclasses.dataclass(frozen=True)
class LinkMeasured:
    """Figures of a run; ``left_out`` are the sizes there was no time for, ``cannot`` what a backend refused."""

    line: Stream | None
    points: list[LinkPoint]
    left_out: dict[tuple[str, str], tuple[int, ...]]
    cannot: dict[tuple[str, str], str]


def main(settings: LinkSettings) -> LinkMeasured:
    """Measure all of it; every rank returns the same.

    Raises:
        ValueError: a backend that cannot be had here.
        CommlibError: a collective gave wrong values, or a rank is gone.
    """
    if "nccl" in settings.backends:
        take_gpu()
    first, *others = settings.backends
    _make(first, lambda: dist.init_process_group(first, timeout=_TIMEOUT))
    groups = {first: dist.group.WORLD}
    for name in others:
        groups[name] = _make(name, lambda name=name: dist.new_group(backend=name, timeout=_TIMEOUT))
    began = time.monotonic()
    line = measure_line(min(1.0, settings.seconds / 20))
    result = LinkMeasured(line, [], {}, {})
    bench = {name: Bench(name, group) for name, group in groups.items()}
    left = settings.seconds - bench[first].slowest([time.monotonic() - began])[0]
    pairs = [(backend, OPS[op]) for backend in settings.backends for op in settings.ops]
    for i, (backend, op) in enumerate(pairs):
        share = sweep.share(left, len(pairs) - i, settings.seconds / len(pairs))
        left -= bench[backend].measure(op, settings.sizes, share, result, done=i)
    return result


class Bench:
    """Process group of one backend, timed in step."""

    def __init__(self, name: str, group: Any) -> None:
        self.name, self.group = name, group
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.device = _device(name)
        self._token = torch.zeros(1, device=self.device)

    def measure(self, op: Op, sizes: Sequence[int], share: float, into: LinkMeasured, *, done: int) -> float:
        """Measure an operation at all sizes the share (seconds) has time for; the seconds it took on the slowest
        rank."""
        began = time.monotonic()
        _say(LinkProgress(self.name, op.name, 0, done))
        refused = self._try(op)
        if refused is not None:
            into.cannot[self.name, op.name] = refused
            return self._since(began)
        runs: list[Run] = []
        known: list[tuple[int, float]] = []
        a_byte = 8e-9 / into.line.gbit_s if into.line else math.inf
        for i, size in enumerate([0] if op.name == "barrier" else sizes):
            first, left = [t for _, t in known], share - self._since(began)
            if i and not sweep.affordable(sweep.expected(size, known, a_byte), first, left):
                into.left_out[self.name, op.name] = tuple(sizes[i:])
                break
            _say(LinkProgress(self.name, op.name, size, done))
            values = whole(size, self.ranks) // 4
            runs.append(op.prepare(values, self.ranks, self.rank, self.device, self.group).run)
            known.append((size, self._probe(runs[-1], left)))
        first = [t for _, t in known]
        times: list[list[float]] = [[] for _ in runs]
        for counts in sweep.repetitions(first, share - self._since(began)):
            for run, seconds, count in zip(runs, times, counts, strict=True):
                seconds += [self.once(run) for _ in range(count)]
        for size, seconds in zip(sizes, times, strict=False):
            nbytes = 0 if op.name == "barrier" else whole(size, self.ranks)
            into.points.append(LinkPoint(self.name, op.name, nbytes, tuple(self.slowest(seconds))))
        return self._since(began)

    def _probe(self, run: Run, left: float) -> float:
        """About how long it takes, after a first time that does not count."""
        self.once(run)
        (each,) = self.slowest([self.once(run)])
        again = [self.once(run) for _ in range(sweep.probe_again(each, left))]
        return min([each, *self.slowest(again)]) if again else each

    def once(self, run: Run) -> float:
        """Seconds from the moment all ranks are there until this one is done."""
        if self.device.type == "cpu":
            dist.barrier(self.group)
        else:
            dist.all_reduce(self._token, group=self.group)  # a barrier, on the device
        self._wait()
        start = time.perf_counter()
        run()
        self._wait()
        return time.perf_counter() - start

    def slowest(self, seconds: Sequence[float]) -> list[float]:
        """Largest of every figure that any rank has: the same on all."""
        figures = torch.tensor(seconds, dtype=torch.float64, device=self.device)
        dist.all_reduce(figures, op=dist.ReduceOp.MAX, group=self.group)
        return [float(x) for x in figures.cpu()]

    def _since(self, began: float) -> float:
        """Seconds since then, on the rank where they are most."""
        return self.slowest([time.monotonic() - began])[0]

    def _try(self, op: Op) -> str | None:
        """Check what the operation moves, once; why the backend cannot do it, or None.

        Raises:
            CommlibError: the values are wrong, on whichever rank.
        """
        values = _CHECKED * self.ranks
        error, refused = None, None
        try:
            buffers = op.prepare(values, self.ranks, self.rank, self.device, self.group)
            error = wrong(op, buffers, values, self.ranks, self.rank)
        except (RuntimeError, NotImplementedError) as e:
            refused = str(e).splitlines()[0]
        bad, no = self.slowest([float(error is not None), float(refused is not None)])
        if bad:
            raise CommlibError(f"backend {self.name} gave wrong values: {error or 'on another rank'}")
        return (refused or "refused by another rank") if no else None

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _make(name: str, make: Any) -> Any:
    try:
        return make()
    except (RuntimeError, ValueError) as e:
        raise CommlibError(f"backend {name} cannot be used here: {str(e).splitlines()[0]}") from e


def _device(backend: str) -> torch.device:
    """Where a backend's tensors live: the CPU, if it can do that."""
    kinds = dist.Backend.backend_capability.get(backend, ["cpu"])
    if "cpu" in kinds:
        return torch.device("cpu")
    return torch.device(kinds[0], torch.cuda.current_device()) if kinds[0] == "cuda" else torch.device(kinds[0])


def _say(progress: LinkProgress) -> None:
    if dist.get_rank() == 0:
        tell(progress)


_NOTHING = ("undefined", "fake")  # torch's own names for none, and for one that moves no bytes


def known() -> list[str]:
    """Every backend this process could make a group of: those built into torch and those registered with it."""
    return [b for b in dist.Backend.backend_list if b not in _NOTHING and dist.is_backend_available(b)]


def choose(names: Sequence[str], ranks_here: int) -> tuple[str, ...]:
    """The backends asked for, or by default those that work without a question: Gloo; NCCL with a GPU a rank.

    Args:
        names: as given; empty for the default.
        ranks_here: ranks on this machine.

    Raises:
        ValueError: a name that is not known, or NCCL without a GPU.
    """
    gpus, there = visible(), known()
    for name in names:
        if name not in there:
            raise ValueError(unknown("backend", name, there))
        if name == "nccl" and gpus == 0:
            raise ValueError("backend nccl needs a GPU, and PyTorch sees none here; use --backend gloo")
    if names:
        return tuple(dict.fromkeys(names))
    enough = {"gloo": True, "nccl": gpus >= ranks_here}
    return tuple(name for name in there if enough.get(name, False))
