"""What logs say is put together: who is where, who stands still, what loses most, what has changed."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from commlib.monitoring.top import RankAccount, picture


def begin(rank: int = 0, ranks: int = 2, step: int = 0, **more: Any) -> dict[str, Any]:
    plan = {"fc1": "onebit@gather", "fc2": "none@dense"}
    whole = {"kind": "begin", "rank": rank, "ranks": ranks, "step": step, "commlib": 1, "every": 10, "plan": plan}
    return {**whole, "host": "a", "pid": 1, "time": 0.0, **more}


def step(at: int, rank: int = 0, **more: Any) -> dict[str, Any]:
    whole: dict[str, Any] = {"kind": "step", "rank": rank, "step": at, "steps": 10, "skipped": 0, "seconds": 2.0}
    whole |= {"bytes": 1000, "dense_bytes": 25000, "ratio": 25.0, "exposed_ms": 40.0, "error": 0.5}
    whole |= {"phases": {}, "changes": [], "checked": None, "time": 0.0}
    return {**whole, "layers": {"fc1": {"error": 0.5, "residual": 2.0}}, **more}


def account(*entries: dict[str, Any]) -> RankAccount:
    made = RankAccount()
    for entry in entries:
        made.take(json.dumps(entry))
    assert made.strange == 0
    return made


def change(at: int, layer: str = "fc2") -> dict[str, Any]:
    return {"step": at, "layer": layer, "from": "none@dense", "to": "fp16@dense", "reason": "because"}


def test_a_rank_is_shown_by_step_by_its_last_entry() -> None:
    seen = picture([(account(begin(), step(10), step(20, skipped=1, checked=15)), 1.0)], layers=1)
    (row,) = seen["ranks"]
    assert row == {
        "rank": 0,
        "host": "a",
        "step": 20,
        "steps_per_s": 5.0,
        "bytes_per_step": 100.0,
        "ratio": 25.0,
        "exposed_ms": 4.0,
        "skipped": 1,
        "error": 0.5,
        "replicas": 15,
        "state": "runs",
        "age_s": 1.0,
    }
    assert seen["layers"] == [{"layer": "fc1", "rank": 0, "route": "onebit@gather", "error": 0.5, "residual": 2.0}]
    assert seen["notes"] == ["no file of rank 1, of 2 in all"]


def test_a_rank_that_has_only_begun_is_shown_too() -> None:
    (row,) = picture([(account(begin(ranks=1, step=7)), 1.0)])["ranks"]
    assert (row["step"], row["steps_per_s"], row["bytes_per_step"], row["state"]) == (7, None, None, "runs")


def test_of_a_run_that_was_resumed_the_last_part_counts() -> None:
    seen = account(
        begin(),
        step(10, skipped=3, changes=[change(9)]),
        step(20),
        {"kind": "end", "step": 20},
        begin(step=10),
        step(15),
    )
    (row,) = picture([(seen, 0.0)])["ranks"]
    assert (row["step"], row["skipped"], row["state"]) == (15, 0, "runs")
    assert picture([(seen, 0.0)])["changes"] == []


def test_who_stands_still_is_named_with_how_long_and_how_often_it_wrote_before() -> None:
    quick, slow = account(begin(0), step(20, 0, seconds=0.4)), account(begin(1), step(20, 1, seconds=30.0))
    seen = picture([(quick, 45.0), (slow, 45.0)])
    assert [row["state"] for row in seen["ranks"]] == ["still", "runs"]  # 45 s are not long for who takes 30
    assert seen["notes"] == [
        "rank 0 stands still at step 20: it has written nothing for 45 s, which it did every 0.4 s"
    ]
    assert picture([(quick, 9.0), (slow, 9.0)])["notes"] == []
    never = picture([(account(begin(ranks=1)), 11.0)])["notes"]
    assert never == ["rank 0 stands still at step 0: it has written nothing for 11 s at all"]


def test_who_has_ended_does_not_stand_still_and_is_not_behind() -> None:
    ended = account(begin(0), step(10, 0), {"kind": "end", "step": 10})
    seen = picture([(ended, 900.0), (account(begin(1), step(900, 1)), 0.0)])
    assert [row["state"] for row in seen["ranks"]] == ["ended", "runs"]
    assert seen["notes"] == []


def test_ranks_that_are_more_than_an_entry_apart_are_told() -> None:
    ranks = [(account(begin(r, 3), step(at, r)), 0.0) for r, at in enumerate((120, 90, 120))]
    assert picture(ranks)["notes"] == ["ranks are at different steps: rank 1 at 90; ranks 0, 2 at 120"]
    near = [(account(begin(r, 3), step(at, r)), 0.0) for r, at in enumerate((120, 110, 120))]
    assert picture(near)["notes"] == []


def test_replicas_that_differ_are_told_once() -> None:
    said = {"kind": "diverged", "step": 99, "layer": "fc1", "layers": ["fc1"], "holders": [[0, 2], [1]]}
    ranks = [(account(begin(r, 3), step(100, r), said), 0.0) for r in range(3)]
    seen = picture(ranks)
    assert [row["replicas"] for row in seen["ranks"]] == ["differ"] * 3
    assert seen["notes"] == ["replicas differ after 99 steps, first in fc1: ranks 0, 2 and rank 1 hold other values"]


def test_layers_that_lose_most_come_first_by_the_rank_where_it_is_most() -> None:
    layers = {
        "a": {"error": 0.2, "residual": 9.0},
        "b": {"error": 0.6, "residual": 1.0},
        "c": {"error": None, "residual": 5.0},
    }
    more = {**layers, "a": {"error": 0.9, "residual": 1.0}}
    seen = picture(
        [(account(begin(0), step(10, 0, layers=layers)), 0.0), (account(begin(1), step(10, 1, layers=more)), 0.0)]
    )
    assert [(row["layer"], row["rank"], row["error"]) for row in seen["layers"]] == [
        ("a", 1, 0.9),
        ("b", 0, 0.6),
        ("c", 0, None),
    ]
    assert [
        row["layer"] for row in picture([(account(begin(), step(10, layers=layers)), 0.0)], layers=1)["layers"]
    ] == ["b"]


def test_an_error_stays_known_while_the_layer_holds_something_back() -> None:
    unknown = {"fc1": {"error": None, "residual": 3.0}}
    still = account(begin(), step(10), step(12, layers=unknown, error=None))
    assert (still.errors, still.error, still.residuals) == ({"fc1": 0.5}, 0.5, {"fc1": 3.0})
    gone = account(begin(), step(10), step(20, layers={}, error=None))
    assert (gone.errors, gone.residuals) == ({}, {})


def test_the_latest_changes_come_first_and_routes_follow_them() -> None:
    seen = account(
        begin(ranks=1), step(10, changes=[change(at) for at in range(4)]), step(20, changes=[change(17, "fc1")])
    )
    assert [c["step"] for c in picture([(seen, 0.0)], changes=3)["changes"]] == [17, 3, 2]
    assert seen.routes == {"fc1": "fp16@dense", "fc2": "fp16@dense"}
    assert picture([(seen, 0.0)])["layers"][0]["route"] == "fp16@dense"


def test_lines_that_are_no_entries_are_counted_and_left() -> None:
    made = RankAccount()
    for line in (json.dumps(step(5)), "{", "3", "[]", '{"kind": "begin"}', json.dumps(begin(commlib=99)), ""):
        made.take(line)
    assert (made.strange, made.begun) == (7, {})
    made.take(json.dumps(begin(ranks=1)))
    made.take('{"kind": "st')
    made.take(json.dumps(step(10)))
    made.take(json.dumps({"kind": "of another time"}))
    made.take(json.dumps(step(20, bytes="many")))
    assert made.step == 10
    assert picture([(made, 0.0)])["notes"] == ["9 lines are no entry of a log, and left out"]


@given(st.lists(st.text(max_size=40) | st.sampled_from([json.dumps(begin()), json.dumps(step(10)), '{"kind":"step"}'])))
def test_no_line_breaks_it(lines: list[str]) -> None:
    made = RankAccount()
    for line in lines:
        made.take(line)
    json.dumps(picture([(made, 3.0)]), allow_nan=False)


def test_nobody_is_nobody() -> None:
    assert picture([]) == {"ranks": [], "layers": [], "changes": [], "notes": []}
