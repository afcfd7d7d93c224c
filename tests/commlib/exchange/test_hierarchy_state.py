"""What ranks keep under a hierarchy: steps that never happened, nothing lost, resume, other ranks and nodes."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import Tensor

import commlib
from commlib.groups.world import World
from tests.support.rank_pool import Fleet
from tests.support.tiers import full
from tests.support.tiny_ddp import Trainer, owed, poison, torchrun

MIXED = {"0.*": "onebit@scatter_gather", "2.*": "none", "*": "topk:ratio=0.1@gather"}


def trainer(world: World, rule: Any, local: int, **options: Any) -> Trainer:
    with torchrun(world, local):
        return Trainer(world, rule, hierarchy=True, **options)


BAD_STEP = 3


def bad_step(world: World, rules: list[Any]) -> dict[str, list[str]]:
    """An inf on the last rank, in a step between others, and the same run without it."""
    report = {}
    for rule in rules:
        undo: list[Any] = []
        bad = trainer(world, rule, 2)

        def disturb(step: int, t: Trainer = bad, undo: list[Any] = undo) -> None:
            while undo:
                undo.pop()()
            if step == BAD_STEP and world.rank == world.size - 1:
                undo.append(poison(t.module, "2.weight", float("inf")))

        finite = bad.train(2 * BAD_STEP + 1, disturb)
        good = trainer(world, rule, 2)
        good.train(BAD_STEP)
        good.step += 1
        good.train(BAD_STEP)
        wrong = [] if finite == [i != BAD_STEP for i in range(2 * BAD_STEP + 1)] else [f"finite steps: {finite}"]
        if not torch.equal(bad.weights(), good.weights()):
            wrong.append("weights differ")
        wrong += differences(bad.comm.state_dict(), good.comm.state_dict())
        if bad.comm.stats().skipped != 1:
            wrong.append(f"{bad.comm.stats().skipped} steps skipped")
        report[str(rule)] = wrong
        bad.close()
        good.close()
    return report


def differences(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    slots = [
        (rank, name, key, entry)
        for rank, layers in a["ranks"].items()
        for name, found in layers.items()
        for key, entry in found.items()
    ]
    assert slots
    return [f"{n} {k}" for r, n, k, e in slots if not torch.equal(e["value"], b["ranks"][r][n][k]["value"])]


@pytest.mark.full
def test_a_step_with_an_inf_leaves_no_trace(fleet: Fleet):
    for report in fleet.run(4, bad_step, ["onebit@gather", "onebit@scatter_gather", "dgc:ratio=0.05", MIXED]):
        assert {rule: wrong for rule, wrong in report.items() if wrong} == {}


def conserved(world: World, rule: str, local: int) -> dict[str, Any]:
    """Of one layer: Σ gradients that were applied, Σ of this rank's own; and the state."""
    t = trainer(world, rule, local)
    own = torch.zeros(48, 48, dtype=torch.float64)
    weight = dict(t.module.named_parameters())["2.weight"]

    def count(grad: Tensor) -> None:
        own.add_(grad.double())

    weight.register_hook(count)
    applied = torch.zeros(48, 48, dtype=torch.float64)
    for _ in range(8):
        t.train(1)
        assert weight.grad is not None
        applied += weight.grad.double()
    state = t.comm.state_dict()
    t.close()
    return {"applied": applied, "own": own, "state": state}


@pytest.mark.parametrize("rule", ["onebit@scatter_gather", *full("onebit@gather", "topk:ratio=0.05@gather")])
@pytest.mark.parametrize(("nodes", "local"), [(2, 2), *full((2, 3))])
def test_what_was_applied_and_what_is_pending_are_all_gradients(fleet: Fleet, rule: str, nodes: int, local: int):
    reports: list[dict[str, Any]] = fleet.run(nodes * local, conserved, rule, local)
    produced = sum(r["own"] for r in reports) / len(reports)
    left = flat(commlib.merge_state_dicts([r["state"] for r in reports]))["2.weight"]
    assert left.abs().max() > 1e-4
    torch.testing.assert_close(reports[0]["applied"] + left, produced, atol=1e-6, rtol=0)


def flat(merged: dict[str, Any]) -> dict[str, Tensor]:
    """What a merged state owes to the mean gradient, by layer, worked out by hand."""
    nodes = len(merged["nodes"].split())
    total: dict[str, Tensor] = {}
    for entries in merged["ranks"].values():
        for name, slots in entries.items():
            shape = [int(n) for n in merged["layers"][name].split()[0].split("x")]
            there = total.setdefault(name, torch.zeros(shape, dtype=torch.float64))
            for key, entry in slots.items():
                if entry["role"] == "pending":
                    value, start = entry["value"].double(), entry["start"]
                    there[start : start + len(value)] += value / (nodes if key.startswith("node.") else 1)
    return total


