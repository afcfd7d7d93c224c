"""A run that was interrupted and resumed ends as if nothing had happened."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from commlib.bench.launch.processes import RankFailed, run_ranks
from commlib.bench.trainer.settings import TrainSettings
from commlib.bench.trainer.worker import RunProgress
from commlib.bench.trainer.worker import main as rank_main
from commlib.errors import CheckpointMismatch

SETTINGS = TrainSettings(comms=("onebit",), steps=200, hidden=256)


class Enough(Exception):
    """Raised in the parent to end a run on its way."""


def train(settings: TrainSettings, ranks: int = 2, stop_at: int | None = None) -> dict[str, Any]:
    """The only run's result."""

    def look(rank: int, message: RunProgress) -> None:
        if stop_at is not None and message.step >= stop_at:
            raise Enough

    result: dict[str, Any] = run_ranks(rank_main, ranks, (settings,), on_message=look, timeout=300)[0]["runs"][0]
    return result


@pytest.mark.full
def test_resumed_equals_uninterrupted(tmp_path: Path) -> None:
    with pytest.raises(Enough):
        train(dataclasses.replace(SETTINGS, checkpoint=tmp_path / "a", every=25), stop_at=60)
    folder = tmp_path / "a" / "onebit" / "seed-0"
    reached = int((folder / "latest").read_text().removeprefix("step-"))
    assert 50 <= reached < 200
    assert not (folder / "result.json").exists()
    on = dataclasses.replace(SETTINGS, checkpoint=tmp_path / "a", resume=True)

    resumed, whole = train(on), train(SETTINGS)
    timed = {"ms_per_step", "seconds"}
    assert {k: resumed[k] for k in resumed.keys() - timed} == {k: whole[k] for k in whole.keys() - timed}
    assert [p.name for p in sorted(folder.iterdir())] == ["latest", "result.json", "step-00000200"]

    # done is done: no steps are made again, whoever asks
    assert train(on, ranks=1) == resumed

    # and it may go on for longer, on other ranks
    longer = train(dataclasses.replace(on, steps=230), ranks=3)
    assert longer["steps"] == 230
    assert longer["accuracy"] > 90
    assert longer["replicas_equal"]

    # but not as something else
    with pytest.raises(
        RankFailed, match=r"was written with optimizer 'sgd' \(now 'adam'\), lr .*use the same"
    ) as caught:
        train(dataclasses.replace(on, optimizer="adam", steps=400), ranks=1)
    assert isinstance(caught.value.error, CheckpointMismatch)
