"""What is recorded of a step with a clock that only computing and waiting advance is the recursion of
commlib.planning.cost.overlap.

The model is a real one, with the hooks that training has; the link carries one transfer after another.
"""

from __future__ import annotations

import collections
import functools
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import commlib
from commlib.ddp import state as hooks
from commlib.groups.world import World
from commlib.planning.cost.overlap import Timeline, just_in_time_seconds, overlap, step_seconds
from commlib.runtime.autograd import wait as wait_as_it_is
from commlib.server.job.chunks import cut
from commlib.server.membership.view import View
from commlib.server.protocol.messages import Ack, Message, Pull, Push, Send, Values
from commlib.server.worker.client import RequestTrace
from commlib.server.worker.client_state import ClientState
from commlib.server.worker.param_sync import ParamSync
from commlib.telemetry.recorder import PassRecorder
from commlib.telemetry.trace import Trace
from tests.support.rank_pool import Fleet
from tests.support.tiers import examples
from tests.support.trace_reader import shown

Profile = Sequence[tuple[int, int, int]]
"""Of each layer: seconds of its forward pass, of its backward pass, and of its transfer."""
SECONDS = st.integers(0, 9)
PROFILES = st.lists(st.tuples(SECONDS, SECONDS, SECONDS), min_size=1, max_size=6)
KNOWN = [(1, 1, 1), (1, 1, 1), (1, 1, 4)]  # 10 s a step, of the design's page
STEPS = 3


class Machine:
    """A clock, and a link that carries first what came first."""

    def __init__(self) -> None:
        self.now = self.free = 0.0
        self._due: collections.deque[tuple[float, Callable[[], None]]] = collections.deque()

    def __call__(self) -> float:
        return self.now

    def send(self, seconds: float, arrived: Callable[[], None]) -> tuple[float, float]:
        """When it begins to leave, and when it has arrived."""
        begin = max(self.now, self.free)
        self.free = begin + seconds
        self._due.append((self.free, arrived))
        return begin, self.free

    def work(self, seconds: float) -> None:
        """Computes for so long."""
        end = self.now + seconds
        while self._due and self._due[0][0] <= end:
            self.arrival()
        self.now = end

    def arrival(self) -> None:
        """Waits for the next."""
        at, arrived = self._due.popleft()
        self.now = max(self.now, at)
        arrived()


