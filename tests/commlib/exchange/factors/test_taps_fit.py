"""Layers are tapped while their rows are needed, and plain otherwise."""

from __future__ import annotations

import pytest
from torch import nn

from commlib.exchange.factors.tap import Tap
from commlib.groups.world import World
from tests.support.rank_pool import Fleet
from tests.support.tiny_ddp import Trainer


class Nobody:
    """An owner whose factors are never on."""

    ddp = None

    def on(self, name: str) -> bool:
        return False

    def watching(self) -> bool:
        return False

    def sighted(self, name: str, rows: int) -> None: ...

    def syncing(self) -> bool:
        return True

    def none_is_unused(self) -> bool:
        return False

    def complete(self, name: str) -> None: ...


def test_a_tap_can_be_put_and_removed_again_and_again() -> None:
    layer = nn.Linear(3, 2)
    tap = Tap("l", layer, Nobody())
    for _ in range(3):
        tap.enable()
        tap.enable()
        assert [len(p._backward_hooks or ()) for p in layer.parameters()] == [1, 1]
        assert type(layer) is nn.Linear
        tap.put()
        tap.put()
        assert type(layer) is not nn.Linear
        tap.remove()
        tap.remove()
        assert type(layer) is nn.Linear
        tap.put()
        tap.disable()
        tap.disable()
        assert type(layer) is nn.Linear
        assert [len(p._backward_hooks or ()) for p in layer.parameters()] == [0, 0]


def test_a_tap_leaves_alone_what_is_no_linear_layer_any_more() -> None:
    layer = nn.Linear(3, 2)
    tap = Tap("l", layer, Nobody())
    tap.enable()
    nn.utils.parametrizations.weight_norm(layer)
    changed = type(layer)
    tap.put()
    assert type(layer) is changed
    tap.disable()
    assert type(layer) is changed


def looked_at(layers: list[nn.Linear]) -> int:
    """How many of them have taps; between two steps all are ordinary layers."""
    assert all(type(m) is nn.Linear for m in layers)
    return sum(bool(m.weight._backward_hooks) for m in layers)


def kinds(world: World, rule: str) -> tuple[int, int, bool]:
    """Tapped layers when attached, and at last; whether, whenever nobody watches, these are all that go by rows.

    The manager may look again, on a busy machine, and watch for a while: that does not count. Steps are
    counted, and decisions are all ranks', so all stop at the same one.
    """
    trainer = Trainer(world, rule)
    linear = [m for m in trainer.ddp.modules() if isinstance(m, nn.Linear)]
    first = tapped = looked_at(linear)
    fits: list[bool] = []
    for _ in range(100):
        trainer.train(5)
        factors = trainer.comm._factors
        if not trainer.comm.settled or (factors is not None and factors.watch):
            continue
        rows = sum(p.route.by_rows and p.spec.kind == "linear.weight" for p in trainer.comm.plan)
        tapped = looked_at(linear)
        fits.append(tapped == rows)
        if len(fits) == 8:
            break
    trainer.close()
    return first, tapped, len(fits) == 8 and all(fits)


@pytest.mark.full
def test_layers_that_are_left_dense_are_plain_once_nobody_watches(fleet: Fleet) -> None:
    for first, _, fits in fleet.run(2, kinds, "auto"):
        assert first > 0  # the manager wants to see their rows
        assert fits
    for first, tapped, _ in fleet.run(2, kinds, "none"):
        assert first == tapped == 0
    for first, tapped, fits in fleet.run(2, kinds, "factors"):
        assert first == tapped > 0
        assert fits
