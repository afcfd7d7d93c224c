"""Records: what is printed, saved and read back is the same, and nothing else is taken for one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commlib.bench.results import record
from commlib.bench.results.record import Record, emit, facts, lines, read, write

ROWS = [{"codec": "none", "seconds": 0.1 + 0.2, "ok": True}, {"codec": "onebit", "seconds": 1e-9, "ok": None}]


def sample(**run: object) -> Record:
    return Record("codec", facts(**run), list(ROWS))


def test_what_is_saved_is_read_back_to_the_last_digit(tmp_path: Path) -> None:
    saved = sample(ranks=4, rate="200mbit")
    path = write(saved, tmp_path / "new" / "folder")
    assert path.name.startswith("codec-")
    assert read(path) == [saved]
    assert read(path.parent) == [saved]


def test_no_record_is_written_over_another(tmp_path: Path) -> None:
    paths = {write(sample(ranks=n), tmp_path) for n in range(5)}
    assert len(paths) == 5
    assert sorted(str(r.run["ranks"]) for r in read(tmp_path)) == ["0", "1", "2", "3", "4"]


def test_files_joined_by_cat_are_still_records(tmp_path: Path) -> None:
    both = tmp_path / "both.jsonl"
    both.write_text("\n\n".join([*lines(sample(ranks=2)), *lines(sample(ranks=4))]))
    assert [(r.run["ranks"], r.rows) for r in read(both)] == [(2, ROWS), (4, ROWS)]


def test_every_line_stands_alone() -> None:
    for line, row in zip(lines(sample(ranks=4)), ROWS, strict=True):
        value = json.loads(line)
        assert (value["schema"], value["kind"], value["run"]["ranks"]) == (record.SCHEMA, "codec", 4)
        assert row.items() <= value.items()
        assert {"time", "command", "commlib", "torch", "cpu", "cores"} <= value["run"].keys()


def test_the_table_and_the_lines_come_from_the_same_rows(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    emit(sample(), title="at 200mbit", as_json=False, save=tmp_path, hide=("ok",))
    table = capsys.readouterr().out
    assert "at 200mbit" in table
    assert "onebit" in table
    assert "ok" not in table
    emit(sample(), title="", as_json=True, save=None)
    assert [json.loads(x)["codec"] for x in capsys.readouterr().out.splitlines()] == ["none", "onebit"]
    assert len(read(tmp_path)) == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", ":1: not JSON"),
        ("[1]", ":1: not a row"),
        ('{"schema": 1, "kind": "codec"}', ":1: not a row"),
        ('{"schema": 1, "kind": "weather", "run": {}}', ":1: not a row"),
        ('{"schema": 99, "kind": "codec", "run": {}}', ":1: schema 99; this commlib reads 1"),
        ("", "the files there are empty"),
    ],
)
def test_what_is_no_record_is_named_with_its_line(tmp_path: Path, text: str, said: str) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text(text)
    with pytest.raises(ValueError, match=r"bad\.jsonl") as caught:
        read(bad)
    assert said in str(caught.value)


def test_bytes_that_are_no_text_are_refused_with_the_file(tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"bad\.jsonl: cannot be read"):
        read(tmp_path)


def test_a_folder_with_nothing_in_it_says_how_to_fill_it(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(ValueError, match="--save FOLDER"):
            read(path)


@given(st.text())
def test_any_text_is_read_or_refused_with_a_reason(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.mktemp("any") / "any.jsonl"
    path.write_text(text, encoding="utf-8", newline="")
    with pytest.raises(ValueError, match=r"any\.jsonl"):
        read(path)
