"""``commlib bench link`` as it is called: what it prints, keeps and draws, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

from commlib.bench.launch.processes import RankFailed
from commlib.bench.link import command, plot, results
from commlib.bench.link.collectives import OPS
from commlib.bench.link.command import link
from commlib.bench.link.worker import LinkMeasured, LinkPoint, LinkSettings, choose, known
from commlib.bench.results.record import Record, facts, read
from commlib.errors import CommlibError, MissingDependency, PeerLost
from commlib.messaging.throughput import Stream

COLUMNS = [
    *("backend", "op", "bytes", "reps", "seconds", "spread", "bus_gbit_s", "of_line"),
    *("alpha_us", "beta_gbit_s", "predicted_s", "off"),
]
LINE = Stream(0.2, 2e-5)


def points(op: str, sizes: list[int], alpha: float = 0.001, beta: float = 6e-8) -> list[LinkPoint]:
    return [LinkPoint("gloo", op, n, (alpha + beta * n,) * 3) for n in sizes]


def record(found: list[LinkPoint], ranks: int = 4) -> Record:
    measured = LinkMeasured(LINE, found, {}, {})
    about = {"ranks": ranks, "hosts": 4, "ranks_per_host": 1, "rate": "200mbit"}
    run = facts(**about, backend="gloo", line_gbit_s=LINE.gbit_s, line_latency_us=20.0)
    return Record("link", run, results.rows(measured, ranks))


def test_two_ranks_json_and_saved(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    link(quick=True, largest="16kB", seconds=60, as_json=True, save=tmp_path)  # for all, however busy the machine
    out, _ = capsys.readouterr()
    rows = [json.loads(line) for line in out.splitlines()]
    assert all(list(row) == ["schema", "kind", "run", *COLUMNS] for row in rows)
    assert {row["op"] for row in rows} == set(OPS)
    run = rows[0]["run"]
    assert (run["ranks"], run["hosts"], run["backend"]) == (2, None, "gloo")
    for row in rows:
        assert row["seconds"] > 0
        assert 3 <= row["reps"] <= 50
        if row["op"] == "barrier":
            assert (row["bytes"], row["bus_gbit_s"], row["off"]) == (0, None, None)
            continue
        bus = OPS[row["op"]].factor(2) * row["bytes"] * 8e-9 / row["seconds"]
        assert row["bus_gbit_s"] == pytest.approx(bus)
        assert row["of_line"] == pytest.approx(bus / run["line_gbit_s"])
        assert row["off"] == pytest.approx(row["predicted_s"] / row["seconds"] - 1)
    (saved,) = read(tmp_path)
    assert saved.rows == [{k: v for k, v in row.items() if k in COLUMNS} for row in rows]


@pytest.mark.full
def test_a_table_and_a_picture(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    link(op=["send_recv"], largest="64kB", seconds=60, plot=tmp_path / "link.svg")
    out = capsys.readouterr().out
    assert "2 ranks" in out
    assert "raw TCP line" in out
    assert "send_recv" in out
    drawn = (tmp_path / "link.svg").read_text()
    assert drawn.startswith("<?xml")
    assert len(drawn) > 10_000


@pytest.mark.alone
def test_a_lab(lab: object, capsys: pytest.CaptureFixture[str]) -> None:
    link(hosts=4, rate="200mbit", op=["all_reduce"], smallest="64kB", largest="1MB", seconds=6, as_json=True)
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert rows[0]["run"]["rate"] == "200mbit"
    assert len(rows) == 3
    for row in rows:
        assert 0.1 < row["of_line"] < 1.3
        assert abs(row["off"]) < 0.6


def test_rows_of_a_perfect_line() -> None:
    rows = record(
        [*points("all_reduce", [1000, 64_000, 1_000_000]), LinkPoint("gloo", "barrier", 0, (0.002,) * 3)]
    ).rows
    assert [list(row) for row in rows] == [COLUMNS] * 4
    last, barrier = rows[2], rows[3]
    assert last["seconds"] == pytest.approx(0.061)
    assert last["bus_gbit_s"] == pytest.approx(1.5 * 8e-3 / 0.061)
    assert last["beta_gbit_s"] == pytest.approx(1.5 * 8e-9 / 6e-8)
    assert last["of_line"] == pytest.approx(1.5 * 8e-3 / 0.061 / 0.2)
    assert last["alpha_us"] == pytest.approx(1000)
    assert last["off"] == pytest.approx(0, abs=1e-6)
    assert barrier["alpha_us"] == pytest.approx(2000)
    assert barrier["of_line"] is None


def test_the_summary_has_a_row_for_every_operation() -> None:
    found = [*points("all_reduce", [1000, 64_000, 1_000_000, 4_000_000]), *points("gather", [1000, 4000])]
    first, second = results.summary(record(found))
    assert first["op"] == "all_reduce"
    assert first["α µs"] == 1000
    assert first["of line"] == "100%"
    assert first["off"] == "0.0%"
    assert str(first["largest"]).endswith("at 4 MB")
    assert second["at 64 kB"] is None
    assert second["off"] is None


def test_what_was_left_out_is_said_with_the_option_that_brings_it_in() -> None:
    found = points("all_reduce", [1000, 1_000_000], alpha=0.0, beta=1e-7)
    measured = LinkMeasured(LINE, found, {("gloo", "all_reduce"): (4_000_000,)}, {("gloo", "reduce"): "not supported"})
    refused, missing = results.notes(measured, 2)
    assert refused == "gloo cannot reduce: not supported"
    assert "from 4 MB on: all_reduce" in missing
    needed = int(missing.partition("--seconds ")[2].split()[0])
    assert needed >= 5 * (0.1 + 0.4)
    assert results.notes(LinkMeasured(LINE, found, {}, {}), 2) == []


def test_the_picture_says_what_it_shows() -> None:
    pytest.importorskip("matplotlib")
    drawn = plot.figure(record(points("all_reduce", [1000, 64_000, 1_000_000])))
    times, speeds = drawn.axes
    assert times.get_xscale() == times.get_yscale() == "log"
    assert "message size" in times.get_xlabel()
    assert "Gbit/s" in speeds.get_ylabel()
    assert [t.get_text() for t in times.get_xticklabels()] == ["1 kB", "64 kB", "1 MB"]
    legend = [t.get_text() for t in drawn.legends[0].get_texts()]
    assert legend == ["all_reduce", "raw TCP line 0.2"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": ["glue"]}, r"unknown backend 'glue'.*did you mean 'gloo'"),
        ({"op": ["allreduce"]}, r"unknown operation 'allreduce'.*did you mean 'all_reduce'"),
        ({"ranks": 1}, "at least 2 ranks"),
        ({"ranks": 0}, "--ranks must be at least 1"),
        ({"smallest": "1MB", "largest": "1kB"}, "--min 1 MB is larger than --max 1 kB"),
        ({"largest": "much"}, "a message size is a number"),
        ({"seconds": 0.0}, "--seconds must be from 1"),
        ({"rate": "200mbit"}, "--hosts"),
        ({"plot": Path("link.gif")}, r"--plot writes .png, .svg, .pdf"),
        ({"plot": Path("/nowhere/link.png")}, "there is no folder '/nowhere'"),
    ],
)
def test_mistakes_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        link(**options)


def test_nccl_without_gpus_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("commlib.bench.link.worker.known", lambda: ["gloo", "nccl"])
    assert choose([], 2) == ("gloo",)
    with pytest.raises(ValueError, match="nccl needs a GPU, and PyTorch sees none here; use --backend gloo"):
        choose(["nccl"], 2)


def test_nccl_is_measured_too_where_every_rank_has_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr("commlib.bench.link.worker.known", lambda: ["gloo", "nccl", "mpi"])
    assert choose([], 2) == ("gloo", "nccl")
    assert choose([], 3) == ("gloo",)
    assert "gloo" in known()


def test_no_matplotlib_is_said_before_anything_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(MissingDependency, match="pip install matplotlib"):
        link(plot=Path("link.png"))


class Broken:
    """A place whose ranks fail."""

    world_size, launches = 2, True

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def run(self, *_: object, **__: object) -> object:
        raise self.error


def run_broken(error: BaseException) -> None:
    settings = LinkSettings(("gloo",), ("barrier",), (1000,), 1.0)
    command._run(Broken(error), settings)  # type: ignore[arg-type]


def test_a_rank_that_dies_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RankFailed, match="rank 1 was killed by SIGKILL"):
        run_broken(RankFailed(1, "was killed by SIGKILL"))
    explained = RankFailed(0, "failed", error=CommlibError("backend gloo gave wrong values"), trace="…")
    with pytest.raises(CommlibError, match="gave wrong values"):
        run_broken(explained)
    with pytest.raises(PeerLost, match="--max takes smaller messages"):
        run_broken(TimeoutError("rank 1 gave no result in time"))
    surprise = RankFailed(0, "failed: …", error=RuntimeError("Connection closed by peer"), trace="Traceback\n")
    with pytest.raises(typer.Exit) as e:
        run_broken(surprise)
    assert e.value.exit_code == 1
    assert "Traceback\nerror: rank 0 failed" in capsys.readouterr().err
