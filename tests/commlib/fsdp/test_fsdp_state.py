"""FSDP2 between real ranks: as without us where nothing is compressed, exact bookkeeping where something is."""

from __future__ import annotations

import copy
import dataclasses
import os
import random
import re
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

import commlib
from commlib.codecs.base import LayerSpec, Memory
from commlib.codecs.registry import make
from commlib.codecs.residuals import bar
from commlib.errors import CommlibError, PlanMismatch
from commlib.exchange import reduce_scatter
from commlib.fsdp.state import ShardedState
from commlib.groups.world import World
from tests.support.rank_pool import Fleet, RankFailed
from tests.support.thread_groups import counted
from tests.support.tiers import full
from tests.support.tiny_ddp import same_everywhere
from tests.support.tiny_fsdp import Network, ShardedTrainer, batch

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
ALL_BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)  # gradients are reduced in bf16, too
SHORT = ("onebit:residual=bfloat16", "onebit:residual=int8", "topk:ratio=0.1,residual=int8")
CODECS = ("onebit", "int8", "int4", "sign", "topk:ratio=0.1", "fp16", "qsgd", "dgc:ratio=0.1")


# -- nothing to compress ---------------------------------------------------------------------------


def as_without(world: World) -> list[str]:
    wrong = []
    plain = ShardedTrainer(world, None)
    plain.train(6)
    cases: list[tuple[Any, dict[str, Any]]] = [
        ("none", {}),
        (commlib.Exact(), {}),
        ("onebit", {"min_size": 10**6}),
        ("onebit", {"dense_steps": 6}),
    ]
    for rule, options in cases:
        other = ShardedTrainer(world, rule, **options)
        other.train(6)
        if not torch.equal(plain.weights(), other.weights()):
            wrong.append(f"{rule} {options}")
        other.close()
    return wrong


@pytest.mark.parametrize("size", [2, 3])
def test_uncompressed_and_warm_up_steps_are_fsdp2_bit_for_bit(fleet: Fleet, size: int) -> None:
    assert fleet.run(size, as_without) == [[]] * size


# -- an oracle -------------------------------------------------------------------------------------


def by_hand(rule: str, world: World, steps: int) -> Tensor:
    """The same training by codecs alone, all ranks' parts in this process."""
    model, codec = Network(), make(rule)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    specs = {n: LayerSpec(n, tuple(p.shape)) for n, p in model.named_parameters() if "sometimes" not in n}
    small = {n for n, s in specs.items() if codec.nbytes(s) >= s.nbytes or codec.refuse(s)}
    codecs = {n: make("none") if n in small else codec for n in specs}
    memory = [{n: Memory.zeros(codecs[n], s) for n, s in specs.items()} for _ in range(world.size)]
    for step in range(steps):
        grads = []
        for rank in range(world.size):
            x, y = batch(rank, step)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            grads.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
            optimizer.zero_grad(set_to_none=True)
        for name, p in model.named_parameters():
            if name not in specs:
                continue
            spec, c = specs[name], codecs[name]
            p.grad = torch.zeros_like(p)
            for stripe in reduce_scatter.chunks(spec, world.size):
                rows, mean = slice(stripe.start, stripe.stop), torch.zeros(stripe.spec.shape)
                for rank in range(world.size):
                    payload = torch.zeros(c.nbytes(stripe.spec), dtype=torch.uint8)
                    part = dataclasses.replace(memory[rank][name].rows(stripe.start, stripe.stop), up=bar(step))
                    c.compress(grads[rank][name][rows].contiguous(), payload, memory=part, seed=0)
                    c.decompress(payload, mean, add=rank > 0, scale=1 / world.size)
                p.grad[rows] = mean
        optimizer.step()
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def beside_by_hand(world: World, rules: list[str]) -> list[str]:
    wrong = []
    for rule in rules:
        trainer = ShardedTrainer(world, rule)
        trainer.train(5)
        if not torch.equal(trainer.weights(), by_hand(rule, world, 5)):
            wrong.append(rule)
        trainer.close()
    return wrong


