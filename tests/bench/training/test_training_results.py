"""The rule for right and wrong, the ratios, and who may race."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from commlib.bench.results.record import Record
from commlib.bench.results.table import Row
from commlib.bench.training.command import parse_compute
from commlib.bench.training.configurations import COMMLIB, Configuration, choose
from commlib.bench.training.correctness import Evidence, judge
from commlib.bench.training.results import hidden, rows, spread, title, versus
from commlib.bench.training.schedule import Schedule, TrainingTrial, TrialOutcome
from commlib.bench.training.trial import short

DDP = Evidence(0.0, first=5.0, last=4.0)
MEAN = Evidence(0.0, off=1e-7, share=1.0)


@pytest.mark.parametrize(
    ("own", "exact", "right"),
    [
        (DDP, True, True),
        (replace(DDP, last=4.0 + 1e-6), True, True),
        (replace(DDP, last=4.001), True, False),
        (replace(DDP, last=3.9), True, False),  # better than DDP is not equal to it either
        (replace(DDP, apart=0.01), True, False),
        (replace(DDP, last=4.5), False, True),
        (replace(DDP, last=3.5), False, True),
        (replace(DDP, last=4.95), False, False),
        (replace(DDP, last=5.5), False, False),
        (replace(DDP, last=math.nan), False, False),
        (replace(DDP, apart=math.nan), False, False),
        (replace(DDP, apart=0.01), False, False),
    ],
)
def test_losses(own: Evidence, exact: bool, right: bool) -> None:
    assert judge([DDP, own], [DDP], exact=exact) is right


def test_an_exact_route_may_differ_as_ddp_differs_from_itself() -> None:
    own = replace(DDP, last=4.01)
    assert judge([own], [DDP, replace(DDP, last=4.008)], exact=True) is True
    assert judge([own], [DDP, replace(DDP, last=4.0001)], exact=True) is False


def test_a_baseline_that_learned_nothing_is_wrong_and_judges_nobody() -> None:
    flat = Evidence(0.0, first=5.0, last=5.1)
    assert judge([flat], [flat], exact=True) is False
    assert judge([DDP], [flat], exact=False) is None
    assert judge([], [DDP], exact=False) is None
    assert judge([DDP], [], exact=True) is None


@pytest.mark.parametrize(
    ("own", "exact", "right"),
    [
        (MEAN, True, True),
        (replace(MEAN, off=1e-3), True, False),
        (replace(MEAN, off=math.nan), True, False),
        (replace(MEAN, off=0.9, share=0.2), False, True),
        (replace(MEAN, off=0.9, share=-0.2), False, False),
        (replace(MEAN, off=0.9, share=2.0), False, False),  # the sum of two ranks
        (replace(MEAN, off=0.9, share=0.0), False, False),
        (replace(MEAN, share=math.nan), False, False),
        (replace(MEAN, apart=1.0), False, False),
    ],
)
def test_gradients(own: Evidence, exact: bool, right: bool) -> None:
    assert judge([own], [MEAN], exact=exact) is right


def outcome(name: str, number: int, *times: float, sent: float | None = 100.0) -> TrialOutcome:
    return TrialOutcome(TrainingTrial(number, name), 1.0, times, sent, DDP)


def test_ratios_are_taken_within_a_round() -> None:
    base = [outcome("ddp", 0, 1.0, 1.0, 9.0), outcome("ddp", 1, 2.0), outcome("ddp", 2, 4.0)]
    own = [outcome("a", 0, 0.5), outcome("a", 1, 1.0), outcome("a", 2, 2.0)]  # the machine slows down
    assert versus(own, base) == 2.0
    assert versus(own[:1], base) == 2.0
    assert versus(own, base[2:]) == 2.0
    assert versus([], base) is None
    assert versus(own[:1], base[2:]) is None


def test_spread_is_that_of_the_middle_half() -> None:
    assert spread([1.0]) == 0.0
    assert spread([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx(2.0 / 3.0)


def table() -> list[Row]:
    s = Schedule(["ddp", "a", "b"], 1, 1, 10.0, 1.0, 1.0)
    s.record(outcome("ddp", 0, 1.0))
    s.record(outcome("a", 0, 0.5, sent=None))
    s.record(TrialOutcome(TrainingTrial(0, "b"), 1.0, error="TypeError: " + "no " * 20))
    contenders = [
        Configuration("ddp", "pytorch", True),
        Configuration("a", "commlib", False),
        Configuration("b", "commlib", False),
    ]
    return rows(s, contenders, model="gpt", parameters=7)


def test_rows_have_all_columns_and_are_json() -> None:
    ddp, a, b = table()
    assert json.loads(json.dumps(a, allow_nan=False)) == a
    assert list(ddp) == list(a) == list(b)
    assert (ddp["vs_ddp"], a["vs_ddp"], b["vs_ddp"]) == (1.0, 2.0, None)
    assert (ddp["times_fewer"], a["times_fewer"]) == (1.0, None)
    assert (a["status"], b["step_s"], b["steps"]) == ("ok", None, 0)
    assert str(b["status"]).startswith("TypeError")


@pytest.mark.parametrize("width", [80, 100, 120, 160])
def test_a_table_fits_the_terminal_and_keeps_what_matters(width: int) -> None:
    shown = [c for c in table()[0] if c not in hidden(table(), width)]
    assert {"route", "step_s", "vs_ddp", "loss_ok"} <= set(shown)
    assert 1 + sum(3 + max(len(c), *(len(str(r[c])) for r in table())) for c in shown) <= width


def test_a_loss_that_is_no_number_is_none_and_wrong() -> None:
    s = Schedule(["ddp", "a"], 1, 1, 10.0, 1.0, 1.0)
    s.record(outcome("ddp", 0, 1.0))
    s.record(replace(outcome("a", 0, 1.0), evidence=replace(DDP, last=math.inf)))
    ours = [Configuration("ddp", "pytorch", True), Configuration("a", "commlib", False)]
    row = rows(s, ours, model="gpt", parameters=7)[1]
    assert (row["loss"], row["loss_ok"]) == (None, False)


def test_the_baseline_comes_first_and_always() -> None:
    every = choose((), (), 4)
    assert [c.name for c in every[:2]] == ["ddp", "torch-fp16"]
    assert [c.name for c in every if c.by == "commlib"] == list(COMMLIB)
    assert {c.name for c in every if c.exact} == {"ddp", "none", "auto"}
    assert [c.name for c in choose((), ("onebit",), 4)] == ["ddp", "onebit"]
    assert [c.name for c in choose(("topk:ratio=0.1@gather",), ("topk:ratio=0.1@gather",), 4)][1:] == [
        "topk:ratio=0.1@gather"
    ]
    assert [(c.name, c.exact) for c in choose((), ("torch-allreduce",), 4)] == [
        ("ddp", True),
        ("torch-allreduce", True),
    ]
    assert len(choose((), (), 2, quick=True)) == 6
    assert [c.name for c in choose(("int8",), (), 2, quick=True)][-1] == "int8"


@pytest.mark.parametrize(
    ("comm", "only", "said"),
    [
        (("onebitt",), (), "unknown compressor 'onebitt'"),
        (("onebit", "onebit"), (), "given twice"),
        ((), ("torch-fp61",), "did you mean 'torch-fp16'"),
        (("int8",), ("onebit",), "unknown contender 'onebit'"),
    ],
)
def test_who_is_not_known_is_named(comm: tuple[str, ...], only: tuple[str, ...], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        choose(comm, only, 4)


def test_compute() -> None:
    assert parse_compute("real") is None
    assert parse_compute("simulated:250") == 0.25
    for bad in ("gpu", "simulated", "simulated:", "simulated:x", "simulated:-1", "simulated:nan", "real:5"):
        with pytest.raises(ValueError, match="--compute"):
            parse_compute(bad)


def test_errors_are_short_and_without_their_wrapping() -> None:
    wrapping = "Got the following error when running the callback: RuntimeError: "
    assert short(RuntimeError(f"{wrapping}{wrapping}the reason\n\nAt: …")) == "RuntimeError: the reason"
    assert short(ValueError()) == "ValueError"
    assert len(short(ValueError("x" * 1000))) < 120


@pytest.mark.parametrize(
    ("run", "said"),
    [
        ({}, ""),
        ({"limit": None, "hierarchy": False}, ""),
        ({"limit": "50mbit", "hierarchy": False}, " · commlib's routes alone: at most 50mbit from each rank"),
        ({"limit": None, "hierarchy": True}, " · commlib's routes alone: hierarchy: 2 nodes of 2"),
    ],
)
def test_the_title_says_what_holds_for_commlibs_routes_alone(run: dict[str, object], said: str) -> None:
    known = {"compute": "real", "ranks": 4, "hosts": None, "backend": "gloo", "line_gbit_s": None, "rounds": 1}
    row: Row = {"model": "gpt", "parameters": 7, "levels": "2 nodes of 2" if run.get("hierarchy") else None}
    text = title(Record("train", {**known, "steps_per_visit": 3, **run}, [row]))
    assert text.endswith("medians of 1 × 3 steps" + said)


def test_a_limit_and_a_hierarchy_are_of_commlibs_contenders_alone() -> None:
    found = choose(["none", "auto"], [], 4, limit="50mbit", hierarchy=True)
    for c in found:
        assert (c.limit, c.hierarchy) == (("50mbit", True) if c.by == "commlib" else (None, False))
    assert {c.by for c in found} == {"commlib", "pytorch"}
