"""Where the ranks of a benchmark run: this machine, a lab of emulated hosts, or wherever torchrun put us.

A benchmark is one function that every rank calls, under the environment torchrun sets, and whose result on
rank 0 is shown. :func:`place` decides where from the options all benchmarks share.
"""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch.distributed as dist

from commlib.bench.lab import Lab, parse_rate
from commlib.bench.lab.network_commands import show_rate
from commlib.bench.launch.gpus import visible
from commlib.bench.launch.processes import run_ranks

OnMessage = Callable[[int, Any], None]


class Target(Protocol):
    """Somewhere ranks can run."""

    world_size: int
    launches: bool
    """Whether :meth:`run` starts processes: what hangs can then be ended and started anew."""

    def run(
        self,
        target: Callable[..., Any],
        args: Sequence[object] = (),
        *,
        on_message: OnMessage | None = None,
        timeout: float | None = None,
    ) -> Any:
        """Call ``target(*args)`` on every rank; what rank 0 returned, or None on any other rank of torchrun.

        ``target`` makes the default process group itself (``init_process_group(backend)``) and may leave it.

        Raises:
            RankFailed, TimeoutError, KeyboardInterrupt, Terminated: as
            :func:`commlib.bench.launch.processes.run_ranks`.
        """

    def facts(self) -> dict[str, object]:
        """Facts for the record: ``ranks``, ``hosts`` (None: no lab), ``ranks_per_host``, ``rate`` (as text)."""


class Here:
    """Ranks on this machine, over its loopback."""

    launches = True

    def __init__(self, ranks: int) -> None:
        if ranks < 1:
            raise ValueError(f"--ranks must be at least 1, got {ranks}")
        self.world_size = ranks

    def run(self, target: Callable[..., Any], args: Sequence[object] = (), **options: Any) -> Any:
        """Same contract as :meth:`Target.run`."""
        return run_ranks(target, self.world_size, args, **options)[0]

    def facts(self) -> dict[str, object]:
        """Same contract as :meth:`Target.facts`."""
        return {"ranks": self.world_size, "hosts": None, "ranks_per_host": self.world_size, "rate": None}


class InLab:
    """Ranks on emulated hosts; :attr:`lab` may be changed while they run."""

    launches = True

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.world_size = lab.world_size

    def run(self, target: Callable[..., Any], args: Sequence[object] = (), **options: Any) -> Any:
        """Same contract as :meth:`Target.run`."""
        port = self.lab.start()
        where: dict[str, Any] = {
            "env": lambda rank: self.lab.environment(rank, port),
            "prefix": self.lab.prefix,
        }
        return run_ranks(target, self.world_size, args, **where, **options)[0]

    def facts(self) -> dict[str, object]:
        """Same contract as :meth:`Target.facts`."""
        rate = self.lab.rate(0)
        return {
            "ranks": self.world_size,
            "hosts": self.lab.hosts,
            "ranks_per_host": self.lab.ranks_per_host,
            "rate": None if rate is None else show_rate(rate),
        }


class UnderTorchrun:
    """This process is one of the ranks already."""

    launches = False

    def __init__(self) -> None:
        self.world_size = int(os.environ["WORLD_SIZE"])

    def run(
        self,
        target: Callable[..., Any],
        args: Sequence[object] = (),
        *,
        on_message: OnMessage | None = None,
        timeout: float | None = None,
    ) -> Any:
        """As :meth:`Target.run`; messages and the time limit are torchrun's business."""
        try:
            result = target(*args)
        finally:
            if dist.is_initialized():
                gc.collect()  # DDP is a cycle: Gloo threads that outlive the group abort at exit (pytorch#179291)
                dist.destroy_process_group()
        return result if int(os.environ["RANK"]) == 0 else None

    def facts(self) -> dict[str, object]:
        """As :meth:`Target.facts`; how many hosts torchrun has, only torchrun knows."""
        per_host = int(os.environ.get("LOCAL_WORLD_SIZE", self.world_size))
        return {"ranks": self.world_size, "hosts": None, "ranks_per_host": per_host, "rate": None}


def check_peers(where: Target, backend: str) -> None:
    """Whether ranks can exchange anything there with this backend.

    Raises:
        ValueError: a single rank, or NCCL without a GPU. Ranks may share one (:mod:`commlib.bench.launch.gpus`).
    """
    if where.world_size < 2:
        raise ValueError("one rank exchanges nothing: it takes --ranks 2, or more")
    if backend == "nccl" and visible() == 0:
        raise ValueError("nccl needs a GPU, and PyTorch sees none here; use --backend gloo")


@contextlib.contextmanager
def place(ranks: int | None, hosts: int | None, rate: str | None, ranks_per_host: int = 1) -> Iterator[Target]:
    """The place the shared options name; a lab is taken down at the end.

    Args:
        ranks: ``--ranks``.
        hosts, rate, ranks_per_host: of a lab.

    Raises:
        ValueError: options that exclude each other, or a number or rate that cannot be.
        LabError: no lab can be made here.
    """
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        given = [f for f, v in (("--ranks", ranks), ("--hosts", hosts), ("--rate", rate)) if v is not None]
        if given:
            raise ValueError(f"torchrun (or the lab) has started the ranks already: leave {', '.join(given)} out")
        yield UnderTorchrun()
        return
    if hosts is None:
        if rate is not None or ranks_per_host != 1:
            raise ValueError("--rate and --ranks-per-host are of emulated hosts: say how many with --hosts")
        yield Here(2 if ranks is None else ranks)
        return
    if ranks not in (None, hosts * ranks_per_host):
        raise ValueError(f"--hosts {hosts} with --ranks-per-host {ranks_per_host} makes the ranks: leave --ranks out")
    with Lab(hosts, None if rate is None else parse_rate(rate), ranks_per_host=ranks_per_host) as lab:
        yield InLab(lab)
