"""``commlib bench compare``: rows find their counterparts, only ratios come out, and a gate that can fail."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

from commlib.bench.report.compare import KINDS, beyond, compare, index, median, ratios
from commlib.bench.results.record import Record, write
from commlib.bench.results.table import Row

PLACE = {"ranks": 4, "hosts": 4, "ranks_per_host": 1, "rate": "200mbit", "compute": "real"}
MACHINE = {"cpu": "one", "cores": 2, "system": "Linux", "torch": "2", "python": "3", "commlib": "1", "backend": "gloo"}


def train(route: str, step_s: float | None, vs_ddp: float | None, **more: object) -> dict[str, object]:
    shared = {"model": "fc", "parameters": 10, "route": route, "by": "commlib", "step_s": step_s, "spread": 0.1}
    return {**shared, "vs_ddp": vs_ddp, "times_fewer": 2.0, "loss_ok": True, "status": "ok", **more}


def sharded(route: str, step_s: float, vs_fsdp2: float) -> dict[str, object]:
    row = train(route, step_s, None)
    del row["vs_ddp"]
    return {**row, "vs_fsdp2": vs_fsdp2}


def link(size: int, seconds: float) -> dict[str, object]:
    return {"backend": "gloo", "op": "reduce", "bytes": size, "seconds": seconds, "of_line": 0.5}


def save(folder: Path, rows: list[dict[str, object]], kind: str = "train", **run: object) -> Path:
    write(Record(kind, {**PLACE, **MACHINE, **run}, list(rows)), folder)
    return folder


def compared(capsys: pytest.CaptureFixture[str], a: Path, b: Path) -> tuple[list[dict[str, Any]], str]:
    compare(a, b, as_json=True)
    out, err = capsys.readouterr()
    return [json.loads(line) for line in out.splitlines()], err


def test_ratios_are_b_over_a_the_largest_change_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = save(tmp_path / "a", [train("x", 1.0, 2.0), train("y", 1.0, 1.0), train("z", 4.0, 1.0)])
    b = save(tmp_path / "b", [train("z", 1.0, 4.0), train("x", 1.1, 1.8), train("y", 2.0, 0.5)])
    rows, err = compared(capsys, a, b)
    assert [r["route"] for r in rows] == ["z", "y", "x"]
    z, y, x = rows
    assert (z["step_s"], z["vs_ddp"], z["times_fewer"]) == (0.25, 4.0, 1.0)
    assert (y["step_s"], y["vs_ddp"]) == (2.0, 0.5)
    assert (x["step_s"], x["vs_ddp"]) == pytest.approx((1.1, 0.9))
    assert x | PLACE == x
    assert x["kind"] == "train"
    assert set(x) == {"kind", *PLACE, "model", "route", "step_s", "vs_ddp", "times_fewer"}  # ratios and names, no more
    assert err == ""


def test_rows_of_another_place_are_not_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = save(tmp_path / "a", [train("x", 1.0, 1.0)])
    save(tmp_path / "a", [train("x", 9.0, 1.0)], rate="50mbit")
    b = save(tmp_path / "b", [train("x", 2.0, 1.0), train("new", 2.0, 1.0)])
    rows, err = compared(capsys, a, b)
    assert [r["step_s"] for r in rows] == [2.0]
    assert err.splitlines() == [
        "only in A: train (ranks 4, hosts 4, ranks per host 1, rate 50mbit, compute real): fc x",
        "only in B: train (ranks 4, hosts 4, ranks per host 1, rate 200mbit, compute real): fc new",
    ]


def test_repeated_runs_count_with_their_median(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seconds in (1.0, 2.0, 90.0):
        a = save(tmp_path / "a", [train("x", seconds, 1.0)])
    b = save(tmp_path / "b", [train("x", 3.0, 1.0)])
    assert compared(capsys, a, b)[0][0]["step_s"] == 1.5


def test_every_kind_has_a_table_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, factor in (("a", 1.0), ("b", 3.0)):
        save(tmp_path / name, [train("x", factor, 1.0)])
        save(tmp_path / name, [sharded("x", factor, 1.0)], kind="fsdp2")
        save(tmp_path / name, [link(1024, factor), link(4096, 2 * factor)], kind="link")
        save(tmp_path / name, [{"codec": "c", "op": "compress", "numel": 1, "seconds": factor}], kind="codec")
        save(tmp_path / name, [{"model": "m", "route": "x", "step_s": factor}], kind="cost")
        save(tmp_path / name, [{"model": "m", "exchange": "e", "codec": "c", "step_s": factor}], kind="exchange")
    rows, _ = compared(capsys, tmp_path / "a", tmp_path / "b")
    assert [r["kind"] for r in rows] == ["train", "fsdp2", "exchange", "cost", "link", "link", "codec"]
    assert all(r.get("step_s", r.get("seconds")) == 3.0 for r in rows)
    compare(tmp_path / "a", tmp_path / "b")
    out = capsys.readouterr().out
    for kind in KINDS:
        assert f"{kind}, B / A; ranks 4, hosts 4" in out


def test_fsdp2_has_a_gate_of_its_own_and_is_not_compared_with_ddp(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = save(tmp_path / "a", [train("int8", 1.0, 1.0)])
    save(tmp_path / "a", [sharded("int8", 2.0, 2.0)], kind="fsdp2")
    b = save(tmp_path / "b", [sharded("int8", 6.0, 1.0)], kind="fsdp2")
    rows, err = compared(capsys, a, b)
    assert [(r["kind"], r["step_s"], r["vs_fsdp2"]) for r in rows] == [("fsdp2", 3.0, 0.5)]
    assert err.splitlines() == [
        "only in A: train (ranks 4, hosts 4, ranks per host 1, rate 200mbit, compute real): fc int8"
    ]
    with pytest.raises(typer.Exit):
        compare(a, b, within=5)
    assert "vs_fsdp2 was 2 and is 1" in capsys.readouterr().err


def test_files_can_be_compared_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = (next(save(tmp_path / n, [train("x", s, 1.0)]).iterdir()) for n, s in (("a", 1.0), ("b", 2.0)))
    assert compared(capsys, a, b)[0][0]["step_s"] == 2.0


def test_another_machine_is_warned_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = save(tmp_path / "a", [train("x", 1.0, 1.0)])
    b = save(tmp_path / "b", [train("x", 1.0, 1.0)], cpu="two", torch="2.1")
    assert compared(capsys, a, b)[1].splitlines() == [
        "warning: cpu differs: one in A, two in B",
        "warning: torch differs: 2 in A, 2.1 in B",
    ]


@pytest.mark.parametrize(
    ("after", "percent", "passes"),
    [(2.0, 0.0, True), (2.09, 5.0, True), (2.12, 5.0, False), (1.91, 5.0, True), (1.9, 5.0, False), (4.0, 100.0, True)],
)
def test_within(tmp_path: Path, capsys: pytest.CaptureFixture[str], after: float, percent: float, passes: bool) -> None:
    a = save(tmp_path / "a", [train("x", 1.0, 2.0), train("y", 1.0, 1.0)])
    b = save(tmp_path / "b", [train("x", 50.0, after), train("y", 1.0, 1.0)])
    if passes:
        compare(a, b, within=percent)
        assert capsys.readouterr().err == ""
        return
    with pytest.raises(typer.Exit) as stopped:
        compare(a, b, within=percent)
    assert stopped.value.exit_code == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("train (ranks 4,")
    assert ": fc x: " in line
    assert f"vs_ddp was 2 and is {after:.4g}" in line
    assert line.endswith("more than 5 %")


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (train("x", None, None, status="hung"), "vs_ddp is only in A"),
        (train("x", 1.0, 2.0, loss_ok=False), "the loss is wrong in B only"),
    ],
)
def test_what_broke_is_not_within_anything(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], row: dict[str, object], said: str
) -> None:
    a, b = save(tmp_path / "a", [train("x", 1.0, 2.0)]), save(tmp_path / "b", [row])
    compare(a, b)  # said, but nobody asked to fail
    assert said in capsys.readouterr().err
    with pytest.raises(typer.Exit):
        compare(a, b, within=1000)


def test_within_is_refused_where_it_could_not_fail(tmp_path: Path) -> None:
    a, b = save(tmp_path / "a", [link(1, 1.0)], kind="link"), save(tmp_path / "b", [link(1, 9.0)], kind="link")
    with pytest.raises(
        ValueError, match="--within looks at vs_ddp, vs_fsdp2, vs_dense and copy_multiple, but only link is in both"
    ):
        compare(a, b, within=5)


def test_what_a_gpu_told_in_parts_is_passed_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a", "b"):
        save(tmp_path / name, [{"route": "none", "step_ms": 1.0}], kind="gpu", stage="ranks")
        save(tmp_path / name, [train("x", 1.0, 1.0)])
    assert [r["kind"] for r in compared(capsys, tmp_path / "a", tmp_path / "b")[0]] == ["train"]
    for name in ("c", "d"):
        save(tmp_path / name, [{"route": "none", "step_ms": 1.0}], kind="gpu", stage="ranks")
    with pytest.raises(ValueError, match=r"measured in both: .* has 1 rows of gpu"):
        compare(tmp_path / "c", tmp_path / "d")


def test_nothing_in_common_says_what_each_has(tmp_path: Path) -> None:
    a, b = save(tmp_path / "a", [train("x", 1.0, 1.0)]), save(tmp_path / "b", [link(1, 1.0)], kind="link", hosts=2)
    with pytest.raises(
        ValueError, match=r"measured in both: A \(.*a\) has 1 rows of train at ranks 4.*has 1 rows of link"
    ):
        compare(a, b)


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    a = save(tmp_path / "a", [train("x", 1.0, 1.0)])
    with pytest.raises(ValueError, match="nowhere: no saved figures there"):
        compare(a, tmp_path / "nowhere")
    (tmp_path / "bad.jsonl").write_text('{"schema": 1, "kind": "race", "run": {}}')
    with pytest.raises(ValueError, match=r"bad\.jsonl:1: not a row"):
        compare(a, tmp_path / "bad.jsonl")
    (tmp_path / "bad.jsonl").write_bytes(b"\xff")
    with pytest.raises(ValueError, match="cannot be read"):
        compare(a, tmp_path / "bad.jsonl")


FIGURE = st.floats(1e-6, 1e6)


@given(FIGURE, FIGURE, st.floats(0, 300))
def test_a_and_b_may_be_swapped(before: float, after: float, percent: float) -> None:
    sides = [next(iter(index([Record("train", PLACE, [train("x", 1.0, v)])]).items())) for v in (before, after)]
    (key, a), (_, b) = sides
    there, back = ratios(key, a, b)["vs_ddp"], ratios(key, b, a)["vs_ddp"]
    assert isinstance(there, float)
    assert isinstance(back, float)
    assert math.isclose(there * back, 1.0)
    if abs(max(there, back) - 1 - percent / 100) > 1e-9:
        assert (beyond(key, a, b, percent) is None) == (max(there, back) - 1 < percent / 100)
        assert (beyond(key, a, b, percent) is None) == (beyond(key, b, a, percent) is None)


@given(st.lists(st.one_of(st.none(), st.just(math.nan), st.just(0), st.booleans(), FIGURE), max_size=5))
def test_only_figures_have_a_median(values: list[Any]) -> None:
    rows: list[Row] = [{"x": v} for v in values]
    real = [v for v in values if isinstance(v, float) and v > 0]
    found = median(rows, "x")
    assert (found is None) == (not real)
    if found is not None:
        assert min(real) <= found <= max(real)
