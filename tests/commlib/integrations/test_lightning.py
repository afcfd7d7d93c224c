"""commlib's strategy in Lightning's own Trainer, on real ranks: what is attached, saved, and given back."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.rank_pool import Fleet
from tests.support.tiers import full
from tests.support.tiny_ddp import owed


@pytest.fixture(scope="module")
def jobs() -> Any:
    """tests/commlib/integrations/lightning_jobs.py, imported by who runs a test of these."""
    return importlib.import_module("tests.commlib.integrations.lightning_jobs")


@pytest.mark.parametrize(
    ("spec", "mixed"),
    [("onebit", True), *full(("onebit", False), ("topk:ratio=0.1", False))],
    ids=["fp16", "onebit", "topk"],
)
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(
    jobs: Any, fleet: Fleet, tmp_path: Path, spec: str, mixed: bool
):
    for found in fleet.run(2, jobs.resumed_everywhere, str(tmp_path), spec, mixed):
        assert all(found.values()), found
    state = torch.load(tmp_path / "step=4.ckpt", weights_only=False)[jobs.KEY]
    assert sorted(state["ranks"]) == ["0", "1"]
    assert state["step"] == 4


@pytest.mark.full
def test_another_number_of_ranks_shares_out_what_was_not_sent(jobs: Any, fleet: Fleet, tmp_path: Path):
    fleet.run(2, jobs.saves, str(tmp_path))
    before = owed([torch.load(tmp_path / "step=4.ckpt", weights_only=False)[jobs.KEY]])
    after = owed(fleet.run(3, jobs.takes, str(tmp_path)))
    assert before.keys() == after.keys()
    for name, values in before.items():
        assert float(values.abs().sum()) > 0
        torch.testing.assert_close(after[name], values, rtol=1e-5, atol=1e-9)


def test_a_run_without_commlib_goes_on_with_it_and_says_so_once(jobs: Any, fleet: Fleet, tmp_path: Path):
    first, second = fleet.run(2, jobs.begins_to_compress, str(tmp_path))
    assert first == (["the checkpoint has no state of commlib: residuals begin at zero"], True, 2)
    assert second == ([], True, 2)


def test_plain_lightning_reads_our_checkpoints(jobs: Any, fleet: Fleet, tmp_path: Path):
    assert fleet.run(2, jobs.goes_back, str(tmp_path)) == [jobs.BATCHES, jobs.BATCHES]


def test_ranks_that_read_different_checkpoints_all_raise(jobs: Any, fleet: Fleet, tmp_path: Path):
    for message in fleet.run(2, jobs.uneven, str(tmp_path)):
        assert "rank 1 of 2 found no state of commlib" in message


def test_after_an_exception_all_is_saved_if_all_come_and_the_rest_if_not(jobs: Any, fleet: Fleet, tmp_path: Path):
    first, second = fleet.run(2, jobs.interrupted, str(tmp_path))
    together = torch.load(tmp_path / "together.ckpt", weights_only=False)[jobs.KEY]
    assert (sorted(together["ranks"]), together["step"]) == (["0", "1"], 3)
    [said] = first["said"]
    assert said.startswith("the checkpoint is saved without residuals: rank 1 of 2 did not come within 0.5 s")
    assert first["resumed"] == ["the checkpoint was saved without all ranks' residuals: they begin at zero"]
    assert (first["step"], second["step"], second["said"]) == (3, 3, [])


def test_none_is_plain_lightning_bit_for_bit_and_codecs_keep_replicas_equal(jobs: Any, fleet: Fleet):
    for found in fleet.run(2, jobs.as_plain):
        assert all(found.values()), found


def test_nothing_is_attached_without_fit_and_weights_alone_have_no_residuals(jobs: Any, fleet: Fleet):
    for attached_late, seen, extra in fleet.run(2, jobs.without_fit):
        assert (attached_late, seen, extra) == (False, jobs.BATCHES, False)


def test_pytorch_lightning_has_the_same_strategy(jobs: Any, fleet: Fleet, tmp_path: Path):
    assert fleet.run(2, jobs.in_the_other_package, str(tmp_path)) == [["0", "1"]] * 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_sise": 3}, "unknown option 'min_sise' .*did you mean 'min_size'"),
        ({"find_unused_parameter": True}, "did you mean 'find_unused_parameters'"),
        (
            {"scaler": None},
            "scaler is no option of commlib.integrations.lightning.DDPStrategy: .*GradScaler of Trainer",
        ),
        ({"process_group": None}, "process_group is no option"),
        ({"ddp_comm_hook": print}, "commlib is this model's communication hook"),
    ],
)
def test_an_option_of_nobody_is_named(jobs: Any, options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        jobs.DDPStrategy("onebit", **options)


def test_options_go_where_they_belong(jobs: Any):
    made: Any = jobs.DDPStrategy("onebit", min_size=7, find_unused_parameters=True, process_group_backend="gloo")
    assert made._attached_with == {"min_size": 7}
    assert made._ddp_kwargs == {"find_unused_parameters": True}
    assert made.process_group_backend == "gloo"


def test_one_rank_and_devices_without_ddp_are_refused_with_the_trainer(jobs: Any):
    with pytest.raises(ValueError, match="there is one rank: give Trainer\\(devices=2"):
        jobs.pl.Trainer(accelerator="cpu", devices=1, strategy=jobs.DDPStrategy("onebit"), logger=False)
    strategy: Any = jobs.DDPStrategy("onebit")
    strategy.parallel_devices = [torch.device("xla", 0)] * 2
    with pytest.raises(ValueError, match="not for a device 'xla'"):
        strategy.set_world_ranks()