@pytest.mark.parametrize("size", [3, *full(2)])
def test_it_is_each_chunk_coded_by_itself_and_added_by_its_owner(fleet: Fleet, size: int) -> None:
    assert fleet.run(size, beside_by_hand, ["onebit", "int8", "topk:ratio=0.1", "sign", *SHORT]) == [[]] * size


# -- every way to train ----------------------------------------------------------------------------


def trains(world: World, cases: list[tuple[Any, dict[str, Any]]]) -> list[str]:
    wrong = []
    for rule, options in cases:
        trainer = ShardedTrainer(world, rule, **options)
        losses = trainer.train(12)
        weights = trainer.weights()
        if not (weights.isfinite().all() and all(torch.tensor(losses).isfinite())):
            wrong.append(f"{rule} {options}: not finite")
        if not same_everywhere(world, weights):
            wrong.append(f"{rule} {options}: ranks have other weights")
        if trainer.comm.stats().steps != 12 or trainer.comm.stats().skipped:
            wrong.append(f"{rule} {options}: {trainer.comm.stats()}")
        trainer.close()
    return wrong


@pytest.mark.full
def test_every_codec_trains_with_every_precision_and_unit_option(fleet: Fleet) -> None:
    cases: list[tuple[Any, dict[str, Any]]] = [(codec, {}) for codec in CODECS]
    cases += [
        ("onebit", {"policy": BF16}),
        ("int8", {"policy": ALL_BF16}),
        ("onebit", {"policy": BF16, "parameters": "int8"}),
    ]
    cases += [
        ("onebit", {"parameters": p, "shard": {"reshard_after_forward": r}})
        for p, r in (("bf16", False), ("int8", True))
    ]
    cases += [
        ("onebit", {"more": _odd}),
        ({"second.*": "onebit"}, {}),
        ("randomk:ratio=0.2", {}),
        ("natural", {"policy": BF16}),
    ]
    assert fleet.run(2, trains, cases) == [[], []]


@pytest.mark.full
def test_it_trains_on_four_ranks_sharded_again_over_two_after_the_forward_pass(fleet: Fleet) -> None:
    cases = [("onebit", {"shard": {"reshard_after_forward": 2}, "parameters": "int8"})]
    assert fleet.run(4, trains, cases) == [[]] * 4


@pytest.mark.full
def test_hsdp_trains_with_equal_replicas(fleet: Fleet) -> None:
    cases: list[tuple[str, dict[str, Any]]] = [
        ("onebit", {"replicas": 2}),
        ("int8@scatter_gather", {"replicas": 2, "policy": BF16, "parameters": "bf16"}),
        ("topk:ratio=0.1", {"replicas": 4}),
        ("fp16", {"replicas": 2, "more": _odd}),
    ]
    assert fleet.run(4, trains, cases) == [[]] * 4


def _odd(step: int) -> bool:
    return step % 2 == 1


