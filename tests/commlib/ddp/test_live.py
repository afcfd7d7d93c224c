"""Attach, detach, attach again, swap: on a live DDP model, in place."""

from __future__ import annotations

import copy
import logging
import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import commlib
from commlib.groups.world import World
from tests.support.rank_pool import Fleet
from tests.support.tiers import full
from tests.support.tiny_ddp import Trainer, batch, head, model, owed, poison, same_everywhere


class TwoBranches(nn.Module):
    """One of two is used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first, self.last = nn.Linear(64, 48), nn.Linear(48, 5)
        self.branches = nn.ModuleList(nn.Linear(48, 48) for _ in range(2))

    def forward(self, x: Tensor, branch: int = 0) -> Tensor:
        out: Tensor = self.last(torch.tanh(self.branches[branch](self.first(x))))
        return out


def lanes() -> list[str]:
    """Threads of commlib that live, but for the one that calls the store: it is the group's, not an attachment's."""
    return [t.name for t in threading.enumerate() if t.name.startswith("commlib") and t.name != "commlib-store"]


def grads(ddp: nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in ddp.parameters()]


def alike(a: list[Tensor | None], b: list[Tensor | None]) -> bool:
    return all((x is None and y is None) or torch.equal(x, y) for x, y in zip(a, b, strict=True))  # type: ignore[arg-type]


def close(a: list[Tensor | None], b: list[Tensor | None]) -> bool:
    return all(x is not None and y is not None and torch.allclose(x, y, atol=1e-6) for x, y in zip(a, b, strict=True))


def backward(ddp: DistributedDataParallel, world: World, step: int, **options: Any) -> None:
    ddp.zero_grad()
    ddp(batch(world, step)[0], **options).square().mean().backward()


def accumulated(ddp: DistributedDataParallel, world: World, step: int, **options: Any) -> None:
    ddp.zero_grad()
    with ddp.no_sync():
        ddp(batch(world, step)[0], **options).square().mean().backward()
    ddp(batch(world, step + 1000)[0], **options).square().mean().backward()


# -- detach -------------------------------------------------------------------------------------


def as_plain(world: World, rule: Any, style: str, wrap: dict[str, Any]) -> dict[str, Any]:
    """Gradients after detach() beside those of a DDP model that never had anything attached."""
    make = TwoBranches if "find_unused_parameters" in wrap else model
    ours, plain = (DistributedDataParallel(make(), **{"bucket_cap_mb": 0.005, **wrap}) for _ in range(2))
    if style == "attach":
        comm = commlib.attach(ours, rule, min_size=0)
    else:
        comm = commlib.HookState(ours, rule, min_size=0)
        ours.register_comm_hook(comm, commlib.hook)
    for i in range(3):
        backward(ours, world, i)
        backward(plain, world, i)
    before, steps = comm.state_dict(), comm.stats().steps
    comm.detach()
    same = []
    for i, way in enumerate([backward, accumulated, backward, accumulated]):
        options = {"branch": i % 2} if make is TwoBranches else {}
        way(ours, world, 10 + i, **options)
        way(plain, world, 10 + i, **options)
        same.append(alike(grads(ours), grads(plain)))
        same[-1] &= same_everywhere(world, torch.cat([g.reshape(-1) for g in grads(ours) if g is not None]))
    after = comm.state_dict()
    comm.close()
    comm.detach()
    slots = [{n: sorted(s) for n, s in state["ranks"][str(world.rank)].items()} for state in (before, after)]
    return {
        "same": same,
        "lanes": lanes(),
        "hook": bool(ours._comm_hooks),
        "kept": slots[0] == slots[1] and before["step"] == after["step"] == 3 == steps == comm.stats().steps,
        "plan": "detached" in str(comm.plan),
        "plain": all(type(m) is not nn.Linear or "_tap" not in vars(m) for m in ours.modules()),
        "joins": "join_hook" in vars(ours),
    }


@pytest.mark.parametrize("size", [3, *full(2)])
@pytest.mark.parametrize(
    ("rule", "style", "wrap"),
    [
        ("onebit", "attach", {}),
        ("onebit", "register", {}),
        ("powersgd:rank=2", "attach", {"gradient_as_bucket_view": True}),
        ("factors", "attach", {}),
        *full(
            ("none", "attach", {}),
            ("none", "register", {}),
            ("int8", "attach", {"find_unused_parameters": True}),
        ),
    ],
)
def test_after_detach_gradients_are_those_of_plain_ddp_bit_for_bit_and_what_was_kept_can_be_read(
    fleet: Fleet, size: int, rule: str, style: str, wrap: dict[str, Any]
) -> None:
    for found in fleet.run(size, as_plain, rule, style, wrap):
        assert found["same"] == [True] * 4
        assert found["lanes"] == []
        assert found["hook"] is (rule != "none" or style == "register")  # a model without a hook is left without one
        assert found["kept"]
        assert found["plan"]
        assert found["plain"]
        assert not found["joins"]


def said(world: World) -> tuple[list[str], list[str]]:
    """What is logged by detach(), with a residual and without."""
    texts: list[list[str]] = []
    for rule in ("onebit", "fp16:ef=off"):
        heard: list[str] = []
        log, handler = logging.getLogger("commlib"), logging.Handler()
        handler.emit = lambda record, heard=heard: heard.append(record.getMessage())  # type: ignore[method-assign, misc]
        log.addHandler(handler)
        trainer = Trainer(world, rule)
        trainer.train(2)
        trainer.comm.detach()
        log.removeHandler(handler)
        texts.append(heard)
    return texts[0], texts[1]


def test_gradient_that_is_held_back_is_not_lost_silently(fleet: Fleet) -> None:
    for held, nothing in fleet.run(2, said):
        assert nothing == []
        (text,) = held
        assert "6 layers hold gradient back (0.weight, 0.bias, 2.weight, …)" in text
        assert 'swap("none") and one more step before detach()' in text


def before_the_backward_pass(world: World) -> tuple[bool, bool]:
    """A graph that was built by layers that were tapped then; and rows that were caught, but not exchanged."""
    ours, plain = (DistributedDataParallel(model(), bucket_cap_mb=0.005) for _ in range(2))
    comm = commlib.attach(ours, "factors", min_size=0)
    for ddp in (ours, plain):
        backward(ddp, world, 0)
        ddp.zero_grad()
        with ddp.no_sync():
            ddp(batch(world, 1)[0]).square().mean().backward()
        y = ddp(batch(world, 2)[0]).square().mean()
        if ddp is ours:
            comm.detach()
            comm.close()
        y.backward()
    flat = torch.cat([g.reshape(-1) for g in grads(ours) if g is not None])
    return close(grads(ours), grads(plain)), same_everywhere(world, flat)


def test_rows_that_were_caught_and_graphs_that_were_built_before_detach_lose_nothing(fleet: Fleet) -> None:
    assert fleet.run(2, before_the_backward_pass) == [(True, True)] * 2


# -- attach again -------------------------------------------------------------------------------


def picked_up(world: World, rule: str, style: str) -> tuple[bool, bool, int]:
    whole, parts = Trainer(world, rule, style=style), Trainer(world, rule, style=style)
    whole.train(8)
    parts.train(4)
    old = parts.comm
    old.detach()
    parts.comm = commlib.attach(parts.ddp, rule, min_size=0)
    parts.comm.load_state_dict(old.state_dict())
    parts.train(4)
    old.close()
    same = torch.equal(whole.weights(), parts.weights())
    everywhere = same_everywhere(world, parts.weights())
    whole.close()
    parts.close()
    return same, everywhere, parts.comm.stats().steps


@pytest.mark.parametrize("size", [3, *full(2)])
@pytest.mark.parametrize(
    ("rule", "style"),
    [
        ("onebit", "attach"),
        ("factors", "attach"),
        *full(("onebit", "register"), ("topk:ratio=0.1", "attach")),
    ],
)
def test_who_attaches_again_and_loads_what_there_was_goes_on_bit_for_bit(
    fleet: Fleet, size: int, rule: str, style: str
) -> None:
    assert fleet.run(size, picked_up, rule, style) == [(True, True, 8)] * size


def still_there(world: World, style: str) -> list[str]:
    trainer = Trainer(world, "onebit", style=style)
    texts = []
    for call in (lambda: commlib.attach(trainer.ddp, "int8"), lambda: trainer.comm.swap("int8", 3)):
        try:
            call()
        except (ValueError, TypeError) as e:
            texts.append(str(e))
    trainer.comm.detach()
    try:
        trainer.comm.swap("int8")
    except ValueError as e:
        texts.append(str(e))
    trainer.train(1)
    return texts


@pytest.mark.parametrize("style", ["attach", "register"])
def test_attach_twice_and_swap_after_detach_are_refused_and_say_what_to_do(fleet: Fleet, style: str) -> None:
    for again, options, late in fleet.run(2, still_there, style):
        assert "attached already" in again
        assert "comm.swap(…)" in again
        assert "comm.detach()" in again
        assert "swap()" in options
        assert late == "swap: this state was detached; call commlib.attach(ddp, …) again"


# -- swap ---------------------------------------------------------------------------------------

CHAIN = ["onebit", "int8", "none", "auto", "onebit"]


def conserved(world: World, chain: list[Any], style: str, first: str) -> dict[str, Any]:
    trainer = Trainer(world, first, style=style)
    produced, sent = (
        {n: torch.zeros(p.shape, dtype=torch.float64) for n, p in trainer.module.named_parameters()} for _ in range(2)
    )
    same, routes = [], []
    with head(dense=2):
        for rule in [None, *chain]:
            if rule is not None:
                trainer.comm.swap(rule)
            for _ in range(3):
                twin = copy.deepcopy(trainer.module)  # it has no taps
                x, y = batch(world, trainer.step)
                nn.functional.cross_entropy(twin(x), y).backward()
                trainer.train(1)
                for (n, p), q in zip(trainer.module.named_parameters(), twin.parameters(), strict=True):
                    assert p.grad is not None
                    assert q.grad is not None
                    own = q.grad.double()
                    dist.all_reduce(own)
                    produced[n] += own / world.size
                    sent[n] += p.grad.double()
            same.append(same_everywhere(world, trainer.weights()))
            routes.append(str(trainer.comm.plan.layers["0.weight"].route))
    state = trainer.comm.state_dict()
    steps = trainer.comm.stats().steps
    trainer.close()
    return {"produced": produced, "sent": sent, "state": state, "same": same, "routes": routes, "steps": steps}


@pytest.mark.parametrize("size", [3, *full(2)])
@pytest.mark.parametrize("style", ["attach", "register"])
def test_through_any_swaps_what_was_sent_and_what_is_held_back_are_what_was_produced(
    fleet: Fleet, size: int, style: str
) -> None:
    ranks = fleet.run(size, conserved, CHAIN[1:], style, CHAIN[0])
    held = owed([r["state"] for r in ranks])
    assert any(bool(h.any()) for h in held.values())
    for r in ranks:
        assert r["same"] == [True] * 5
        assert [route.partition("@")[0].partition(":")[0] for route in r["routes"]] == [
            *("onebit", "int8", "none", "none", "onebit"),
        ]
        assert r["routes"][3] == "none@factors"
        assert r["steps"] == 15
        for name, produced in r["produced"].items():
            torch.testing.assert_close(r["sent"][name] + held[name], produced, atol=1e-5, rtol=1e-4)


def test_rules_policies_and_plans_can_be_swapped_to(fleet: Fleet) -> None:
    chain = [
        {"*.weight": "topk:ratio=0.1", "*": "fp16"},
        commlib.Exact(),
        "dgc:ratio=0.1",
        commlib.Lossy(["onebit"]),
        "powersgd:rank=2",
        "none",
    ]
    for r in fleet.run(2, conserved, chain, "attach", "none"):
        assert r["same"] == [True] * 7
        assert r["steps"] == 21
        assert all(not bool(h.any()) for h in owed([r["state"]]).values())
        assert [s for slots in r["state"]["ranks"].values() for s in slots.values()] == []  # no momentum, no basis


def plan_again(world: World) -> bool:
    trainer = Trainer(world, "onebit")
    plan = trainer.comm.plan
    trainer.comm.swap("none")
    trainer.train(1)
    trainer.comm.swap(plan)
    trainer.train(1)
    found = trainer.comm.plan
    trainer.close()
    return [p.route for p in found] == [p.route for p in plan]


def test_a_plan_that_was_kept_can_be_swapped_back_to(fleet: Fleet) -> None:
    assert fleet.run(2, plan_again) == [True] * 2


def skipped_before(world: World, rules: tuple[str, str]) -> tuple[bool, bool]:
    """A step that is not finite just before a swap, and a run in which it never was."""
    weights = []
    for spoilt in (True, False):
        trainer = Trainer(world, rules[0])
        trainer.train(3)
        if spoilt:
            undo = poison(trainer.module, "2.weight", float("inf")) if world.rank == world.size - 1 else None
            assert trainer.train(1) == [False]
            if undo is not None:
                undo()
        else:
            trainer.step += 1
        trainer.comm.swap(rules[1])
        assert trainer.train(4) == [True] * 4
        weights.append(trainer.weights())
        trainer.close()
    return torch.equal(*weights), same_everywhere(world, weights[0])


@pytest.mark.parametrize("size", [3, *full(2)])
@pytest.mark.parametrize("rules", [("onebit", "int8:ef=on"), ("topk:ratio=0.1", "none"), ("factors", "onebit")])
def test_a_step_that_is_not_finite_just_before_a_swap_leaves_no_trace(
    fleet: Fleet, size: int, rules: tuple[str, str]
) -> None:
    assert fleet.run(size, skipped_before, rules) == [(True, True)] * size


def across(world: World) -> tuple[bool, bool]:
    """A state that was saved between two swaps, loaded by a new model that begins with what was in force then."""
    whole = Trainer(world, "onebit")
    whole.train(3)
    whole.comm.swap("topk:ratio=0.1")
    whole.train(2)
    state, weights = whole.comm.state_dict(), copy.deepcopy(whole.module.state_dict())
    momentum = copy.deepcopy(whole.optimizer.state_dict())
    whole.comm.swap("onebit")
    whole.train(3)
    again = Trainer(world, "topk:ratio=0.1")
    again.module.load_state_dict(weights)
    again.optimizer.load_state_dict(momentum)
    again.comm.load_state_dict(state)
    again.step = 5
    again.train(0)
    again.comm.swap("onebit")
    again.train(3)
    found = torch.equal(whole.weights(), again.weights()), same_everywhere(world, again.weights())
    whole.close()
    again.close()
    return found


@pytest.mark.parametrize("size", [2, 3])
def test_a_checkpoint_between_two_swaps_resumes_bit_for_bit(fleet: Fleet, size: int) -> None:
    assert fleet.run(size, across) == [(True, True)] * size


# -- what is left behind ------------------------------------------------------------------------


def kept_open() -> tuple[int, int, int]:
    """Threads, descriptors, process groups."""
    groups = len(dist.distributed_c10d._world.pg_map)
    return threading.active_count(), len(os.listdir("/proc/self/fd")), groups


def often(world: World, times: int, again: bool) -> tuple[list[tuple[int, int, int]], bool, list[str]]:
    rules = ["onebit", "int8", "none", "powersgd:rank=2", "auto", "factors", "onebit@scatter_gather"]
    trainer = Trainer(world, "none", timeout=120)
    seen = []
    with head(dense=1):
        for i in range(times):
            if again:
                trainer.comm.detach()
                trainer.comm = commlib.attach(trainer.ddp, rules[i % len(rules)], min_size=0)
            else:
                trainer.comm.swap(rules[i % len(rules)])
            trainer.train(2)
            seen.append(kept_open())
    same = same_everywhere(world, trainer.weights())
    trainer.comm.detach()
    return seen, same, lanes()


@pytest.mark.full
@pytest.mark.parametrize("again", [False, True], ids=["swap", "detach and attach"])
def test_fifty_swaps_leak_no_thread_no_descriptor_and_no_process_group(fleet: Fleet, again: bool) -> None:
    for seen, same, left in fleet.run(2, often, 50, again):
        assert same
        assert left == []
        for what in range(3):
            early, late = (max(s[what] for s in part) for part in (seen[7:14], seen[14:]))
            assert late <= early, (what, [s[what] for s in seen])


# -- ranks that disagree ------------------------------------------------------------------------


def caught(call: Callable[[], object]) -> str:
    try:
        call()
    except Exception as e:
        return f"{type(e).__name__}: {e}"
    return ""


def disagree(world: World) -> dict[str, Any]:
    ours, calm = Trainer(world, "onebit", timeout=120), Trainer(world, "onebit", timeout=120)
    odd, texts = world.rank == 1, []
    for rule in ("onebitt", {"nobody": "int8"}, "onebitt" if odd else "int8", "int8" if odd else "topk:ratio=0.1"):
        ours.train(1)
        calm.train(1)
        texts.append(caught(lambda rule=rule: ours.comm.swap(rule)))  # type: ignore[misc]
    texts.append(caught(ours.comm.detach if odd else lambda: ours.comm.swap("int8")))
    ours.train(2)
    calm.train(2)
    found = {
        "texts": texts,
        "same": torch.equal(ours.weights(), calm.weights()),
        "plan": str(ours.comm.plan) == str(calm.comm.plan),
        "attached": ours.comm.slot.attached is ours.comm,
    }
    ours.close()
    calm.close()
    return found


def test_a_bad_swap_on_any_rank_leaves_the_old_plan_in_force_on_all_of_them(fleet: Fleet) -> None:
    for rank, found in enumerate(fleet.run(3, disagree)):
        bad, pattern, one, other, gone = found["texts"]
        assert bad.startswith("ValueError: unknown compressor 'onebitt'")
        assert pattern.startswith("ValueError: rule 'nobody' matches no trained parameter")
        if rank == 1:
            assert one.startswith("ValueError: unknown compressor 'onebitt'")
        else:
            assert one.startswith("PlanMismatch: rank 1 failed to swap")
            assert "onebitt" in one
        assert other.startswith("PlanMismatch: ranks swapped to different things: 0.weight")
        assert "int8" in other
        assert "topk" in other
        assert "PlanMismatch: ranks" in gone
        assert "'swap'" in gone
        assert "'detach'" in gone
        assert found["same"]
        assert found["plan"]
        assert found["attached"]


def at_another_step(world: World) -> str:
    trainer = Trainer(world, "onebit", timeout=120)
    trainer.train(2)
    if world.rank == 0:
        trainer.comm.discard_step()
    text = caught(lambda: trainer.comm.swap("int8"))
    trainer.close()
    return text


def test_ranks_that_swap_at_another_step_are_told_so(fleet: Fleet) -> None:
    for text in fleet.run(2, at_another_step):
        assert text.startswith("PlanMismatch: ranks swapped to different things: step: rank")


def one_never_comes(world: World) -> tuple[str, str]:
    trainer = Trainer(world, "onebit", timeout=120)
    trainer.train(2)  # DDP has made up its buckets, which is an exchange of its own
    if world.rank == 1:
        trainer.close()
        return "", ""
    trainer.comm._timeout = 1.0  # for what does not come; what does may take longer
    first = caught(lambda: trainer.comm.swap("int8"))
    second = caught(lambda: trainer.train(1))
    trainer.close()
    return first, second


def test_a_rank_that_does_not_come_to_a_swap_is_named_and_nothing_is_exchanged_without_it(fleet: Fleet) -> None:
    (first, second), _ = fleet.run(2, one_never_comes)
    assert first.startswith("PeerLost: commlib.swap: rank 1 of 2 did not swap within 1 s")
    assert second.startswith("PeerLost: commlib.swap: rank 1 of 2")
