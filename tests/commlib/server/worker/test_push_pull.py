"""Shards as a process group: sums of all ranks, of this step, the same to the last bit; who left is named."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d

import commlib
from commlib.groups.world import World
from commlib.runtime.layers import LayerSpec
from commlib.server.worker.push_pull import ServerGroup, Servers, job_of
from tests.support.server_cluster import Cluster, until

SPECS = [
    LayerSpec("large", (100, 90)),
    LayerSpec("small", (7,)),
    LayerSpec("scalar", ()),
    LayerSpec("half", (30, 11), torch.bfloat16),
]
NBYTES = 4096  # of a chunk: the large layer has nine
PATIENT = 600.0  # seconds that anything waits: more than a cluster takes for hanging


class Group:
    """What a model's process group is to a server group: a store."""

    def __init__(self) -> None:
        self._store = c10d.HashStore()

    def get_group_store(self) -> Any:
        return self._store


@contextlib.contextmanager
def shards(count: int, ranks: int) -> Iterator[tuple[Cluster, Group]]:
    with Cluster(count, ranks) as cluster:
        yield cluster, Group()


def join(cluster: Cluster, group: Group, rank: int, specs: list[LayerSpec] = SPECS, **options: Any) -> ServerGroup:
    given = {"patience": 60.0, "nbytes": NBYTES, "endpoint": "inproc", "shards": len(cluster.stops), **options}
    world = World(rank, cluster.workers)
    return ServerGroup(specs, Servers(cluster.address, **given), group, "key", world, PATIENT, PATIENT)


def gradient(spec: LayerSpec, rank: int, step: int) -> Tensor:
    seed = 1000 * rank + 10 * step + len(spec.name)
    return torch.randn(spec.numel, generator=torch.Generator().manual_seed(seed)).to(spec.dtype)


def summed(spec: LayerSpec, ranks: int, step: int) -> Tensor:
    """In the order of ranks."""
    total = gradient(spec, 0, step)
    for rank in range(1, ranks):
        total += gradient(spec, rank, step)
    return total


@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("ranks", [1, 3])
def test_every_rank_gets_the_sum_in_the_order_of_ranks_whatever_order_it_asks_in(ranks: int, copies: int) -> None:
    def rank_of(rank: int) -> list[dict[str, Tensor]]:
        servers, found = join(cluster, group, rank, copies=copies), []
        for step in range(4):
            outs = {s.name: torch.full((s.numel,), torch.nan, dtype=s.dtype) for s in SPECS}
            order = random.Random(10 * rank + step).sample(SPECS, len(SPECS))
            works = [servers.push_pull(s.name, outs[s.name], gradient(s, rank, step)) for s in order]
            for work in reversed(works):
                work.wait()
            found.append(outs)
        servers.close()
        return found

    with shards(2, ranks) as (cluster, group):
        for found in cluster.train(rank_of):
            for step, outs in enumerate(found):
                for spec in SPECS:
                    assert torch.equal(outs[spec.name], summed(spec, ranks, step)), (spec, step)


def test_layers_may_go_in_some_steps_and_not_in_others() -> None:
    def rank_of(rank: int) -> list[Tensor]:
        servers, found = join(cluster, group, rank), []
        for step in range(6):
            for spec in SPECS[: 1 + step % 3]:
                out = torch.empty(spec.numel)
                servers.push_pull(spec.name, out, gradient(spec, rank, step)).wait()
                assert torch.equal(out, summed(spec, 2, step))
                found.append(out)
        servers.close()
        return found

    with shards(1, 2) as (cluster, group):
        assert len(cluster.train(rank_of)[0]) == 12


def test_what_is_not_finite_on_one_rank_is_so_on_all() -> None:
    def rank_of(rank: int) -> tuple[Tensor, Tensor]:
        servers = join(cluster, group, rank, SPECS[:1])
        values, out = torch.ones(9000), torch.empty(9000)
        values[4321] = torch.nan if rank == 1 else 2.0
        values[5] = torch.inf if rank == 0 else -torch.inf
        servers.push_pull("large", out, values).wait()
        after = torch.empty(9000)
        servers.push_pull("large", after, torch.ones(9000)).wait()
        servers.close()
        return out, after

    with shards(2, 2) as (cluster, group):
        for out, after in cluster.train(rank_of):
            assert out.isnan().nonzero().flatten().tolist() == [5, 4321]
            assert torch.equal(out[6:4321], torch.full((4315,), 2.0))
            assert torch.equal(after, torch.full((9000,), 2.0))  # nothing of it stays