class Slow(torch.autograd.Function):
    """The same values, and so many seconds of the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, machine: Machine, seconds: float) -> Tensor:
        ctx.machine, ctx.seconds = machine, seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.machine.work(ctx.seconds)
        return grads[0], None, None


class Layer(nn.Module):
    def __init__(self, machine: Machine, forward: float, backward: float) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(4))
        self._machine, self._forward, self._backward = machine, forward, backward

    def forward(self, x: Tensor) -> Tensor:
        self._machine.work(self._forward)
        y: Tensor = Slow.apply(x * self.w, self._machine, self._backward)
        return y


def model(machine: Machine, profile: Profile) -> nn.Sequential:
    return nn.Sequential(*[Layer(machine, f, b) for f, b, _ in profile])


class Row:
    """Of a saved trace: begin and end of its spans by name, in seconds."""

    def __init__(self, path: Path) -> None:
        self._spans: dict[tuple[str, str], list[tuple[float, float]]] = collections.defaultdict(list)
        for thread, name, begin, seconds, _ in shown(path):
            if seconds is not None:
                self._spans[thread.partition(" (")[0], name].append((begin / 1e6, (begin + seconds) / 1e6))

    def __call__(self, row: str, name: str) -> list[tuple[float, float]]:
        return sorted(self._spans[row, name])


# -- the parameter server's worker -----------------------------------------------------------------


class Node:
    """A worker's client, whose shard is at the other end of the machine's link."""

    def __init__(self, machine: Machine, seconds: Mapping[str, float], trace: Trace) -> None:
        self._machine, self._seconds, self._trace = machine, seconds, trace
        self._client = ClientState(0, View(0, dict.fromkeys(seconds, ("shard",)), {0: 0}))
        self.flights = RequestTrace()

    def push(
        self, key: str, gradient: Any, options: Any = None, absent: frozenset[int] = frozenset(), *, pull: bool = False
    ) -> None:
        self._put(self._client.push(key, gradient, options, absent))
        if pull:
            self.pull(key)

    def pull(self, key: str, within: int | None = None, *, exact: bool = False) -> None:
        self._put(self._client.pull(key, within))

    def clock(self, key: str) -> int:
        return 0

    def values(self, key: str) -> tuple[Tensor, Mapping[int, int]]:
        while (found := self._client.values(key)) is None:
            self._machine.arrival()
        return found

    def _put(self, sends: Sequence[Send]) -> None:
        self.flights.leave(sends)
        for _, m in sends:
            if isinstance(m, Push):
                ack = Ack(m.view, m.key, m.worker, m.stamp)
                begin, end = self._machine.send(self._seconds[m.key], functools.partial(self._came, ack))
                self._trace.span("link", m.key, begin, end)
            elif isinstance(m, Pull):
                given = torch.ones(4), {0: m.clock}
                answer = Values(m.view, m.key, m.worker, m.clock, *given, within=m.within)
                self._machine.send(0.0, functools.partial(self._came, answer))

    def _came(self, message: Message) -> None:
        self.flights.came(message)
        self._client.handle(message)


def served(profile: Profile, folder: Path, *, join: bool) -> Row:
    """A few steps of a worker; ``join``: who waits for all values before the forward pass."""
    machine = Machine()
    trace, net = Trace(clock=machine), model(machine, profile)
    parameters = dict(net.named_parameters())
    chunks = cut(parameters, small=0)
    node = Node(machine, {c.key: seconds for c, (_, _, seconds) in zip(chunks, profile, strict=True)}, trace)
    syncer = ParamSync(net, parameters, chunks, node, lambda name: {})
    syncer.ask()
    syncer.take()
    syncer.trace = node.flights.trace = trace
    passes = PassRecorder(net, trace)
    for _ in range(STEPS):
        net(torch.ones(4)).sum().backward()
        syncer.end_step()
        if join:
            syncer.take()
    net(torch.ones(4))
    passes.remove()
    trace.save(folder / "t.json")
    return Row(folder / "t.json")


def times(profile: Profile) -> tuple[list[float], list[float], list[float]]:
    forward, backward, wire = ([float(t) for t in column] for column in zip(*profile, strict=True))
    return forward, backward, wire


def check_transfers(rows: Row, begun: float, step: int, profile: Profile, line: Timeline) -> None:
    """Those of a step whose backward pass began then."""
    for i in range(len(profile)):
        key = f"{i}.w[0:4]"
        ready, begin, end = (begun + t[i] for t in (line.ready, line.begin, line.end))
        assert rows("link", key)[step] == (begin, end)
        assert rows(key, "push")[step] == (ready, end)
        assert rows(key, "pull")[step] == (ready, end)
        assert rows("training", f"push {key}")[step] == (ready, ready)


@given(PROFILES)
def test_a_worker_whose_layers_wait_for_their_own_values_takes_what_the_recursion_says(profile: Profile) -> None:
    forward, backward, wire = times(profile)
    line = overlap(backward, wire)
    with tempfile.TemporaryDirectory() as folder:
        rows = served(profile, Path(folder), join=False)
    passes, back = rows("training", "forward"), rows("training", "backward")
    assert len(passes) == STEPS + 1
    assert len(back) == STEPS
    for step, (begun, ended) in enumerate(back):
        assert ended == begun + sum(backward)
        check_transfers(rows, begun, step, profile, line)
        assert passes[step + 1] == (ended, begun + just_in_time_seconds(forward, backward, wire))
        now = ended
        for i, arrived in enumerate(line.end):  # forward of layer l starts at max(forward end of l − 1, end_l)
            wait = rows("training", f"wait for {i}.w[0:4]")[step]
            assert wait == (now, max(now, begun + arrived))
            now = wait[1] + forward[i]
        assert now == passes[step + 1][1]


@given(PROFILES)
def test_a_worker_who_waits_for_all_values_takes_what_the_recursion_says(profile: Profile) -> None:
    forward, backward, wire = times(profile)
    line = overlap(backward, wire)
    with tempfile.TemporaryDirectory() as folder:
        rows = served(profile, Path(folder), join=True)
    passes, back = rows("training", "forward"), rows("training", "backward")
    for step, (begun, _) in enumerate(back):
        check_transfers(rows, begun, step, profile, line)
        assert passes[step + 1] == (begun + line.seconds, begun + line.seconds + sum(forward))
        assert passes[step + 1][1] - begun == step_seconds(sum(forward), backward, wire)


def test_the_example_of_the_design_takes_ten_seconds(tmp_path: Path) -> None:
    rows = served(KNOWN, tmp_path, join=True)
    (begun, _), (_, ended) = rows("training", "backward")[0], rows("training", "forward")[1]
    assert ended - begun == 10.0
    assert rows("link", "2.w[0:4]")[0] == (begun + 1, begun + 5)


# -- DDP's hook ------------------------------------------------------------------------------------


class Group:
    """A process group whose collectives take given seconds on the machine's link, one after another."""

    def __init__(self, machine: Machine, trace: Trace) -> None:
        self._machine, self._trace = machine, trace
        self.seconds: collections.deque[tuple[str, float]] = collections.deque()

    def size(self) -> int:
        return 1

    def allreduce(self, tensors: list[Tensor]) -> Any:
        name, seconds = self.seconds.popleft()
        self.future: Any = torch.futures.Future()
        future = self.future
        self._trace.span("link", name, *self._machine.send(seconds, lambda: future.set_result(tensors)))
        return self

    def get_future(self) -> Any:
        return self.future


