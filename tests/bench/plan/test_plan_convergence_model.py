"""Time to an accuracy: the model's formulas by hand, the shape of SparkNet's figure 4, and the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from commlib.bench.plan import convergence_measure, convergence_model, convergence_plot, time_to_accuracy
from commlib.bench.plan.assumptions import Assumptions
from commlib.bench.plan.command import plan
from commlib.bench.plan.convergence_model import LOCAL, NAIVE, RoundsRow, Table
from commlib.bench.plan.known_models import known
from commlib.bench.plan.time_to_accuracy import Question
from commlib.local_sgd import outer_optimizers

APP = typer.Typer()
APP.command()(plan)
BY_HAND = Table(
    [
        RoundsRow("serial", 1, 1, 0.9, 100.0),
        RoundsRow("serial", 1, 1, 0.95, 200.0),
        RoundsRow("sparknet", 5, 10, 0.9, 8.0),
        RoundsRow("sparknet", 5, 10, 0.95, 20.0),
        RoundsRow("sparknet", 5, 50, 0.9, 4.0),
        RoundsRow("sparknet", 5, 1, 0.95, 150.0),
        RoundsRow("ssp", 5, 1, 0.95, 100.0),
    ]
)


def call(*args: str) -> Any:
    return CliRunner().invoke(APP, args)


def question(**given: Any) -> Question:
    return Question(**{"ranks": 5, "step_s": 1.0, "meetings_s": [5.0], "tau": None, "accuracy": 0.95, **given})


def test_seconds_are_those_by_hand() -> None:
    assert convergence_model.seconds_to(BY_HAND, NAIVE, 5, 1, 2.0, 20.0) == {
        0.9: 100 * (2 / 5 + 20),
        0.95: 200 * (2 / 5 + 20),
    }
    assert convergence_model.seconds_to(BY_HAND, "sparknet", 5, 10, 2.0, 20.0) == {0.9: 8 * 40.0, 0.95: 20 * 40.0}
    rows = time_to_accuracy.answer(question(algorithms=["sparknet"], tau=10), BY_HAND)
    assert [(r["algorithm"], r["seconds"], r["speedup"]) for r in rows] == [
        (NAIVE, pytest.approx(1040), pytest.approx(200 / 1040)),
        ("sparknet", 300.0, pytest.approx(200 / 300)),
    ]
    # 20(10 + S) = 200(1/5 + S): S = (200 − 40)/180
    assert rows[1]["beats_naive_from_s"] == pytest.approx(160 / 180)


@given(st.floats(0.001, 100), st.floats(0, 1000), st.floats(0.01, 100))
def test_speed_ups_fall_with_s_naive_fastest_and_by_less_the_more_steps(c: float, s: float, more: float) -> None:
    def speedup(name: str, tau: int, meeting: float) -> float:
        return 100 * c / convergence_model.seconds_to(BY_HAND, name, 5, tau, c, meeting)[0.9]

    lines = [(NAIVE, 1), ("sparknet", 10), ("sparknet", 50)]
    kept = [speedup(name, tau, s + more) / speedup(name, tau, s) for name, tau in lines]
    assert all(k <= 1 for k in kept)
    assert kept == sorted(kept)


@given(st.floats(0.01, 100), st.integers(2, 16), st.integers(1, 50), st.integers(1, 400), st.integers(1, 400))
def test_at_the_crossover_both_take_the_same_and_beyond_it_local_steps_less(
    c: float, ranks: int, tau: int, serial: int, met: int
) -> None:
    table = Table([RoundsRow("serial", 1, 1, 0.9, serial), RoundsRow("sparknet", ranks, tau, 0.9, met)])
    where = convergence_model.crossover(table, "sparknet", ranks, tau, 0.9, c)

    def ahead(s: float) -> float:
        naive, local = (
            convergence_model.seconds_to(table, n, ranks, t, c, s)[0.9] for n, t in ((NAIVE, 1), ("sparknet", tau))
        )
        return (naive - local) / naive

    if where is None:
        assert met >= serial
    else:
        assert ahead(where + c) > 0
        assert where == 0 or ahead(where) == pytest.approx(0, abs=1e-6)


def test_tau_1_is_a_serial_step_of_every_rank_with_a_meeting() -> None:
    assert convergence_model.seconds_to(BY_HAND, "sparknet", 5, 1, 2.0, 3.0) == {0.95: 150 * 5.0}
    values = convergence_measure.first_values(0)
    data = convergence_measure.Data()
    one = convergence_measure.local_steps(data, outer_optimizers.make("average"), 1, 1, 0)[:5]
    assert (
        one == convergence_measure.local_steps(data, outer_optimizers.make("average"), 1, 1, 0)[:5]
    )  # the same every time
    x, y = next(data.batches(5, 0))
    each = convergence_measure.gradients([v.repeat(5, *[1] * (v.dim() - 1)) for v in values], x, y)
    alone = convergence_measure.gradients(values, x[3:4], y[3:4])
    assert all(torch.allclose(a[3], b[0], atol=1e-6) for a, b in zip(each, alone, strict=True))


def test_a_servers_round_waits_for_its_messages_and_is_a_step_where_they_take_no_time() -> None:
    assert convergence_model.round_s("ssp", 5, 1, 2.0, 0.0) == pytest.approx(2.0, rel=0.1)
    assert convergence_model.round_s("ssp", 5, 1, 2.0, 20.0) == pytest.approx(22.0, rel=0.1)
    hidden = convergence_model.round_s("wsp", 5, 4, 1.0, 2.0)  # four steps are under way while messages are
    assert hidden < 4 * 1.0 + 2.0


def test_the_table_that_comes_with_it_has_all_algorithms_and_the_shape_of_figure_4() -> None:
    table = convergence_model.read()
    lines = [(name, tau) for name in (*LOCAL, "ssp", "wsp") for tau in table.taus(name, 5)]
    assert {name for name, _ in lines} == {*LOCAL, "ssp", "wsp"}
    counts = [table.rounds("sparknet", 5, tau)[0.9] for tau in table.taus("sparknet", 5)]
    assert counts == sorted(counts, reverse=True)  # fewer rounds with more steps in each
    where = convergence_model.crossover(table, "sparknet", 5, 10, 0.95, 1.0)
    assert where is not None
    before, after = (
        [convergence_model.seconds_to(table, n, 5, t, 1.0, s)[0.95] for n, t in ((NAIVE, 1), ("sparknet", 10))]
        for s in (where / 4, where * 4)
    )
    assert before[0] < before[1]
    assert after[0] > after[1]


def test_it_prints_and_draws_what_was_asked(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "plan.png"
    done = call("--algorithm", "sparknet", "--algorithm", "diloco", "--plot", str(file))
    assert done.exit_code == 0, done.exception
    assert file.read_bytes().startswith(b"\x89PNG")
    for words in ("naive", "sparknet", "diloco", "S=100 s", "C = 1 s", "rounds of the digits"):
        assert words in done.stdout
    done = call("vgg19", "--algorithm", "sparknet", "--tau", "10", "--gbit", "1", "--json", "--tflops", "5")
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    setting = Assumptions(gbit=1, tflops=5)
    assert [r["algorithm"] for r in rows] == [NAIVE, "sparknet"]
    assert rows[0]["meeting_s"] == pytest.approx(time_to_accuracy.ring_s(4 * known("vgg19").parameters, 5, setting))
    assert rows[0]["meeting_s"] == pytest.approx(1.6 * 32 * known("vgg19").parameters / 1e9, rel=1e-3)
    drawn = convergence_plot.figure(question(algorithms=["sparknet"]), BY_HAND)
    left, right = drawn.axes
    assert left.get_title() == "Speed-up to 95 %"
    assert "S = 5 s" in right.get_title()
    texts = [t.get_text() for t in drawn.legends[0].get_texts()]
    assert texts == [NAIVE, "sparknet, τ = 1", "sparknet, τ = 10", "sparknet, τ = 50: not reached", "one rank"]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--algorithm", "sparknett"], "did you mean 'sparknet'"),
        (["--algorithm", "sparknet", "--step-s", "0"], "--step-s is above 0"),
        (["--algorithm", "sparknet", "--meeting-s", "-1"], "--meeting-s is 0 or more"),
        (["--algorithm", "sparknet", "--tau", "0"], "--tau is 1 step or more"),
        (["--algorithm", "sparknet", "--tau", "7"], "nothing was measured of sparknet with 5 ranks and tau 7"),
        (["--algorithm", "sparknet", "--ranks", "6"], "nothing was measured of sparknet with 6 ranks"),
        (["--algorithm", "sparknet", "--ranks", "5,10"], "for one number of ranks, got 5, 10"),
        (["--algorithm", "sparknet", "--accuracy", "0.5"], "was not seen to reach 0.5"),
        (["--algorithm", "sparknet", "--layers"], "leave out --layers"),
        (["--algorithm", "sparknet", "--table", "nowhere.csv"], "cannot be read"),
        (["vgg19", "--tau", "5"], "are for --algorithm"),
    ],
)
def test_what_is_wrong_is_told(args: list[str], said: str) -> None:
    done = call(*args)
    assert isinstance(done.exception, ValueError)
    assert said in str(done.exception)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a,b\n", "begins with the line"),
        ("algorithm,ranks,tau,accuracy,rounds\nsparknet,5,1,0.9,3\n", "no line of serial"),
        ("algorithm,ranks,tau,accuracy,rounds\nserial,1,1,0.9,many\n", "line 2"),
        ("algorithm,ranks,tau,accuracy,rounds\nserial,1,1,1.9,3\n", "out of range"),
        ("algorithm,ranks,tau,accuracy,rounds\nserail,1,1,0.9,3\n", "did you mean 'serial'"),
    ],
)
def test_a_table_that_is_none_is_refused_by_its_line(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(ValueError, match=said):
        convergence_model.read(tmp_path / "t.csv")


def test_a_table_is_read_as_it_was_written(tmp_path: Path) -> None:
    rows = [RoundsRow("serial", 1, 1, 0.9, 12.5), RoundsRow("wsp", 10, 4, 0.95, 7.0)]
    (tmp_path / "t.csv").write_text(convergence_model.written(rows))
    assert convergence_model.read(tmp_path / "t.csv").rounds("wsp", 10, 4) == {0.95: 7.0}
