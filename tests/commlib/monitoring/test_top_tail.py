"""Files are read along: whole lines only, from the beginning if they begin anew, and the newest of a rank."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from commlib.monitoring.top import LogTail, LogTails


def put(path: Path, rank: int, *steps: int, age: float = 0.0) -> None:
    """A rank's file, as old as that."""
    begin: dict[str, Any] = {
        "kind": "begin",
        "rank": rank,
        "ranks": 2,
        "step": 0,
        "commlib": 1,
        "every": 10,
        "plan": {},
    }
    step: dict[str, Any] = {"kind": "step", "layers": {}, "changes": [], "skipped": 0, "error": None}
    step |= {"steps": 10, "seconds": 1.0, "bytes": 10, "exposed_ms": 1.0}
    with path.open("a") as file:
        for entry in ([] if path.stat().st_size else [begin]) + [{**step, "step": s} for s in steps]:
            file.write(json.dumps(entry) + "\n")
    now = path.stat().st_mtime - age
    os.utime(path, (now, now))


@given(st.lists(st.text(st.characters(blacklist_characters="\r\n"), max_size=9)), st.integers(1, 7))
def test_lines_come_once_and_whole_however_they_are_written(lines: list[str], size: int) -> None:
    text = "".join(line + "\n" for line in lines).encode(errors="replace")
    with tempfile.NamedTemporaryFile() as file:
        tail, seen = LogTail(Path(file.name)), list[str]()
        for i in range(0, len(text), size):
            file.write(text[i : i + size])
            file.flush()
            seen += tail.lines()
    whole = [line.encode(errors="replace") for line in lines]
    assert seen == [line.decode() for line in whole if line.strip()]


def test_a_file_that_has_begun_anew_is_read_from_its_beginning(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text("one\ntwo\nthr")
    tail = LogTail(path)
    assert list(tail.lines()) == ["one", "two"]
    path.write_text("1\n2")
    assert list(tail.lines()) == ["1"]


def test_ranks_of_a_folder_are_found_whenever_they_come(tmp_path: Path) -> None:
    tails = LogTails([tmp_path])
    assert tails.read() == ([], [])
    put(tmp_path / "run.jsonl", 0, 10, age=5.0)
    (((account, age),), notes) = tails.read()
    assert (account.step, notes) == (10, [])
    assert age >= 5.0
    put(tmp_path / "run.jsonl", 0, 20)
    put(tmp_path / "run.rank1.jsonl", 1, 20)
    (tmp_path / "other.json").write_text("{}")
    found, notes = tails.read()
    assert [(a.begun["rank"], a.step) for a, _ in found] == [(0, 20), (1, 20)]
    assert notes == []


def test_of_two_files_of_a_rank_the_one_written_last_is_taken_and_the_other_named(tmp_path: Path) -> None:
    put(tmp_path / "new.jsonl", 0, 3)
    put(tmp_path / "old.jsonl", 0, 900, age=100.0)
    for paths in (["new.jsonl", "old.jsonl"], ["old.jsonl", "new.jsonl"], [""]):
        found, notes = LogTails([tmp_path / p for p in paths]).read()
        assert [a.step for a, _ in found] == [3]
        assert notes == [f"{tmp_path}/old.jsonl is left out: {tmp_path}/new.jsonl is of rank 0, too, and newer"]


def test_what_cannot_be_read_and_what_has_no_log_in_it_is_said(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "other.jsonl").write_text('{"loss": 3}\n')
    found, notes = LogTails([tmp_path / "none.jsonl", tmp_path]).read()
    assert found == []
    assert notes == [
        f"{tmp_path}/none.jsonl cannot be read: No such file or directory",
        f"{tmp_path}/empty.jsonl has no log in it yet",
        f"{tmp_path}/other.jsonl has no log in it",
    ]
