"""``commlib bench cost``: what a user types, and what a slip gets."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from commlib.bench.cost.command import HOOKS, ROUTES, SHORT, _contenders, cost, rows
from commlib.bench.cost.worker import CostSheet
from commlib.bench.results.record import read
from commlib.bench.training.configurations import choose

OWN = """
def layers():
    return [("a.weight", (400, 500)), ("b.weight", (300, 512)), ("b.bias", (300,))]
"""
COLUMNS = ["held_mb", "beyond_ddp_mb", "of_gradient", "attach_s", "step_s", "vs_ddp", "first", "cpu_us", "status"]

app = typer.Typer()
app.command()(cost)


@pytest.fixture
def own(users_module: Callable[[str, str], Path]) -> Path:
    return users_module("cost_own", OWN)


@pytest.mark.usefixtures("warm_python")
def test_figures_of_two_ranks_as_json_and_kept(own: Path) -> None:
    command = ["--model", "cost_own:layers", "--comm", "onebit", "--only", "onebit", "--rounds", "1", "--steps", "2"]
    done = CliRunner().invoke(app, [*command, "--json", "--save", str(own / "kept")], catch_exceptions=False)
    assert done.exit_code == 0, done.stderr
    lines = [json.loads(x) for x in done.stdout.splitlines()]
    assert [x["route"] for x in lines] == ["ddp", "onebit"]
    assert all([c for c in COLUMNS if c in x] == COLUMNS for x in lines)
    ddp, onebit = lines
    assert (ddp["parameters"], ddp["beyond_ddp_mb"], ddp["vs_ddp"], ddp["cpu_us"]) == (353_900, 0, 1, 0)
    assert all(x["attach_s"] >= 0 and x["step_s"] > 0 and x["first"] > 0 for x in lines)
    assert onebit["held_mb"] == pytest.approx(ddp["held_mb"] + onebit["beyond_ddp_mb"])
    (record,) = read(own / "kept")
    assert (record.kind, len(record.rows), record.run["rounds"]) == ("cost", 2, 1)


def test_rows_compare_what_ran_in_the_same_round() -> None:
    contenders = choose(["onebit"], ["onebit"], 2)
    ddp = [CostSheet(0.0, 2.0, 1.0, 0.5, 1_000_000), CostSheet(0.0, 4.0, 2.0, 1.5, 3_000_000)]
    own = [CostSheet(0.2, 6.0, 2.0, 0.9, 2_600_000), CostSheet(0.4, 6.0, 3.0, 2.1, 4_600_000)]
    first, second = rows("m", [("w", (100, 1000)), ("b", (0,))], contenders, [ddp, own], {})
    assert (first["route"], first["beyond_ddp_mb"], first["of_gradient"], first["vs_ddp"]) == ("ddp", 0, 0, 1)
    assert second["held_mb"] == pytest.approx(3.6)
    assert second["beyond_ddp_mb"] == pytest.approx(1.6)
    assert second["of_gradient"] == pytest.approx(4.0)
    assert second["attach_s"] == pytest.approx(0.3)
    assert second["vs_ddp"] == pytest.approx((1 / 2 + 2 / 3) / 2)
    assert second["first"] == pytest.approx(2.5)
    assert second["cpu_us"] == pytest.approx(0.5 / 2 * 1e6)


def test_where_the_system_does_not_say_what_is_held_nothing_is_made_up() -> None:
    contenders = choose(["onebit"], ["onebit"], 2)
    sheet = CostSheet(0.1, 1.0, 1.0, 1.0, None)
    for row in rows("m", [("w", (10,))], contenders, [[sheet], [sheet]], {}):
        assert (row["held_mb"], row["beyond_ddp_mb"], row["of_gradient"]) == (None, None, None)


def test_a_route_that_failed_has_a_row_that_says_so() -> None:
    contenders = choose(["onebit"], ["onebit"], 2)
    sheet = CostSheet(0.1, 1.0, 1.0, 1.0, 5)
    first, second = rows("m", [("w", (10,))], contenders, [[sheet, sheet], []], {"onebit": "no result in 60 s"})
    assert (first["status"], second["status"]) == ("ok", "no result in 60 s")
    assert all(second[column] is None for column in COLUMNS[:-1])


def test_by_default_all_routes_of_the_table_run_and_quickly_few() -> None:
    assert [c.name for c in _contenders((), (), 2, quick=False)] == [*HOOKS, *ROUTES, *SHORT]
    assert [c.name for c in _contenders((), (), 2, quick=True)] == [*HOOKS, "fp16", "onebit"]
    assert [c.name for c in _contenders(("int4",), (), 2, quick=False)] == [*HOOKS, "int4"]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--model", "resnet5"], "unknown model 'resnet5'"),
        (["--comm", "onebitt"], "unknown compressor 'onebitt'"),
        (["--only", "onebitt"], "unknown contender 'onebitt'"),
        (["--ranks", "1"], "it takes --ranks 2"),
        (["--rate", "1gbit"], "--rate and --ranks-per-host are of emulated hosts"),
    ],
)
def test_a_slip_is_said_at_once(args: list[str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        CliRunner().invoke(app, args, catch_exceptions=False)


def test_torchrun_has_started_one_set_of_processes_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="without torchrun"):
        CliRunner().invoke(app, [], catch_exceptions=False)
