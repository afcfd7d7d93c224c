"""Where logs go: whole lines of JSON, scalars with names; and what is no target is refused by name."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest

from commlib.errors import MissingDependency
from commlib.monitoring.log_writers import JsonLines, LogFailed, TensorBoard, scalars, target_of

STEP: dict[str, Any] = {
    "kind": "step",
    "rank": 1,
    "time": 1.0,
    "step": 40,
    "steps": 20,
    "skipped": 1,
    "seconds": 4.0,
    "bytes": 2000,
    "dense_bytes": 8000,
    "ratio": 4.0,
    "exposed_ms": 50.0,
    "phases": {"compress": 0.2, "wire": 0.4, "decompress": 0.1},
    "error": 0.5,
    "layers": {"fc1.weight": {"error": 0.5, "residual": 2.0}, "fc2.weight": {"error": None, "residual": 3.0}},
    "changes": [{"step": 35, "layer": "fc1.weight", "from": "none@dense", "to": "onebit@gather", "reason": "why"}],
    "checked": None,
}
SCALARS = {
    "bytes_per_step": 100.0,
    "dense_bytes_per_step": 400.0,
    "ratio": 4.0,
    "exposed_ms_per_step": 2.5,
    "steps_per_second": 5.0,
    "skipped": 1.0,
    "error": 0.5,
    "ms_per_step/compress": 10.0,
    "ms_per_step/wire": 20.0,
    "ms_per_step/decompress": 5.0,
    "error/fc1.weight": 0.5,
    "residual/fc1.weight": 2.0,
    "residual/fc2.weight": 3.0,
}


class Writer:
    """As SummaryWriter."""

    def __init__(self) -> None:
        self.scalars: dict[str, tuple[float, int]] = {}
        self.texts: dict[str, tuple[str, int]] = {}
        self.flushed = 0
        self.closed = False

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.scalars[name] = value, step

    def add_text(self, name: str, value: str, step: int) -> None:
        self.texts[name] = value, step

    def flush(self) -> None:
        self.flushed += 1

    def close(self) -> None:
        self.closed = True


def lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_lines_are_there_as_soon_as_they_are_written_and_appended_to_what_there_is(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    for n in (1, 2):
        target = target_of(path, 0)
        target.write({"kind": "begin", "n": n, "x": math.inf, "of": [math.nan, {"y": -math.inf}]})
        assert lines(path)[-1] == {"kind": "begin", "n": n, "x": None, "of": [None, {"y": None}]}
        target.close()
    assert [entry["n"] for entry in lines(path)] == [1, 2]


def test_half_a_line_of_a_run_that_was_killed_spoils_no_other(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text('{"kind": "step"}\n{"kind": "st')
    target = JsonLines(path)
    target.write({"kind": "begin"})
    target.write({"kind": "end"})
    target.close()
    assert path.read_text() == '{"kind": "step"}\n{"kind": "st\n{"kind": "begin"}\n{"kind": "end"}\n'


def test_ranks_have_files_of_their_own_named_as_traces_are(tmp_path: Path) -> None:
    for given, rank in (("a.jsonl", 0), ("a.jsonl", 1), ("of-{rank}.jsonl", 2)):
        target_of(f"{tmp_path}/{given}", rank).close()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.jsonl", "a.rank1.jsonl", "of-2.jsonl"]


def test_scalars_are_by_step_and_what_is_not_known_is_none() -> None:
    assert dict(scalars(STEP)) == pytest.approx(SCALARS)
    assert "ratio" not in dict(scalars({**STEP, "ratio": None}))
    assert "error" not in dict(scalars({**STEP, "error": math.nan}))


def test_a_writer_gets_scalars_and_changes_and_stays_open() -> None:
    writer = Writer()
    target = target_of(writer, 3)
    target.write({"kind": "begin", "step": 0})
    assert not writer.scalars
    target.write(STEP)
    target.write({"kind": "end", "step": 40})
    target.close()
    assert {name: value for name, (value, _) in writer.scalars.items()} == pytest.approx(
        {f"commlib/{name}": value for name, value in SCALARS.items()}
    )
    assert {step for _, step in writer.scalars.values()} == {40}
    assert writer.texts == {"commlib/plan": ("- fc1.weight: none@dense → onebit@gather (why)", 40)}
    assert writer.flushed == 1
    assert not writer.closed


def test_a_writer_without_texts_gets_scalars() -> None:
    class Bare:
        def __init__(self) -> None:
            self.names: list[str] = []

        def add_scalar(self, name: str, value: float, step: int) -> None:
            self.names.append(name)

        def flush(self) -> None:
            pass

    bare = Bare()
    TensorBoard(lambda _: bare, "bare").write(STEP)
    assert len(bare.names) == len(SCALARS)


def test_a_folder_is_tensorboards_where_each_rank_is_a_run_and_what_a_resumed_run_repeats_is_hidden(
    tmp_path: Path,
) -> None:
    reader: Any = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for steps in ((20, 40, 60), (40, 60)):  # the second run goes on from a checkpoint at 35
        target = target_of(tmp_path / "runs", 1)
        for step in steps:
            target.write(
                {**STEP, "step": step, "steps": 5 if step == 40 and len(steps) == 2 else 20, "error": step / 100}
            )
        target.close()
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name == "rank1"
    seen = reader.EventAccumulator(str(folder)).Reload()
    assert {f"commlib/{name}" for name in SCALARS} <= set(seen.Tags()["scalars"])
    assert [(e.step, round(e.value, 3)) for e in seen.Scalars("commlib/error")] == [(20, 0.2), (40, 0.4), (60, 0.6)]


@pytest.mark.parametrize("given", [3, None, ["a.jsonl"], object()])
def test_what_is_no_target_is_refused(given: Any) -> None:
    with pytest.raises(TypeError, match="a log goes to a path or a SummaryWriter"):
        target_of(given, 0)


@pytest.mark.parametrize("name", ["log.json", "log.txt", "log.csv", "log.log"])
def test_a_file_of_another_kind_is_no_folder(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=r"ends in \.jsonl, or a folder"):
        target_of(tmp_path / name, 0)
    assert not list(tmp_path.iterdir())


def test_a_file_in_no_folder_and_a_folder_that_is_a_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(LogFailed, match="No such file or directory; name a file in a folder there is"):
        target_of(tmp_path / "none" / "a.jsonl", 0)
    (tmp_path / "taken").write_text("")
    pytest.importorskip("tensorboard")
    with pytest.raises(LogFailed, match="name another folder"):
        target_of(tmp_path / "taken", 0)


def test_without_tensorboard_it_is_said_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(MissingDependency, match="pip install tensorboard"):
        target_of(tmp_path / "runs", 0)
    assert not list(tmp_path.iterdir())
