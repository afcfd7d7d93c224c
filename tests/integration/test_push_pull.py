"""DDP by servers: on real ranks what DDP makes of it, the same bits on all of them; and what goes wrong is named."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import commlib
from commlib.groups.world import World
from commlib.planning.manager import manager
from commlib.planning.manager.decision import Decision
from commlib.planning.manager.measurements import Measurements
from commlib.server.membership import rendezvous
from tests.support.rank_pool import Fleet
from tests.support.server_cluster import Cluster
from tests.support.tiny_ddp import Trainer, same_everywhere, through_delays, train_poisoned

BOUND = 2e-6
PATIENCE = 6.0  # seconds that who lives may be silent on a busy machine, and who was killed is missed


@contextlib.contextmanager
def shards(count: int, ranks: int, **options: Any) -> Iterator[commlib.Servers]:
    """So many, in threads of this process, for ranks that are others."""
    with Cluster(count, ranks, endpoint="zmq") as cluster:
        yield commlib.Servers(cluster.address, shards=count, **options)


# -- what is exchanged ----------------------------------------------------------------------------


def as_ddp(world: World, servers: commlib.Servers, rule: Any, steps: int) -> dict[str, Any]:
    """Trained with it and without; how far apart, and what was sent."""
    plain = Trainer(world, None)
    plain.train(steps)
    served = Trainer(world, rule, servers=servers)
    served.train(steps)
    a, b, stats, plan = plain.weights(), served.weights(), served.comm.stats(), served.comm.plan
    same = same_everywhere(world, b)
    served.close()
    apart = (a - b).abs().max().item()
    return {"equal": torch.equal(a, b), "apart": apart, "same": same, "stats": stats, "plan": str(plan), "n": len(b)}


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_it_trains_as_ddp_does_and_replicas_are_the_same_to_the_last_bit(fleet: Fleet, ranks: int) -> None:
    with shards(2, ranks) as servers:
        reports = fleet.run(ranks, as_ddp, servers, "push_pull", 6)
    for found in reports:
        assert found["same"]
        assert found["equal"] or (ranks == 4 and found["apart"] < BOUND)
        assert found["stats"].wire_bytes == 6 * 4 * found["n"]
        assert re.search(r"0\.weight +48x64 float32 +none@push_pull +12,288 ", found["plan"]), found["plan"]


def test_layers_by_other_routes_are_in_the_same_buckets(fleet: Fleet) -> None:
    rule = {"0.weight": "push_pull", "2.weight": "none@gather", "4.weight": "none@push_pull", "*": "none"}
    with shards(1, 3) as servers:
        for found in fleet.run(3, as_ddp, servers, rule, 5):
            assert found["same"]
            assert found["apart"] < BOUND


class Uneven(nn.Module):
    """Layers of many sizes, one of two dtypes' and one that is used now and then."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.conv, self.norm = nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5)
        self.fc, self.head = nn.Linear(180, 301), nn.Linear(301, 3, bias=False)
        self.scale, self.rare = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.ones(9))

    def forward(self, x: Tensor, rare: bool) -> Tensor:
        x = self.norm(self.conv(x)).relu().flatten(1)
        x = self.head(self.fc(x).tanh()) * self.scale
        return x + self.rare.sum() if rare else x


