"""``commlib bench server``: steps, the line and what is foretold."""

from __future__ import annotations

import json
import math
from collections.abc import Callable

import pytest
import torch

from commlib.bench.served.command import rows
from commlib.bench.served.model import network
from commlib.bench.served.rank import Figures, Job

Call = Callable[..., tuple[int, str, str]]


def test_rows_compare_what_was_seen_with_the_line_and_the_recursion() -> None:
    job = Job("bsp", 4, 4_000_000, 0.4, 0.8, 5, 3)
    found = Figures(0.08, [0.8, 0.75, 0.9], [1.3], [1.2], [1.4])
    bare, by_layer, first, joined = rows(job, found, 1.5)
    assert bare["foretold_s"] == pytest.approx(1.5 * 4e6 * 8e-9 / 0.08)
    assert bare["step_s"] == 0.8
    assert bare["of_line"] == pytest.approx(0.6 / 0.8)
    assert joined["foretold_s"] == pytest.approx(0.4 + 0.8 + 0.15)
    assert [r["way"] for r in (by_layer, first)] == ["by layer", "first first"]
    times = [r["foretold_s"] for r in (first, by_layer, joined)]
    assert times == sorted(times) or max(times) == pytest.approx(min(times))  # type: ignore[type-var]


def test_the_network_has_the_bytes_and_takes_the_seconds_that_it_should() -> None:
    model = network(4, 1_000_000, 0.0, 0.0)
    assert sum(p.nbytes for p in model.parameters()) == 1_000_000
    model(torch.zeros(1, requires_grad=True)).sum().backward()
    assert all(p.grad is not None and bool((p.grad == 1).all()) for p in model.parameters())


@pytest.mark.slow
def test_two_ranks_have_figures(call: Call) -> None:
    args = ["--mb", "1", "--layers", "3", "--forward", "0.01", "--backward", "0.02", "--steps", "2", "--rounds", "1"]
    code, out, err = call("bench", "server", "--ranks", "2", *args, "--json")
    assert code == 0, err
    found = {r["way"]: r for r in map(json.loads, out.splitlines())}
    assert list(found) == ["bare", "by layer", "first first", "joined"]
    assert found["by layer"]["step_s"] > 0.03
    assert all(math.isfinite(r["over_foretold"]) for r in found.values())
    assert found["bare"]["run"]["rule"] == "bsp"