def values_of_passes(world: World) -> list[bool]:
    """What a pass computes with: the same as the decoded values, on all ranks; and the owners' are exact."""
    trainer = ShardedTrainer(world, None)
    exact = trainer.weights()
    trainer.comm = commlib.attach(trainer.model, parameters="int8", min_size=0)
    x = torch.randn(4, 33, generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        out = trainer.model(x)
    trainer.close()
    gathered = [torch.empty_like(out) for _ in range(world.size)]
    dist.all_gather(gathered, out)
    model, codec = Network(), make("int8:ef=off")
    with torch.no_grad():
        for name, p in model.named_parameters():
            length = -(-len(p) // world.size)
            padded = torch.cat([p, p.new_zeros(length * world.size - len(p), *p.shape[1:])])
            for chunk in padded.split(length):
                spec = LayerSpec(name, tuple(chunk.shape))
                if codec.nbytes(spec) < spec.nbytes:
                    payload = torch.zeros(codec.nbytes(spec), dtype=torch.uint8)
                    codec.compress(chunk.clone(), payload)
                    codec.decompress(payload, chunk)
            p.copy_(padded[: len(p)])
        wanted = model(x)
    return [torch.equal(trainer.weights(), exact), torch.equal(out, wanted), all(torch.equal(out, g) for g in gathered)]


def test_parameters_come_decoded_alike_on_all_ranks_and_owners_keep_theirs(fleet: Fleet) -> None:
    assert fleet.run(3, values_of_passes) == [[True] * 3] * 3


def accumulated(world: World) -> list[bool]:
    """Two passes of which only the last one is reduced."""
    found = []
    for replicas in (1, 2):
        trainers = [ShardedTrainer(world, rule, replicas=replicas) for rule in (None, "int8")]
        grads = []
        for trainer in trainers:
            trainer.model.set_requires_gradient_sync(False)
            nn.functional.cross_entropy(trainer.model(batch(world.rank, 0)[0]), batch(world.rank, 0)[1]).backward()
            trainer.model.set_requires_gradient_sync(True)
            nn.functional.cross_entropy(trainer.model(batch(world.rank, 1)[0]), batch(world.rank, 1)[1]).backward()
            grads.append(torch.cat([g.reshape(-1) for g in trainer.gradients()]))
        found.append(torch.allclose(grads[0], grads[1], rtol=0.05, atol=2e-3) and trainers[1].comm.stats().steps == 1)
        trainers[1].close()
    return found


def test_gradients_accumulated_without_sync_are_exchanged_once(fleet: Fleet) -> None:
    assert fleet.run(2, accumulated) == [[True, True]] * 2


# -- steps that do not count -----------------------------------------------------------------------


def skipped(world: World, rules: list[str], replicas: int, amp: bool) -> list[str]:
    wrong = []
    for rule in rules:
        made = [_scaler() if amp else None for _ in range(2)]
        bad = ShardedTrainer(world, rule, scaler=made[0], replicas=replicas)
        bad.train(7, spoil={3: torch.inf})
        good = ShardedTrainer(world, rule, scaler=made[1], replicas=replicas)
        good.train(3)
        good.step += 1
        if made[1] is not None:
            made[1].update(128.0)  # what the skipped step did to the other one's scale
        good.train(3)
        if not torch.equal(bad.weights(), good.weights()):
            wrong.append(f"{rule}: other weights than without the step")
        stats = bad.comm.stats()
        if (stats.steps, stats.skipped) != (6, 1):
            wrong.append(f"{rule}: {stats.steps} steps, {stats.skipped} skipped")
        bad.close()
        good.close()
    return wrong


def _scaler() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=1000)


@pytest.mark.parametrize("amp", [True, *full(False)])
def test_a_step_that_is_not_finite_on_one_rank_leaves_no_trace_on_any(fleet: Fleet, amp: bool) -> None:
    rules = ["onebit", "onebit:residual=int8", "topk:ratio=0.1", "int8", "qsgd"]
    assert fleet.run(2, skipped, rules, 1, amp) == [[], []]


@pytest.mark.full
def test_nor_does_it_between_replicas(fleet: Fleet) -> None:
    assert fleet.run(4, skipped, ["onebit", "int8@scatter_gather"], 2, True) == [[]] * 4


def one_layer(world: World) -> list[bool]:
    """What is not finite is in a layer that goes as it is; what remembers is in another unit."""
    trainers = [ShardedTrainer(world, {"second.weight": "onebit"}) for _ in range(2)]
    bad, good = trainers

    def inf(grad: Tensor) -> Tensor:
        return grad * torch.inf

    bad.train(2)
    hidden = bad.model.last.register_full_backward_pre_hook(lambda m, g: (inf(g[0]),)) if world.rank == 0 else None
    bad.train(1)
    if hidden is not None:
        hidden.remove()
    good.train(2)
    good.step += 1
    same = [torch.equal(bad.weights(), good.weights())]
    for trainer in trainers:
        trainer.train(3)
    same.append(torch.equal(bad.weights(), good.weights()))
    for trainer in trainers:
        trainer.close()
    return same


def test_nor_does_it_if_only_an_uncompressed_layer_is_not_finite(fleet: Fleet) -> None:
    assert fleet.run(2, one_layer) == [[True, True]] * 2


def discarded(world: World) -> bool:
    trainers = [ShardedTrainer(world, "onebit") for _ in range(2)]
    one, other = trainers
    one.train(3)
    other.train(3)
    x, y = batch(world.rank, 99)
    nn.functional.cross_entropy(one.model(x), y).backward()
    one.comm.discard_step()
    for trainer in trainers:
        trainer.train(3)
        trainer.close()
    return torch.equal(one.weights(), other.weights())


def test_a_discarded_step_leaves_no_trace(fleet: Fleet) -> None:
    assert fleet.run(2, discarded) == [True, True]


def broken_off(world: World) -> list[bool]:
    """A backward pass ends in an error on all ranks, after one unit has been reduced; training goes on."""
    one, other = ShardedTrainer(world, "onebit"), ShardedTrainer(world, "onebit")
    one.train(2)
    other.train(2)

    def fail(*_: Any) -> None:
        raise RuntimeError("as it should be")

    handle = one.model.first.register_full_backward_pre_hook(fail)
    x, y = batch(world.rank, 50)
    try:
        nn.functional.cross_entropy(one.model(x), y).backward()
    except RuntimeError as e:
        failed = "as it should be" in str(e)
    handle.remove()
    one.model._get_fsdp_state()._reset_iter_state()  # FSDP2 is in the middle of a pass
    for unit in one.comm._units:
        for p in unit.inner.fsdp_params:
            p._unsharded_param.grad = None
    one.train(3)
    other.train(3)
    for trainer in (one, other):
        trainer.close()
    return [failed, torch.equal(one.weights(), other.weights()), one.comm.stats().skipped == 1]


def test_a_backward_pass_that_breaks_off_leaves_no_trace(fleet: Fleet) -> None:
    assert fleet.run(2, broken_off) == [[True, True, True]] * 2


# -- bytes -----------------------------------------------------------------------------------------


def bytes_of(world: World, steps: int) -> tuple[float, int]:
    """What the process group was asked to send, and what is known of it."""
    with counted(world) as sent:
        trainer = ShardedTrainer(world, "onebit", parameters="int8")
        trainer.train(steps)
        trainer.close()
    gradients, values = trainer.comm.stats(), trainer.comm.parameter_stats()
    verdicts = steps * 4 * (world.size - 1)
    tests_own = steps * 4 * 2 * (world.size - 1) / world.size  # whether all is finite
    return sum(sent), gradients.wire_bytes + values.wire_bytes + verdicts + tests_own


@pytest.mark.parametrize("size", [2, 3])
def test_bytes_are_those_handed_to_the_process_group(fleet: Fleet, size: int) -> None:
    for sent, known in fleet.run(size, bytes_of, 3):
        assert known > 0
        assert known == pytest.approx(sent, abs=1)


# -- order -----------------------------------------------------------------------------------------


def hasty(world: World, steps: int) -> bool:
    calm = ShardedTrainer(world, "onebit", parameters="int8")
    calm.train(steps)
    late = ShardedTrainer(world, "onebit", parameters="int8")
    dice, sequencer = random.Random(world.rank), late.comm._traffic._sequencer
    naps = 0

    def after_a_nap(call: Any) -> Any:
        def calling(*args: Any) -> Any:
            nonlocal naps
            naps += 1
            time.sleep(dice.random() * 0.002)
            return call(*args)

        return calling

    for name in ("submit", "_advance"):
        setattr(sequencer, name, after_a_nap(getattr(sequencer, name)))
    late.train(steps)
    calm.close()
    late.close()
    return torch.equal(calm.weights(), late.weights()) and naps > 10 * steps


@pytest.mark.parametrize("steps", [8, *full(40)])
def test_delays_change_nothing(fleet: Fleet, steps: int) -> None:
    assert fleet.run(3, hasty, steps) == [True] * 3


# -- attach and detach -----------------------------------------------------------------------------


def detached(world: World) -> list[bool]:
    plain, ours = ShardedTrainer(world, None), ShardedTrainer(world, "onebit", parameters="int8")
    ours.train(3)
    state = ours.comm.state_dict()
    ours.comm.detach()
    weights = ours.weights()
    start = 0
    for p in plain.model.parameters():  # go on from the same weights
        local = p.to_local()
        whole = weights[start : start + p.numel()].view(p.shape)
        length = -(-p.shape[0] // world.size)
        local.data.copy_(whole[world.rank * length : (world.rank + 1) * length])
        start += p.numel()
    plain.optimizer.load_state_dict(copy.deepcopy(ours.optimizer.state_dict()))
    plain.step = 3
    plain.train(3)
    ours.train(3)
    same = torch.equal(plain.weights(), ours.weights())
    again = commlib.attach(ours.model, "onebit", min_size=0)
    again.load_state_dict(state)
    ours.train(2)
    steps = again.stats().steps
    again.detach()
    again.close()
    return [same, steps == 5]


def test_after_detach_it_is_fsdp2_and_attach_goes_on_from_a_state(fleet: Fleet) -> None:
    assert fleet.run(2, detached) == [[True, True]] * 2


# -- errors ----------------------------------------------------------------------------------------


def refused(world: World) -> dict[str, str]:
    def what(call: Any) -> str:
        try:
            call()
        except (ValueError, TypeError, CommlibError) as e:
            return f"{type(e).__name__}: {e}"
        return "no error"

    mesh = init_device_mesh("cpu", (world.size,))
    found = {}
    trainer = ShardedTrainer(world, None)
    for name, rule, options in (
        ("powersgd", "powersgd:rank=2", {}),
        ("exchange", "onebit@gather", {}),
        ("auto in rules", {"first.*": "auto"}, {}),
        ("lossy", commlib.Lossy(["powersgd"]), {}),
        ("unknown", "onebitt", {}),
        ("pattern", {"fisrt.*": "onebit"}, {}),
        ("limit", "onebit", {"limit": "1mbit"}),
        ("values with memory", "onebit", {"parameters": "dgc:ratio=0.1"}),
        ("values drawn", "onebit", {"parameters": "qsgd"}),
        ("values exchange", "onebit", {"parameters": "int8@gather"}),
        ("values pattern", "onebit", {"parameters": {"nothing.*": "int8"}}),
        ("scaler", "onebit", {"scaler": 3}),
        ("seed", "onebit", {"seed": -1}),
    ):
        found[name] = what(lambda rule=rule, options=options: commlib.attach(trainer.model, rule, **options))
    sideways: Any = nn.Linear(8, 8)
    fully_shard(sideways, mesh=mesh, shard_placement_fn=lambda p: Shard(p.dim() - 1))
    found["sideways"] = what(lambda: commlib.attach(sideways, "onebit"))
    found["part"] = what(lambda: ShardedState(nn.Linear(3, 3), "onebit"))
    frozen: Any = nn.Linear(8, 8).requires_grad_(False)
    fully_shard(frozen, mesh=mesh)
    found["frozen"] = what(lambda: commlib.attach(frozen, "onebit"))
    factor = ShardedTrainer(world, "onebit")
    factor.model.set_gradient_divide_factor(3.0)
    found["factor"] = what(lambda: factor.train(1))
    factor.close()
    return found


def test_what_cannot_be_right_is_refused_with_the_reason(fleet: Fleet) -> None:
    for found in fleet.run(2, refused):
        for name, words in {
            "powersgd": "ValueError.*cannot be shared out by rows",
            "exchange": "ValueError.*by no other exchange",
            "auto in rules": "TypeError.*for a whole model",
            "lossy": "ValueError.*for sharded models",
            "unknown": "ValueError.*did you mean 'onebit'",
            "pattern": "ValueError.*matches no trained parameter",
            "limit": "TypeError.*limit",
            "values with memory": "ValueError.*keeps its.*take bf16",
            "values drawn": "ValueError.*draws at random",
            "values exchange": "ValueError.*names an exchange",
            "values pattern": "ValueError.*matches no parameter",
            "scaler": "TypeError.*GradScaler",
            "seed": "ValueError.*seed",
            "sideways": r"ValueError.*Shard\(0\)",
            "part": "TypeError.*fully_shard",
            "frozen": "ValueError.*nothing to exchange",
            "factor": "CommlibError.*set_force_sum_reduction_for_comms",
        }.items():
            assert re.search(words, found[name]), f"{name}: {found[name]}"


def forced(world: World) -> bool:
    """A divisor of the user's own."""
    plain, ours = ShardedTrainer(world, None), ShardedTrainer(world, "none")
    ours.close()
    ours = ShardedTrainer(world, "fp16")
    for trainer in (plain, ours):
        trainer.model.set_gradient_divide_factor(8.0)
        trainer.model.second.set_gradient_divide_factor(8.0)
        if trainer is ours:
            for module in (trainer.model, trainer.model.second):
                module.set_force_sum_reduction_for_comms(True)
    ours.train(3)
    ours.close()
    return bool(ours.weights().isfinite().all())


def test_a_divisor_of_ones_own_works_with_sums(fleet: Fleet) -> None:
    assert fleet.run(2, forced) == [True, True]


def disagreeing(world: World, rules: list[Any], replicas: int) -> str:
    try:
        ShardedTrainer(world, rules[world.rank], replicas=replicas)
    except (PlanMismatch, ValueError) as e:
        return str(e)
    return "no error"


def test_ranks_that_disagree_all_hear_of_it(fleet: Fleet) -> None:
    for said in fleet.run(2, disagreeing, ["onebit", "int8"], 1):
        assert "onebit@reduce_scatter" in said
        assert "int8@reduce_scatter" in said
    good, bad = fleet.run(2, disagreeing, ["onebit", "onebitt"], 1)
    assert "failed to attach" in good
    assert "did you mean 'onebit'?" in bad


def dies(world: World, parameters: str | None) -> None:
    trainer = ShardedTrainer(world, "onebit", parameters=parameters)
    trainer.train(2)
    if world.rank == 1:
        os._exit(1)
    trainer.train(3)


def a_replica_dies(world: World) -> None:
    """Rank 3 goes before it sends anything to its replica, rank 1."""
    trainer = ShardedTrainer(world, "onebit", replicas=2)
    trainer.train(2)
    if world.rank == 3:
        between = trainer.comm._traffic._between
        between.submit = lambda *_: os._exit(1)
    trainer.train(3)


@pytest.mark.full
def test_a_replica_that_dies_is_named(fleet: Fleet) -> None:
    with pytest.raises(RankFailed, match=r"PeerLost: rank 0 of 2 could not exchange .*; rank 1 did not answer"):
        fleet.run(4, a_replica_dies)


@pytest.mark.full
@pytest.mark.parametrize("parameters", [None, "int8"])
def test_a_rank_that_dies_is_named(fleet: Fleet, parameters: str | None) -> None:
    with pytest.raises(RankFailed, match=r"PeerLost: rank 0 of 2 could not .*; rank 1 did not answer"):
        fleet.run(2, dies, parameters)
