"""commlib in transformers' own Trainer, on real ranks: what is attached, saved in checkpoints, and given back."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.rank_pool import Fleet
from tests.support.tiers import full


@pytest.fixture(scope="module")
def jobs() -> Any:
    """tests/commlib/integrations/transformers_jobs.py, imported by who runs a test of these."""
    return importlib.import_module("tests.commlib.integrations.transformers_jobs")


@pytest.mark.parametrize("spec", ["onebit", *full("topk:ratio=0.1")], ids=["onebit", "topk"])
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(jobs: Any, fleet: Fleet, tmp_path: Path, spec: str):
    for found in fleet.run(2, jobs.resumed, str(tmp_path), spec):
        assert all(found.values()), found
    for step in (4, 8, 12):
        state = torch.load(tmp_path / f"checkpoint-{step}" / "commlib.pt")
        assert (sorted(state["ranks"]), state["step"]) == (["0", "1"], step)


def test_a_run_without_commlib_goes_on_with_it_and_none_is_plain(jobs: Any, fleet: Fleet, tmp_path: Path):
    first, second = fleet.run(2, jobs.begins_to_compress, str(tmp_path))
    said = f"{tmp_path}/checkpoint-4/commlib.pt is not there: residuals begin at zero"
    assert first == {"said": [said], "steps": 2, "none is plain": True}
    assert second == {**first, "said": []}
    assert not list((tmp_path / "light").rglob("commlib.pt"))


def test_bad_calls_are_refused_before_training(jobs: Any, fleet: Fleet, tmp_path: Path):
    for twice, scaler in fleet.run(2, jobs.refused, str(tmp_path)):
        assert twice == "this Trainer has commlib attached already"
        assert "it is that of TrainingArguments(fp16=True)" in scaler
    with pytest.raises(TypeError, match=r"must be a transformers.Trainer, got int"):
        jobs.attach(3)
    [one] = fleet.run(1, jobs.alone, str(tmp_path))
    assert "there is one process: start 2 or more" in one
