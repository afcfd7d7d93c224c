"""Trial of one pair: attach it anew, warm up, time some steps, count their bytes.

Lets DDP make up its buckets before anything is sent.

In its first step DDP has one single bucket; then it learns in which order gradients come and cuts buckets of
25 MiB, over which an exchange overlaps with itself. So the first step is not like the others, and on a slow
link it takes as long as they do: here it goes by without an exchange.
"""

from __future__ import annotations

import dataclasses
import gc
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import commlib
from commlib.bench.lab import Counters
from commlib.bench.models.shapes import Layers
from commlib.bench.models.simulated import Replay
from commlib.bench.results.socket_counters import SocketCounters, traffic
from commlib.telemetry.stats import PHASES, Stats

from .barrier import stand_still
from .combinations import Pair


class Rehearsed:
    """A communication hook that exchanges nothing until it is told to; then it is commlib's.

    Args:
        ddp: without a hook; this one is registered.
        state: what :func:`commlib.attach` would have made.
    """

    def __init__(self, ddp: DistributedDataParallel, state: commlib.HookState) -> None:
        self.exchanges = False
        self._state = state
        # DDP compares a hook's annotations with the types themselves: a lambda has none.
        ddp.register_comm_hook(None, lambda _, bucket: self.reduce(bucket))

    def reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
        """As :func:`commlib.hook`, or at once what came in."""
        if self.exchanges:
            return commlib.hook(self._state, bucket)
        buffer = bucket.buffer()
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(
            devices=[buffer.device] if buffer.is_cuda else []
        )
        future.set_result(buffer)
        return future


@dataclasses.dataclass(frozen=True)
class TrialSetting:
    """Settings that all trials have in common.

    Args:
        layers: (name, shape) of every parameter.
        device: "cpu" or "cuda:0" ….
        bucket_cap_mb: of DDP; None is DDP's own.
        min_size: of :func:`commlib.attach`.
        steps: timed in one visit at most; with 1 nothing is warmed up.
        gate: where ranks stand still before and after the timed steps; None: a barrier.
    """

    layers: Layers
    device: str = "cpu"
    bucket_cap_mb: float | None = None
    min_size: int | None = None
    steps: int = 10
    gate: Path | None = None


@dataclasses.dataclass(frozen=True)
class TrialShare:
    """Share of one rank in a trial: what it saw of the timed steps.

    Args:
        seconds: of each step, a backward pass with its exchange.
        accounted: bytes the exchange says this rank sent, all steps together; so the others.
        dense: bytes a ring all-reduce of the gradients would have sent.
        sockets: what passed this rank's TCP sockets; None: not counted here.
        phases: seconds by phase, as :class:`commlib.telemetry.stats.Stats` has them.
    """

    seconds: list[float]
    accounted: int
    dense: int
    sockets: SocketCounters | None
    phases: dict[str, float]


@dataclasses.dataclass(frozen=True)
class ExchangeTrial:
    """The shares of all ranks, and what the hosts' interfaces sent meanwhile, together (None: no lab)."""

    pair: Pair
    shares: list[TrialShare]
    interfaces: Counters | None = None

    @property
    def steps(self) -> int:
        """How many were timed."""
        return len(self.shares[0].seconds)


class Refused(Exception):
    """The pair cannot be attached; every rank raises it, so that all are still in step."""


def visit(pair: Pair, setting: TrialSetting, slice_s: float) -> ExchangeTrial:
    """Measure a pair for about so many seconds. Collective; the same result on every rank.

    Raises:
        Refused: attaching it failed.
        CommlibError: a rank was lost.
    """
    began = time.perf_counter()
    replay = Replay(setting.layers).to(setting.device)
    # Nobody reads the parameters: sending them round would cost a slow link seconds.
    ddp = DistributedDataParallel(
        replay, bucket_cap_mb=setting.bucket_cap_mb, gradient_as_bucket_view=True, init_sync=False
    )
    try:
        comm = commlib.HookState(ddp, str(pair), min_size=setting.min_size)
    except commlib.PeerLost:
        raise
    except Exception as e:
        raise Refused(f"{pair}: {type(e).__name__}: {e}") from e
    try:
        hook = Rehearsed(ddp, comm)
        _step(_forward(ddp))
        hook.exchanges = True
        share = _measure(ddp, comm, 1, setting.gate)
        if setting.steps > 1 and largest(share.seconds[0], setting.device) < slice_s:  # else that one must do
            step_s = largest(_step(_forward(ddp)), setting.device)
            left_s = slice_s - largest(time.perf_counter() - began, setting.device)
            share = _measure(ddp, comm, affordable(left_s, step_s, setting.steps), setting.gate)
    finally:
        comm.close()
        del ddp, comm, replay
        gc.collect()  # DDP is a cycle
    shares: list[TrialShare | None] = [None] * dist.get_world_size()
    dist.all_gather_object(shares, share)
    return ExchangeTrial(pair, [s for s in shares if s is not None])


def affordable(left_s: float, step_s: float, most: int) -> int:
    """Steps of this length that fit into the time left: at least one."""
    return max(1, min(most, int(left_s / max(step_s, 1e-9))))


def largest(value: float, device: str) -> float:
    """The largest of the ranks' values, on every rank: so that all decide alike. Collective."""
    shared = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(shared, op=dist.ReduceOp.MAX)
    return shared.item()


def _measure(ddp: DistributedDataParallel, comm: commlib.HookState, steps: int, gate: Path | None) -> TrialShare:
    # DDP settles its new buckets over the network in the forward pass of its second step: before the gate.
    loss = _forward(ddp)
    before = comm.stats()
    stand_still(gate)
    sent_before = traffic()
    seconds = [_step(loss)]
    for _ in range(steps - 1):
        seconds.append(_step(_forward(ddp)))
    stand_still(gate)
    sent_after = traffic()
    return _share(seconds, before, comm.stats(), sent_before, sent_after)


def _forward(ddp: DistributedDataParallel) -> Tensor:
    ddp.module.take_back()
    loss: Tensor = ddp()
    return loss


def _step(loss: Tensor) -> float:
    """Seconds of the backward pass, exchange included."""
    _synchronise(loss)
    start = time.perf_counter()
    loss.backward()  # type: ignore[no-untyped-call]
    _synchronise(loss)
    return time.perf_counter() - start


def _share(
    seconds: list[float],
    before: Stats,
    after: Stats,
    sent_before: SocketCounters | None,
    sent_after: SocketCounters | None,
) -> TrialShare:
    counted = None if sent_before is None or sent_after is None else sent_after - sent_before
    return TrialShare(
        seconds,
        after.wire_bytes - before.wire_bytes,
        after.dense_bytes - before.dense_bytes,
        counted,
        {phase: after.seconds[phase] - before.seconds[phase] for phase in PHASES},
    )


def _synchronise(loss: Tensor) -> None:
    if loss.is_cuda:
        torch.cuda.synchronize(loss.device)
