"""What the figures allow one to say: never a route that is wrong or failed, nothing within the spread."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commlib.bench.report.findings import findings, summary
from commlib.bench.report.recommendation import (
    MARGIN,
    MeasuredRoute,
    clause,
    contenders,
    find_baseline,
    judge,
    line_share,
    recommend,
    sentences,
)
from commlib.bench.results.record import Record
from commlib.bench.results.table import Row

RUN = {"ranks": 4, "hosts": 4, "ranks_per_host": 1, "rate": "200mbit", "backend": "gloo", "line_gbit_s": 0.19}
DDP = MeasuredRoute("ddp", True, True, 1.0, 1.0, 0.0, loss=2.0, loss_ok=True)


def row(route: str, step_s: float | None, *, by: str = "commlib", ddp_s: float = 1.0, **more: object) -> Row:
    """A row of a train record as the benchmark writes it."""
    shared = {"model": "fc", "parameters": 50_000_000, "route": route, "by": by, "step_s": step_s, "spread": 0.02}
    shared |= {"vs_ddp": None if step_s is None else ddp_s / step_s, "steps": 10, "socket_bytes": 10_000_000}
    return {**shared, "times_fewer": 1.0, "loss": 2.0, "loss_of_ddp": 2.0, "loss_ok": True, "status": "ok", **more}


def sharded(route: str, step_s: float, **more: object) -> Row:
    """A row of an fsdp2 record."""
    found = dict(row(route, step_s, **more))  # type: ignore[arg-type]
    return {"fsdp2".join(k.split("ddp")): v for k, v in found.items()}


def said(rows: list[Row], **run: object) -> list[str]:
    return [f.text for f in findings(Record("train", {**RUN, **run}, rows))]


@st.composite
def fields(draw: st.DrawFn) -> list[Row]:
    """DDP and some routes; any of them may have failed, be wrong, or lack a figure."""
    rows = []
    for i in range(draw(st.integers(0, 6))):
        route = (
            draw(st.sampled_from(["none", "none@gather", "onebit", "topk:ratio=0.01", "int8", "fp16"])) + f"-{i}" * i
        )
        good = draw(st.booleans())
        rows.append(
            row(
                route,
                draw(st.floats(1e-3, 10) | st.none()),
                by=draw(st.sampled_from(["commlib", "pytorch"])),
                spread=draw(st.floats(0, 1) | st.none()),
                status="ok" if good else draw(st.sampled_from(["RuntimeError: no", "it hung", ""])),
                loss_ok=draw(st.sampled_from([True, False, None])),
            )
        )
    ddp = row("ddp", 1.0, by="pytorch", spread=draw(st.floats(0, 0.5) | st.none()))
    return [*rows, ddp]


@given(fields())
def test_the_recommended_is_the_fastest_of_those_that_may_be(rows: list[Row]) -> None:
    field = contenders("train", rows)
    chosen = recommend(field)
    ddp = rows[-1]
    allowed = []
    for r in rows[:-1]:
        spreads = (r["spread"], ddp["spread"])
        if r["status"] != "ok" or r["loss_ok"] is False or r["vs_ddp"] is None or None in spreads:
            continue
        if 1 - 1 / float(str(r["vs_ddp"])) > max(MARGIN, *(float(str(s)) for s in spreads)):
            allowed.append(r)
    if chosen is None:
        assert allowed == []
    else:
        assert chosen.failure is None
        assert chosen.loss_ok is not False
        assert chosen.name in {str(r["route"]) for r in allowed}
        assert chosen.versus == max(float(str(r["vs_ddp"])) for r in allowed)


@given(fields())
def test_the_best_exact_route_is_exact_and_no_faster_than_the_best(rows: list[Row]) -> None:
    field = contenders("train", rows)
    best, exact = recommend(field), recommend(field, exact=True)
    if exact is not None:
        assert exact.exact
        assert best is not None
        assert (best.versus or 0) >= (exact.versus or 0)


@given(fields())
def test_every_route_is_mentioned_and_wrong_results_come_first(rows: list[Row]) -> None:
    found = findings(Record("train", RUN, rows))
    text = " ".join(f.text for f in found)
    assert all(str(r["route"]) in text for r in rows[:-1])
    assert "4 ranks" in text
    assert "200 Mbit/s" in text
    alarms = [f.alarm for f in found]
    assert alarms == sorted(alarms, reverse=True)
    wrong = [r for r in rows if r["loss_ok"] is False and r["status"] == "ok"]
    assert sum(alarms) == len(wrong)


@given(fields())
def test_no_route_is_called_faster_within_the_spread(rows: list[Row]) -> None:
    field = contenders("train", rows)
    base = find_baseline(field)
    assert base is not None
    for c in field:
        if judge(c, base) in ("faster", "slower"):
            assert c.versus is not None
            assert abs(1 / c.versus - 1) > max(MARGIN, c.spread or 0, base.spread or 0)


@pytest.mark.parametrize(
    ("versus", "spread", "judgement"),
    [
        (1 / 0.96, 0.0, "same"),  # saves 4 %
        (1 / 0.90, 0.0, "faster"),
        (1 / 0.90, 0.12, "same"),
        (1 / 1.04, 0.0, "same"),
        (1 / 1.10, 0.0, "slower"),
        (1 / 1.10, 0.2, "same"),
        (3.0, None, "unknown"),
        (None, 0.0, "unknown"),
    ],
)
def test_the_rule(versus: float | None, spread: float | None, judgement: str) -> None:
    assert judge(MeasuredRoute("x", False, False, 1.0, versus, spread), DDP) == judgement
    noisy = dataclasses.replace(DDP, spread=spread)  # the larger of the two spreads counts, whosever it is
    assert judge(MeasuredRoute("x", False, False, 1.0, versus, 0.0), noisy) == judgement


def test_the_sentence_of_the_issue() -> None:
    conv: list[Row] = [{**r, "model": "conv"} for r in (row("ddp", 1.0, by="pytorch"), row("onebit", 1.2))]
    fc = [row("ddp", 1.0, by="pytorch"), row("onebit", 0.29)]
    (verdict,) = summary([Record("train", RUN, conv), Record("train", RUN, fc)])
    assert verdict.text == (
        "4 ranks on 4 emulated hosts at 200 Mbit/s, training: plain DDP is best for conv; "
        "onebit saves 71 % for fc and changes the gradient."
    )


def test_exact_and_lossy_routes_are_told_apart() -> None:
    text = " ".join(said([row("ddp", 1.0, by="pytorch"), row("none@gather", 0.8), row("onebit", 0.5)]))
    assert "onebit is the fastest, it saves 50 % of the step of plain DDP (1 s) and changes the gradient." in text
    assert "The fastest exact route is none@gather, it saves 20 %." in text
    placed = " ".join(said([row("ddp", 1.0, by="pytorch"), row("placed:fc*", 0.7), row("onebit", 0.5)]))
    assert "The fastest exact route is placed:fc*, it saves 30 %." in placed
    alone = " ".join(said([row("ddp", 1.0, by="pytorch"), row("none@gather", 0.8), row("onebit", 0.9)]))
    assert (
        "none@gather is the fastest, it saves 20 % of the step of plain DDP (1 s) and leaves the gradient exact."
        in alone
    )


def test_fsdp2_has_a_baseline_of_its_own() -> None:
    rows = [sharded("fsdp2", 1.0, by="pytorch"), sharded("int8+int8", 0.5), sharded("none+int8", 0.6)]
    record = Record("fsdp2", RUN, rows)
    text = " ".join(f.text for f in findings(record))
    assert "int8+int8 is the fastest, it saves 50 % of the step of plain FSDP2 (1 s) and changes the gradient." in text
    assert "No exact route is shown to be faster. Also faster: none+int8 saves 40 %." in text
    assert "Plain FSDP2 uses 42 % of the measured line" in text
    assert "DDP" not in text.replace("FSDP2", "")
    assert [f.text for f in summary([record, Record("train", RUN, [row("ddp", 1.0, by="pytorch")])])] == [
        "4 ranks on 4 emulated hosts at 200 Mbit/s, training by FSDP2: int8+int8 saves 50 % for fc and changes the "
        "gradient.",
        "4 ranks on 4 emulated hosts at 200 Mbit/s, training: plain DDP is best for fc.",
    ]
    wrong = Record("fsdp2", RUN, [sharded("ddp", 1.0), sharded("int8", 0.5)])  # DDP is no baseline there
    assert "plain FSDP2 has no valid figure" in findings(wrong)[0].text


def test_a_faster_route_without_a_spread_takes_the_title_away() -> None:
    rows: list[Row] = [row("ddp", 1.0, by="pytorch"), row("onebit", 0.5), row("int8", 0.1, spread=None)]
    assert "onebit is the fastest that can be judged, it saves 50 %" in said(rows)[0]
    assert any("nothing is claimed: int8." in line for line in said(rows))


def test_losses_are_said_like_wins() -> None:
    lines = said(
        [row("ddp", 1.0, by="pytorch"), row("topk", 1.5), row("none", 1.02), row("torch-int8", None, status="hung")]
    )
    assert "no route is shown to be faster than plain DDP (1 s a step); leave it as it is." in lines[0]
    assert "Slower than plain DDP: topk adds 50 % to the step." in lines
    assert "No difference beyond 5 % and the spread: none (exact)." in lines
    assert "Failed, and has no figures: torch-int8 (hung)." in lines


def test_a_wrong_loss_is_said_first_and_the_route_is_not_praised() -> None:
    lines = said([row("ddp", 1.0, by="pytorch"), row("sign", 0.1, loss=9.0, loss_ok=False), row("onebit", 0.5)])
    assert lines[0].startswith("Wrong result: fc (50 M parameters), 4 ranks on 4 emulated hosts at 200 Mbit/s: ")
    assert "the loss came to 9 with sign, to 2 with the baseline. Do not use it here" in lines[0]
    assert "onebit is the fastest" in lines[1]
    assert not any("sign" in line for line in lines[1:])


def test_a_wrong_gradient_without_a_loss_is_said_too() -> None:
    lines = said([row("ddp", 1.0, by="pytorch", loss=None), row("sign", 0.1, loss=None, loss_ok=False)])
    assert "sign does not give what it must. Do not use it here" in lines[0]


@pytest.mark.parametrize(
    "ddp", [None, row("ddp", None, by="pytorch", status="it hung"), row("ddp", 1.0, by="pytorch", loss_ok=False)]
)
def test_without_a_sound_baseline_nothing_is_recommended(ddp: Row | None) -> None:
    rows = [row("onebit", 0.1), *([] if ddp is None else [ddp])]
    field = contenders("train", rows)
    assert recommend(field) is None
    assert any("nothing can be compared" in line for line in said(rows))
    assert clause(field, model="fc", baseline="plain DDP") == "nothing can be said for fc"


def test_what_was_not_checked_is_said() -> None:
    text = " ".join(said([row("ddp", 1.0, by="pytorch"), row("onebit", 0.1, loss_ok=None)]))
    assert "Its loss was not checked." in text


@pytest.mark.parametrize(
    ("share", "words"),
    [
        (0.9, "the link decides"),
        (0.4, "does not explain its step"),
        (0.05, "does not decide"),
        (1.5, "cannot be"),
        (None, None),
    ],
)
def test_the_share_of_the_line_is_interpreted(share: float | None, words: str | None) -> None:
    found = sentences([DDP], where="fc", baseline="plain DDP", line_share=share)
    assert (len(found) == 1) if words is None else (words in found[-1].text)


def test_the_share_of_the_line_is_that_of_the_baseline() -> None:
    rows: Sequence[Row] = [row("onebit", 0.1), row("ddp", 1.0, by="pytorch", socket_bytes=11_875_000)]
    assert line_share(rows, RUN, "train") == pytest.approx(0.5)  # 95 of 190 Mbit/s
    assert line_share(rows[:1], RUN, "train") is None
    assert line_share(rows, {}, "train") is None
    assert line_share([{"exchange": "dense", "codec": "none", "of_line": 0.7}], RUN, "exchange") == 0.7
