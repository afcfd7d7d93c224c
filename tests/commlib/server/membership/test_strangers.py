"""A job's members are talked to by those only who know what its first member drew."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from commlib.server.membership import rendezvous
from commlib.server.membership.registry import MembershipStore
from tests.support.server_cluster import TIMEOUT, Cluster
from tests.support.thread_groups import gets_in


@pytest.mark.parametrize("guess", [None, "", "default"])
def test_without_keys_who_does_not_know_the_jobs_secret_is_refused_and_training_goes_on(guess: str | None) -> None:
    def train(rank: int) -> list[str]:
        model = nn.Linear(2, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        before = model.weight.detach().clone()
        with cluster.join(model, optimizer, rank) as server:
            members = MembershipStore(rendezvous.visit(cluster.address, "default", TIMEOUT), TIMEOUT).members({})
            for member in members.values():
                assert not gets_in(member.address, guess)
            for _ in range(3):
                model(torch.ones(1, 2)).sum().backward()
                server.step()
                optimizer.zero_grad()
        assert torch.allclose(model.weight, before - 0.3)
        return sorted(member.kind for member in members.values())

    with Cluster(1, 1, endpoint="zmq") as cluster:
        assert cluster.train(train) == [["shard", "worker"]]
