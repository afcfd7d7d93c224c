"""Jobs that histories are made of: collectives, trainings, parameter servers; what is right of each is known."""

from __future__ import annotations

import contextlib
import datetime
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import msgpack
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commlib
from commlib.bench.chaos import run as chaos
from commlib.errors import PeerLost
from commlib.runtime.autograd import wait
from commlib.server.shard.serve import serve
from commlib.transports.options import Options
from commlib.transports.process_group import factory
from tests.support.simulation import primitives
from tests.support.simulation.job import Job, RankJob
from tests.support.simulation.restarts import Restarts
from tests.support.simulation.world import Process, Violation


class OwnError(Exception):
    """Error of the training itself."""


class Collectives(RankJob):
    """Calls of a zmq process group, whose results are known."""

    kind = "collectives"
    _CALLS = ("all_reduce", "broadcast", "all_gather", "all_to_all", "barrier", "then")

    def draw(self) -> None:
        draw = self.random
        # On a slow line what the ranks of a call send must not take its deadline, nor that of the call before it.
        largest = 300_000 if self.network.rate > 1e7 else 80_000
        self.calls = [
            (draw.choice(self._CALLS), draw.choice((1, 7, 1000, 40_000, largest)), draw.random() < 0.6)
            for _ in range(draw.randint(1, 12))
        ]

    def rank(self, rank: int) -> int:
        """Make the calls; returns how many had the right result."""
        about = types.SimpleNamespace(
            store=self.store(),
            group_rank=rank,
            group_size=self.size,
            timeout=datetime.timedelta(seconds=self.deadline_s),
            group_id="job",
        )
        group = factory.create(about, Options())
        self.passes(rank)
        try:
            right_ones = 0
            going: list[tuple[Any, Callable[[], bool], str]] = []
            for n, (name, numel, waits) in enumerate(self.calls):
                work, right = self._call(group, rank, name, numel, n)
                going.append((work, right, f"call {n}, {name} of {numel}"))
                while going and (waits or n + 1 == len(self.calls)):
                    work, right, what = going.pop(0)
                    work.wait()
                    self.passes(rank)
                    if not right():
                        raise Violation(f"rank {rank} has a wrong result of {what}")
                    right_ones += 1
            return right_ones
        finally:
            group.shutdown()

    def check(self, results: list[Any]) -> None:
        if results != [len(self.calls)] * len(results):
            raise Violation(f"of {len(self.calls)} calls ranks have seen {results}")

    def _call(self, group: Any, rank: int, name: str, numel: int, n: int) -> tuple[Any, Callable[[], bool]]:
        size = self.size
        mine = torch.full((numel,), float(rank + 1 + n))
        if name == "all_reduce":
            total = float(sum(r + 1 + n for r in range(size)))
            return group.allreduce([mine]), lambda: bool(mine.eq(total).all())
        if name == "broadcast":
            root, opts = n % size, dist.BroadcastOptions()
            opts.rootRank = root
            return group.broadcast([mine], opts), lambda: bool(mine.eq(root + 1 + n).all())
        if name == "all_gather":
            out = torch.zeros(size * numel)
            right = torch.arange(size).add(1 + n).float().repeat_interleave(numel)
            return group._allgather_base(out, mine), lambda: bool(out.eq(right).all())
        if name == "all_to_all":
            out, given = torch.zeros(size * numel), torch.full((size * numel,), float(rank))
            right = torch.arange(size).float().repeat_interleave(numel)
            return group.alltoall_base(out, given, [], []), lambda: bool(out.eq(right).all())
        if name == "then":  # a callback that waits for another call, as that of PyTorch's powerSGD_hook does
            total, after = float(sum(r + 1 + n for r in range(size))), torch.ones(numel)
            work = group.allreduce([mine])
            then = work.get_future().then(lambda _: group.allreduce([after]).wait())
            return types.SimpleNamespace(
                wait=functools.partial(_await_callback, then)
            ), lambda: bool(mine.eq(total).all()) and bool(after.eq(size).all())
        return group.barrier(), lambda: True


def _await_callback(future: torch.futures.Future[Any]) -> None:
    """Wait for a callback's future, which would block for real; raise what the callback raised."""
    try:
        wait(future, lambda: None)
    except RuntimeError as e:  # PyTorch's: it has the words of the error
        raise commlib.CommlibError(str(e).partition("\n")[0]) from None


