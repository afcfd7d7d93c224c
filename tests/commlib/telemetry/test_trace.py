"""Traces: what was recorded is in the file, in the Trace Event format, nested on every thread; the newest are kept."""

from __future__ import annotations

import json
import random
import threading
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commlib.errors import CommlibError
from commlib.telemetry.trace import NONE, Trace, TraceFailed, merge
from tests.support.trace_reader import Clock, checked, shown


def test_times_are_microseconds_since_the_first_event_and_tracks_come_as_they_were_used(tmp_path: Path) -> None:
    clock = Clock(100.0)
    trace = Trace(3, clock=clock)
    with trace.measure("compute", "forward", layer="fc1"):
        clock.now = 100.25
        trace.instant("wire", "sent", bytes=7)
    trace.span("wire", "push", 100.125, 100.5, name="w", track=1, begin=None)
    trace.instant("compute", "past", 99.5)
    trace.save(tmp_path / "t.json")
    assert shown(tmp_path / "t.json") == [
        ("wire", "push", 625_000, 375_000, {"name": "w", "track": 1, "begin": None}),
        ("wire", "sent", 750_000, None, {"bytes": 7}),
        ("compute", "past", 0, None, {}),
        ("compute", "forward", 500_000, 250_000, {"layer": "fc1"}),
    ]
    meta = {(e["name"], e["tid"]): e["args"] for e in checked(tmp_path / "t.json") if e["ph"] == "M"}
    assert meta["process_name", 0] == {"name": "rank 3"}
    assert meta["thread_name", 1] == {"name": "wire"}
    assert meta["thread_sort_index", 2] == {"sort_index": 2}
    assert {e["pid"] for e in checked(tmp_path / "t.json")} == {3}


def test_a_given_origin_is_zero(tmp_path: Path) -> None:
    trace = Trace(clock=Clock(), origin=10.0)
    trace.instant("a", "before", 9.5)
    trace.instant("a", "after", 10.000_001_5)
    trace.save(tmp_path / "t.json")
    assert [ts for _, _, ts, _, _ in shown(tmp_path / "t.json")] == [-500_000, 1.5]


def test_spans_that_overlap_are_side_by_side_and_those_that_nest_are_on_one(tmp_path: Path) -> None:
    trace = Trace()
    for begin, end in [(0, 10), (1, 4), (2, 3), (4, 10), (5, 12), (6, 13), (12, 14), (20, 20)]:
        trace.span("wire", f"{begin}-{end}", begin, end)
    trace.instant("wire", "7", 7)
    trace.span("other", "0-1", 0, 1)
    trace.save(tmp_path / "t.json")
    lanes = defaultdict(set)
    for thread, name, *_ in shown(tmp_path / "t.json"):
        lanes[thread].add(name)
    assert lanes == {
        "wire": {"0-10", "1-4", "2-3", "4-10", "7", "12-14", "20-20"},
        "wire (2)": {"5-12"},
        "wire (3)": {"6-13"},
        "other": {"0-1"},
    }


@given(st.integers(0, 1 << 32), st.integers(0, 40), st.sampled_from([1.0, 1e-9, 0.3e-9, 1e-6]))
def test_whatever_was_recorded_nests_and_all_of_it_is_there(
    tmp_path_factory: pytest.TempPathFactory, seed: int, count: int, unit: float
) -> None:
    rng = random.Random(seed)
    trace, path = Trace(), tmp_path_factory.getbasetemp() / "any.json"
    for _ in range(count):
        begin, end = sorted(unit * rng.randrange(30) for _ in range(2))
        if rng.random() < 0.2:
            trace.instant("a", "i", begin)
        else:
            trace.span(rng.choice("abc"), "s", begin, end)
    trace.save(path)
    assert len(shown(path)) == count


def test_details_that_json_lacks_come_as_text(tmp_path: Path) -> None:
    trace = Trace()
    given_ = {
        "nan": float("nan"),
        "inf": -float("inf"),
        "big": 1 << 60,
        "shape": (1, 2),
        "none": None,
        "yes": True,
        "ü": "“",
    }
    trace.instant("a", "b", 0.0, **given_)
    trace.save(tmp_path / "t.json")
    said = {"nan": "nan", "inf": "-inf", "big": str(1 << 60), "shape": "(1, 2)", "none": None, "yes": True, "ü": "“"}
    assert shown(tmp_path / "t.json")[0][-1] == said


def test_an_error_is_among_the_details_of_what_it_ended(tmp_path: Path) -> None:
    trace = Trace()
    with pytest.raises(KeyError), trace.measure("a", "b", n=1):
        raise KeyError("x")
    trace.save(tmp_path / "t.json")
    assert shown(tmp_path / "t.json")[0][-1] == {"n": 1, "error": "KeyError"}


def test_the_newest_are_kept_and_the_others_counted(tmp_path: Path) -> None:
    trace = Trace(limit=3)
    for n in range(3):
        trace.instant("a", str(n), n)
    assert trace.dropped == 0
    for n in range(3, 10):
        trace.instant("a", str(n), n)
    assert trace.dropped == 7
    trace.save(tmp_path / "t.json")
    assert [name for _, name, *_ in shown(tmp_path / "t.json")] == ["7", "8", "9"]
    said = json.loads((tmp_path / "t.json").read_text())
    assert said["otherData"]["ranks"] == {"0": {"dropped": 7}}
    assert {"labels": "7 older events dropped"} in [e["args"] for e in said["traceEvents"]]


