"""Under torch.profiler an exchange has ranges with the names of its layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from commlib.groups.world import World
from commlib.telemetry.stats import Meter, ranged, within
from tests.support.rank_pool import Fleet
from tests.support.tiny_ddp import Trainer

CPU = torch.device("cpu")


def names(run: Callable[[], object], *, all_threads: bool = False) -> dict[str, int]:
    """Our ranges → how often, while something runs."""
    config = torch._C._profiler._ExperimentalConfig(profile_all_threads=True) if all_threads else None
    with profile(activities=[ProfilerActivity.CPU], experimental_config=config) as seen:
        run()
    return {e.key: e.count for e in seen.key_averages() if e.key.startswith("commlib::")}


def seen(world: World, rule: str, style: str) -> tuple[dict[str, int], dict[str, int]]:
    """By a profiler as it is by default, and by one of all threads; two steps each."""
    trainer = Trainer(world, rule, style=style)
    trainer.train(2)
    found = [names(lambda: trainer.train(2), all_threads=every) for every in (False, True)]
    trainer.close()
    return found[0], found[1]


LAYERS = [f"{n}.{what}" for n in (0, 2, 4) for what in ("weight", "bias")]


def test_what_is_done_in_the_backward_pass_is_seen_and_what_lanes_do_if_all_threads_are_asked_for(fleet: Fleet) -> None:
    for default, everything in fleet.run(2, seen, "onebit@gather", "attach"):
        compress = {f"commlib::compress {layer}": 2 for layer in LAYERS}
        assert default == {**compress, "commlib::wait for what is exchanged": 2}
        assert {k: v for k, v in everything.items() if " wire " not in k and "::wire" not in k} == {
            **default,
            **{f"commlib::decompress {layer}": 2 for layer in LAYERS},
        }
        wires = [k for k in everything if k.startswith("commlib::wire")]
        assert len(wires) == 2
        assert all(k.startswith(f"commlib::wire bucket {i} (") and k.endswith(")") for i, k in enumerate(sorted(wires)))
        assert all(everything[k] == 2 for k in wires)


@pytest.mark.parametrize("style", ["attach", "register"])
def test_without_a_codec_the_wait_for_ddps_own_exchange_or_ours_is_seen(fleet: Fleet, style: str) -> None:
    for default, _ in fleet.run(2, seen, "none", style):
        if style == "register":
            assert default == {"commlib::wait for what is exchanged": 2}
        else:
            assert default == {"commlib::wire buckets": 2}


def test_a_buckets_meter_is_named_by_its_first_and_last_layer() -> None:
    one, two, three = (Meter(CPU, name) for name in "abc")
    assert Meter.of_all(CPU, [(one, 1), (two, 1), (three, 1)]).label == "a … c"
    assert Meter.of_all(CPU, [(one, 1)]).label == "a"
    assert Meter.of_all(CPU, []).label == ""


def test_which_step_it_is_is_left_out_so_that_steps_add_up() -> None:
    def steps() -> None:
        for step in range(3):
            with ranged("wire", f"bucket 0 (a … b) of step {step}"):
                pass

    assert names(steps) == {"commlib::wire bucket 0 (a … b)": 3}


def test_phases_are_timed_the_same_while_somebody_profiles() -> None:
    meter = Meter(CPU, "a")

    def both() -> None:
        with meter.phase("compress"):
            torch.ones(10).sum()

    assert names(both) == {"commlib::compress a": 1}
    once = meter.seconds()["compress"]
    assert once > 0
    both()
    assert meter.seconds()["compress"] > once


def test_while_nobody_profiles_nothing_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise AssertionError("a range was made")

    monkeypatch.setattr(torch.autograd.profiler, "record_function", refuse)
    with ranged("compress", "a"), Meter(CPU, "a").phase("wire"):
        pass
    inner = Meter(CPU).timed("wire")
    assert within(inner, "wire", "a") is inner
