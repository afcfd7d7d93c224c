"""The store behind a group is found on every torch."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from commlib.exchange.item import World
from commlib.handshake import agree, meeting_place, store_of
from fleet import Fleet


def without_get_group_store(world: World) -> tuple[bytes, str]:
    """As in torch 2.7, whose groups do not know their store."""
    group = dist.group.WORLD
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(dist.ProcessGroup, "get_group_store", raising=False)
        store_of(group).set(f"here/{world.rank}", str(world.rank))
        agree(group, key := meeting_place(group, world), {"a": "1"}, world, 20.0)
        return store_of(group).get(f"here/{1 - world.rank}"), key


def test_ranks_agree_where_a_group_does_not_know_its_store(fleet: Fleet) -> None:
    assert fleet.run(2, without_get_group_store) == [(b"1", "commlib/1"), (b"0", "commlib/1")]
