"""A parameter server with a GradScaler: what would be trained without, and where a gradient overflows, what is left."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

import commlib
from commlib.groups.world import World
from tests.support.rank_pool import Fleet
from tests.support.server_cluster import Cluster

STEPS = 6
WIDE = "2.weight"  # a chunk of its own; all others share one
OPTIMIZERS: dict[str, Any] = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": functools.partial(torch.optim.AdamW, lr=0.01),
}
PLAIN = functools.partial(torch.optim.SGD, lr=0.1)  # sums of steps are as good as steps
Bad = frozenset[tuple[int, int]]


def make() -> nn.Sequential:
    g = torch.Generator().manual_seed(0)  # workers are threads, and the other generator is the process's
    model = nn.Sequential(nn.Linear(20, 200), nn.Tanh(), nn.Linear(200, 200), nn.Tanh(), nn.Linear(200, 4))
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(0.1 * torch.randn(p.shape, generator=g))
    return model


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    x = torch.randn(8, 20, generator=torch.Generator().manual_seed(1000 * rank + step))
    return nn.functional.cross_entropy(model(x), x[:, :4].argmax(1))


def state(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def same(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def scaler_of(rank: int, **options: Any) -> GradScaler:
    """Each worker's is another, and moves."""
    return GradScaler("cpu", init_scale=2.0 ** (8 + 4 * rank), **{"growth_interval": 2, **options})


@contextlib.contextmanager
def overflowing(model: nn.Module, yes: bool) -> Any:
    """Inside, gradients of the wide layer's have no room."""
    wide = dict(model.named_parameters())[WIDE]
    handle = wide.register_hook(lambda g: g + torch.inf) if yes else None
    yield
    if handle is not None:
        handle.remove()


def train(
    cluster: Cluster,
    rank: int,
    optimizer: Any = OPTIMIZERS["sgd"],
    spec: str = "bsp",
    *,
    scaler: GradScaler | None = None,
    bad: Bad = frozenset(),
    steps: int = STEPS,
    passes: int = 1,
    **options: Any,
) -> tuple[list[Tensor], list[Tensor], list[float], int]:
    """Values before the last sync and after it, the scale after each step, and what was refused."""
    model = make()
    made = optimizer(model.parameters())
    scales = []
    with cluster.join(model, made, rank, spec, scaler=scaler, **options) as server:
        for step in range(steps):
            made.zero_grad()
            with server.no_sync():
                for early in range(passes - 1):
                    loss = loss_of(model, rank, 100 + passes * step + early)
                    (scaler.scale(loss) if scaler else loss).backward()
            loss = loss_of(model, rank, step)
            with overflowing(model, (rank, step) in bad):
                (scaler.scale(loss) if scaler else loss).backward()
            server.step()
            if scaler:
                scaler.update()
                scales.append(scaler.get_scale())
        server.wait()
        before = state(model)
        refused = server.refused
    return before, state(model), scales, refused