class Training(RankJob):
    """A DDP model over the zmq process group, with a codec or a policy attached; local steps; a sharded optimizer."""

    kind = "training"
    rules = (
        *("none", "onebit", "powersgd:rank=2", "factors", "owners", "randomk:ratio=0.1", "topk:ratio=0.1", "int8"),
        *("auto", "local", "zero"),
    )
    oddities = ("", "", "", "load", "discard", "late", "inf", "swap", "swaps alone", "leaves", "raises")
    """What one rank alone does once: it loads an earlier state, discards a step, comes late, has a gradient that is not
    finite, swaps its codec (or all do), returns, raises an error of its own."""

    def draw(self) -> None:
        draw = self.random
        self.size = draw.randint(2, 3)
        self.rule, self.steps = draw.choice(self.rules), draw.randint(2, 6)
        self.oddity, self.odd, self.odd_step = (
            draw.choice(self.oddities),
            draw.randrange(self.size),
            draw.randrange(self.steps),
        )
        if self.rule in ("local", "zero") and self.oddity in ("discard", "swap", "swaps alone"):
            self.oddity = ""
        self.may_fail = self.oddity not in ("", "inf", "swap")
        self.check_replicas = draw.choice((0, 0, 2))
        self.left = [self.odd] if self.oddity in ("leaves", "raises") else []

    def rank(self, rank: int) -> Any:
        with _meeting(self, rank):
            self.passes(rank)
            model = _small_model()
            made, step, around = self._attach(rank, model)
            before = made.state_dict()
            for number in range(self.steps):
                scale = 1.0
                if number == self.odd_step:
                    if rank == self.odd and self.oddity == "leaves":
                        break
                    scale = self._be_odd(rank, made, before)
                gen = torch.Generator().manual_seed(100 * number + rank)
                (scale * around(torch.randn(4, 24, generator=gen)).square().mean()).backward()
                if self.rule in ("local", "zero") or all(
                    bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None
                ):
                    step()
                model.zero_grad()
                self.passes(rank)
                primitives.sleep(0.05)
            made.close()
            return torch.cat([p.detach().reshape(-1) for p in model.parameters()])

    def _be_odd(self, rank: int, made: Any, before: Any) -> float:
        """What happens before the step; returns a factor of its loss."""
        if self.oddity == "swap" or (self.oddity == "swaps alone" and rank == self.odd):
            made.swap("int8" if self.rule != "int8" else "onebit")
        if rank == self.odd:
            if self.oddity == "load":
                made.load_state_dict(before)
            elif self.oddity == "discard":
                made.discard_step()
            elif self.oddity == "raises":
                raise OwnError("the training's own")
            elif self.oddity == "inf" and self.rule not in ("local", "zero"):
                return float("inf")
        return 1.0

    def _attach(self, rank: int, model: nn.Module) -> tuple[Any, Callable[[], object], Callable[..., Any]]:
        """commlib's object, what ends a step, and what is called for a forward pass."""
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        if self.oddity == "late" and rank == self.odd:
            primitives.sleep(self.deadline_s / 2)
            for each in range(self.size):  # the others wait for its values, and only then for those of the next rank
                self.passes(each)
        made: Any
        if self.rule == "local":
            made = commlib.LocalSteps(model, "diloco", "int8", tau=2, optimizer=optimizer, timeout=self.deadline_s)
            found = made, lambda: (optimizer.step(), made.step()), model
        elif self.rule == "zero":
            made = commlib.ShardedStep(model, optimizer, "int8", timeout=self.deadline_s)
            found = made, made.step, model
        else:
            around = DistributedDataParallel(model, bucket_cap_mb=0.005)
            self.passes(rank)
            options: dict[str, Any] = {"timeout": self.deadline_s, "check_replicas": self.check_replicas}
            made = commlib.attach(around, self.rule, min_size=0, **options)
            found = made, optimizer.step, around
        self.passes(rank)
        return found

    def check(self, results: list[Any]) -> None:
        if self.oddity == "leaves":  # its values are those of the step before
            results = [r for r in results if r is not self.results.get(self.odd)]
        if any(not r.isfinite().all() for r in results):
            raise Violation("a replica is not finite")
        if any(not torch.equal(r, results[0]) for r in results):
            raise Violation("replicas differ, and no rank has said so")

    def __str__(self) -> str:
        odd = f", rank {self.odd}: {self.oddity} before step {self.odd_step}" if self.oddity else ""
        return f"{super().__str__()}, {self.rule}, {self.steps} steps{odd}"


