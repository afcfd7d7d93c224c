"""commlib trace merge: one file of several, or one line that says why there is none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from commlib.telemetry.trace import Trace
from tests.support.trace_reader import checked

Call = Callable[..., tuple[int, str, str]]


def saved(folder: Path, rank: int) -> str:
    trace = Trace(rank)
    trace.instant("a", "b")
    trace.save(folder / f"{rank}.json")
    return str(folder / f"{rank}.json")


def test_it_makes_one_file_of_several_which_may_be_the_first(tmp_path: Path, call: Call) -> None:
    files = [saved(tmp_path, rank) for rank in range(3)]
    code, out, _ = call("trace", "merge", *files, "--into", files[0])
    assert (code, out) == (0, f"{files[0]}: 3 traces; https://ui.perfetto.dev opens it\n")
    assert {e["pid"] for e in checked(Path(files[0]))} == {0, 1, 2}


def test_what_cannot_be_merged_is_said_in_a_line_and_nothing_is_written(tmp_path: Path, call: Call) -> None:
    one, into = saved(tmp_path, 4), tmp_path / "all.json"
    for wrong, why in (
        (one, "are both of rank 4: give each rank's file once"),
        ("none.json", "cannot be read: No such"),
    ):
        code, _, err = call("trace", "merge", one, wrong, "--into", str(into))
        assert code == 2
        assert err.startswith("error: ")
        assert why in err
        assert err.count("\n") == 1
    assert not into.exists()