def with_and_without(workers: int, *given: Any, **options: Any) -> tuple[list[Any], list[Any]]:
    with Cluster(2, workers) as cluster:
        found = cluster.train(lambda rank: train(cluster, rank, *given, scaler=scaler_of(rank), **options))
    with Cluster(2, workers) as cluster:
        plain = cluster.train(lambda rank: train(cluster, rank, *given, **options))
    return found, plain


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("passes", [1, 3])  # with 3, two of them in no_sync()
def test_in_bulk_two_workers_whose_scales_differ_and_move_get_the_values_of_training_without_bit_for_bit(
    optimizer: str, passes: int
) -> None:
    found, plain = with_and_without(2, OPTIMIZERS[optimizer], passes=passes)
    assert all(same(each[1], plain[0][1]) for each in found)
    assert not same(plain[0][1], state(make()))
    assert [each[2] for each in found] == [[2.0 ** (8 + 4 * r + (s + 1) // 2) for s in range(STEPS)] for r in (0, 1)]


@pytest.mark.parametrize(
    ("spec", "options"),
    [
        ("downpour:push=3,fetch=3", {}),
        ("downpour:push=3", {}),
        ("downpour:fetch=4", {}),
        ("wsp:local=2", {}),
        ("ssp:3", {"cache": True}),
    ],
)
def test_what_adds_up_and_what_a_worker_does_by_itself_is_unscaled(spec: str, options: dict[str, Any]) -> None:
    found, plain = with_and_without(1, PLAIN, spec, steps=10, **options)
    assert same(found[0][0], plain[0][0])
    assert same(found[0][1], plain[0][1])


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_an_overflowed_chunk_adds_nothing_others_of_its_step_do_the_scale_is_halved_and_training_goes_on(
    optimizer: str, caplog: pytest.LogCaptureFixture
) -> None:
    bad: Bad = frozenset({(1, 2), (0, 4), (1, 4)})  # in step 4 both workers': the chunk has no update at all
    with Cluster(2, 2) as cluster, caplog.at_level(logging.WARNING):
        found = cluster.train(
            lambda rank: train(
                cluster, rank, OPTIMIZERS[optimizer], scaler=scaler_of(rank, growth_interval=99), bad=bad
            )
        )
    model = make()
    made = OPTIMIZERS[optimizer](model.parameters())
    for step in range(STEPS):
        totals: dict[str, Tensor] = {}
        for rank in range(2):
            made.zero_grad()
            loss_of(model, rank, step).backward()
            for name, p in model.named_parameters():
                assert p.grad is not None
                if name != WIDE or (rank, step) not in bad:
                    totals[name] = totals[name] + p.grad if name in totals else p.grad.clone()
        for name, p in model.named_parameters():
            p.grad = totals[name] / 2 if name in totals else None
        made.step()
    for _, values, _, refused in found:
        assert same(values, state(model))
        assert refused == 0
    assert found[0][2] == [256.0, 256.0, 256.0, 256.0, 128.0, 128.0]
    assert found[1][2] == [4096.0, 4096.0, 2048.0, 2048.0, 1024.0, 1024.0]
    assert not caplog.text


@pytest.mark.parametrize(("spec", "left_out"), [("downpour:push=3,fetch=3", None), ("downpour:push=3", WIDE)])
def test_of_gradients_that_add_up_an_overflowed_one_is_left_out(
    spec: str, left_out: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    bad: Bad = frozenset({(0, 4)})
    with Cluster(1, 1) as cluster, caplog.at_level(logging.WARNING):
        _, found, scales, refused = cluster.train(
            lambda rank: train(cluster, rank, PLAIN, spec, scaler=scaler_of(rank), bad=bad, steps=9)
        )[0]
    assert scales[4] == scales[3] / 2
    assert refused == 0
    assert not caplog.text
    model, ahead = make(), spec.endswith("fetch=3")
    total = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for step in range(9):
        model.zero_grad()
        loss_of(model, 0, step).backward()
        for name, p in model.named_parameters():
            assert p.grad is not None
            total[name] += p.grad if step != 4 or (left_out and name != left_out) else torch.zeros_like(p.grad)
            with torch.no_grad():  # one that goes on by itself sees each step at once, another the sum of three
                if ahead or step % 3 == 2:
                    p.sub_(0.1 * total[name])
                    total[name].zero_()
    for a, b in zip(found, state(model), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_a_parameter_whose_only_gradient_of_several_steps_has_overflowed_has_none_and_does_not_decay() -> None:
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    model = nn.Sequential(first, second)
    begun = state(second)
    made = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.5)
    scaler = GradScaler("cpu", init_scale=64.0)
    with Cluster(1, 1) as cluster, cluster.join(model, made, 0, "downpour:push=2", scaler=scaler) as server:
        for factor, used in ((1.0, first), (torch.inf, model)):  # of both parameters, which share a chunk
            made.zero_grad()
            scaler.scale(used(torch.ones(1, 3)).sum() * factor).backward()
            server.step()
            scaler.update()
        chunks = len(server._syncer._chunks)
    assert chunks == 1
    assert same(state(second), begun)
    assert scaler.get_scale() == 32.0


@pytest.mark.parametrize("enabled", [True, False])
def test_what_is_not_enabled_is_no_scaler_and_what_is_not_finite_is_refused(
    enabled: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model = make()
    made = PLAIN(model.parameters())
    scaler = GradScaler("cpu", init_scale=4.0, enabled=enabled)
    with Cluster(1, 1) as cluster, cluster.join(model, made, 0, scaler=scaler) as server:
        for factor in (1.0, torch.nan, 1.0):
            made.zero_grad()
            scaler.scale(loss_of(model, 0, 0) * factor).backward()
            server.step()
            scaler.update()
        server.sync()
        refused = server.refused
    assert refused == (0 if enabled else 2)
    assert ("is not finite" in caplog.text) == (not enabled)
    other = make()
    alone = PLAIN(other.parameters())
    for _ in range(2):
        alone.zero_grad()
        loss_of(other, 0, 0).backward()
        alone.step()
    assert same(state(model), state(other))
    assert scaler.get_scale() == (2.0 if enabled else 1.0)


@pytest.mark.parametrize(("spec", "clipped"), [("bsp", False), ("downpour:push=2,fetch=2", True)])
def test_clipping_before_the_step_is_in_what_leaves_later_and_too_late_for_what_has_left(
    spec: str, clipped: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model = make()
    made = PLAIN(model.parameters())
    scaler = GradScaler("cpu", init_scale=64.0)
    with Cluster(1, 1) as cluster, cluster.join(model, made, 0, spec, scaler=scaler) as server:
        for step in range(2):
            made.zero_grad()
            scaler.scale(loss_of(model, 0, step)).backward()
            scaler.unscale_(made)
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            server.step()
            scaler.update()
    other = make()
    alone = PLAIN(other.parameters())
    for step in range(2):
        alone.zero_grad()
        loss_of(other, 0, step).backward()
        if clipped:
            nn.utils.clip_grad_norm_(other.parameters(), 0.01)
        alone.step()
    for a, b in zip(state(model), state(other), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
    assert caplog.text.count("gradients have left before that") == (not clipped)


def test_parameters_gradients_are_the_losss_own_after_the_step_and_one_without_any_is_a_step_too() -> None:
    model = make()
    made = PLAIN(model.parameters())
    scaler = GradScaler("cpu", init_scale=64.0)
    with Cluster(1, 1) as cluster, cluster.join(model, made, 0, scaler=scaler) as server:
        for _ in range(3):
            made.zero_grad()
            scaler.scale(model(torch.ones(1, 20)).sum()).backward()
            server.step()
            scaler.update()
            bias = list(model.parameters())[-1]
            assert bias.grad is not None
            assert torch.equal(bias.grad, torch.ones(4))
            made.zero_grad()
            server.step()
            scaler.update()


def test_a_step_of_the_scalers_and_a_missing_update_are_refused() -> None:
    model = make()
    made = PLAIN(model.parameters())
    scaler = GradScaler("cpu")
    with Cluster(1, 1) as cluster, cluster.join(model, made, 0, scaler=scaler) as server:
        scaler.scale(loss_of(model, 0, 0)).backward()
        with pytest.raises(commlib.CommlibError, match=r"call server\.step\(\), not optimizer\.step\(\)"):
            scaler.step(made)
        server.step()
        scaler.scale(loss_of(model, 0, 1)).backward()
        with pytest.raises(commlib.CommlibError, match=r"scaler\.update\(\) was not called since the step before"):
            server.step()
        scaler.update()
        made.zero_grad()


@pytest.mark.parametrize("scaler", [2.0, "cpu", object(), GradScaler])
def test_what_is_no_scaler_is_a_type_error_before_anybody_waits(scaler: Any) -> None:
    model = make()
    with pytest.raises(TypeError, match=r"scaler must be a torch\.amp\.GradScaler, got \w+"):
        commlib.ParameterServer(model, PLAIN(model.parameters()), "bsp", "127.0.0.1:1", scaler=scaler)


def embedded(world: World, scaled: bool) -> tuple[list[Tensor], float]:
    model = make()
    made = OPTIMIZERS["adamw"](model.parameters())
    scaler = scaler_of(world.rank, enabled=scaled)
    with commlib.ParameterServer(model, made, "bsp", scaler=scaler, timeout=100) as server:
        for step in range(STEPS):
            made.zero_grad()
            scaler.scale(loss_of(model, world.rank, step)).backward()
            server.step()
            scaler.update()
    return state(model), scaler.get_scale()


@pytest.mark.full
def test_processes_with_scales_of_their_own_end_with_the_values_of_those_without_bit_for_bit(fleet: Fleet) -> None:
    found, plain = fleet.run(2, embedded, True), fleet.run(2, embedded, False)
    assert all(same(values, plain[0][0]) for values, _ in found)
    assert [scale for _, scale in found] == [2.0**11, 2.0**15]