def test_values_of_another_dtype_are_summed_in_that_of_the_parameter() -> None:
    def rank_of(rank: int) -> Tensor:
        servers = join(cluster, group, rank, SPECS[:1])
        out = torch.empty(9000, dtype=torch.bfloat16)
        servers.push_pull("large", out, torch.full((9000,), 1.0 + rank / 64, dtype=torch.bfloat16)).wait()
        servers.close()
        return out

    with shards(1, 2) as (cluster, group):
        for out in cluster.train(rank_of):
            assert torch.equal(out, torch.full((9000,), 2.0 + 1 / 64).bfloat16())


def test_a_rank_that_left_without_its_part_is_named_and_one_that_left_after_it_is_not_missed() -> None:
    def rank_of(rank: int) -> str:
        servers, out = join(cluster, group, rank, SPECS[:1]), torch.empty(9000)
        work = servers.push_pull("large", out, torch.ones(9000))
        if rank == 1:  # the others leave first, and it asks once more in a view without them
            until(lambda: servers._worker.client._client._view.workers.keys() == {1})
            for chunk in work.chunks:
                servers._worker.client.pull(chunk.key)
        work.wait()
        assert torch.equal(out, torch.full((9000,), 3.0))
        if rank == 1:
            with pytest.raises(commlib.PeerLost, match=r"rank 0 has left the servers without its part of large\["):
                servers.push_pull("large", out, torch.ones(9000)).wait()
        servers.close()
        servers.close()
        return "left"

    with shards(1, 3) as (cluster, group):
        assert cluster.train(rank_of) == ["left"] * 3
    assert cluster.ends == ["all workers have left"]


def test_after_the_end_nothing_is_pushed() -> None:
    with shards(1, 1) as (cluster, group):
        servers = join(cluster, group, 0, SPECS[:1])
        servers.close()
        with pytest.raises(commlib.CommlibError, match="this rank has left the servers: attach the model anew"):
            servers.push_pull("large", torch.empty(9000), torch.ones(9000))


def test_a_rank_that_cannot_come_is_named_to_those_who_wait_for_it() -> None:
    def rank_of(rank: int) -> None:
        if rank == 0:
            join(cluster, group, rank).close()
        else:
            cluster.await_shards()
            join(cluster, group, rank, endpoint="pigeon")

    with shards(1, 2) as (cluster, group):
        first, second = cluster.outcomes(rank_of)
    assert isinstance(second, ValueError)
    assert "unknown endpoint 'pigeon'" in str(second)
    assert isinstance(first, commlib.CommlibError)
    assert "pigeon" in str(first)


def test_a_trial_moves_the_bytes_that_it_says_over_all_of_the_model() -> None:
    def rank_of(rank: int) -> list[int]:
        servers, found = join(cluster, group, rank, SPECS[:2]), []
        for most in (1, 9000, 1 << 30):
            before = servers._worker.client.sent
            nbytes, through = servers.trial(most)
            through()
            through()
            assert 2 * nbytes < servers._worker.client.sent - before < 2 * nbytes + 20_000
            found.append(nbytes)
        out = torch.empty(9000)
        servers.push_pull("large", out, torch.ones(9000)).wait()
        assert torch.equal(out, torch.full((9000,), 2.0))
        servers.close()
        return found

    with shards(2, 2) as (cluster, group):
        for found in cluster.train(rank_of):
            assert found[0] <= NBYTES < found[1] < found[2] == sum(s.nbytes for s in SPECS[:2])


def test_no_layer_shares_a_chunk_with_another_for_they_may_be_in_other_buckets() -> None:
    job = job_of(SPECS, Servers("127.0.0.1:29400", nbytes=NBYTES), 4, 2)
    assert all(len(chunk.pieces) == 1 for chunk in job.chunks.values())
    assert len(job.chunks) == 9 + 1 + 1 + 1
    assert sum(chunk.nbytes for chunk in job.chunks.values()) == sum(s.nbytes for s in SPECS)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("nowhere", "HOST:PORT"),
        ("embedded:0", "embedded:0"),
        ("embedded:two", "embedded:two"),
    ],
)
def test_a_bad_address_is_refused(given: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Servers.of(given)


def test_servers_are_what_the_user_says() -> None:
    assert Servers.of(None) is None
    assert Servers.of("localhost:29400") == Servers("localhost:29400", shards=1, copies=1, job="default")
    assert [Servers(at).embedded for at in ("embedded", "embedded:3", "localhost:1")] == [1, 3, 0]
    with pytest.raises(TypeError, match="servers are 'HOST:PORT', 'embedded' or"):
        Servers.of(29400)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="shards must be 1 or more, got 0"):
        Servers("localhost:1", shards=0)
    with pytest.raises(ValueError, match="give limit or servers"):
        Servers.of("localhost:1", limited=True)
