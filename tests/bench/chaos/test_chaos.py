"""Processes of a parameter server are killed and stopped, and the training ends right."""

from __future__ import annotations

import pytest

from commlib.bench.chaos.run import ChaosRun


@pytest.mark.alone  # two seconds of silence are death there
@pytest.mark.parametrize("seed", [1, 5])  # a shard that is stopped and goes on; two shards and a worker killed
def test_whatever_is_killed_no_acknowledged_push_is_lost_and_none_is_applied_twice(seed: int) -> None:
    run = ChaosRun(seed)
    run.go()
    assert run.events