def accumulating(world: World, servers: commlib.Servers | None) -> Tensor:
    """Steps of three backward passes, of which the last is exchanged; of chunks of a kilobyte."""
    ddp = DistributedDataParallel(Uneven(), bucket_cap_mb=0.05, find_unused_parameters=True)
    comm = None if servers is None else commlib.attach(ddp, "push_pull", min_size=0, servers=servers)
    optimizer = torch.optim.Adam(ddp.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(world.rank)
    for step in range(5):
        optimizer.zero_grad()
        for part in range(3):
            with ddp.no_sync() if part < 2 else contextlib.nullcontext():
                x = torch.randn(4, 3, 8, 8, generator=generator)
                ddp(x, rare=(step + part + world.rank) % 2 == 0).square().mean().backward()
        optimizer.step()
    if comm is not None:
        comm.close()
    return torch.cat([p.detach().reshape(-1) for p in ddp.parameters()])


@pytest.mark.full
def test_gradients_that_are_accumulated_of_uneven_layers_come_out_as_ddps_to_the_last_bit(fleet: Fleet) -> None:
    with shards(3, 2, nbytes=1024) as servers:
        served = fleet.run(2, accumulating, servers)
    plain = fleet.run(2, accumulating, None)
    assert torch.equal(served[0], served[1])
    assert torch.equal(served[0], plain[0])


def poisoned(world: World, servers: commlib.Servers | None, amp: bool, value: float) -> tuple[list[bool], Tensor]:
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=1000) if amp else None
    options: dict[str, Any] = {} if servers is None else {"servers": servers}
    trainer = Trainer(world, None if servers is None else "push_pull", scaler=scaler, **options)
    finite = train_poisoned(trainer, 5, 2, "2.weight", value)
    trainer.close()
    return finite, trainer.weights()


@pytest.mark.parametrize(("amp", "value"), [(True, float("inf")), (False, float("nan"))])
def test_a_step_that_is_not_finite_on_one_rank_is_skipped_on_all_as_with_ddp(
    fleet: Fleet, amp: bool, value: float
) -> None:
    with shards(1, 2) as servers:
        served = fleet.run(2, poisoned, servers, amp, value)
    for (finite, weights), (_, plain) in zip(served, fleet.run(2, poisoned, None, amp, value), strict=True):
        assert finite == [True, True, False, True, True]
        assert torch.equal(weights, plain)


def delayed(world: World, servers: list[commlib.Servers]) -> tuple[bool, bool, int]:
    rule = {"0.weight": "push_pull", "2.weight": "onebit@scatter_gather", "4.*": "push_pull", "*": "none"}
    return through_delays(lambda: Trainer(world, rule, servers=servers.pop()), 8)


def test_whatever_comes_when_the_bits_are_the_same(fleet: Fleet) -> None:
    with shards(2, 3) as one, shards(2, 3) as other:
        for alike, same, naps in fleet.run(3, delayed, [one, other]):
            assert alike
            assert same
            assert naps > 8


def embedded(world: World) -> tuple[bool, bool, list[int]]:
    plain = Trainer(world, None)
    plain.train(4)
    served = Trainer(world, "push_pull", servers="embedded:2")
    pids = [child.pid for child in served.comm._resources.servers._embedded._children]
    served.train(4)
    equal, same = torch.equal(plain.weights(), served.weights()), same_everywhere(world, served.weights())
    served.close()
    return equal, same, pids


@pytest.mark.full
def test_embedded_servers_start_and_end_with_the_training(fleet: Fleet) -> None:
    (equal, same, pids), (_, _, none) = fleet.run(2, embedded)
    assert equal
    assert same
    assert (len(pids), none) == (2, [])
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)


# -- the manager ----------------------------------------------------------------------------------


class Script:
    """A head that lets all go by servers and back, every second step."""

    def __init__(self, model: Any) -> None:
        self.units, self.on = list(model.units), False
        self.seen: list[Measurements] = []

    def first(self) -> Decision:
        return Decision(steps=2)

    def review(self, f: Measurements) -> Decision:
        self.on = not self.on
        if f.link is not None:
            assert f.link.push_pull is not None
            assert f.link.push_pull.seconds(1 << 20) > 0
        return Decision(dict.fromkeys(self.units, "push_pull") if self.on else {}, steps=2, skip=0, phase="trial")