def exchanged(world: World, profiles: Sequence[Profile], folder: str) -> None:
    """Steps of each profile, with a hook from the beginning; a layer has a bucket of its own."""
    machine, waiting = Machine(), vars(hooks)["wait"]

    def wait(future: Any, meanwhile: Callable[[], None]) -> None:
        while not future.done():
            machine.arrival()

    vars(hooks)["wait"] = wait
    try:
        for i, profile in enumerate(profiles):
            step_by_step(machine, profile).save(f"{folder}/{i}.json")
    finally:
        vars(hooks)["wait"] = waiting


def step_by_step(machine: Machine, profile: Profile) -> Trace:
    ddp = DistributedDataParallel(model(machine, profile), bucket_cap_mb=1e-6)
    state: Any = commlib.HookState(ddp, "none")
    ddp.register_comm_hook(state, commlib.hook)
    real, vars(hooks)["wait"] = vars(hooks)["wait"], wait_as_it_is
    for _ in range(3):  # DDP makes its buckets; over a real group
        ddp(torch.ones(4)).sum().backward()
    vars(hooks)["wait"] = real
    trace = Trace(clock=machine)
    group = Group(machine, trace)
    state._sequencer.extend([{"world": group}])
    state._tracer.record(trace)
    passes = PassRecorder(ddp, trace)
    for _ in range(STEPS):
        group.seconds.extend((f"bucket {i}", seconds) for i, (_, _, seconds) in enumerate(reversed(profile)))
        ddp(torch.ones(4)).sum().backward()
    passes.remove()
    state.close()
    return trace


@settings(max_examples=examples(5))
@given(st.lists(PROFILES, min_size=5, max_size=10))
def test_a_step_by_ddps_hook_takes_what_the_recursion_says(fleet: Fleet, profiles: list[Profile]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        fleet.run(1, exchanged, profiles, folder)
        for i, profile in enumerate(profiles):
            rows = Row(Path(folder) / f"{i}.json")
            _, backward, wire = times(profile)
            line = overlap(backward, wire)
            back, waits = rows("training", "backward"), rows("training", "wait")
            assert len(back) == len(waits) == STEPS
            for step, (begun, ended) in enumerate(back):
                assert ended == begun + sum(backward)
                assert waits[step] == (ended, begun + line.seconds)
                for layer in range(len(profile)):
                    ready, begin, end = (begun + t[layer] for t in (line.ready, line.begin, line.end))
                    bucket = f"bucket {len(profile) - 1 - layer}"
                    assert rows("link", bucket)[step] == (begin, end)
                    assert rows(bucket, bucket)[step] == rows(bucket, "wire")[step] == (ready, end)
