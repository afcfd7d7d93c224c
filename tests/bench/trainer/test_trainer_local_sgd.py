"""``commlib train --local``: by local steps, with losses on the way, beside codecs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from commlib.bench.trainer import loss_curve, plot

Call = Callable[..., tuple[int, str, str]]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--local", "avrage"], "--local avrage: unknown rule of local steps 'avrage'"),
        (["--local", "average tau=0"], "tau is 1 step or more, got 0"),
        (["--local", "average tau=auto:share=2"], "share must be in (0, 1), got 2"),
        (["--local", "average 5"], "write RULE, or 'RULE tau=auto codec=SPEC"),
        (["--local", "average tua=5"], "write RULE, or 'RULE tau=auto codec=SPEC"),
        (["--local", "average codec=onbit"], "did you mean 'onebit'"),
        (["--local", "average codec=auto"], "name a codec"),
        (["--local", "average times=0"], "as many steps as the others, above 0"),
        (["--local", "average delay=x"], "invalid literal"),
        (["--local", "average", "--local", "average"], "--local average is given twice"),
        (["--local", "average", "--amp"], "--amp goes with codecs, and not with --local"),
        (["--curve", "0"], "--curve must be above 0, got 0"),
        (["--plot", "x.png"], "--plot draws losses on the way: add --curve STEPS"),
        (["--curve", "5", "--plot", "x.gif"], "--plot writes .png, .svg, .pdf"),
    ],
)
def test_bad_flags_are_one_line_and_exit_2(call: Call, args: list[str], said: str) -> None:
    code, out, err = call("train", *args)
    assert (code, out) == (2, "")
    assert said in err
    assert err.count("\n") == 1


@pytest.mark.full
def test_ranks_that_meet_seldom_learn_with_few_bytes_and_losses_on_the_way_are_drawn(
    call: Call, tmp_path: Path
) -> None:
    rules = [
        "average tau=10",
        "diloco tau=10 times=1.5 codec=int8",
        "average tau=10 fragments=2 delay=2",
        "bmuf tau=auto:share=0.001,most=10",  # 10 steps on any machine; another τ, another accuracy
    ]
    locals_ = [word for rule in rules for word in ("--local", rule)]
    picture_file = tmp_path / "loss.svg"
    args = ["--ranks", "2", "--steps", "60", "--curve", "20", "--plot", str(picture_file), "--json"]
    code, out, err = call("train", *locals_, *args)
    assert code == 0, err
    report = json.loads(out)
    runs = {r["comm"]: r for r in report["runs"]}
    dense = runs["none"]["wire_bytes_per_step"]
    assert runs["local average tau=10"]["wire_bytes_per_step"] == pytest.approx(dense / 10, rel=0.01)
    assert runs["local diloco tau=10 times=1.5 codec=int8"]["steps"] == 90
    assert [name for name, r in runs.items() if not r["replicas_equal"]] == []
    assert {name: (r["accuracy"], r.get("note")) for name, r in runs.items() if not r["accuracy"] > 60.0} == {}
    assert [step for _, step, _, _ in runs["none"]["curve"]] == [20, 40, 60]
    assert runs["local average tau=10"]["curve"][-1][2] == pytest.approx(runs["local average tau=10"]["loss"])
    assert "after every" in runs["local bmuf tau=auto:share=0.001,most=10"]["note"]
    assert {r["comm"] for r in report["until"]} == set(runs)
    drawn = picture_file.read_text()
    assert all(name in drawn for name in ("test loss, nats", "MB that a rank sent"))


def run(comm: str, *curve: tuple[float, int, float, int], seed: int = 0) -> dict[str, Any]:
    return {"comm": comm, "seed": seed, "curve": list(curve)}


def test_until_is_the_first_look_at_the_loss_with_which_the_first_run_ended() -> None:
    runs = [
        run("none", (5.0, 1, 3.0, 100), (10.0, 2, 2.0, 200)),
        run("local a", (1.0, 4, 2.5, 10), (2.0, 8, 1.9, 20), (3.0, 12, 2.1, 30)),
        run("local b", (1.0, 4, 2.5, 10)),
    ]
    first, a, b = loss_curve.rows(runs)
    assert (first["seconds"], first["times_faster"]) == (10.0, 1.0)
    assert (a["seconds"], a["steps"], a["bytes"], a["times_faster"], a["times_fewer_bytes"]) == (2.0, 8, 20, 5.0, 10.0)
    assert (b["seconds"], b["times_faster"]) == (None, None)


def test_each_seed_is_compared_with_its_own_first_run() -> None:
    runs = [run("none", (4.0, 1, 2.0, 9), seed=s) for s in (0, 1)] + [run("x", (2.0, 1, 2.0, 9), seed=1)]
    assert [r["times_faster"] for r in loss_curve.rows(runs)] == [1.0, 1.0, 2.0]


def test_the_picture_has_a_line_for_each_run_in_both_panels() -> None:
    report = {
        "runs": [run("none", (5.0, 1, 3.0, 100), (9.0, 2, 2.0, 200)), run("local a", (1.0, 1, 2.0, 10))],
        "task": "text", "parameters": 10, "ranks": 2, "batch_per_rank": 4, "backend": "gloo", "device": "cpu",
    }  # fmt: skip
    for axes in plot.figure(report).axes:
        assert len(axes.lines) == 3  # and the dotted one