class Words(nn.Module):
    """An embedding, a convolution and a norm: they have no rows, so all there is besides dense is by servers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.conv, self.norm = nn.Embedding(500, 64), nn.Conv1d(64, 40, 3), nn.LayerNorm(6)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(self.conv(self.words(x).transpose(1, 2)))
        return out


def trained(world: World, steps: int, most: int, **options: Any) -> tuple[Tensor, set[str], int, bool]:
    """Weights, the routes that were ever taken, and whether the manager has settled, in so many steps.

    After the first ``steps`` it goes on until it has, alike on all ranks: how soon depends on what is measured.
    """
    ddp = DistributedDataParallel(Words(), bucket_cap_mb=0.05)
    comm = commlib.attach(ddp, **options) if options else None
    optimizer, taken, done = torch.optim.SGD(ddp.parameters(), lr=0.1), set[str](), 0
    settled = False
    for step in range(most):
        if step >= steps and settled:
            break
        optimizer.zero_grad()
        x = torch.randint(500, (8, 8), generator=torch.Generator().manual_seed(100 * step + world.rank))
        (ddp(x) * torch.arange(6.0)).square().mean().backward()
        optimizer.step()
        taken |= {str(p.route) for p in comm.plan} if comm is not None else set()
        settled |= comm is not None and comm.settled
        done = step + 1
    if comm is not None:
        comm.close()
    return torch.cat([p.detach().reshape(-1) for p in ddp.parameters()]), taken, done, settled


def managed(world: World, servers: commlib.Servers, steps: int, scripted: bool) -> tuple[bool, bool, set[str], bool]:
    original = vars(manager)["Controller"]
    vars(manager)["Controller"] = Script if scripted else original
    try:
        served, taken, done, settled = trained(world, steps, steps if scripted else 1000, servers=servers)
    finally:
        vars(manager)["Controller"] = original
    plain, *_ = trained(world, done, done)
    return torch.equal(plain, served), same_everywhere(world, served), taken, settled


@pytest.mark.full
def test_a_managers_layers_go_by_servers_and_back_between_steps(fleet: Fleet) -> None:
    with shards(2, 2) as servers:
        for equal, same, taken, _ in fleet.run(2, managed, servers, 12, True):
            assert equal
            assert same
            assert taken == {"none@dense", "none@push_pull"}


@pytest.mark.full
def test_the_manager_measures_servers_and_settles_and_loses_nothing(fleet: Fleet) -> None:
    with shards(1, 2) as servers:
        for equal, same, taken, settled in fleet.run(2, managed, servers, 150, False):
            assert equal
            assert same
            assert settled
            assert taken <= {"none@dense", "none@push_pull"}


# -- what goes wrong ------------------------------------------------------------------------------


def caught(world: World, rule: Any, options: list[dict[str, Any]]) -> str:
    """What attaching raises on this rank; by default without a time-out that the fleet would wait for."""
    ddp = DistributedDataParallel(nn.Linear(40, 30))
    try:
        commlib.attach(ddp, rule, **{"timeout": 600, **options[min(world.rank, len(options) - 1)]}).close()
    except Exception as e:
        return f"{type(e).__name__}: {e}"
    return "nothing"


WRONG: dict[str, tuple[Any, list[dict[str, Any]], str]] = {
    "no servers": ("push_pull", [{}], r"ValueError: weight goes by push_pull, and there are no servers: give serv"),
    "nothing for them": ("onebit", [{"servers": "localhost:1"}], r"servers are given, and no layer goes by push_pull"),
    "too small": ("push_pull", [{"servers": "localhost:1", "min_size": 9999}], r"1200 values < min_size=9999"),
    "no address": ("push_pull", [{"servers": "localhost"}], r"ValueError: members meet at HOST:PORT, got 'localhost'"),
    "a limit": ("push_pull", [{"servers": "localhost:1", "limit": "1mbit"}], r"give limit or servers"),
    "a codec": ("int8@push_pull", [{"servers": "localhost:1"}], r"int8.* cannot go over push_pull: servers add up"),
    "other servers": (
        "push_pull",
        [{"servers": "localhost:1"}, {"servers": "localhost:2"}],
        r"PlanMismatch: ranks attached different things: servers: rank . has 'localhost:., job default', rank",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_is_said_on_every_rank(fleet: Fleet, name: str) -> None:
    rule, options, said = WRONG[name]
    for text in fleet.run(2, caught, rule, options):
        assert re.search(said, text), text


@pytest.mark.full
def test_a_wrong_address_is_named_in_time(fleet: Fleet) -> None:
    with socket.socket() as held:  # nobody else can have this port, and nobody listens there
        held.bind(("127.0.0.1", 0))
        at = f"127.0.0.1:{held.getsockname()[1]}"
        for text in fleet.run(2, caught, "push_pull", [{"servers": at, "timeout": 10}]):
            assert text.startswith("CommlibError: ")
            assert f"no rendezvous server at {at} after 10 s" in text


@pytest.mark.full
def test_too_few_shards_are_named_in_time(fleet: Fleet) -> None:
    with Cluster(1, 2, endpoint="zmq") as cluster:
        cluster.await_shards()
        servers = commlib.Servers(cluster.address, shards=2)
        told = fleet.run(2, caught, "push_pull", [{"servers": servers, "timeout": 20}])
    assert any("for 20 s: 1 of 2 shards came" in text for text in told), told
    assert all("for 20 s" in text or re.search(r"rank [01] cannot come", text) for text in told), told


# -- shards that die ------------------------------------------------------------------------------


@contextlib.contextmanager
def processes(count: int) -> Iterator[tuple[str, list[int]]]:
    """Shards that can be killed: where they meet, and their process ids."""
    store = rendezvous.keep("127.0.0.1")
    at = f"127.0.0.1:{store.port}"
    command = [sys.executable, "-m", "commlib", "server", "run", "--at", at]
    made = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) for _ in range(count)]
    try:
        for process in made:
            assert process.stdout is not None
            assert process.stdout.readline()  # it waits for a job
        yield at, [process.pid for process in made]
    finally:
        for process in made:
            process.kill()
            process.communicate()
        del store


def with_a_kill(world: World, servers: commlib.Servers, pid: int) -> tuple[str, bool]:
    """Three steps, a kill, and more: what is raised; or whether the weights are DDP's."""
    plain = Trainer(world, None)
    plain.train(8)
    served = Trainer(world, "push_pull", servers=servers)
    served.train(3)
    dist.barrier()  # or the kill would come in another's third step
    if world.rank == 0:
        os.kill(pid, signal.SIGKILL)
    text = ""
    try:
        served.train(5)
    except commlib.CommlibError as e:
        text = f"{type(e).__name__}: {e}"
        with pytest.raises(RuntimeError):  # for good; DDP itself is out of step after an error
            served.train(1)
    served.close()
    return text, torch.equal(plain.weights(), served.weights())


@pytest.mark.full
@pytest.mark.parametrize("count", [1, 2])
def test_a_shard_that_is_killed_is_named_in_time_where_it_had_the_only_copy(fleet: Fleet, count: int) -> None:
    with processes(count) as (at, pids):
        servers = commlib.Servers(at, shards=count, patience=PATIENCE)
        for text, _ in fleet.run(2, with_a_kill, servers, pids[0]):
            assert text.startswith("PeerLost: rank ")
            assert "could not exchange bucket" in text
            assert f"pid {pids[0]}" in text, text  # who waits until the time-out does not know that


@pytest.mark.full
def test_where_there_are_two_copies_a_killed_shard_changes_no_bit(fleet: Fleet) -> None:
    with processes(3) as (at, pids):
        servers = commlib.Servers(at, shards=3, copies=2, patience=PATIENCE)
        for text, equal in fleet.run(2, with_a_kill, servers, pids[0]):
            assert text == ""
            assert equal