def test_threads_add_at_once_while_it_is_saved_and_nothing_is_lost(tmp_path: Path) -> None:
    trace, each = Trace(limit=10_000), 2000

    def add(track: str) -> None:
        for n in range(each):
            with trace.measure(track, str(n)):
                pass

    threads = [threading.Thread(target=add, args=(f"thread {i}",)) for i in range(8)]
    for thread in threads:
        thread.start()
    trace.save(tmp_path / "meanwhile.json")
    for thread in threads:
        thread.join()
    trace.save(tmp_path / "t.json")
    assert trace.dropped == 8 * each - 10_000
    assert len(shown_quickly(tmp_path / "t.json")) == 10_000
    assert json.loads((tmp_path / "meanwhile.json").read_text())


def shown_quickly(path: Path) -> list[dict[str, Any]]:
    return [e for e in json.loads(path.read_text())["traceEvents"] if e["ph"] == "X"]


def test_what_is_off_has_the_same_methods_which_do_nothing(tmp_path: Path) -> None:
    assert Trace.enabled
    assert not NONE.enabled
    NONE.span("a", "b", 2.0, 1.0)
    NONE.instant("a", "b", c=1)
    with NONE.measure("a", "b", c=1), NONE.measure("a", "b"):
        assert NONE.now() <= NONE.now()
    NONE.save(tmp_path / "t.json")
    assert NONE.dropped == 0
    assert list(tmp_path.iterdir()) == []
    public = {name for name in vars(Trace) if not name.startswith("_")}
    assert public == {"enabled", "span", "instant", "measure", "dropped", "save"}


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Trace().span("a", "b", 1.0, 0.5),
        lambda: Trace().span("a", "b", float("nan"), 1.0),
        lambda: Trace().span("a", "b", 0.0, float("inf")),
        lambda: Trace().instant("a", "b", float("nan")),
        lambda: Trace(-1),
        lambda: Trace(limit=0),
    ],
)
def test_what_makes_no_sense_is_refused_at_once(wrong: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=r"span 'b' from|instant 'b' at nan|rank ≥ 0 and a limit ≥ 1"):
        wrong()


def ranks(folder: Path, starts: dict[int, float], **options: Any) -> list[Path]:
    """Files of ranks with one event each, at 1 s of their clocks, which were 0 at these times of day."""
    for rank, start in starts.items():
        trace = Trace(rank, clock=Clock(0.0), wall=Clock(start), **options)
        trace.span("a", "b", 1.0, 2.0)
        trace.save(folder / f"{rank}.json")
    return [folder / f"{rank}.json" for rank in starts]


def test_merged_ranks_are_on_one_time_and_may_be_merged_again(tmp_path: Path) -> None:
    paths = ranks(tmp_path, {0: 1000.5, 1: 1000.0, 2: 1000.25})
    merge(paths[:2], paths[0])
    merge([paths[2], paths[0]], tmp_path / "all.json")
    found = {e["pid"]: e["ts"] for e in checked(tmp_path / "all.json") if e["ph"] == "X"}
    assert found == {0: 500_000, 1: 0, 2: 250_000}
    assert json.loads((tmp_path / "all.json").read_text())["otherData"]["ranks"].keys() == {"0", "1", "2"}


def test_with_a_given_origin_times_stay_as_they_are_and_with_both_there_is_no_common_one(tmp_path: Path) -> None:
    (tmp_path / "given").mkdir()
    given_ = ranks(tmp_path / "given", {0: 1000.5, 1: 1000.0}, origin=0.5)
    merge(given_, tmp_path / "all.json")
    assert [e["ts"] for e in checked(tmp_path / "all.json") if e["ph"] == "X"] == [500_000, 500_000]
    with pytest.raises(TraceFailed, match=r"given/0\.json: with an origin .* no common time"):
        merge([given_[0], *ranks(tmp_path, {5: 1000.0})], tmp_path / "all.json")


def test_two_files_of_one_rank_are_an_error_that_names_them(tmp_path: Path) -> None:
    (one,) = ranks(tmp_path, {4: 0.0})
    two = tmp_path / "two.json"
    two.write_bytes(one.read_bytes())
    with pytest.raises(TraceFailed, match=r"4\.json and .*two\.json are both of rank 4"):
        merge([one, two], tmp_path / "all.json")
    assert not (tmp_path / "all.json").exists()


BAD = [b"", b"[]", b"{}", b"[" * 100_000, b'{"traceEvents": [1], "otherData": {"ranks": {}, "since": null}}', b"\xff"]


@pytest.mark.parametrize("content", BAD, ids=range(len(BAD)))
def test_what_is_no_trace_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "bad.json").write_bytes(content)
    with pytest.raises(TraceFailed, match=r"bad\.json is no trace that was saved here"):
        merge([*ranks(tmp_path, {0: 0.0}), tmp_path / "bad.json"], tmp_path / "all.json")


def test_a_path_that_cannot_be_is_a_named_error_and_what_was_there_stays(tmp_path: Path) -> None:
    with pytest.raises(CommlibError, match=r"cannot be saved to .*none.t\.json: No such file"):
        Trace().save(tmp_path / "none" / "t.json")
    with pytest.raises(CommlibError, match=r"cannot be saved to .*: Is a directory"):
        Trace().save(tmp_path)
    with pytest.raises(CommlibError, match=r"none\.json cannot be read: No such file"):
        merge([tmp_path / "none.json"], tmp_path / "all.json")
    assert list(tmp_path.iterdir()) == []