class Server(Job):
    """A parameter server: three shards, which keep two copies of each key, and workers that count."""

    kind = "server"
    steps = 25
    _APART_S = 12.0  # between two accidents at least: in that time most copies that were lost are made good

    def draw(self) -> None:
        self.spec = self.random.choice(("ssp:3", "asp", "bsp"))
        self.size = self.random.choice((2, 3))
        self.deadline_s = chaos.DEADLINE
        self.reports: dict[int, chaos.WorkerReport] = {}
        self.workers: list[Process] = []
        self.shards: list[Process] = []

    @property
    def longest_s(self) -> float:
        return 2.5 * self.deadline_s

    def start(self) -> list[Process]:
        self.meeting = self.world.start("meet", self._meet)
        for _ in range(3):
            self._shard()
        for rank in range(self.size):
            self._worker(rank)
        return []

    def _meet(self) -> None:
        while not all(p.over or p.stopped for p in (*self.shards, *self.workers)):
            primitives.sleep(1.0)

    def _shard(self) -> None:
        self.shards.append(self.world.start(f"shard{len(self.shards)}", self._serve))

    def _serve(self) -> None:
        with contextlib.suppress(commlib.CommlibError):
            self.world.note(serve("meet:1", endpoint="simulated", timeout=self.deadline_s))

    def _worker(self, rank: int | None) -> None:
        place, report = len(self.workers), chaos.WorkerReport()
        self.reports[place] = report
        given = "meet:1", place, rank, self.size, 3, self.spec, self.random.getrandbits(30)

        def tell(said: tuple[str, Any]) -> None:
            setattr(report, *said)

        run = functools.partial(chaos.count, tell, *given, steps=self.steps, pace_s=1.8, endpoint="simulated")
        self.workers.append(self.world.start(f"worker{place}", run))

    def disturb(self, ranks: list[Process]) -> None:
        when = 1.0
        for _ in range(self.random.choice((0, 1, 2, 2))):
            when += self.random.random() * 3.0
            self.world.after(when, self._accident)
            when += self._APART_S

    def _accident(self) -> None:
        """One at a time, for there are two copies."""
        draw = self.random
        shards = [p for p in self.shards if not p.over]
        workers = [p for p in self.workers if not p.over]
        what = draw.choice(("shard", "shard", "worker", "stop", "cut", "reset"))
        if not workers or len(shards) < 3:
            return
        if not self._knows():  # where the store is slow, a member is given up late
            self.world.after(self._APART_S, self._accident)
            return
        if what == "shard":
            self.fault(0.0, draw.choice(shards), shards[0], "kill")
            if draw.random() < 0.7:
                self._shard()
        elif what == "worker" and not any(p.killed for p in self.workers) and len(workers) > 1:
            self.fault(0.0, draw.choice(workers), shards[0], "kill")
            if draw.random() < 0.5:
                self._worker(None)
        elif what == "stop":
            self.fault(0.0, draw.choice(shards), shards[0], "stop", 4.0)
        elif what in ("cut", "reset"):
            some = (*shards, *workers, self.meeting)
            self.fault(0.0, draw.choice(some), draw.choice(some), what, draw.choice((0.05, 0.5, 1.0)))

    def _knows(self) -> bool:
        """Whether the newest view is without all members that were killed."""
        view = next((v.decode() for k, v in self.values.items() if k.endswith("view")), None)
        if view is None:
            return True  # it has not begun
        packed = next(v for k, v in self.values.items() if k.endswith(f"view/{view}"))
        gone = msgpack.unpackb(packed, strict_map_key=False)[4]
        return len(gone) >= sum(p.killed for p in (*self.shards, *self.workers))

    def check(self, results: list[Any]) -> None:
        cut_off = "and messages were lost with it"  # of a worker whose connection broke: it says so, and ends
        killed = {place for place, p in enumerate(self.workers) if p.killed or cut_off in str(p.error)}
        errors = "; ".join(f"{p.name}: {type(p.error).__name__}: {p.error}" for p in self.workers if p.error)
        if any(p.killed for p in (*self.shards, *self.workers)) and not any(r.pushed for r in self.reports.values()):
            # Killed with the values to begin with before there were copies: nothing is lost, and all say so.
            over = [isinstance(p.error, PeerLost) and "the job is over" in str(p.error) for p in self.workers]
            if all(o or p.killed for o, p in zip(over, self.workers, strict=True)):
                return
        chaos.check(self.reports, killed, self.size, self.steps, f"{self}; {errors}; {self.reports}")
        if any(not p.over for p in self.shards if not p.stopped):
            raise Violation("a shard is still there")

    def __str__(self) -> str:
        return f"{super().__str__()}, {self.spec}"


JOBS: dict[str, type[Job]] = {each.kind: each for each in (Collectives, Training, Server, Restarts)}


def _small_model() -> nn.Module:
    model = nn.Sequential(nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 24), nn.Tanh(), nn.Linear(24, 3))
    gen = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=gen) * 0.2)
    return model


@contextlib.contextmanager
def _meeting(job: Job, rank: int) -> Iterator[None]:
    """The default process group, of the process whose thread this is."""
    dist.init_process_group(
        "zmq",
        store=job.store(),
        rank=rank,
        world_size=job.size,
        timeout=datetime.timedelta(seconds=job.deadline_s),
    )
    try:
        yield
    finally:
        dist.destroy_process_group()