def resumed(world: World, rules: list[Any], local: int) -> dict[str, bool]:
    same = {}
    for rule in rules:
        straight = trainer(world, rule, local, cap=0.005)
        straight.train(8)
        first = trainer(world, rule, local, cap=0.005)
        first.train(4)
        file = io.BytesIO()
        torch.save([first.module.state_dict(), first.optimizer.state_dict(), first.comm.state_dict()], file)
        file.seek(0)
        weights, momentum, residuals = torch.load(file, weights_only=True)
        second = trainer(world, rule, local, cap=25.0)  # other buckets
        second.module.load_state_dict(weights)
        second.optimizer.load_state_dict(momentum)
        second.comm.load_state_dict(residuals)
        second.step = 4
        second.train(4)
        same[str(rule)] = torch.equal(straight.weights(), second.weights())
        assert second.comm.stats().steps == 8
        for t in (straight, first, second):
            t.close()
    return same


RULES = ("onebit@gather", "onebit@scatter_gather", "dgc:ratio=0.05", "topk:ratio=0.1@gather")


@pytest.mark.parametrize(("nodes", "local", "rules"), [(2, 2, RULES[1:3]), *full((2, 2, RULES), (3, 2, RULES))])
def test_resume_is_exact_and_does_not_depend_on_buckets(fleet: Fleet, nodes: int, local: int, rules: tuple[str, ...]):
    for report in fleet.run(nodes * local, resumed, list(rules), local):
        assert report == {str(r): True for r in rules}


def states(world: World, rule: str, local: int) -> dict[str, Any]:
    t = trainer(world, rule, local)
    t.train(5)
    state: dict[str, Any] = t.comm.state_dict()
    t.close()
    return state


def take_over(world: World, rule: str, local: int, merged: dict[str, Any]) -> dict[str, Any]:
    t = trainer(world, rule, local) if local > 1 else Trainer(world, rule)
    t.comm.load_state_dict(merged)
    state: dict[str, Any] = t.comm.state_dict()
    t.train(2)
    t.close()
    return state


@pytest.mark.parametrize("rule", ["onebit@scatter_gather", *full("topk:ratio=0.1@gather", "dgc:ratio=0.05")])
@pytest.mark.parametrize(("size", "local"), [(2, 1), (6, 2), *full((4, 1), (6, 3), (4, 4))])
def test_pending_gradient_is_conserved_flat_by_other_nodes_and_on_one_node(fleet, rule, size, local):
    there = flat(commlib.merge_state_dicts(merged := fleet.run(4, states, rule, 2)))
    after = fleet.run(size, take_over, rule, local, commlib.merge_state_dicts(merged))
    here = flat(commlib.merge_state_dicts(after)) if "nodes" in after[0] else owed(after)
    assert ("nodes" in after[0]) == (1 < local < size)
    assert any(v.abs().max() > 0 for v in there.values())
    for name, value in there.items():
        torch.testing.assert_close(here[name], value, atol=1e-7, rtol=1e-6)


def flat_states(world: World, rule: str) -> dict[str, Any]:
    t = Trainer(world, rule)
    t.train(5)
    state: dict[str, Any] = t.comm.state_dict()
    t.close()
    return state


@pytest.mark.parametrize("rule", ["onebit@scatter_gather", "topk:ratio=0.1@gather"])
def test_pending_gradient_of_a_flat_run_is_conserved_under_a_hierarchy(fleet: Fleet, rule: str):
    old = fleet.run(4, flat_states, rule)
    after = fleet.run(4, take_over, rule, 2, commlib.merge_state_dicts(old))
    here = flat(commlib.merge_state_dicts(after))
    for name, value in owed(old).items():
        torch.testing.assert_close(here[name], value, atol=1e-7, rtol=1e-6)


def refused(world: World, state: dict[str, Any]) -> tuple[str, list[str]]:
    t = Trainer(world, "onebit@scatter_gather")
    with pytest.raises(commlib.CheckpointMismatch) as caught:
        t.comm.load_state_dict(state)
    t.train(1)  # nothing was changed
    t.close()
    return str(caught.value), list(state)


def test_one_ranks_state_does_not_fit_another_hierarchy_and_the_error_says_what_to_do(fleet: Fleet):
    state = fleet.run(4, states, "onebit@scatter_gather", 2)[1]
    for text, _ in fleet.run(4, refused, state):
        assert "with another hierarchy: collect every rank's state_dict()" in text
