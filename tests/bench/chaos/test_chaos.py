"""Processes of a parameter server are killed and stopped, and the training ends right."""

from __future__ import annotations

import pytest

from commlib.bench.chaos.run import ChaosRun


@pytest.mark.full
@pytest.mark.parametrize("seed", [1, 5])  # a shard that is stopped and goes on; two shards and a worker killed
def test_whatever_is_killed_no_acknowledged_push_is_lost_and_none_is_applied_twice(seed: int) -> None:
    run = ChaosRun(seed, patience_s=5.0)  # other tests want the cores: longer than a process waits for one
    run.go()
    assert run.events
