"""State dicts over real processes: exact resume, and nothing lost when the number of ranks changes."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import commlib
from commlib.groups.world import World
from tests.support.rank_pool import Fleet
from tests.support.tiers import full
from tests.support.tiny_ddp import PAIRS, Trainer, batch, owed

# powersgd leaves vectors dense, and a dense all-reduce of three ranks adds in an order that depends on the bucket
RANK_ORDERED = [p for p in PAIRS if p.endswith(("@gather", "@scatter_gather")) and "powersgd" not in p]

SOME = ("none@dense", "onebit@scatter_gather", "dgc:ratio=0.05@gather", "powersgd:rank=2@low_rank", "none@owners")
SHORT = (
    *("onebit:residual=bfloat16@scatter_gather", "powersgd:rank=2,residual=bfloat16@low_rank"),
    *("onebit:residual=int8@scatter_gather", "topk:ratio=0.1,residual=int8@gather"),
    "powersgd:rank=2,residual=int8@low_rank",
)


def resumed(world: World, pairs: list[str], cap: float, later: tuple[float, ...], **options: Any) -> dict[str, bool]:
    """Whether a run that goes on from a state equals one that was never interrupted, with each later bucket size."""
    same = {}
    for pair in pairs:
        straight = Trainer(world, pair, cap=cap, **options)
        straight.train(10)
        first = Trainer(world, pair, cap=cap, **options)
        first.train(5)
        file = io.BytesIO()
        torch.save([first.module.state_dict(), first.optimizer.state_dict(), first.comm.state_dict()], file)
        first.train(1)  # a state dict is a copy: what happens later does not change it
        for other in later:
            file.seek(0)
            weights, momentum, residuals = torch.load(file, weights_only=True)
            second = Trainer(world, pair, cap=other, **options)
            second.module.load_state_dict(weights)
            second.optimizer.load_state_dict(momentum)
            second.comm.load_state_dict(residuals)
            second.step = 5
            second.train(5)
            same[f"{pair}, {other} MB"] = torch.equal(straight.weights(), second.weights())
            assert second.comm.stats().steps == 10
            second.close()
        straight.close()
        first.close()
    return same


@pytest.mark.parametrize(
    ("cap", "later", "pairs"),
    [
        (0.005, (25.0,), SOME + SHORT),
        *full((0.005, (0.005, 25.0), PAIRS), (25.0, (0.02,), PAIRS)),
    ],
)
def test_resume_equals_the_uninterrupted_run_bit_for_bit_between_two_ranks(
    fleet: Fleet, cap: float, later: tuple[float, ...], pairs: tuple[str, ...]
):
    for report in fleet.run(2, resumed, list(pairs), cap, later):
        assert report == {f"{pair}, {other} MB": True for pair in pairs for other in later}


@pytest.mark.full
def test_resume_does_not_depend_on_bucket_cap_mb_where_ranks_are_added_in_order(fleet: Fleet):
    for report in fleet.run(3, resumed, RANK_ORDERED, 0.005, (25.0,)):
        assert report == {f"{pair}, 25.0 MB": True for pair in RANK_ORDERED}


def in_place(world: World) -> bool:
    """Loading twice into the same, used object gives what loading once into a new one gives."""
    trainer = Trainer(world, "onebit@scatter_gather")
    trainer.train(4)
    state = trainer.comm.state_dict()
    weights = trainer.weights()
    model, momentum = trainer.module.state_dict(), trainer.optimizer.state_dict()
    saved = io.BytesIO()
    torch.save([model, momentum, state], saved)
    results = []
    for _ in range(2):
        saved.seek(0)
        model, momentum, state = torch.load(saved, weights_only=True)
        trainer.module.load_state_dict(model)
        trainer.optimizer.load_state_dict(momentum)
        trainer.comm.load_state_dict(state)
        assert torch.equal(trainer.weights(), weights)
        trainer.step = 4
        trainer.train(3)
        results.append(trainer.weights())
    trainer.close()
    return torch.equal(*results)


def test_a_state_can_be_loaded_in_place_at_any_time(fleet: Fleet):
    assert fleet.run(2, in_place) == [True, True]


def produce(world: World, rule: str) -> tuple[dict[str, Any], dict[str, Any]]:
    trainer = Trainer(world, rule)
    trainer.train(6)
    state = trainer.comm.state_dict()
    trainer.close()
    return state, trainer.module.state_dict()


def take_over(world: World, rule: str, merged: dict[str, Any]) -> dict[str, Any]:
    trainer = Trainer(world, rule)
    trainer.comm.load_state_dict(merged)
    state: dict[str, Any] = trainer.comm.state_dict()
    trainer.train(2)
    trainer.close()
    return state


@pytest.mark.parametrize(
    "rule", ["onebit@scatter_gather", *full("powersgd:rank=2", "topk:ratio=0.1", "dgc:ratio=0.05")]
)
@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 4), *full((2, 1))])
def test_another_world_size_conserves_what_is_pending(fleet: Fleet, rule: str, before: int, after: int):
    states = [s for s, _ in fleet.run(before, produce, rule)]
    there = owed(states)
    here = owed(fleet.run(after, take_over, rule, commlib.merge_state_dicts(states)))
    assert there.keys() == here.keys()
    assert any(v.abs().max() > 0 for v in there.values())
    for name, value in there.items():
        torch.testing.assert_close(here[name], value, atol=1e-7, rtol=1e-6)


def flushed(world: World, rule: str, merged: dict[str, Any]) -> float:
    """The pending gradient of a top-k run, taken over by a route that sends all, arrives with the next step."""
    trainer = Trainer(world, rule)
    trainer.comm.load_state_dict(merged)
    pending = owed([merged])["2.weight"]
    x, y = batch(world, 0)
    torch.nn.functional.cross_entropy(trainer.ddp(x), y).backward()
    exchanged = dict(trainer.module.named_parameters())["2.weight"].grad
    plain = Trainer(world, None)
    torch.nn.functional.cross_entropy(plain.ddp(x), y).backward()
    alone = dict(plain.module.named_parameters())["2.weight"].grad
    assert exchanged is not None
    assert alone is not None
    trainer.close()
    return float((exchanged - alone - pending).abs().max())


@pytest.mark.parametrize("before", ["onebit@scatter_gather", *full("topk:ratio=0.1@gather")])
@pytest.mark.parametrize(("rule", "error"), [("fp16@gather", 2e-4), ("none", 1e-6), ("factors", 1e-6)])
def test_gradient_that_was_pending_arrives_after_a_change_of_codec_and_world_size(
    fleet: Fleet, before: str, rule: str, error: float
):
    states = [s for s, _ in fleet.run(4, produce, before)]
    assert all(e < error for e in fleet.run(2, flushed, rule, commlib.merge_state_dicts(states)))


def distributed_checkpoint(world: World, folder: str) -> bool:
    trainer = Trainer(world, "onebit@scatter_gather")
    trainer.train(4)
    state = trainer.comm.state_dict()
    dcp.state_dict_saver.save({"comm": state}, checkpoint_id=folder)
    other = Trainer(world, "onebit@scatter_gather")
    other.train(1)  # its buffers must exist to be loaded into
    target = {"comm": other.comm.state_dict()}
    dcp.state_dict_loader.load(target, checkpoint_id=folder)
    other.comm.load_state_dict(target["comm"])
    again = other.comm.state_dict()
    equal = all(
        torch.equal(entry["value"], again["ranks"][rank][name][key]["value"])
        for rank, layers in state["ranks"].items()
        for name, slots in layers.items()
        for key, entry in slots.items()
    )
    trainer.close()
    other.close()
    return equal and again["step"] == 4


def test_torch_distributed_checkpoint_keeps_every_ranks_residuals(fleet: Fleet, tmp_path):
    assert fleet.run(2, distributed_checkpoint, str(tmp_path)) == [True, True]
