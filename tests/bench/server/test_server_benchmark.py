"""``commlib bench server``: steps, the line and what is foretold."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from commlib.bench.server.command import lines, rows, words
from commlib.bench.server.ring_throughput import RingBenchmark
from commlib.bench.server.worker import ServerBenchmarkJob, ServerFigures, ServerTrial, network

Call = Callable[..., tuple[int, str, str]]


JOB = ServerBenchmarkJob("bsp", 4, 4_000_000, 0.4, 0.8, 5, 3, 1 << 20)


RING = RingBenchmark(0.08, 0.9)


def figures(line: float | None = 0.1, ring: RingBenchmark | None = RING) -> ServerFigures:
    bare = [ServerTrial(0.8, 0.5), ServerTrial(0.75, 0.7), ServerTrial(0.9, 0.6)]
    return ServerFigures(
        line, ring, 1 << 20, bare, [ServerTrial(1.3, 0.4)], [ServerTrial(1.2, None)], [ServerTrial(1.4, 0.2)]
    )


def test_rows_compare_what_was_seen_with_the_line_of_all_at_once_and_the_recursion() -> None:
    bare, by_layer, first, joined = rows(JOB, figures(), 1.5)
    assert bare["foretold_s"] == pytest.approx(1.5 * 4e6 * 8e-9 / 0.08)
    assert bare["step_s"] == 0.8
    assert bare["of_line"] == pytest.approx(0.6 / 0.8)
    assert joined["foretold_s"] == pytest.approx(0.4 + 0.8 + 0.15)
    assert [r["way"] for r in (by_layer, first)] == ["by layer", "first first"]
    times = [r["foretold_s"] for r in (first, by_layer, joined)]
    assert times == sorted(times) or max(times) == pytest.approx(min(times))  # type: ignore[type-var]


def test_a_way_has_the_busy_share_of_the_cores_of_its_own_visits() -> None:
    assert [r["cores"] for r in rows(JOB, figures(), 1.5)] == [0.6, None, 0.4, 0.2]


def test_both_lines_are_told_apart() -> None:
    assert lines(figures()) == {"line_gbit_s": 0.1, "line_all_gbit_s": 0.08, "cores_line_all": 0.9}
    assert words(figures()) == "line 0.100 Gbit/s, all at once 0.080 with 90% of the cores; "
    assert words(figures(ring=RingBenchmark(0.08, None))) == "line 0.100 Gbit/s, all at once 0.080; "


def test_one_rank_has_no_line_and_nothing_is_a_share_of_it() -> None:
    found = figures(None, None)
    assert lines(found) == dict.fromkeys(["line_gbit_s", "line_all_gbit_s", "cores_line_all"])
    assert words(found) == ""
    bare, *_, joined = rows(JOB, found, 0.0)
    assert (bare["foretold_s"], bare["over_foretold"], bare["of_line"]) == (0.0, None, None)
    assert joined["foretold_s"] == pytest.approx(0.4 + 0.8)


def test_the_network_has_the_bytes_and_takes_the_seconds_that_it_should() -> None:
    model = network(4, 1_000_000, 0.0, 0.0)
    assert sum(p.nbytes for p in model.parameters()) == 1_000_000
    model(torch.zeros(1, requires_grad=True)).sum().backward()
    assert all(p.grad is not None and bool((p.grad == 1).all()) for p in model.parameters())


@pytest.mark.full
def test_two_ranks_have_figures(call: Call) -> None:
    args = ["--mb", "1", "--layers", "3", "--forward", "0.01", "--backward", "0.02", "--steps", "2", "--rounds", "1"]
    code, out, err = call("bench", "server", "--ranks", "2", *args, "--json")
    assert code == 0, err
    found = {r["way"]: r for r in map(json.loads, out.splitlines())}
    assert list(found) == ["bare", "by layer", "first first", "joined"]
    assert found["by layer"]["step_s"] > 0.03
    assert all(math.isfinite(r["over_foretold"]) for r in found.values())
    run = found["bare"]["run"]
    assert run["rule"] == "bsp"
    assert run["line_gbit_s"] > 0
    assert run["line_all_gbit_s"] > 0
    for busy in (run["cores_line_all"], *(r["cores"] for r in found.values())):
        assert busy is None if not Path("/proc/stat").exists() else 0 < busy <= 1
    wire = 1e6 * 8e-9 / run["line_all_gbit_s"]
    assert found["bare"]["foretold_s"] == pytest.approx(wire)
    assert found["bare"]["of_line"] == pytest.approx(wire / found["bare"]["step_s"])
